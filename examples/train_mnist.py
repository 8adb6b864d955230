"""Trains a CNN on MNIST twice, with dense and with sparse gradients, and compares the two.

Eight CPU devices in one process play the eight workers of a data-parallel training. Both runs
start from the same parameters and see the same batches. Run it with --help for the options.
"""

import argparse
import math
import os
import pathlib
import sys
import time

import flax.linen as nn
import jax
import mnist_data
import numpy as np
import optax
import report
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from exdyna_jax import dense, exdyna, get_stats, local_params, state_specs

AXIS = "data"


class CNN(nn.Module):
  """Two convolutions and two dense layers: 206,922 parameters on images of 28x28."""

  @nn.compact
  def __call__(self, x):
    for features in (16, 32):
      x = nn.relu(nn.Conv(features, (3, 3))(x))
      x = nn.max_pool(x, (2, 2), strides=(2, 2))
    x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
    return nn.Dense(mnist_data.NUM_CLASSES)(x)


def init(model, tx, mesh, images, seed):
  """Returns parameters and the state of `tx`, both on the mesh, and the specs of the state."""
  everywhere = NamedSharding(mesh, P())
  params = jax.jit(model.init, out_shardings=everywhere)(jax.random.key(seed), images[:1])
  # The residual differs between the workers, everything else is the same on all of them.
  specs = state_specs(jax.eval_shape(tx.init, params), AXIS)
  placements = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return params, jax.jit(tx.init, out_shardings=placements)(params), specs


def make_train_step(model, tx, mesh, specs):
  """Returns (params, opt_state, images, labels) -> (params, opt_state, loss, stats)."""

  def train_step(params, opt_state, images, labels):  # what one worker does with its batch
    def loss_fn(params):
      logits = model.apply(params, images)
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # local_params keeps the gradients of the workers apart: exdyna sums them, not jax.grad.
    loss, grads = jax.value_and_grad(loss_fn)(local_params(params, AXIS))
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, lax.pmean(loss, AXIS), get_stats(opt_state)

  sharded = jax.shard_map(
    train_step,
    mesh=mesh,
    in_specs=(P(), specs, P(AXIS), P(AXIS)),
    out_specs=(P(), specs, P(), P()),
  )
  return jax.jit(sharded, donate_argnums=(0, 1))


def train(name, tx, data, args):
  """Trains with the transformation `tx` from the parameters and batches of `args.seed`."""
  mesh = jax.make_mesh((args.workers,), (AXIS,))
  model = CNN()
  params, opt_state, specs = init(model, tx, mesh, data.train_images, args.seed)
  train_step = make_train_step(model, tx, mesh, specs)

  batch_size = args.workers * args.batch
  batches = mnist_data.batches(len(data.train_images), batch_size, args.steps, args.seed)
  losses, history = [], []
  with tqdm(batches, desc=f"{name:>6}", total=args.steps, unit="step", mininterval=0.5) as bar:
    for index in bar:
      batch = (data.train_images[index], data.train_labels[index])
      batch = jax.device_put(batch, NamedSharding(mesh, P(AXIS)))
      params, opt_state, loss, stats = train_step(params, opt_state, *batch)
      losses.append(float(loss))
      history.append(jax.device_get(stats))
      values = {"loss": f"{losses[-1]:.3f}", "density": f"{history[-1].density:.4f}"}
      bar.set_postfix(values, refresh=False)  # drawn at the next tick of the bar
      if len(losses) == 1:
        start = time.perf_counter()  # the first step compiles
      if not math.isfinite(losses[-1]):
        break
  seconds = time.perf_counter() - start

  return report.Run(
    name=name,
    accuracy=accuracy(model, jax.device_get(params), data),
    steps_per_second=(len(losses) - 1) / seconds if len(losses) > 1 else math.nan,
    loss=np.array(losses),
    density=np.array([stats.density for stats in history]),
    threshold=np.array([stats.threshold_used for stats in history]),
    padding_ratio=np.array([stats.padding_ratio for stats in history]),
    bytes_sent=np.array([stats.bytes_sent for stats in history]),
    counts=np.array([stats.counts for stats in history]),
    parameters=sum(x.size for x in jax.tree.leaves(params)),
  )


def accuracy(model, params, data):
  """Share of the test images that the model classifies correctly."""
  logits = jax.jit(model.apply)(params, data.test_images)
  return float(np.mean(np.argmax(logits, axis=-1) == data.test_labels))


