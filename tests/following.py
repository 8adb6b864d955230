"""Runs a transformation step by step beside the NumPy reference and checks every invariant."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import workers as w

from exdyna_jax import exdyna

PAPER = ("paper", "paper")
DEFAULT = ("secant", "balanced")
RULES = (PAPER, DEFAULT, ("in_step", "balanced"))  # pairs of threshold and partition rules

# Trees with what real parameters have: scalars, empty leaves, None, mixed precision.
TREES = {
  "vector": jnp.zeros(33),
  "mixed": {"w": jnp.zeros((7, 11)), "b": jnp.zeros(5, jnp.bfloat16), "s": jnp.zeros(())},
  "holes": [jnp.zeros((0, 3)), None, (jnp.zeros(31), jnp.zeros((2, 1)))],
  "single": {"x": jnp.zeros(())},
  "larger": {"a": jnp.zeros((40, 50)), "b": jnp.zeros(1501)},
}
ROUNDING = 1e-6  # relative, of a mean of float32 numbers


@functools.cache
def compiled(tree, n, how, density, capacity_factor, rules=DEFAULT, nonfinite="skip"):
  """One compilation per configuration, shared by all tests."""
  threshold, partition = rules
  tx = exdyna(
    density,
    w.AXIS,
    num_workers=n,
    threshold=threshold,
    partition=partition,
    capacity_factor=capacity_factor,
    nonfinite=nonfinite,
  )
  return w.run_on(tx, n, TREES[tree], how)


def random_grads(rng, n, tree, scale):
  """Gradients of n workers in the shape of `tree`, with heavy tails: few large entries."""

  def leaf(x):
    return jnp.asarray(scale * rng.standard_normal((n, *x.shape)) ** 3, x.dtype)

  return jax.tree.map(leaf, tree)


def flat_rows(tree, n):
  """Leaves `[n, ...]` as `[n, N]` float32, in the order of the tree."""
  leaves = [np.asarray(x, np.float32).reshape(n, -1) for x in jax.tree.leaves(tree)]
  return np.concatenate(leaves, axis=1)


def follow(
  workers, params, all_grads, *, density, capacity_factor, rules=DEFAULT, nonfinite="skip"
):
  """Runs steps beside the reference, checks every invariant in each, returns the last state.

  `density` may be a function of the step.
  """
  n = workers.n
  state = workers.init(params)
  size = flat_rows(jax.tree.map(lambda x: np.zeros((1, *x.shape)), params), 1).shape[1]
  schedule = density if callable(density) else lambda _: density
  paper_threshold, paper_partition = (rule == "paper" for rule in rules)
  blocks = oracle.geometry(size) if paper_partition else oracle.even_blocks(size)
  reference = oracle.init(size, n, schedule(0), blocks)
  for grads in all_grads:
    rows = flat_rows(grads, n)
    before, residual = (
      w.copies(workers, state._replace(residual=()))[0],
      w.residuals(workers, state),
    )
    updates, state = workers.step(state, grads)
    got_updates, got = w.agreed(workers, updates, state)  # invariant 3: agreement

    # The reference takes our threshold and boundaries; the rules have tests of their own.
    reference = reference._replace(
      threshold=float(got.stats.threshold_used), boundaries=before.boundaries.tolist()
    )
    now = schedule(before.step)
    update, reference, info = oracle.step(
      reference,
      rows,
      density=now,
      capacity=oracle.capacity(size, n, now, capacity_factor),
      blocks=blocks,
      nonfinite=nonfinite,
      fallback=paper_threshold,
    )
    check_what_is_sent(got_updates, params, rows + residual, update)
    check_what_stays(rows + residual, w.residuals(workers, state), reference, info)
    check_stats(got, size, reference, info)
    all_wanted = max(1, int(now * size)) >= size
    check_rules(got, before, reference, rules, now < 1, all_wanted)
  return state


def check_what_is_sent(updates, params, acc, update):
  """The mean of all workers' values, in the gradient's dtypes."""
  for leaf, like in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
    assert leaf.dtype == like.dtype and leaf.shape == like.shape
  leaves = jax.tree.leaves(params)
  tolerance = [np.full(x.size, max(ROUNDING, float(jnp.finfo(x.dtype).eps))) for x in leaves]
  scale = np.nan_to_num(np.abs(acc)).max(axis=0)  # a skipped step sends no NaN, so none here
  error = np.abs(flat_rows(jax.tree.map(lambda x: x[None], updates), 1)[0] - update)
  np.testing.assert_array_less(error, np.concatenate(tolerance) * scale + 1e-30)


def check_what_stays(acc, residual, reference, info):
  """Invariants 1 and 4: conservation, exactly: acc without the sent entries, on every worker."""
  np.testing.assert_array_equal(residual, reference.residual)
  if not info["skipped"]:
    sent = np.zeros_like(acc)
    sent[:, info["indices"]] = acc[:, info["indices"]]
    np.testing.assert_array_equal(acc, residual + sent)


def check_stats(got, size, reference, info):
  """Invariant 2 and the statistics."""
  stats = got.stats
  np.testing.assert_array_equal(stats.counts, info["counts"])
  assert len(set(info["indices"])) == len(info["indices"]) == stats.selected
  assert stats.selected + stats.overflow == stats.counts.sum()
  assert stats.overflow == info["overflow"]
  assert stats.skipped == reference.skipped
  assert got.step == reference.step
  np.testing.assert_allclose(stats.padding_ratio, info["padding_ratio"], rtol=ROUNDING)
  np.testing.assert_allclose(stats.density, stats.selected / size, rtol=ROUNDING)


def check_rules(got, before, reference, rules, positive, all_wanted):
  """Boundaries tile the blocks, thresholds are sane; the paper's are the reference's."""
  threshold, partition = rules
  lengths, num_blocks = np.diff(got.boundaries), before.boundaries[-1]
  assert got.boundaries[0] == 0 and got.boundaries[-1] == num_blocks
  assert (lengths >= (1 if num_blocks >= len(lengths) and partition != "paper" else 0)).all()
  assert np.isfinite(got.threshold) and (got.threshold > 0 if positive else got.threshold >= 0)
  if threshold == "paper":
    # Where everything is wanted, it is put aside, which the reference does not see.
    assert got.stats.threshold_used == (0 if all_wanted else before.threshold)
    if not all_wanted:
      np.testing.assert_allclose(got.threshold, reference.threshold, rtol=ROUNDING)
  if partition == "paper":
    np.testing.assert_array_equal(got.boundaries, reference.boundaries)
