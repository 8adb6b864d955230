"""What a step costs in memory: nothing of N elements beyond the flat gradient and the output."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from workers import AXIS, mesh_of

from exdyna_jax import exdyna, state_specs

SIZE, WORKERS = 1_000_000, 8


def temporary(shapes, **options):
  """Temporary memory of a compiled step, per device, as a multiple of the vector's 4 N bytes."""
  tx = exdyna(0.001, AXIS, num_workers=WORKERS, **options)
  grads = [jax.ShapeDtypeStruct((WORKERS * shape[0], *shape[1:]), jnp.float32) for shape in shapes]
  state = jax.eval_shape(tx.init, [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes])
  specs = state_specs(state, AXIS)

  def step(grads, state):
    # The state first: a donated buffer goes to the first output of its shape.
    return tx.update(grads, state)[::-1]

  mapped = jax.shard_map(
    step, mesh=mesh_of(WORKERS), in_specs=(P(AXIS), specs), out_specs=(specs, P())
  )
  compiled = jax.jit(mapped, donate_argnums=1).lower(grads, state).compile()
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= 4 * SIZE  # the residual, in place
  return memory.temp_size_in_bytes / (4 * SIZE)


@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
@pytest.mark.parametrize("threshold", ["secant", "in_step", "paper"])
def test_a_flat_gradient_needs_no_vector(nonfinite, threshold):
  assert temporary([(SIZE,)], nonfinite=nonfinite, threshold=threshold) < 0.2


def test_a_tree_needs_the_flat_gradient_and_the_flat_update():
  shapes = [(SIZE // 20,)] * 10 + [(SIZE // 2000, 100)] * 10
  assert temporary(shapes) < 2.2


def test_further_messages_need_no_vector():
  assert temporary([(SIZE,)], capacity_factor=None) < 0.6
