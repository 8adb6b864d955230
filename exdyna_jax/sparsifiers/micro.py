"""MiCRO: exclusive partitions that stay equal, and an online threshold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import accumulator, exchange, exclusive
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Outcome, Selection
from ..blocks import Blocks, element_range
from ..partition import equal_boundaries, owned_partition
from ..state import State
from ..threshold import Memory
from ..transform import Options, sparsifier
from ..varying import AxisName


def micro(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  threshold: str = "secant",
  initial_threshold: float | None = None,
  capacity_factor: float | None = exchange.CAPACITY_FACTOR,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at large entries of partitions that stay equal.

  `exdyna` without blocks: in step t worker r owns partition :math:`p = (t + r) \bmod n` of ``N //
  n`` elements, one more for the first ``N % n``, and picks :math:`I_r = \{i \in p : |acc_i| \geq
  threshold\}`. Where layers differ in scale, so do the workers' counts.

  Args:
    density: share of the N elements to send per step, in (0, 1], or an optax schedule of it.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    threshold: ``"secant"`` (default), ``"in_step"`` or ``"paper"``, as in `exdyna`.
    initial_threshold: the first threshold, positive; None (default): the rule finds it.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k / n)`` indices; what
      exceeds it is thinned out evenly and waits. None: all picks are sent. Default 1.25.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its ``boundaries``
    are in elements and do not change.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another model, algorithm or
      number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = micro(density=0.01, axis_name="data")
    >>> grads = jax.random.normal(jax.random.key(0), (2, 1000))  # a row per worker
    >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    >>> [int(x) for x in jnp.sum(update != 0, axis=1)]
    [10, 10]

  References:
    Yoon and Oh, `MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating
    Distributed DNN Training <https://arxiv.org/abs/2310.00967>`_, HiPC 2023.
  """
  mode = exclusive.online(density, threshold, initial_threshold, capacity_factor, axis_name)

  def init(size: int, n: int) -> tuple[jax.Array, jax.Array, Memory]:
    first, memory = exclusive.first(mode, size)
    return first, equal_boundaries(size, n), memory

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size, n = accumulator.size(acc), state.boundaries.shape[0] - 1
    elements = Blocks(size, block_size=1, num_blocks=size)
    mine = owned_partition(state.step, rank, n)
    start, end = element_range(elements, state.boundaries, mine)
    return exclusive.select(mode, acc, state, state.memory, start, end)

  def adapt(state: State, outcome: Outcome) -> tuple[jax.Array, jax.Array, Memory]:
    follow, memory = exclusive.follow(mode, state, state.memory, outcome)
    return follow, state.boundaries, memory

  algorithm = Algorithm(select, init, adapt=adapt)
  options = Options(
    num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_consecutive_skips
  )
  return sparsifier(algorithm, mode.density, axis_name, options)
