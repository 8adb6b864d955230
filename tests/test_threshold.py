"""Threshold rules: the paper's against the reference, the others against what they promise."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import workers as w
from following import random_grads
from hypothesis import given, settings
from hypothesis import strategies as st

from exdyna_jax import exdyna, get_stats
from exdyna_jax import threshold as rules


@pytest.mark.parametrize("k", [1, 10, 655, 2000, 10**6])
def test_bands_are_exact(k):
  """Around both edges of the band; 1.1 k and 0.909 k belong to the lower side."""
  with jax.enable_x64(True):
    scaled = jax.jit(rules.paper_scaled, static_argnums=2)
    start = rules.as_threshold(rules.paper_initial(k))
    assert start.dtype == jnp.float64 and start == oracle.initial_threshold(k)
    edges = [int(edge * k) for edge in (oracle.RATIO_LOW, oracle.RATIO_HIGH)]
    for selected in {max(edge + shift, 0) for edge in [*edges, 0, k] for shift in (-1, 0, 1)}:
      want = oracle.paper_threshold(float(start), selected, k)
      assert float(scaled(start, jnp.int32(selected), k)) == want, (selected, k)


def test_stays_a_positive_normal_number():
  limits = jnp.finfo(jnp.float32)
  low = rules.paper_scaled(jnp.float32(limits.tiny), jnp.int32(0), 10)
  high = rules.paper_scaled(jnp.float32(limits.max), jnp.int32(100), 10)
  assert low == limits.tiny and high == limits.max
  assert rules.as_threshold(0.5).dtype == np.float32


@jax.jit
def search(values, k):
  def total(levels):
    return jnp.sum(values[None] >= levels[:, None], axis=1, dtype=jnp.int32)

  return rules.search(total, k)


@settings(max_examples=60)
@given(
  size=st.sampled_from([1, 50, 4000]),
  share=st.floats(0.001, 1),
  fill=st.sampled_from(
    ["normal", "heavy", "equal", "two", "huge", "largest", "tiny", "one", "zero"]
  ),
  seed=st.integers(0, 2**32 - 1),
)
def test_search_finds_the_threshold_of_any_distribution(size, share, fill, seed):
  rng = np.random.default_rng(seed)
  values = np.abs(rng.standard_normal(size)).astype(np.float32)
  values = {
    "normal": values,
    "heavy": values**5,
    "equal": np.full(size, 0.3, np.float32),
    "two": np.where(values > 1, np.float32(7), np.float32(2)),
    "huge": values * np.float32(1e30),
    "largest": np.full(size, rules.HIGHEST, np.float32),
    "tiny": values * np.float32(1e-30),
    "one": np.where(np.arange(size) == size // 2, values, 0),
    "zero": np.zeros(size, np.float32),
  }[fill]
  k = max(1, int(share * size))

  def total(levels):
    return jnp.sum(values[None] >= levels[:, None], axis=1, dtype=jnp.int32)

  found = np.float32(rules.search(total, k))
  assert found >= rules.LOWEST and np.isfinite(found)
  reached = np.sum(values >= found)
  if np.sum(values >= rules.LOWEST) < k:
    assert reached == np.sum(values >= rules.LOWEST)
  else:
    # At least k, and the last bits of the mantissa later less than k.
    assert reached >= k > np.sum(values >= np.float64(found) * (1 + 2.0**-11))


def test_interpolation_follows_a_power_law_exactly():
  counts = jnp.asarray(1e6 * rules.LADDER**-3.0, jnp.int32)
  for multiple in (0.75, 1.0, 1.3):
    log, on_ladder = rules.interpolate(counts, int(1e6 * multiple**-3.0))
    assert on_ladder and abs(np.exp(log) - multiple) < 1e-3
  for k in (int(1e6 * 0.6**-3.0), int(1e6 * 1.5**-3.0)):
    assert not rules.interpolate(counts, k)[1]


@pytest.mark.parametrize("counts", [[9] * 8, [0] * 8, [50] * 3 + [0] * 5, [5, 5, 5, 5, 1, 1, 0, 0]])
def test_interpolation_of_steps_and_flats_is_finite(counts):
  for k in (1, 5, 9, 50):
    log, _ = rules.interpolate(jnp.array(counts, jnp.int32), k)
    assert np.log(rules.LADDER[0]) <= log <= np.log(rules.LADDER[-1]) + 1e-6


N, WORKERS, DENSITY = 4000, 4, 0.05
K = int(DENSITY * N)


@pytest.fixture(scope="module", params=["secant", "in_step"])
def workers(request):
  return w.run_on(exdyna(DENSITY, w.AXIS, threshold=request.param), WORKERS, jnp.zeros(N), "vmap")


def run(workers, state, all_grads):
  """The last state, and in each step the ratio of what qualified to what was wanted.

  Checks thresholds and agreement on the way.
  """
  ratios = []
  for grads in all_grads:
    updates, state = workers.step(state, jnp.asarray(grads, jnp.float32))
    _, got = w.agreed(workers, updates, state)
    for threshold in (got.threshold, got.stats.threshold_used):
      assert np.isfinite(threshold) and threshold > 0
    ratios.append(got.stats.counts.sum() / K)
    assert got.stats.selected <= 1.25 * K + WORKERS
  return state, np.array(ratios)


def normal(rng, scale=1.0):
  return random_grads(rng, WORKERS, jnp.zeros(N), scale)


@pytest.mark.parametrize("scale", [1e-30, 1e-2, 1.0, 1e2, 1e30])
def test_first_step_is_on_target(workers, scale):
  rng = np.random.default_rng(0)
  _, ratios = run(workers, workers.init(jnp.zeros(N)), [normal(rng, scale)])
  assert abs(ratios[0] - 1) < 0.02


def test_two_hundred_steps_agree_and_stay_on_target(workers):
  rng = np.random.default_rng(0)
  _, ratios = run(workers, workers.init(jnp.zeros(N)), [normal(rng) for _ in range(200)])
  assert abs(ratios[20:].mean() - 1) < 0.03 and np.abs(ratios[20:] - 1).mean() < 0.1


DEGENERATE = {
  "zero": lambda rng: np.zeros((WORKERS, N)),
  "constant": lambda rng: np.full((WORKERS, N), 0.3),
  "one_hot": lambda rng: np.eye(1, N, 17).repeat(WORKERS, axis=0),
  "huge": lambda rng: np.asarray(normal(rng, 1e30)),
  "tiny": lambda rng: np.asarray(normal(rng, 1e-30)),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("before", [0, 5])
def test_recovers_from_degenerate_gradients(workers, kind, before):
  """Whatever came, within ten normal steps the density is back."""
  rng = np.random.default_rng(1)
  state, _ = run(workers, workers.init(jnp.zeros(N)), [normal(rng) for _ in range(before)])
  state, ratios = run(workers, state, [DEGENERATE[kind](rng) for _ in range(5)])
  assert kind != "zero" or before or not ratios.any()  # nothing to send: nothing is sent
  # Residuals of huge gradients outlast any normal ones: follow at their own scale.
  scale = 1e30 if kind == "huge" else 1.0
  _, ratios = run(workers, state, [normal(rng, scale) for _ in range(10)])
  assert abs(ratios[-1] - 1) < 0.25  # 200 are wanted, so that 0.07 is one standard deviation


def test_zero_gradients_change_no_state(workers):
  """Nothing is sent, and load, threshold and boundaries stay what they were."""
  rng = np.random.default_rng(2)
  state, _ = run(workers, workers.init(jnp.zeros(N)), [normal(rng)])
  cleared = state._replace(residual=jnp.zeros_like(state.residual))
  after, _ = run(workers, cleared, [np.zeros((WORKERS, N))])
  assert get_stats(after).selected[0] == 0 and not np.any(after.residual)
  np.testing.assert_array_equal(after.boundaries, state.boundaries)
  np.testing.assert_array_equal(after.memory.loads, state.memory.loads)


def test_equal_elements_below_the_threshold_have_their_turn(workers):
  """A few large entries in each step, and below them a crowd of equal ones, left from the first.

  Interpolation puts the threshold between the two, where half of what is wanted qualifies for ever.
  """
  large = np.where(np.arange(N) % (2 * N // K) == 0, 10.0, 0.0) * np.ones((WORKERS, 1))
  crowd = np.where(large > 0, 10.0, 1.0)
  state = workers.init(jnp.zeros(N))
  state, _ = run(workers, state, [crowd] + [large] * 60)
  assert np.mean(np.asarray(state.residual) == 1.0) < 0.5


def test_fewer_entries_than_wanted_are_all_sent_without_searching_for_more(workers):
  few = np.where(np.arange(N) < K // 4, 1.0, 0.0) * np.ones((WORKERS, 1))
  state, ratios = run(workers, workers.init(jnp.zeros(N)), [few] * 6)
  np.testing.assert_array_equal(ratios, 0.25)
  assert not np.any(state.memory.threshold_rule.lost)


def test_given_first_threshold_is_used():
  for threshold in rules.RULES:
    tx = exdyna(DENSITY, w.AXIS, threshold=threshold, initial_threshold=2.0)
    one = w.run_on(tx, WORKERS, jnp.zeros(N), "vmap")
    state = one.init(jnp.zeros(N))
    assert np.all(state.threshold == 2)
    if threshold != "in_step":  # which corrects it in the same step
      _, state = one.step(state, normal(np.random.default_rng(0)))
      assert np.all(get_stats(state).threshold_used == 2)


@pytest.mark.parametrize("factor", [0.95, 1.3])
def test_follows_gradients_that_fall_or_grow(factor):
  """Drained residuals made searches and near-empty steps take turns: a quarter was never sent."""
  one = w.run_on(exdyna(DENSITY, w.AXIS), WORKERS, jnp.zeros(N), "vmap")
  state, rng, counts = one.init(jnp.zeros(N)), np.random.default_rng(0), []
  for step in range(100):
    _, state = one.step(state, normal(rng) * np.float32(factor**step))
    counts.append(int(w.stats_of(one, state).counts.sum()))
  ratios = np.array(counts[40:]) / (DENSITY * N)
  assert 0.9 < ratios.mean() < 1.1 and np.mean(np.abs(ratios - 1) < 0.5) > 0.9


def test_given_thresholds_stay_what_float32_can_hold():
  """Zero would mean that everything qualifies, and infinity that nothing does."""
  assert rules.as_threshold(1e-60) == rules.LOWEST
  assert rules.as_threshold(1e60) == rules.HIGHEST
  assert rules.as_threshold(0.0) == 0


def test_a_kink_at_the_threshold_does_not_mislead():
  """What has been sent is gone from above the threshold: counts are steep below, flat above it."""
  counts = jnp.asarray(1000 * np.where(rules.LADDER < 1, rules.LADDER**-20, rules.LADDER**-2))
  log, on_ladder = rules.interpolate(counts, 1000)
  assert on_ladder
  np.testing.assert_allclose(log, 0, atol=1e-6)


def test_a_sampled_ladder_agrees_with_the_exact_count():
  """The sample says how counts change with the threshold, the exact count how many there are."""
  counts = jnp.array([80, 60, 50, 42, 40, 38, 30, 20, 10])
  got = rules.anchored(counts, jnp.int32(400))
  np.testing.assert_allclose(got, np.asarray(counts) * 10.0)
  nothing = rules.anchored(jnp.zeros(9, jnp.int32), jnp.int32(400))
  assert np.isfinite(nothing).all()


def test_small_shares_are_counted_whole():
  assert rules.sample_every(2 * rules.SAMPLE - 1) == 1
  assert rules.sample_every(2 * rules.SAMPLE) == 2
  assert rules.sample_every(2**31 - 1) == rules.MOST_ROWS


def test_a_sampled_ladder_controls_as_well_as_a_whole_one(monkeypatch):
  n, size, density, steps = 2, 2**20, 0.01, 25

  def ratios():
    tx = exdyna(density, "data", num_workers=n)

    def step(state, key):
      # Layers whose scales differ: neighbouring rows are alike and distant ones are not.
      scale = jnp.repeat(2.0 ** jnp.array([0, -2, 1, -1]), size // 4)
      return tx.update(jax.random.normal(key, (size,)) * scale, state)[1]

    run = jax.jit(jax.vmap(step, axis_name="data"))
    state = jax.vmap(lambda _: tx.init(jnp.zeros(size)), axis_name="data")(jnp.arange(n))
    for keys in jax.random.split(jax.random.key(0), (steps, n)):
      state = run(state, keys)
      yield float(state.stats.counts[0].sum()) / (density * size)

  assert rules.sample_every(size // n) == 4
  sampled = np.array(list(ratios()))
  monkeypatch.setattr(rules, "SAMPLE", size)
  assert rules.sample_every(size // n) == 1
  whole = np.array(list(ratios()))
  assert 0 < np.abs(sampled / whole - 1).mean() < 0.02
