"""Auto, Explicit and Manual mesh axes: what works, and what an error says where it cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from exdyna_jax import dense, exdyna, local_params, state_specs, top_k

INPUTS, OUTPUTS, BATCH = 8, 4, 32
PARAMS = {"b": jnp.zeros(OUTPUTS), "w": jnp.zeros((INPUTS, OUTPUTS))}
X = np.random.default_rng(0).standard_normal((BATCH, INPUTS)).astype(np.float32)
Y = X @ np.random.default_rng(1).standard_normal((INPUTS, OUTPUTS)).astype(np.float32)
BY_MODEL = {"b": P("model"), "w": P(None, "model")}


def mean_gradients(params, x, y):
  """The loss of this worker's batch, and its own gradients."""

  def loss(params):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

  return jax.value_and_grad(loss)(local_params(params, w.AXIS))


def descend(params, updates):
  return jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)


def make_mesh(shape, names, kinds):
  return jax.make_mesh(shape, names, kinds, devices=jax.devices()[: np.prod(shape)])


def train(tx, specs, params, state, batch, steps=3, **options):
  """A few steps under `jax.shard_map(**options)`; returns parameters, state and losses."""

  def step(params, state, x, y):
    loss, grads = mean_gradients(params, x, y)
    updates, state = tx.update(grads, state)
    return descend(params, updates), state, jax.lax.pmean(loss, w.AXIS)

  in_specs, out_specs = (P(), specs, P(w.AXIS), P(w.AXIS)), (P(), specs, P())
  step = jax.jit(jax.shard_map(step, in_specs=in_specs, out_specs=out_specs, **options))
  losses = []
  for _ in range(steps):
    params, state, loss = step(params, state, *batch)
    losses.append(float(loss))
  return params, state, losses


@functools.cache
def expected():
  """Losses on four workers of an Auto mesh, with nothing placed by hand."""
  tx = top_k(0.25, w.AXIS, num_workers=4)
  state = tx.init(PARAMS)
  specs = state_specs(state, w.AXIS)
  *_, losses = train(tx, specs, PARAMS, state, (X, Y), mesh=w.mesh_of(4))
  assert losses[-1] < losses[0]
  return losses


def test_an_explicit_mesh_takes_what_is_placed_by_its_specs():
  mesh = make_mesh((4,), (w.AXIS,), (AxisType.Explicit,))
  tx = top_k(0.25, w.AXIS, num_workers=4)
  state = tx.init(PARAMS)
  specs = state_specs(state, w.AXIS)
  batch_specs = (P(w.AXIS), P(w.AXIS))
  # A state that lies elsewhere is refused by JAX, which names the spec and the shape.
  batch = jax.device_put((X, Y), w.shardings(mesh, batch_specs))
  with pytest.raises(ValueError, match=r"in_specs.*P\('data',\) does not match.*float32\[144\]"):
    train(tx, specs, PARAMS, state, batch, mesh=mesh)
  placed = jax.device_put(state, w.shardings(mesh, specs))
  *_, losses = train(tx, specs, PARAMS, placed, batch, mesh=mesh)
  assert losses == expected()


