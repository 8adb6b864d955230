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
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its threshold is 0.
    Entries that are zero are not picked.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another model, algorithm or
      number of workers.

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

  algorithm = Algorithm(select, picks="overlapping", ascending=False)
  # As many slots as there are picks: nothing is ever truncated.
  options = Options(num_workers, 1.0, residual_dtype, nonfinite, dense_mask, max_consecutive_skips)
  return sparsifier(algorithm, wanted, axis_name, options)
