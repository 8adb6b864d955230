"""The state of a sparsifier, its statistics, and how they lie on a mesh."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .threshold import as_threshold
from .varying import AxisName, axis_tuple, check_axis_name


class Stats(NamedTuple):
  """What the last step did. All arrays are the same on all workers."""

  density: jax.Array  # float32 [], indices sent / N
  selected: jax.Array  # int32 [], indices sent by all workers
  counts: jax.Array  # int32 [n], indices that qualified on each worker, sent or not
  threshold_used: jax.Array  # widest float [], the threshold of this step
  padding_ratio: jax.Array  # float32 [], n * max(counts) / sum(counts); 1 is perfect balance
  overflow: jax.Array  # int32 [], indices that qualified but exceeded the capacity
  skipped: jax.Array  # int32 [], steps skipped so far because of NaN or Inf
  bytes_sent: jax.Array  # float32 [], by this worker in this step, with ring collectives


class State(NamedTuple):
  """State of a sparsifier; ``threshold`` and ``boundaries`` are what the next step starts from."""

  step: jax.Array  # int32 [], steps taken; skipped ones do not count
  residual: jax.Array  # [N] on each worker, [n * N] outside: gradients not sent so far
  threshold: jax.Array  # widest float []
  boundaries: jax.Array  # int32 [n + 1], partition boundaries in blocks
  memory: Any  # what the algorithm remembers beside these; arrays, the same on all workers
  stats: Stats  # of the last step


def empty_stats(num_workers: int) -> Stats:
  """Statistics before the first step."""
  zero, nothing = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
  return Stats(
    density=zero,
    selected=nothing,
    counts=jnp.zeros((num_workers,), jnp.int32),
    threshold_used=as_threshold(0.0),
    padding_ratio=jnp.ones((), jnp.float32),
    overflow=nothing,
    skipped=nothing,
    bytes_sent=zero,
  )


def check_state(state: Any, size: int, num_workers: int) -> None:
  """Raises unless ``state`` is ours and was made for ``size`` elements on ``num_workers``."""
  if not isinstance(state, State):
    raise TypeError(
      f"update needs the State that init returned, got {type(state).__name__}. In an optax.chain,"
      " pass the state of the whole chain to the update of the whole chain."
    )
  made_for = state.boundaries.shape[0] - 1
  if made_for != num_workers:
    raise ValueError(
      f"the state was made for {made_for} workers, but the mesh axis has {num_workers}. Make it"
      " anew with init for this mesh."
    )
  shape = state.residual.shape
  if shape == (size,):
    return
  cure = "The state belongs to another model: make it anew with init for these parameters."
  if shape == (num_workers * size,):
    cure = (
      "It holds the residuals of all workers: split it over the mesh axis, with"
      " in_specs=exdyna_jax.state_specs(opt_state, axis_name)."
    )
  raise ValueError(f"residual has shape {shape}, but the gradients need ({size},). {cure}")


def _is_state(node: Any) -> bool:
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
    return replicated._replace(residual=sharded) if _is_state(node) else replicated

  return jax.tree.map(specs, tree, is_leaf=_is_state)


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
  states = [s for s in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(s)]
  if len(states) != 1:
    raise ValueError(
      f"get_stats found {len(states)} sparsifier states in a {type(tree).__name__}, and needs"
      " exactly one. Pass the optimizer state that holds it, or the part of it you mean."
    )
  return states[0].stats
