"""Whether selection is right on an accelerator; what it and a step cost, against its memory.

Both ways of `ranks`, and the one for this device at full size, are held against NumPy on fresh
random data: NaN, Inf, clusters, ties, no hits, empty ranges, ranges up to the end, more hits than
may be sent (overflows). `walk`, a loop over scalars, gets small vectors only, except on CPUs. The
exit status is 1 if anything is wrong. Then N = 1e8, float32, the device is one of n workers:

- copy: a donated ``x + 1`` of several sizes; the best bandwidth of them is what counts
- add: a donated ``residual + gradient`` and an update of zeros, what no step can avoid
- select: `find` and `take` in one partition; a program does all of them in turn, `ROUNDS` times
- step: `update` of one worker, collectives replaced by local copies; see `step.Local`

us = microseconds, the median of repetitions in turn, of so many calls each that starting them
hardly counts. GB/s = bytes that must move over this time: copy 8N, select 4N/n, add and step 16N
(gradient and residual in, residual and update out). floor us = the time of these bytes at the
bandwidth of the copy, measured in turn with the rest; ratio = us / floor us. temp = temporary
memory of the compiled program over 4N bytes. hits = what reached the threshold over what should.

Run me, on one GPU or TPU: python benchmarks/device.py [--json FILE] [--repeats N] [--seed SEED]
For a look, on CPUs too: --scale 0.01, where caches and the starts of calls count, not memory.
"""

import argparse
import collections
import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from step import Floor, Local

from exdyna_jax import accumulator, ranks, selection

SIZE, DENSITY, WORKERS, CAPACITY_FACTOR = 10**8, 0.001, (1, 4, 16), 1.25
COPIES = (0.5, 1, 2)  # times N; too large for any cache
ROUNDS = 4  # selections in each partition, in one program
LONG, MOST_CALLS = 0.05, 200  # seconds and calls of a repetition

SIZES = (1, 1000, 5000, 3 * selection.CHUNK + 77)
WALKED = 5000  # elements at most for `walk`, except on CPUs
FILLS = {"normal": 0, "few": 0, "cluster": 5, "nan": math.nan, "infinite": math.inf, "equal": 2.5}
RANGES = ("whole", "some", "empty", "end")
NEAR = 2000  # elements at most of clusters, and of ranges at the end
ALLOWED = (7, 450, 2**30)  # hits that may be sent
SLOTS, FIRST = 500, (0, 300)  # of a message, and where it starts
GOLDEN = 2654435769
ON_CPU = jax.default_backend() == "cpu"


