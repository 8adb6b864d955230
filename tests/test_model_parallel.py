"""Parameters that are split over a second mesh axis, and workers that are grouped by one."""

import functools

import jax
import jax.numpy as jnp
import model_parallel as example
import numpy as np
import pytest
import workers as w
from family import DENSITY, FAMILY, PARAMS, compiled, early
from family import gradients as gradients_of
from jax.sharding import PartitionSpec as P

from exdyna_jax import State, exdyna, local_params, state_specs

DATA, MODEL = 2, 4
AXES = ("data", "model")

every = pytest.mark.parametrize("name", sorted(FAMILY))


def mesh(axes=AXES):
  return w.mesh_of(DATA * MODEL, axes, (DATA, MODEL))


def parted_step(tx):
  """All parts of the model: a jitted init and a jitted step."""
  tx = example.per_part(tx)
  state = jax.eval_shape(tx.init, PARAMS)
  specs = jax.tree.map(lambda _: P("model"), state)._replace(residual=P(AXES))

  def step(state, grads):
    updates, state = tx.update(jax.tree.map(lambda g: g[0, 0], grads), state)
    return jax.tree.map(lambda u: u[None], updates), state

  init = jax.shard_map(tx.init, mesh=mesh(), in_specs=P(), out_specs=specs)
  step = jax.shard_map(step, mesh=mesh(), in_specs=(specs, P(*AXES)), out_specs=(P("model"), specs))
  return jax.jit(init), jax.jit(step)


def gradients(seed):
  """Of all workers and parts, `[2, 4, ...]`; the parts differ in scale."""
  parts = [gradients_of(MODEL * seed + part, DATA, 0.01**part) for part in range(MODEL)]
  return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *parts)


def part_of(tree, part, axis=0):
  return jax.tree.map(lambda x: np.asarray(x).take(part, axis), tree)


def assert_close(got, wanted):
  """Equal, but for how the compiler rounds in between."""
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), got, wanted)


# One of each kind; all of them are traced below.
@pytest.mark.parametrize("name", ["exdyna", "sage", "random_k"])
def test_each_part_of_the_model_is_a_sparsifier_of_its_own(name):
  """As one run for each part: one of them skips a step, and one meets gradients that have grown."""
  init, step = parted_step(FAMILY[name](DENSITY, "data", num_workers=DATA))
  alone = compiled(name, DATA, "vmap")
  state, states = init(PARAMS), [alone.init(PARAMS)] * MODEL
  for t in range(4):
    grads = gradients(t)
    if t == 1:
      grads["w"] = grads["w"].at[1, 2, 3, 3].set(np.nan)
    if t == 2:  # far from where its threshold is: this part alone searches for it
      grads["w"] = grads["w"].at[:, 1].multiply(1000)
    updates, state = step(state, grads)
    for part in range(MODEL):
      expected, states[part] = alone.step(states[part], part_of(grads, part, axis=1))
      small = state._replace(residual=()), states[part]._replace(residual=())
      assert_close(part_of((updates, small[0]), part), part_of((expected, small[1]), 0))
      residuals = np.asarray(state.residual).reshape(DATA, MODEL, -1)
      assert_close(residuals[:, part], states[part].residual)
  assert state.stats.skipped.tolist() == [0, 0, 1, 0]


def check_scan(tx, check=True):
  """Traces `init` and two steps in a loop, which the state must leave as it entered."""

  def train(grads):
    grads = jax.tree.map(lambda g: g[0, 0], grads)

    def step(state, _):
      return tx.update(grads, state)[::-1]

    updates = jax.lax.scan(step, tx.init(grads), length=2)[1]
    return jax.tree.map(lambda u: u[None], updates)

  mapped = jax.shard_map(
    train, mesh=mesh(), in_specs=P(*AXES), out_specs=P("model"), check_vma=check
  )
  assert jax.eval_shape(mapped, gradients(0))["w"].shape == (MODEL, 2, 19, 13)


@every
@pytest.mark.parametrize("density", [DENSITY, early])
def test_state_keeps_its_types_in_a_scan(name, density):
  check_scan(FAMILY[name](density, "data"))


@pytest.mark.parametrize("check", [True, False])
def test_dense_leaves_of_a_part(check):
  mask = {name: leaf is not None and leaf.ndim < 2 for name, leaf in PARAMS.items()}
  check_scan(exdyna(DENSITY, "data", dense_mask=mask, max_consecutive_skips=3), check)


@pytest.mark.parametrize("capacity_factor", [1.25, None])
@pytest.mark.parametrize("threshold", ["secant", "in_step", "paper"])
def test_all_rules_on_a_vector_that_is_read_through_a_window(threshold, capacity_factor):
  tx = exdyna(DENSITY, "data", threshold=threshold, capacity_factor=capacity_factor)
  size = 2**21

  def update(grads):
    return tx.update(grads, tx.init(grads))[0]

  mapped = jax.shard_map(update, mesh=mesh(), in_specs=P(AXES), out_specs=P("model"))
  grads = jax.ShapeDtypeStruct((DATA * MODEL * size,), jnp.float32)
  assert jax.eval_shape(mapped, grads).shape == (MODEL * size,)


