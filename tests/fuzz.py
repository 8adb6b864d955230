"""Draws configurations and gradients of all transformations at random, and checks every step.

    python tests/fuzz.py --runs 2000 --seed 0     runs the seeds 0 to 1999
    python tests/fuzz.py --one 1234               repeats one of them

A run is a number, from which all else is drawn. `RUNS_PER_STRUCTURE` consecutive runs share what
costs a compilation (the tree, n, the options), and differ in what does not: gradients and faults,
the step at which they begin, the first threshold. `fuzz_checks.py` says what must hold.
"""

import argparse
import collections
import functools
import sys
import traceback
from typing import Any, NamedTuple

import fuzz_checks
import jax
import jax.numpy as jnp
import numpy as np
import optax
import workers as w
from family import FAMILY, TRUNCATED

RUNS_PER_STRUCTURE = 4
RUNS_PER_REPORT = 100
STEPS = 8

# Compilation is what a run costs, not the few steps. These halve it.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}

NAMES = tuple(FAMILY)
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)
HAS_SEED = {"sage", "random_k"}
ONLINE = {"exdyna", "micro"}  # one threshold for all, which may be given for the first step


class Structure(NamedTuple):
  """What has to be compiled."""

  name: str
  n: int
  params: Any  # a tree of NumPy arrays and None
  density: Any  # a number, a schedule, or None for a hard threshold alone
  schedule: dict | None  # what the schedule was made of
  options: dict  # keyword arguments of the transformation
  mask: tuple[bool, ...]  # of the leaves: averaged densely


def pick(rng, *choices):
  """One of the choices, each as likely."""
  return choices[rng.integers(len(choices))]


