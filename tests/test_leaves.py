"""Leaves and trees out of the ordinary: without a gradient, without elements, wide and narrow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from following import ROUNDING

from exdyna_jax import exdyna, get_stats


def test_integer_and_float0_gradients_are_zeros_of_their_kind():
  n = 2
  grads = {
    "w": jnp.ones(40),
    "i": jnp.arange(3, dtype=jnp.int32),
    "f": np.zeros((2,), jax.dtypes.float0),
    "b": jnp.array([True]),
  }

  def step(x):
    tree = dict(grads, w=grads["w"] * x)
    return tx.update(tree, tx.init(tree))

  tx = exdyna(0.1, w.AXIS)
  # float0 cannot be an output of a mapped function: look at it while tracing.
  kinds = {}

  def traced(x):
    updates, _ = step(x)
    kinds.update({k: (v.dtype, v.shape) for k, v in updates.items()})
    return {k: v for k, v in updates.items() if k != "f"}

  updates = jax.jit(jax.vmap(traced, axis_name=w.AXIS))(jnp.ones(n))
  assert kinds == {k: (v.dtype, v.shape) for k, v in grads.items()}
  assert not np.any(updates["i"]) and not np.any(updates["b"]) and np.any(updates["w"])


@pytest.mark.parametrize("tree", [{}, None, [], {"a": jnp.zeros((0, 4)), "b": None}])
def test_trees_without_elements(tree):
  tx = optax.chain(exdyna(0.01, w.AXIS), optax.sgd(0.1))

  def step(_):
    state = tx.init(tree)
    return tx.update(tree, state)

  updates, state = jax.jit(jax.vmap(step, axis_name=w.AXIS))(jnp.arange(4))
  assert jax.tree.structure(updates) == jax.tree.structure(tree)
  assert get_stats(state).selected.sum() == 0


def test_float64_and_bfloat16_residuals():
  for dtype, x64 in ((jnp.float64, True), (jnp.bfloat16, False)):
    with jax.enable_x64(x64):
      params = jnp.zeros(200, jnp.float32)
      workers = w.run_on(exdyna(0.05, w.AXIS, residual_dtype=dtype), 4, params, "vmap")
      state = workers.init(params)
      rng = np.random.default_rng(0)
      sent = np.zeros(200)
      total = np.zeros(200)
      for _ in range(5):
        grads = jnp.asarray(rng.standard_normal((4, 200)), jnp.float32)
        updates, state = workers.step(state, grads)
        assert updates.dtype == jnp.float32 and state.residual.dtype == dtype
        sent += np.asarray(updates[0], np.float64)
        total += np.asarray(grads, np.float64).mean(axis=0)
      left = np.asarray(state.residual, np.float64).mean(axis=0)
      eps = float(jnp.finfo(dtype).eps) + ROUNDING
      np.testing.assert_allclose(sent + left, total, atol=10 * eps)
