"""The selection threshold: where it starts and how it follows the density.

- ``paper``: the original's fixed factors; replays it.
- ``secant``: from the counts at a few levels around this step's threshold to the next one. The
  counts travel with the indices.
- ``in_step``: from the same counts to this step's own threshold. They are summed before the
  selection, in a small all-reduce.

The last two search for a threshold that they do not know: in the first step, and where the
gradients have changed so much that the levels miss it.

A threshold is a scalar of the widest float enabled; it is compared in float32.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .integers import mul_div

Count = Callable[[jax.Array], jax.Array]

# Thresholds stay normal float32 numbers. At the lower end everything but zero (and what is so small
# that hardware may take it for zero) qualifies.
LOWEST, HIGHEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max

# The original's online threshold scaling: bands of (selected / wanted) in thousandths, and factors.
PAPER_TOO_MANY, PAPER_ENOUGH = 1100, 909
PAPER_UP, PAPER_DRIFT, PAPER_DOWN = 1.005, 1.00125, 0.995

# Levels at which elements are counted, as multiples of the threshold: close together where the next
# threshold usually lies, and up to where the count is off by a factor of about two.
# The threshold itself is one of them: what has just been sent leaves a kink in the counts there; a
# line across it would miss k by up to 20%.
LADDER = np.array([0.7, 0.85, 0.93, 0.98, 1.0, 1.02, 1.07, 1.17, 1.4])

# The secant rule is a filter of level and trend (Holt's double exponential smoothing) of the log of
# the ideal threshold. A count of k has a relative noise of 1 / sqrt(k), so corrections much larger
# than that are taken whole, smaller ones in part (a Wiener gain). `benchmarks/control.py` compares.
LEVEL_GAIN = 0.3
TREND_GAIN = 0.1
NOISE = 0.5  # variance of the log of the ideal threshold, times k
MAX_TREND = 0.3  # per step, as a log: nearly to the end of the ladder

# Elements of an equal share of the vector that are enough to see how counts change around the
# threshold. Of larger shares, only a part of the rows is looked at.
SAMPLE = 2**17
MOST_ROWS = 64  # of which one is looked at: a chunk of `selection` has no more

# Below this share of k, the distribution is not what interpolation takes it for.
TOO_FEW = 2 / 3

# The search halves the float32 bit patterns, which are in the numbers' order, 5 bits a round; after
# 4 rounds the exponent and 12 bits of the mantissa are known: a threshold within 0.03%.
SEARCH_BITS = 5
SEARCH_ROUNDS = 4
FLOAT_BITS = 31  # without the sign


class Memory(NamedTuple):
  """What a threshold rule remembers beside the threshold."""

  trend: jax.Array  # float32 [], expected change of log(threshold) per step
  lost: jax.Array  # bool [], the next step must search for its threshold


def as_threshold(value: float | jax.Array) -> jax.Array:
  """``value`` as a scalar of the widest float enabled (float64 under ``jax.enable_x64``)."""
  if isinstance(value, float) and value > 0:  # float32 might make a zero of it, or infinity
    value = float(np.clip(value, LOWEST, HIGHEST))
  wide = jnp.asarray(value, jnp.result_type(float))
  return jnp.where(wide > 0, jnp.clip(wide, LOWEST, HIGHEST), wide)


def fresh_memory(lost: bool) -> Memory:
  """The memory before the first step."""
  return Memory(jnp.zeros((), jnp.float32), jnp.asarray(lost))


def paper_initial(k: int | jax.Array) -> float | jax.Array:
  """The original's first threshold, ``1 / (2 sqrt(k))``; it knows nothing of the gradient."""
  return 1 / (2 * (math.sqrt(k) if isinstance(k, int) else jnp.sqrt(k)))


