"""DEFT: a share of k for each layer, and the layers shared out between the workers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .. import accumulator, layers, ranks, selection
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Selection
from ..density import parse_density, target_at
from ..layers import Pieces
from ..partition import owned_partition
from ..state import State
from ..transform import Options, sparsifier
from ..varying import AxisName, psum


def deft(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  capacity_factor: float | None = 2.0,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at the largest entries of each layer.

  The leaves of the gradient are the layers; those larger than ``N / n`` are cut into n pieces. A
  piece gets a share of k as its norm has of all norms, at least one entry:

  .. math::
    k_l = \min(size_l, \max(1, \lfloor k_{left} \, norm_l / norm_{left} \rfloor))

  The pieces are packed into n bins of about equal cost, ``size_l log2(k_l)``, one for each worker,
  another one in each step; of each piece in its bin, a worker picks the :math:`k_l` entries of
  largest magnitude of its own ``acc = gradient + residual``. No two workers pick the same entry.

  .. warning::
    Each step sorts all N elements, and goes through the pieces one by one: this is a reference for
    comparisons, not for speed. With more pieces than k, more than k entries are sent.

  Args:
    density: share of the N elements to send per step, in (0, 1]; ``k = max(1, int(density * N))``.
      Or an optax schedule, a function of the number of steps taken.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    capacity_factor: each worker sends at most ``ceil(capacity_factor * k / n)`` indices; what
      exceeds it is thinned out evenly and waits. None: all picks are sent. Bins of equal cost do
      not hold equally many picks, hence more room than in `exdyna`: default 2.
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
    >>> tx = deft(density=0.02, axis_name="data")
    >>> grads = {"w": jax.random.normal(jax.random.key(0), (2, 100)), "b": jnp.ones((2, 1))}
    >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    >>> {name: int(jnp.sum(leaf[0] != 0)) for name, leaf in sorted(update.items())}
    {'b': 1, 'w': 2}

  References:
    Yoon and Oh, `DEFT: Exploiting Gradient Norm Difference between Model Layers for Scalable
    Gradient Sparsification <https://arxiv.org/abs/2307.03500>`_, ICPP 2023.
  """
  wanted = parse_density(density)

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size, n = accumulator.size(acc), state.boundaries.shape[0] - 1
    pieces = layers.cut_layers(acc.layers, n)
    magnitudes = jnp.abs(accumulator.whole(acc).astype(jnp.float32))
    k = target_at(wanted, state.step, size)
    counts = layers.shares(layers.norms(magnitudes, pieces), pieces, k)
    # Shares that exceed their piece are not handed on, but everything is everything.
    counts = jnp.where(k < size, counts, pieces.sizes)
    # One worker packs for all, by its own counts: another one in each step.
    packs = rank == state.step % n
    bins = psum(jnp.where(packs, layers.bins(counts, pieces, n), 0), axis_name)
    mine = owned_partition(state.step, rank, n)
    own = bins == mine
    # A piece of which everything is sent has no owner: all know its indices, and list a part each,
    # another one in each step.
    element, chosen = _largest_of(magnitudes, pieces, jnp.where(own, counts, 0))
    chosen |= (bins == n)[layers.piece_of(pieces)] & (element % n == mine)
    # Zeros of one's own would cost an index; those of others have another worker's turn.
    chosen &= ~((magnitudes[element] <= 0) & (k < size))
    hits = selection.find(
      accumulator.made(chosen.astype(jnp.float32)), jnp.int32(0), jnp.int32(size), jnp.float32(1)
    )

    def take(wanted: ranks.Ranks) -> jax.Array:
      return element.at[ranks.take(hits, wanted)].get(mode="fill", fill_value=size)

    return Selection(hits.found, take, threshold=state.threshold, sums=len(pieces.sizes))

  options = Options(
    num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_consecutive_skips
  )
  return sparsifier(Algorithm(select, ascending=False), wanted, axis_name, options)


def _largest_of(
  magnitudes: jax.Array, pieces: Pieces, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Elements ``[N]`` in descending order within each piece; which of them are the first `counts`.

  Of equal ones the first comes first, and NaN before all others.
  """
  piece = layers.piece_of(pieces)
  # Bits of numbers that are not negative are in the numbers' order, NaN included.
  descending = ~lax.bitcast_convert_type(magnitudes, jnp.int32)
  element = lax.iota(jnp.int32, magnitudes.shape[0])
  # Pieces stay where they are, for they come first in the order.
  _, _, sorted_element = lax.sort((piece, descending, element), num_keys=2, is_stable=True)
  place = element - jnp.asarray(pieces.starts)[piece]
  return sorted_element, place < counts[piece]
