"""Training an equinox model: its static parts are None leaves of parameters and gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import workers as w
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna, get_stats, local_params, state_specs

WORKERS, STEPS, INPUTS = 4, 30, 8
X = np.random.default_rng(0).standard_normal((64, INPUTS)).astype(np.float32)
Y = np.sin(X @ np.random.default_rng(1).standard_normal((INPUTS, 1)).astype(np.float32))


def test_a_model_with_static_parts():
  model = eqx.nn.MLP(INPUTS, 1, width_size=16, depth=1, key=jax.random.key(0))
  # Activations are functions: in the tree of the parameters, None stands in their place.
  params, static = eqx.partition(model, eqx.is_inexact_array)
  assert None in jax.tree.leaves(params, is_leaf=lambda x: x is None)
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=WORKERS), optax.adam(3e-2, b1=0.0))
  opt_state = tx.init(params)
  specs = state_specs(opt_state, w.AXIS)
  mesh = w.mesh_of(WORKERS)
  opt_state = jax.device_put(opt_state, w.shardings(mesh, specs))
  params = jax.device_put(params, NamedSharding(mesh, P()))

  def train_step(params, opt_state, x, y):
    model = eqx.combine(local_params(params, w.AXIS), static)
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, w.AXIS)

  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P(w.AXIS), P(w.AXIS)),
      out_specs=(P(), specs, P()),
    )
  )
  losses = []
  for _ in range(STEPS):
    params, opt_state, loss = step(params, opt_state, X, Y)
    losses.append(float(loss))

  assert losses[-1] < 0.5 * losses[0]
  for leaf in jax.tree.leaves(params):
    shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
    assert len(shards) == WORKERS and all((shard == shards[0]).all() for shard in shards)
  residual = opt_state[0].residual
  assert residual.sharding.spec == P(w.AXIS) and np.any(residual)
  assert get_stats(opt_state).counts.shape == (WORKERS,)
