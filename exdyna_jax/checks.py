"""Checks of the user's arguments: errors name the value and the cure, before anything runs."""

import math
import numbers
from typing import Any

import jax.numpy as jnp


def check_density(density: Any) -> float:
  """``density`` as a float; raises unless it is a number in (0, 1]."""
  if isinstance(density, bool) or not isinstance(density, numbers.Real):
    raise TypeError(
      f"density must be a Python number in (0, 1], got {density!r}: it decides array shapes. Under"
      " optax.inject_hyperparams, name it in static_args."
    )
  value = float(density)
  if not 0 < value <= 1:
    raise ValueError(f"density must be in (0, 1], got {density!r}. 0.001 sends 0.1% a step.")
  return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
  """Raises ValueError unless ``value`` is one of ``choices``."""
  if value not in choices:
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_count(name: str, value: Any) -> None:
  """Raises unless ``value`` is an integer of at least 1."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise TypeError(f"{name} must be an integer, got {value!r}.")
  if value < 1:
    raise ValueError(f"{name} must be at least 1, got {value!r}.")


def check_positive(name: str, value: Any, otherwise: str) -> None:
  """Raises unless ``value`` is None (what that means: ``otherwise``) or positive and finite."""
  if value is None:
    return
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise TypeError(f"{name} must be a Python number or None ({otherwise}), got {value!r}.")
  if not 0 < float(value) < math.inf:
    raise ValueError(f"{name} must be positive and finite, or None ({otherwise}), got {value!r}.")


def check_float_dtype(name: str, dtype: Any) -> None:
  """Raises TypeError unless ``dtype`` is a floating-point dtype."""
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"{name} must be a floating-point dtype, got {dtype!r}.")
