"""A slow, obvious ExDyna in NumPy, to hold the fast one against.

All n workers live in one process as the rows of an array, nothing is compiled, and every rule is
written the way it is described: the original ("paper") partition sweep and threshold rule, with
this library's additions around them (geometry for small vectors, capacity, non-finite gradients).
`test_oracle.py` holds it against recorded runs of the original implementation.
"""

import math
from typing import NamedTuple

import numpy as np

ALIGNMENT = 32  # blocks are multiples of this many elements, where the vector is large enough
DEFAULT_NUM_BLOCKS = 1024

# A partition is overloaded or underloaded when its count lies beyond these multiples of the mean.
OVERLOADED, UNDERLOADED = 1.05, 0.95238
GOLDEN = 2654435769  # 2**32 over the golden ratio: its multiples modulo 2**32 are spread evenly
MIN_SHARE = 4  # a partition gives blocks away down to 1/MIN_SHARE of the equal share

# The threshold's three gains, by the ratio of picked to wanted entries.
RATIO_HIGH, RATIO_LOW = 1.1, 0.909
GAIN_HIGH, GAIN_IN_BAND, GAIN_LOW = 1.005, 1.00125, 0.995


class Blocks(NamedTuple):
  """How the flat vector is cut into blocks, the unit in which partitions grow and shrink."""

  size: int  # elements in the vector
  block_size: int  # elements in a block, the last one excepted
  num_blocks: int  # the last block may be longer (paper) or shorter (even) than the others


class State(NamedTuple):
  """What all workers carry from step to step; all but `residual` is common to them."""

  step: int  # steps done; skipped steps do not count
  residual: np.ndarray  # float32 [n, N], what each worker has not sent yet
  threshold: float  # for the next step
  boundaries: list[int]  # [n + 1] in blocks, for the next step
  skipped: int = 0  # steps skipped so far


