"""How a tree that holds a sparsifier's state lies on a mesh, and what its last step did."""

import inspect
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from .checks import check_order
from .state import Stats, has_fields, is_state, key_name, leaf
from .varying import AxisName, axis_tuple, check_axis_name
from .wrappers import check_wrappers


def state_specs(tree: Any, axis_name: AxisName) -> Any:
  """PartitionSpecs for a tree that holds a sparsifier's state somewhere.

  ``residual -> PartitionSpec(axis_name)``, every other array, and a residual without elements
  (that of `dense`), ``-> PartitionSpec()``. For ``in_specs`` and ``out_specs`` of
  ``jax.shard_map``, and for NamedShardings.

  Args:
    tree: an optax state, a TrainState or any pytree around them; arrays or abstract values, as
      from ``jax.eval_shape(tx.init, params)``. Also where the `State` has become a mapping of its
      fields, as in ``flax.nnx.state(optimizer)`` and in checkpoints.
    axis_name: the mesh axis of the workers, or a tuple of names.

  Returns:
    A tree of the same structure with a PartitionSpec for every array.

  Raises:
    TypeError: ``axis_name`` is not a name or a tuple of names, or ``tree`` is no state but what
      makes it.
    ValueError: the state is that of a wrapper which must not stand around a sparsifier:
      ``optax.MultiSteps`` or ``optax.apply_if_finite``.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from exdyna_jax import exdyna
    >>> tx = optax.chain(exdyna(1e-3, "data", num_workers=8), optax.sgd(0.1))
    >>> specs = state_specs(jax.eval_shape(tx.init, {"w": jnp.zeros(1000)}), "data")
    >>> specs[0].residual == PartitionSpec("data"), specs[0].threshold == PartitionSpec()
    (True, True)
  """
  check_order("state_specs(tree, axis_name)", tree, str, axis_name)
  check_axis_name(axis_name)
  if isinstance(tree, optax.GradientTransformation) or inspect.isroutine(tree):
    raise TypeError(
      f"state_specs needs a state, got a {type(tree).__name__}. Pass"
      " jax.eval_shape(tx.init, params)."
    )
  check_wrappers(tree, is_state)
  axes = axis_tuple(axis_name)
  sharded = PartitionSpec(axes[0] if len(axes) == 1 else axes)

  def spec(path, array):
    # Where the mesh axes are Auto, an empty array comes back replicated, whatever is asked for: any
    # other spec would compile the step twice.
    return sharded if key_name(path[0]) == "residual" and array.size > 0 else PartitionSpec()

  def specs(node):
    if not has_fields(node):
      return PartitionSpec()
    return jax.tree_util.tree_map_with_path(spec, node)

  return jax.tree.map(specs, tree, is_leaf=has_fields)


def get_stats(tree: Any) -> Stats:
  """The statistics of the last step.

  Args:
    tree: a tree that holds exactly one sparsifier's state, such as the state of an
      ``optax.chain``, a TrainState, a ``flax.nnx.Optimizer`` or its state.

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
  states = [s for s in jax.tree.leaves(tree, is_leaf=has_fields) if has_fields(s)]
  if len(states) != 1:
    raise ValueError(
      f"get_stats found {len(states)} sparsifier states in a {type(tree).__name__}, and needs"
      " exactly one. Pass the optimizer state that holds it, or the part of it you mean."
    )
  return Stats(*(leaf(states[0], "stats", name) for name in Stats._fields))
