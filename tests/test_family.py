"""What each relative of ExDyna picks, against NumPy; its options; its bytes."""

import re

import family_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from family import DENSITY, FAMILY, PARAMS, SIZE, compiled, early, gradients, take_step

from exdyna_jax import deft, get_stats, hard_threshold, random_k, sage, sidco, top_k

N_WORKERS, STEPS = 4, 8
K = int(DENSITY * SIZE)
LAYERS = [x.size for x in jax.tree.leaves(PARAMS)]


def run(name, picks_of, scale=1.0, **options):
  """Steps beside an oracle: `picks_of(t, acc, state before, state after)`."""
  workers = compiled(name, N_WORKERS, "vmap", **options)
  state = workers.init(PARAMS)
  for t in range(STEPS):
    before = w.copies(workers, state)[0]
    acc, sent, state = take_step(name, workers, state, gradients(t, N_WORKERS, scale))
    after = w.copies(workers, state)[0]
    picks = picks_of(t, acc, before, after)
    np.testing.assert_array_equal(after.stats.counts, [len(x) for x in picks])
    np.testing.assert_array_equal(np.flatnonzero(sent), np.unique(np.concatenate(picks)))
  return after


@pytest.mark.parametrize("threshold", ["secant", "in_step"])
def test_micro(threshold):
  def picks(t, acc, before, after):
    np.testing.assert_array_equal(before.boundaries, [0, 128, 256, 384, 512])
    return oracle.micro(t, acc, after.stats.threshold_used)

  after = run("micro", picks, threshold=threshold, capacity_factor=None)
  assert 0.5 * K < after.stats.selected < 2 * K


def test_deft():
  run("deft", lambda t, acc, *_: oracle.deft(t, acc, K, LAYERS), capacity_factor=None)


def test_top_k():
  run("top_k", lambda t, acc, *_: oracle.top_k(t, acc, K))


def test_clt_k():
  run("clt_k", lambda t, acc, *_: oracle.clt_k(t, acc, K))


def test_hard_threshold():
  threshold = 1 / (2 * np.sqrt(K))

  def picks(t, acc, before, after):
    assert before.threshold == after.stats.threshold_used == np.float32(threshold)
    return oracle.hard_threshold(t, acc, threshold)

  run("hard_threshold", picks, scale=0.1, capacity_factor=None)


def test_sage():
  def picks(t, acc, before, after):
    thresholds, means = (known.values for known in after.memory)
    before = before.memory
    magnitudes = np.abs(acc)
    # 224 elements of each worker are sampled.
    error = magnitudes.std(axis=1) / np.sqrt(SIZE / (1 + oracle.SAGE_RATE * SIZE))
    assert (np.abs(means - magnitudes.mean(axis=1)) < 5 * error).all() and len(set(means)) > 1
    if t:
      rows = zip(acc, before.thresholds.values, means, before.means.values, strict=True)
      expected = [oracle.sage_threshold(*row, K / SIZE) for row in rows]
    else:
      expected = np.full(N_WORKERS, 1 / (2 * np.sqrt(K)))
    np.testing.assert_allclose(thresholds, expected, rtol=1e-5)
    np.testing.assert_allclose(after.stats.threshold_used, np.mean(thresholds), rtol=1e-6)
    assert after.threshold == after.stats.threshold_used
    return [np.flatnonzero(np.abs(row) >= x) for row, x in zip(acc, thresholds, strict=True)]

  run("sage", picks, capacity_factor=None)


def test_sage_finds_its_density_from_far_away():
  workers = compiled("sage", N_WORKERS, "vmap", capacity_factor=None)
  for scale in (1e-3, 1e3):
    state = workers.init(PARAMS)
    for t in range(400):
      _, state = workers.step(state, gradients(t % 8, N_WORKERS, scale))
    counts = w.stats_of(workers, state).counts
    assert (counts > 0.1 * K).all() and (counts < 10 * K).all()


def test_sage_forgets_a_sample_of_nan():
  workers = compiled("sage", N_WORKERS, "vmap", nonfinite="propagate")
  state = workers.init(PARAMS)
  _, state = workers.step(state, gradients(0, N_WORKERS))
  _, after = workers.step(state, gradients(1, N_WORKERS, np.nan))
  np.testing.assert_array_equal(after.memory.means.values, state.memory.means.values)
  assert np.isfinite(after.memory.thresholds.values).all() and np.isfinite(after.threshold).all()


