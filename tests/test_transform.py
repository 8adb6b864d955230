"""The invariants of the design, for every way of mapping, against the NumPy reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from following import DEFAULT, PAPER, RULES, TREES, compiled, follow, random_grads
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from exdyna_jax import dense, exdyna, get_stats, state_specs


@settings(max_examples=24)
@given(
  rules=st.sampled_from(RULES),
  tree=st.sampled_from(sorted(TREES)),
  n=st.sampled_from([1, 2, 3, 4, 8]),
  density=st.sampled_from([0.01, 0.1, 1.0]),
  capacity_factor=st.sampled_from([None, 0.5, 1.25]),
  scale=st.sampled_from([1e-3, 1.0, 1e3]),
  steps=st.integers(1, 6),
  seed=st.integers(0, 2**32 - 1),
)
def test_invariants(rules, tree, n, density, capacity_factor, scale, steps, seed):
  rng = np.random.default_rng(seed)
  workers = compiled(tree, n, "vmap", density, capacity_factor, rules)
  grads = [random_grads(rng, n, TREES[tree], scale) for _ in range(steps)]
  options = {"density": density, "capacity_factor": capacity_factor, "rules": rules}
  follow(workers, TREES[tree], grads, **options)


@pytest.mark.parametrize("how", w.WAYS)
@pytest.mark.parametrize("n, rules", [(1, DEFAULT), (8, PAPER), (8, ("in_step", "balanced"))])
def test_every_way_of_mapping(how, n, rules):
  rng = np.random.default_rng(n)
  workers = compiled("mixed", n, how, 0.1, 1.25, rules)
  grads = [random_grads(rng, n, TREES["mixed"], 1.0) for _ in range(4)]
  follow(workers, TREES["mixed"], grads, density=0.1, capacity_factor=1.25, rules=rules)


# Around every limit of the geometry: one element, one word, more workers than elements, the
# original's smallest vector less one.
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 1000, 65535])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_small_sizes(size, n):
  rng = np.random.default_rng(size + n)
  params = jnp.zeros(size)
  workers = w.run_on(exdyna(0.01, w.AXIS), n, params, "vmap")
  grads = [random_grads(rng, n, params, 1.0) for _ in range(2 * n)]
  follow(workers, params, grads, density=0.01, capacity_factor=1.25)


@pytest.mark.parametrize("size", [3, 1000, 65535])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_density_one_is_the_dense_mean(size, n):
  params = {"w": jnp.zeros(size)}
  grads = random_grads(np.random.default_rng(0), n, params, 1.0)
  sparse, full = (
    w.run_on(tx, n, params, "shard_map")
    for tx in (exdyna(1.0, w.AXIS, num_workers=n), dense(w.AXIS, num_workers=n))
  )
  state, dense_state = sparse.init(params), full.init(params)
  for _ in range(3):
    updates, state = sparse.step(state, grads)
    expected, dense_state = full.step(dense_state, grads)
    np.testing.assert_array_equal(updates["w"], expected["w"])
    assert not np.any(state.residual) and get_stats(state).threshold_used == 0
    assert get_stats(state).selected == get_stats(dense_state).selected == size
    assert get_stats(dense_state).density == 1


def test_overflow_waits_in_the_residual_and_is_sent_later():
  n, size = 4, 1000
  params = jnp.zeros(size)
  workers = w.run_on(exdyna(0.01, w.AXIS, initial_threshold=0.5), n, params, "vmap")
  state = workers.init(params)
  total = np.zeros(size)
  for step in range(250):
    grads = jnp.ones((n, size)) * (step == 0)
    updates, state = workers.step(state, grads)
    total += np.asarray(updates)[0]
    if step == 0:
      assert get_stats(state).overflow[0] == size - get_stats(state).selected[0] > 0
  np.testing.assert_array_equal(total, np.ones(size))
  assert not np.any(state.residual)


@pytest.mark.parametrize("how", ["shard_map", "unchecked", "vmap"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_with_one_bad_worker_is_skipped_by_all(how, bad):
  n, params = 4, TREES["mixed"]
  rng = np.random.default_rng(0)
  workers = compiled("mixed", n, how, 0.1, 1.25)
  grads = [random_grads(rng, n, params, 1.0) for _ in range(4)]
  broken = dict(grads[1], w=grads[1]["w"].at[2, 3, 3].set(bad))
  steps = [grads[0], broken, grads[2], broken, grads[3]]
  state = follow(workers, params, steps, density=0.1, capacity_factor=1.25)
  undisturbed = follow(workers, params, grads[:1] + grads[2:], density=0.1, capacity_factor=1.25)
  # As if the bad batches had not been: everything but the count of skipped steps.
  same = state._replace(stats=state.stats._replace(skipped=undisturbed.stats.skipped))
  jax.tree.map(np.testing.assert_array_equal, same, undisturbed)
  assert w.stats_of(workers, state).skipped == 2


@pytest.mark.parametrize("capacity_factor", [1.25, None])
def test_skipped_for_ever_does_not_hang(capacity_factor):
  params = TREES["vector"]
  workers = compiled("vector", 4, "shard_map", 0.1, capacity_factor)
  state = workers.init(params)
  for step in range(3):
    updates, state = workers.step(state, jnp.full((4, 33), np.nan))
    assert not np.any(updates) and not np.any(state.residual)
    assert get_stats(state).skipped == step + 1 and state.step == 0


def test_propagate_shows_the_nan():
  """A NaN on one worker reaches everybody within n steps, and then has left the residual."""
  n, params = 4, TREES["vector"]
  workers = compiled("vector", n, "vmap", 0.1, 1.25, nonfinite="propagate")
  state = workers.init(params)
  seen = []
  for step in range(n):
    grads = jnp.zeros((n, 33)).at[2, 20].set(np.nan if step == 0 else 0.0)
    updates, state = workers.step(state, grads)
    seen.append(bool(np.isnan(updates[:, 20]).all()))
  assert sum(seen) == 1
  assert np.isfinite(state.residual).all() and get_stats(state).skipped[0] == 0


def test_all_zero_gradients_change_nothing():
  n, params = 4, TREES["larger"]
  workers = compiled("larger", n, "vmap", 0.01, 1.25)
  state = workers.init(params)
  zeros = jax.tree.map(lambda x: jnp.zeros((n, *x.shape)), params)
  for _ in range(3):
    updates, state = workers.step(state, zeros)
    assert all(not np.any(x) for x in jax.tree.leaves(updates))
  assert not np.any(state.residual) and np.all(state.threshold > 0)


def test_scan_donation_and_agreement_over_many_steps():
  """A training loop in one `lax.scan`, with donated state: the same bits as step by step."""
  n, params = 8, TREES["larger"]
  tx = optax.chain(exdyna(0.01, w.AXIS, num_workers=n), optax.sgd(0.1))
  mesh = w.mesh_of(n)
  step, specs = w.sharded_step(tx, mesh, params)
  rng = np.random.default_rng(0)
  grads = [random_grads(rng, n, params, 1.0) for _ in range(5)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)

  def scan(state, stacked):
    def body(state, grads):
      updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state)
      return state, updates

    return jax.lax.scan(body, state, stacked)

  scanned = jax.jit(
    jax.shard_map(scan, mesh=mesh, in_specs=(specs, P(None, w.AXIS)), out_specs=(specs, P())),
    donate_argnums=0,
  )
  init = jax.jit(tx.init, out_shardings=w.shardings(mesh, specs))
  donated = init(params)
  end, all_updates = scanned(donated, stacked)
  assert donated[0].residual.is_deleted()
  state = init(params)
  for t in range(5):
    updates, state = step(state, grads[t])
    jax.tree.map(
      np.testing.assert_array_equal, updates, jax.tree.map(lambda x, t=t: x[t], all_updates)
    )
  jax.tree.map(np.testing.assert_array_equal, end, state)


def test_init_inside_and_outside_agree():
  n, params = 4, TREES["larger"]
  tx = exdyna(0.01, w.AXIS)
  mesh = w.mesh_of(n)
  counted = exdyna(0.01, w.AXIS, num_workers=n)
  specs = state_specs(jax.eval_shape(counted.init, params), w.AXIS)
  inside = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)
  outside = counted.init(params)
  with jax.set_mesh(mesh):
    by_mesh = tx.init(params)
    abstract = jax.eval_shape(tx.init, params)
  jax.tree.map(np.testing.assert_array_equal, inside, outside)
  jax.tree.map(np.testing.assert_array_equal, by_mesh, outside)
  jax.tree.map(
    lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), abstract, outside
  )


def test_several_axes_are_one_group_of_workers():
  """Over ("a", "b") of a 2 x 4 mesh: the same as eight workers on one axis."""
  n, params, axes = 8, TREES["larger"], ("a", "b")
  tx = exdyna(0.01, axes, num_workers=n)
  step, specs = w.sharded_step(tx, w.mesh_of(n, axes, (2, 4)), params, axis=axes)
  assert specs.residual == P(axes)
  state = jax.jit(tx.init, out_shardings=w.shardings(w.mesh_of(n, axes, (2, 4)), specs))(params)
  flat = compiled("larger", n, "shard_map", 0.01, 1.25)
  flat_state = flat.init(params)
  rng = np.random.default_rng(0)
  for _ in range(3):
    grads = random_grads(rng, n, params, 1.0)
    updates, state = step(state, grads)
    flat_updates, flat_state = flat.step(flat_state, grads)
  jax.tree.map(np.testing.assert_array_equal, (updates, state), (flat_updates, flat_state))


def halving(step):
  return jnp.maximum(0.2 * 0.5**step, 0.01)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
  "tx",
  [
    dense(w.AXIS),
    exdyna(0.1, w.AXIS),
    exdyna(0.1, w.AXIS, threshold="in_step", capacity_factor=None),
    exdyna(halving, w.AXIS),
    exdyna(halving, w.AXIS, threshold="paper", partition="paper"),
  ],
  ids=["dense", "exdyna", "in_step", "scheduled", "paper"],
)
def test_extra_arguments_are_ignored_and_types_are_stable(tx, x64):
  """A state of another type after a step, weak types included, would compile the step twice."""

  def init(_):
    return tx.init(TREES["vector"])

  def step(state, grads):
    return tx.update(grads, state, TREES["vector"], value=1.0, anything=None)[1]

  with jax.enable_x64(x64):
    before = jax.eval_shape(jax.vmap(init, axis_name=w.AXIS), jnp.arange(2))
    grads = jnp.ones((2, 33), jnp.float32)
    after = jax.eval_shape(jax.vmap(step, axis_name=w.AXIS), before, grads)
  assert not any(x.weak_type for x in jax.tree.leaves(after))
  assert before == after
