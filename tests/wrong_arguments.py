"""Wrong arguments: the part of `misuses` that is noticed when a transformation is made."""

import numpy as np
import optax
from traced import PARAMS, Misuse, N, make, train
from workers import AXIS

from exdyna_jax import dense, exdyna, hard_threshold

NO_DENSITY = "density must be a Python number in (0, 1]"
OUT_OF_RANGE = "density must be in (0, 1]"
STATIC = "not an array, for it decides what is compiled"
CHOICE = "threshold must be one of"

WRONG_ARGUMENTS = {
  "a density in percent": Misuse(
    lambda: make(density=5), ValueError, OUT_OF_RANGE, "0.001 sends 0.1% of the gradient",
  ),
  "a density as text": Misuse(
    lambda: make(density="0.1%"), TypeError, NO_DENSITY, "such as 0.001 for 0.1%",
  ),
  "axis before density": Misuse(
    lambda: exdyna("data", 0.1), TypeError, NO_DENSITY, "got 'data'",
  ),
  "a maker of schedules as density": Misuse(
    lambda: make(density=optax.exponential_decay),
    TypeError, "density is called with the number of steps taken", "optax.exponential_decay(0.25, ",
  ),
  "a density schedule with an if": Misuse(
    lambda: make(density=lambda step: 0.1 if step < 10 else 0.01),
    TypeError, "density is called with a traced step", "jnp.where(step < 10, 0.1, 0.01)",
  ),
  "a density schedule that ends at zero": Misuse(
    lambda: make(density=optax.cosine_decay_schedule(0.5, 30)),
    ValueError, "density must be in (0, 1]", "alpha= in optax",
  ),
  "a density for dense": Misuse(
    lambda: dense(density=0.1, axis_name=AXIS),
    TypeError, "got an unexpected keyword argument 'density'", "dense()",
  ),
  "a mask for other parameters": Misuse(
    lambda: make(dense_mask={"bias": True}).init(PARAMS),
    ValueError, "dense_mask has the structure", "A function of the tree always fits",
  ),
  "a mask for a leaf": Misuse(
    lambda: make(dense_mask=lambda x: x.ndim < 2).init(PARAMS),
    TypeError, "dense_mask is called with the whole tree", "A function of a leaf goes through jax",
  ),
  "a mask of everything": Misuse(
    lambda: make(dense_mask=True).init(PARAMS),
    ValueError, "dense_mask leaves no element", "use exdyna_jax.dense(axis_name)",
  ),
  "a limit to skips where nothing is skipped": Misuse(
    lambda: make(max_consecutive_skips=3, nonfinite="propagate"),
    ValueError, "max_consecutive_skips=3 needs nonfinite='skip'", "Leave one of them out",
  ),
  "hyperparameters injected": Misuse(
    lambda: train(optax.inject_hyperparams(exdyna)(0.1, AXIS, num_workers=N)),
    TypeError, STATIC, "name all numbers and dtypes of this transformation in static_args",
  ),
  "an array as number of workers": Misuse(
    lambda: make(num_workers=np.array(N)), TypeError, STATIC, "num_workers must be an integer",
  ),
  "an unknown rule": Misuse(
    lambda: make(threshold="newton"), ValueError, CHOICE, "'paper', 'secant', 'in_step', got",
  ),
  "a number as rule": Misuse(
    lambda: make(threshold=0.1), ValueError, CHOICE, "A number goes into initial_threshold",
  ),
  "neither density nor threshold": Misuse(
    lambda: hard_threshold(None, AXIS),
    ValueError, "hard_threshold needs a density or a threshold", "got None for both",
  ),
  "a capacity without a density": Misuse(
    lambda: hard_threshold(None, AXIS, threshold=1.0, capacity_factor=2.0),
    ValueError, "capacity_factor=2.0 needs a density", "leave capacity_factor out",
  ),
}  # fmt: skip
