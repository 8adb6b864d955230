"""What crosses the network: the collectives of the compiled step, capacities, bytes."""

import re

import jax
import jax.numpy as jnp
import pytest
import workers as w

from exdyna_jax import exchange, exdyna, get_stats

COLLECTIVE = re.compile(
  r"= \S+ (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
)


def compiled_step(n, check=True, **options):
  params = {"a": jnp.zeros((40, 50)), "b": jnp.zeros(1501)}
  tx = exdyna(0.01, w.AXIS, num_workers=n, **options)
  step, specs = w.sharded_step(tx, w.mesh_of(n), params, check=check)
  grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), params)
  return step.lower(jax.eval_shape(tx.init, params), grads).compile()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_two_collectives_a_step(check, nonfinite):
  text = compiled_step(8, check, nonfinite=nonfinite).as_text()
  assert sorted(COLLECTIVE.findall(text)) == ["all-gather", "all-reduce"]


def test_untruncated_exchange_has_two_more_in_its_loop():
  text = compiled_step(8, capacity_factor=None).as_text()
  assert sorted(COLLECTIVE.findall(text)) == ["all-gather"] * 2 + ["all-reduce"] * 2


def test_one_worker_exchanges_nothing():
  assert not COLLECTIVE.findall(compiled_step(1, check=False).as_text())
  # Checked types leave collectives of one member, which send nothing.
  for line in compiled_step(1, check=True).as_text().splitlines():
    if COLLECTIVE.search(line):
      assert "replica_groups={{0}}" in line or "replica_groups=[1,1]" in line, line


def test_message_sizes_in_the_compiled_step():
  n, size, density, factor = 8, 3501, 0.01, 1.25
  text = compiled_step(n, capacity_factor=factor).as_text()
  capacity = exchange.capacity_of(size, n, int(density * size), factor)
  assert re.search(rf"= s32\[{n * (capacity + exchange.HEADER)}\]\S* all-gather\(", text)
  assert re.search(rf"= f32\[{n * capacity}\]\S* all-reduce\(", text)


@pytest.mark.parametrize(
  "size, n, k, factor, want",
  [(1000, 4, 10, 1.25, 4), (1000, 8, 1, 1.25, 1), (3, 2, 3, 4.0, 3), (1000, 4, 10, None, 3)],
)
def test_capacity(size, n, k, factor, want):
  assert exchange.capacity_of(size, n, k, factor) == want


def test_ring_bytes_by_hand():
  # All-gather: every worker passes on the parts of the n - 1 others. All-reduce: twice, in n parts.
  assert exchange.all_gather_bytes(4, 10) == 3 * 10 * 4
  assert exchange.all_reduce_bytes(4, 40, 2) == 2 * 3 * 10 * 2
  assert exchange.all_gather_bytes(1, 10) == exchange.all_reduce_bytes(1, 10) == 0


@pytest.mark.parametrize("capacity_factor", [1.25, None])
def test_bytes_follow_what_is_sent(capacity_factor):
  n, size, density = 4, 1000, 0.02
  tx = exdyna(density, w.AXIS, capacity_factor=capacity_factor, initial_threshold=0.5)
  workers = w.run_on(tx, n, jnp.zeros(size), "vmap")
  state = workers.init(jnp.zeros(size))
  _, state = workers.step(state, jnp.ones((n, size)))  # everything qualifies
  stats = w.stats_of(workers, state)
  slots = exchange.capacity_of(size, n, int(density * size), capacity_factor)
  rounds = 1 if capacity_factor else -(-stats.counts.max() // slots)
  gathered = (n - 1) * 4 * (exchange.HEADER + rounds * slots)
  reduced = 2 * (n - 1) / n * 4 * rounds * n * slots
  assert stats.bytes_sent == gathered + reduced
  assert stats.selected == (n * slots if capacity_factor else size)
  assert get_stats(state).overflow[0] == size - stats.selected
