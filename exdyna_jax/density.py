"""The density that the user asks for: a number, or a schedule of the step."""

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .checks import as_float, check_type

# A schedule's range decides array shapes, so it is looked at before training: in all of the first
# steps, in which peaks may come and go, and then at growing distances.
PROBED_STEPS = np.union1d(np.arange(2**14), 2 ** np.arange(31)).astype(np.int32)

# What JAX raises where a schedule needs the number of a traced step.
UNTRACEABLE = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)


class Density(NamedTuple):
  """A checked density."""

  at: Callable[[jax.Array], jax.Array] | None  # the schedule; None for a number
  lowest: float  # the number, or the schedule's least value
  highest: float  # the number, or the schedule's largest value

  @property
  def is_one(self) -> bool:
    """True if everything is sent in every step, for certain."""
    return self.at is None and self.lowest == 1


def parse_density(density: Any) -> Density:
  """Checks a density or a schedule; raises TypeError or ValueError with the value and the cure."""
  if not callable(density):
    wanted = "a Python number in (0, 1], such as 0.001 for 0.1%, or a schedule"
    check_type("density", density, numbers.Real, wanted)
    value = _check_range(density)
    return Density(None, value, value)
  # At once, even where the transformation is made inside of a jitted function.
  with jax.ensure_compile_time_eval():
    values = _values(density)
  for step, value in zip(PROBED_STEPS, values, strict=True):
    _check_range(value, step)
  return Density(density, float(values.min()), float(values.max()))


def _values(density: Callable[[jax.Array], Any]) -> np.ndarray:
  """What a schedule says at `PROBED_STEPS`."""
  try:
    values = jax.vmap(density)(jnp.asarray(PROBED_STEPS))
  except UNTRACEABLE as error:
    raise TypeError(
      "density is called with a traced step, on which Python's if, float() and NumPy do not work:"
      " use jnp.where(step < 10, 0.1, 0.01), or optax.join_schedules. It raises here:"
      f" {str(error).splitlines()[0]}"
    ) from error
  except TypeError as error:
    raise TypeError(
      f"density is called with the number of steps taken, and raises here: {error}. Pass what makes"
      " a number of it, such as optax.exponential_decay(0.25, 1000, 0.004), not"
      " optax.exponential_decay."
    ) from error
  if not isinstance(values, jax.Array) or jnp.iscomplexobj(values):
    kind = values.dtype if isinstance(values, jax.Array) else type(values).__name__
    raise TypeError(f"density must make a real number of a step, got {kind}.")
  if values.ndim > 1:
    raise TypeError(f"density must make a scalar of a step, got shape {values.shape[1:]}.")
  return np.asarray(values, np.float64)


def _check_range(density: Any, step: int | None = None) -> float:
  value = as_float(density)
  if not 0 < value <= 1:
    where = "" if step is None else f" at step {step}"
    ends_at_zero = step is not None and value == 0
    hint = " Give the schedule an end that is not zero: end_value= or alpha= in optax."
    raise ValueError(
      f"density must be in (0, 1], got {value:g}{where}. 0.001 sends 0.1% of the gradient."
      f"{hint if ends_at_zero else ''}"
    )
  return value


def target_count(density: float, size: int) -> int:
  """How many of ``size`` elements a density asks for: ``k = max(1, int(density * size))``."""
  return max(1, int(density * size))


def target_range(density: Density, size: int) -> tuple[int, int]:
  """The least and the largest `target_at` of all steps, known beforehand."""
  if density.at is None:
    return (target_count(density.lowest, size),) * 2
  # As it is computed in each step: in float32.
  low, high = (int(np.float32(size) * np.float32(d)) for d in (density.lowest, density.highest))
  return min(max(low, 1), size), min(max(high, 1), size)


def target_at(density: Density, step: jax.Array, size: int) -> int | jax.Array:
  """`target_count` in ``step``: a Python int, or an int32 scalar if the density is scheduled."""
  if density.at is None:
    return target_count(density.lowest, size)
  wanted = jnp.asarray(density.at(step), jnp.float32) * size
  # Messages have no room for a peak that was not seen beforehand.
  return jnp.clip(wanted.astype(jnp.int32), 1, target_range(density, size)[1])
