"""What once broke: donated states, starving coordinates, overflowing sums, odd meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from following import RULES, random_grads
from jax.sharding import PartitionSpec as P

from exdyna_jax import dense, exdyna, selection, state_specs


@pytest.mark.parametrize(
  "make", [lambda **o: exdyna(0.1, w.AXIS, **o), lambda **o: dense(w.AXIS, **o)]
)
def test_fresh_state_can_be_donated(make):
  """Fields that shared a buffer made a donated step fail, or crash the process."""
  state = make(num_workers=2).init(jnp.zeros(40))
  buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.size]
  assert len(set(buffers)) == len(buffers)
  jax.jit(lambda s: jax.tree.map(lambda x: x + 0, s), donate_argnums=0)(state)


def test_overflow_visits_every_coordinate():
  """Far more qualifies than may be sent, in every step: all of it has its turn."""
  n, size, steps = 4, 1000, 60
  workers = w.run_on(exdyna(0.05, w.AXIS, threshold="paper"), n, jnp.zeros(size), "vmap")
  state, visited = workers.init(jnp.zeros(size)), np.zeros(size, bool)
  for _ in range(steps):
    updates, state = workers.step(state, jnp.full((n, size), 10.0))
    visited |= np.asarray(updates)[0] != 0
  assert visited.mean() > 0.9


@pytest.mark.parametrize("share", [0.8, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_large_finite_gradients_neither_overflow_nor_stall(dtype, share):
  """Sums beyond the largest number stay at it, instead of becoming an Inf that never leaves."""
  n, size = 4, 200
  large = float(jnp.finfo(dtype).max) * share
  tx = exdyna(0.05, w.AXIS, residual_dtype=dtype)
  workers = w.run_on(tx, n, jnp.zeros(size, dtype), "vmap")
  state = workers.init(jnp.zeros(size, dtype))
  sent = []
  for _ in range(9):
    updates, state = workers.step(state, jnp.full((n, size), large, dtype))
    sent.append(w.stats_of(workers, state).selected)
    assert np.isfinite(np.asarray(updates, np.float32)).all()
    assert np.isfinite(np.asarray(state.residual, np.float32)).all()
  assert w.stats_of(workers, state).skipped == 0
  # The threshold may overshoot equal elements once, and then comes back below them.
  assert np.count_nonzero(sent) >= 8 and sent[-1] > 0


def test_a_state_of_other_blocks():
  params, n = jnp.zeros(8192), 4
  state = w.run_on(exdyna(0.01, w.AXIS, num_blocks=64), n, params, "vmap").init(params)
  other = w.run_on(exdyna(0.01, w.AXIS, num_blocks=128), n, params, "vmap")
  with pytest.raises(ValueError, match="made for 64 blocks, but num_blocks=128 makes 128"):
    other.step(state, jnp.zeros((n, 8192)))


@pytest.mark.parametrize("rules", RULES)
def test_a_mesh_that_is_manual_in_part(rules):
  """Data-parallel by hand over one axis, the other left to the compiler."""
  params = {"w": jnp.zeros((40, 8))}
  mesh = w.mesh_of(8, ("data", "model"), (4, 2))
  tx = exdyna(0.1, w.AXIS, num_workers=4, threshold=rules[0], partition=rules[1])
  specs = state_specs(jax.eval_shape(tx.init, params), w.AXIS)
  state = jax.jit(tx.init, out_shardings=w.shardings(mesh, specs))(params)
  step = jax.jit(
    jax.shard_map(
      lambda state, grads: tx.update(jax.tree.map(lambda g: g[0], grads), state),
      mesh=mesh,
      in_specs=(specs, P(w.AXIS)),
      out_specs=(P(), specs),
      axis_names={w.AXIS},
    )
  )
  one_axis = w.run_on(tx, 4, params, "shard_map")
  grads = random_grads(np.random.default_rng(0), 4, params, 1.0)
  updates, state = step(state, grads)
  expected, _ = one_axis.step(one_axis.init(params), grads)
  np.testing.assert_array_equal(updates["w"], expected["w"])


def test_a_partition_much_longer_than_its_share():
  """What lies beyond the window that is made for partitions of about equal size is found, too."""
  n, size, density = 8, 2**20, 0.001
  assert selection.window_of(size // n) < size
  tx = exdyna(density, "data", num_workers=n, threshold="paper", initial_threshold=3.0)
  state = tx.init(jnp.zeros(size))
  edges = jnp.array([0, *range(1024 - n + 1, 1025)], jnp.int32)  # the first owns all but 7 blocks
  state = state._replace(boundaries=edges, residual=jnp.zeros(size))
  grads = np.zeros(size, np.float32)
  large = np.random.default_rng(0).choice(size, 100, replace=False)
  grads[large] = 5.0
  step = jax.vmap(tx.update, axis_name="data", in_axes=(0, None))
  update, _ = jax.jit(step)(jnp.tile(grads, (n, 1)), state)
  assert np.flatnonzero(update[0]).tolist() == sorted(large)


@pytest.mark.filterwarnings("error")
def test_wide_gradients_with_a_narrow_residual_warn_of_nothing():
  with jax.enable_x64(True):
    tx, grads = exdyna(0.1, "data"), jnp.ones((1, 64), jnp.float64)
    state = jax.vmap(lambda g: tx.init(g), axis_name="data")(grads)
    update, _ = jax.vmap(tx.update, axis_name="data")(grads, state)
  assert update.dtype == jnp.float64 and np.isfinite(update).all()


def test_skipping_makes_no_nan_for_the_debugger_to_find():
  tx, grads = exdyna(0.1, "data"), jnp.ones((2, 64)).at[0, 3].set(jnp.inf)
  state = jax.vmap(lambda g: tx.init(g), axis_name="data")(grads)
  with jax.debug_nans(True):
    _, state = jax.vmap(tx.update, axis_name="data")(grads, state)
  assert state.stats.skipped.tolist() == [1, 1]
