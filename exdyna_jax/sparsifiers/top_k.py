"""Top-k: every worker's k largest entries of the whole vector."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import accumulator
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Selection
from ..density import parse_density
from ..largest import k_largest, take_from
from ..state import State
from ..transform import Options, sparsifier
from ..varying import AxisName


def top_k(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the k largest entries of each of them.

  Every worker picks :math:`I_r`, the k entries of largest magnitude of its own ``acc = gradient +
  residual``; the values of all workers are summed at the union :math:`I = \bigcup_r I_r`. The more
  workers, the more is sent: ``stats.selected`` lies between k and n k, ``stats.counts`` are k each.

  Args:
    density: share of the N elements that each worker picks per step, in (0, 1]; ``k = max(1,
      int(density * N))``. Or an optax schedule, a function of the number of steps taken.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n; None takes it from the mesh axis, where it is bound.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its threshold is 0.
    Entries that are zero are not picked.

  Raises:
    TypeError, ValueError: as `exdyna`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = top_k(density=0.25, axis_name="data")
    >>> grads = jnp.array([[4.0, 1.0, 2.0, 0.0], [2.0, 3.0, 6.0, 1.0]])  # a row per worker
    >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    Array([[3., 0., 4., 0.],
           [3., 0., 4., 0.]], dtype=float32)

  References:
    Aji and Heafield, `Sparse Communication for Distributed Gradient Descent
    <https://arxiv.org/abs/1704.05021>`_, EMNLP 2017.
  """
  wanted = parse_density(density)

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    found, indices = k_largest(acc, wanted, state.step)
    take = take_from(indices, accumulator.size(acc))
    return Selection(found, take, threshold=state.threshold)

  algorithm = Algorithm(select, picks="overlapping")
  # As many slots as there are picks: nothing is ever truncated.
  options = Options(num_workers, 1.0, residual_dtype, nonfinite, dense_mask, max_consecutive_skips)
  return sparsifier(algorithm, wanted, axis_name, options)
