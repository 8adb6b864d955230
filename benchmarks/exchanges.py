"""What one host of network.py does: exchanges with the others, by all contestants in turn.

For all contestants alike, only the exchange is timed: what is to be sent has been selected, and
ends in a vector of sums. The sparse ones write into a donated vector.
"""

import functools
import itertools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import exchange, exdyna, planning, probing, state_specs, values
from exdyna_jax.density import target_count
from exdyna_jax.planning import DENSE, DENSE_16, EXDYNA, EXDYNA_16, TOP_K
from exdyna_jax.probing import AXIS
from exdyna_jax.threshold import LADDER
from exdyna_jax.values import Wire
from exdyna_jax.varying import all_gather

SENT = pathlib.Path("/sys/class/net/e0/statistics/tx_bytes")
BLOCK = 1.0  # seconds of one contestant, back to back: links let a burst pass, streams do not
LEAST, MOST = 1, 40  # repetitions in a block
STEP = "exdyna, whole update"


def sent_bytes():
  """Bytes that this host has sent; 0 where there is no such device."""
  return int(SENT.read_text()) if SENT.exists() else 0


def jitted(mesh, run, *, donated=()):
  """``run(vector, indices, sums)`` on each worker; the first two are its own."""
  mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P())
  return jax.jit(mapped, donate_argnums=donated)


def dense(wire, n, vector, indices, sums):
  return values.sum_values(vector, wire, AXIS, n)[0]


def top_k(vector, indices, sums):
  mine = lax.bitcast_convert_type(vector[indices], jnp.int32)
  message = all_gather(jnp.concatenate([indices, mine]), AXIS)
  indices, found = jnp.split(message.reshape(-1, 2 * mine.shape[0]), 2, axis=1)
  return sums.at[indices].add(lax.bitcast_convert_type(found, vector.dtype))


def sparse(wire, n, vector, indices, sums):
  size, finite = vector.shape[0], jnp.asarray(True)
  count = jnp.sum(indices < size, dtype=jnp.int32)
  signal = jnp.zeros(len(LADDER), jnp.int32)
  agreed = exchange.gather_first(count, finite, signal, indices, size, AXIS, False)
  mine = vector.at[agreed.indices].get(mode="fill", fill_value=0)
  found, _ = values.sum_values(mine, wire, AXIS, n)
  return sums.at[agreed.indices].set(found, mode="drop")


def contestants(mesh, size, density, link):
  """Name -> a function that does one exchange."""
  n, k = mesh.size, target_count(density, size)
  slots = exchange.capacity_of(k, size, n, exchange.CAPACITY_FACTOR)

  def own(rank):  # of k / n picks in the own part of the vector
    picks = np.random.default_rng(rank).choice(size // n, k // n, replace=False)
    picks = np.sort(picks) + rank * (size // n)
    return np.concatenate([picks, np.full(slots - k // n, size)]).astype(np.int32)

  def anywhere(rank):
    return np.random.default_rng(rank).choice(size, k, replace=False).astype(np.int32)

  def normal(rank):
    return np.random.default_rng(rank).standard_normal(size, np.float32)

  vector = probing.place(mesh, size, normal)
  nothing = probing.place(mesh, 1, lambda rank: np.zeros(1, np.int32))
  zeros = jax.jit(lambda: jnp.zeros(size), out_shardings=NamedSharding(mesh, P()))
  own, anywhere = probing.place(mesh, slots, own), probing.place(mesh, k, anywhere)
  half, full = Wire(jnp.bfloat16, link), Wire(None, link)

  def writing(run, indices):
    run, sums = jitted(mesh, run, donated=2), zeros()

    def once():
      nonlocal sums
      sums = run(vector, indices, sums)
      return sums

    return once

  def reading(wire):
    run = jitted(mesh, functools.partial(dense, wire, n))
    empty = jax.jit(lambda: jnp.zeros(0), out_shardings=NamedSharding(mesh, P()))()
    return lambda: run(vector, nothing, empty)

  return {
    DENSE: reading(Wire()),
    DENSE_16: reading(half),
    TOP_K: writing(top_k, anywhere),
    EXDYNA: writing(functools.partial(sparse, full, n), own),
    EXDYNA_16: writing(functools.partial(sparse, half, n), own),
    STEP: whole_update(mesh, size, density, link),
  }


def whole_update(mesh, size, density, link):
  """The `update` of exdyna, with accumulation and selection."""
  tx = exdyna(density, AXIS, num_workers=mesh.size, link=link)
  specs = state_specs(jax.eval_shape(tx.init, jnp.zeros(size)), AXIS)
  placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  state = jax.jit(lambda: tx.init(jnp.zeros(size)), out_shardings=placed)()
  mapped = jax.shard_map(
    lambda grads, sign, state: tx.update(sign * grads, state)[::-1],
    mesh=mesh,
    in_specs=(P(AXIS), P(), specs),
    out_specs=(specs, P()),
  )
  run = jax.jit(mapped, donate_argnums=2)

  def normal(seed):
    rng = np.random.default_rng
    return probing.place(
      mesh, size, lambda rank: rng((seed, rank)).standard_normal(size, np.float32)
    )

  turns = itertools.cycle([normal(seed) for seed in range(probing.GRADIENTS)])
  signs = np.random.default_rng(0)  # the same on all hosts

  def once():
    nonlocal state
    state, update = run(next(turns), signs.choice(probing.SIGNS), state)
    return update, state

  return once


def measure(mesh, sizes, density, rounds):
  """A row per size and contestant: milliseconds and bytes of this host, measured and predicted.

  Beside them what `advise` recommends for each size.
  """
  link = probing.measure_link(mesh)
  rows, advice = [], []
  for size in sizes:
    rounding = probing.measure_rounding(mesh, size, link)
    predicted = planning.predict(size, density, mesh.size, link, rounding)
    local = probing.measure_local(mesh, size, density)
    advice.append(planning.recommend(predicted, density, link, local))
    runs = contestants(mesh, size, density, link)
    times, sent = ({name: [] for name in runs} for _ in range(2))
    for name, run in runs.items():
      for _ in range(probing.WARM_UP if name == STEP else 1):
        jax.block_until_ready(run())
    for _ in range(rounds):
      for name, run in runs.items():
        expected = predicted.get(name, predicted[EXDYNA]).seconds
        repeats = int(np.clip(BLOCK / expected, LEAST, MOST))  # the same on all hosts
        before = sent_bytes()
        for _ in range(repeats):
          start = time.perf_counter()
          jax.block_until_ready(run())
          times[name].append(time.perf_counter() - start)
        sent[name].append((sent_bytes() - before) / repeats)
    for name in runs:
      row = {"N": size, "contestant": name, "ms": 1e3 * statistics.median(times[name])}
      row |= {"bytes": round(statistics.median(sent[name]))}
      if name in predicted:
        row |= {"theory": round(predicted[name].num_bytes)}
        row |= {"predicted ms": 1e3 * predicted[name].seconds}
      rows.append(row)
  return {"link": link._asdict(), "rows": rows, "advice": advice}
