"""What crosses the network: the collectives of the compiled step, capacities, bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from following import DEFAULT, PAPER

from exdyna_jax import exchange, exdyna, get_stats
from exdyna_jax.density import parse_density
from exdyna_jax.threshold import LADDER, RULES

SIZE, DENSITY = 3501, 0.01


def compiled_step(n, check=True, **options):
  params = {"a": jnp.zeros((40, 50)), "b": jnp.zeros(1501)}
  tx = exdyna(DENSITY, w.AXIS, num_workers=n, **options)
  step, specs = w.sharded_step(tx, w.mesh_of(n), params, check=check)
  grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), params)
  return step.lower(jax.eval_shape(tx.init, params), grads).compile()


def every_step(text):
  """The collectives outside of conditional branches and loops, and those inside."""
  entry = text.index("ENTRY")
  return tuple(sorted(kind for _, kind in w.collectives(x)) for x in (text[entry:], text[:entry]))


GATHER, REDUCE = "all-gather", "all-reduce"


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
  "rules, always, sometimes",
  [
    (PAPER, [GATHER, REDUCE], []),
    # One more sum in the branch that searches for an unknown threshold.
    (DEFAULT, [GATHER, REDUCE], [REDUCE]),
    # And the sum of the ladder's counts before the selection.
    (("in_step", "balanced"), [GATHER, REDUCE, REDUCE], [REDUCE]),
  ],
)
def test_collectives_of_a_step(check, rules, always, sometimes):
  text = compiled_step(8, check, threshold=rules[0], partition=rules[1]).as_text()
  assert every_step(text) == (always, sometimes)


def test_bytes_of_a_step_are_those_of_its_collectives():
  """The ring cost of every collective of the compiled step, against what the statistics say."""
  n, params = 4, jnp.zeros(1000)
  for threshold in RULES:
    tx = exdyna(0.05, w.AXIS, num_workers=n, threshold=threshold)
    step, specs = w.sharded_step(tx, w.mesh_of(n), params)
    state = jax.jit(tx.init, out_shardings=w.shardings(w.mesh_of(n), specs))(params)
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((n, 1000)), jnp.float32)
    text = step.lower(state, grads).compile().as_text()
    items = re.findall(
      r"= [sf]32\[(\d+)\]\S* (all-gather|all-reduce)\(", text[text.index("ENTRY") :]
    )
    cost = {"all-gather": (n - 1) / n * 4, "all-reduce": 2 * (n - 1) / n * 4}
    _, state = step(state, grads)
    total = sum(int(count) * cost[kind] for count, kind in items)
    assert float(get_stats(state).bytes_sent) == total


def test_policies_for_nan_cost_no_collective():
  text = compiled_step(8, nonfinite="propagate").as_text()
  assert every_step(text) == ([GATHER, REDUCE], [REDUCE])


def test_untruncated_exchange_has_two_more_for_each_size_of_message():
  plan = exchange.plan(parse_density(DENSITY), None, jnp.int32(0), SIZE, 8)
  text = compiled_step(8, capacity_factor=None, threshold="paper").as_text()
  assert every_step(text) == (
    [GATHER, REDUCE],
    [GATHER] * len(plan.slots) + [REDUCE] * len(plan.slots),
  )


def test_one_worker_exchanges_nothing():
  assert not w.collectives(compiled_step(1, check=False).as_text())
  # Checked types leave collectives of one member, which send nothing.
  for line in compiled_step(1, check=True).as_text().splitlines():
    if w.collectives(line):
      assert "replica_groups={{0}}" in line or "replica_groups=[1,1]" in line, line


def test_message_sizes_in_the_compiled_step():
  n, factor = 8, 1.25
  text = compiled_step(n, capacity_factor=factor).as_text()
  capacity = exchange.capacity_of(int(DENSITY * SIZE), SIZE, n, factor)
  slots = capacity + exchange.HEADER + len(LADDER)
  assert re.search(rf"= s32\[{n * slots}\]\S* all-gather\(", text)
  assert re.search(rf"= f32\[{n * capacity}\]\S* all-reduce\(", text)


@pytest.mark.parametrize(
  "size, n, k, factor, want",
  [(1000, 4, 10, 1.25, 4), (1000, 8, 1, 1.25, 1), (3, 2, 3, 4.0, 3), (1000, 4, 10, None, 3)],
)
def test_capacity(size, n, k, factor, want):
  assert exchange.capacity_of(k, size, n, factor) == want


def test_ring_bytes_by_hand():
  # All-gather: every worker passes on the parts of the n - 1 others. All-reduce: twice, in n parts.
  assert exchange.all_gather_bytes(4, 10) == 3 * 10 * 4
  assert exchange.all_reduce_bytes(4, 40, 2) == 2 * 3 * 10 * 2
  assert exchange.all_gather_bytes(1, 10) == exchange.all_reduce_bytes(1, 10) == 0


@pytest.mark.parametrize("capacity_factor", [1.25, None])
def test_bytes_follow_what_is_sent(capacity_factor):
  n, size, density = 4, 1000, 0.02
  options = {"capacity_factor": capacity_factor, "initial_threshold": 0.5, "threshold": "paper"}
  tx = exdyna(density, w.AXIS, **options)
  workers = w.run_on(tx, n, jnp.zeros(size), "vmap")
  state = workers.init(jnp.zeros(size))
  _, state = workers.step(state, jnp.ones((n, size)))  # everything qualifies
  stats = w.stats_of(workers, state)
  slots = exchange.capacity_of(int(density * size), size, n, capacity_factor)
  sent = slots
  if capacity_factor is None:  # 250 each, in messages of 5 first and then of 20
    sent = slots + -(-(stats.counts.max() - slots) // (4 * slots)) * 4 * slots
  gathered = (n - 1) * 4 * (exchange.HEADER + sent)
  reduced = 2 * (n - 1) / n * 4 * n * sent
  assert stats.bytes_sent == gathered + reduced
  assert stats.selected == (n * slots if capacity_factor else size)
  assert get_stats(state).overflow[0] == size - stats.selected
