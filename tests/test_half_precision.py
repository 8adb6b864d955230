"""Half precision: nothing small gets lost, nothing large stays, the loss scale finds its place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from family import FAMILY
from jax.sharding import PartitionSpec as P
from train_loop import N_WORKERS, QUICK, data, initial_params, loss

from exdyna_jax import exdyna, get_stats, local_params


@pytest.mark.parametrize("name", ["exdyna", "top_k"])
def test_two_thousand_small_bfloat16_gradients_arrive(name):
  """1e-3 each: a bfloat16 sum stops growing at 0.5, where half a unit in the last place is more."""
  n, size, steps, gradient = 2, 128, 2000, 1e-3
  tx = optax.chain(FAMILY[name](1 / size, w.AXIS), optax.sgd(1.0))

  def train(_):
    params = jnp.zeros(size)
    grads = jnp.full((size,), gradient, jnp.bfloat16)

    def step(carry, _):
      params, sent, state = carry
      updates, state = tx.update(grads, state, params)
      assert updates.dtype == jnp.bfloat16 and state[0].residual.dtype == jnp.float32
      return (optax.apply_updates(params, updates), sent - updates.astype(jnp.float32), state), None

    carry = (params, jnp.zeros(size), tx.init(params))
    (params, sent, state), _ = jax.lax.scan(step, carry, None, steps)
    return params, sent, state[0].residual

  compiled = jax.jit(jax.vmap(train, axis_name=w.AXIS), compiler_options=QUICK)
  params, sent, residual = jax.device_get(compiled(jnp.arange(n)))
  total = steps * gradient
  # At every coordinate what was sent and what waits make up the sum; little of it waits, and what
  # was sent is in the parameters.
  np.testing.assert_allclose(sent[0] + residual.mean(axis=0), total, rtol=0.01)
  np.testing.assert_allclose(-params[0] + residual.mean(axis=0), total, rtol=0.01)
  assert residual.max() < 0.15 * total


def scaled_step(tx, params, state, scale, good, batch, *, grow_after):
  """A step in float16 with a dynamic loss scale; `good` counts the steps since it last changed."""

  def scaled_loss(params):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    return loss(half, batch).astype(jnp.float32) * scale

  value, grads = jax.value_and_grad(scaled_loss)(local_params(params, w.AXIS))
  # Before the exchange, and in float32: the residual adds up gradients of steps of other scales.
  grads = jax.tree.map(lambda g: g / scale, grads)
  updates, new = tx.update(grads, state, params)
  skipped = get_stats(new).skipped > get_stats(state).skipped
  good = jnp.where(skipped, 0, good + 1)
  grows = good == grow_after
  smaller = jnp.maximum(scale / 2, 1.0)
  scale = jnp.where(skipped, smaller, jnp.where(grows, scale * 2, scale))
  good = jnp.where(grows, 0, good)
  return optax.apply_updates(params, updates), new, scale, good, value / scale


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_a_dynamic_loss_scale_finds_its_place(check):
  tx = optax.chain(exdyna(0.1, w.AXIS), optax.sgd(0.1))
  first = 2.0**24  # far too large for float16

  def run(params, batch):
    def step(carry, _):
      params, state, scale, good = carry
      out = scaled_step(tx, params, state, scale, good, batch, grow_after=20)
      return out[:4], (out[2], jax.lax.pmean(out[4], w.AXIS))

    carry = (params, tx.init(params), jnp.float32(first), jnp.int32(0))
    (params, state, *_), history = jax.lax.scan(step, carry, None, 60)
    return jax.tree.map(lambda x: x[None], params), get_stats(state).skipped, history

  mapped = jax.shard_map(
    run, mesh=w.mesh_of(N_WORKERS), in_specs=(P(), P(w.AXIS)), out_specs=(P(w.AXIS), P(), P()),
    check_vma=check,
  )  # fmt: skip
  compiled = jax.jit(mapped, compiler_options=QUICK)
  params, skipped, (scales, losses) = jax.device_get(compiled(initial_params(), data()))
  for leaf in jax.tree.leaves(params):
    np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
  changes = np.diff(np.log2([first, *scales]))
  assert (changes < 0).sum() == skipped and (changes[:5] == -1).all()
  assert (changes == 1).any()  # it is tried again whether a larger one will do
  assert losses[-1] < 0.3 * losses[0]
