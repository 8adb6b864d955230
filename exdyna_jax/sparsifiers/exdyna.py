"""ExDyna: block-based exclusive partitions that follow the load, and an online threshold."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .. import accumulator, checks, exchange, exclusive
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Outcome, Selection
from ..blocks import element_range
from ..density import target_at
from ..partition import (
  RULES,
  by_partition,
  check_loads,
  equal_boundaries,
  equal_loads,
  owned_partition,
)
from ..state import State
from ..threshold import Memory
from ..transform import Options, sparsifier
from ..values import Link, check_wire
from ..varying import AxisName


class _Memory(NamedTuple):
  """What ExDyna remembers beside threshold and boundaries."""

  threshold_rule: Memory
  loads: jax.Array  # float32 [num_blocks], average count per block; "paper" leaves it as it was


def exdyna(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  threshold: str = "secant",
  partition: str = "balanced",
  initial_threshold: float | None = None,
  num_blocks: int = 1024,
  capacity_factor: float | None = exchange.CAPACITY_FACTOR,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
  wire_dtype: Any = None,
  link: Link | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the few coordinates that matter now.

  Each worker adds its gradient to its residual, ``acc = gradient + residual``, and looks for large
  entries in a part of the flat vector that is its own in this step. All agree on the union
  :math:`I` of the picks, which never overlap, and only there the workers' values are summed:

  .. math::
    u_I = \frac{1}{n} \sum_{r=1}^{n} acc^{(r)}_I, \qquad u_{\bar I} = 0, \qquad
    residual^{(r)} = acc^{(r)} - acc^{(r)}_I

  Call ``update`` inside ``jax.shard_map`` (or pmap, vmap), with gradients of `local_params`.

  .. warning::
    Optimizers belong behind it; in front of it, a state (adam's moments) would differ between
    workers. Not around it: ``optax.masked`` (see ``dense_mask``), ``optax.MultiSteps``.
    First-moment momentum behind sparse updates costs accuracy: see the README.

  Args:
    density: share of the N elements to send per step, in (0, 1]; ``k = max(1, int(density * N))``.
      With 1, everything is sent: the dense mean, at the cost of indices. Or an optax schedule, a
      function of the number of steps taken with values in (0, 1]; threshold and traffic follow it,
      up to the largest value of its first 16,384 steps and of the powers of two after them.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    threshold: how the threshold follows the density. ``"secant"``: from the counts at a few levels
      around it to the next one; they travel with the indices. ``"in_step"``: to this step's own,
      closer, for one small all-reduce more. Both search for the exact threshold in the first step
      and where the gradients jump. ``"paper"``: the original's fixed factors, from ``1 / (2
      sqrt(k))``; a worker that finds nothing sends one index.
    partition: how partitions follow the load. ``"balanced"``: equal shares of a moving average of
      the picks per block. ``"paper"``: the original's, one block at a time between neighbours.
    initial_threshold: the first threshold, positive; None lets the ``threshold`` rule find it.
    num_blocks: how many blocks to cut the vector into, at most; partitions are runs of blocks.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k / n)`` indices, another
      even stride of its picks in each step. None: all, in as many messages as that takes.
    residual_dtype: of the residual and all sums, 16 bits or more; in bfloat16, small ones get lost.
      What is beyond its range counts as Inf. Thresholds are compared in float32 all the same.
    nonfinite: ``"skip"``: when any worker's gradients hold a NaN or Inf, all workers return a zero
      update, keep their state and count ``stats.skipped``; sums too large for their dtype stay at
      its largest number. ``"propagate"``: no check.
    dense_mask: leaves to be averaged densely, by one more all-reduce: a tree of bools like the
      parameters (or their upper part), or a function that makes one. N, k and the statistics but
      ``bytes_sent`` are those of the other leaves. None: no leaf is.
    max_consecutive_skips: at least 1; when more steps in a row are skipped, the update is NaN, and
      shows that training stands still. None: no limit.
    wire_dtype: ``jnp.bfloat16`` or ``jnp.float16``: values travel in 16 bits, half the bytes, and
      rounding errors wait in the residuals (of 32 bits: exactly). None: in full.
    link: the network as a `Link`, by which values take the fastest way: an all-reduce, or fewer
      hops for more bytes. ``python -m exdyna_jax.advise`` measures it. None: the fewest bytes.

  Returns:
    An ``optax.GradientTransformationExtraArgs``. Its updates have the gradients' dtypes and are
    the same on all workers. Its state is a `State`; ``get_stats`` reads what the last step did.

  Raises:
    TypeError, ValueError: an argument is out of range (at once); complex leaves, over 2**31 - 2
      elements, an unbound axis, gradients already summed, another model's state (when traced).

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = exdyna(density=0.01, axis_name="data")
    >>> grads = jax.random.normal(jax.random.key(0), (2, 1000))  # a row per worker
    >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    >>> [int(x) for x in jnp.sum(update != 0, axis=1)]
    [10, 10]

  References:
    Yoon and Oh, `Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed
    Deep Learning <https://arxiv.org/abs/2402.13781>`_, CCGrid 2024.
  """
  checks.check_choice("partition", partition, tuple(RULES))
  num_blocks = checks.check_count("num_blocks", num_blocks)
  mode = exclusive.online(density, threshold, initial_threshold, capacity_factor, axis_name)
  rule = RULES[partition]

  def init(size: int, n: int) -> tuple[jax.Array, jax.Array, _Memory]:
    blocks = rule.cut(size, num_blocks)
    first, rule_memory = exclusive.first(mode, size)
    memory = _Memory(rule_memory, equal_loads(blocks))
    return first, equal_boundaries(blocks.num_blocks, n), memory

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size, n = accumulator.size(acc), state.boundaries.shape[0] - 1
    mine = owned_partition(state.step, rank, n)
    start, end = element_range(rule.cut(size, num_blocks), state.boundaries, mine)
    return exclusive.select(mode, acc, state, state.memory.threshold_rule, start, end)

  def observe(indices: jax.Array, size: int, n: int) -> jax.Array:
    return rule.observe(indices, rule.cut(size, num_blocks))

  def adapt(state: State, outcome: Outcome) -> tuple[jax.Array, jax.Array, _Memory]:
    size = state.residual.shape[0]
    follow, rule_memory = exclusive.follow(mode, state, state.memory.threshold_rule, outcome)
    counts, sent = (by_partition(x, state.step) for x in (outcome.counts, outcome.sent))
    blocks, loads = rule.cut(size, num_blocks), state.memory.loads
    check_loads(loads, blocks, num_blocks)
    k = target_at(mode.density, state.step, size)
    boundaries, loads = rule.adapt(state.boundaries, loads, outcome.seen, counts, sent, k, blocks)
    return follow, boundaries, _Memory(rule_memory, loads)

  algorithm = Algorithm(select, init, observe, adapt)
  wire = check_wire(wire_dtype, link)
  options = Options(
    num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_consecutive_skips, wire
  )
  return sparsifier(algorithm, mode.density, axis_name, options)
