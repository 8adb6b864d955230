"""Who owns what: boundaries between partitions, int32 ``[n + 1]`` in blocks."""

import jax
import jax.numpy as jnp

from .blocks import Blocks
from .integers import mul_div

# The original moves a block where one neighbour is above and the other below this band around the
# mean count, and leaves every partition a quarter of its equal share.
PAPER_ABOVE, PAPER_BELOW = 1.05, 0.95238
PAPER_MIN_SHARE = 1 / 4


def owned_partition(step: jax.Array, rank: jax.Array, num_workers: int) -> jax.Array:
  """Partition that worker ``rank`` owns in ``step``: they rotate, one place a step."""
  return (step + rank) % num_workers


def by_partition(counts: jax.Array, step: jax.Array) -> jax.Array:
  """``counts [n]`` of the workers in ``step``, re-ordered by the partition they owned."""
  return jnp.roll(counts, step % counts.shape[0])


def equal_boundaries(num_blocks: int, num_workers: int) -> jax.Array:
  """Equal partitions; the first ``num_blocks % num_workers`` own one block more."""
  partition = jnp.arange(num_workers + 1, dtype=jnp.int32)
  share, rest = divmod(num_blocks, num_workers)
  return partition * share + jnp.minimum(partition, rest)


def paper_boundaries(boundaries: jax.Array, counts: jax.Array, blocks: Blocks) -> jax.Array:
  """The original's dynamic partition allocation: one sweep over neighbouring partitions.

  From left to right, one block moves from a partition above the band to its neighbour below it,
  and the counts are corrected by the mean count of a block before the next pair is looked at.

  Args:
    boundaries: int32 ``[n + 1]``, the partitions of this step.
    counts: int32 ``[n]``, indices selected in each partition.
    blocks: the block geometry.

  Returns:
    int32 ``[n + 1]``, the partitions of the next step.
  """
  n = counts.shape[0]
  total = jnp.sum(counts, dtype=jnp.int32)
  mean = jnp.maximum(total // n, 1)
  shift = mul_div(total, blocks.block_size, max(blocks.size, 1))
  min_blocks = PAPER_MIN_SHARE * blocks.num_blocks / n

  def visit(i, carry):
    edges, counts = carry
    left, right = counts[i] / mean, counts[i + 1] / mean
    blocks_left, blocks_right = edges[i + 1] - edges[i], edges[i + 2] - edges[i + 1]
    give = (left > PAPER_ABOVE) & (right < PAPER_BELOW) & (blocks_left - 1 >= min_blocks)
    take = (left < PAPER_BELOW) & (right > PAPER_ABOVE) & (blocks_right - 1 >= min_blocks)
    move = take.astype(jnp.int32) - give.astype(jnp.int32)
    moved_counts = counts.at[i].add(move * shift).at[i + 1].add(-move * shift)
    return edges.at[i + 1].add(move), moved_counts

  return jax.lax.fori_loop(0, n - 1, visit, (boundaries, counts))[0]
