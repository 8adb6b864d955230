"""What optax expects of every transformation, beside the contract of our own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from family import DENSITY, FAMILY, PARAMS, SIZE, SPARSE, compiled, gradients
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import state_specs

N_WORKERS = 4

every = pytest.mark.parametrize("name", sorted(FAMILY))


def made(name, **options):
  return FAMILY[name](DENSITY, w.AXIS, num_workers=N_WORKERS, **options)


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def run_three_steps(step, state, grads, caplog):
  """The last state; fails if another step than the first one compiles."""
  _, state = step(state, grads[0])
  with jax.log_compiles():
    for later in grads[1:]:
      _, state = step(state, later)
  assert not [x for x in caplog.messages if "jit(step)" in x and "ompil" in x]
  return state


@every
def test_steps_compile_once_and_the_state_stays_where_it_was_put(name, caplog):
  workers = compiled(name, N_WORKERS, "shard_map")
  state = workers.init(PARAMS)
  # The state is donated: look at it before.
  before = jax.tree.map(lambda x: x.sharding, state)
  state = run_three_steps(workers.step, state, [gradients(t, N_WORKERS) for t in range(3)], caplog)
  assert jax.tree.map(lambda x: x.sharding, state) == before


@pytest.mark.parametrize("name", ["exdyna", "dense"])
def test_the_same_on_an_explicit_mesh(name, caplog):
  explicit = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((N_WORKERS,), (w.AXIS,), explicit, devices=jax.devices()[:N_WORKERS])
  tx = optax.chain(made(name), optax.adam(0.1, b1=0.0))
  params = jnp.zeros(100)
  with jax.set_mesh(mesh):
    step, specs = w.sharded_step(tx, mesh, params)
    init = jax.jit(tx.init, out_shardings=w.shardings(mesh, specs))
    state = init(jax.device_put(params, NamedSharding(mesh, P())))
    # On such a mesh, shardings are part of the type.
    before = jax.tree.map(jax.typeof, state)
    grads = jax.random.normal(jax.random.key(0), (3, N_WORKERS, 100))
    grads = [jax.device_put(g, NamedSharding(mesh, P(w.AXIS))) for g in grads]
    state = run_three_steps(step, state, grads, caplog)
    assert jax.tree.map(jax.typeof, state) == before


@every
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_a_step_may_be_a_branch(name, check):
  """Dtypes, and the axes over which arrays vary, are the same after a step as before."""
  tx = made(name)
  specs = state_specs(jax.eval_shape(tx.init, PARAMS), w.AXIS)

  def step(pred, state, grads):
    grads = jax.tree.map(lambda g: g[0], grads)
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), grads)
    return jax.lax.cond(pred, lambda: tx.update(grads, state), lambda: (zeros, state))

  mapped = jax.shard_map(
    step, mesh=w.mesh_of(N_WORKERS), in_specs=(P(), specs, P(w.AXIS)), out_specs=(P(), specs),
    check_vma=check,
  )  # fmt: skip
  state = jax.eval_shape(tx.init, PARAMS)
  updates, after = jax.eval_shape(mapped, jnp.array(True), state, gradients(0, N_WORKERS))
  assert after == state and updates == abstract(PARAMS)


@every
def test_init_takes_abstract_values(name):
  tx = made(name)
  state = tx.init(abstract(PARAMS))
  jax.tree.map(np.testing.assert_array_equal, state, tx.init(PARAMS))
  assert jax.eval_shape(tx.init, abstract(PARAMS)) == jax.eval_shape(lambda: state)


@every
def test_tools_for_trees_see_through_the_state(name):
  tx = optax.chain(made(name), optax.sgd(0.1, momentum=0.9))
  state = tx.init(PARAMS)
  marked = optax.tree_utils.tree_map_params(
    tx, lambda x: x + 1, state, transform_non_params=lambda x: x
  )
  jax.tree.map(np.testing.assert_array_equal, marked[0], state[0])
  assert all((x == 1).all() for x in jax.tree.leaves(marked[1]))
  assert optax.tree_utils.tree_get(state, "boundaries").shape == (N_WORKERS + 1,)
  size = SIZE if name in SPARSE else 0
  assert optax.tree_utils.tree_get(state, "residual").shape == (N_WORKERS * size,)
  cleared = optax.tree_utils.tree_set(state, threshold=jnp.float32(2.0))
  assert cleared[0].threshold == 2 and cleared[0]._replace(threshold=0) == state[0]._replace(
    threshold=0
  )
