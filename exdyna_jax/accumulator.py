"""``gradient + residual``, computed where it is read: nothing of N elements is made for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .flat import cast


class Accumulator(NamedTuple):
  """A vector ``[N]`` that is an elementwise function of others."""

  parts: tuple[jax.Array, ...]  # [N] each
  combine: Callable[..., jax.Array]
  layers: tuple[int, ...] = ()  # sizes of the leaves of which the vector is made, if known


def accumulate(
  grads: jax.Array, residual: jax.Array, layers: tuple[int, ...] = (), *, saturate: bool
) -> Accumulator:
  """``grads + residual`` in the dtype of ``residual``; `cast` says what ``saturate`` does."""

  def combine(grads, residual):
    return cast(grads + residual.astype(grads.dtype), residual.dtype, saturate=saturate)

  return Accumulator((grads, residual), combine, layers)


def made(vector: jax.Array, layers: tuple[int, ...] = ()) -> Accumulator:
  """A vector that is there already."""
  return Accumulator((vector,), lambda x: x, layers)


def size(acc: Accumulator) -> int:
  """The number of elements N."""
  return acc.parts[0].shape[0]


def read(acc: Accumulator, start: jax.Array, length: int) -> jax.Array:
  """The elements ``[start, start + length)``, which must lie within the vector."""
  return acc.combine(*(lax.dynamic_slice(part, (start,), (length,)) for part in acc.parts))


def at(acc: Accumulator, indices: jax.Array) -> jax.Array:
  """The elements at ``indices``, int32 ``[m]``, which must lie within the vector."""
  return acc.combine(*(part.at[indices].get(mode="promise_in_bounds") for part in acc.parts))


def whole(acc: Accumulator) -> jax.Array:
  """All elements, as an array."""
  return acc.combine(*acc.parts)


def padded(acc: Accumulator, length: int) -> Accumulator:
  """With zeros behind it, up to ``length``."""
  more = (0, length - size(acc))
  return acc._replace(parts=tuple(jnp.pad(part, more) for part in acc.parts))


def zeros(acc: Accumulator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Zeros that vary over the mesh as the vector does, which the carry of a loop over it must."""
  like = acc.combine(*(part[:0] for part in acc.parts))
  return jnp.zeros_like(like, dtype, shape=shape)
