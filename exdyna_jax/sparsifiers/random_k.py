"""Random-k: the same random entries on every worker."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import accumulator, checks
from ..accumulator import Accumulator
from ..algorithm import Algorithm, Selection
from ..density import parse_density, target_at, target_range
from ..largest import take_from
from ..state import State
from ..transform import Options, sparsifier
from ..varying import AxisName


def random_k(
  density: float | Callable[[jax.Array], jax.Array],
  axis_name: AxisName,
  *,
  num_workers: int | None = None,
  seed: int = 0,
  residual_dtype: Any = jnp.float32,
  nonfinite: str = "skip",
  dense_mask: Any = None,
  max_consecutive_skips: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, at k random entries.

  All workers draw the same k indices :math:`I` from the same key: one from each of k equal parts
  of the vector, which begins at a random place. Each index is drawn with the same probability k /
  N, none is drawn twice, and none is sent: what travels are k values.

  Args:
    density: share of the N elements to send per step, in (0, 1]; ``k = max(1, int(density * N))``.
      Or an optax schedule, a function of the number of steps taken.
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.
    seed: of the random numbers, an integer; default 0. The same on all workers.
    residual_dtype: dtype of the residual and of all sums, at least 16 bits; default float32.
    nonfinite, dense_mask, max_consecutive_skips: as in `exdyna`; default ``"skip"``, None, None.

  Returns:
    An ``optax.GradientTransformationExtraArgs`` with a `State`, as `exdyna`; its threshold is 0.
    ``stats.counts`` are k each. Entries are sent whatever their value, zeros too.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another model, algorithm or
      number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = random_k(density=0.25, axis_name="data")
    >>> grads = jnp.ones((2, 8))  # a row per worker
    >>> update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
    >>> [float(x) for x in jnp.sum(update, axis=1)]
    [2.0, 2.0]

  References:
    Eghlidi and Jaggi, `Sparse Communication for Training Deep Networks
    <https://arxiv.org/abs/2009.09271>`_, 2020.
  """
  wanted = parse_density(density)
  seed = checks.check_seed("seed", seed)

  def select(acc: Accumulator, state: State, rank: jax.Array) -> Selection:
    size = accumulator.size(acc)
    k = jnp.asarray(target_at(wanted, state.step, size), jnp.int32)
    indices = _spread(seed, state.step, k, target_range(wanted, size)[1], size)
    return Selection(k, take_from(indices, size), threshold=state.threshold)

  algorithm = Algorithm(select, picks="common")
  # As many slots as there are picks: nothing is ever truncated.
  options = Options(num_workers, 1.0, residual_dtype, nonfinite, dense_mask, max_consecutive_skips)
  return sparsifier(algorithm, wanted, axis_name, options)


def _spread(seed: int, step: jax.Array, k: jax.Array, most: int, size: int) -> jax.Array:
  """One random index of each of ``k`` equal parts, int32 ``[most]``; anything beyond the k-th."""
  # Not a permutation of N elements, of which k are kept: the cost is to follow k.
  places, shifts = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
  part = jnp.arange(most, dtype=jnp.int32)
  share, rest = size // k, size % k
  start = part * share + jnp.minimum(part, rest)
  index = start + jax.random.randint(places, (most,), 0, share + (part < rest))
  # Turned round by a random shift: without it, the longer parts' elements would be sent less often.
  shift = jax.random.randint(shifts, (), 0, size)
  left = size - shift
  return jnp.where(index < left, index + shift, index - left)