@pytest.mark.parametrize("fit", ["exponential", "generalized_pareto"])
@pytest.mark.parametrize("stages", [1, 3, "adaptive"])
def test_sidco(fit, stages):
  def picks(t, acc, before, after):
    used = before.memory.stages
    assert used == (stages if stages != "adaptive" else used)
    thresholds = [oracle.sidco_threshold(row, K / SIZE, used, fit) for row in acc]
    np.testing.assert_allclose(after.stats.threshold_used, np.mean(thresholds), rtol=1e-4)
    return [np.flatnonzero(np.abs(row) > x) for row, x in zip(acc, thresholds, strict=True)]

  run("sidco", picks, fit=fit, stages=stages, capacity_factor=None)


def test_sidco_adapts_its_stages():
  """Uniform magnitudes have no tail: one exponential stage asks for more than there is."""
  workers = compiled("sidco", N_WORKERS, "vmap", capacity_factor=None)
  state, seen = workers.init(PARAMS), []
  rng = np.random.default_rng(0)
  for _ in range(30):
    values = {
      k: rng.uniform(-1, 1, (N_WORKERS, *x.shape)) for k, x in PARAMS.items() if x is not None
    }
    grads = {k: jnp.asarray(values[k], PARAMS[k].dtype) for k in values} | {"o": None}
    _, state = workers.step(state, grads)
    seen.append(int(state.memory.stages[0]))
    # The residual would give the gradients a tail.
    state = state._replace(residual=jnp.zeros_like(state.residual))
  changes = np.flatnonzero(np.diff([1, *seen])) + 1
  assert changes[0] == 5 and (changes % 5 == 0).all()
  assert max(seen) > 1 and set(np.abs(np.diff(seen))) <= {0, 1}


def test_sidco_counts_the_steps_that_say_something():
  """Steps in which all is zero neither end the window of five steps nor are in its mean."""
  n, size = 2, 64
  tx = sidco(0.5, w.AXIS, num_workers=n, capacity_factor=None)
  step = jax.jit(jax.vmap(tx.update, axis_name=w.AXIS))
  # Equal magnitudes: one exponential stage asks for less than their mean, hence for all of them.
  grads, zeros = jnp.ones((n, size)), jnp.zeros((n, size))
  state = jax.vmap(tx.init, axis_name=w.AXIS)(grads)
  said = 0
  for something in [True, False, True, False, True, True, False, True, True]:
    _, state = step(grads if something else zeros, state)
    said += something
    np.testing.assert_array_equal(state.memory.steps, said % 5)
    np.testing.assert_allclose(state.memory.achieved, 2.0 * (said % 5))


def test_random_k_is_fair_and_follows_its_seed():
  steps, size = 300, 10
  drawn = {}
  for seed in (0, 0, 1):
    tx = random_k(0.6, w.AXIS, num_workers=1, seed=seed)

    def draw(_, tx=tx):
      def step(state, _):
        updates, state = tx.update(jnp.ones(size), state)
        return state, updates != 0

      return jax.lax.scan(step, tx.init(jnp.ones(size)), None, steps)[1]

    sent = np.asarray(jax.vmap(draw, axis_name=w.AXIS)(jnp.arange(1)))[0]
    assert (sent.sum(axis=1) == 6).all()
    # Each is drawn in 180 of 300 steps, give or take 8.
    assert (np.abs(sent.sum(axis=0) - 0.6 * steps) < 4 * np.sqrt(0.6 * 0.4 * steps)).all()
    np.testing.assert_array_equal(drawn.setdefault(seed, sent), sent)
  assert (drawn[0] != drawn[1]).any()