def paper_scaled(threshold: jax.Array, selected: jax.Array, k: int | jax.Array) -> jax.Array:
  """The next threshold by the original's rule.

  With ``e = selected / k``: above 1.1 the threshold grows by 0.5%, within 10% of the target by
  0.125%, and below it shrinks by 0.5%. The drift inside the band keeps the steady density about
  5% low; it is kept because this mode replays the original.

  Args:
    threshold: the threshold used in this step.
    selected: int32, how many indices all workers selected with it.
    k: how many are wanted.

  Returns:
    The threshold of the next step.
  """
  # Compared as integers: XLA multiplies by 1 / k instead of dividing, and e = 1.1 becomes more.
  too_many = selected > mul_div(jnp.asarray(k), PAPER_TOO_MANY, 1000)
  enough = selected > mul_div(jnp.asarray(k), PAPER_ENOUGH, 1000)
  factor = jnp.where(too_many, PAPER_UP, jnp.where(enough, PAPER_DRIFT, PAPER_DOWN))
  return jnp.clip(threshold * factor.astype(threshold.dtype), LOWEST, HIGHEST)


def search(total: Count, k: int | jax.Array, like: float | jax.Array = 0.0) -> jax.Array:
  """The largest threshold that at least ``k`` elements reach, whatever their distribution.

  Args:
    total: levels float32 ``[m]`` -> int32 ``[m]``, how many elements of all workers reach each.
    k: how many are wanted.
    like: a scalar that varies over the mesh as the counts do.

  Returns:
    The threshold. With fewer than ``k`` elements of a normal float32 magnitude it is the lowest,
    which all of those reach.
  """
  steps = jnp.arange(1, 2**SEARCH_BITS, dtype=jnp.int32)
  largest = jnp.int32(np.float32(HIGHEST).view(np.int32))

  def narrow(i, bits):
    shift = FLOAT_BITS - SEARCH_BITS * (i + 1)
    levels = jnp.minimum(bits + (steps << shift), largest)
    reached = total(jax.lax.bitcast_convert_type(levels, jnp.float32)) >= k
    return bits + (jnp.sum(reached, dtype=jnp.int32) << shift)

  # What is left of the last bits must not make a NaN of the largest number.
  bits = jax.lax.fori_loop(0, SEARCH_ROUNDS, narrow, jnp.zeros_like(like, jnp.int32))
  bits = jnp.minimum(bits, largest)
  return as_threshold(jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32), LOWEST))


def levels_around(threshold: jax.Array) -> jax.Array:
  """The levels of the ladder, float32 ``[len(LADDER)]``, ascending."""
  levels = threshold.astype(jnp.float32) * LADDER.astype(np.float32)
  return jnp.clip(levels, LOWEST, HIGHEST)


