"""All public transformations, as the contract and the oracles test them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import workers as w
from following import flat_rows

import exdyna_jax

# A transformation for a density, or a schedule of it.
FAMILY = {
  "exdyna": exdyna_jax.exdyna,
  "micro": exdyna_jax.micro,
  "deft": exdyna_jax.deft,
  "top_k": exdyna_jax.top_k,
  "clt_k": exdyna_jax.clt_k,
  "hard_threshold": exdyna_jax.hard_threshold,
  "sage": exdyna_jax.sage,
  "sidco": exdyna_jax.sidco,
  "random_k": exdyna_jax.random_k,
  "dense": lambda density, axis_name, num_workers=None: exdyna_jax.dense(
    axis_name, num_workers=num_workers
  ),
}
EXCLUSIVE = {"exdyna", "micro", "deft"}  # no index is picked by two workers
COMMON = {"clt_k", "random_k", "dense"}  # all workers pick the same
OVERLAPPING = {"top_k", "hard_threshold", "sage", "sidco"}
TRUNCATED = {"exdyna", "micro", "deft", "hard_threshold", "sage", "sidco"}
SPARSE = sorted(set(FAMILY) - {"dense"})

# What real parameters have: two dimensions, half precision, a scalar, an empty leaf, None. Of five
# layers that are not empty, deft cuts the first two.
PARAMS = {
  "w": jnp.zeros((19, 13)),
  "v": jnp.zeros(211),
  "b": jnp.zeros(37, jnp.bfloat16),
  "c": jnp.zeros(16),
  "s": jnp.zeros(()),
  "e": jnp.zeros((0, 3)),
  "o": None,
}
SIZE = 512
DENSITY = 0.05


def early(step):
  """A density schedule that starts ten times as dense as it ends."""
  return jnp.where(step < 2, 0.4, 0.04)


@functools.cache
def compiled(name, n, how, density=DENSITY, **options):
  """One compilation per configuration, shared by all tests. Under shard_map, state is donated."""
  tx = FAMILY[name](density, w.AXIS, num_workers=n, **options)
  workers = w.run_on(tx, n, PARAMS, how)
  if how == "shard_map":
    step, _ = w.sharded_step(tx, w.mesh_of(n), PARAMS, donate_argnums=0)
    workers = workers._replace(step=step)
  return workers


def gradients(seed, n, scale=1.0):
  """Gradients of n workers with heavy tails; the leaves differ in scale."""
  rng = np.random.default_rng(seed)
  scales = {"w": 1.0, "v": 0.1, "b": 3.0, "c": 10.0, "s": 1.0, "e": 1.0}

  def leaf(path, x):
    values = rng.standard_normal((n, *x.shape)) ** 3 * scale * scales[path[0].key]
    return jnp.asarray(values, x.dtype)

  return jax.tree_util.tree_map_with_path(leaf, PARAMS)


def take_step(name, workers, state, grads, residual_dtype=jnp.float32):
  """One step that must keep the invariants; returns `acc [n, N]`, what was sent, and the state."""
  n = workers.n
  rows = flat_rows(grads, n)
  before = w.residuals(workers, state).astype(np.float32)
  if name == "dense":
    before = np.zeros_like(rows)
  acc = np.asarray((rows + before).astype(residual_dtype), np.float32)

  updates, state = workers.step(state, grads)
  shared, got = w.agreed(workers, updates, state)
  for leaf, like in zip(jax.tree.leaves(shared), jax.tree.leaves(PARAMS), strict=True):
    assert leaf.dtype == like.dtype and leaf.shape == like.shape
  update = flat_rows(jax.tree.map(lambda x: x[None], shared), 1)[0]
  after = np.zeros_like(acc) if name == "dense" else w.residuals(workers, state).astype(np.float32)

  # Conservation: an element stays on all workers, or is sent by all and leaves nothing behind.
  sent = (after != acc).any(axis=0)
  np.testing.assert_array_equal(after, np.where(sent, 0, acc))
  tolerance = np.concatenate(
    [np.full(x.size, max(4e-7, float(jnp.finfo(x.dtype).eps))) for x in jax.tree.leaves(PARAMS)]
  )
  error = np.abs(update - np.where(sent, acc.astype(np.float64).mean(axis=0), 0))
  assert (error <= tolerance * np.abs(acc).max(axis=0)).all()
  assert not update[~sent].any()

  check_stats(name, got.stats, sent)
  return acc, sent, state


def check_stats(name, stats, sent):
  """The statistics say what happened."""
  total, n = stats.counts.sum(), len(stats.counts)
  assert stats.selected == sent.sum()
  np.testing.assert_allclose(stats.density, stats.selected / SIZE, rtol=1e-6)
  expected = n * stats.counts.max() / total if total else 1.0
  np.testing.assert_allclose(stats.padding_ratio, expected, rtol=1e-6)
  assert 0 <= stats.overflow < max(total, 1) and stats.skipped == 0
  assert stats.overflow == 0 or name in TRUNCATED
  if name in EXCLUSIVE:
    assert stats.selected + stats.overflow == total
  elif name in OVERLAPPING:
    assert stats.selected + stats.overflow <= total
    assert stats.selected >= (stats.counts.max() if stats.overflow == 0 else 1)
  elif name != "dense":
    assert (stats.counts == stats.selected).all()
  assert (stats.bytes_sent > 0) == (n > 1)
