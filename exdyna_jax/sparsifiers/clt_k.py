"""CLT-k (ScaleCom): one worker after the other chooses for all."""

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
from ..ranks import Ranks
from ..state import State
from ..transform import Options, sparsifier
from ..varying import AxisName, psum


def clt_k(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the k largest entries of one of them.

  Cyclic local top-k: in step t, worker :math:`t \bmod n` picks the k entries of largest magnitude
  of its own ``acc = gradient + residual`` and broadcasts their indices :math:`I`, at which the
  values of all workers are summed. No more than k entries are sent, however many workers there are;
  the others' work is to wait.

  Args:
    density: share of the N elements to send per step, in (0, 1]; ``k = max(1, int(density * N))``.
      Or an optax schedule, a function of the number of steps taken.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its threshold is 0.
    ``stats.counts`` are those of the worker that picks, for all. Entries that are zero on that
    worker are not picked.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another model, algorithm or
      number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = clt_k(density=0.25, axis_name="data")
    >>> grads = jnp.array([[4.0, 1.0, 2.0, 0.0], [2.0, 3.0, 6.0, 1.0]])  # a row per worker
    >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    Array([[3., 0., 0., 0.],
           [3., 0., 0., 0.]], dtype=float32)

  References:
    Chen et al., `ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient
    Distributed Training <https://arxiv.org/abs/2104.11125>`_, NeurIPS 2020.
  """
  wanted = parse_density(density)

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    leads = rank == state.step % (state.boundaries.shape[0] - 1)
    found, indices = k_largest(acc, wanted, state.step)
    own = take_from(indices, accumulator.size(acc))

    def take(ranks: Ranks) -> jax.Array:
      return psum(jnp.where(leads, own(ranks), 0), axis_name)

    return Selection(jnp.where(leads, found, 0), take, threshold=state.threshold)

  algorithm = Algorithm(select, picks="common", sums_per_slot=1)
  # As many slots as there are picks: nothing is ever truncated.
  options = Options(num_workers, 1.0, residual_dtype, nonfinite, dense_mask, max_consecutive_skips)
  return sparsifier(algorithm, wanted, axis_name, options)
