"""The k largest elements of a worker's vector, and indices that are taken from a list."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from . import accumulator
from .accumulator import Accumulator
from .density import Density, target_at, target_range
from .ranks import Ranks, rank_of


def k_largest(acc: Accumulator, density: Density, step: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The k elements of largest magnitude; of equal ones the first. NaN is larger than anything.

  Args:
    acc: ``[N]``.
    density: its highest value sizes the list.
    step: int32 scalar, for k.

  Returns:
    How many there are, int32 scalar: k, or fewer where fewer are not zero. And the list of them,
    int32, longer where the density was higher or will be.
  """
  size = accumulator.size(acc)
  magnitudes, indices = lax.top_k(jnp.abs(accumulator.whole(acc)), target_range(density, size)[1])
  nonzero = jnp.sum(~(magnitudes <= 0), dtype=jnp.int32)
  return jnp.minimum(nonzero, target_at(density, step, size)), indices


def take_from(indices: jax.Array, size: int) -> Callable[[Ranks], jax.Array]:
  """`Selection.take` for a list of ``indices``, int32 ``[m]``, in a vector of ``size``."""

  def take(wanted: Ranks) -> jax.Array:
    rank = rank_of(wanted)
    listed = indices.at[rank].get(mode="fill", fill_value=size)
    return jnp.where(rank < wanted.found, listed, size)

  return take
