"""Checks of the user's arguments: errors name the value and the cure, before anything runs."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What an int32 holds, and what a random seed has room for.
LARGEST = 2**31 - 1
SEEDS = (-(2**31), 2**32 - 1)


def default_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
  """``function`` under JAX's own promotion rules: stricter ones are for the user's code."""

  @functools.wraps(function)
  def promoting(*args, **kwargs):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return function(*args, **kwargs)

  return promoting


def _check_static(name: str, value: Any, wanted: str) -> None:
  if isinstance(value, (jax.Array, np.ndarray)):
    raise TypeError(
      f"{name} must be {wanted}, not an array, for it decides what is compiled; got {value!r}."
      " Under optax.inject_hyperparams, name all numbers and dtypes of this transformation in"
      f" static_args, {name} among them, or wrap only the optimizer behind it."
    )


def check_type(name: str, value: Any, kind: type, wanted: str) -> None:
  """Raises TypeError unless ``value`` is of ``kind``; bool is not a number."""
  _check_static(name, value, wanted)
  if isinstance(value, bool) or not isinstance(value, kind):
    raise TypeError(f"{name} must be {wanted}, got {value!r}.")


def check_order(call: str, tree: Any, kind: type, other: Any) -> None:
  """Raises TypeError if ``tree`` is of the ``kind`` that the ``other`` argument should be."""
  # By their types: a whole state would hide the message.
  if isinstance(tree, kind) and not isinstance(other, kind):
    raise TypeError(
      f"the arguments of {call} are swapped: they are of {type(tree).__name__} and"
      f" {type(other).__name__}."
    )


def check_choice(name: str, value: Any, choices: tuple[str, ...], hint: str = "") -> None:
  """Raises unless ``value`` is one of ``choices``."""
  wanted = f"one of {', '.join(map(repr, choices))}"
  _check_static(name, value, wanted)
  if value not in choices:
    raise ValueError(f"{name} must be {wanted}, got {value!r}.{hint}")


def check_integer(name: str, value: Any, least: int, most: int) -> int:
  """``value`` as an int; raises unless it is an integer in ``[least, most]``."""
  check_type(name, value, numbers.Integral, "an integer")
  if value < least:
    raise ValueError(f"{name} must be at least {least}, got {value!r}.")
  if value > most:
    raise ValueError(f"{name} must be at most {most}, got {value!r}.")
  return int(value)


def check_count(name: str, value: Any) -> int:
  """``value`` as an int; raises unless it is an integer of at least 1, within an int32."""
  return check_integer(name, value, 1, LARGEST)


def check_seed(name: str, value: Any) -> int:
  """``value`` as an int; raises unless it is an integer of 32 bits."""
  # JAX drops the other bits of larger ones in silence.
  return check_integer(name, value, *SEEDS)


def check_positive(name: str, value: Any, otherwise: str = "") -> float | None:
  """``value`` as a float; raises unless it is positive and finite, or None if ``otherwise``."""
  if value is None and otherwise:
    return None
  none = f" or None ({otherwise})" if otherwise else ""
  check_type(name, value, numbers.Real, f"a Python number{none}")
  number = as_float(value)
  if not 0 < number < math.inf:
    raise ValueError(f"{name} must be positive and finite{none and ','}{none}, got {number!r}.")
  return number


def as_float(value: Any) -> float:
  """``value`` as a float; an integer that is too large for one becomes infinite."""
  try:
    return float(value)
  except OverflowError:
    return math.copysign(math.inf, value > 0 or -1)


def check_float_dtype(name: str, dtype: Any) -> Any:
  """``dtype`` as JAX will have it; raises TypeError unless it is a float of 16 bits or more."""
  wanted = "a floating-point dtype of at least 16 bits"
  _check_static(name, dtype, wanted)
  if not _is_wide_float(dtype):
    raise TypeError(f"{name} must be {wanted}, such as jnp.float32, got {dtype!r}.")
  return jax.dtypes.canonicalize_dtype(dtype)


def _is_wide_float(dtype: Any) -> bool:
  if dtype is None:  # float64 to NumPy
    return False
  try:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16
  except (TypeError, ValueError):  # no dtype at all
    return False
