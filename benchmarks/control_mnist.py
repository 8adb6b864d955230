"""The rules of control.py on a real training: the demo's CNN on MNIST.

For each density, rule and seed: K/k (what qualifies over what was asked for) by quarter of the run,
mean |K/k - 1|, the density sent, the padding ratio and the test accuracy; mean and spread (half the
range) over the seeds.

Run me: python benchmarks/control_mnist.py [--json FILE] [--seeds 3] [--steps 400] [--rules ...]
"""

import argparse
import itertools
import json
import pathlib
import sys

import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import mnist_data
import train_mnist

from exdyna_jax import dense, exdyna
from exdyna_jax.density import target_count

RULES = [f"{t}+{p}" for t, p in itertools.product(
  ("paper", "secant", "in_step"), ("paper", "balanced"))]  # fmt: skip


def one_run(name, transform, args, seed, density=None):
  """Trains once; returns the figures of the run."""
  options = argparse.Namespace(
    workers=args.workers, batch=32, steps=args.steps, seed=seed, density=density
  )
  make_optimizer, lr = train_mnist.OPTIMIZERS[args.optimizer]
  data = mnist_data.load(None, seed)
  run = train_mnist.train(name, optax.chain(transform, make_optimizer(lr)), data, options)
  figures = {"accuracy": run.accuracy, "sent": float(run.density.mean())}
  if density is not None:
    ratio = run.counts.sum(axis=1) / target_count(density, run.parameters)
    for quarter, part in enumerate(np.array_split(ratio, 4)):
      figures[f"K/k {quarter + 1}"] = float(part.mean())
    figures["error"] = float(np.abs(ratio - 1).mean())
    figures["padding"] = float(run.padding_ratio.mean())
  return figures


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  parser.add_argument("--densities", type=float, nargs="*", default=[0.01, 0.001])
  parser.add_argument("--rules", nargs="*", choices=RULES, default=RULES)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument("--workers", type=int, default=8)
  parser.add_argument("--optimizer", choices=train_mnist.OPTIMIZERS, default="rms")
  args = parser.parse_args()
  train_mnist.use_devices(args.workers, parser)

  rows = []
  for density, rules in [(1.0, "dense"), *itertools.product(args.densities, args.rules)]:
    runs = []
    for seed in range(args.seeds):
      if rules == "dense":
        runs.append(one_run("dense", dense("data", num_workers=args.workers), args, seed))
        continue
      threshold, partition = rules.split("+")
      transform = exdyna(
        density, "data", num_workers=args.workers, threshold=threshold, partition=partition
      )
      runs.append(one_run(rules, transform, args, seed, density))
    row = {"density": density, "rules": rules, "seeds": args.seeds}
    for key in runs[0]:
      values = [figures[key] for figures in runs]
      row[key] = float(np.mean(values))
      row[f"{key} spread"] = float(np.ptp(values)) / 2
    rows.append(row)
    cells = [f"{key} {row[key]:.4f} (+-{row[f'{key} spread']:.4f})" for key in runs[0]]
    print(f"{density:<6} {rules:17}", "  ".join(cells), flush=True)
    if args.json:  # in between too: the run is long
      args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
  main()
