"""What a fuzzed step is expected to do: what accumulates, who picks what, what it costs.

The picks are those of `oracle.py` and `family_oracle.py`; the sizes of messages are added up in
plain Python. XLA on CPUs takes denormal numbers for zero, so here they are zero too.
"""

import math

import family_oracle
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from family import EXCLUSIVE

TINY, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max
LADDER = 9  # levels around the threshold
SIGNALS = {"secant": LADDER, "sage": 2, "sidco": 1}  # numbers in the header, by rule or name
GROWTH, MAX_MESSAGES = 4, 16  # of further messages


def flush(x):
  """Without denormal numbers, float32."""
  x = np.asarray(x, np.float32)
  return np.where(np.abs(x) < TINY, np.float32(0), x)


def is_float(x):
  return jnp.issubdtype(x.dtype, jnp.floating)


def split(structure, tree):
  """The sparse and the dense leaves that have a gradient."""
  flags = zip(jax.tree.leaves(tree), structure.mask, strict=True)
  leaves = [(x, dense) for x, dense in flags if is_float(x)]
  return [x for x, dense in leaves if not dense], [x for x, dense in leaves if dense]


def density_at(structure, t):
  """The density of a step, as it is computed."""
  if structure.schedule is None:
    return structure.density
  first, last, until = structure.schedule.values()
  return np.float32(first if t < until else last)


def wanted(structure, size, t):
  """k of a step."""
  density = density_at(structure, t)
  if density is None:
    return 1
  return min(
    max(1, int(density * np.float32(size) if structure.schedule else density * size)), size
  )


def accumulated(structure, rows, residual):
  """acc [n, N]: the sum, rounded to the residual's dtype; too large a number stays the largest."""
  dtype = residual.dtype
  with np.errstate(over="ignore", invalid="ignore"):
    acc = flush(flush(rows) + flush(residual))
    if structure.options["nonfinite"] == "skip":
      acc = np.clip(acc, -float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).max))
    return flush(acc.astype(dtype))


def allowed_of(structure, size, t):
  """The most indices that a worker may send; None where nothing is cut off."""
  factor = structure.options.get("capacity_factor", 1.0)
  sharers = structure.n if structure.name in EXCLUSIVE else 1
  if structure.density is None or factor is None:
    return None
  if structure.schedule is None:
    return oracle.capacity(size, sharers, structure.density, factor)
  k = wanted(structure, size, t)
  share = np.float32(k) * np.float32(factor / sharers)
  return None if k == size else min(max(math.ceil(share), 1), size)


def picks_of(structure, acc, old, got):
  """The indices that each worker picks, ascending where they may be cut off; None if unknown."""
  n, size, t = *acc.shape, int(old.step)
  k, name = wanted(structure, size, t), structure.name
  # In the order of selection: NaN is larger than all others.
  m = np.abs(acc).astype(np.float64)
  m = np.where(np.isnan(m), np.inf, np.where(np.isinf(m), 2 * float(LARGEST), m))
  if name in ("exdyna", "micro"):
    edges, fallback = edges_of(structure, size, old), structure.options["threshold"] == "paper"
    parts = [(t + r) % n for r in range(n)]
    used = float(got.stats.threshold_used)
    return [
      oracle.select(m[r], edges[p], edges[p + 1], used, t, fallback) for r, p in enumerate(parts)
    ]
  if name == "top_k":
    return family_oracle.top_k(t, m, k)
  if name == "clt_k":
    return family_oracle.clt_k(t, m, k)
  if name == "hard_threshold":
    return family_oracle.hard_threshold(t, m, old.threshold)
  if name == "sage":
    thresholds = got.memory.thresholds.values.astype(np.float32)
    return [np.flatnonzero(m[r] >= thresholds[r]) for r in range(n)]
  if name == "sidco":  # whatever the thresholds are, it is the largest that reach them
    return [largest(m[r], int(got.stats.counts[r])) for r in range(n)]
  return None


def largest(row, count):
  """So many of the largest magnitudes, and all that equal the least of them."""
  if count == 0:
    assert not row.any(), "the largest entry is always picked"
    return np.zeros(0, int)
  return np.flatnonzero(row >= np.sort(row)[::-1][count - 1])


def blocks_of(structure, size):
  cut = oracle.geometry if structure.options["partition"] == "paper" else oracle.even_blocks
  return cut(size, structure.options["num_blocks"])


def edges_of(structure, size, old):
  """Elements at which the partitions begin."""
  if structure.name == "micro":
    return np.cumsum(
      [0] + [size // structure.n + (p < size % structure.n) for p in range(structure.n)]
    )
  blocks = blocks_of(structure, size)
  return [oracle.position(blocks, b) for b in old.boundaries]


def pieces_of(structure):
  sizes = [x.size for x in split(structure, structure.params)[0]]
  return [size for size in family_oracle.pieces(sizes, structure.n) if size]


def bytes_of(structure, size, most):
  """The sizes of all messages of a step in which a worker sends at most so many indices."""
  n, name, options = structure.n, structure.name, structure.options
  gather, reduce = 4 * (n - 1), 4 * 2 * (n - 1) / n
  sharers = n if name in EXCLUSIVE else 1
  factor = options.get("capacity_factor", 1.0)
  density, schedule = structure.density, structure.schedule
  if density is None:
    factor, density = None, 1e-3
  ends = (density,) * 2 if schedule is None else sorted((schedule["first"], schedule["last"]))
  if schedule:  # a schedule computes in float32
    ends = [float(np.float32(x)) for x in ends]
  share = [(1.0 if factor is None else factor) * max(1, int(d * size)) / sharers for d in ends]
  low, high = (max(math.ceil(min(x, size)), 1) for x in share)
  if factor is None or ends[0] == 1:
    high = math.ceil(size / n)
  elif schedule is None:
    high = low
  sizes = [low]
  while sizes[-1] * MAX_MESSAGES < high:
    sizes.append(sizes[-1] * GROWTH)

  def message(slots, header=0):
    if name == "random_k":
      return gather * header + reduce * slots
    if name == "clt_k":
      return gather * header + reduce * slots * 2
    return gather * (header + slots) + reduce * n * slots

  rule = options.get("threshold") if name in ("exdyna", "micro") else name
  is_one = schedule is None and ends[0] == 1
  signal = 0 if is_one and rule == "secant" else SIGNALS.get(rule, 0)
  expected = message(low, 2 + signal)
  if rule == "in_step" and not is_one:
    expected += reduce * LADDER
  if name == "deft":
    expected += reduce * len(pieces_of(structure))
  rest = most - low
  if rest > 0 and (factor is None or is_one or schedule):
    slots = sizes[sum(rest > s * MAX_MESSAGES for s in sizes[:-1])]
    expected += math.ceil(rest / slots) * message(slots)
  expected += reduce * sum(x.size for x in split(structure, structure.params)[1])
  return expected
