"""Which values differ between workers: the cast to local, its check, agreed gathers.

Under ``jax.shard_map`` with ``check_vma=True`` every value carries the mesh axes over which it may
vary. Under ``check_vma=False``, ``pmap`` and ``vmap`` it does not, and nothing can be checked.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .checks import check_order
from .flat import is_float

AxisName = str | tuple[str, ...]


def axis_tuple(axis_name: AxisName) -> tuple[str, ...]:
  """``axis_name`` as a tuple of names."""
  return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def check_axis_name(axis_name: Any) -> None:
  """Raises unless ``axis_name`` is a string or a non-empty tuple of different strings."""
  is_tuple = isinstance(axis_name, tuple) and len(axis_name) > 0
  if not isinstance(axis_name, str) and not (
    is_tuple and all(isinstance(a, str) for a in axis_name)
  ):
    raise TypeError(
      f"axis_name must be the name of a mesh axis or a tuple of names, got {axis_name!r}."
    )
  if len(set(axis_tuple(axis_name))) < len(axis_tuple(axis_name)):
    raise ValueError(f"axis_name={axis_name!r} names an axis twice. Name each mesh axis once.")


def bound_axis_size(axis_name: AxisName) -> int | None:
  """Number of workers along ``axis_name``, or None where the axis is not bound."""
  try:
    return jax.lax.axis_size(axis_tuple(axis_name))
  except NameError:
    return None


def check_bound(axis_name: AxisName, caller: str) -> int:
  """Number of workers along ``axis_name``; ValueError with the cure where it is not bound."""
  size = bound_axis_size(axis_name)
  if size is None:
    # The axes of shard_map and pmap; nothing public tells those of vmap.
    bound = jax.sharding.get_abstract_mesh().manual_axes
    others = f" ({_names(bound)} {'is' if len(bound) == 1 else 'are'})" if bound else ""
    raise ValueError(
      f"{caller} needs the mesh axis {axis_name!r}, which is not bound here{others}. Call it inside"
      f" jax.shard_map over a mesh with that axis (or inside jax.pmap or jax.vmap with"
      f" axis_name={axis_name!r})."
    )
  return size


def _names(axes: Iterable[str]) -> str:
  return ", ".join(map(repr, axes))


def check_num_workers(axis_name: AxisName, num_workers: int | None, size: int) -> None:
  """Raises ValueError if the user's ``num_workers`` is not the axis's ``size``."""
  if num_workers not in (None, size):
    raise ValueError(
      f"num_workers={num_workers}, but mesh axis {axis_name!r} has {size} workers. Leave it out"
      " or correct it. After reshard_state, a TrainState still holds the old tx: replace(tx=...)."
    )


def resolve_workers(
  axis_name: AxisName, num_workers: int | None, *, needed: bool
) -> tuple[int, bool]:
  """``(n, bound)``: the number of workers, and whether we are inside the mapped function.

  Where nothing tells n: 1 if it is not ``needed``, else ValueError with the three ways to tell.
  """
  size = bound_axis_size(axis_name)
  if size is not None:
    check_num_workers(axis_name, num_workers, size)
    return size, True
  if num_workers is not None:
    return num_workers, False
  mesh_shape = dict(jax.sharding.get_abstract_mesh().shape)
  if all(a in mesh_shape for a in axis_tuple(axis_name)):
    return math.prod(mesh_shape[a] for a in axis_tuple(axis_name)), False
  if not needed:
    return 1, False
  found = f" (the mesh that is set has {_names(mesh_shape)})" if mesh_shape else ""
  raise ValueError(
    f"the number of workers along {axis_name!r} is unknown in init{found}. Pass num_workers=, or"
    " call init under jax.set_mesh(mesh) with that axis, or inside jax.shard_map over it."
  )


def placement(axis_name: AxisName, size: int) -> PartitionSpec | None:
  """How an array of one part for each of ``size`` workers lies on the mesh of ``jax.set_mesh``.

  None where that is not ours to say: no such mesh, or axes that are not Explicit.
  """
  mesh, axes = jax.sharding.get_abstract_mesh(), axis_tuple(axis_name)
  explicit = set(axes) <= set(mesh.explicit_axes)
  fits = explicit and math.prod(mesh.shape[a] for a in axes) == size
  return PartitionSpec(axes) if fits else None


def _varying_axes(x: Any) -> frozenset[str]:
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def _checks_varying(axis_name: AxisName) -> bool:
  return set(axis_tuple(axis_name)) <= _varying_axes(jax.lax.axis_index(axis_tuple(axis_name)))


def local_params(params: Any, axis_name: AxisName) -> Any:
  """Parameters whose gradients stay on the worker that computed them.

  Inside ``jax.shard_map``, ``jax.grad`` with respect to replicated parameters sums the gradients
  over the mesh axis at once, densely, and nothing is left to compress. This cast marks the
  parameters as varying, so that ``jax.grad`` returns this worker's own gradients. It moves no data.

  .. warning::
    Take the mean of the loss over the axis (``jax.lax.pmean``) outside of the differentiated
    function: inside, it divides the local gradients by the number of workers, which nothing can
    detect. With ``check_vma=False``, do not sum the gradients yourself either.

  Args:
    params: pytree of arrays of any shape and dtype. Leaves that already vary are left alone.
    axis_name: name of the mesh axis over which the batch is split, or a tuple of names.

  Returns:
    The same values. Under ``check_vma=False``, ``pmap`` and ``vmap``, ``params`` itself.

  Raises:
    ValueError: the axis is not bound.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    >>> def gradient(w, x):
    ...   return jax.grad(lambda w: (w * x).sum())(local_params(w, "data"))
    >>> jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")),
    ...                       out_specs=P("data")))(jnp.ones(2), jnp.ones(2))
    Array([1., 1.], dtype=float32)
  """
  check_order("local_params(params, axis_name)", params, str, axis_name)
  check_axis_name(axis_name)
  check_bound(axis_name, "local_params")
  return vary(params, axis_tuple(axis_name)) if _checks_varying(axis_name) else params


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
  """``tree`` with all arrays typed as varying over ``axes``, which moves no data."""

  def cast(x):
    missing = tuple(a for a in axes if a not in _varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def other_axes(tree: Any, axis_name: AxisName) -> tuple[str, ...]:
  """The mesh axes beside ``axis_name`` over which floating-point leaves of ``tree`` vary.

  Along them, parameters are split: each part is exchanged by itself, with a state of its own.
  """
  leaves = [x for x in jax.tree.leaves(tree) if is_float(x)]
  axes = frozenset().union(*map(_varying_axes, leaves))
  return tuple(sorted(axes - set(axis_tuple(axis_name))))


def check_local(grads: Any, axis_name: AxisName) -> None:
  """Raises ValueError if a gradient is known to be summed over the axis already."""
  if not _checks_varying(axis_name):
    return
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    if not is_float(grad):
      continue
    missing = set(axis_tuple(axis_name)) - _varying_axes(grad)
    if missing:
      raise ValueError(
        f"gradient{jax.tree_util.keystr(path)} is the same on all workers of mesh axis"
        f" {sorted(missing)}, so that nothing is left to compress. Either jax.grad with respect to"
        " replicated parameters has already summed it: differentiate with respect to"
        f" exdyna_jax.local_params(params, {axis_name!r}). Or something in between has: a pmean,"
        " another sparsifier, or optax.MultiSteps around this one (accumulate local gradients in"
        " the step instead)."
      )


def check_whole(grads: Any) -> None:
  """Raises ValueError if a gradient is sharded over an Explicit mesh axis."""
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    spec = jax.typeof(grad).sharding.spec if is_float(grad) else ()
    axes = sorted({a for part in spec if part is not None for a in axis_tuple(part)})
    if axes:
      raise ValueError(
        f"gradient{jax.tree_util.keystr(path)}, {jax.typeof(grad)}, is sharded over the Explicit"
        f" mesh axes {axes}, and would have to be gathered to be part of one vector. Map over them"
        f" as well, with jax.shard_map(..., axis_names={set(axes)}) around update, so that each"
        " shard has a state of its own. Or gather it yourself: jax.sharding.reshard(grads, P())."
      )


def check_split(grads: Any, axes: tuple[str, ...], axis_name: AxisName) -> None:
  """Raises ValueError if a gradient does not vary over the `other_axes`."""
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    missing = set(axes) - _varying_axes(grad) if is_float(grad) else ()
    if missing:
      raise ValueError(
        f"gradient{jax.tree_util.keystr(path)} is the same along mesh axis {sorted(missing)}, over"
        " which other gradients or the state vary. Each part of the model selects and skips by"
        " itself, so the copies of this parameter would drift apart, as dense leaves too. Give it"
        " and its like a transformation of their own by optax.partition, such as"
        f" dense({axis_name!r})."
      )


# With one worker there is nothing to exchange. Where varying types are checked, only a collective
# can make a value invariant again: there a collective of one member stays, which sends nothing.
def _is_alone(axis_name: AxisName) -> bool:
  return bound_axis_size(axis_name) == 1 and not _checks_varying(axis_name)


def all_gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
  """``[m]`` of every worker as ``[n * m]``, the same and known to be the same everywhere."""
  axes = axis_tuple(axis_name)
  if _is_alone(axis_name):
    return x
  if _checks_varying(axis_name):
    # The default gather is typed varying, and P() outputs derived from it would be refused.
    return jax.lax.all_gather(local_params(x, axis_name), axes, tiled=True, to="invarying")
  return jax.lax.all_gather(x, axes, tiled=True)


def all_to_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
  """Row s of ``[n, m]`` goes to worker s; returns the rows that came from each, ``[n, m]``."""
  axes = axis_tuple(axis_name)
  name = axes[0] if len(axes) == 1 else axes  # vmap takes no tuple
  return jax.lax.all_to_all(local_params(x, axis_name), name, 0, 0, tiled=True)


def psum(x: jax.Array, axis_name: AxisName) -> jax.Array:
  """Sum over the workers, the same on all of them."""
  return x if _is_alone(axis_name) else jax.lax.psum(x, axis_tuple(axis_name))