def draw_leaf(rng, budget):
  """A leaf of at most so many elements, or None."""
  kind = pick(rng, "vector", "vector", "matrix", "matrix", "scalar", "empty", "none", "integer")
  if kind == "none":
    return None
  size = int(rng.integers(1, budget + 1))
  rows = int(rng.integers(1, max(int(np.sqrt(size)), 1) + 1))
  shapes = {"scalar": (), "empty": (0, 3), "matrix": (rows, size // rows), "integer": (2,)}
  dtype = jnp.int32 if kind == "integer" else pick(rng, *DTYPES)
  return np.zeros(shapes.get(kind, (size,)), dtype)


def draw_tree(rng):
  """A nested tree of up to six leaves; now and then, without any element."""
  budget = int(pick(rng, 1, 2, 8, 40, 100, 150))
  leaves = [draw_leaf(rng, pick(rng, 1, budget, budget)) for _ in range(rng.integers(1, 7))]
  if rng.random() < 0.03:
    leaves = [None, np.zeros((0,), jnp.bfloat16)]
  return {"a": leaves[0], "b": leaves[1:3], "c": {"d": tuple(leaves[3:])}}


def draw_density(rng):
  """A number, or a schedule and what it is made of."""
  low, high = sorted(10 ** rng.uniform(-3, 0, 2))
  if rng.random() < 0.7:
    return (1.0 if rng.random() < 0.15 else float(high)), None
  made_of = {"first": float(pick(rng, high, 1.0)), "last": float(low), "until": pick(rng, 1, 3, 20)}
  first, last, until = made_of.values()
  return (lambda step: jnp.where(step < until, first, last)), made_of


def draw_mask(rng, params):
  """A dense mask in one of the forms that it may have, and its flags; None if nothing is sparse."""
  flags = [bool(rng.random() < 0.3) for _ in jax.tree.leaves(params)]
  upper = {"a": flags[0] if flags else False, "b": False, "c": bool(rng.random() < 0.3)}
  tree = jax.tree.unflatten(jax.tree.structure(params), flags)
  mask = pick(rng, tree, upper, lambda _: tree)
  flags = jax.tree.leaves(jax.tree.broadcast(upper if mask is upper else tree, params))
  sizes = [x.size * jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(params)]
  sparse = sum(size for size, dense in zip(sizes, flags, strict=True) if not dense)
  return (mask, tuple(flags)) if sparse else None


def draw_options(rng, name, params):
  """Keyword arguments of the transformation."""
  if name == "dense":
    return {}
  options = {
    "residual_dtype": pick(rng, jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16),
    "nonfinite": pick(rng, "skip", "skip", "propagate"),
  }
  if options["nonfinite"] == "skip":
    options["max_consecutive_skips"] = pick(rng, None, 1, 2)
  if name in TRUNCATED:
    options["capacity_factor"] = pick(rng, None, 0.2, 0.9, 1.0, 1.25, 3.0, 100.0)
  if name in ONLINE:
    options["threshold"] = pick(rng, "secant", "in_step", "paper")
  if name == "exdyna":
    options["partition"] = pick(rng, "balanced", "paper")
    options["num_blocks"] = pick(rng, 1, 2, 5, 8, 64, 1024)
  if name == "hard_threshold" and rng.random() < 0.5:
    options["threshold"] = float(10 ** rng.uniform(-3, 3))
  if name in HAS_SEED:
    options["seed"] = int(rng.integers(5))
  if name == "sidco":
    options["fit"] = pick(rng, "exponential", "generalized_pareto")
    options["stages"] = pick(rng, "adaptive", 1, 2, 5)
  return options


@functools.lru_cache(maxsize=1)
def prepare(seed):
  """A structure, its first state and its compiled step."""
  rng = np.random.default_rng((0, seed))
  name = NAMES[seed % len(NAMES)]
  n, params = int(rng.integers(1, 9)), draw_tree(rng)
  density, schedule = draw_density(rng)
  options = draw_options(rng, name, params)
  if "threshold" in options and name == "hard_threshold" and rng.random() < 0.3:
    density, schedule = None, None
    options.pop("capacity_factor", None)  # which would follow from the density
  flags = (False,) * len(jax.tree.leaves(params))
  if name != "dense" and rng.random() < 0.3 and (drawn := draw_mask(rng, params)):
    options["dense_mask"], flags = drawn
  structure = Structure(name, n, params, density, schedule, options, flags)
  tx = FAMILY[name](density, w.AXIS, num_workers=n, **options)
  compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
  init = compiled(jax.vmap(lambda _: tx.init(params), axis_name=w.AXIS))
  step = jax.vmap(lambda state, grads: tx.update(grads, state), axis_name=w.AXIS)
  return structure, jax.tree.map(np.asarray, init(np.arange(n))), compiled(step)


def draw_gradients(rng, structure, scale, share_bad):
  """Gradients of one step: usually of heavy tails, often something that is rarely thought of."""
  n, leaves = structure.n, jax.tree.leaves(structure.params)
  kinds = ("tails",) * 6 + ("zeros", "ties", "one worker", "few", "huge", "tiny", "denormal")
  kind = "bad" if rng.random() < share_bad else pick(rng, *kinds)
  values = [
    rng.standard_normal((n, *x.shape)) ** 3 * 10 ** rng.uniform(-2, 2) * scale for x in leaves
  ]
  if kind == "ties":
    values = [np.sign(x) * (np.abs(x) > scale) * scale for x in values]
  elif kind == "one worker":
    only = rng.integers(n)
    values = [x * (np.arange(n) == only).reshape(-1, *[1] * (x.ndim - 1)) for x in values]
  elif kind == "few":
    values = [x * (rng.random(x.shape) < 0.05) for x in values]
  elif kind == "bad":
    number, workers = pick(rng, np.nan, np.inf, -np.inf), pick(rng, [rng.integers(n)], range(n))
    for x in values:
      share = pick(rng, 0.02, 1.0)
      for r in workers:
        x[r] = np.where(rng.random(x.shape[1:]) < share, number, x[r])
  factors = {"zeros": 0.0, "huge": pick(rng, 1e30, 1e37), "tiny": 1e-30, "denormal": 1e-40}
  with np.errstate(over="ignore", invalid="ignore"):
    made = [
      np.asarray(x * factors.get(kind, 1.0)).astype(like.dtype)
      if jnp.issubdtype(like.dtype, jnp.floating)
      else np.zeros(x.shape, like.dtype)
      for x, like in zip(values, leaves, strict=True)
    ]
  return jax.tree.unflatten(jax.tree.structure(structure.params), made)


def run(seed):
  """One run; raises AssertionError where something does not hold. Returns what it was."""
  structure, state, step = prepare(seed // RUNS_PER_STRUCTURE)
  rng = np.random.default_rng((1, seed))
  n, name = structure.n, structure.name
  start = int(pick(rng, 0, 0, rng.integers(100), rng.integers(2**30)))
  state = state._replace(step=np.full((n,), start, np.int32))
  if name in ONLINE and structure.density != 1 and rng.random() < 0.3:
    # As initial_threshold does it: known, so that no search is due.
    first = np.full_like(state.threshold, 10 ** rng.uniform(-3, 3))
    state = optax.tree_utils.tree_set(state, threshold=first, lost=np.zeros((n,), bool))
  scale, share_bad = 10 ** rng.uniform(-3, 3), pick(rng, 0.0, 0.1, 0.1, 0.6)
  workers = w.Workers(n, "vmap", None, step)
  for _ in range(STEPS):
    grads = draw_gradients(rng, structure, scale, share_bad)
    updates, after = step(state, grads)
    updates, after = jax.tree.map(np.asarray, (updates, after))
    fuzz_checks.check_step(structure, workers, state, grads, updates, after)
    state = after
  return structure


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--runs", type=int, default=2000)
  parser.add_argument("--seed", type=int, default=0, help="of the first run")
  parser.add_argument("--one", type=int, metavar="SEED", help="this run only, and its structure")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  seeds = range(args.seed, args.seed + args.runs) if args.one is None else [args.one]
  done, failed = collections.Counter(), []
  for seed in seeds:
    name = NAMES[seed // RUNS_PER_STRUCTURE % len(NAMES)]
    done[name] += 1
    try:
      run(seed)
    except Exception:  # whatever it is, the other runs go on
      failed.append(seed)
      print(f"seed {seed} failed ({name}):", flush=True)
      traceback.print_exc(file=sys.stdout)
    if sum(done.values()) % RUNS_PER_REPORT == 0:
      print(f"{sum(done.values())} runs, {len(failed)} failed", flush=True)
    if args.one is not None:
      print(prepare(seed // RUNS_PER_STRUCTURE)[0])
  structures = len({seed // RUNS_PER_STRUCTURE for seed in seeds})
  print(f"{len(seeds)} runs of {structures} structures, {STEPS} steps each: {dict(done)}")
  print(f"failed: {failed or 'none'}")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
