"""Block geometry: the flat vector is cut into blocks, partitions are runs of whole blocks.

A partition boundary is a block number ``b`` in ``[0, num_blocks]``. All positions are kept in
blocks and turned into elements only here, so that the integers stay small.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Blocks of whole 32-bit words: a mask of a block packs into words without remainder.
WORD = 32


class Blocks(NamedTuple):
  """A static cut of ``[0, size)`` into blocks."""

  size: int  # elements N
  block_size: int  # elements per block
  num_blocks: int  # boundaries run from 0 to this


def paper_blocks(size: int, num_blocks: int) -> Blocks:
  """The original's cut: ``size // num_blocks`` rounded down to whole words.

  What is left over behind the last block belongs to whoever owns that block; with
  ``size = 65535`` and 1024 blocks this tail is half of the vector. Needs
  ``size >= WORD * num_blocks``.
  """
  return Blocks(size, size // num_blocks // WORD * WORD, num_blocks)


def even_blocks(size: int, num_blocks: int) -> Blocks:
  """At most ``num_blocks`` equal blocks, the last one possibly shorter; any ``size``."""
  block_size = max(-(-size // num_blocks), 1)
  if size >= WORD * num_blocks:  # else, finer blocks balance better than aligned ones
    block_size = -(-block_size // WORD) * WORD
  return Blocks(size, block_size, -(-size // block_size))


def element_range(
  blocks: Blocks, boundaries: jax.Array, partition: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Elements ``[start, end)`` of a partition, as int32 scalars.

  The block behind the last one starts at ``size``: the last partition owns a tail, if any, and
  empty partitions at the end are empty. The last partition ends at ``size`` also if the boundaries
  were made for another number of blocks.
  """
  edge = jax.lax.dynamic_slice(boundaries, (partition,), (2,))
  element = jnp.where(edge >= blocks.num_blocks, blocks.size, edge * blocks.block_size)
  is_last = partition == boundaries.shape[0] - 2
  return element[0], jnp.where(is_last, blocks.size, element[1])
