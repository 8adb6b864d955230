"""ExDyna: block-based exclusive partitions that follow the load, and an online threshold."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import checks, selection
from ..blocks import WORD, Blocks, element_range, even_blocks, paper_blocks
from ..partition import by_partition, equal_boundaries, owned_partition, paper_boundaries
from ..state import State
from ..threshold import as_threshold, paper_initial, paper_scaled
from ..transform import Algorithm, Selection, sparsifier, target_count
from ..varying import AxisName

_THRESHOLDS = ("paper",)
_PARTITIONS = ("paper",)


def exdyna(
  density: float,
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  threshold: str = "paper",
  partition: str = "paper",
  initial_threshold: float | None = None,
  num_blocks: int = 1024,
  capacity_factor: float | None = 1.25,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the few coordinates that matter now.

  Each worker adds its gradient to its residual, ``acc = gradient + residual``, and looks for large
  entries in a part of the flat vector that is its own in this step. All agree on the union
  :math:`I` of the picks, which never overlap, and only there the workers' values are summed:

  .. math::
    u_I = \frac{1}{n} \sum_{r=1}^{n} acc^{(r)}_I, \qquad u_{\bar I} = 0, \qquad
    residual^{(r)} = acc^{(r)} - acc^{(r)}_I

  Chain it in front of an optimizer and call ``update`` inside ``jax.shard_map`` (``jax.pmap`` and
  ``jax.vmap`` with an axis name work too), with gradients of `local_params`.

  .. warning::
    Nothing that keeps per-coordinate averages (adam) or normalises by the global gradient belongs
    in front of it; behind it, all of optax is at home. First-moment momentum behind a sparse
    update costs accuracy; see the README for settings that do not.

  Args:
    density: share of the N elements to send per step, in (0, 1]; ``k = max(1, int(density * N))``.
      With 1, everything is sent: the dense mean.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``.
    threshold: how the threshold follows the density. ``"paper"``: the original's fixed factors,
      from ``1 / (2 sqrt(k))``; a worker that finds nothing sends one index.
    partition: how partitions follow the load. ``"paper"``: one block at a time between neighbours.
    initial_threshold: the first threshold, positive; None lets the ``threshold`` rule choose.
    num_blocks: about how many blocks to cut the vector into; partitions are runs of blocks. 1024 is
      the original's number.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k / n)`` indices; an even
      stride of its picks where there are more. None: all picks are sent, in as many messages of
      ``ceil(k / n)`` per worker as the largest count needs.
    residual_dtype: dtype of the residual. In bfloat16, small gradients get lost.
    nonfinite: ``"skip"``: when any worker holds a NaN or Inf, all workers return a zero update,
      keep their state and count ``stats.skipped``. ``"propagate"``: no check.

  Returns:
    An ``optax.GradientTransformationExtraArgs``. Its updates have the gradients' dtypes and are
    the same on all workers. Its state is a `State`; ``get_stats`` reads what the last step did.

  Raises:
    TypeError, ValueError: an argument is out of range (at once), or ``init`` or ``update`` is
      called with complex leaves, more than 2**31 - 2 elements, an unbound axis, gradients that
      are already summed, or another model's or mesh's state (at trace time).

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from jax.sharding import PartitionSpec as P
    >>> from exdyna_jax import exdyna, get_stats, local_params, state_specs
    >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    >>> params = {"w": jnp.zeros(1000)}
    >>> tx = optax.chain(exdyna(density=0.01, axis_name="data", num_workers=1), optax.sgd(0.1))
    >>> opt_state = tx.init(params)
    >>> specs = state_specs(opt_state, "data")
    >>> def train_step(params, opt_state, target):
    ...   loss = lambda p: jnp.sum((p["w"] - target) ** 2)
    ...   grads = jax.grad(loss)(local_params(params, "data"))
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   return optax.apply_updates(params, updates), opt_state
    >>> step = jax.jit(jax.shard_map(train_step, mesh=mesh,
    ...                              in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
    >>> params, opt_state = step(params, opt_state, jnp.arange(1000.0))
    >>> int(jnp.sum(params["w"] != 0)), int(get_stats(opt_state).selected)
    (13, 13)

  References:
    Yoon and Oh, `Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed
    Deep Learning <https://arxiv.org/abs/2402.13781>`_, CCGrid 2024.
  """
  checks.check_choice("threshold", threshold, _THRESHOLDS)
  checks.check_choice("partition", partition, _PARTITIONS)
  checks.check_positive("initial_threshold", initial_threshold, "chosen by the threshold rule")
  checks.check_count("num_blocks", num_blocks)

  def cut(size: int, n: int) -> Blocks:
    if size >= WORD * num_blocks:
      return paper_blocks(size, num_blocks)
    return even_blocks(size, n, num_blocks)

  def init(size: int, n: int) -> tuple[jax.Array, jax.Array]:
    first = initial_threshold or paper_initial(target_count(density, size))
    # At density 1 everything qualifies, for ever.
    first = 0.0 if density == 1 else first
    return as_threshold(first), equal_boundaries(cut(size, n).num_blocks, n)

  def select(acc: jax.Array, state: State, rank: jax.Array) -> Selection:
    size, n = acc.shape[0], state.boundaries.shape[0] - 1
    mine = owned_partition(state.step, rank, n)
    start, end = element_range(cut(size, n), state.boundaries, mine)
    hits = selection.find(acc, start, end, state.threshold)
    picked = Selection(
      selection.count(hits), lambda ranks: selection.take(hits, ranks, size), state.threshold
    )
    return _at_least_one(picked, start, end, state.step, size)

  def adapt(state: State, used: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    size, n = state.residual.shape[0], counts.shape[0]
    k = target_count(density, size)
    next_threshold = used if density == 1 else paper_scaled(used, jnp.sum(counts), k)
    loads = by_partition(counts, state.step)
    return next_threshold, paper_boundaries(state.boundaries, loads, cut(size, n))

  return sparsifier(
    Algorithm(init, select, adapt),
    density,
    axis_name,
    num_workers=num_workers,
    capacity_factor=capacity_factor,
    residual_dtype=residual_dtype,
    nonfinite=nonfinite,
  )


def _at_least_one(
  picked: Selection, start: jax.Array, end: jax.Array, step: jax.Array, size: int
) -> Selection:
  """The original's fallback: a worker that finds nothing sends one index, whatever its value."""
  length = end - start
  alone = (picked.found == 0) & (length > 0)
  index = start + step % jnp.maximum(length, 1)

  def take(ranks):
    return jnp.where(alone, jnp.where(ranks == 0, index, size), picked.take(ranks))

  return Selection(jnp.where(alone, 1, picked.found), take, picked.threshold)
