"""What it costs to find the large entries of a partition, against what else one could call.

- pack: selection of one partition (find and take) against one pass over it that only packs the
  mask bits; `walk` is the way on CPUs, `look up` the one elsewhere, both on this CPU
- others: ``jnp.nonzero(size=)`` and ``lax.top_k`` on the partition, ``np.flatnonzero``, each
  against the CPU's way: how many times slower they are
- workers: selection at N = 2e7 with n workers against n = 2, normal numbers, density 0.001: the
  share of n-fold speed, 1 where n / 2 times the workers need n / 2 times less time each

Inputs: normal numbers, and the synthetic gradients of `inputs.py`, whose layers differ in scale.

Run me: python benchmarks/selection.py [--json FILE] [--repeats N] [--scale S]; 0.01 is quick.
"""

import argparse
import functools

import inputs
import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax

from exdyna_jax import accumulator, ranks, selection

CAPACITY = 1.25
# Of a partition: elements, and the densities at which it is searched.
SHARES = (1_000_000, 10_000_000, 25_000_000)
DENSITIES = (0.001, 0.01)
GOALS = {"walk": 1.3, "look up": 2.0, "jnp.nonzero": 20.0, "lax.top_k": 10.0, "np.flatnonzero": 2.0}
WORKERS = (2, 4, 8, 16, 32, 64)


def normal(size):
  return np.random.default_rng(0).standard_normal(size, np.float32)


INPUTS = {"normal": normal, "gradient": functools.partial(inputs.grad, step=0, worker=0)}


@functools.partial(jax.jit, static_argnames="length")
def pack(vector, start, threshold, length):
  """One bit an element: the floor."""
  part = jnp.abs(lax.dynamic_slice(vector, (start,), (length,)))
  return selection.pack((part[: length // 32 * 32] >= threshold).reshape(-1, 32))


@functools.partial(jax.jit, static_argnames=("capacity", "window", "method"))
def select(vector, start, end, threshold, capacity, window=None, method=None):
  hits = selection.find(accumulator.made(vector), start, end, threshold, window=window)
  wanted = ranks.strided(lax.iota(jnp.int32, capacity), hits.found, capacity, jnp.int32(1))
  return ranks.take(hits, wanted, method=method), hits.found


@functools.partial(jax.jit, static_argnames=("length", "capacity"))
def nonzero(vector, start, threshold, length, capacity):
  part = jnp.abs(lax.dynamic_slice(vector, (start,), (length,)))
  return jnp.nonzero(part >= threshold, size=capacity, fill_value=length)[0] + start


@functools.partial(jax.jit, static_argnames=("length", "k"))
def top_k(vector, start, length, k):
  return lax.top_k(jnp.abs(lax.dynamic_slice(vector, (start,), (length,))), k)[1] + start


def case(name, share, density):
  """A vector of two shares, and the threshold that ``density`` of the one in its middle reach."""
  vector = INPUTS[name](2 * share)
  start = share // 2
  part = np.sort(np.abs(vector[start : start + share]))
  return vector, start, part[-max(int(density * share), 1)]


def of_one_share(name, share, density, repeats):
  host, start, threshold = case(name, share, density)
  vector, k = jnp.asarray(host), max(int(density * share), 1)
  capacity, part = int(CAPACITY * k), host[start : start + share]
  level = float(threshold)
  start, end, threshold = jnp.int32(start), jnp.int32(start + share), jnp.float32(threshold)
  ways = {
    "pack": lambda: pack(vector, start, threshold, share),
    "walk": lambda: select(vector, start, end, threshold, capacity, share, ranks.walk),
    "look up": lambda: select(vector, start, end, threshold, capacity, share, ranks.look_up),
    "jnp.nonzero": lambda: nonzero(vector, start, threshold, share, capacity),
    "lax.top_k": lambda: top_k(vector, start, share, k),
    "np.flatnonzero": lambda: np.flatnonzero(np.abs(part) >= level),
  }
  row = {"input": name, "share": share, "density": density}
  quick = ("pack", "walk", "look up")
  seconds = measure.medians({way: ways[way] for way in quick}, repeats)
  for way in quick[1:]:
    goal = 2.5 if (way, share, density) == ("look up", SHARES[0], 0.01) else GOALS[way]
    yield (
      {"measure": f"{way} / pack"} | row | {"ratio": seconds[way] / seconds["pack"], "goal": goal}
    )
  # The slow ones apart, and less often: they leave nothing in the caches.
  slow = ("walk", "jnp.nonzero", "lax.top_k", "np.flatnonzero")
  seconds = measure.medians({way: ways[way] for way in slow}, max(repeats // 10, 3))
  for way in slow[1:]:
    goal = GOALS[way] if share == SHARES[1] else None
    yield (
      {"measure": f"{way} / walk"} | row | {"ratio": seconds[way] / seconds["walk"], "goal": goal}
    )


def of_shares(args):
  for share in SHARES:
    for name in INPUTS:
      for density in DENSITIES:
        yield from of_one_share(name, int(share * args.scale), density, args.repeats)


def of_workers(args):
  size, density = int(20_000_000 * args.scale), 0.001
  vector, _, threshold = case("normal", size // 2, density)
  vector, runs = jnp.asarray(vector), {}
  for n in WORKERS:
    # The middle one of n equal partitions.
    start, end = n // 2 * (size // n), (n // 2 + 1) * (size // n)
    limits = jnp.int32(start), jnp.int32(end), jnp.float32(threshold)
    capacity = max(int(CAPACITY * density * size / n), 1)
    window = selection.window_of(size // n)
    runs[str(n)] = functools.partial(select, vector, *limits, capacity, window)
  seconds = measure.medians(runs, args.repeats)
  for n in WORKERS[1:]:
    share = seconds["2"] / seconds[str(n)] / (n / 2)
    goal = 0.85 if n <= 16 else None
    yield {"measure": "share of n-fold speed", "n": n, "ratio": share, "goal": goal}


def run(args):
  return [*of_shares(args), *of_workers(args)]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  measure.main(run, parser)


if __name__ == "__main__":
  main()
