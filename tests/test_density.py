"""Densities and their schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from following import DEFAULT, PAPER, RULES, TREES, compiled, follow, random_grads

from exdyna_jax import exdyna, get_stats
from exdyna_jax.density import parse_density, target_at


def warm_up(step):
  """From 0.25 down to 0.01 in 12 steps, as Deep Gradient Compression does over its epochs."""
  return optax.exponential_decay(0.25, 12, 0.04, end_value=0.01)(step)


def test_numbers_and_schedules():
  assert target_at(parse_density(0.01), jnp.int32(5), 65536) == 655
  assert target_at(parse_density(1e-9), jnp.int32(5), 65536) == 1
  assert parse_density(np.float32(0.5)).lowest == 0.5 and parse_density(1).is_one
  scheduled = parse_density(warm_up)
  assert (scheduled.lowest, scheduled.highest) == pytest.approx((0.01, 0.25))
  for step in (0, 5, 100):
    want = int(np.float32(warm_up(step)) * np.float32(1000))
    assert target_at(scheduled, jnp.int32(step), 1000) == want


def test_schedules_that_are_none():
  with pytest.raises(TypeError, match=r"make a scalar of a step, got shape \(2,\)"):
    exdyna(lambda step: jnp.full(2, 0.1), w.AXIS)
  for wrong in (lambda step: 0.1j, lambda step: None, lambda step: {"a": 0.1}):
    with pytest.raises(TypeError, match="density must make a real number of a step"):
      exdyna(wrong, w.AXIS)
  with pytest.raises(ValueError, match="got 0 at step 30.*an end that is not zero: end_value="):
    exdyna(optax.cosine_decay_schedule(0.5, 30), w.AXIS)
  # Not everything in every step, although it is at the steps that are looked at beforehand.
  assert not parse_density(lambda t: jnp.where(t % 7 == 6, 0.02, 1.0)).is_one


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.5, float("nan")])
def test_schedules_out_of_range(bad):
  with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got .* at step 10"):
    exdyna(lambda step: jnp.where(step < 10, 0.1, bad), w.AXIS)


@pytest.mark.parametrize(
  "untraceable",
  [lambda t: 0.1 if t < 10 else 0.01, lambda t: 0.1 / float(t + 1), [0.1, 0.2].__getitem__],
)
def test_schedules_that_only_work_on_numbers(untraceable):
  with pytest.raises(TypeError, match="density is called with a traced step.*use jnp.where"):
    exdyna(untraceable, w.AXIS)


def test_peaks_that_come_and_go_have_room():
  """A peak in every tenth step was at none of the steps looked at, and found no room."""
  assert parse_density(lambda t: jnp.where(t % 10 == 9, 1.0, 0.01)).highest == 1
  late = parse_density(lambda t: jnp.where(t == 10**6, 1.0, 0.01))
  assert target_at(late, jnp.int32(10**6), 1000) == 10  # seen by nobody: as much as there is room


def test_partitions_forget_a_dense_start():
  """What was picked in a dense phase is everything; it says nothing about the largest entries."""
  n, size = 4, 20_000

  def schedule(step):
    return jnp.where(step < 5, 0.5, 0.01)

  workers = w.run_on(exdyna(schedule, w.AXIS), n, jnp.zeros(size), "vmap")
  state = workers.init(jnp.zeros(size))
  rng = np.random.default_rng(0)
  scale = np.where(np.arange(size) < size // 10, 10.0, 1.0)  # the first tenth has most of them
  padding = []
  for _ in range(20):
    grads = (rng.standard_normal((n, size)) * scale).astype(np.float32)
    _, state = workers.step(state, grads)
    padding.append(float(w.stats_of(workers, state).padding_ratio))
  assert padding[5] > 2 and np.mean(padding[12:]) < 1.5


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("capacity_factor", [1.25, None])
def test_invariants_under_a_schedule(rules, capacity_factor):
  n, params = 4, TREES["larger"]
  workers = compiled("larger", n, "vmap", warm_up, capacity_factor, rules)
  rng = np.random.default_rng(0)
  grads = [random_grads(rng, n, params, 1.0) for _ in range(16)]
  follow(
    workers, params, grads, density=lambda t: float(np.float32(warm_up(int(t)))),
    capacity_factor=capacity_factor, rules=rules,
  )  # fmt: skip


def test_threshold_and_bytes_follow_the_schedule():
  """On target in every step of the warm-up, and the traffic falls with the density."""
  n, size = 4, 20_000
  workers = w.run_on(exdyna(warm_up, w.AXIS), n, jnp.zeros(size), "vmap")
  state = workers.init(jnp.zeros(size))
  rng = np.random.default_rng(0)
  sent_bytes, errors = [], []
  for step in range(20):
    _, state = workers.step(state, random_grads(rng, n, jnp.zeros(size), 1.0))
    stats = w.stats_of(workers, state)
    errors.append(abs(stats.counts.sum() / (float(warm_up(step)) * size) - 1))
    assert stats.density <= 1.26 * float(warm_up(step))
    sent_bytes.append(float(stats.bytes_sent))
  # The first residuals change the distribution faster than any later ones.
  assert errors[0] < 0.02 and max(errors[:5]) < 0.5 and np.mean(errors[5:]) < 0.1
  # What was asked for, with its capacity, in messages of which at most a part stays empty.
  for step in (0, 6, 12, 19):
    slots = 1.25 * float(warm_up(step)) * size / n
    least = (n - 1) * 4 * slots + 2 * (n - 1) * 4 * slots
    assert 0.7 * least < sent_bytes[step] < 1.6 * least + 200


def test_schedule_under_shard_map_and_scan():
  """The rung of a message comes from agreed state, so that all devices take the same branch."""
  n, params = 8, TREES["larger"]
  workers = compiled("larger", n, "shard_map", warm_up, 1.25, DEFAULT)
  emulated = compiled("larger", n, "vmap", warm_up, 1.25, DEFAULT)
  state, other = workers.init(params), emulated.init(params)
  rng = np.random.default_rng(0)
  for _ in range(14):
    grads = random_grads(rng, n, params, 1.0)
    updates, state = workers.step(state, grads)
    other_updates, other = emulated.step(other, grads)
    w.agreed(workers, updates, state)
  np.testing.assert_array_equal(w.residuals(workers, state), w.residuals(emulated, other))
  assert get_stats(state).selected == get_stats(other).selected[0]


@pytest.mark.parametrize("rules", RULES)
def test_schedule_that_starts_with_everything(rules):
  """Dense at first: nothing stays behind, and the threshold is there when it is needed."""

  def schedule(step):
    return jnp.where(step < 2, 1.0, 0.05)

  n, params = 4, TREES["larger"]
  workers = compiled("larger", n, "vmap", schedule, 1.25, rules)
  state = workers.init(params)
  rng = np.random.default_rng(0)
  for step in range(4):
    _, state = workers.step(state, random_grads(rng, n, params, 1.0))
    stats = w.stats_of(workers, state)
    assert (stats.density == 1) == (step < 2) and np.isfinite(stats.threshold_used)
    assert bool(np.any(state.residual)) == (step >= 2)
    if rules != PAPER and step == 2:
      assert abs(stats.counts.sum() / (0.05 * 3501) - 1) < 0.05


@pytest.mark.parametrize("threshold", ["secant", "in_step", "paper"])
def test_density_one_sends_everything_whatever_was_before(threshold):
  """A sparse run's threshold stayed in force, and a dense one's zero was where "paper" started."""
  n, size = 4, 1000
  sparse, everything = (
    w.run_on(exdyna(d, w.AXIS, threshold=threshold), n, jnp.zeros(size), "vmap") for d in (0.05, 1)
  )
  rng, state, sent = np.random.default_rng(0), sparse.init(jnp.zeros(size)), []
  for run in (sparse, sparse, everything, everything, sparse):
    _, state = run.step(state, random_grads(rng, n, jnp.zeros(size), 1.0))
    sent.append(int(w.stats_of(run, state).selected))
  assert sent[2:4] == [size, size] and sent[4] < size / 4
  assert float(everything.init(jnp.zeros(size)).threshold[0]) > 0


def test_factory_inside_jit():
  def make_and_init(params):
    return exdyna(warm_up, w.AXIS, num_workers=2).init(params)

  assert jax.jit(make_and_init)(jnp.zeros(100)).threshold > 0
