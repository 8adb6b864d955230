"""Hard threshold: every worker's entries that reach a constant."""

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
from ..state import State
from ..threshold import as_threshold, paper_initial
from ..transform import Options, sparsifier
from ..varying import AxisName

# Of how many elements the messages have room for one, where nobody knows how many will come.
MESSAGE_DENSITY = 1e-3


class _Memory(NamedTuple):
  """Nothing, but by its name no other algorithm's: those hold no threshold of use here."""


def hard_threshold(
  density: float | Callable[[jax.Array], jax.Array] | None,
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  threshold: float | None = None,
  capacity_factor: float | None = exchange.CAPACITY_FACTOR,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at all entries that reach a constant on one of them.

  Every worker picks :math:`I_r = \{i : |acc_i| \geq threshold\}` of its own ``acc = gradient +
  residual``; the values of all workers are summed at the union :math:`I = \bigcup_r I_r`. How much
  is sent is up to the gradients. With ``capacity_factor=None`` the error that stays on a worker is
  bounded and the traffic is not; with a capacity it is the other way round.

  Args:
    density: share of the N elements, in (0, 1], or an optax schedule of it. Without ``threshold``,
      the threshold is :math:`1 / (2 \sqrt{k})` with ``k = max(1, int(density * N))``; it knows
      nothing of the gradients' scale. With it, only the capacity follows from the density; None
      then sends all picks.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    threshold: a positive number, in the gradients' unit; None (default) takes it from the density.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k)`` indices; what exceeds
      it is thinned out evenly and waits. None: all picks are sent. Default 1.25. Needs a
      density.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, neither density nor threshold is given, the axis is not
      bound, gradients are summed already, there are more than 2**31 - 2 elements, or the state was
      made for another model, algorithm or number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = hard_threshold(None, "data", threshold=3.0)
    >>> grads = jnp.array([[4.0, 1.0, 2.0, 0.0], [2.0, 3.0, 6.0, 1.0]])  # a row per worker
    >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    Array([[3., 2., 4., 0.],
           [3., 2., 4., 0.]], dtype=float32)

  References:
    Sahu et al., `Rethinking Gradient Sparsification as Total Error Minimization
    <https://arxiv.org/abs/2108.00951>`_, NeurIPS 2021.
  """
  constant = checks.check_positive("threshold", threshold, "taken from the density")
  if density is None and constant is None:
    raise ValueError("hard_threshold needs a density or a threshold, got None for both.")
  checks.check_positive("capacity_factor", capacity_factor, "never truncate")
  if density is None:
    if capacity_factor not in (None, exchange.CAPACITY_FACTOR):
      raise ValueError(
        f"capacity_factor={capacity_factor!r} needs a density, got None: a worker's capacity is"
        " ceil(capacity_factor * k), and k follows from the density. Give a density beside the"
        " threshold, or leave capacity_factor out to send all picks."
      )
    capacity_factor, density = None, MESSAGE_DENSITY
  wanted = parse_density(density)

  def at(step: jax.Array, size: int) -> jax.Array:
    return as_threshold(constant or paper_initial(target_at(wanted, step, size)))

  def init(size: int, n: int) -> tuple[jax.Array, jax.Array, Any]:
    return at(jnp.int32(0), size), no_partitions(n), _Memory()

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size = jnp.int32(accumulator.size(acc))
    hits = selection.find(acc, jnp.int32(0), size, state.threshold)
    return Selection(hits.found, functools.partial(ranks.take, hits), threshold=state.threshold)

  def adapt(state: State, outcome: Outcome) -> tuple[jax.Array, jax.Array, Any]:
    return at(state.step + 1, state.residual.shape[0]), state.boundaries, _Memory()

  algorithm = Algorithm(select, init, adapt=adapt, picks="overlapping")
  options = Options(
    num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_consecutive_skips
  )
  return sparsifier(algorithm, wanted, axis_name, options)
