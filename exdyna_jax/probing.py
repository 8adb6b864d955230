"""Measures what `planning` needs: the network between the workers, and a worker's own part.

All processes run this together: what decides how often a collective is called is agreed first.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import exchange, values
from .sparsifiers.exdyna import exdyna
from .specs import state_specs
from .values import Link, Wire

AXIS = "workers"
# Networks let a burst pass at full speed, so messages must be long, and follow each other closely.
LONG = 2**16  # float32 items, at least
LONGEST = 2**24
GROWTH = 4
MOSTLY_TRANSFER = 5.0  # times what a short one takes
SHORT = 2**10  # items: about what exdyna sends; shorter ones may take other ways
LEAST = 0.01
LONG_REPEATS = 5
MOST_ROUNDED = 2**20  # values, from which those of more are extrapolated
SIGNS = np.array([-1, 1], np.float32)
WARM_UP = 12  # steps until the threshold has settled
GRADIENTS = 3  # in turn, with random signs: else residuals grow in step, as they never do


def make_mesh(devices: Any = None) -> Mesh:
  """All devices of all processes, or the given ones, as workers."""
  devices = jax.devices() if devices is None else devices
  types = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((len(devices),), (AXIS,), axis_types=types, devices=devices)


def place(mesh: Mesh, items: int, row: Callable[[int], Any]) -> jax.Array:
  """``row(r)``, ``[items]``, on each worker r: a global array ``[n * items]``."""

  def part(where: Any) -> np.ndarray:
    return np.asarray(row((where[0].start or 0) // items))

  return jax.make_array_from_callback((mesh.size * items,), NamedSharding(mesh, P(AXIS)), part)


def mean_of(mesh: Mesh, value: float) -> float:
  """The mean of ``value`` over the workers, the same on all of them."""
  mean = jax.jit(
    jax.shard_map(lambda x: lax.pmean(x, AXIS)[0], mesh=mesh, in_specs=P(AXIS), out_specs=P())
  )
  return float(mean(place(mesh, 1, lambda r: np.full(1, value, np.float32))))


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
  """Of one call, back to back with others, on this process."""
  times = []
  for repeat in range(-1, repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    if repeat >= 0:
      times.append(time.perf_counter() - start)
  return statistics.median(times)


# name -> the collective, and the way of `values` whose hops it has
_COLLECTIVES = {
  "psum": (lambda x: lax.psum(x, AXIS), P()),
  "gather": (lambda x: lax.all_gather(x, AXIS, tiled=True), P(AXIS)),
  "all_to_all": (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), P(AXIS)),
}


def _hops(name: str, n: int) -> int:
  return 1 if name == "all_to_all" else values.hops(name, n)


def _bytes(name: str, n: int, items: int) -> float:
  if name == "all_to_all":
    return (n - 1) / n * items * exchange.ITEM_BYTES
  return values.value_bytes(name, n, items, exchange.ITEM_BYTES)


def measure_link(mesh: Mesh, repeats: int = 20) -> Link:
  """Latency and bandwidth of the collectives between the workers of ``mesh``, at least two."""
  n = mesh.size
  runs = {
    name: jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(AXIS), out_specs=out))
    for name, (run, out) in _COLLECTIVES.items()
  }

  def measured(items, repeats):
    """Bytes and seconds of all of them together, with messages of ``items``."""
    x = place(mesh, items, lambda r: np.ones(items, np.float32))
    took = [median_seconds(functools.partial(run, x), repeats) for run in runs.values()]
    return sum(_bytes(name, n, items) for name in runs), mean_of(mesh, sum(took))

  def multiple(items):
    return n * math.ceil(items / n)

  hops = sum(_hops(name, n) for name in runs)
  short_bytes, short = measured(multiple(SHORT), repeats)
  items = multiple(LONG)
  long_bytes, long = measured(items, LONG_REPEATS)
  while long < MOSTLY_TRANSFER * short and items * GROWTH <= LONGEST:
    items *= GROWTH
    long_bytes, long = measured(items, LONG_REPEATS)
  # Two points of a line. Noise must not make either of the two negative.
  per_byte = max(long - short, LEAST * long) / (long_bytes - short_bytes)
  latency = max(short - short_bytes * per_byte, LEAST * short) / hops
  return Link(latency * 1e6, 8 / per_byte / 1e9)


def measure_rounding(mesh: Mesh, params: int, link: Link) -> float:
  """Seconds that a dense sum in 16 bits takes beyond its traffic: to round, pack and add."""
  n, items, wire = mesh.size, min(params, MOST_ROUNDED), Wire(jnp.bfloat16, link)

  def sums(x: jax.Array) -> jax.Array:
    return values.sum_values(x, wire, AXIS, n)[0]

  run = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P(AXIS), out_specs=P()))
  x = place(mesh, items, lambda r: np.ones(items, np.float32))
  took = mean_of(mesh, median_seconds(functools.partial(run, x), LONG_REPEATS))
  traffic = values.seconds(*values.traffic(wire, n, items, exchange.ITEM_BYTES), link)
  return max(took - traffic, 0.0) * params / items


def measure_local(mesh: Mesh, params: int, density: float, repeats: int = 10) -> float:
  """Seconds of a step of exdyna on a worker that has nobody to exchange with.

  It searches the whole vector where n workers share that, so this is a bit more than their part.
  """
  alone = make_mesh(jax.local_devices()[:1])
  tx = exdyna(density, AXIS, num_workers=1)
  specs = state_specs(jax.eval_shape(tx.init, jnp.zeros(0)), AXIS)

  def step(grads, sign, state):
    return tx.update(sign * grads, state)[::-1]  # the state first: it takes the donated buffers

  # Unchecked, a worker who is alone calls no collective.
  mapped = jax.shard_map(
    step, mesh=alone, in_specs=(P(), P(), specs), out_specs=(specs, P()), check_vma=False
  )
  run = jax.jit(mapped, donate_argnums=2)
  placed = jax.tree.map(lambda spec: NamedSharding(alone, spec), specs)
  normal = jax.jit(
    lambda seed: jax.random.normal(jax.random.key(seed), (params,)),
    out_shardings=NamedSharding(alone, P()),
  )
  grads = [normal(seed) for seed in range(GRADIENTS)]
  state = jax.jit(lambda: tx.init(jnp.zeros(params)), out_shardings=placed)()
  turns, rng = itertools.cycle(grads), np.random.default_rng(0)

  def once():
    nonlocal state
    state, update = run(next(turns), rng.choice(SIGNS), state)
    return update, state

  for _ in range(WARM_UP):
    jax.block_until_ready(once())
  return mean_of(mesh, median_seconds(once, repeats))
