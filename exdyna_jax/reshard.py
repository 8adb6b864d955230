"""The same state for another number of workers."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from . import checks
from .partition import balanced_boundaries, equal_boundaries
from .state import PerWorker, empty_stats, field, has_fields, key_name, leaf


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
      the mapped function: residuals ``[n * N]``. Also where the `State` has become a mapping of its
      fields, as in ``flax.nnx.state(optimizer)``.
    num_workers: n', the new number of workers, at least 1.

  Returns:
    The tree, of the same structure, with states for n' workers, in which all arrays are NumPy's.
    Everything else is left alone: put the tree onto the new mesh with ``jax.device_put`` and
    `state_specs`, and replace the transformation in a TrainState. Threshold, step and skipped steps
    are kept; partitions are made anew, from the load where it is known; the other statistics of the
    last step are cleared. With several hosts, call it on all: each gets all.

  Raises:
    TypeError: ``num_workers`` is not an integer, or the arguments are swapped.
    ValueError: ``num_workers`` is less than 1; the tree holds no state of a sparsifier, or one as
      it is inside of the mapped function or under pmap, or one without values.

  Example:
    >>> import jax.numpy as jnp
    >>> from exdyna_jax import exdyna
    >>> state = exdyna(0.5, "data", num_workers=4).init(jnp.zeros(1))
    >>> state = state._replace(residual=jnp.array([1.0, 2.0, 3.0, 6.0]))  # N = 1
    >>> reshard_state(state, 2).residual, reshard_state(state, 1).residual
    (array([1.5, 4.5], dtype=float32), array([3.], dtype=float32))
  """
  checks.check_order("reshard_state(tree, num_workers)", tree, numbers.Integral, num_workers)
  num_workers = checks.check_count("num_workers", num_workers)
  if not any(map(has_fields, jax.tree.leaves(tree, is_leaf=has_fields))):
    raise ValueError(
      f"reshard_state found no state of a sparsifier in a {type(tree).__name__}. Pass the optimizer"
      " state that holds it, with its structure: leaves that were saved alone are put back by"
      " jax.tree.unflatten(jax.tree.structure(jax.eval_shape(tx.init, params)), leaves)."
    )

  def reshard(node):
    return _reshard(node, num_workers) if has_fields(node) else node

  return jax.tree.map(reshard, tree, is_leaf=has_fields)


def _reshard(state: Any, num_workers: int) -> Any:
  _check_values(state)
  state = jax.tree.map(_on_this_host, state)
  n = _check_layout(leaf(state, "residual").shape, leaf(state, "boundaries").shape)
  shares = _overlaps(n, num_workers)
  rows = leaf(state, "residual").reshape(n, -1)

  def of_new_workers(node):
    if not has_fields(node, PerWorker):
      return node
    return jax.tree.map(lambda x: jnp.asarray(shares, x.dtype) @ x, node)

  num_blocks, loads = int(leaf(state, "boundaries")[-1]), _loads(state)
  if len(loads):
    boundaries = balanced_boundaries(jnp.asarray(loads), num_workers)
  else:
    boundaries = equal_boundaries(num_blocks, num_workers)
  stats = empty_stats(num_workers)._asdict()
  del stats["skipped"], stats["consecutive_skips"]
  new: dict[tuple[str, ...], Any] = {("stats", name): value for name, value in stats.items()}
  new["residual",] = np.concatenate([_mix(rows, share) for share in shares])
  new["boundaries",] = boundaries

  # By paths, so that mappings and the variables of flax.nnx stay what they are.
  def renew(path, old):
    names = tuple(map(key_name, path[:2]))
    return new.get(names[:1], new.get(names, old))

  state = jax.tree.map(of_new_workers, state, is_leaf=lambda x: has_fields(x, PerWorker))
  return jax.device_get(jax.tree_util.tree_map_with_path(renew, state))


def _loads(state: Any) -> Any:
  """The loads of the blocks, if the algorithm remembers any."""
  leaves = jax.tree_util.tree_leaves_with_path(field(state, "memory"))
  return next((x for path, x in leaves if key_name(path[0]) == "loads"), ())


def _check_values(state: Any) -> None:
  """Raises ValueError if a leaf is traced or abstract."""
  leaves = jax.tree.leaves(state)
  if any(isinstance(x, jax.core.Tracer) for x in leaves):
    raise ValueError(
      "reshard_state needs the values of the state, which are not known under jax.jit and within"
      " jax.shard_map. Call it outside of them."
    )
  abstract = [type(x).__name__ for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
  if abstract:
    raise ValueError(
      f"reshard_state needs the values of the state, got a {abstract[0]}. Restore the state for the"
      " old number of workers first, then reshard it. For the shapes alone, call jax.eval_shape on"
      " the init of a transformation for the new number."
    )


def _check_layout(residual: tuple[int, ...], boundaries: tuple[int, ...]) -> int:
  """The number of workers of a state with these shapes; ValueError unless it is as outside."""
  n = boundaries[-1] - 1
  if len(boundaries) == 1 and len(residual) == 1 and residual[0] % n == 0:
    return n
  cure = "Call it outside of the mapped function."
  if len(boundaries) == len(residual) == 2:
    cure = (
      "Under pmap and vmap everything has a row for each worker. Take the first, but for the"
      " residual: jax.tree.map(lambda x, spec: x[0] if spec == P() else x.reshape(-1), opt_state,"
      " state_specs(opt_state, axis_name)). And back, for m workers: np.stack([x] * m) if spec =="
      " P() else x.reshape(m, -1)."
    )
  elif len(residual) == 2:
    cure = "Reshape it: residual.reshape(-1)."
  elif len(boundaries) == 2:
    cure = (
      f"The boundaries, {boundaries}, are stacked. Under pmap and vmap, take x[0] of every leaf of"
      " opt_state but the residual; where the model is split, give the state of one part at a time."
    )
  raise ValueError(
    f"residual has shape {residual}, but reshard_state needs those of all {n} workers in one vector"
    f" [n * N], and everything else once, as under jax.shard_map with state_specs. {cure}"
  )


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
