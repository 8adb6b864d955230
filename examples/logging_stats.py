"""Logs what sparse training does in each step: JSON lines, TensorBoard and a picture.

A small regression on eight CPU devices. The statistics of a step are arrays that the step returns
beside its loss, so that they cost one transfer and can go into any logger. TensorBoard files are
written if the package tensorboardX is installed. Run it with --help for the options.
"""

import argparse
import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

from exdyna_jax import exdyna, get_stats, local_params, state_specs

AXIS = "data"
INPUTS, HIDDEN, BATCH = 64, 128, 32  # of the network, and examples per worker and step
LEARNING_RATE = 1e-2


def make_params(seed):
  """A network with one hidden layer: 8,449 parameters."""
  first, second = jax.random.split(jax.random.key(seed))
  return {
    "w1": jax.random.normal(first, (INPUTS, HIDDEN)) / INPUTS**0.5,
    "b1": jnp.zeros(HIDDEN),
    "w2": jax.random.normal(second, (HIDDEN, 1)) / HIDDEN**0.5,
    "b2": jnp.zeros(1),
  }


def loss_fn(params, x):
  hidden = jnp.tanh(x @ params["w1"] + params["b1"])
  target = jnp.sin(x[:, :4].sum(axis=1, keepdims=True))
  return jnp.mean((hidden @ params["w2"] + params["b2"] - target) ** 2)


def make_train_step(tx, mesh, specs):
  """Returns (params, opt_state, x) -> (params, opt_state, metrics)."""

  def train_step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(local_params(params, AXIS), x)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    # All of it is the same on all workers, and ready for a logger.
    metrics = {"loss": lax.pmean(loss, AXIS), **get_stats(opt_state)._asdict()}
    return params, opt_state, metrics

  sharded = jax.shard_map(
    train_step, mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs, P())
  )
  return jax.jit(sharded, donate_argnums=(0, 1))


def train(sparse, args):
  """Yields the metrics of each step, as NumPy."""
  mesh = jax.make_mesh((args.workers,), (AXIS,))
  tx = optax.chain(sparse, optax.adam(LEARNING_RATE, b1=0.0))
  params = make_params(args.seed)
  training = (params, tx.init(params))
  specs = state_specs(training, AXIS)
  places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  params, opt_state = jax.device_put(training, places)
  train_step = make_train_step(tx, mesh, specs[1])
  rng = np.random.default_rng(args.seed)
  for _ in range(args.steps):
    x = rng.standard_normal((args.workers * BATCH, INPUTS), dtype=np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P(AXIS)))
    params, opt_state, metrics = train_step(params, opt_state, x)
    yield jax.device_get(metrics)


def scalars(metrics):
  """The metrics as Python numbers; of the counts of the workers, the smallest and the largest."""
  counts = metrics["counts"]
  rest = {name: value.item() for name, value in metrics.items() if name != "counts"}
  return rest | {"counts/min": int(counts.min()), "counts/max": int(counts.max())}


def tensorboard_writer(folder):
  """A writer of TensorBoard files, or None if the package is not installed."""
  if importlib.util.find_spec("tensorboardX") is None:
    return None
  import tensorboardX

  return tensorboardX.SummaryWriter(str(folder))


def plot(history, target_density, path):
  """Draws density, threshold and padding ratio over the steps."""
  figure = Figure(figsize=(8, 8), layout="constrained")
  density, threshold, padding = figure.subplots(3, 1, sharex=True)
  for axes, name, label in (
    (density, "density", "share of the gradient sent"),
    (threshold, "threshold_used", "threshold"),
    (padding, "padding_ratio", "padding ratio"),
  ):
    axes.plot([step[name] for step in history], color="#d1495b", linewidth=1, label="exdyna")
    axes.set(ylabel=label, ylim=(0, None))
    axes.grid(alpha=0.3)
  density.axhline(target_density, color="black", linestyle="--", label=f"target {target_density:g}")
  padding.axhline(1, color="black", linestyle="--", label="perfect balance")
  density.legend()
  padding.legend()
  density.set(title="What the workers send, step by step")
  padding.set(xlabel="step")
  figure.savefig(path, format="png", dpi=120)


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--density", type=float, default=0.02, help="share to send (%(default)s)")
  parser.add_argument("--workers", type=int, default=8, help="number of devices (%(default)s)")
  parser.add_argument("--steps", type=int, default=300, help="training steps (%(default)s)")
  parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
  parser.add_argument(
    "--out", type=pathlib.Path, default="logging_stats", help="folder for the files (%(default)s)"
  )
  args = parser.parse_args(argv)
  try:
    sparse = exdyna(args.density, AXIS, num_workers=args.workers)
  except ValueError as error:
    parser.error(str(error))
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", args.workers)
  args.out.mkdir(parents=True, exist_ok=True)

  writer, history = tensorboard_writer(args.out), []
  with (args.out / "stats.jsonl").open("w") as log:
    bar = tqdm(train(sparse, args), total=args.steps, unit="step", mininterval=0.5)
    for step, metrics in enumerate(bar):
      history.append(scalars(metrics))
      log.write(json.dumps({"step": step, **history[-1]}) + "\n")
      if writer:
        for name, value in history[-1].items():
          writer.add_scalar(name, value, step)
      values = {name: f"{history[-1][name]:.3g}" for name in ("loss", "density", "padding_ratio")}
      bar.set_postfix(values, refresh=False)
  if writer:
    writer.close()
  plot(history, args.density, args.out / "stats.png")
  print(f"{args.out}: {', '.join(sorted(path.name for path in args.out.iterdir()))}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
