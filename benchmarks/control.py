"""How well each threshold and partition rule holds the density and balances the load.

Emulates n workers on one device, on the synthetic gradients of `inputs.py`, and measures for every
pair of rules:

- first:   steps until the density is within 10% of the target for the first time
- error:   mean |K/k - 1| over steps 20 to 300; K is what qualifies, k what was asked for
- mean:    mean K/k over the same steps
- in band: share of these steps within 10%; after a jump, and in a warm-up, of all steps
- f50, f100, f300: padding ratio n max(count) / sum(count), mean of the 20 steps around

Run me: python benchmarks/control.py [--json FILE] [--out FILE.png] [--cases NAME ...]
[--rules THRESHOLD+PARTITION ...]; the paper's rules take most of the time, since they send most.
"""

import argparse
import functools
import itertools
import json
import pathlib

import inputs
import jax
import jax.numpy as jnp
import numpy as np

from exdyna_jax import exdyna
from exdyna_jax.density import parse_density, target_at

AXIS = "data"
BAND = 0.1
STEADY = slice(20, 300)  # the steps of `error`, `mean` and `in band`
RULES = tuple(itertools.product(("paper", "secant", "in_step"), ("paper", "balanced")))
JUMP_AT = 150
STEPS_PER_EPOCH = 15


