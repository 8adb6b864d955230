"""SIDCo: every worker's own threshold, from a distribution fitted to its gradients."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import accumulator, checks, exchange, ranks, selection
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Outcome, Selection, no_partitions
from ..density import parse_density, target_at
from ..integers import as_bits
from ..state import State
from ..tails import FITS, tail_threshold
from ..threshold import LOWEST, as_threshold
from ..transform import Options, sparsifier
from ..varying import AxisName

# An adaptive number of stages is looked at after so many steps, and changed by one where the mean
# share of what was wanted is outside of this band.
WINDOW = 5
TOO_MANY, TOO_FEW = 1.2, 0.8


class _Memory(NamedTuple):
  """What SIDCo remembers."""

  stages: jax.Array  # int32 [], of the next step
  steps: jax.Array  # int32 [], taken in this window; those in which all is zero do not count
  achieved: jax.Array  # float32 [], selected / wanted, summed over these steps


def sidco(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  fit: str = "exponential",
  stages: int | str = "adaptive",
  capacity_factor: float | None = exchange.CAPACITY_FACTOR,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the union of the entries in each worker's fitted tail.

  Every worker fits a distribution to the magnitudes of its ``acc = gradient + residual``, and
  picks what lies above the threshold that a share d of it exceeds. With :math:`m` and :math:`v`,
  their mean and variance:

  .. math::
    exponential: \; threshold = -m \log d, \qquad
    Pareto: \; threshold = a \frac{1 - d^c}{c}, \quad
    a = \tfrac{1}{2} m (m^2 / v + 1), \; c = \tfrac{1}{2} (m^2 / v - 1)

  With several stages, the first asks for 25%, and each further one fits the excess of what lies
  above the threshold before it.

  Args:
    density: share d of the N elements that each worker shall pick per step, in (0, 1]. Or an optax
      schedule, a function of the number of steps taken.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    fit: ``"exponential"`` (default) or ``"generalized_pareto"``.
    stages: how many, at least 1. ``"adaptive"`` (default): from 1 on, every 5 steps one less where
      more than 120% of what was wanted was picked, one more where less than 80%; steps in which
      all is zero do not count.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k)`` indices, with ``k =
      max(1, int(d * N))``; what exceeds it is thinned out evenly and waits. None: all picks are
      sent. Default 1.25.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its threshold is the
    mean of the workers' last thresholds. The largest entry is always picked, unless it is zero.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another model, algorithm or
      number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = sidco(density=0.1, axis_name="data", stages=1)
    >>> grads = jax.random.laplace(jax.random.key(0), (2, 10000))  # a row per worker
    >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    >>> 1800 < jnp.sum(update[0] != 0) < 2000  # 10% of each worker, less what both have picked
    Array(True, dtype=bool)

  References:
    Abdelmoniem et al., `An Efficient Statistical-based Gradient Compression Technique for
    Distributed Training Systems <https://arxiv.org/abs/2101.10761>`_, MLSys 2021.
  """
  wanted = parse_density(density)
  checks.check_choice("fit", fit, tuple(FITS))
  adaptive = isinstance(stages, str) and stages == "adaptive"
  first = 1 if adaptive else checks.check_count("stages", stages)
  most = max(math.ceil(math.log2(1 / wanted.lowest)), 1)

  def init(size: int, n: int) -> tuple[jax.Array, jax.Array, _Memory]:
    memory = _Memory(jnp.int32(first), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
    return as_threshold(0.0), no_partitions(n), memory

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size = accumulator.size(acc)
    vector = accumulator.whole(acc)
    share = target_at(wanted, state.step, size) / size
    tail = tail_threshold(vector, share, state.memory.stages, FITS[fit])
    # What exceeds the fitted threshold, and the largest entry, which may be all that reaches it.
    finite = jnp.where(jnp.isfinite(vector), jnp.abs(vector), 0).astype(jnp.float32)
    used = jnp.maximum(jnp.minimum(jnp.nextafter(tail, jnp.inf), jnp.max(finite)), LOWEST)
    hits = selection.find(acc, jnp.int32(0), jnp.int32(size), used)
    take = functools.partial(ranks.take, hits)
    return Selection(hits.found, take, threshold=None, signal=as_bits(used))

  def adapt(state: State, outcome: Outcome) -> tuple[jax.Array, jax.Array, _Memory]:
    new, n = state.memory, outcome.counts.shape[0]
    total = jnp.sum(outcome.counts, dtype=jnp.float32)
    if adaptive:
      k = target_at(wanted, state.step, state.residual.shape[0])
      achieved = new.achieved + total / (n * jnp.asarray(k, jnp.float32))
      steps = new.steps + 1
      mean, due = achieved / WINDOW, steps == WINDOW
      change = jnp.where(mean < TOO_FEW, 1, jnp.where(mean > TOO_MANY, -1, 0))
      stages = jnp.clip(new.stages + jnp.where(due, change, 0), 1, most)
      kept = (jnp.where(due, 0, x) for x in (steps, achieved))
      new = _Memory(stages.astype(jnp.int32), *kept)
    # Steps in which all is zero say nothing.
    old = (state.threshold, state.memory)
    new = jax.tree.map(
      lambda new, old: jnp.where(total > 0, new, old), (outcome.threshold, new), old
    )
    return new[0], state.boundaries, new[1]

  algorithm = Algorithm(select, init, adapt=adapt, picks="overlapping")
  options = Options(
    num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_consecutive_skips
  )
  return sparsifier(algorithm, wanted, axis_name, options)
