"""Training with flax: linen's TrainState, and nnx in the two ways that it maps a step."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna, get_stats, local_params, reshard_state, state_specs

WORKERS, STEPS, INPUTS = 4, 30, 8
MESH = w.mesh_of(WORKERS)
RECIPES = pathlib.Path(__file__).parent.parent / "docs" / "recipes" / "libraries.md"
X = np.random.default_rng(0).standard_normal((64, INPUTS)).astype(np.float32)
Y = X @ np.random.default_rng(1).standard_normal((INPUTS, 3)).astype(np.float32)


def transform(n=WORKERS):
  return optax.chain(exdyna(0.2, w.AXIS, num_workers=n), optax.sgd(0.05, momentum=0.5))


def check(losses, params, residual, stats):
  """The loss fell, all devices hold the same bits, and the residual is each worker's own."""
  assert losses[-1] < 0.5 * losses[0]
  for leaf in jax.tree.leaves(params):
    shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
    assert len(shards) == WORKERS and all((shard == shards[0]).all() for shard in shards)
  assert residual.sharding.spec == P(w.AXIS) and np.any(residual)
  assert stats.counts.shape == (WORKERS,) and 0 < stats.density < 1


def test_linen_train_state():
  model = linen.Dense(3)
  state = TrainState.create(
    apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=transform()
  )
  specs = state_specs(state, w.AXIS)
  state = jax.device_put(state, w.shardings(MESH, specs))

  def train_step(state, x, y):
    def loss(params):
      return jnp.mean((state.apply_fn(params, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(local_params(state.params, w.AXIS))
    return state.apply_gradients(grads=grads), jax.lax.pmean(value, w.AXIS), get_stats(state)

  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=MESH,
      in_specs=(specs, P(w.AXIS), P(w.AXIS)),
      out_specs=(specs, P(), P()),
    )
  )
  losses = []
  for _ in range(STEPS):
    state, loss, _ = step(state, X, Y)
    losses.append(float(loss))
  check(losses, state.params, state.opt_state[0].residual, get_stats(state))


class Model(nnx.Module):
  """One of its parameters has the name of a field of our state."""

  def __init__(self):
    self.linear = nnx.Linear(INPUTS, 3, rngs=nnx.Rngs(0))
    self.residual = nnx.Param(jnp.zeros(3))

  def __call__(self, x):
    return self.linear(x) + self.residual[...]


def make_nnx(n=WORKERS):
  model = Model()
  return model, nnx.Optimizer(model, transform(n), wrt=nnx.Param)


def nnx_step(model, optimizer, x, y):
  """What one worker does; it changes its arguments, as is usual in nnx."""
  graph, params = nnx.split(model)
  local = nnx.merge(graph, local_params(params, w.AXIS))
  loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(local)
  optimizer.update(model, grads)
  return jax.lax.pmean(loss, w.AXIS)


def test_nnx_under_its_own_shard_map():
  model, optimizer = make_nnx()
  state = nnx.state((model, optimizer))
  places = w.shardings(MESH, state_specs(state, w.AXIS))
  nnx.update((model, optimizer), jax.device_put(state, places))
  everywhere = nnx.StateSharding({...: P()})
  of_optimizer = nnx.StateSharding(
    {lambda path, value: path == ("opt_state", 0, "residual"): P(w.AXIS), ...: P()}
  )
  step = nnx.jit(
    nnx.shard_map(
      nnx_step,
      mesh=MESH,
      in_specs=(everywhere, of_optimizer, P(w.AXIS), P(w.AXIS)),
      out_specs=P(),
    )
  )
  losses = [float(step(model, optimizer, X, Y)) for _ in range(STEPS)]
  residual = optimizer.opt_state[0].residual[...]
  check(losses, nnx.state(model), residual, get_stats(optimizer))


def train_split(pair, mesh, steps):
  """The pure form: nnx replaces our NamedTuple by mappings, and the specs are the same."""
  graph, state = nnx.split(pair)
  specs = state_specs(state, w.AXIS)
  state = jax.device_put(state, w.shardings(mesh, specs))

  def train_step(state, x, y):
    model, optimizer = nnx.merge(graph, state)
    loss = nnx_step(model, optimizer, x, y)
    return nnx.state((model, optimizer)), loss

  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(specs, P(w.AXIS), P(w.AXIS)),
      out_specs=(specs, P()),
    )
  )
  losses = []
  for _ in range(steps):
    state, loss = step(state, X, Y)
    losses.append(float(loss))
  return state, losses


def test_nnx_split_under_shard_map():
  state, losses = train_split(make_nnx(), MESH, STEPS)
  residual = state[1]["opt_state"][0]["residual"][...]
  check(losses, state[0], residual, get_stats(state))


