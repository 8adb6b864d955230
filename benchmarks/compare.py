"""The family side by side: build-up, density, balance, traffic, time and accuracy.

For each algorithm and number of workers n, one row with

- build-up: entries sent over entries asked for, |I| / k; density: entries sent / N
- picked: what a worker picks over what it was asked for, which is k / n where no index is picked
  twice and k elsewhere; a build-up with a `picked` far from 1 is an error of the threshold
- padding: padding ratio, n max(count) / sum(count)
- bytes: sent per worker, over those of the dense float32 mean, 2 (n - 1) / n 4 N
- time: of the whole `update` of one worker (collectives replaced by local copies, as in step.py)
  over that of top_k; medians, in turn, over steps in which the worker's partition moves on. Where
  one worker does the selection for all, it is that one. ms is the same in milliseconds
- accuracy: on the test images, after training the demo's CNN on MNIST by 128 images a step, shared
  out between the workers; MNIST bytes: as bytes, of this training

The first five are means over steps 100 to 149 on the synthetic gradients of inputs.py (12 layers of
very different scale, N = 65,536, density 0.01), n workers emulated on one device, and nothing cut
off (`capacity_factor=None`), so that the algorithm shows and not the capacity. Time (N = 1,000,000)
and accuracy come with the default capacity. `+paper` are the original's rules.

Run me: python benchmarks/compare.py [--json FILE] [--out FOLDER] [--only NAME ...]
[--workers N ...] [--parts trace time mnist] [--quick]. What the FILE holds is not measured again.
"""

import argparse
import json
import pathlib
import sys
from typing import NamedTuple

import inputs
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
import pictures
import step as local_step

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import mnist_data
import train_mnist

import exdyna_jax as ej
from exdyna_jax.density import target_count

AXIS = train_mnist.AXIS
DENSITY = 0.01
PROFILE = "unbalanced"
PARTS = ("trace", "time", "mnist")
ELEMENTS_PER_CALL = 2e7  # gradients handed over at once


class Variant(NamedTuple):
  """A member of the family as it is measured."""

  make: object
  options: dict = {}
  has_capacity: bool = True
  exclusive: bool = False  # its workers pick k / n each
  leads: bool = False  # one worker does work for all


VARIANTS = {
  "exdyna": Variant(ej.exdyna, exclusive=True),
  "exdyna+paper": Variant(ej.exdyna, {"threshold": "paper", "partition": "paper"}, exclusive=True),
  "micro": Variant(ej.micro, exclusive=True),
  "micro+paper": Variant(ej.micro, {"threshold": "paper"}, exclusive=True),
  "deft": Variant(ej.deft, exclusive=True, leads=True),
  "top_k": Variant(ej.top_k, has_capacity=False),
  "clt_k": Variant(ej.clt_k, has_capacity=False, leads=True),
  "hard_threshold": Variant(ej.hard_threshold),
  "sage": Variant(ej.sage),
  "sidco": Variant(ej.sidco),
  "random_k": Variant(ej.random_k, has_capacity=False),
  "dense": Variant(None, has_capacity=False, exclusive=True),
}


class Effort(NamedTuple):
  """How much is measured."""

  workers: tuple[int, ...] = (2, 4, 8, 16)
  size: int = 65536
  steps: int = 150
  settled: int = 100  # the first step that counts
  timed_size: int = 1_000_000
  warm_up: int = 20  # steps until thresholds and partitions have settled
  repeats: int = 16  # of the timed step: a multiple of the number of partitions
  trained_steps: int = 200
  images: int = 128  # per step, all workers together


QUICK = Effort((2,), 4096, 12, 6, 4096, 2, 2, 3, 16)


def transformation(name, n, cut=True):
  """The optax transformation; without a capacity unless ``cut``."""
  variant = VARIANTS[name]
  if name == "dense":
    return ej.dense(AXIS, num_workers=n)
  options = variant.options if cut or not variant.has_capacity else {"capacity_factor": None}
  return variant.make(DENSITY, AXIS, num_workers=n, **variant.options | options)


def in_layers(vector):
  """The leaves of a flat gradient, along its last dimension."""
  cuts = np.cumsum(inputs.layer_sizes(vector.shape[-1]))[:-1]
  return jnp.split(vector, cuts, axis=-1)