def test_only_the_exchange_crosses_the_network():
  init, step = parted_step(exdyna(DENSITY, "data", num_workers=DATA, threshold="paper"))
  text = step.lower(jax.eval_shape(init, PARAMS), gradients(0)).compile().as_text()
  collectives = [line for line in text.splitlines() if "replica_groups=" in line]
  for kind in ("all-gather", "all-reduce"):
    assert sum(f" {kind}(" in line for line in collectives) == 1
  # Between the workers that hold the same part of the model.
  groups = ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "replica_groups=[4,2]<=[2,4]T(1,0)")
  assert len(collectives) == 2
  assert all(any(group in line for group in groups) for line in collectives), collectives


@pytest.mark.parametrize("dense_mask", [None, {"copied": True, "split": False}])
def test_copies_of_a_parameter_are_refused(dense_mask):
  """Each part would select by its own threshold, and the copies would drift apart."""
  tx = exdyna(DENSITY, "data", dense_mask=dense_mask)

  def step(params, x):
    def loss(params):
      return jnp.sum(params["split"] * x) + jnp.sum(params["copied"] * x)

    return tx.update(jax.grad(loss)(local_params(params, "data")), tx.init(params))[0]

  specs = {"copied": P(), "split": P("model")}
  params = {"copied": jnp.zeros(8), "split": jnp.zeros(8 * MODEL)}
  mapped = jax.shard_map(step, mesh=mesh(), in_specs=(specs, P("data")), out_specs=specs)
  message = r"gradient\['copied'\] is the same along mesh axis \['model'\].*optax.partition"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(mapped, params, jnp.zeros(8 * DATA))


@pytest.fixture(scope="module")
def trained():
  """The example's two ways to train, 20 steps each."""
  ways = (example.manual_step, example.nested_step)
  return [example.train(way, example.make_tx(0.05, DATA), mesh(), steps=20) for way in ways]


@pytest.mark.parametrize("way", [0, 1], ids=["manual", "nested"])
def test_workers_agree_after_training(trained, way):
  params, opt_state, losses = trained[way]
  assert losses[-1] < losses[0] / 2

  def without_residual(node):
    return node._replace(residual=()) if isinstance(node, State) else node

  agreed = jax.tree.map(without_residual, opt_state, is_leaf=lambda x: isinstance(x, State))
  for leaf in jax.tree.leaves((params, agreed)):
    first = {}
    for shard in leaf.addressable_shards:
      same = first.setdefault(str(shard.index), shard.data)
      np.testing.assert_array_equal(shard.data, same)


def test_both_ways_of_the_example_are_the_same(trained):
  (params, _, losses), (nested_params, _, nested_losses) = trained
  np.testing.assert_allclose(losses, nested_losses, rtol=1e-4)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), params, nested_params
  )


def test_statistics_of_all_parts(trained):
  params, opt_state, _ = trained[0]
  stats = example.split_stats(opt_state)
  assert stats.selected.shape == (MODEL,) and stats.counts.shape == (MODEL, DATA)
  total = example.total_stats(opt_state, params)
  np.testing.assert_allclose(total["density"], np.mean(stats.density), rtol=1e-6)
  assert total["bytes_sent"] == MODEL * stats.bytes_sent[0] > 0


@functools.cache
def emulated_groups(size):
  return w.run_on(exdyna(DENSITY, w.AXIS), DATA, jnp.zeros(size), "vmap")


@pytest.mark.parametrize("check", [True, False])
def test_a_dense_mean_within_each_group_of_workers(check):
  """Fast links inside of a group, slow ones between: the same as a worker for each group."""
  axes = ("dcn", "ici")
  tx = exdyna(DENSITY, "dcn", num_workers=DATA)
  specs = state_specs(jax.eval_shape(tx.init, PARAMS), "dcn")
  size = 512

  def step(params, state, x):
    grads = jax.grad(lambda p: jnp.sum(p * x[0, 0]))(local_params(params, axes))
    return tx.update(jax.lax.pmean(grads, "ici"), state)

  mapped = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh(axes),
      in_specs=(P(), specs, P(*axes)),
      out_specs=(P(), specs),
      check_vma=check,
    )
  )
  groups = emulated_groups(size)
  state, group_state = tx.init(jnp.zeros(size)), groups.init(jnp.zeros(size))
  for t in range(4):
    # Whole numbers, so that no order of summation rounds.
    x = np.random.default_rng(t).integers(-100, 100, (DATA, MODEL, size)).astype(np.float32)
    updates, state = mapped(jnp.zeros(size), state, x)
    group_updates, group_state = groups.step(group_state, x.mean(axis=1))
    np.testing.assert_array_equal(updates, group_updates[0])
    np.testing.assert_array_equal(state.residual, np.ravel(group_state.residual))
  assert state.stats.selected > 0