def expected(acc, start, end, threshold, step, allowed, first, slots):
  """The indices in these slots and the count of hits, the slow and obvious way."""
  hits = sent = np.flatnonzero(~(np.abs(acc[start:end]) < threshold)) + start
  if len(hits) > allowed:
    fraction = (step * GOLDEN % 2**32) // 2**8 / 2**24
    phase = min(int(np.float32(fraction) * np.float32(len(hits))), len(hits) - 1)
    sent = hits[(np.arange(allowed, dtype=np.int64) * len(hits) + phase) // allowed]
  sent = sent[first : first + slots]
  return np.append(sent, np.full(slots - len(sent), len(acc))), len(hits)


def compare(method, got, want, checks, case):
  (indices, count), (want_indices, want_count) = jax.device_get(got), want
  wrong = count != want_count or not np.array_equal(indices, want_indices)
  checks.update({method: 1, "wrong": int(wrong)})
  if wrong:
    print(f"WRONG: {method}, {case}: {count} hits for {want_count}", file=sys.stderr, flush=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def select_once(method, chunk, parts, start, end, threshold, step, allowed, first):
  acc = accumulator.accumulate(*parts, saturate=True)
  hits = selection.find(acc, start, end, threshold, chunk=chunk)
  wanted = ranks.strided(first + lax.iota(jnp.int32, SLOTS), hits.found, allowed, step)
  return ranks.take(hits, wanted, method=method), hits.found


def check_cases(rng, checks):
  """Every size with all that may be in it, in both ways and with two sizes of chunks."""
  for size, fill, where, allowed in itertools.product(SIZES, FILLS, RANGES, ALLOWED):
    low, high = sorted(rng.integers(0, size + 1, 2))
    near = max(size - rng.integers(1, NEAR), 0)
    ranges = {"whole": (0, size), "some": (low, high), "empty": (high, high), "end": (near, size)}
    start, end = ranges[where]
    places = {"normal": [], "few": [], "cluster": slice(max(end - NEAR, 0), end), "equal": ...}
    acc = rng.standard_normal(size, np.float32)
    acc[places.get(fill, rng.integers(0, size, size // 20 + 1))] = FILLS[fill]
    acc *= rng.choice(np.float32([-1, 1]), size)
    threshold = np.float32(9 if fill == "few" else FILLS["equal"])
    which = int(rng.integers(2**31 - 1)), allowed, int(rng.choice(FIRST))
    want = expected(acc, start, end, threshold, *which, SLOTS)
    checks["overflows"] += int(want[1] > allowed)
    # Each element is in one of two parts, and the other one is zero there.
    here, zero = rng.random(size, np.float32) < 0.5, np.float32(0)
    parts = jax.device_put((np.where(here, acc, zero), np.where(here, zero, acc)))
    scalars = *np.int32([start, end]), threshold, *np.int32(which)
    methods = (ranks.look_up, ranks.walk)[: 1 if size > WALKED and not ON_CPU else 2]
    for method, chunk in itertools.product(methods, (None, selection.ROW_SIZE)):
      got = select_once(method, chunk, parts, *scalars)
      compare(method.__name__, got, want, checks, (size, fill, where, which, chunk))


def selecting(size, n):
  """``(x, threshold) ->`` the last partition's indices, all hits; its start and slots."""
  share, slots = -(-size // n), max(math.ceil(CAPACITY_FACTOR * DENSITY * size / n), 1)

  def select(x, threshold):
    def one(step, carry):
      start, end = (jnp.minimum((step % n + i) * share, size) for i in (0, 1))
      hits = selection.find(accumulator.made(x), start, end, threshold)
      wanted = ranks.strided(lax.iota(jnp.int32, slots), hits.found, slots, step)
      return ranks.take(hits, wanted), carry[1] + hits.found

    return lax.fori_loop(0, ROUNDS * n, one, (jnp.zeros((slots,), jnp.int32), jnp.int32(0)))

  x = jax.ShapeDtypeStruct((size,), jnp.float32)
  return jax.jit(select).lower(x, np.float32(0)).compile(), min((n - 1) * share, size), slots


class Copy:
  """A donated ``x + 1``."""

  def __init__(self, size):
    self.x = jnp.zeros((size,))
    self.add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def __call__(self):
    self.x = self.add(self.x)
    return self.x


def again(call, calls):
  for _ in range(calls):
    out = call()
  return out


def timed(contestants, repeats):
  """Seconds of one call of each, in turn."""
  once = measure.medians(contestants, 1)
  calls = {name: int(min(max(LONG / seconds, 1), MOST_CALLS)) for name, seconds in once.items()}
  runs = {name: functools.partial(again, call, calls[name]) for name, call in contestants.items()}
  return {name: took / calls[name] for name, took in measure.medians(runs, repeats).items()}


def row_of(name, size, seconds, moved, bandwidth, **more):
  row = {"measure": name, "N": size, "us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
  return row | {"floor us": moved / bandwidth * 1e6, "ratio": seconds * bandwidth / moved} | more


def rows_of(args, rng):
  size = int(args.scale * SIZE)
  acc = rng.standard_normal(size, np.float32)
  x, method = jax.device_put(acc), "walk" if ON_CPU else "look_up"
  threshold = np.float32(statistics.NormalDist().inv_cdf(1 - DENSITY / 2))
  programs = {n: selecting(size, n) for n in WORKERS}
  checks = collections.Counter(look_up=0, walk=0, overflows=0, wrong=0)
  check_cases(rng, checks)
  for (n, (select, start, slots)), limit in itertools.product(programs.items(), (threshold, 1)):
    want, count = expected(acc, start, size, limit, ROUNDS * n - 1, slots, 0, slots)
    checks["overflows"] += int(count > slots)
    count = ROUNDS * np.count_nonzero(np.abs(acc) >= limit)
    compare(method, select(x, np.float32(limit)), (want, count), checks, (size, n))
  yield {"measure": "correctness", **checks}

  copies = {int(share * size): Copy(int(share * size)) for share in COPIES}
  seconds = timed(copies | {"add": Floor(size)}, args.repeats)
  best = max(copies, key=lambda length: length / seconds[length])
  bandwidth, copy = 8 * best / seconds[best], copies[best]
  for length in copies:
    yield row_of("copy", length, seconds[length], 8 * length, bandwidth)
  yield row_of("add", size, seconds["add"], 16 * size, bandwidth)
  del copies

  for n, (select, *_) in programs.items():
    step = Local([(size,)], workers=n, density=DENSITY)
    some = functools.partial(select, x, threshold)
    seconds = timed({"copy": copy, "select": some, "step": step}, args.repeats)
    seconds["select"] /= ROUNDS * n
    bandwidth, found = 8 * best / seconds["copy"], (some()[1] / ROUNDS, step.state.stats.selected)
    programs = (("select", select, 4 / n), ("step", step.update, 16))
    for (name, program, moved), hits in zip(programs, found, strict=True):
      more = {"n": n, "temp": program.memory_analysis().temp_size_in_bytes / (4 * size)}
      more["hits"] = float(hits) / (DENSITY * size)
      yield row_of(name, size, seconds[name], moved * size, bandwidth, **more)
    del step


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here, as they come")
  parser.add_argument("--repeats", type=int, default=20)
  parser.add_argument("--scale", type=float, default=1.0, help="of the sizes that are timed")
  parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the data")
  args, rows, start = parser.parse_args(), [], time.perf_counter()
  print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, --seed {args.seed}", flush=True)
  for row in rows_of(args, np.random.default_rng(args.seed)):
    rows.append({"device": jax.devices()[0].device_kind, **row})
    print(f"{time.perf_counter() - start:.0f} s: {row['measure']}", file=sys.stderr, flush=True)
    if args.json:
      args.json.write_text(json.dumps(rows, indent=1))
  measure.print_table(rows)
  if any(row.get("wrong") for row in rows):
    raise SystemExit("Selections differ from NumPy's: see above.")


if __name__ == "__main__":
  main()
