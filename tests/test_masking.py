"""Leaves that are averaged densely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from family import SPARSE

import exdyna_jax
from exdyna_jax import exdyna, get_stats, masking

TREE = {
  "w": jnp.zeros((8, 8)),
  "b": jnp.zeros(5),
  "n": {"o": None, "s": jnp.zeros((), jnp.bfloat16)},
}
N = 4


def small(tree):
  return jax.tree.map(lambda x: x.ndim < 2, tree)


@pytest.mark.parametrize(
  "mask",
  [small, jax.tree_util.Partial(small), small(TREE), {"w": False, "b": True, "n": True}],
)
def test_split_and_merge(mask):
  sparse, dense = masking.split(TREE, mask)
  assert [x.shape for x in jax.tree.leaves(sparse)] == [(8, 8)]
  assert [x.shape for x in jax.tree.leaves(dense)] == [(5,), ()]
  jax.tree.map(np.testing.assert_array_equal, masking.merge(sparse, dense), TREE)


def test_a_mask_may_be_a_model_that_is_callable():
  class Callable(tuple):
    def __call__(self, x):
      raise AssertionError("the mask was called")

  jax.tree_util.register_pytree_node(Callable, lambda x: (tuple(x), None), lambda _, x: Callable(x))
  model = Callable((jnp.zeros(2), jnp.zeros(3)))
  sparse, dense = masking.split(model, Callable((True, False)))
  assert jax.tree.leaves(sparse)[0].shape == (3,) and jax.tree.leaves(dense)[0].shape == (2,)


def gradients(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal((N, *x.shape)), x.dtype), TREE)


@pytest.mark.parametrize("name", SPARSE)
def test_dense_leaves_are_averaged_and_the_others_are_as_if_alone(name):
  """All sparsifiers, emulated; `exdyna` on devices with and without checked types below."""
  make = getattr(exdyna_jax, name)
  masked = w.run_on(make(0.2, w.AXIS, num_workers=N, dense_mask=small), N, TREE, "vmap")
  alone = w.run_on(make(0.2, w.AXIS, num_workers=N), N, {"w": TREE["w"]}, "vmap")
  one, other = masked.init(TREE), alone.init({"w": TREE["w"]})
  for t in range(3):
    grads = gradients(t)
    updates, one = masked.step(one, grads)
    expected, other = alone.step(other, {"w": grads["w"]})
    np.testing.assert_array_equal(updates["w"], expected["w"])
    for got, local in ((updates["b"], grads["b"]), (updates["n"]["s"], grads["n"]["s"])):
      mean = np.asarray(local, np.float32).mean(axis=0)
      np.testing.assert_allclose(np.asarray(got[0], np.float32), mean, rtol=1e-2, atol=1e-6)
    more = w.stats_of(masked, one).bytes_sent - w.stats_of(alone, other).bytes_sent
    np.testing.assert_allclose(more, 2 * (N - 1) / N * 4 * 6, rtol=1e-3)
    jax.tree.map(np.testing.assert_array_equal, one._replace(stats=()), other._replace(stats=()))


@pytest.mark.parametrize("how", ["shard_map", "unchecked"])
def test_on_devices_with_at_most_one_more_collective_and_skipped_together(how):
  tx = exdyna(0.2, w.AXIS, num_workers=N, dense_mask=small)
  workers = w.run_on(tx, N, TREE, how)
  state, grads = workers.init(TREE), gradients(0)
  hlo = workers.step.lower(state, grads).compile().as_text()
  plain = w.run_on(exdyna(0.2, w.AXIS, num_workers=N), N, {"w": TREE["w"]}, how)
  before = plain.step.lower(plain.init({"w": TREE["w"]}), {"w": grads["w"]}).compile().as_text()
  # XLA may combine it with that of the values.
  assert len(w.collectives(hlo)) <= len(w.collectives(before)) + 1
  bad = dict(grads, b=grads["b"].at[2, 1].set(jnp.nan))  # in a dense leaf, on one worker
  updates, state = workers.step(state, bad)
  w.agreed(workers, updates, state)
  assert not any(np.any(x) for x in jax.tree.leaves(updates))
  assert get_stats(state).skipped == 1 and not np.any(state.residual)
  updates, state = workers.step(state, grads)
  w.agreed(workers, updates, state)
  assert all(np.any(x) for x in jax.tree.leaves(updates)) and get_stats(state).selected > 0


@pytest.mark.parametrize(
  "mask, error, words",
  [
    ({"w": False}, ValueError, "structure.*A function of the tree always fits"),
    ({"w": 0, "b": True, "n": True}, TypeError, r"dense_mask\['w'\] must be True or False, got 0"),
    (lambda tree: jax.tree.map(jnp.any, tree), TypeError, "must be True or False"),
    (lambda x: x.ndim < 2, TypeError, "whole tree, here a dict.* jax.tree.map"),
    (lambda path, x: True, TypeError, "missing 1 .*jax.tree_util.tree_map_with_path"),
    (True, ValueError, "no element to be sent sparsely.*exdyna_jax.dense"),
  ],
)
def test_errors(mask, error, words):
  with pytest.raises(error, match=words):
    exdyna(0.2, w.AXIS, num_workers=N, dense_mask=mask).init(TREE)


def test_a_placeholder_of_optax_is_no_tree_of_parameters():
  tx = exdyna(0.2, w.AXIS, num_workers=N, dense_mask=small(TREE))
  assert tx.init(()).residual.shape == (0,)
