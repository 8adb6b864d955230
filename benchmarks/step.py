"""What a step costs besides the network, against the passes over memory that nobody can avoid.

- local step: `update` of one of n workers, collectives replaced by local copies, against a donated
  ``residual + gradient`` and an update of zeros; from a flat gradient and from a tree of 20 leaves
- leaves: `update` for a tree of 160 leaves of a transformer's shapes against one leaf of equal N
- full step: on 8 virtual devices of this machine, which has no network, against ``lax.pmean``
- compile: seconds to compile `update` on the virtual devices

Run me: python benchmarks/step.py [--json FILE] [--repeats N] [--scale S]; 0.01 for a quick look.
"""

import argparse
import contextlib
import importlib
import time
from unittest import mock

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna, state_specs

AXIS = "data"
WORKERS = 8
DENSITY = 0.001
WARM_UP = 12  # steps until the threshold has settled
GRADIENTS = 6  # in turn: with fewer, the residual grows alike everywhere, and counts swing
GOALS = {"local step, flat": 1.6, "local step, 20 leaves": 2.5, "160 leaves, step": 1.3}
GOALS |= {"160 leaves, compile": 2.0, "compile, seconds": 3.0}


def transformer(size):
  """Shapes of 160 leaves with about ``size`` elements: an embedding, and layers of 10 leaves."""
  layers = 15
  width = int((size / (layers * 12 + 40)) ** 0.5)  # 12 d^2 a layer, and an embedding of 40 d * d
  block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
  block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
  rest = [(40 * width, width), *[(width,)] * 9]
  return rest + block * layers


def tree_of(shapes, seed):
  rng = np.random.default_rng(seed)
  return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def elements(shapes):
  return sum(int(np.prod(shape)) for shape in shapes)


@contextlib.contextmanager
def alone(n, rank=None):
  """Within it, `update` takes itself for worker ``rank`` of n, its own message for everyone's."""
  module = importlib.import_module
  with contextlib.ExitStack() as patches:

    def patch(where, name, replacement):
      patches.enter_context(mock.patch.object(module(f"exdyna_jax.{where}"), name, replacement))

    def several(x, axis_name):
      # Without the barrier, XLA would see n equal copies, and do with one of them.
      return jnp.tile(jax.lax.optimization_barrier(x), n)

    patch("exchange", "all_gather", several)
    for where in ("values", "exclusive"):
      patch(where, "psum", lambda x, axis_name: x * n)
    for where in ("sparsifiers.clt_k", "sparsifiers.deft"):  # sums to which one worker contributes
      patch(where, "psum", lambda x, axis_name: x)
    patch("transform", "check_bound", lambda axis_name, caller: n)
    patch("transform", "check_local", lambda grads, axis_name: None)
    mine = jnp.int32(n // 2) if rank is None else rank
    patches.enter_context(mock.patch.object(jax.lax, "axis_index", lambda axes: mine))
    yield


class Local:
  """One worker's step, again and again, with donated state."""

  def __init__(self, shapes, workers=WORKERS, density=DENSITY):
    tx = exdyna(density, AXIS, num_workers=workers)
    self.grads = [tree_of(shapes, seed) for seed in range(GRADIENTS)]
    state = tx.init(self.grads[0])
    self.state = state._replace(residual=jnp.zeros(elements(shapes)))
    start = time.perf_counter()

    # The state first: donated buffers go to the first output of their shape, and the residual's
    # must not go to the update of a single flat leaf.
    def step(grads, state):
      return tx.update(grads, state)[::-1]

    with alone(workers):
      lowered = jax.jit(step, donate_argnums=1).lower(self.grads[0], self.state)
    self.update = lowered.compile()
    self.compile_seconds = time.perf_counter() - start
    self.turn = 0
    for _ in range(WARM_UP):
      self()

  def __call__(self):
    self.turn = (self.turn + 1) % GRADIENTS
    self.state, updates = self.update(self.grads[self.turn], self.state)
    return updates, self.state


class Floor:
  """``residual + gradient``, donated, and an update of zeros: what nobody can avoid."""

  def __init__(self, size):
    self.grads = [tree_of([(size,)], seed)[0] for seed in range(GRADIENTS)]
    self.residual = jnp.zeros((size,))

    def add(residual, grad):
      return residual + grad, jnp.zeros_like(grad)

    self.add = jax.jit(add, donate_argnums=0)
    self.turn = 0

  def __call__(self):
    self.turn = (self.turn + 1) % GRADIENTS
    self.residual, update = self.add(self.residual, self.grads[self.turn])
    return update


class OnDevices:
  """The full step on all devices, or the dense mean."""

  def __init__(self, size, dense):
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), (AXIS,), (jax.sharding.AxisType.Auto,))
    tx = exdyna(DENSITY, AXIS, num_workers=n)
    self.state = tx.init(jnp.zeros((size,)))
    specs = state_specs(self.state, AXIS)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    self.state = jax.device_put(self.state, placed)
    rng = np.random.default_rng(0)
    grads = rng.standard_normal(n * size, np.float32)
    self.grads = jax.device_put(grads, NamedSharding(mesh, P(AXIS)))

    def step(grads, state):
      return (state, jax.lax.pmean(grads, AXIS)) if dense else tx.update(grads, state)[::-1]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(specs, P()))
    start = time.perf_counter()
    self.step = jax.jit(mapped, donate_argnums=1).lower(self.grads, self.state).compile()
    self.compile_seconds = time.perf_counter() - start
    for _ in range(WARM_UP):
      jax.block_until_ready(self())

  def __call__(self):
    self.state, update = self.step(self.grads, self.state)
    return update


def run(args):
  size, large = (int(args.scale * millions * 1e6) for millions in (10, 30))
  twenty = [(size // 20,)] * 19 + [(size - 19 * (size // 20),)]
  rows = []

  def add(name, size, seconds):
    over, against = seconds.values()
    rows.append({"measure": name, "N": size, "ratio": over / against, "goal": GOALS.get(name)})

  floor = Floor(size)
  for name, shapes in (("flat", [(size,)]), ("20 leaves", twenty)):
    local = Local(shapes)
    add(f"local step, {name}", size, measure.medians({"ours": local, "floor": floor}, args.repeats))
    del local
  del floor
  shapes = transformer(large)
  many, one = Local(shapes), Local([(elements(shapes),)])
  seconds = measure.medians({"many": many, "one": one}, args.repeats)
  add(f"{len(shapes)} leaves, step", elements(shapes), seconds)
  compile_seconds = {"many": many.compile_seconds, "one": one.compile_seconds}
  add(f"{len(shapes)} leaves, compile", elements(shapes), compile_seconds)
  del many, one
  ours, dense = OnDevices(size, dense=False), OnDevices(size, dense=True)
  seconds = measure.medians({"ours": ours, "dense": dense}, max(args.repeats // 3, 1))
  add("full step, 8 virtual devices, against pmean", size, seconds)
  add("compile, seconds", size, {"ours": ours.compile_seconds, "one": 1.0})
  return rows


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  jax.config.update("jax_num_cpu_devices", WORKERS)
  measure.main(run, parser)


if __name__ == "__main__":
  main()
