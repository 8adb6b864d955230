"""Training steps that are traced only: right but for what a test gives; and wrong ones."""

import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import workers as w
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workers import AXIS

from exdyna_jax import exdyna, local_params, reshard_state, state_specs

N = 4
PARAMS = {"w": jnp.zeros((11, 9)), "b": jnp.zeros(())}
SIZE = 100
BATCH = jnp.zeros((2 * N, 11))


class Misuse(NamedTuple):
  """A wrong program, and what its user is told."""

  program: Callable
  error: type[Exception]
  symptom: str  # the part of the message that docs/troubleshooting.md quotes
  cure: str  # another part of it


def make(density=0.1, axis_name=AXIS, num_workers=N, **options):
  return exdyna(density, axis_name, num_workers=num_workers, **options)


def in_front_of_sgd(*transformations):
  return optax.chain(*transformations, optax.sgd(0.1))


def loss(params, x):
  return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def local_gradients(params, x):
  return jax.grad(loss)(local_params(params, AXIS), x)


def update(tx, grads, state, params):
  return tx.update(grads, state, params)


def train(
  tx, *, params=PARAMS, state=None, specs=None, out=None, gradients=local_gradients, update=update,
  check=True,
):  # fmt: skip
  """Traces a step of training on N workers, right in everything but what is given."""
  state = tx.init(params) if state is None else state
  specs = state_specs(state, AXIS) if specs is None else specs

  def step(params, state, x):
    updates, state = update(tx, gradients(params, x), state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
    step,
    mesh=w.mesh_of(N),
    in_specs=(P(), specs, P(AXIS)),
    out_specs=(P(), specs if out is None else out),
    check_vma=check,
  )
  return jax.eval_shape(mapped, params, state, BATCH)


def on_rows(mapped, state=None):
  """Traces init, unless there is a state, and update of rows of gradients under vmap or pmap."""

  def step(grads):
    return make().update(grads, make().init(grads) if state is None else state)

  rows = jax.tree.map(lambda x: jnp.zeros((N, *x.shape)), PARAMS)
  return jax.eval_shape(mapped(step), rows)


def loss_that_is_not_averaged():
  def step(params, x):
    return jax.value_and_grad(loss)(local_params(params, AXIS), x)[0]

  mapped = jax.shard_map(step, mesh=w.mesh_of(N), in_specs=(P(), P(AXIS)), out_specs=P())
  return jax.eval_shape(mapped, PARAMS, BATCH)


def state_returned_as_replicated_without_checks():
  """The step itself succeeds; the next one does not."""
  params, state = train(make(), out=P(), check=False)
  return train(make(), params=params, state=state)


def state_not_placed_on_an_explicit_mesh():
  tx, grads = make(), jax.tree.map(lambda x: jnp.zeros((N, *x.shape)), PARAMS)
  state = tx.init(PARAMS)  # not under jax.set_mesh, where init places the residual
  specs = state_specs(state, AXIS)
  mesh = jax.make_mesh((N,), (AXIS,), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:N])
  with jax.set_mesh(mesh):
    mapped = jax.shard_map(tx.update, in_specs=(P(AXIS), specs), out_specs=(P(), specs))
    return jax.eval_shape(mapped, jax.device_put(grads, P(AXIS)), state)


def step_with_a_state_of_another_mesh():
  """What `reshard_state` leaves alone, here the momentum, lies on the old devices."""
  state = optax.chain(make(), optax.trace(0.9)).init(PARAMS)
  state = reshard_state(jax.device_put(state, NamedSharding(w.mesh_of(N), P())), 2)
  tx, specs = optax.chain(make(num_workers=2), optax.trace(0.9)), state_specs(state, AXIS)
  step = jax.shard_map(
    lambda state, x: tx.update(local_gradients(PARAMS, x), state),
    mesh=w.mesh_of(2),
    in_specs=(specs, P(AXIS)),
    out_specs=(P(), specs),
  )
  return jax.jit(step)(state, BATCH)


def restored_for_another_number_of_workers():
  """The residual alone, of four workers, into that of two."""
  place = NamedSharding(w.mesh_of(2), P())
  target = jax.ShapeDtypeStruct((2 * SIZE,), jnp.float32, sharding=place)
  with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f"{folder}/step", {"residual": make().init(PARAMS).residual})
    checkpointer.wait_until_finished()
    return checkpointer.restore(f"{folder}/step", {"residual": target})