def on_trace(name, n, grads, settled):
  """Build-up, density, balance and traffic on synthetic gradients ``[steps, workers, N]``."""
  steps, _, size = grads.shape
  tx = transformation(name, n, cut=False)

  def run(state, block):
    def body(state, grad):
      _, state = tx.update(in_layers(grad), state)
      return state, state.stats

    return jax.lax.scan(body, state, block)

  init = jax.jit(jax.vmap(lambda g: tx.init(in_layers(g)), axis_name=AXIS))
  run = jax.jit(jax.vmap(run, in_axes=(0, 1), axis_name=AXIS), donate_argnums=0)
  state, history = init(grads[0, :n]), []
  per_call = int(max(1, ELEMENTS_PER_CALL // (n * size)))
  for first in range(0, steps, per_call):
    state, stats = run(state, grads[first : first + per_call, :n])
    history.append(jax.tree.map(lambda x: np.asarray(x)[0], stats))
  stats = jax.tree.map(lambda *x: np.concatenate(x)[settled:].astype(np.float64), *history)
  k = size if name == "dense" else target_count(DENSITY, size)
  return {
    "build-up": float(stats.selected.mean() / k),
    "density": float(stats.density.mean()),
    "picked": float(stats.counts.mean() / (k / n if VARIANTS[name].exclusive else k)),
    "padding": float(stats.padding_ratio.mean()),
    "bytes": float(stats.bytes_sent.mean() / dense_bytes(n, size)),
  }


def dense_bytes(n, size):
  return 2 * (n - 1) / n * 4 * size


class Alone:
  """One worker's steps, with state that is donated and goes on."""

  def __init__(self, name, n, grads, warm_up):
    tx = transformation(name, n)
    self.grads, self.turn = grads, 0
    state = tx.init(grads[0])
    self.state = state._replace(residual=jnp.zeros(sum(x.size for x in grads[0])))

    def step(grads, state):
      with local_step.alone(n, state.step % n if VARIANTS[name].leads else None):
        return tx.update(grads, state)[::-1]

    self.step = jax.jit(step, donate_argnums=1)
    for _ in range(warm_up):
      jax.block_until_ready(self())

  def __call__(self):
    self.turn = 1 - self.turn
    self.state, updates = self.step(self.grads[self.turn], self.state)
    return updates, self.state.residual


def times(names, n, effort):
  """Name -> time of one worker's step; top_k is always among them."""
  grads = [in_layers(inputs.grad(effort.timed_size, t, 0, profile=PROFILE)) for t in range(2)]
  names = [name for name in VARIANTS if name in {*names, "top_k"} - {"dense"}]
  contestants = {name: Alone(name, n, grads, effort.warm_up) for name in names}
  seconds = measure.medians(contestants, effort.repeats)
  return {name: {"ms": 1e3 * s, "time": s / seconds["top_k"]} for name, s in seconds.items()}


def on_mnist(name, n, effort):
  """Accuracy and traffic of the demo's training, emulated on n devices of one process."""
  batch, steps = effort.images // n, effort.trained_steps
  options = argparse.Namespace(workers=n, batch=batch, steps=steps, seed=0)
  make_optimizer, lr = train_mnist.OPTIMIZERS["rms"]
  tx = optax.chain(transformation(name, n), make_optimizer(lr))
  run = train_mnist.train(name, tx, mnist_data.load(None, 0), options)
  sent = float(run.bytes_sent.mean() / dense_bytes(n, run.parameters))
  return {"accuracy": run.accuracy, "MNIST bytes": sent}


def fill(rows, args, effort, done):
  """Measures what is missing in ``rows``, ``(name, n) -> row``; calls ``done`` now and then."""

  def missing(column, n):
    return [name for name in args.only if column not in rows[name, n]]

  workers = args.workers
  if "trace" in args.parts and any(missing("build-up", n) for n in workers):
    grads = np.empty((effort.steps, max(workers), effort.size), np.float32)
    for t, worker in np.ndindex(grads.shape[:2]):  # the same for any number of workers
      grads[t, worker] = inputs.grad(effort.size, t, worker, profile=PROFILE)
    for n in workers:
      for name in missing("build-up", n):
        rows[name, n] |= on_trace(name, n, grads, effort.settled)
        done()
    del grads
  for n in workers if "time" in args.parts else ():
    if set(missing("time", n)) - {"dense"}:
      for name, values in times(args.only, n, effort).items():
        if name in args.only:
          rows[name, n] |= values
      done()
  for n in workers if "mnist" in args.parts else ():
    for name in missing("accuracy", n):
      rows[name, n] |= on_mnist(name, n, effort)
      done()


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--json", type=pathlib.Path, help="keep the rows here")
  parser.add_argument("--out", type=pathlib.Path, help="folder for a picture per column")
  parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
  parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
  parser.add_argument("--workers", type=int, nargs="*", help="numbers of them (2 4 8 16)")
  parser.add_argument("--quick", action="store_true", help="everything tiny: does it run at all?")
  args = parser.parse_args()
  effort = QUICK if args.quick else Effort()
  args.workers = args.workers or effort.workers
  train_mnist.use_devices(max(args.workers), parser)

  rows = {(name, n): {"algorithm": name, "n": n} for name in VARIANTS for n in sorted(args.workers)}
  if args.json and args.json.exists():
    rows |= {(row["algorithm"], row["n"]): row for row in json.loads(args.json.read_text())}

  def filled():
    return [row for row in rows.values() if len(row) > 2]

  def done():
    if args.json:  # in between too: the run is long
      args.json.write_text(json.dumps(filled(), indent=1))

  fill(rows, args, effort, done)
  measure.print_table(filled())
  if args.out:
    pictures.draw(filled(), args.out)


if __name__ == "__main__":
  main()
