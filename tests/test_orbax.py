"""Checkpoints with Orbax: a training that is resumed goes on bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import workers as w
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna, get_stats, local_params, reshard_state, state_specs

WORKERS, INPUTS = 4, 40
MESH = w.mesh_of(WORKERS)
X = np.random.default_rng(0).standard_normal((10, 16, INPUTS)).astype(np.float32)
TARGET = np.random.default_rng(1).standard_normal(INPUTS).astype(np.float32)
TX = optax.chain(exdyna(0.1, w.AXIS, num_workers=WORKERS), optax.adam(1e-2))


def fresh():
  """Parameters and state as the training starts, placed on the mesh."""
  params = {"w": jnp.zeros(INPUTS)}
  return place((params, TX.init(params)))


def place(training):
  return jax.device_put(training, w.shardings(MESH, state_specs(training, w.AXIS)))


def abstract():
  """Shapes, dtypes and places of `fresh`, with nothing allocated: the target of a restoration."""
  params = {"w": jax.ShapeDtypeStruct((INPUTS,), jnp.float32)}
  training = (params, jax.eval_shape(TX.init, params))
  places = w.shardings(MESH, state_specs(training, w.AXIS))
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), training, places
  )


@functools.cache
def compiled():
  specs = state_specs(abstract(), w.AXIS)

  def step(training, x):
    params, state = training

    def loss(params):
      return jnp.mean((x @ (params["w"] - TARGET)) ** 2)

    updates, state = TX.update(jax.grad(loss)(local_params(params, w.AXIS)), state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(specs, P(w.AXIS)), out_specs=specs))


def train(training, batches):
  for x in batches:
    training = jax.block_until_ready(compiled()(training, x))
  return training


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """The folder of a checkpoint after five steps."""
  path = tmp_path_factory.mktemp("orbax") / "step5"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, train(fresh(), X[:5]))
  return path


def restore(path, target=None):
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, target)


def test_a_resumed_training_goes_on_bit_by_bit(checkpoint):
  restored = restore(checkpoint, abstract())
  residual = restored[1][0].residual
  assert residual.sharding.spec == P(w.AXIS) and np.any(residual)
  straight, resumed = train(fresh(), X), train(restored, X[5:])
  assert resumed[1][0].residual.sharding.spec == P(w.AXIS)
  jax.tree.map(np.testing.assert_array_equal, straight, resumed)


def test_without_a_target_the_types_are_lost_and_the_error_says_how_to_keep_them(checkpoint):
  _, state = restore(checkpoint)
  assert isinstance(state[0], dict)
  # What it holds can still be placed and read.
  assert state_specs(state, w.AXIS)[0]["residual"] == P(w.AXIS)
  assert get_stats(state).counts.shape == (WORKERS,)
  message = (
    "got dict.*lost the types.*jax.eval_shape\\(tx.init, params\\).*restore\\(path, target\\)"
  )
  with pytest.raises(TypeError, match=message):
    jax.vmap(lambda g: TX.update(g, state), axis_name=w.AXIS)({"w": jnp.zeros((WORKERS, INPUTS))})


def test_the_recipe_of_the_error(checkpoint):
  """The structure is enough as the target; the arrays are placed afterwards."""
  params = {"w": jnp.zeros(INPUTS)}
  target = (params, jax.eval_shape(TX.init, params))
  restored = restore(checkpoint, target)
  assert jax.tree.structure(restored) == jax.tree.structure(fresh())
  jax.tree.map(np.testing.assert_array_equal, train(fresh(), X[:6]), train(place(restored), X[5:6]))


def test_resumed_on_fewer_workers(checkpoint):
  """As the recipe does it; the target for the new number is refused, see `misuses`."""
  few, mesh = WORKERS // 2, w.mesh_of(WORKERS // 2)
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), abstract()
  )
  training = reshard_state(restore(checkpoint, target), few)
  params, state = jax.device_put(training, w.shardings(mesh, state_specs(training, w.AXIS)))
  assert state[0].residual.shape == (few * INPUTS,) and np.any(state[0].residual)
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=few), optax.adam(1e-2))
  step, _ = w.sharded_step(tx, mesh, params)
  sent = 0
  for x in X[:3]:
    _, state = step(state, {"w": x[:few]})
    sent += int(get_stats(state).selected)
  assert sent > 0


def test_leaves_that_were_saved_alone_are_put_back():
  training = train(fresh(), X[:5])
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(training)]
  restored = jax.tree.unflatten(jax.tree.structure(fresh()), leaves)
  jax.tree.map(np.testing.assert_array_equal, train(fresh(), X[:6]), train(place(restored), X[5:6]))
