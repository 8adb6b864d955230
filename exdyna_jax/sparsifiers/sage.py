"""SAGE: every worker's own threshold, scaled by a sample of its gradients."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import accumulator, checks, exchange, ranks, selection
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Outcome, Selection, no_partitions
from ..density import parse_density, target_at
from ..integers import as_bits, from_bits
from ..state import PerWorker, State
from ..threshold import HIGHEST, LOWEST, as_threshold, paper_initial
from ..transform import Options, sparsifier
from ..varying import AxisName

# How many elements are sampled: N / (1 + 0.0025 N), about 400 of a large vector.
SAMPLE_RATE = 0.0025
# A density off by more than this factor is corrected by 5% in the threshold.
FAR_OFF, SMALLER, LARGER = 10, 0.95, 1.05


class _Memory(NamedTuple):
  """What SAGE remembers of each worker."""

  thresholds: PerWorker  # float32 [n], as used last
  means: PerWorker  # float32 [n], of |acc| in the last sample that was not zero; 0 before


def sage(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  seed: int = 0,
  capacity_factor: float | None = exchange.CAPACITY_FACTOR,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the union of entries above each worker's own threshold.

  Every worker scales its threshold by the mean magnitude of a sample of its ``acc = gradient +
  residual``, and by how far the share of entries that it would then pick is from the density d:

  .. math::
    threshold \leftarrow threshold \cdot \alpha \beta \gamma, \qquad
    \alpha = \frac{mean_t}{mean_{t-1}}, \quad
    exam = \frac{|\{i : |acc_i| \geq threshold \cdot \alpha\}|}{N}, \quad
    \beta = \frac{2}{1 + e^{d - exam}}

  with :math:`\gamma` = 0.95 where ``exam / d < 0.1``, 1.05 where it is above 10, and 1 otherwise.

  Args:
    density: share d of the N elements that each worker shall pick per step, in (0, 1]. Or an optax
      schedule, a function of the number of steps taken.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    seed: of the samples, an integer; default 0.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k)`` indices, with ``k =
      max(1, int(d * N))``; what exceeds it is thinned out evenly and waits. None: all picks are
      sent. Default 1.25.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its threshold is the
    mean of the workers' thresholds. The first one is ``1 / (2 sqrt(k))``, whatever the gradients'
    scale, and is corrected by 5% a step.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another model, algorithm or
      number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = sage(density=0.01, axis_name="data")
    >>> grads = jnp.zeros((2, 1000)).at[:, 3].set(1.0)  # a row per worker
    >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    >>> jnp.flatnonzero(update[0]).tolist()
    [3]

  References:
    Yoon and Oh, *SAGE: toward on-the-fly gradient compression ratio scaling*, The Journal of
    Supercomputing, 2023.
  """
  wanted = parse_density(density)
  seed = checks.check_seed("seed", seed)

  def init(size: int, n: int) -> tuple[jax.Array, jax.Array, _Memory]:
    first = as_threshold(paper_initial(target_at(wanted, jnp.int32(0), size)))
    thresholds, means = jnp.full((n,), first, jnp.float32), jnp.zeros((n,), jnp.float32)
    return first, no_partitions(n), _Memory(PerWorker(thresholds), PerWorker(means))

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size = accumulator.size(acc)
    start, end = jnp.int32(0), jnp.int32(size)
    threshold, before = (known.values[rank] for known in state.memory)

    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), state.step), rank)
    samples = max(int(size / (1 + SAMPLE_RATE * size)), 1)
    sample = accumulator.at(acc, jax.random.randint(key, (samples,), 0, size))
    mean = jnp.mean(jnp.abs(sample.astype(jnp.float32)))
    usable = (mean > 0) & jnp.isfinite(mean)

    alpha = jnp.where(usable & (before > 0), mean / before, 1.0)
    levels = jnp.stack([threshold * alpha, jnp.full_like(threshold, LOWEST)])
    reached, nonzero = selection.count_reaching(acc, start, end, levels)
    exam, d = reached / size, target_at(wanted, state.step, size) / size
    beta = 2 / (1 + jnp.exp(d - exam))
    gamma = jnp.where(exam > FAR_OFF * d, LARGER, jnp.where(exam * FAR_OFF < d, SMALLER, 1.0))
    scaled = jnp.clip(threshold * alpha * beta * gamma, LOWEST, HIGHEST)
    # A vector of zeros says nothing about the threshold: without this, it would fall for ever.
    used = jnp.where((state.step == 0) | (nonzero == 0), threshold, scaled)

    hits = selection.find(acc, start, end, used)
    signal = as_bits(used, jnp.where(usable, mean, before))
    return Selection(hits.found, functools.partial(ranks.take, hits), threshold=None, signal=signal)

  def adapt(state: State, outcome: Outcome) -> tuple[jax.Array, jax.Array, _Memory]:
    memory = _Memory(*map(PerWorker, from_bits(outcome.signals.T)))
    return outcome.threshold, state.boundaries, memory

  algorithm = Algorithm(select, init, adapt=adapt, picks="overlapping")
  options = Options(
    num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_consecutive_skips
  )
  return sparsifier(algorithm, wanted, axis_name, options)
