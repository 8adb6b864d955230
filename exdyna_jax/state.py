"""The state of a sparsifier, its statistics, and how they lie on a mesh."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .threshold import as_threshold
from .varying import AxisName, axis_tuple, check_axis_name


class Stats(NamedTuple):
  """What the last step did; all arrays are the same on all workers.

  Attributes:
    density: float32 ``[]``, entries sent / N, of the sparse leaves, as all but ``bytes_sent``.
      Single steps scatter around the target, up to the capacity; where a worker found more than
      that, it is lower than ``sum(counts) / N``.
    selected: int32 ``[]``, entries sent; one that several workers have picked counts once.
    counts: int32 ``[n]``, entries that qualified on each worker, sent or not. Where one worker or
      a random key picks for all (`clt_k`, `random_k`), the same number for each.
    threshold_used: widest float ``[]``, the threshold of this step: the mean, where each worker has
      its own (`sage`, `sidco`); 0 where there is none.
    padding_ratio: float32 ``[]``, ``n * max(counts) / sum(counts)``; 1 is perfect balance.
    overflow: int32 ``[]``, entries that qualified but exceeded the capacity, and wait.
    skipped: int32 ``[]``, steps skipped so far because of NaN or Inf.
    consecutive_skips: int32 ``[]``, steps skipped in a row, up to this one.
    bytes_sent: float32 ``[]``, by each worker in this step, by ring collectives. Messages have
      fixed sizes (a few sizes, under a schedule): empty slots count. The sums of a search for the
      threshold, which is rare, do not.
  """

  density: jax.Array
  selected: jax.Array
  counts: jax.Array
  threshold_used: jax.Array
  padding_ratio: jax.Array
  overflow: jax.Array
  skipped: jax.Array
  consecutive_skips: jax.Array
  bytes_sent: jax.Array


class State(NamedTuple):
  """State of a sparsifier: a pytree of arrays, the same on all workers but for ``residual``.

  Attributes:
    step: int32 ``[]``, steps taken; skipped ones do not count.
    residual: ``[N]`` on each worker, ``[n * N]`` outside of the mapped function: what has not been
      sent. Part of a checkpoint.
    threshold: widest float ``[]``, what the next step starts from; 0 where there is none.
    boundaries: int32 ``[n + 1]``, partition boundaries in blocks, of the next step; zeros where
      there are no partitions.
    memory: what the algorithm remembers beside these.
    stats: `Stats` of the last step.
  """

  step: jax.Array
  residual: jax.Array
  threshold: jax.Array
  boundaries: jax.Array
  memory: Any
  stats: Stats


class PerWorker(NamedTuple):
  """Numbers in an algorithm's memory of which each worker has its own; all workers know all."""

  values: jax.Array  # [n]


def empty_stats(num_workers: int) -> Stats:
  """Statistics before the first step."""
  # A buffer of its own for each field: the same one twice cannot be donated.
  return Stats(
    density=jnp.zeros((), jnp.float32),
    selected=jnp.zeros((), jnp.int32),
    counts=jnp.zeros((num_workers,), jnp.int32),
    threshold_used=as_threshold(0.0),
    padding_ratio=jnp.ones((), jnp.float32),
    overflow=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
    consecutive_skips=jnp.zeros((), jnp.int32),
    bytes_sent=jnp.zeros((), jnp.float32),
  )


