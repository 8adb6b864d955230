"""A long run on 8 CPU devices: does anything grow, drift apart, or compile again?

`exdyna` at its defaults, density 0.001, and Adam behind it, under `jax.shard_map`. The gradients
are drawn on the devices: heavy tails, layers of different scale, which swings by a factor of ten.
Looks at everything 20 times, at equal distances; exit status 1 if something is wrong:

- memory of the process and live arrays grow after the first looks, or something compiles again
- K/k (K is what qualifies, k what was asked for) off by more than 25% in more than 10% of the steps
  between two looks, or by more than 10% in their mean
- parameters or state are not the same on all devices, bit for bit
- the residual is not finite, or holds more than 100 times the threshold

Run me: python benchmarks/soak.py [--steps N] [--json FILE]
"""

import argparse
import json
import pathlib
import resource
import sys
import time

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna, get_stats, state_specs

AXIS = "data"
WORKERS = 8
DENSITY = 1e-3
# Elements and scale of each layer; about what lies between embeddings and biases.
LAYERS = {"a": (50_000, 0.1), "b": (30_000, 1.0), "c": (15_000, 3.0), "d": (5_000, 0.3)}
SIZE = sum(size for size, _ in LAYERS.values())
SWING = 5000  # steps in which the scale of all layers goes up and down

LOOKS = 20
WARM_UP = 2  # looks before growth counts
STEPS_PER_CALL = 50  # one program: several of them in the queue can deadlock XLA on CPUs

# Counts of 100 scatter by 10% on their own.
BAND, SHARE_IN_BAND, MEAN_OFF = 0.25, 0.9, 0.1
MOST_GROWTH = 32e6  # bytes: allocators keep what threads have touched
MOST_RESIDUAL = 100  # times the threshold

COMPILED = "/jax/core/compile/backend_compile_duration"


def gradients(t, rank):
  """What one worker has in step ``t``."""
  swing = 10 ** (jnp.sin(t * (2 * jnp.pi / SWING)) / 2)
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), t), rank)
  keys = jax.random.split(key, len(LAYERS))

  def layer(key, size, scale):
    x = jax.random.normal(key, (size,))
    return x * jnp.abs(x) * scale * swing

  return {name: layer(key, *LAYERS[name]) for key, name in zip(keys, LAYERS, strict=True)}


def make(mesh):
  """Parameters and state, and some steps: ``(params, state, t) -> params, state, K/k [steps]``."""
  tx = optax.chain(exdyna(DENSITY, AXIS, num_workers=WORKERS), optax.adam(1e-3, b1=0.0))
  params = {name: jnp.zeros(size) for name, (size, _) in LAYERS.items()}
  specs = state_specs(jax.eval_shape(tx.init, params), AXIS)
  placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  params = jax.device_put(params, NamedSharding(mesh, P()))

  def steps(params, state, first):
    rank = jax.lax.axis_index(AXIS)

    def step(carry, t):
      params, state = carry
      updates, state = tx.update(gradients(t, rank), state, params)
      found = jnp.sum(get_stats(state).counts)
      return (optax.apply_updates(params, updates), state), found / (DENSITY * SIZE)

    times = first + jnp.arange(STEPS_PER_CALL)
    (params, state), ratios = jax.lax.scan(step, (params, state), times)
    return params, state, ratios

  in_specs, out_specs = (P(), specs, P()), (P(), specs, P())
  mapped = jax.shard_map(steps, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
  return (
    params,
    jax.jit(tx.init, out_shardings=placed)(params),
    jax.jit(mapped, donate_argnums=(0, 1)),
  )


def memory():
  """Bytes of this process that are in memory."""
  status = pathlib.Path("/proc/self/statm")
  if status.exists():
    return int(status.read_text().split()[1]) * resource.getpagesize()
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # elsewhere: the most there has been


def differences(tree):
  """How many replicated arrays of a tree are not the same on all devices, bit for bit."""
  different = 0
  for x in jax.tree.leaves(tree):
    if x.sharding.is_fully_replicated:
      first, *others = (np.asarray(shard.data).tobytes() for shard in x.addressable_shards)
      different += any(other != first for other in others)
  return different


def look(done, ratios, state, seconds):
  """One row of the table."""
  residual = np.abs(np.asarray(optax.tree_utils.tree_get(state, "residual")))
  used = float(get_stats(state).threshold_used)
  return {
    "steps": done,
    "K/k": float(np.mean(ratios)),
    "in band": float(np.mean(np.abs(ratios - 1) <= BAND)),
    "threshold": used,
    "residual": float(np.max(residual)) / used,
    "residual, mean": float(np.mean(residual)) / used,
    "memory": memory(),
    "arrays": sum(x.nbytes for x in jax.live_arrays()),
    "ms a step": 1e3 * seconds / ratios.size,
  }


def violations(rows, different, compiled):
  """What is wrong, in words."""
  start, end = rows[min(WARM_UP, len(rows) - 1)], rows[-1]
  checks = {
    "memory grows": end["memory"] - start["memory"] <= MOST_GROWTH,
    "live arrays grow": end["arrays"] <= start["arrays"],
    f"compiled {compiled} times after the first step": compiled == 0,
    "steps out of the band": all(row["in band"] >= SHARE_IN_BAND for row in rows),
    "mean density off": all(abs(row["K/k"] - 1) <= MEAN_OFF for row in rows),
    f"{different} arrays differ between devices": different == 0,
    "the residual is not bounded": all(row["residual"] <= MOST_RESIDUAL for row in rows),
  }
  return [message for message, holds in checks.items() if not holds]


def soak(steps):
  """The rows of the table, and what is wrong."""
  mesh = jax.make_mesh(
    (WORKERS,), (AXIS,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:WORKERS]
  )
  params, state, run = make(mesh)
  # The first call compiles, and the threshold and the partitions settle.
  params, state, _ = jax.block_until_ready(run(params, state, jnp.int32(0)))
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event == COMPILED else None
  )
  calls = max(steps // STEPS_PER_CALL // LOOKS, 1)  # between two looks
  rows, done = [], STEPS_PER_CALL
  while done < steps:
    start, ratios = time.perf_counter(), []
    for _ in range(calls):
      params, state, new = jax.block_until_ready(run(params, state, jnp.int32(done)))
      ratios.append(np.asarray(new))
      done += STEPS_PER_CALL
    rows.append(look(done, np.concatenate(ratios), state, time.perf_counter() - start))
  return rows, violations(rows, differences((params, state)), len(compiled))


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=20_000)
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", WORKERS)
  rows, wrong = soak(args.steps)
  measure.print_table(rows)
  if args.json:
    args.json.write_text(json.dumps(rows, indent=1))
  print("\nwrong: " + ("; ".join(wrong) or "nothing"))
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
