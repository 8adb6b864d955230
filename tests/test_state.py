"""Specs and statistics of trees that hold our state, and local parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from exdyna_jax import dense, exdyna, get_stats, local_params, state_specs

PARAMS = {"w": jnp.zeros((10, 10)), "b": jnp.zeros(7)}


@pytest.mark.parametrize("axis", ["data", ("dcn", "ici")])
def test_specs_of_nested_states(axis):
  tx = optax.chain(optax.clip(1.0), exdyna(0.1, axis, num_workers=4), optax.adam(1e-3, b1=0.0))
  state = tx.init(PARAMS)
  specs = state_specs(state, axis)
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  assert specs[1].residual == P(axis)
  others = [s for s in jax.tree.leaves(specs) if s != P(axis)]
  assert len(others) == len(jax.tree.leaves(state)) - 1 and set(others) == {P()}
  # Abstract values do as well.
  assert state_specs(jax.eval_shape(tx.init, PARAMS), axis) == specs


def test_specs_of_a_train_state():
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=4), optax.sgd(0.1))
  model = nn.Dense(3)
  train = TrainState.create(apply_fn=model.apply, params=PARAMS, tx=tx)
  specs = state_specs(train, w.AXIS)
  assert specs.opt_state[0].residual == P(w.AXIS) and specs.params["w"] == P() == specs.step
  assert get_stats(train).counts.shape == (4,)


def test_fields_are_found_by_name():
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=4), optax.sgd(0.1, momentum=0.9))
  state = tx.init(PARAMS)
  for name, shape in (("residual", (4 * 107,)), ("threshold", ()), ("boundaries", (5,))):
    assert optax.tree_utils.tree_get(state, name).shape == shape
  assert optax.tree_utils.tree_get(state, "boundaries").dtype == jnp.int32


def test_stats_before_the_first_step():
  for tx in (exdyna(0.1, w.AXIS, num_workers=3), dense(w.AXIS, num_workers=3)):
    stats = get_stats(tx.init(PARAMS))
    assert stats.counts.shape == (3,) and stats.padding_ratio == 1
    assert stats.selected == stats.overflow == stats.skipped == stats.bytes_sent == 0


def test_placeholders_of_optax_are_tolerated():
  tx = optax.chain(exdyna(0.1, w.AXIS, num_workers=2), optax.sgd(0.1, momentum=0.9))
  state = tx.init(PARAMS)
  doubled = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, state)
  assert np.all(doubled[1][0].trace["w"] == 1) and not np.any(doubled[0].residual)


def gradient_specs(axes, shape, cast):
  """Axes over which a gradient varies under shard_map with checked types."""
  seen = []

  def run(params, x):
    grad = jax.grad(lambda p: jnp.sum(p * x.sum()))(cast(params))
    seen.append(set(jax.typeof(grad).manual_axis_type.varying))
    return jax.lax.psum(x, axes)

  mesh = w.mesh_of(int(np.prod(shape)), axes, shape)
  mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())
  jax.eval_shape(mapped, jnp.zeros(3), jnp.zeros(8))
  return seen[0]


def test_local_params_keep_gradients_local():
  assert gradient_specs(("data",), (4,), lambda p: p) == set()
  assert gradient_specs(("data",), (4,), lambda p: local_params(p, "data")) == {"data"}
  both = ("a", "b")
  assert gradient_specs(both, (2, 2), lambda p: local_params(p, "a")) == {"a"}
  assert gradient_specs(both, (2, 2), lambda p: local_params(p, both)) == {"a", "b"}

  # Idempotent, and in steps.
  def twice(p):
    return local_params(local_params(local_params(p, "a"), both), "b")

  assert gradient_specs(both, (2, 2), twice) == {"a", "b"}


@pytest.mark.parametrize("how", ["vmap", "pmap", "unchecked"])
def test_local_params_change_nothing_where_types_are_not_checked(how):
  def run(x):
    params = {"x": x}
    assert local_params(params, "data") is params
    return x

  if how == "vmap":
    jax.vmap(run, axis_name="data")(jnp.zeros(4))
  elif how == "pmap":
    jax.pmap(run, axis_name="data")(jnp.zeros(4))
  else:
    specs = P("data")
    mesh = w.mesh_of(4)
    jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(jnp.zeros(4))