@pytest.mark.parametrize("form", ["opt_state", "state"])
def test_nnx_goes_on_with_fewer_workers(form):
  """Resharding put bare arrays in the place of variables, and the next nnx.split failed."""
  pair = make_nnx(8)
  state, losses = train_split(pair, w.mesh_of(8), STEPS // 2)
  nnx.update(pair, state)
  model, optimizer = pair[0], nnx.Optimizer(pair[0], transform(4), wrt=nnx.Param)
  if form == "opt_state":
    optimizer.opt_state = reshard_state(pair[1].opt_state, 4)
  else:
    nnx.update(optimizer, reshard_state(nnx.state(pair[1]), 4))
  assert np.any(optimizer.opt_state[0].residual[...])
  state, more = train_split((model, optimizer), MESH, STEPS)
  assert more[0] < losses[0]
  check(losses + more, state[0], state[1]["opt_state"][0]["residual"][...], get_stats(state))


@pytest.mark.parametrize(
  "form",
  [
    lambda model, optimizer: (model, optimizer),
    lambda model, optimizer: nnx.state((model, optimizer)),
    lambda model, optimizer: nnx.to_pure_dict(nnx.state((model, optimizer))),
  ],
  ids=["objects", "state", "dict"],
)
def test_specs_of_nnx_shard_our_residual_alone(form):
  """Neither the parameter of that name, nor its momentum."""
  tree = form(*make_nnx())
  specs = state_specs(tree, w.AXIS)
  assert jax.tree.structure(specs) == jax.tree.structure(tree)
  sharded = [
    jax.tree.leaves(leaf)[0]
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(tree), strict=True)
    if spec == P(w.AXIS)
  ]
  assert [leaf.shape for leaf in sharded] == [(WORKERS * (INPUTS * 3 + 3 + 3),)]
  assert get_stats(tree).counts.shape == (WORKERS,)


def test_specs_of_the_nnx_state_of_the_sparsifier_alone():
  _, optimizer = make_nnx()
  ours = nnx.state(optimizer)["opt_state"][0]
  specs = state_specs(ours, w.AXIS)
  assert jax.tree.leaves(specs["residual"]) == [P(w.AXIS)]
  assert jax.tree.leaves(specs["boundaries"]) == [P()]


class Noisy(linen.Module):
  @linen.compact
  def __call__(self, x):
    x = linen.BatchNorm(use_running_average=False)(linen.Dense(3)(x))
    return linen.Dropout(0.5, deterministic=False)(x)


def test_statistics_of_the_batch_are_the_same_everywhere_and_dropout_is_not():
  """Traced as the recipe has it: types say whether results that go out as P() are the same."""
  blocks = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
  (block,) = [block for block in blocks if "fold_in" in block]
  model, key = Noisy(), jax.random.key(0)
  tx = transform()
  names = {**globals(), "model": model, "tx": tx}
  exec(compile(block, str(RECIPES), "exec"), names)
  variables = model.init({"params": key, "dropout": key}, X)
  state = tx.init(variables["params"])
  specs = state_specs(state, w.AXIS)
  mapped = jax.shard_map(
    names["train_step"],
    mesh=MESH,
    in_specs=(P(), P(), specs, P(w.AXIS), P(w.AXIS), P()),
    out_specs=(P(), P(), specs),
  )
  out = jax.eval_shape(mapped, variables["params"], variables["batch_stats"], state, X, Y, key)
  assert jax.tree.structure(out[1]) == jax.tree.structure(variables["batch_stats"])


def test_nnx_keeps_the_statistics_of_the_batch():
  model = nnx.BatchNorm(INPUTS, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, transform(), wrt=nnx.Param)
  blocks = re.findall(r"```python\n(.*?)```", RECIPES.read_text(), re.DOTALL)
  (block,) = [block for block in blocks if "nnx.BatchStat" in block]
  names = {**globals(), "loss_fn": lambda model, x, y: jnp.mean(model(x) ** 2)}
  exec(compile(block, str(RECIPES), "exec"), names)
  graph, state = nnx.split((model, optimizer))
  specs = state_specs(state, w.AXIS)

  def step(state, x, y):
    pair = nnx.merge(graph, state)
    names["train_step"](*pair, x, y)
    return nnx.state(pair)

  mapped = jax.shard_map(step, mesh=MESH, in_specs=(specs, P(w.AXIS), P(w.AXIS)), out_specs=specs)
  new = jax.jit(mapped)(state, X + 1, Y)
  assert jnp.all(new[0]["mean"][...] > 0)
