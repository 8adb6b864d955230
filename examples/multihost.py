"""Trains a CNN on MNIST in several processes, on one machine or on many, and can be resumed.

Every process runs this script; together, their devices are the workers. docs/multihost.md says how
to start it, what happens when a process dies, and how to go on after that.
"""

import contextlib
import itertools
import os
import pathlib
import sys
import traceback

import jax
import mnist_data
import numpy as np
import optax
import orbax.checkpoint as ocp
import train_mnist
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm
from train_mnist import AXIS

from exdyna_jax import exdyna, get_stats, joining, reshard_state
from exdyna_jax.joining import Refusal

CHECKPOINTS_KEPT = 2
CAUSE = 200  # characters of the reason why one cannot be read
_SAME = ("seed", "batch", "optimizer")  # what a resumed run must have in common with the first


def start(coordinator, num_processes, process_id):
  """Joins the other processes; raises as `joining.join`."""
  joining.join(coordinator, num_processes, process_id)
  # CPUs connect in the first collective, and give up on a process that comes 30 seconds late. Here,
  # no process is still compiling.
  with leaving_at_once():
    multihost_utils.sync_global_devices("start")


@contextlib.contextmanager
def leaving_at_once():
  """Ends the process at once after an error; else it would wait for the others, and they for it."""
  try:
    yield
  except BaseException as error:
    try:
      if not isinstance(error, Refusal):
        traceback.print_exc()
        error = "ended by the error above. Then start all again with --resume: docs/multihost.md"
      print(f"process {jax.process_index()}: {error}", file=sys.stderr, flush=True)
      sys.stdout.flush()
    finally:  # without devices, nobody knows the index
      os._exit(1)


def make_mesh():
  """All devices of all processes, those of a process side by side."""
  devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
  return Mesh(np.array(devices), (AXIS,))


def make_tx(args, num_workers):
  """The sparse exchange, and the optimizer behind it."""
  make_optimizer, default_lr = train_mnist.OPTIMIZERS[args.optimizer]
  lr = default_lr if args.lr is None else args.lr
  return optax.chain(exdyna(args.density, AXIS, num_workers=num_workers), make_optimizer(lr))


def batches(data, args, first, mesh):
  """Yields the batches from step `first` on; each process reads the images of its own devices.

  They depend on the seed and the step alone, so that a resumed run sees what it would have seen.
  """
  sharding = NamedSharding(mesh, P(AXIS))
  drawn = mnist_data.batches(len(data.train_images), args.batch, args.steps, args.seed)
  for index in itertools.islice(drawn, first, None):
    mine = index.reshape(jax.process_count(), -1)[jax.process_index()]
    local = (data.train_images[mine], data.train_labels[mine])
    yield jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), local)


def open_checkpoints(folder):
  """The checkpoints in a folder that all processes can write to."""
  # Saved while the training waits: the step donates the arrays that would be written meanwhile.
  options = ocp.CheckpointManagerOptions(
    max_to_keep=CHECKPOINTS_KEPT, enable_async_checkpointing=False
  )
  return ocp.CheckpointManager(folder.absolute(), options=options)


def save(checkpoints, step, params, opt_state, args):
  """Saves the state after `step` steps, and what a resumed run has to know; for all processes."""
  settings = {name: getattr(args, name) for name in _SAME}
  settings["workers"] = get_stats(opt_state).counts.size
  checkpoints.save(
    step,
    args=ocp.args.Composite(
      state=ocp.args.StandardSave({"params": params, "opt_state": opt_state}),
      settings=ocp.args.JsonSave(settings),
    ),
  )


def restore(checkpoints, step, params, opt_state, args, mesh):
  """Returns parameters and state after `step` steps, placed as the fresh ones that are given."""
  settings = _read(checkpoints, step, "settings", ocp.args.JsonRestore())
  for name in _SAME:
    if settings[name] != getattr(args, name):
      raise Refusal(
        f"--{name} is {getattr(args, name)}, but the checkpoint was made with {settings[name]}"
      )
  tree = {"params": params, "opt_state": opt_state}
  placements = jax.tree.map(lambda x: x.sharding, tree)
  if settings["workers"] == mesh.size:
    shapes = jax.tree.map(_placed, tree, placements)
    saved = _read(checkpoints, step, "state", ocp.args.StandardRestore(shapes))
  else:
    # For another number of workers, everybody reads the residuals of all, and keeps a share.
    tree["opt_state"] = jax.eval_shape(make_tx(args, settings["workers"]).init, params)
    shapes = jax.tree.map(lambda x: _placed(x, NamedSharding(mesh, P())), tree)
    saved = _read(checkpoints, step, "state", ocp.args.StandardRestore(shapes))
    saved["opt_state"] = reshard_state(saved["opt_state"], mesh.size)
    saved = jax.device_put(saved, placements)
  return saved["params"], saved["opt_state"]