@pytest.mark.parametrize("name", sorted(set(FAMILY) - {"exdyna"}))
def test_bytes_of_a_step_are_those_of_its_collectives(name):
  """The ring cost of every collective of the compiled step, against what the statistics say."""
  n, params = N_WORKERS, {"a": jnp.zeros(300), "b": jnp.zeros(700)}
  tx = FAMILY[name](0.05, w.AXIS, num_workers=n)
  step, specs = w.sharded_step(tx, w.mesh_of(n), params)
  state = jax.jit(tx.init, out_shardings=w.shardings(w.mesh_of(n), specs))(params)
  grads = jax.tree.map(lambda x: jnp.ones((n, *x.shape)) * jnp.arange(1.0, 1 + x.size), params)
  text = step.lower(state, grads).compile().as_text()
  cost = {"all-gather": (n - 1) / n * 4, "all-reduce": 2 * (n - 1) / n * 4}
  total = 0.0
  for shapes, kind in w.collectives(text[text.index("ENTRY") :]):
    # Sums of several leaves become one collective of several operands.
    total += cost[kind] * sum(int(x) for x in re.findall(r"[sf]32\[(\d+)\]", shapes))
  _, state = step(state, grads)
  assert float(get_stats(state).bytes_sent) == pytest.approx(total)


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_a_threshold_alone_sends_all_that_reaches_it(how):
  n, size = 2, 5000
  tx = hard_threshold(None, w.AXIS, num_workers=n, threshold=0.5)
  workers = w.run_on(tx, n, jnp.zeros(size), how)
  values = np.random.default_rng(0).uniform(-1, 1, (n, size)).astype(np.float32)
  updates, state = workers.step(workers.init(jnp.zeros(size)), jnp.asarray(values))
  update, got = w.agreed(workers, updates, state)
  reached = (np.abs(values) >= 0.5).any(axis=0)
  np.testing.assert_allclose(update, np.where(reached, values.mean(axis=0), 0), atol=1e-7)
  assert got.stats.overflow == 0 and got.stats.selected == reached.sum()
  assert got.stats.threshold_used == 0.5


def test_a_scheduled_hard_threshold():
  workers = compiled("hard_threshold", N_WORKERS, "vmap", early, capacity_factor=None)
  state = workers.init(PARAMS)
  for t in range(4):
    _, state = workers.step(state, gradients(t, N_WORKERS))
    expected = 1 / (2 * np.sqrt(int(early(t) * SIZE)))
    np.testing.assert_allclose(w.stats_of(workers, state).threshold_used, expected, rtol=1e-6)


@pytest.mark.parametrize(
  "make, options, error, message",
  [
    (hard_threshold, {"density": None}, ValueError, "a density or a threshold, got None for both"),
    (hard_threshold, {"threshold": -1.0}, ValueError, "threshold must be positive.*got -1.0"),
    (hard_threshold, {"threshold": 10**400}, ValueError, "threshold must be positive and finite"),
    (
      hard_threshold,
      {"density": None, "threshold": 1.0, "capacity_factor": 2.0},
      ValueError,
      "capacity_factor=2.0 needs a density, got None.*leave capacity_factor out",
    ),
    (
      hard_threshold,
      {"density": None, "threshold": 1.0, "capacity_factor": "much"},
      TypeError,
      "capacity_factor must be a Python number.*got 'much'",
    ),
    (sage, {"seed": 2**32}, ValueError, "seed must be at most 4294967295, got 4294967296"),
    (sage, {"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
    (random_k, {"seed": -(2**31) - 1}, ValueError, "seed must be at least -2147483648"),
    (random_k, {"seed": "a"}, TypeError, "seed must be an integer, got 'a'"),
    (sidco, {"fit": "gamma"}, ValueError, "fit must be one of 'exponential', .*got 'gamma'"),
    (sidco, {"stages": 2**31}, ValueError, "stages must be at most 2147483647, got 2147483648"),
    (sidco, {"stages": 0}, ValueError, "stages must be at least 1, got 0"),
    (sidco, {"stages": "many"}, TypeError, "stages must be an integer, got 'many'"),
  ],
)
def test_arguments(make, options, error, message):
  with pytest.raises(error, match=message):
    make(**{"density": 0.1, "axis_name": w.AXIS, **options})


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_deft_sends_what_only_one_worker_has(density):
  """Whoever listed a scalar leaf saw a zero of its own, in every step, and never sent it."""
  n, steps = 4, 12
  shapes = {"a": (8,), "s": (), "t": ()}
  grads = {name: jnp.zeros((n, *shape)).at[0].set(1.0) for name, shape in shapes.items()}
  tx = deft(density, "data", num_workers=n)
  state = jax.vmap(tx.init, axis_name="data")(grads)
  step = jax.jit(jax.vmap(tx.update, axis_name="data"))
  for _ in range(steps):
    _, state = step(grads, state)
  most = 0 if density == 1 else n  # no scalar waits for longer than a round of the workers
  assert float(state.residual[:, 8:].max()) <= most
  assert density < 1 or int(state.stats.selected[0]) == 10


@pytest.mark.parametrize("make", [sage, hard_threshold])
def test_the_state_of_another_algorithm_is_refused(make):
  state = top_k(0.1, "data", num_workers=1).init(jnp.zeros(40))
  tx = make(0.1, "data", num_workers=1)
  one = jax.tree.map(lambda x: x[None], state)
  with pytest.raises(ValueError, match="another algorithm.*init"):
    jax.vmap(tx.update, axis_name="data")(jnp.zeros((1, 40)), one)
