"""What every transformation of the library promises, whatever its way to select."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from family import (
  COMMON,
  DENSITY,
  EXCLUSIVE,
  FAMILY,
  OVERLAPPING,
  PARAMS,
  SIZE,
  SPARSE,
  TRUNCATED,
  compiled,
  early,
  gradients,
  take_step,
)
from jax.sharding import PartitionSpec as P

import exdyna_jax
from exdyna_jax import get_stats, local_params, state_specs

N_WORKERS = 4
STEPS = 6

every = pytest.mark.parametrize("name", sorted(FAMILY))
every_sparse = pytest.mark.parametrize("name", SPARSE)


def test_all_public_transformations_are_tested():
  public = {
    name
    for name, value in vars(exdyna_jax).items()
    if inspect.isfunction(value) and value.__module__.startswith("exdyna_jax.sparsifiers.")
  }
  assert public == set(FAMILY)
  assert EXCLUSIVE | COMMON | OVERLAPPING == set(FAMILY)


@every
@pytest.mark.parametrize(
  "how, n", [("shard_map", 4), ("unchecked", 4), ("pmap", 2), ("vmap", 4), ("shard_map", 1)]
)
def test_invariants_in_every_way_of_mapping(name, how, n):
  """Conservation, agreement, exclusivity, statistics; shard_map with donated state, as one does."""
  workers = compiled(name, n, how)
  state = workers.init(PARAMS)
  waiting = np.zeros((n, SIZE))
  for t in range(STEPS):
    acc, sent, state = take_step(name, workers, state, gradients(t, n))
    waiting = np.where(sent, 0, acc)
  assert (name == "dense") == (not waiting.any())
  assert w.copies(workers, state.step)[0] == STEPS


@every_sparse
def test_schedules_and_any_number_of_messages(name):
  options = {"capacity_factor": None} if name in TRUNCATED else {}
  workers = compiled(name, N_WORKERS, "vmap", early, **options)
  state = workers.init(PARAMS)
  sizes = []
  for t in range(STEPS):
    _, _, state = take_step(name, workers, state, gradients(t, N_WORKERS))
    stats = w.stats_of(workers, state)
    assert stats.overflow == 0
    if name in ("top_k", "clt_k", "random_k"):
      np.testing.assert_array_equal(stats.counts, max(1, int(early(t) * SIZE)))
    sizes.append(stats.bytes_sent)
  if name not in ("hard_threshold", "sage"):  # which know little of the density
    assert sizes[-1] < 0.6 * sizes[0]


@pytest.mark.parametrize("name", sorted(TRUNCATED))
def test_overflow_stays_in_a_residual_of_half_precision(name):
  options = {"capacity_factor": 0.2, "residual_dtype": jnp.bfloat16}
  workers = compiled(name, N_WORKERS, "vmap", **options)
  state = workers.init(PARAMS)
  assert state.residual.dtype == jnp.bfloat16
  overflow = 0
  for t in range(STEPS):
    _, _, state = take_step(name, workers, state, gradients(t, N_WORKERS), jnp.bfloat16)
    overflow += w.stats_of(workers, state).overflow
  assert overflow > 0


@every
def test_zero_gradients_change_nothing(name):
  workers = compiled(name, N_WORKERS, "vmap")
  state = workers.init(PARAMS)
  zeros = jax.tree.map(jnp.zeros_like, gradients(0, N_WORKERS))
  before = state._replace(step=0, stats=0)
  for _ in range(STEPS):
    updates, state = workers.step(state, zeros)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
  assert name in ("random_k", "dense") or w.stats_of(workers, state).selected == 0
  if name != "exdyna":  # whose rule may settle on the lowest threshold
    after = state._replace(step=0, stats=0)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@every_sparse
def test_too_many_skips_in_a_row_make_the_update_nan(name):
  workers = compiled(name, N_WORKERS, "vmap", max_consecutive_skips=2)
  state, broken = workers.init(PARAMS), gradients(1, N_WORKERS)
  broken["w"] = broken["w"].at[2, 3, 4].set(np.nan)
  for skips_in_a_row in (2, 4):  # the finite step in between starts the count anew
    clean = state._replace(stats=())
    for skips in range(1, skips_in_a_row + 1):
      updates, state = workers.step(state, broken)
      w.agreed(workers, updates, state)
      filled = np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(updates)])
      assert np.isnan(filled).all() if skips > 2 else not filled.any()
      assert w.stats_of(workers, state).consecutive_skips == skips
      jax.tree.map(np.testing.assert_array_equal, state._replace(stats=()), clean)
    updates, state = workers.step(state, gradients(0, N_WORKERS))
    assert np.isfinite(updates["w"]).all() and np.any(updates["w"])
    assert w.stats_of(workers, state).consecutive_skips == 0


@every_sparse
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_worker_skips_the_step_on_all(name, bad):
  workers = compiled(name, N_WORKERS, "vmap")
  state = workers.init(PARAMS)
  _, _, state = take_step(name, workers, state, gradients(0, N_WORKERS))
  broken = gradients(1, N_WORKERS)
  broken["w"] = broken["w"].at[2, 3, 4].set(bad)
  updates, skipped = workers.step(state, broken)
  w.agreed(workers, updates, skipped)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))
  stats = w.stats_of(workers, skipped)
  assert stats.skipped == 1 and stats.selected == 0 and np.isfinite(stats.threshold_used)
  jax.tree.map(np.testing.assert_array_equal, skipped._replace(stats=()), state._replace(stats=()))


@every_sparse
def test_propagated_nan_shows_and_leaves(name):
  workers = compiled(name, N_WORKERS, "vmap", nonfinite="propagate")
  state = workers.init(PARAMS)
  broken = gradients(0, N_WORKERS)
  broken["w"] = broken["w"].at[2, 3, 4].set(np.nan)
  seen = 0
  # Most find it as soon as each worker's turn has come. But random_k does not look at values, and
  # the bins of deft differ from step to step.
  turns = 200 if name in ("random_k", "deft") else N_WORKERS
  for t in range(turns):
    updates, state = workers.step(state, gradients(t, N_WORKERS) if t else broken)
    seen += bool(np.isnan(updates["w"][:, 3, 4]).all())
    if seen:
      break
  assert seen and np.isfinite(state.residual).all()
  updates, state = workers.step(state, gradients(1, N_WORKERS))
  assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(updates))
  assert np.isfinite(state.threshold).all() and w.stats_of(workers, state).selected > 0


@every
@pytest.mark.parametrize("x64", [False, True])
def test_types_are_stable_and_extra_arguments_ignored(name, x64):
  """A state of another type after a step, weak types included, would compile the step twice."""
  tx = FAMILY[name](DENSITY, w.AXIS)

  def step(state, grads):
    return tx.update(grads, state, PARAMS, value=1.0)[1]

  with jax.enable_x64(x64):
    ranks, grads = jnp.arange(N_WORKERS), gradients(0, N_WORKERS)
    before = jax.eval_shape(jax.vmap(lambda _: tx.init(PARAMS), axis_name=w.AXIS), ranks)
    after = jax.eval_shape(jax.vmap(step, axis_name=w.AXIS), before, grads)
  assert not any(x.weak_type for x in jax.tree.leaves(after))
  assert before == after


@every
def test_state_lies_on_the_mesh(name):
  tx = optax.chain(FAMILY[name](DENSITY, w.AXIS, num_workers=N_WORKERS), optax.sgd(0.1))
  specs = state_specs(jax.eval_shape(tx.init, PARAMS), w.AXIS)
  others = specs[0]._replace(residual=P())
  assert specs[0].residual == (P() if name == "dense" else P(w.AXIS))
  assert set(jax.tree.leaves(others)) == {P()}
  assert get_stats(tx.init(PARAMS)).counts.shape == (N_WORKERS,)


@every
def test_several_axes_are_one_group_of_workers(name):
  axes = ("a", "b")
  tx = FAMILY[name](DENSITY, axes, num_workers=N_WORKERS)
  step, specs = w.sharded_step(tx, w.mesh_of(N_WORKERS, axes, (2, 2)), PARAMS, axis=axes)
  state = jax.eval_shape(tx.init, PARAMS)
  assert specs.residual == (P() if name == "dense" else P(axes))
  assert jax.eval_shape(step, state, gradients(0, N_WORKERS))[1] == state


@every
def test_errors(name):
  make = FAMILY[name]
  if name != "dense":
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 1.5"):
      make(1.5, w.AXIS)
    with pytest.raises(ValueError, match="'skip', 'propagate', got 'ignore'"):
      make(DENSITY, w.AXIS, nonfinite="ignore")
    with pytest.raises(TypeError, match="residual_dtype must be a floating-point"):
      make(DENSITY, w.AXIS, residual_dtype=jnp.int32)
    with pytest.raises(ValueError, match="max_consecutive_skips=3 needs nonfinite='skip'"):
      make(DENSITY, w.AXIS, max_consecutive_skips=3, nonfinite="propagate")
  if name in TRUNCATED:
    with pytest.raises(ValueError, match="capacity_factor must be positive.*got 0"):
      make(DENSITY, w.AXIS, capacity_factor=0)
  with pytest.raises(TypeError, match="axis_name must be .* got 3"):
    make(DENSITY, 3)
  with pytest.raises(ValueError, match="num_workers=, or call init under jax.set_mesh"):
    make(DENSITY, w.AXIS).init(PARAMS)
  tx = make(DENSITY, w.AXIS, num_workers=3)
  grads, state = gradients(0, N_WORKERS), tx.init(PARAMS)
  with pytest.raises(ValueError, match="mesh axis 'data', which is not bound"):
    tx.update(PARAMS, state)

  def on_workers(state, grads):
    return jax.eval_shape(
      jax.vmap(lambda g: make(DENSITY, w.AXIS).update(g, state), axis_name=w.AXIS), grads
    )

  with pytest.raises(ValueError, match="made for 3 workers, but the mesh axis has 4"):
    on_workers(state, grads)
  with pytest.raises(TypeError, match="the State that init returned, got tuple"):
    on_workers((state,), grads)
  with pytest.raises(TypeError, match="complex64.*real and imaginary"):
    on_workers(state, {"c": jnp.zeros((N_WORKERS, 3), jnp.complex64)})


@every
def test_gradients_that_are_summed_already_are_refused(name):
  tx = FAMILY[name](DENSITY, w.AXIS, num_workers=N_WORKERS)
  params, state = jnp.zeros(SIZE), tx.init(jnp.zeros(SIZE))
  specs = state_specs(state, w.AXIS)

  def step(params, state, x):
    return tx.update(jax.grad(lambda p: jnp.sum(p * x))(params), state)

  mapped = jax.shard_map(
    step, mesh=w.mesh_of(N_WORKERS), in_specs=(P(), specs, P(w.AXIS)), out_specs=(P(), specs)
  )
  with pytest.raises(ValueError, match="the same on all workers.*local_params"):
    jax.eval_shape(mapped, params, state, jnp.zeros(N_WORKERS * SIZE))


@every
def test_a_quadratic_problem_is_solved(name):
  """Workers whose targets differ find the mean of these, which none of them knows."""
  n, size, steps = 2, 100, 600
  rng = np.random.default_rng(0)
  targets = jnp.asarray(rng.standard_normal((n, size)) + 3 * rng.standard_normal(size), jnp.float32)
  tx = optax.chain(FAMILY[name](0.1, w.AXIS), optax.sgd(optax.linear_schedule(0.1, 0.0, steps)))

  def train(target):
    def step(carry, _):
      params, state = carry
      grads = jax.grad(lambda p: jnp.sum((p - target) ** 2) / 2)(local_params(params, w.AXIS))
      updates, state = tx.update(grads, state)
      return (optax.apply_updates(params, updates), state), None

    params = jnp.zeros(size)
    return jax.lax.scan(step, (params, tx.init(params)), None, steps)[0][0]

  params = jax.jit(jax.vmap(train, axis_name=w.AXIS))(targets)[0]
  best = targets.mean(axis=0)
  assert jnp.linalg.norm(params - best) < 0.05 * jnp.linalg.norm(best)
