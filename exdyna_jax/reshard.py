"""The same state for another number of workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from . import checks
from .partition import balanced_boundaries, equal_boundaries
from .state import PerWorker, State, empty_stats, is_state


@checks.default_promotion
def reshard_state(tree: Any, num_workers: int) -> Any:
  r"""The same state for another number of workers: what waits to be sent is kept.

  The mean residual, which is what the parameters still lack, stays what it was:

  .. math::
    \frac{1}{n'} \sum_{j=1}^{n'} residual'^{(j)} = \frac{1}{n} \sum_{r=1}^{n} residual^{(r)}

  To this end the n workers share out the unit interval equally, so do the n' new ones, and each new
  one takes from each old one the share of its part that was the old one's: from 8 to 4, means of
  pairs; from 4 to 8, every residual twice.

  Args:
    tree: an optax state, a TrainState or any pytree with states of sparsifiers, as it is outside of
      the mapped function: residuals ``[n * N]``.
    num_workers: n', the new number of workers, at least 1.

  Returns:
    The tree with states for n' workers, in which all arrays are NumPy's; other leaves are left
    alone. Put it onto the new mesh with ``jax.device_put`` and `state_specs`. Threshold, step and
    skipped steps are kept; partitions are made anew, from the load where it is known; the other
    statistics of the last step are cleared. With several hosts, call it on all: each gets all.

  Raises:
    TypeError: ``num_workers`` is not an integer.
    ValueError: ``num_workers`` is less than 1; the tree holds no state of a sparsifier, or one as
      it is inside of the mapped function or under pmap.

  Example:
    >>> import jax.numpy as jnp
    >>> from exdyna_jax import exdyna
    >>> state = exdyna(0.5, "data", num_workers=4).init(jnp.zeros(1))
    >>> state = state._replace(residual=jnp.array([1.0, 2.0, 3.0, 6.0]))  # N = 1
    >>> reshard_state(state, 2).residual, reshard_state(state, 1).residual
    (array([1.5, 4.5], dtype=float32), array([3.], dtype=float32))
  """
  num_workers = checks.check_count("num_workers", num_workers)
  if not any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state))):
    raise ValueError(
      f"reshard_state found no state of a sparsifier in a {type(tree).__name__}. Pass the optimizer"
      " state that holds it. A checkpoint that was restored as dicts has lost its types: restore it"
      " into the structure of init, target = jax.eval_shape(tx.init, params)."
    )

  def reshard(node):
    return _reshard(node, num_workers) if is_state(node) else node

  return jax.tree.map(reshard, tree, is_leaf=is_state)


def _reshard(state: State, num_workers: int) -> State:
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
    raise ValueError(
      "reshard_state needs the values of the state, which are not known under jax.jit and within"
      " jax.shard_map. Call it outside of them."
    )
  state = jax.tree.map(_on_this_host, state)
  n = state.boundaries.shape[-1] - 1
  if state.boundaries.ndim != 1 or state.residual.ndim != 1 or state.residual.shape[0] % n:
    raise ValueError(
      f"residual has shape {state.residual.shape}, but reshard_state needs those of all {n} workers"
      " in one vector [n * N], as under jax.shard_map with state_specs. Call it outside of the"
      " mapped function; under pmap or vmap, lay out the state like that first."
    )
  shares = _overlaps(n, num_workers)
  rows = np.asarray(state.residual).reshape(n, -1)

  def of_new_workers(memory):
    if not isinstance(memory, PerWorker):
      return memory
    return PerWorker(jnp.asarray(shares, memory.values.dtype) @ memory.values)

  num_blocks, loads = int(state.boundaries[-1]), getattr(state.memory, "loads", ())
  if len(loads):
    boundaries = balanced_boundaries(jnp.asarray(loads), num_workers)
  else:
    boundaries = equal_boundaries(num_blocks, num_workers)
  stats = empty_stats(num_workers)._replace(
    skipped=state.stats.skipped, consecutive_skips=state.stats.consecutive_skips
  )
  residual: Any = np.concatenate([_mix(rows, share) for share in shares])
  new = state._replace(
    residual=residual,
    boundaries=boundaries,
    memory=jax.tree.map(of_new_workers, state.memory, is_leaf=lambda x: isinstance(x, PerWorker)),
    stats=stats,
  )
  return jax.device_get(new)


def _on_this_host(x: Any) -> np.ndarray:
  if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
    return multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(jax.device_get(x))


def _overlaps(old: int, new: int) -> np.ndarray:
  """``[new, old]``: which share of each new worker's part of ``[0, 1]`` was each old one's."""
  # In units of 1 / (old new), so that the numbers are whole and the sums exact.
  first = np.maximum(np.arange(new)[:, None] * old, np.arange(old)[None, :] * new)
  last = np.minimum(np.arange(1, new + 1)[:, None] * old, np.arange(1, old + 1)[None, :] * new)
  return np.maximum(last - first, 0) / old


def _mix(rows: np.ndarray, share: np.ndarray) -> np.ndarray:
  """``share @ rows`` in the dtype of ``rows``; one row at a time, since they may be long."""
  wide = np.zeros(rows.shape[1], np.promote_types(np.float32, rows.dtype))
  for r in np.flatnonzero(share):
    wide += share[r].astype(wide.dtype) * rows[r].astype(wide.dtype)
  return wide.astype(rows.dtype)
