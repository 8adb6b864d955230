"""Bad batches: all workers skip together, and training goes on as if they had not been."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from jax.sharding import PartitionSpec as P
from train_loop import QUICK

from exdyna_jax import exdyna, get_stats, state_specs

N_WORKERS, SIZE = 4, 200
PARAMS = {"w": jnp.ones((10, 15)), "b": jnp.ones(50)}
OPTIMIZERS = {
  "sgd": optax.sgd(0.1),
  "adam": optax.adam(0.1),
  "adam without momentum": optax.adam(0.1, b1=0.0),
}


HELD = {"held": True, "max_consecutive_skips": 2}


def hold(old, new, updates):
  """Where the exchange has skipped, the optimizer behind it has not taken a step either."""
  skipped = get_stats(new).skipped > get_stats(old).skipped

  def keep(new, old):
    return jnp.where(skipped, old, new)

  exchange, *behind = new
  behind = jax.tree.map(keep, tuple(behind), old[1:])
  # A NaN of `max_consecutive_skips` stays one.
  return jax.tree.map(lambda u: keep(u, u * 0), updates), (exchange, *behind)


@functools.cache
def compiled(optimizer, held=False, **options):
  """One compilation per configuration: `init()` and `step((params, state), grads)`."""
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=N_WORKERS, **options), OPTIMIZERS[optimizer])
  mesh = w.mesh_of(N_WORKERS)
  specs = (P(), state_specs(jax.eval_shape(tx.init, PARAMS), w.AXIS))

  def init():
    return PARAMS, tx.init(PARAMS)

  def step(training, grads):
    params, old = training
    updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), old, params)
    if held:
      updates, state = hold(old, state, updates)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(w.AXIS)), out_specs=specs)
  placed = jax.jit(init, out_shardings=w.shardings(mesh, specs))
  return placed, jax.jit(mapped, compiler_options=QUICK)


def gradients(seed):
  rng = np.random.default_rng(seed)
  return {k: rng.standard_normal((N_WORKERS, *x.shape), np.float32) for k, x in PARAMS.items()}


def broken(value, workers):
  grads = gradients(99)
  grads["w"][workers, 3, 4] = value
  return grads


def run(optimizer, steps, **options):
  init, step = compiled(optimizer, **options)
  training = init()
  for grads in steps:
    training = step(training, grads)
  return jax.device_get(training)


def assert_same_bits(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def without_count(state):
  """The state of a chain without the number of steps that were skipped."""
  return (state[0]._replace(stats=state[0].stats._replace(skipped=0)), *state[1:])


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("workers", [[2], [0, 1, 2, 3]], ids=["one worker", "all workers"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_training_goes_on_as_if_the_bad_batches_had_not_been(value, workers, times):
  bad = [broken(value, workers)] * times
  params, state = run("sgd", [gradients(0), *bad, gradients(1)])
  expected, undisturbed = run("sgd", [gradients(0), gradients(1)])
  assert_same_bits(params, expected)
  assert_same_bits(without_count(state), without_count(undisturbed))
  assert get_stats(state).skipped == times


def test_bad_batches_for_ever_move_nothing():
  params, state = run("sgd", [broken(np.nan, [1])] * 30)
  assert_same_bits(params, jax.device_get(PARAMS))
  assert not state[0].residual.any() and get_stats(state).skipped == 30


def test_bad_batches_end_the_training_where_there_is_a_limit():
  """Too many in a row make parameters of NaN, on all devices; as many as allowed do nothing."""
  allowed = [broken(np.nan, [1])] * 2
  params, state = run("adam", [*allowed, gradients(0), *allowed, gradients(1)], **HELD)
  expected, undisturbed = run("adam", [gradients(0), gradients(1)], **HELD)
  assert_same_bits(params, expected)
  assert_same_bits(without_count(state), without_count(undisturbed))
  (params, state), (_, before) = (
    run("adam", [gradients(0), *steps], **HELD) for steps in ([*allowed, broken(np.inf, [3])], [])
  )
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(params))
  # A program that looks may go on from the parameters that it has kept: the state is clean.
  assert_same_bits(
    (state[0]._replace(stats=()), state[1:]), (before[0]._replace(stats=()), before[1:])
  )
  assert get_stats(state).consecutive_skips == get_stats(state).skipped == 3


def test_an_optimizer_behind_us_takes_its_step_on_zeros():
  """Momentum moves the parameters on; without it they stay, but second moments fade."""
  one = [gradients(0)]
  moved, unmoved = (
    [run(optimizer, steps) for steps in (one, [*one, broken(np.nan, [1])])]
    for optimizer in ("adam", "adam without momentum")
  )
  for (_, before), (_, after) in (moved, unmoved):
    assert (after[1][0].count, before[1][0].count) == (2, 1)
    np.testing.assert_allclose(after[1][0].nu["w"], 0.999 * before[1][0].nu["w"], rtol=1e-6)
  assert np.abs(moved[1][0]["w"] - moved[0][0]["w"]).max() > 0.01
  assert_same_bits(unmoved[1][0], unmoved[0][0])


def test_an_optimizer_behind_us_can_be_held():
  params, state = run("adam", [gradients(0), broken(np.inf, [3]), gradients(1)], **HELD)
  expected, undisturbed = run("adam", [gradients(0), gradients(1)], **HELD)
  assert_same_bits(params, expected)
  assert_same_bits(without_count(state), without_count(undisturbed))
  assert get_stats(state).skipped == 1
