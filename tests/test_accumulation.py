"""Several batches for one exchange: accumulate in front of us, or let the optimizer wait."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workers as w
from jax.sharding import PartitionSpec as P
from train_loop import N_WORKERS, QUICK, data, initial_params, loss

from exdyna_jax import exdyna, get_stats, local_params, state_specs

MICRO_STEPS = 4
TX = optax.chain(exdyna(0.1, w.AXIS, num_workers=N_WORKERS), optax.sgd(0.1))


def plain(params, batch):
  return jax.grad(loss)(local_params(params, w.AXIS), batch)


def accumulated(params, batch):
  """The mean of the local gradients of `MICRO_STEPS` parts of the batch."""
  params = local_params(params, w.AXIS)
  parts = jax.tree.map(lambda x: x.reshape(MICRO_STEPS, -1, *x.shape[1:]), batch)

  def add(total, part):
    return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

  total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
  return jax.tree.map(lambda g: g / MICRO_STEPS, total)


@functools.cache
def compiled(gradients):
  """A training step: `(params, state, batch) -> params and state`."""
  specs = state_specs(jax.eval_shape(TX.init, initial_params()), w.AXIS)

  def step(params, state, batch):
    updates, state = TX.update(gradients(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
    step, mesh=w.mesh_of(N_WORKERS), in_specs=(P(), specs, P(w.AXIS)), out_specs=(P(), specs)
  )
  params = initial_params()
  return jax.jit(mapped).lower(params, TX.init(params), data()).compile(QUICK)


def test_accumulated_gradients_make_the_step_of_the_whole_batch():
  ends = []
  for gradients in (plain, accumulated):
    specs = state_specs(jax.eval_shape(TX.init, initial_params()), w.AXIS)
    place = functools.partial(w.shardings, w.mesh_of(N_WORKERS))
    params = jax.device_put(initial_params(), place(P()))
    state = jax.device_put(TX.init(params), place(specs))
    for seed in range(3):
      batch = jax.device_put(data(seed), place(P(w.AXIS)))
      params, state = compiled(gradients)(params, state, batch)
    ends.append((params, state[0].residual, get_stats(state).selected))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *ends)


def test_accumulation_communicates_once():
  def collectives(gradients):
    return collections.Counter(w.collectives(compiled(gradients).as_text()))

  assert collectives(accumulated) == collectives(plain) and collectives(plain).total() > 1


def test_an_optimizer_that_waits_takes_the_mean_of_what_was_sent():
  waiting = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
  params, sparse = jnp.zeros(100), exdyna(0.1, w.AXIS)
  alone, waits = (w.run_on(tx, 2, params, "vmap") for tx in (sparse, optax.chain(sparse, waiting)))
  alone_state, state = alone.init(params), waits.init(params)
  sent, moved = [], []
  for seed in range(4):
    grads = jax.random.normal(jax.random.key(seed), (2, 100))
    updates, alone_state = alone.step(alone_state, grads)
    sent.append(np.asarray(updates[0]))
    updates, state = waits.step(state, grads)
    moved.append(np.asarray(updates[0]))
  assert not moved[0].any() and not moved[2].any()
  np.testing.assert_allclose(moved[1], -(sent[0] + sent[1]) / 2, rtol=1e-6)
  np.testing.assert_allclose(moved[3], -(sent[2] + sent[3]) / 2, rtol=1e-6)