def sample_every(share: int) -> int:
  """Of how many rows to look at one, for the ladder of a ``share`` of so many elements."""
  return min(1 << max((share // SAMPLE).bit_length() - 1, 0), MOST_ROWS)


def anchored(counts: jax.Array, selected: jax.Array) -> jax.Array:
  """The ladder's counts of a sample, scaled so that they agree with a count that is exact.

  Args:
    counts: int32 ``[len(LADDER)]``, those of the sample.
    selected: int32, how many of all elements reach the threshold.

  Returns:
    float32 ``[len(LADDER)]``.
  """
  here = counts[int(np.flatnonzero(LADDER == 1)[0])]
  return counts * (selected.astype(jnp.float32) / jnp.maximum(here, 1))


def interpolate(counts: jax.Array, k: int | jax.Array) -> tuple[jax.Array, jax.Array]:
  """Where on the ladder ``k`` elements would qualify, on straight lines of log over log.

  Args:
    counts: int32 or float32 ``[len(LADDER)]``, how many elements of all workers reach each level.
    k: how many are wanted.

  Returns:
    The log of the multiple of the threshold, and whether it lies on the ladder.
  """
  on_ladder = (counts[0] >= k) & (counts[-1] <= k)
  left = jnp.clip(jnp.sum(counts >= k) - 1, 0, len(LADDER) - 2)
  logs = jnp.log(jnp.maximum(counts, 1).astype(jnp.float32))
  above, below = logs[left], logs[left + 1]
  wanted = jnp.log(jnp.asarray(k, jnp.float32))
  share = jnp.clip((above - wanted) / jnp.maximum(above - below, LOWEST), 0, 1)
  # Equal elements may all lie between two levels, where no threshold gives k of them. Take them
  # all, and leave the choice to the capacity: a threshold above them would never send any.
  share = jnp.where(counts[left + 1] == 0, 0.0, share)
  rungs = jnp.asarray(np.log(LADDER), jnp.float32)
  return rungs[left] + share * (rungs[left + 1] - rungs[left]), on_ladder


class Rule(NamedTuple):
  """How a threshold follows the density; ``RULES`` has all of them."""

  # k of the first step -> the first threshold; LOWEST if it has to be searched for
  first: Callable[[int | jax.Array], float | jax.Array]
  # (threshold, memory, total, k) -> the threshold of this step
  use: Callable[..., jax.Array]
  # (threshold used, memory, selected, ladder, k, k of the next step) -> threshold and memory of it
  adapt: Callable[..., tuple[jax.Array, Memory]]
  # whether `adapt` needs the counts around the threshold used
  wants_ladder: bool
  # how many counts `use` sums over the workers in every step; a search sums more, but is rare
  sums: int


def _unknown(k):
  return LOWEST


def _takes_all(threshold, ladder, k):
  """True where less than k elements are not zero, and the lowest threshold has them all."""
  return (threshold <= LOWEST) & (ladder[0] > 0) & (ladder[0] < k)


def _paper_use(threshold, memory, total, k):
  return threshold


def _paper_adapt(used, memory, selected, ladder, k, next_k):
  return paper_scaled(used, selected, k), memory


def _secant_use(threshold, memory, total, k):
  return jax.lax.cond(memory.lost, lambda: search(total, k, threshold), lambda: threshold)


def _secant_adapt(used, memory, selected, ladder, k, next_k):
  here, _ = interpolate(ladder, k)
  there, on_ladder = interpolate(ladder, next_k)
  noise = NOISE / jnp.asarray(k, jnp.float32)
  gain = jnp.maximum(LEVEL_GAIN, here**2 / (here**2 + noise))
  trend = jnp.clip(memory.trend + TREND_GAIN * here, -MAX_TREND, MAX_TREND)
  # What the schedule changes is known and taken whole; what the gradients changed, in part.
  move = (there - here) + gain * here + trend
  follow = jnp.clip(used * jnp.exp(move).astype(used.dtype), LOWEST, HIGHEST)
  # Off the ladder nothing can be said: search, rather than extrapolate. Nor where far too little
  # qualified: there may be many equal elements just below, which only a search takes.
  lost = ~on_ladder | (selected < TOO_FEW * k)
  lost = lost & ~_takes_all(used, ladder, next_k)
  follow = jnp.where(lost | ~on_ladder, jnp.maximum(used, LOWEST), follow)
  # Where a residual is drained, each search is followed by a step in which too little is left: only
  # the trend ends that. A jump off the ladder has none.
  return follow, Memory(jnp.where(on_ladder, trend, 0.0), lost)


def _in_step_use(threshold, memory, total, k):
  counts = total(levels_around(threshold))
  log, on_ladder = interpolate(counts, k)
  near = jnp.clip(threshold * jnp.exp(log).astype(threshold.dtype), LOWEST, HIGHEST)
  all_of_them = _takes_all(threshold, counts, k)
  near = jnp.where(all_of_them, threshold, near)
  known = (on_ladder & ~memory.lost) | all_of_them
  return jax.lax.cond(known, lambda: near, lambda: search(total, k, threshold))


def _in_step_adapt(used, memory, selected, ladder, k, next_k):
  too_few = (selected < TOO_FEW * k) & (used > LOWEST)
  return jnp.maximum(used, LOWEST), memory._replace(lost=too_few)


RULES = {
  "paper": Rule(paper_initial, _paper_use, _paper_adapt, wants_ladder=False, sums=0),
  "secant": Rule(_unknown, _secant_use, _secant_adapt, wants_ladder=True, sums=0),
  "in_step": Rule(_unknown, _in_step_use, _in_step_adapt, wants_ladder=False, sums=len(LADDER)),
}
