"""The state of a sparsifier and its statistics; checks of what a user hands back."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .threshold import as_threshold
from .varying import AxisName, local_params, placement


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


def empty_residual(
  axis_name: AxisName, size: int, num_workers: int, bound: bool, dtype: Any
) -> jax.Array:
  """Zeros: ``[size]`` of this worker inside of the mapped function, of all workers outside."""
  if size == 0:  # not sharded, see `state_specs`
    return jnp.zeros((0,), dtype)
  if bound:
    return local_params(jnp.zeros((size,), dtype), axis_name)
  return jnp.zeros((num_workers * size,), dtype, out_sharding=placement(axis_name, num_workers))


def check_state(state: Any, size: int, num_workers: int, residual_dtype: Any) -> None:
  """Raises unless ``state`` is ours and was made for these elements, workers and dtype."""
  if not isinstance(state, State):
    cure = (
      "In an optax.chain, pass the state of the whole chain to the update of the whole chain. If"
      " the leaves were saved alone, put them back:"
      " jax.tree.unflatten(jax.tree.structure(tx.init(params)), leaves)."
    )
    if has_fields(state):
      # Not by its leaves: those of a mapping are sorted by name, those of the State are not.
      cure = (
        "It holds the fields of one, so a checkpoint or a library has lost the types: restore into"
        " the structure of init, target = jax.eval_shape(tx.init, params); in Orbax:"
        " ocp.StandardCheckpointer().restore(path, target)."
      )
    raise TypeError(
      f"update needs the State that init returned, got {type(state).__name__}. The gradients come"
      f" first: update(gradients, state). {cure}"
    )
  made_for = state.boundaries.shape[0] - 1
  if made_for != num_workers:
    raise ValueError(
      f"the state was made for {made_for} workers, but the mesh axis has {num_workers}. Outside of"
      f" the mapped function, exdyna_jax.reshard_state(opt_state, {num_workers}) turns it; or make"
      f" it anew with init, with num_workers={num_workers} if that is given."
    )
  shape, dtype = state.residual.shape, state.residual.dtype
  if dtype != residual_dtype:
    raise ValueError(
      f"residual is of {dtype}, but residual_dtype={residual_dtype}. Restore the state in the"
      " dtypes in which it was saved, and keep residual_dtype."
    )
  if shape == (size,):
    return
  cure = (
    "The state belongs to another model, or these are not the gradients of the parameters that init"
    " has seen: make it anew with init for these parameters."
  )
  if shape == (num_workers * size,):
    cure = (
      "It holds the residuals of all workers: split it over the mesh axis, with"
      " in_specs=exdyna_jax.state_specs(opt_state, axis_name). Under pmap or vmap, call init inside"
      " of the mapped function."
    )
  elif num_workers * math.prod(shape) == size:
    cure = (
      "It is the residual of one worker, split over all of them: return the state with"
      " out_specs=exdyna_jax.state_specs(opt_state, axis_name) too."
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


def has_fields(node: Any, kind: Any = State) -> bool:
  """True for a ``kind`` of NamedTuple of ours, also if it has become a mapping of its fields."""
  # flax.nnx and checkpoints store a tree by its paths, and return a mapping in place of our State.
  return isinstance(node, kind) or (isinstance(node, Mapping) and set(node) == set(kind._fields))


def field(node: Any, name: str) -> Any:
  """The field of a node that `has_fields`."""
  return node[name] if isinstance(node, Mapping) else getattr(node, name)


def leaf(node: Any, *names: str) -> Any:
  """The array in a field, or in a field of a field, of a node that `has_fields`."""
  # flax.nnx wraps each array in a variable: a tree of one leaf.
  return jax.tree.leaves(functools.reduce(field, names, node))[0]


def key_name(key: Any) -> str:
  """The name of a field in the path to a leaf, whether of a NamedTuple or of a mapping."""
  return jax.tree_util.keystr((key,), simple=True)
