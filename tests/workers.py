"""Runs a transformation on n workers, in each of the ways that JAX maps a function over an axis.

A test that holds for all ways takes `how` from `WAYS`. In all of them, gradients are trees with
leaves `[n, ...]`, a row per worker.
"""

import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import get_stats, state_specs

AXIS = "data"
WAYS = ("shard_map", "unchecked", "pmap", "vmap")


class Workers(NamedTuple):
  """n workers that share a transformation."""

  n: int
  how: str
  init: Any  # (params) -> state
  step: Any  # (state, grads [n, ...]) -> updates and state, as the way returns them


def mesh_of(n, axis_names=(AXIS,), shape=None):
  """The first n devices as a mesh with Auto axes."""
  shape = shape or (n,)
  types = (jax.sharding.AxisType.Auto,) * len(axis_names)
  return jax.make_mesh(shape, axis_names, axis_types=types, devices=jax.devices()[:n])


def shardings(mesh, specs):
  """PartitionSpecs as NamedShardings."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def sharded_step(tx, mesh, params, axis=AXIS, check=True, **jit_options):
  """A jitted step of `tx` under `jax.shard_map`, and the specs of its state."""
  specs = state_specs(jax.eval_shape(tx.init, params), axis)

  def step(state, grads):
    return tx.update(jax.tree.map(lambda g: g[0], grads), state)

  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(specs, P(axis)), out_specs=(P(), specs), check_vma=check
  )
  return jax.jit(mapped, **jit_options), specs


def run_on(tx, n, params, how):
  """Compiles `tx` for n workers. Under shard_map, init runs outside of the mapped function."""
  if how in ("shard_map", "unchecked"):
    mesh = mesh_of(n)
    step, specs = sharded_step(tx, mesh, params, check=how == "shard_map")
    placed = jax.jit(tx.init, out_shardings=shardings(mesh, specs))
    return Workers(n, how, placed, step)
  if how == "vmap":
    ranks = np.arange(n)
    init = jax.jit(jax.vmap(lambda _, params: tx.init(params), (0, None), axis_name=AXIS))
    step = jax.vmap(lambda state, grads: tx.update(grads, state), axis_name=AXIS)
    return Workers(n, how, lambda params: init(ranks, params), jax.jit(step))
  devices = jax.devices()[:n]
  init = jax.pmap(lambda _, params: tx.init(params), AXIS, in_axes=(0, None), devices=devices)
  step = jax.pmap(lambda state, grads: tx.update(grads, state), AXIS, devices=devices)
  return Workers(n, how, lambda params: init(np.arange(n), params), step)


def copies(workers, tree):
  """A replicated tree as one NumPy tree per worker, for comparison bit by bit."""
  if workers.how in ("pmap", "vmap"):
    return [jax.tree.map(lambda x, r=r: np.asarray(x)[r], tree) for r in range(workers.n)]
  return [
    jax.tree.map(lambda x, r=r: np.asarray(x.addressable_shards[r].data), tree)
    for r in range(workers.n)
  ]


def residuals(workers, state):
  """The residuals of all workers, `[n, N]`."""
  return np.asarray(state.residual).reshape(workers.n, -1)


def collectives(hlo):
  """Shapes and kind of every collective in the text of a compiled program."""
  kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
  return re.findall(rf"= ([^=]*) ({kinds})(?:-start)?\(", hlo)


def agreed(workers, updates, state):
  """Updates and state without residual, once; fails unless all workers hold the same bits."""
  rows = copies(workers, (updates, state._replace(residual=())))
  for row in rows[1:]:
    for got, first in zip(jax.tree.leaves(row), jax.tree.leaves(rows[0]), strict=True):
      assert got.tobytes() == first.tobytes()
  return rows[0]


def stats_of(workers, state):
  """Statistics as NumPy, as the first worker sees them."""
  return copies(workers, get_stats(state))[0]