def warm_up(step):
  """Deep Gradient Compression's: 0.25 in the first epoch, a quarter of it in the next, to 0.001."""
  return jnp.maximum(0.25 * 0.25 ** (step // STEPS_PER_EPOCH), 0.001)


# name -> what differs from CASE
CASE = {"n": 8, "size": 65536, "density": 0.01, "profile": "unbalanced", "scale": 1.0, "jump": 1.0}
CASES = {
  "unbalanced": {},
  "uniform": {"profile": "uniform"},
  "scale 0.01": {"scale": 0.01, "paper_steps": 800},
  "scale 100": {"scale": 100.0, "paper_steps": 1100},
  "jump x100": {"jump": 100.0},
  "jump x0.01": {"jump": 0.01},
  "density 0.001": {"size": 200_000, "density": 0.001},
  "warm-up to 0.001": {"size": 200_000, "density": warm_up, "whole": True},
  "4 workers": {"n": 4},
  "16 workers": {"n": 16},
  "32 workers": {"n": 32},
  "32 workers, N 1e6": {"n": 32, "size": 1_000_003, "steps": 110, "defaults_only": True},
}
STEPS = 320
ELEMENTS_PER_CALL = 2e7  # gradients handed over at once
KEPT_ELEMENTS = 4e6  # of a step, for its gradients to be kept


@functools.lru_cache(maxsize=STEPS)
def gradients(size, n, step, profile):
  """Float32 ``[n, N]`` of one step; the first ones are kept, since all rules see the same."""
  return inputs.grads(size, step, n, profile=profile)


@functools.cache
def runner(size, n, density, threshold, partition):
  """``(state, gradients [n, steps, N]) -> state, counts [steps, n]``, compiled."""
  # The original sends whatever it finds; the other rules are measured with the default capacity.
  capacity = {"capacity_factor": None} if threshold == "paper" else {}
  tx = exdyna(density, AXIS, threshold=threshold, partition=partition, **capacity)

  def steps(state, grads):
    def body(state, grad):
      _, state = tx.update(grad, state)
      return state, state.stats.counts

    return jax.lax.scan(body, state, grads)

  init = jax.jit(jax.vmap(lambda _: tx.init(jnp.zeros(size)), axis_name=AXIS))
  return init(jnp.arange(n)), jax.jit(jax.vmap(steps, axis_name=AXIS), donate_argnums=0)


def counts_of(case, threshold, partition):
  """Counts ``[steps, n]`` of one run."""
  n, size, steps = case["n"], case["size"], case.get("steps", STEPS)
  if threshold == "paper":
    steps = case.get("paper_steps", steps)
  state, run = runner(size, n, case["density"], threshold, partition)
  state = jax.tree.map(jnp.copy, state)  # it is donated, and needed for the next case
  per_call = int(max(1, ELEMENTS_PER_CALL // (n * size)))
  counts = []
  for first in range(0, steps, per_call):
    block = range(first, min(first + per_call, steps))
    scales = [case["scale"] * (case["jump"] if t >= JUMP_AT else 1.0) for t in block]
    draw = gradients if n * size < KEPT_ELEMENTS and first < STEPS else gradients.__wrapped__
    grads = [
      draw(size, n, t, case["profile"]) * np.float32(s) for t, s in zip(block, scales, strict=True)
    ]
    state, seen = run(state, np.stack(grads, axis=1))
    counts.append(np.asarray(seen)[0])
  return np.concatenate(counts)


def first_in_band(ratio):
  """Steps before the first one in the band, or None."""
  hits = np.flatnonzero(np.abs(ratio - 1) < BAND)
  return int(hits[0]) if hits.size else None


def measure(name, case, threshold, partition):
  """One row of the table."""
  counts = counts_of(case, threshold, partition)
  density = parse_density(case["density"])
  k = np.array([int(target_at(density, jnp.int32(t), case["size"])) for t in range(len(counts))])
  ratio = counts.sum(axis=1) / k
  padding = case["n"] * counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
  steady = ratio if case.get("whole") else ratio[STEADY]
  row = {"case": name, "threshold": threshold, "partition": partition}
  row["first"] = first_in_band(ratio)
  if case["jump"] != 1:
    # The step of the jump itself is step 0.
    row["back after jump"] = first_in_band(ratio[JUMP_AT:])
    steady = ratio[JUMP_AT:]
  row["error"] = float(np.mean(np.abs(steady - 1)))
  row["mean"] = float(np.mean(steady))
  row["in band"] = float(np.mean(np.abs(steady - 1) < BAND))
  for step in (50, 100, 300):
    around = padding[step - 10 : step + 10]
    row[f"f{step}"] = float(np.mean(around)) if len(around) == 20 else None
  return row, ratio, padding


def show(row, columns):
  """One line of the table."""
  cells = [f"{row['case']:18} {row['threshold']:8} {row['partition']:9}"]
  for column in columns:
    value = row.get(column)
    text = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    cells.append(f"{text:>{max(7, len(column))}}")
  print(" ".join(cells), flush=True)


def plot(curves, path):
  """K/k and padding ratio over the steps, for every pair of rules."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
  colours = {"paper": "tab:gray", "secant": "tab:blue", "in_step": "tab:red"}
  for (threshold, partition), (ratio, padding) in curves.items():
    style = {"color": colours[threshold], "ls": "-" if partition == "balanced" else ":"}
    label = f"{threshold}, {partition}"
    smooth = np.convolve(padding, np.full(20, 1 / 20), mode="valid")
    axes[0].plot(ratio, label=label, lw=1, **style)
    axes[1].plot(np.arange(len(smooth)) + 10, smooth, label=label, **style)
  axes[0].axhspan(1 - BAND, 1 + BAND, color="tab:green", alpha=0.15, label="within 10%")
  axes[0].set(yscale="log", ylabel="density / target")
  axes[1].set(xlabel="step", ylabel="padding ratio, mean of 20")
  axes[0].set_title("8 workers, 65,536 elements in layers of very different scale, density 0.01")
  axes[0].legend(ncols=3, fontsize=8)
  figure.savefig(path, dpi=120)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  parser.add_argument("--out", type=pathlib.Path, help="picture of the first case")
  parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
  names = ["+".join(rules) for rules in RULES]
  parser.add_argument("--rules", nargs="*", choices=names, default=names)
  args = parser.parse_args()
  columns = ("first", "back after jump", "error", "mean", "in band", "f50", "f100", "f300")
  print(f"{'case':18} {'thresh.':8} {'partition':9} " + " ".join(f"{c:>7}" for c in columns))
  rows, curves = [], {}
  for name in args.cases:
    case = CASE | CASES[name]
    gradients.cache_clear()
    for rules in (tuple(name.split("+")) for name in args.rules):
      if case.get("defaults_only") and rules not in (
        ("secant", "balanced"),
        ("in_step", "balanced"),
      ):
        continue
      row, ratio, padding = measure(name, case, *rules)
      rows.append(row)
      show(row, columns)
      if args.json:  # in between too: the run is long
        args.json.write_text(json.dumps(rows, indent=1))
      if name == args.cases[0]:
        curves[rules] = (ratio, padding)
  if args.out:
    plot(curves, args.out)


if __name__ == "__main__":
  main()