# Name -> (learning rate -> what follows the exchange, default learning rate). First-moment momentum
# after the exchange suits sparse updates badly: "rms" is Adam without it.
OPTIMIZERS = {
  "sgd": (optax.sgd, 0.1),
  "momentum": (lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True), 0.05),
  "rms": (lambda lr: optax.adam(lr, b1=0.0), 3e-3),
  "adam": (optax.adam, 1e-3),
}


NOTES = f"""\
loss         of the training batches, mean of the last {report.SMOOTHING} steps
density      share of the gradient that was sent, mean over the steps
padding      largest count of a worker over the mean count, before the capacity cuts it
bytes/step   sent by one worker
steps/s      all workers share this machine's cores and no network: what a step computes, not
             what sparsity saves"""


class Parser(argparse.ArgumentParser):
  """Answers a bad argument with one line instead of the whole usage."""

  def error(self, message):
    self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def at_least(low):
  """Returns an argparse type: a whole number not below `low`."""

  def parse(text):
    value = int(text)
    if value < low:
      raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
    return value

  parse.__name__ = "int"  # argparse names the type in its message
  return parse


def make_parser():
  parser = Parser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--density", type=float, default=0.01, help="share of the gradient to send (%(default)s)")
  add("--workers", type=at_least(1), default=8, help="number of devices (%(default)s)")
  add("--steps", type=at_least(1), default=400, help="training steps (%(default)s)")
  add("--batch", type=at_least(1), default=32, help="images per worker and step (%(default)s)")
  add("--optimizer", choices=OPTIMIZERS, default="rms", help="after the exchange (%(default)s)")
  add("--lr", type=float, help="learning rate (default: one that suits the optimizer)")
  add("--threshold", default="secant", help="threshold rule of exdyna (%(default)s)")
  add("--partition", default="balanced", help="partition rule of exdyna (%(default)s)")
  add("--data-dir", type=pathlib.Path, help="folder with the IDX files of MNIST or Fashion-MNIST")
  add("--seed", type=at_least(0), default=0, help="of parameters, batches and split (%(default)s)")
  add("--out", type=pathlib.Path, default="train_mnist.png", help="picture (%(default)s)")
  return parser


def use_devices(number, parser):
  """Splits the CPU into `number` devices, unless JAX_PLATFORMS asks for other hardware."""
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", number)
  if len(jax.devices()) < number:
    parser.error(f"--workers {number}, but JAX has only {len(jax.devices())} devices")


def main(argv=None):
  parser = make_parser()
  args = parser.parse_args(argv)
  make_optimizer, default_lr = OPTIMIZERS[args.optimizer]
  lr = default_lr if args.lr is None else args.lr
  if not 0 < lr < math.inf:
    parser.error(f"argument --lr: must be above zero, got {lr}")
  if not args.out.parent.is_dir():
    parser.error(f"argument --out: there is no folder {args.out.parent}")
  rules = {"threshold": args.threshold, "partition": args.partition}
  try:
    sparse = exdyna(args.density, AXIS, num_workers=args.workers, **rules)
    data = mnist_data.load(args.data_dir, args.seed)
  except (OSError, ValueError) as error:
    parser.error(" ".join(str(error).split()))
  if args.workers * args.batch > len(data.train_images):
    images = len(data.train_images)
    parser.error(f"{args.workers} workers times {args.batch} images exceed the {images} images")
  use_devices(args.workers, parser)

  transforms = {"dense": dense(AXIS, num_workers=args.workers), "exdyna": sparse}
  runs = [
    train(name, optax.chain(transform, make_optimizer(lr)), data, args)
    for name, transform in transforms.items()
  ]

  print(f"\n{report.table(runs, args.density)}\n")
  print(NOTES)
  source = args.data_dir.name if args.data_dir else "MNIST"
  title = f"{source}: {args.workers} workers, batch {args.batch} each, {args.optimizer}, lr {lr:g}"
  report.plot(runs, args.density, title, args.out)
  print(f"Picture: {args.out}")

  failures = [report.divergence(run, mnist_data.NUM_CLASSES) for run in runs]
  for sentence in filter(None, failures):
    print(sentence, file=sys.stderr)
  return 1 if any(failures) else 0


if __name__ == "__main__":
  sys.exit(main())
