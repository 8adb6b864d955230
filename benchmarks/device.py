"""Whether selection is right on an accelerator; what it and a step cost, against its memory.

Both ways of `ranks`, and the one for this device at full size, are held against NumPy on fresh
random data: NaN, Inf, clusters, ties, empty ranges, ranges up to the end, more hits than may be
sent (overflows). `walk`, a loop over scalars, gets small vectors only, except on CPUs. The exit
status is 1 if anything is wrong. Then N = 1e8, float32, and the device is one of n workers:

- copy: a donated ``x + 1`` of several sizes; the best bandwidth of them is what counts
- add: a donated ``residual + gradient`` and an update of zeros, what no step can avoid
- select: `find` and `take` in one partition; a program does all of them in turn, `ROUNDS` times
- step: `update` of one worker, collectives replaced by local copies; see `steady`

us = microseconds, the median of repetitions in turn, of so many calls each that starting them
hardly counts. GB/s = bytes that must move over this time: copy 8N, select 4N/n, add and step 16N
(gradient and residual in, residual and update out). floor us = the time of these bytes at the
copy's bandwidth, measured in turn with the rest; ratio = us / floor us. temp = temporary memory of
the compiled program over 4N bytes. hits = what reached the threshold over what should, about 1.

Run me, on one GPU or TPU: python benchmarks/device.py [--json FILE] [--repeats N] [--seed SEED]
For a look, on CPUs too: --scale 0.01, where caches and the starts of calls count, not memory.
"""

import argparse
import functools
import itertools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from step import Floor, Local

from exdyna_jax import accumulator, partition, ranks, selection

SIZE, COPIES = 10**8, (0.5, 1, 2)  # copies of so many times more, too large for any cache
WORKERS, CAPACITY_FACTOR = (1, 4, 16), 1.25
DENSITY, THRESHOLD, LOW = 0.001, np.float32(3.29053), np.float32(1)  # for normal numbers
ROUNDS, LONG, MOST_CALLS = 4, 0.05, 200  # of a program; seconds and calls of a repetition
SIZES, WALKED = (1, 1000, 5000, 3 * selection.CHUNK + 77), 5000  # and the largest one for `walk`
NEAR, LIMIT = 2000, np.float32(2.5)  # elements at most of clusters, and of ranges at the end
FILLS = {"normal": 0, "cluster": 5, "nan": np.nan, "infinite": np.inf, "equal": LIMIT}
SLOTS, FIRST, ALLOWED = 500, (0, 300), (7, 450, 2**30)  # of a message; hits that may be sent
GOLDEN = 2654435769