def paper_blocks(size, num_blocks=DEFAULT_NUM_BLOCKS):
  """The original's geometry: rounded-down blocks, and a tail that the last partition also owns."""
  if size < ALIGNMENT * num_blocks:
    raise ValueError(f"{size} elements are too few for {num_blocks} blocks of {ALIGNMENT}.")
  return Blocks(size, size // num_blocks // ALIGNMENT * ALIGNMENT, num_blocks)


def even_blocks(size, num_blocks=DEFAULT_NUM_BLOCKS):
  """Geometry for any size: rounded-up blocks, of which only the last may be partial."""
  block_size = max(math.ceil(size / num_blocks), 1)
  if size >= ALIGNMENT * num_blocks:
    block_size = math.ceil(block_size / ALIGNMENT) * ALIGNMENT
  return Blocks(size, block_size, math.ceil(size / block_size))


def geometry(size, num_blocks=DEFAULT_NUM_BLOCKS):
  """Blocks of paper mode: the original's wherever the original works, else the even ones."""
  if size >= ALIGNMENT * num_blocks:
    return paper_blocks(size, num_blocks)
  return even_blocks(size, num_blocks)


def position(blocks, boundary):
  """The element at which block `boundary` starts; past the last block, the end of the vector."""
  return blocks.size if boundary >= blocks.num_blocks else boundary * blocks.block_size


def initial_boundaries(num_blocks, n):
  """Equal runs of blocks; the first `num_blocks % n` partitions own one more."""
  boundaries = [0]
  for p in range(n):
    boundaries.append(boundaries[-1] + num_blocks // n + (1 if p < num_blocks % n else 0))
  return boundaries


def paper_sweep(boundaries, counts_by_partition, blocks):
  """One pass of the original's balancing, left to right, one block per pair of neighbours.

  A block moves only between an overloaded and an underloaded neighbour, and its expected share of
  the entries moves with it at once, so that the comparison with the next neighbour already sees it.
  """
  n = len(boundaries) - 1
  counts = [int(count) for count in counts_by_partition]
  lengths = [boundaries[p + 1] - boundaries[p] for p in range(n)]
  total = sum(counts)
  mean = max(int(total / n), 1)
  shift = int(blocks.block_size * total / max(blocks.size, 1))
  min_length = blocks.num_blocks / (MIN_SHARE * n)

  for i in range(n - 1):
    left, right = counts[i] / mean, counts[i + 1] / mean
    if left > OVERLOADED and right < UNDERLOADED and lengths[i] - 1 >= min_length:
      moved = 1  # to the right
    elif left < UNDERLOADED and right > OVERLOADED and lengths[i + 1] - 1 >= min_length:
      moved = -1  # to the left
    else:
      moved = 0
    lengths[i] -= moved
    lengths[i + 1] += moved
    counts[i] -= moved * shift
    counts[i + 1] += moved * shift

  return [sum(lengths[:p]) for p in range(n + 1)]


def target(size, density):
  """How many entries all workers together should send."""
  return max(1, int(density * size))


def initial_threshold(k):
  """The original's first threshold, whatever the scale of the gradients."""
  return 1.0 / (2.0 * math.sqrt(k))


def paper_threshold(threshold, total, k):
  """The next threshold, after a step that picked `total` entries where `k` were wanted."""
  ratio = total / k
  if ratio > RATIO_HIGH:
    return threshold * GAIN_HIGH
  if ratio > RATIO_LOW:
    return threshold * GAIN_IN_BAND
  return threshold * GAIN_LOW


def capacity(size, n, density, factor):
  """The most indices one worker sends per step; None means no limit.

  Density 1 means that everything is sent, so it is never truncated however uneven partitions are.
  """
  if factor is None or density >= 1.0:
    return None
  return min(max(1, math.ceil(factor * target(size, density) / n)), size)


def select(acc, start, end, threshold, step, fallback=True):
  """Ascending indices in `[start, end)` that reach the threshold, NaN included.

  With `fallback`, a range without any such entry yields one index, whatever its magnitude.
  """
  limit = np.float32(threshold)
  hits = [index + start for index in np.flatnonzero(~(np.abs(acc[start:end]) < limit))]
  if not hits and fallback and end > start:
    hits = [start + step % (end - start)]
  return np.array(hits, dtype=np.int64)


def truncate(indices, capacity, step):
  """At most `capacity` of the indices: on overflow an evenly strided subset, another one each step.

  Keeping the first ones instead would starve the end of the partition; keeping the same ones in
  every step would starve all others.
  """
  count = len(indices)
  if capacity is None or count <= capacity:
    return indices
  fraction = (step * GOLDEN % 2**32) // 2**8 / 2**24
  phase = min(int(np.float32(fraction) * np.float32(count)), count - 1)
  ranks = [(slot * count + phase) // capacity for slot in range(capacity)]
  return np.array([indices[rank] for rank in ranks], dtype=np.int64)


def init(size, num_workers, density, blocks=None):
  """The state before the first step. Density 1 keeps the threshold at 0: everything qualifies."""
  blocks = blocks or geometry(size)
  return State(
    step=0,
    residual=np.zeros((num_workers, size), np.float32),
    threshold=0.0 if density >= 1.0 else initial_threshold(target(size, density)),
    boundaries=initial_boundaries(blocks.num_blocks, num_workers),
  )


def step(state, grads, *, density, capacity=None, blocks=None, nonfinite="skip", fallback=True):
  """One step of all workers: gradients `[n, N]` to the update `[N]` that each of them gets.

  The threshold and the partitions follow the true counts, also where the capacity cut them short.
  Only the paper's rules are known here: to follow others, put their threshold and boundaries into
  the state before each step.

  Returns:
    The update, the new state, and a dict: `indices` (sent, ascending), `counts` (picked by each
    worker, before truncation), `selected` (sent by all), `overflow` (picked but not sent, by all),
    `threshold_used`, `boundaries_used`, `padding_ratio` (largest count over mean count, 1 when
    nothing was picked) and `skipped` (whether this step was).
  """
  n, size = grads.shape
  blocks = blocks or geometry(size)
  capacity = None if density >= 1.0 else capacity
  with np.errstate(over="ignore", invalid="ignore"):
    acc = grads.astype(np.float32) + state.residual

  skip = nonfinite == "skip" and not np.isfinite(grads).all()
  if nonfinite == "skip":  # finite gradients never make an infinite residual
    acc = np.clip(acc, -np.finfo(np.float32).max, np.finfo(np.float32).max)
  counts = [0] * n
  sent = [np.zeros(0, np.int64)] * n
  counts_by_partition = [0] * n
  for r in range(0 if skip else n):
    partition = (state.step + r) % n
    start = position(blocks, state.boundaries[partition])
    end = position(blocks, state.boundaries[partition + 1])
    hits = select(acc[r], start, end, state.threshold, state.step, fallback)
    counts[r] = counts_by_partition[partition] = len(hits)
    sent[r] = truncate(hits, capacity, state.step)
  indices = np.sort(np.concatenate(sent))

  update = np.zeros(size, np.float32)
  with np.errstate(invalid="ignore"):  # infinities of both signs, under "propagate"
    update[indices] = acc[:, indices].sum(axis=0, dtype=np.float64) / n

  total = sum(counts)
  info = {
    "indices": indices,
    "counts": np.array(counts),
    "selected": len(indices),
    "overflow": total - len(indices),
    "threshold_used": state.threshold,
    "boundaries_used": state.boundaries,
    "padding_ratio": n * max(counts) / total if total else 1.0,
    "skipped": skip,
  }
  if skip:
    return update, state._replace(skipped=state.skipped + 1), info

  residual = acc.copy()
  residual[:, indices] = 0.0  # on every worker, also where another one picked the index
  new_state = State(
    step=state.step + 1,
    residual=residual,
    threshold=paper_threshold(state.threshold, total, target(size, density)),
    boundaries=paper_sweep(state.boundaries, counts_by_partition, blocks),
    skipped=state.skipped,
  )
  return update, new_state, info


def simulate(state, gradients, **options):
  """Steps through an iterable of `[n, N]` gradients, yielding what `step` returns for each."""
  for grads in gradients:
    update, state, info = step(state, grads, **options)
    yield update, state, info
