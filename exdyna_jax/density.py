"""The density that the user asks for: a number, or a schedule of the step."""

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .checks import as_float, check_type

# A schedule's range decides array shapes, so it is looked at before training, at these steps.
PROBED_STEPS = (0, *(2**power for power in range(31)))


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
    value = _check_range(density, "")
    return Density(None, value, value)
  # Not traced, even where the transformation is made inside of a jitted function.
  with jax.ensure_compile_time_eval():
    values = [_check_range(_call(density, t), f" at step {t}") for t in PROBED_STEPS]
  return Density(density, min(values), max(values))


def _call(density: Callable[[jax.Array], Any], step: int) -> Any:
  try:
    return density(jnp.int32(step))
  except TypeError as error:
    raise TypeError(
      f"density is called with the number of steps taken, and raises here: {error}. Pass what makes"
      " a number of it, such as optax.exponential_decay(0.25, 1000, 0.004), not"
      " optax.exponential_decay."
    ) from error


def _check_range(density: Any, where: str) -> float:
  if density is None or jnp.ndim(density):
    found = "None" if density is None else f"shape {jnp.shape(density)}"
    raise TypeError(f"density must be a scalar, got {found}{where}.")
  value = as_float(density)
  if not 0 < value <= 1:
    raise ValueError(
      f"density must be in (0, 1], got {value:g}{where}. 0.001 sends 0.1% of the gradient."
    )
  return value


def target_count(density: float, size: int) -> int:
  """How many of ``size`` elements a density asks for: ``k = max(1, int(density * size))``."""
  return max(1, int(density * size))


def target_at(density: Density, step: jax.Array, size: int) -> int | jax.Array:
  """`target_count` in ``step``: a Python int, or an int32 scalar if the density is scheduled."""
  if density.at is None:
    return target_count(density.lowest, size)
  wanted = jnp.asarray(density.at(step), jnp.float32) * size
  return jnp.clip(wanted.astype(jnp.int32), 1, size)