def expected(acc, start, end, threshold, step, allowed, first, slots):
  """The indices in these slots and the count of hits, the slow and obvious way."""
  hits = sent = np.flatnonzero(~(np.abs(acc[start:end]) < threshold)) + start
  if len(hits) > allowed:
    fraction = (step * GOLDEN % 2**32) // 2**8 / 2**24
    phase = min(int(np.float32(fraction) * np.float32(len(hits))), len(hits) - 1)
    sent = hits[(np.arange(allowed, dtype=np.int64) * len(hits) + phase) // allowed]
  sent = sent[first : first + slots]
  return np.append(sent, np.full(slots - len(sent), len(acc))), len(hits)


def pick(acc, start, end, threshold, step, allowed, first, slots, method=None, chunk=None):
  """The same, the way that is to be tested."""
  hits = selection.find(acc, start, end, threshold, chunk=chunk)
  wanted = ranks.strided(first + lax.iota(jnp.int32, slots), hits.found, allowed, step)
  return ranks.take(hits, wanted, method=method), hits.found


def compare(method, got, want, checks, *case):
  (indices, count), (want_indices, want_count) = jax.device_get(got), want
  checks[method] += 1
  if count != want_count or not np.array_equal(indices, want_indices):
    checks["wrong"] += 1
    print(f"WRONG: {method}, {case}: {count} hits for {want_count}", flush=True)


def check_cases(rng, on_cpu, checks):
  """Every size with all that may be in it, in both ways and with two sizes of chunks."""
  add = functools.partial(accumulator.accumulate, saturate=True)
  pick_in_sum = jax.jit(lambda parts, *rest: pick(add(*parts), *rest), static_argnums=(7, 8, 9))
  for size, fill in itertools.product(SIZES, FILLS):
    near, (low, high) = max(size - rng.integers(1, NEAR), 0), sorted(rng.integers(0, size + 1, 2))
    places = {"normal": [], "cluster": slice(low, low + NEAR), "equal": ...}
    acc = rng.standard_normal(size, np.float32)
    acc[places.get(fill, rng.integers(0, size, size // 20 + 1))] = FILLS[fill]
    acc *= rng.choice(np.float32([-1, 1]), size)
    # Each element is in one of two parts, and the other one is zero there.
    here = rng.random(size, np.float32) < 0.5
    parts = jax.device_put([np.where(where, acc, np.float32(0)) for where in (here, ~here)])
    methods = (ranks.look_up, ranks.walk)[: 2 if on_cpu or size <= WALKED else 1]
    ranges = ((0, size), (low, high), (high, high), (near, size))
    for limits, allowed in itertools.product(ranges, ALLOWED):
      which = int(rng.integers(2**31 - 1)), allowed, int(rng.choice(FIRST))
      want = expected(acc, *limits, LIMIT, *which, SLOTS)
      checks["overflows"] += int(want[1] > allowed)
      arguments = parts, *np.int32(limits), LIMIT, *np.int32(which), SLOTS
      for method, chunk in itertools.product(methods, (None, selection.ROW_SIZE)):
        got = pick_in_sum(*arguments, method, chunk)
        compare(method.__name__, got, want, checks, size, fill, limits, which, chunk)


def selecting(size, n):
  """``(x, threshold) ->`` the last partition's indices, all hits; its start and slots."""
  share, slots = -(-size // n), 1 + int(CAPACITY_FACTOR * DENSITY * size / n)

  def select(x, threshold):
    def one(step, carry):
      limits = (jnp.minimum((step % n + i) * share, size) for i in (0, 1))
      indices, found = pick(accumulator.made(x), *limits, threshold, step, slots, 0, slots)
      return indices, carry[1] + found

    return lax.fori_loop(0, ROUNDS * n, one, (jnp.zeros((slots,), jnp.int32), jnp.int32(0)))

  x = jax.ShapeDtypeStruct((size,), jnp.float32)
  return jax.jit(select).lower(x, LOW).compile(), min((n - 1) * share, size), slots


def steady(size, n):
  """A `Local`, and a function that calls it with threshold and partitions held where they are.

  Each entry grows by its gradient until it reaches the threshold, and starts anew: in each step, as
  many do as are wanted. Left alone, `Local` would often have to search for its threshold.
  """
  local = Local([(size,)], n, DENSITY)
  local.grads = local.grads[:1] * len(local.grads)
  limit = n * jnp.mean(jnp.abs(local.grads[0][0])) / DENSITY
  boundaries = partition.equal_boundaries(int(local.state.boundaries[-1]), n)
  held = {"threshold": np.asarray(limit), "boundaries": np.asarray(boundaries)}
  grown = jax.random.uniform(jax.random.key(0), (size,)) * limit * jnp.sign(local.grads[0][0])
  local.state = local.state._replace(residual=grown)

  def call():
    memory = local.state.memory
    rule = memory.threshold_rule._replace(lost=np.bool_(False))
    local.state = local.state._replace(memory=memory._replace(threshold_rule=rule), **held)
    return local()

  for _ in range(n):  # until each partition has had its turn
    call()
  return local, call


def copying(size):
  x, add = jnp.zeros((size,)), jax.jit(lambda x: x + 1, donate_argnums=0)
  while True:
    x = add(x)
    yield x


def timed(contestants, repeats):
  """Seconds of one call of each, in turn."""

  def again(call, calls):
    for _ in range(calls):
      out = call()
    return out

  once = measure.medians(contestants, 1)
  calls = {name: int(min(max(LONG / seconds, 1), MOST_CALLS)) for name, seconds in once.items()}
  runs = {name: functools.partial(again, call, calls[name]) for name, call in contestants.items()}
  return {name: took / calls[name] for name, took in measure.medians(runs, repeats).items()}


def rows_of(args, rng):
  def row_of(name, size, seconds, moved, bandwidth, **more):
    row = {"measure": name, "N": size, "us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
    return row | {"floor us": moved / bandwidth * 1e6, "ratio": seconds * bandwidth / moved} | more

  size, on_cpu = int(args.scale * SIZE), jax.default_backend() == "cpu"
  checks = {"look_up": 0, "walk": 0, "overflows": 0, "wrong": 0}
  check_cases(rng, on_cpu, checks)
  acc = rng.standard_normal(size, np.float32)
  x, selects = jax.device_put(acc), {n: selecting(size, n) for n in WORKERS}
  for (n, (select, start, slots)), limit in itertools.product(selects.items(), (THRESHOLD, LOW)):
    want = expected(acc, start, size, limit, ROUNDS * n - 1, slots, 0, slots)[0]
    want = want, ROUNDS * np.count_nonzero(np.abs(acc) >= limit)
    compare("walk" if on_cpu else "look_up", select(x, limit), want, checks, size, n, limit)
  yield {"measure": "correctness", **checks}

  copies = {int(share * size): copying(int(share * size)).__next__ for share in COPIES}
  seconds = timed(copies | {"add": Floor(size)}, args.repeats)
  best = min(copies, key=lambda length: seconds[length] / length)
  bandwidth, copy = 8 * best / seconds[best], copies[best]
  for length in copies:
    yield row_of("copy", length, seconds[length], 8 * length, bandwidth)
  yield row_of("add", size, seconds["add"], 16 * size, bandwidth)
  del copies

  for n, (select, *_) in selects.items():
    (local, step), some = steady(size, n), functools.partial(select, x, THRESHOLD)
    seconds = timed({"copy": copy, "select": some, "step": step}, args.repeats)
    for name, program, took, moved, hits in (
      ("select", select, seconds["select"] / (ROUNDS * n), 4 * size / n, some()[1] / ROUNDS),
      ("step", local.update, seconds["step"], 16 * size, sum(local.state.stats.counts)),
    ):
      more = {"n": n, "temp": program.memory_analysis().temp_size_in_bytes / (4 * size)}
      more["hits"] = float(hits) / (DENSITY * size)
      yield row_of(name, size, took, moved, 8 * best / seconds["copy"], **more)
    del local, step


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here, as they come")
  parser.add_argument("--repeats", type=int, default=20, help="of each measurement, default 20")
  parser.add_argument("--scale", type=float, default=1.0, help="of the sizes that are timed")
  parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the data")
  args, rows, start = parser.parse_args(), [], time.perf_counter()
  device = jax.devices()[0].device_kind
  print(f"{device}, JAX {jax.__version__}, --seed {args.seed}", flush=True)
  for row in rows_of(args, np.random.default_rng(args.seed)):
    rows.append({"device": device, **row})
    print(f"{time.perf_counter() - start:.0f} s: {row['measure']}", flush=True)
    if args.json:
      args.json.write_text(json.dumps(rows, indent=1))
  measure.print_table(rows)
  if rows[0]["wrong"]:
    raise SystemExit("Selections differ from NumPy's: see above.")


if __name__ == "__main__":
  main()
