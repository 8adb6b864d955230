"""The baseline: the dense mean, with the statistics of the sparse ones."""

import jax
import jax.numpy as jnp
import optax

from .. import checks, exchange, flat
from ..algorithm import no_partitions
from ..state import State, check_state, empty_stats
from ..threshold import as_threshold
from ..varying import (
  AxisName,
  check_axis_name,
  check_bound,
  check_local,
  check_num_workers,
  other_axes,
  psum,
  resolve_workers,
  vary,
)


def dense(
  axis_name: AxisName, *, num_workers: int | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Mean gradient over the workers, all of it: what the sparsifiers are compared with.

  :math:`u = \frac{1}{n} \sum_r gradient^{(r)}`, each leaf summed in its own dtype. It takes local
  gradients, as the sparsifiers do, so that one training step serves both.

  Args:
    axis_name: mesh axis over which the batch is split, or a tuple of axes.
    num_workers: their number n. Needed only where ``init`` runs outside of the mapped function and
      without ``jax.set_mesh``; default None.

  Returns:
    An ``optax.GradientTransformationExtraArgs``; its residual is empty, its density 1, and NaN
    goes through.

  Raises:
    TypeError: an argument is of the wrong type, a leaf is complex, or ``update`` gets no `State`.
    ValueError: an argument is out of range, the axis is not bound, gradients are summed already,
      there are more than 2**31 - 2 elements, or the state was made for another number of workers.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> tx = dense("data")
    >>> def mean(grads):
    ...   return tx.update(grads, tx.init(grads))[0]
    >>> jax.vmap(mean, axis_name="data")(jnp.array([1.0, 3.0]))
    Array([2., 2.], dtype=float32)
  """
  check_axis_name(axis_name)
  if num_workers is not None:
    checks.check_count("num_workers", num_workers)

  @checks.default_promotion
  def init_fn(params):
    size = flat.flat_size(params)
    n, bound = resolve_workers(axis_name, num_workers, needed=size > 0)
    state = State(
      step=jnp.zeros((), jnp.int32),
      residual=jnp.zeros((0,), jnp.float32),
      threshold=as_threshold(0.0),
      boundaries=no_partitions(n),
      memory=(),
      stats=empty_stats(n),
    )
    return vary(state, other_axes(params, axis_name)) if bound else state

  @checks.default_promotion
  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    n = check_bound(axis_name, "update")
    check_num_workers(axis_name, num_workers, n)
    size = flat.flat_size(updates)
    check_state(state, 0, n, jnp.float32)  # nothing waits: the residual has no elements
    check_local(updates, axis_name)

    def mean(leaf):
      return psum(leaf, axis_name) / n if flat.is_float(leaf) else flat.zeros(leaf)

    updates = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float) else x, updates)
    sent = [x for x in jax.tree.leaves(updates) if flat.is_float(x)]
    traffic = sum(exchange.all_reduce_bytes(n, x.size, x.dtype.itemsize) for x in sent)
    # Nobody selects: all take part in everything, in equal shares.
    share, rest = divmod(size, n)
    stats = empty_stats(n)._replace(
      density=jnp.ones((), jnp.float32),
      selected=jnp.asarray(size, jnp.int32),
      counts=(share + (jnp.arange(n) < rest)).astype(jnp.int32),
      bytes_sent=jnp.asarray(traffic, jnp.float32),
    )
    new = state._replace(step=optax.safe_increment(state.step), stats=stats)
    return jax.tree.map(mean, updates), vary(new, other_axes(state, axis_name))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
