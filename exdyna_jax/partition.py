"""Who owns what: boundaries between partitions, int32 ``[n + 1]`` in blocks.

- ``paper``: the original's sweep: one block at a time between neighbours; replays it.
- ``balanced``: equal shares of a moving average of what each block has been picked for. The counts
  come from the gathered indices: nothing more is communicated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .blocks import WORD, Blocks, even_blocks, paper_blocks
from .integers import mul_div

# The original moves a block where one neighbour is above and the other below this band around the
# mean count, and leaves every partition a quarter of its equal share.
PAPER_ABOVE, PAPER_BELOW = 1.05, 0.95238
PAPER_MIN_SHARE = 1 / 4

# Weight of the past in the moving average of a block's count, about ten steps long: shorter ones
# chase noise, longer ones follow training too late (`benchmarks/control.py`).
LOAD_DECAY = 0.9
UNKNOWN = 1e-20  # of a block before the first step; one pick is at least 1e-10


def owned_partition(step: jax.Array, rank: jax.Array, num_workers: int) -> jax.Array:
  """Partition that worker ``rank`` owns in ``step``: they rotate, one place a step."""
  return (step % num_workers + rank) % num_workers


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


def block_counts(indices: jax.Array, blocks: Blocks) -> jax.Array:
  """How many of ``indices`` lie in each block, float32 ``[num_blocks]``; N counts nowhere."""
  block = jnp.minimum(indices // blocks.block_size, blocks.num_blocks - 1)
  block = jnp.where(indices < blocks.size, block, blocks.num_blocks)
  return jnp.zeros((blocks.num_blocks,), jnp.float32).at[block].add(1.0, mode="drop")


def expected_loads(
  loads: jax.Array,
  sent: jax.Array,
  counts: jax.Array,
  sent_counts: jax.Array,
  edges: jax.Array,
  k: int | jax.Array,
) -> jax.Array:
  """The moving average of the counts per block, one step on.

  Counts are taken relative to what was asked for: the many picks of a dense start would outweigh
  those of a hundred steps after it.

  Args:
    loads: float32 ``[num_blocks]``, the average so far.
    sent: float32 ``[num_blocks]``, indices sent from each block.
    counts: int32 ``[n]``, indices selected in each partition, sent or not.
    sent_counts: int32 ``[n]``, indices sent of each partition.
    edges: int32 ``[n + 1]``, the partitions of this step.
    k: how many were asked for.

  Returns:
    float32 ``[num_blocks]``, counts over k; ``loads`` if nothing was selected.
  """
  # What exceeds the capacity is an even stride of what was found, so it scales up.
  share = counts / jnp.maximum(sent_counts, 1).astype(jnp.float32)
  block = jnp.arange(loads.shape[0])
  owner = jnp.sum(edges[1:-1, None] <= block[None, :], axis=0)
  found = sent * share[owner] / jnp.asarray(k, jnp.float32)
  return jnp.where(jnp.any(counts > 0), LOAD_DECAY * loads + (1 - LOAD_DECAY) * found, loads)


def equal_loads(blocks: Blocks) -> jax.Array:
  """The loads before the first step, which whatever is found outweighs."""
  return jnp.full((blocks.num_blocks,), UNKNOWN, jnp.float32)


def check_loads(loads: jax.Array, blocks: Blocks, num_blocks: int) -> None:
  """Raises ValueError unless ``loads`` were made for this cut."""
  if loads.shape[0] != blocks.num_blocks:
    raise ValueError(
      f"the state was made for {loads.shape[0]} blocks, but num_blocks={num_blocks} makes"
      f" {blocks.num_blocks}. Keep num_blocks, or make the state anew with init."
    )


def balanced_boundaries(loads: jax.Array, num_workers: int) -> jax.Array:
  """Boundaries at equal shares of the running sum of ``loads``, at least one block each.

  Args:
    loads: float32 ``[num_blocks]``, not negative.
    num_workers: n.

  Returns:
    int32 ``[n + 1]``. With fewer blocks than workers, one block each for the first ones.
  """
  num_blocks = loads.shape[0]
  if num_blocks < num_workers:
    return equal_boundaries(num_blocks, num_workers)
  ends = jnp.cumsum(loads)
  partition = jnp.arange(num_workers + 1, dtype=jnp.int32)
  wanted = partition[1:-1] * (ends[-1] / num_workers)
  # The end of a block that is nearest to each wanted sum; half of the block decides.
  middles = ends - loads / 2
  inner = jnp.sum(middles[:, None] < wanted[None, :], axis=0, dtype=jnp.int32)
  edges = jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.full(1, num_blocks, jnp.int32)])
  # At least one block each: b[p] - p must not fall, and must leave a block for all that follow.
  slack = jnp.minimum(jax.lax.cummax(edges - partition), num_blocks - num_workers)
  return slack + partition


class Rule(NamedTuple):
  """How partitions follow the load; ``RULES`` has all of them."""

  # (N, wanted number of blocks) -> the cut. Not a function of n, which may change between runs.
  cut: Callable[[int, int], Blocks]
  # (indices, blocks) -> what `adapt` needs, summed over the messages
  observe: Callable[[jax.Array, Blocks], jax.Array]
  # (boundaries, loads, observed, counts, sent counts, k, blocks), the counts by partition
  # -> boundaries and loads of the next step
  adapt: Callable[..., tuple[jax.Array, jax.Array]]


def _paper_cut(size, num_blocks):
  cut = paper_blocks if size >= WORD * num_blocks else even_blocks
  return cut(size, num_blocks)


def _paper_adapt(boundaries, loads, observed, counts, sent, k, blocks):
  return paper_boundaries(boundaries, counts, blocks), loads


def _balanced_adapt(boundaries, loads, observed, counts, sent, k, blocks):
  loads = expected_loads(loads, observed, counts, sent, boundaries, k)
  return balanced_boundaries(loads, counts.shape[0]), loads


def _nothing(*args):
  return jnp.zeros((0,), jnp.float32)


RULES = {
  "paper": Rule(_paper_cut, _nothing, _paper_adapt),
  "balanced": Rule(even_blocks, block_counts, _balanced_adapt),
}