def check_state(state: Any, size: int, num_workers: int) -> None:
  """Raises unless ``state`` is ours and was made for ``size`` elements on ``num_workers``."""
  if not isinstance(state, State):
    raise TypeError(
      f"update needs the State that init returned, got {type(state).__name__}. In an optax.chain,"
      " pass the state of the whole chain to the update of the whole chain. After a checkpoint, put"
      " the leaves back: jax.tree.unflatten(jax.tree.structure(tx.init(params)), leaves)."
    )
  made_for = state.boundaries.shape[0] - 1
  if made_for != num_workers:
    raise ValueError(
      f"the state was made for {made_for} workers, but the mesh axis has {num_workers}. Outside of"
      f" the mapped function, exdyna_jax.reshard_state(opt_state, {num_workers}) turns it; or make"
      f" it anew with init, with num_workers={num_workers} if that is given."
    )
  shape = state.residual.shape
  if shape == (size,):
    return
  cure = "The state belongs to another model: make it anew with init for these parameters."
  if shape == (num_workers * size,):
    cure = (
      "It holds the residuals of all workers: split it over the mesh axis, with"
      " in_specs=exdyna_jax.state_specs(opt_state, axis_name). Under pmap or vmap, call init inside"
      " of the mapped function."
    )
  raise ValueError(f"residual has shape {shape}, but the gradients need ({size},). {cure}")


def check_memory(state: State, init: Callable[[], tuple[Any, Any, Any]]) -> None:
  """Raises ValueError unless the memory is of the kind that ``init`` makes."""
  _, _, memory = jax.eval_shape(init)
  found, needed = (str(jax.tree.structure(tree)) for tree in (state.memory, memory))
  if found != needed:
    raise ValueError(
      f"the state belongs to another algorithm: its memory is {found}, not {needed}. Make the state"
      " anew with the init of this one."
    )


def is_state(node: Any) -> bool:
  """True for the state of a sparsifier."""
  return isinstance(node, State)


def state_specs(tree: Any, axis_name: AxisName) -> Any:
  """PartitionSpecs for a tree that holds a sparsifier's state somewhere.

  ``residual -> PartitionSpec(axis_name)``, every other array ``-> PartitionSpec()``. For
  ``in_specs`` and ``out_specs`` of ``jax.shard_map``, and for NamedShardings.

  Args:
    tree: an optax state, a TrainState or any pytree around them; arrays or abstract values, as
      from ``jax.eval_shape(tx.init, params)``.
    axis_name: the mesh axis of the workers, or a tuple of names.

  Returns:
    A tree of the same structure with a PartitionSpec for every array.

  Raises:
    TypeError: ``axis_name`` is not a name or a tuple of names.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from exdyna_jax import exdyna
    >>> tx = optax.chain(exdyna(1e-3, "data", num_workers=8), optax.sgd(0.1))
    >>> specs = state_specs(jax.eval_shape(tx.init, {"w": jnp.zeros(1000)}), "data")
    >>> specs[0].residual == PartitionSpec("data"), specs[0].threshold == PartitionSpec()
    (True, True)
  """
  check_axis_name(axis_name)
  axes = axis_tuple(axis_name)
  sharded = PartitionSpec(axes[0] if len(axes) == 1 else axes)

  def specs(node):
    replicated = jax.tree.map(lambda _: PartitionSpec(), node)
    return replicated._replace(residual=sharded) if is_state(node) else replicated

  return jax.tree.map(specs, tree, is_leaf=is_state)


def get_stats(tree: Any) -> Stats:
  """The statistics of the last step.

  Args:
    tree: a tree that holds exactly one sparsifier's state, such as the state of an
      ``optax.chain``.

  Returns:
    `Stats`, a NamedTuple of arrays: ready for a metrics dict, also under ``jax.jit``.

  Raises:
    ValueError: the tree holds no state of a sparsifier, or several.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> from exdyna_jax import exdyna
    >>> tx = optax.chain(exdyna(1e-3, "data", num_workers=8), optax.sgd(0.1))
    >>> int(get_stats(tx.init({"w": jnp.zeros(1000)})).skipped)
    0
  """
  states = [s for s in jax.tree.leaves(tree, is_leaf=is_state) if is_state(s)]
  if len(states) != 1:
    raise ValueError(
      f"get_stats found {len(states)} sparsifier states in a {type(tree).__name__}, and needs"
      " exactly one. Pass the optimizer state that holds it, or the part of it you mean."
    )
  return states[0].stats
