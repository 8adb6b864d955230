"""The state for another number of workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from family import FAMILY, PARAMS, compiled, gradients, take_step
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna, get_stats, reshard_state, state_specs


def after_some_steps(name, n, steps=3):
  workers = compiled(name, n, "unchecked")
  state = workers.init(PARAMS)
  for t in range(steps):
    _, _, state = take_step(name, workers, state, gradients(t, n))
  return state


def goes_on(name, state, n):
  """Takes steps, each of which must keep the invariants."""
  workers = compiled(name, n, "unchecked")
  specs = state_specs(state, w.AXIS)
  state = jax.device_put(state, w.shardings(w.mesh_of(n), specs))
  for t in range(3):
    _, _, state = take_step(name, workers, state, gradients(10 + t, n))
  return state


@pytest.mark.parametrize("old, new", [(8, 4), (4, 8), (8, 3), (8, 1), (3, 8)])
def test_the_mean_residual_is_kept_and_training_goes_on(old, new):
  state = after_some_steps("exdyna", old)
  before = np.asarray(state.residual).reshape(old, -1)
  resharded = reshard_state(state, new)
  after = resharded.residual.reshape(new, -1)
  assert after.dtype == before.dtype and np.any(before)
  np.testing.assert_allclose(
    after.mean(axis=0), before.mean(axis=0), rtol=1e-6, atol=1e-6 * np.abs(before).max()
  )
  assert resharded.threshold == state.threshold and resharded.step == state.step
  boundaries = resharded.boundaries
  assert len(boundaries) == new + 1 and boundaries[0] == 0 and (np.diff(boundaries) > 0).all()
  assert boundaries[-1] == np.asarray(state.boundaries)[-1]
  goes_on("exdyna", resharded, new)


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_every_algorithm_goes_on(name):
  resharded = reshard_state(after_some_steps(name, 2), 4)
  fresh = jax.eval_shape(compiled(name, 4, "unchecked").init, PARAMS)
  assert jax.tree.map(jnp.shape, resharded) == jax.tree.map(jnp.shape, fresh)
  assert jax.tree.map(lambda x: x.dtype, resharded) == jax.tree.map(lambda x: x.dtype, fresh)
  goes_on(name, resharded, 4)


def test_means_of_pairs_and_copies():
  state = exdyna(0.5, w.AXIS, num_workers=4).init(jnp.zeros(2))
  rows = np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]], np.float32)
  state = state._replace(residual=jnp.asarray(rows.reshape(-1)))
  np.testing.assert_array_equal(reshard_state(state, 2).residual, [2, 3, 6, 7])
  np.testing.assert_array_equal(reshard_state(state, 8).residual, rows.repeat(2, 0).reshape(-1))
  np.testing.assert_allclose(  # thirds: the first holds all of row 0 and a third of row 1
    reshard_state(state, 3).residual[:2], (3 * rows[0] + rows[1]) / 4
  )


def test_partitions_follow_the_known_load():
  """All load in the last eighth: that is where most of the new partitions are."""
  state = exdyna(0.5, w.AXIS, num_workers=2).init(jnp.zeros(1024))
  loads = jnp.where(jnp.arange(1024) < 896, 0.0, 1.0)
  state = state._replace(memory=state.memory._replace(loads=loads))
  assert (reshard_state(state, 4).boundaries[1:-1] > 896).all()


def test_a_whole_optimizer_state_and_its_counters():
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=2), optax.sgd(0.1, momentum=0.9))
  state = tx.init({"w": jnp.ones(30)})
  stats = state[0].stats._replace(skipped=jnp.int32(5), consecutive_skips=jnp.int32(2))
  state = (state[0]._replace(stats=stats), state[1])
  new = reshard_state(state, 3)
  assert new[1] is not None and jax.tree.structure(new) == jax.tree.structure(state)
  assert (get_stats(new).skipped, get_stats(new).consecutive_skips) == (5, 2)
  assert get_stats(new).counts.shape == (3,)


def test_strict_promotion_is_for_the_users_code():
  state = exdyna(0.5, w.AXIS, num_workers=4).init(jnp.zeros(64))
  with jax.numpy_dtype_promotion("strict"):
    assert len(reshard_state(state, 2).boundaries) == 3


def test_half_precision_stays_half_precision():
  tx = exdyna(0.1, w.AXIS, num_workers=3, residual_dtype=jnp.bfloat16)
  state = tx.init(jnp.zeros(8))
  state = state._replace(residual=jnp.arange(24, dtype=jnp.bfloat16))
  new = reshard_state(state, 1).residual
  assert new.dtype == jnp.bfloat16
  np.testing.assert_array_equal(new.astype(np.float32), np.arange(8, 16))


@pytest.mark.parametrize("how", ["pmap", "vmap"])
def test_the_layout_of_pmap_and_back_as_the_error_says(how):
  state = compiled("exdyna", 4, how).init(PARAMS)
  _, _, state = take_step("exdyna", compiled("exdyna", 4, how), state, gradients(0, 4))
  with pytest.raises(ValueError, match=r"x\[0\] if spec == P\(\) else x.reshape\(-1\)"):
    reshard_state(state, 2)
  specs = state_specs(state, w.AXIS)
  flat = jax.tree.map(lambda x, spec: x[0] if spec == P() else x.reshape(-1), state, specs)
  for wrong, cure in (
    (flat._replace(residual=state.residual), r"residual.reshape\(-1\)"),
    (state._replace(residual=flat.residual), r"\(4, 5\), are stacked.*x\[0\] of every leaf"),
  ):
    with pytest.raises(ValueError, match=cure):
      reshard_state(wrong, 2)
  new, m = reshard_state(flat, 2), 2
  rows = jax.tree.map(
    lambda x, spec: np.stack([x] * m) if spec == P() else x.reshape(m, -1), new, specs
  )
  take_step("exdyna", compiled("exdyna", m, how), rows, gradients(1, m))


@pytest.mark.parametrize("name", ["exdyna", "sage"])
def test_mappings_of_the_fields_stay_mappings(name):
  """nnx and checkpoints lose the types; the `PerWorker` of sage is found by its field."""
  state = after_some_steps(name, 2)

  def as_dicts(node):
    if not hasattr(node, "_asdict"):
      return node
    return {name: as_dicts(x) for name, x in node._asdict().items()}

  jax.tree.map(
    np.testing.assert_array_equal,
    reshard_state(as_dicts(state), 4),
    as_dicts(reshard_state(state, 4)),
  )


def test_errors():
  state = exdyna(0.1, w.AXIS, num_workers=2).init(jnp.zeros(9))
  with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
    reshard_state(state, 0)
  with pytest.raises(ValueError, match="no state of a sparsifier in a tuple"):
    reshard_state((jnp.zeros(3),), 2)
  with pytest.raises(ValueError, match=r"shape \(9,\), but .* all 2 workers"):
    reshard_state(state._replace(residual=jnp.zeros(9)), 4)
  with pytest.raises(ValueError, match="Call it outside"):
    jax.jit(lambda state: reshard_state(state, 4))(state)
  with pytest.raises(ValueError, match="got a ShapeDtypeStruct. Restore"):
    reshard_state(jax.eval_shape(lambda: state), 4)
