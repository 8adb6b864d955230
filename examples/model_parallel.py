"""Trains a network whose layers are split over one mesh axis and whose batch over the other.

Each part of the model is a vector of its own, with its own threshold and residual: it is exchanged
over "data" only, between the workers that hold the same part. Two ways of writing that: with both
axes in the hands of the step ("manual"), and with the model's axis left to the compiler except
around the exchange ("nested").

  python examples/model_parallel.py
"""

import argparse
import os

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import State, dense, exdyna, get_stats, local_params

DATA, MODEL = "data", "model"
INPUTS, HIDDEN, OUTPUTS, BATCH = 16, 256, 8, 64

# The hidden dimension is split over "model". The last bias is not: all parts hold a copy of it.
PARAM_SPECS = {"w1": P(None, MODEL), "b1": P(MODEL), "w2": P(MODEL, None), "b2": P()}


def per_part(tx):
  """`tx` with a state for each part of the model, stacked along a first dimension.

  What holds the threshold of one part outside of the mapped function is an array `[1]` inside. The
  residual, a vector anyway, needs no further dimension: `[data * model * N]` outside, `[N]` inside.
  """

  def reshape(change, tree):
    def of_state(node):
      if not _is_state(node):
        return change(node)
      return jax.tree.map(change, node._replace(residual=()))._replace(residual=node.residual)

    return jax.tree.map(of_state, tree, is_leaf=_is_state)

  def init(params):
    return reshape(lambda x: x[None], tx.init(params))

  def update(updates, state, params=None, **extra_args):
    updates, state = tx.update(updates, reshape(lambda x: x[0], state), params, **extra_args)
    return updates, reshape(lambda x: x[None], state)

  return optax.GradientTransformationExtraArgs(init, update)


def _is_state(node):
  return isinstance(node, State)


def specs_of(tx, params):
  """PartitionSpecs of the state: of what mirrors the parameters, theirs; of a `State`, its own."""
  state = jax.eval_shape(tx.init, params)
  specs = optax.tree_utils.tree_map_params(
    tx, lambda _, spec: spec, state, PARAM_SPECS, transform_non_params=lambda _: P()
  )

  def of_state(node):
    if not _is_state(node):
      return node
    return jax.tree.map(lambda _: P(MODEL), node)._replace(residual=P((DATA, MODEL)))

  return jax.tree.map(of_state, specs, is_leaf=_is_state)


def make_tx(density, num_workers, learning_rate=3e-3, sparsifier=exdyna):
  """The exchange over "data", in front of an optimizer that knows nothing of it."""
  # A part selects by its own threshold. Of what all parts hold, all must get the same.
  kinds = {name: "copied" if spec == P() else "split" for name, spec in PARAM_SPECS.items()}
  exchange = optax.partition(
    {
      "split": sparsifier(density, DATA, num_workers=num_workers),
      "copied": dense(DATA, num_workers=num_workers),
    },
    kinds,
  )
  return optax.chain(per_part(exchange), optax.adam(learning_rate, b1=0.0))


def split_stats(opt_state):
  """The `Stats` of the sparsifier, every field stacked over the parts of the model."""
  return get_stats(opt_state[0].inner_states["split"])


def total_stats(opt_state, params):
  """What one step sent, over all parts of the model; call it outside of the mapped function."""
  stats = split_stats(opt_state)
  size = sum(params[name].size for name, spec in PARAM_SPECS.items() if spec != P())
  return {"density": stats.selected.sum() / size, "bytes_sent": stats.bytes_sent.sum()}


def manual_step(tx, mesh, specs):
  """Both axes are manual: the network sums over "model" itself."""

  def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    outputs = jax.lax.psum(hidden @ params["w2"], MODEL) + params["b2"]
    return jnp.mean((outputs - y) ** 2)

  def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(local_params(params, DATA), x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, DATA)

  return jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(PARAM_SPECS, specs, P(DATA), P(DATA)),
      out_specs=(PARAM_SPECS, specs, P()),
    ),
    donate_argnums=(0, 1),
  )


def nested_step(tx, mesh, specs):
  """Only "data" is manual: the network is written as if it were whole, but for the exchange."""

  def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)

  inner = only(MODEL, (PARAM_SPECS, specs))
  update = jax.shard_map(
    tx.update, in_specs=(*inner, inner[0]), out_specs=inner, axis_names={MODEL}
  )

  def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(local_params(params, DATA), x, y)
    updates, opt_state = update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, DATA)

  outer = only(DATA, (PARAM_SPECS, specs))
  mapped = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(*outer, P(DATA), P(DATA)),
    out_specs=(*outer, P()),
    axis_names={DATA},
  )
  return jax.jit(
    mapped, donate_argnums=(0, 1), out_shardings=placed(mesh, (PARAM_SPECS, specs, P()))
  )


def only(axis, specs):
  """The part of the specs that speaks of one mesh axis."""

  def keep(spec):
    names = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return P(*(axis if axis in entry else None for entry in names))

  return jax.tree.map(keep, specs, is_leaf=lambda x: isinstance(x, P))


def placed(mesh, specs):
  """PartitionSpecs as NamedShardings."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def init_params(key):
  """Parameters of the whole network."""
  keys = jax.random.split(key)
  return {
    "w1": jax.random.normal(keys[0], (INPUTS, HIDDEN)) / INPUTS**0.5,
    "b1": jnp.zeros(HIDDEN),
    "w2": jax.random.normal(keys[1], (HIDDEN, OUTPUTS)) / HIDDEN**0.5,
    "b2": jnp.zeros(OUTPUTS),
  }


def batches(mesh, steps):
  """Inputs and outputs of a function to be learned, split over "data"."""
  weights = jax.random.normal(jax.random.key(1), (INPUTS, OUTPUTS))
  for step in range(steps):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (BATCH, INPUTS))
    yield jax.device_put((x, jnp.tanh(x @ weights) + 1), NamedSharding(mesh, P(DATA)))


def train(make_step, tx, mesh, steps):
  """Trains from the same parameters and batches each time; returns (params, opt_state, losses)."""
  params = jax.device_put(init_params(jax.random.key(0)), placed(mesh, PARAM_SPECS))
  specs = specs_of(tx, params)
  # Inside of the mapped function, where the parameters have the shapes of a part.
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=(PARAM_SPECS,), out_specs=specs)
  opt_state = jax.jit(init)(params)
  step, losses = make_step(tx, mesh, specs), []
  for x, y in batches(mesh, steps):
    params, opt_state, loss = step(params, opt_state, x, y)
    losses.append(float(loss))
  return params, opt_state, losses


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--data", type=int, default=2, help="workers that share the batch (%(default)s)")
  add("--model", type=int, default=4, help="parts of the model (%(default)s)")
  add("--density", type=float, default=0.05, help="share of the gradient to send (%(default)s)")
  add("--steps", type=int, default=200, help="training steps (%(default)s)")
  args = parser.parse_args(argv)
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", args.data * args.model)
  types = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((args.data, args.model), (DATA, MODEL), types)

  print(f"{'':8} {'first loss':>10} {'last loss':>10} {'density':>10} {'bytes/step':>11}")
  for name, make_step in {"manual": manual_step, "nested": nested_step}.items():
    tx = make_tx(args.density, args.data)
    params, opt_state, losses = train(make_step, tx, mesh, args.steps)
    total = total_stats(opt_state, params)
    print(
      f"{name:8} {losses[0]:10.4f} {losses[-1]:10.4f} {total['density']:10.4f}"
      f" {total['bytes_sent']:11,.0f}"
    )


if __name__ == "__main__":
  main()
