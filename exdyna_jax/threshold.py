"""The selection threshold: where it starts and how it follows the density.

A threshold is a scalar of the widest float enabled; it is compared in float32.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp

# The original's online threshold scaling: bands of (selected / wanted) and their factors.
PAPER_TOO_MANY, PAPER_ENOUGH = Fraction("1.1"), Fraction("0.909")
PAPER_UP, PAPER_DRIFT, PAPER_DOWN = 1.005, 1.00125, 0.995


def as_threshold(value: float | jax.Array) -> jax.Array:
  """``value`` as a scalar of the widest float enabled (float64 under ``jax.enable_x64``)."""
  return jnp.asarray(value, jnp.result_type(float))


def paper_initial(k: int) -> float:
  """The original's first threshold, ``1 / (2 sqrt(k))``; it knows nothing of the gradient."""
  return 1 / (2 * math.sqrt(k))


def paper_scaled(threshold: jax.Array, selected: jax.Array, k: int) -> jax.Array:
  """The next threshold by the original's rule.

  With ``e = selected / k``: above 1.1 the threshold grows by 0.5%, within 10% of the target by
  0.125%, and below it shrinks by 0.5%. The drift inside the band keeps the steady density about
  5% low; it is kept because this mode replays the original.

  Args:
    threshold: the threshold used in this step.
    selected: int32, how many indices all workers selected with it.
    k: how many are wanted.

  Returns:
    The threshold of the next step, kept a normal float32 number: a run of all-zero gradients
    cannot drive it to zero, where everything would qualify.
  """
  # Compared as integers: XLA multiplies by 1 / k instead of dividing, and e = 1.1 becomes more.
  too_many = selected > math.floor(PAPER_TOO_MANY * k)
  enough = selected > math.floor(PAPER_ENOUGH * k)
  factor = jnp.where(too_many, PAPER_UP, jnp.where(enough, PAPER_DRIFT, PAPER_DOWN))
  factor = factor.astype(threshold.dtype)
  limits = jnp.finfo(jnp.float32)
  return jnp.clip(threshold * factor, limits.tiny, limits.max)
