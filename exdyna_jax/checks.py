"""Checks of the user's arguments: errors name the value and the cure, before anything runs."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def default_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
  """``function`` under JAX's own promotion rules: stricter ones are for the user's code."""

  @functools.wraps(function)
  def promoting(*args, **kwargs):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return function(*args, **kwargs)

  return promoting


def _check_static(name: str, value: Any, wanted: str) -> None:
  if isinstance(value, jax.Array):
    raise TypeError(
      f"{name} must be {wanted}, not an array, since array shapes follow from it; got {value!r}."
      " Under optax.inject_hyperparams, name all numbers and dtypes of this transformation in"
      f" static_args, {name} among them, or wrap only the optimizer behind it."
    )


def check_type(name: str, value: Any, kind: type, wanted: str) -> None:
  """Raises TypeError unless ``value`` is of ``kind``; bool is not a number."""
  _check_static(name, value, wanted)
  if isinstance(value, bool) or not isinstance(value, kind):
    raise TypeError(f"{name} must be {wanted}, got {value!r}.")


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> None:
  """Raises ValueError unless ``value`` is one of ``choices``."""
  if value not in choices:
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.{hint}")


def check_integer(name: str, value: Any) -> int:
  """``value`` as an int; raises unless it is an integer."""
  check_type(name, value, numbers.Integral, "an integer")
  return int(value)


def check_count(name: str, value: Any) -> int:
  """``value`` as an int; raises unless it is an integer of at least 1."""
  count = check_integer(name, value)
  if count < 1:
    raise ValueError(f"{name} must be at least 1, got {value!r}.")
  return count


def check_positive(name: str, value: Any, otherwise: str) -> float | None:
  """``value`` as a float; raises unless it is None (``otherwise``) or positive and finite."""
  if value is None:
    return None
  check_type(name, value, numbers.Real, f"a Python number or None ({otherwise})")
  if not 0 < float(value) < math.inf:
    raise ValueError(f"{name} must be positive and finite, or None ({otherwise}), got {value!r}.")
  return float(value)


def check_float_dtype(name: str, dtype: Any) -> Any:
  """``dtype`` as JAX will have it; raises TypeError unless it is a float of 16 bits or more."""
  wanted = "a floating-point dtype of at least 16 bits"
  _check_static(name, dtype, wanted)
  if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
    raise TypeError(f"{name} must be {wanted}, got {dtype!r}.")
  return jax.dtypes.canonicalize_dtype(dtype)
