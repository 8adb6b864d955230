"""A small model that n workers train, each on its own data, all steps in one `lax.scan`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workers as w
from jax.sharding import PartitionSpec as P

from exdyna_jax import local_params

N_WORKERS, BATCH = 4, 16
IN, HIDDEN, OUT = 12, 16, 4
# Many programs that run once: compiling them is most of the time.
QUICK = {"xla_backend_optimization_level": 0}


def initial_params(seed=0):
  """A network with one hidden layer, about 300 parameters."""
  rng = np.random.default_rng(seed)
  return {
    "w1": jnp.asarray(rng.standard_normal((IN, HIDDEN)) / IN**0.5, jnp.float32),
    "b1": jnp.zeros(HIDDEN),
    "w2": jnp.asarray(rng.standard_normal((HIDDEN, OUT)) / HIDDEN**0.5, jnp.float32),
    "b2": jnp.zeros(OUT),
  }


def data(seed=1, batch=BATCH):
  """Inputs and targets, `[n * batch, ...]`; the workers' inputs differ in scale."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((N_WORKERS, batch, IN)) * (1 + np.arange(N_WORKERS))[:, None, None] / 4
  y = np.tanh(x @ rng.standard_normal((IN, OUT)) / IN**0.5)
  return tuple(jnp.asarray(a.reshape(-1, a.shape[-1]), jnp.float32) for a in (x, y))


def loss(params, batch):
  """Mean squared error, in the dtype of the parameters."""
  x, y = (a.astype(params["w1"].dtype) for a in batch)
  out = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
  return jnp.mean((out - y) ** 2)


def train(tx, steps=50, check=True):
  """Trains under shard_map; parameters with a row per device, mean losses `[steps]`."""

  def run(params, batch):
    def step(carry, _):
      params, state = carry
      value, grads = jax.value_and_grad(loss)(local_params(params, w.AXIS), batch)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), jax.lax.pmean(value, w.AXIS)

    (params, _), losses = jax.lax.scan(step, (params, tx.init(params)), None, steps)
    return jax.tree.map(lambda x: x[None], params), losses

  mapped = jax.shard_map(
    run, mesh=w.mesh_of(N_WORKERS), in_specs=(P(), P(w.AXIS)), out_specs=(P(w.AXIS), P()),
    check_vma=check,
  )  # fmt: skip
  return jax.device_get(jax.jit(mapped, compiler_options=QUICK)(initial_params(), data()))