@pytest.mark.parametrize(
  "make", [lambda: top_k(0.25, w.AXIS), lambda: dense(w.AXIS)], ids=["top_k", "dense"]
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_init_under_set_mesh_needs_nothing_else(kind, make):
  """Under an Explicit mesh, init lays the residual out itself: JAX would refuse it otherwise."""
  with jax.set_mesh(make_mesh((4,), (w.AXIS,), (kind,))):
    tx = make()
    batch = (X, Y)
    if kind == AxisType.Explicit:
      batch = jax.device_put(batch, P(w.AXIS))
    state = tx.init(PARAMS)
    *_, losses = train(tx, state_specs(state, w.AXIS), PARAMS, state, batch)
  assert losses[-1] < losses[0]


def test_the_residual_of_other_workers_than_the_mesh_has_is_not_laid_out():
  with jax.set_mesh(make_mesh((4,), (w.AXIS,), (AxisType.Explicit,))):
    state = top_k(0.25, w.AXIS, num_workers=3).init(PARAMS)
  assert state.residual.shape == (3 * 36,)
  assert state.residual.sharding.is_fully_replicated


def test_make_mesh_and_set_mesh_as_they_come():
  """The defaults of JAX, whichever kind of axis they make."""
  with jax.set_mesh(jax.make_mesh((4,), (w.AXIS,), devices=jax.devices()[:4])):
    tx = top_k(0.25, w.AXIS)
    state = jax.jit(tx.init)(PARAMS)
    batch = jax.device_put((X, Y), P(w.AXIS))
    *_, losses = train(tx, state_specs(state, w.AXIS), PARAMS, state, batch)
  assert losses == expected()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_another_axis_stays_out_of_the_map(kind):
  """Only "data" is Manual inside. Over an Explicit axis, gradients must not be sharded."""
  mesh = make_mesh((4, 2), (w.AXIS, "model"), (kind, kind))
  tx = top_k(0.25, w.AXIS, num_workers=4)
  state = tx.init(PARAMS)
  specs = state_specs(state, w.AXIS)
  placed = jax.device_put(state, w.shardings(mesh, specs))
  batch = jax.device_put((X, Y), w.shardings(mesh, (P(w.AXIS), P(w.AXIS))))
  params = jax.device_put(PARAMS, w.shardings(mesh, {"b": P(), "w": P()}))
  run = functools.partial(train, tx, specs, mesh=mesh, axis_names={w.AXIS})
  *_, losses = run(params, placed, batch)
  np.testing.assert_allclose(losses, expected(), rtol=1e-6)

  params = jax.device_put(PARAMS, w.shardings(mesh, BY_MODEL))
  if kind == AxisType.Auto:
    *_, losses = run(params, placed, batch)
    np.testing.assert_allclose(losses, expected(), rtol=1e-6)
    return
  message = r"gradient\['b'\], float32\[4@model\].*Explicit mesh axes \['model'\].*axis_names="
  with pytest.raises(ValueError, match=message):
    run(params, placed, batch)


def test_gradients_sharded_over_an_explicit_axis_may_be_gathered():
  mesh = make_mesh((4, 2), (w.AXIS, "model"), (AxisType.Explicit,) * 2)
  tx = top_k(0.25, w.AXIS, num_workers=4)
  gathering = optax.GradientTransformation(
    tx.init, lambda grads, state: tx.update(jax.sharding.reshard(grads, P()), state)
  )
  state = tx.init(PARAMS)
  specs = state_specs(state, w.AXIS)
  params, state = jax.device_put((PARAMS, state), w.shardings(mesh, (BY_MODEL, specs)))
  batch = jax.device_put((X, Y), w.shardings(mesh, (P(w.AXIS), P(w.AXIS))))
  params, _, losses = train(gathering, specs, params, state, batch, mesh=mesh, axis_names={w.AXIS})
  np.testing.assert_allclose(losses, expected(), rtol=1e-6)
  assert params["w"].sharding.spec == P(None, "model")


def test_model_parallel_over_an_explicit_axis():
  """A nested map over "model" around update; over an Auto axis: `test_model_parallel.py`."""
  mesh = make_mesh((4, 2), (w.AXIS, "model"), (AxisType.Auto, AxisType.Explicit))
  tx = exdyna(0.25, w.AXIS, num_workers=4)

  # Every field gets a leading dimension for the shard of the model.
  def init(params):
    return jax.tree.map(lambda x: x[None], tx.init(params))

  def update(grads, state):
    updates, state = tx.update(grads, jax.tree.map(lambda x: x[0], state))
    return updates, jax.tree.map(lambda x: x[None], state)

  by_shard = jax.shard_map(
    update, axis_names={"model"}, in_specs=(BY_MODEL, P("model")), out_specs=(BY_MODEL, P("model"))
  )
  nested = optax.GradientTransformation(init, by_shard)
  inner = state_specs(jax.eval_shape(tx.init, PARAMS), w.AXIS)
  specs = jax.tree.map(lambda spec: P(None, *spec), inner)  # of the map over "data"
  places = jax.tree.map(lambda spec: P("model", *spec), inner)
  params = jax.device_put(PARAMS, w.shardings(mesh, BY_MODEL))
  batch = jax.device_put((X, Y), w.shardings(mesh, (P(w.AXIS), P(w.AXIS))))
  with jax.set_mesh(mesh):
    each = jax.shard_map(init, in_specs=(BY_MODEL,), out_specs=P("model"), axis_names={"model"})
    state = jax.device_put(jax.jit(each)(params), w.shardings(mesh, places))
    params, state, losses = train(nested, specs, params, state, batch, axis_names={w.AXIS})
  assert losses[-1] < losses[0]
  assert state.residual.shape == (2, 4 * 18) and state.stats.counts.shape == (2, 4)
  first, second = np.asarray(state.threshold)
  assert first != second
  assert (np.asarray(state.stats.selected) > 0).all()


@pytest.mark.parametrize("density", [0.05, lambda step: jnp.where(step < 1, 0.2, 0.05)])
def test_vmap_over_an_ensemble(density):
  """Several models, each with its own exchange: JAX's vmap of a conditional made a type error."""
  n, members, size = 4, 3, 1000
  tx = exdyna(density, w.AXIS, num_workers=n)

  def two_steps(grads):
    updates, state = tx.update(grads, tx.init(grads))
    return updates, tx.update(grads, state)[0]

  def sparse_means(run):
    mapped = jax.shard_map(run, mesh=w.mesh_of(n), in_specs=P(w.AXIS), out_specs=P())
    return jax.jit(mapped)(grads)

  grads = np.random.default_rng(0).standard_normal((n, members, size), np.float32)
  many = sparse_means(lambda grads: jax.vmap(two_steps)(grads[0]))
  one = sparse_means(lambda grads: two_steps(grads[0, 1]))
  for updates, alone in zip(many, one, strict=True):
    np.testing.assert_array_equal(updates[1], alone)