def _read(checkpoints, step, item, args):
  try:
    return checkpoints.restore(step, args=ocp.args.Composite(**{item: args}))[item]
  except jax.errors.JaxRuntimeError:  # says nothing about the files: another process is gone
    raise
  except Exception as error:  # of many kinds, by what is broken
    earlier = [other for other in checkpoints.all_steps() if other < step]
    place = f"step {max(earlier)}" if earlier else "the beginning"
    raise Refusal(
      f"step {step} in {checkpoints.directory} cannot be read: remove it to go on from {place}"
      f" ({type(error).__name__}: {' '.join(str(error).split())[:CAUSE]})"
    ) from error


def _placed(x, sharding):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def train(model, data, args, mesh):
  """Yields (step, params, opt_state, loss, stats) after each step; the next one overwrites them."""
  tx = make_tx(args, mesh.size)
  params, opt_state, specs = train_mnist.init(model, tx, mesh, data.train_images, args.seed)
  train_step = train_mnist.make_train_step(model, tx, mesh, specs)

  first, checkpoints = 0, None
  if args.checkpoints is not None:
    checkpoints = open_checkpoints(args.checkpoints)
    latest = checkpoints.latest_step()
    if latest is not None and not args.resume:
      raise Refusal(f"{args.checkpoints} holds step {latest}: add --resume, or take a new folder")
    if latest is not None:
      params, opt_state = restore(checkpoints, latest, params, opt_state, args, mesh)
      first = latest

  for step, batch in enumerate(batches(data, args, first, mesh), start=first + 1):
    params, opt_state, loss, stats = train_step(params, opt_state, *batch)
    yield step, params, opt_state, float(loss), jax.device_get(stats)
    if checkpoints is not None and (step % args.save_every == 0 or step == args.steps):
      save(checkpoints, step, params, opt_state, args)


def make_parser():
  parser = train_mnist.Parser(description=__doc__.splitlines()[0])
  add, at_least = parser.add_argument, train_mnist.at_least
  where = "of process 0; left out where JAX finds it"
  add("--coordinator", type=joining.address, metavar="HOST:PORT", help=where)
  add("--num-processes", type=at_least(1), help="left out where JAX finds it")
  add("--process-id", type=at_least(0), help="left out where JAX finds it")
  add("--density", type=float, default=0.01, help="share of the gradient to send (%(default)s)")
  add("--steps", type=at_least(1), default=400, help="training steps (%(default)s)")
  add("--batch", type=at_least(1), default=256, help="images per step, all workers (%(default)s)")
  add("--optimizer", choices=train_mnist.OPTIMIZERS, default="rms", help="(%(default)s)")
  add("--lr", type=float, help="learning rate (default: one that suits the optimizer)")
  add("--data-dir", type=pathlib.Path, help="folder with the IDX files of MNIST or Fashion-MNIST")
  add("--seed", type=at_least(0), default=0, help="of parameters, batches and split (%(default)s)")
  add("--checkpoints", type=pathlib.Path, help="folder that all processes can write to")
  add("--save-every", type=at_least(1), default=100, help="steps (%(default)s)")
  add("--resume", action="store_true", help="go on from the latest checkpoint, if there is one")
  return parser


def main(argv=None):
  parser = make_parser()
  args = parser.parse_args(argv)
  cluster = (args.coordinator, args.num_processes, args.process_id)
  if None in cluster and cluster != (None, None, None):
    parser.error("--coordinator, --num-processes and --process-id go together")
  try:
    make_tx(args, num_workers=None)
    data = mnist_data.load(args.data_dir, args.seed)
    start(*cluster)
  except (OSError, ValueError) as error:
    parser.error(" ".join(str(error).split()))
  with leaving_at_once():
    run(args, data)


def run(args, data):
  """Trains and says how well, on process 0."""
  shown = jax.process_index() == 0
  mesh, model = make_mesh(), train_mnist.CNN()
  if args.batch % mesh.size or args.batch > len(data.train_images):
    raise Refusal(
      f"--batch {args.batch} must be a multiple of the {mesh.size} workers, and not exceed the"
      f" {len(data.train_images)} images"
    )
  last, sent = None, []
  with tqdm(total=args.steps, unit="step", mininterval=0.5, disable=not shown) as bar:
    for step, params, _, loss, stats in train(model, data, args, mesh):
      bar.set_postfix({"loss": f"{loss:.3f}", "density": f"{stats.density:.4f}"}, refresh=False)
      bar.update(step - bar.n)
      sent.append(stats.bytes_sent)
      last = params
  if last is None:
    if shown:
      print(f"Nothing is left to do: the checkpoint is of step {args.steps} or later")
    return

  # On all processes: those that end long before the others would give them up.
  accuracy = train_mnist.accuracy(model, jax.device_get(last), data)
  if shown:
    n, size = mesh.size, sum(x.size for x in jax.tree.leaves(last))
    dense = 2 * (n - 1) / n * size * 4  # a ring all-reduce of float32
    print(f"{n} workers in {jax.process_count()} processes, accuracy {accuracy:.3f} on test images")
    print(f"{np.mean(sent):,.0f} bytes sent per worker and step; the dense mean: {dense:,.0f}")


if __name__ == "__main__":
  main()
