"""Checks of the user's arguments: errors name the value and the cure, before anything runs."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp


def _check_static(name: str, value: Any, wanted: str) -> None:
  if isinstance(value, jax.Array):
    raise TypeError(
      f"{name} must be {wanted}, not an array, since array shapes follow from it; got {value!r}."
      f" Under optax.inject_hyperparams, name {name} in static_args."
    )


def check_type(name: str, value: Any, kind: type, wanted: str) -> None:
  """Raises TypeError unless ``value`` is of ``kind``; bool is not a number."""
  _check_static(name, value, wanted)
  if isinstance(value, bool) or not isinstance(value, kind):
    raise TypeError(f"{name} must be {wanted}, got {value!r}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
  """Raises ValueError unless ``value`` is one of ``choices``."""
  if value not in choices:
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_count(name: str, value: Any) -> None:
  """Raises unless ``value`` is an integer of at least 1."""
  check_type(name, value, numbers.Integral, "an integer")
  if value < 1:
    raise ValueError(f"{name} must be at least 1, got {value!r}.")


def check_positive(name: str, value: Any, otherwise: str) -> None:
  """Raises unless ``value`` is None (what that means: ``otherwise``) or positive and finite."""
  if value is None:
    return
  check_type(name, value, numbers.Real, f"a Python number or None ({otherwise})")
  if not 0 < float(value) < math.inf:
    raise ValueError(f"{name} must be positive and finite, or None ({otherwise}), got {value!r}.")


def check_float_dtype(name: str, dtype: Any) -> None:
  """Raises TypeError unless ``dtype`` is a floating-point dtype."""
  wanted = "a floating-point dtype"
  _check_static(name, dtype, wanted)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"{name} must be {wanted}, got {dtype!r}.")
