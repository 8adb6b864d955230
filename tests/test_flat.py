"""Trees to vectors and back."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exdyna_jax import flat

TREE = {
  "w": jnp.arange(6.0).reshape(2, 3),
  "half": jnp.array([1.5, 2.5], jnp.bfloat16),
  "scalar": jnp.float32(7),
  "python": 0.5,
  "none": None,
  "empty": jnp.zeros((0, 3)),
}


def test_order_is_the_leaves_order():
  vector = flat.flatten(TREE, jnp.float32)
  # Keys of a dict are sorted: empty, half, none, python, scalar, w.
  np.testing.assert_array_equal(vector, [1.5, 2.5, 0.5, 7, 0, 1, 2, 3, 4, 5])
  assert vector.dtype == jnp.float32 and flat.flat_size(TREE) == vector.size


def test_there_and_back():
  arrays = jax.tree.map(jnp.asarray, TREE)
  back = flat.unflatten(flat.flatten(TREE, jnp.float32), TREE)
  chex.assert_trees_all_equal(back, arrays)
  chex.assert_trees_all_equal_shapes_and_dtypes(back, arrays)


def test_leaves_without_gradients_become_zeros_of_their_kind():
  tree = {
    "i": jnp.ones(2, jnp.int32),
    "b": np.array([True]),
    "f": np.zeros((3,), jax.dtypes.float0),
    "w": jnp.ones(1),
  }
  assert flat.flat_size(tree) == 1
  back = flat.unflatten(jnp.array([4.0]), tree)
  assert {k: (v.dtype, v.shape) for k, v in back.items()} == {
    k: (v.dtype, v.shape) for k, v in tree.items()
  }
  assert back["w"] == 4 and not back["i"].any() and not back["b"].any()


def test_means_of_finite_terms_are_finite():
  sums = jnp.array([6.0, jnp.inf, -jnp.inf, jnp.nan])  # the last one of 3e38, 3e38, -3e38, -3e38
  largest = jnp.finfo(jnp.float32).max
  assert flat.mean_of(sums, 4, saturate=True).tolist() == [1.5, largest, -largest, 0]
  assert jnp.isnan(flat.mean_of(sums, 4, saturate=False)[3])


@pytest.mark.parametrize("tree", [{}, None, (), {"a": None}])
def test_empty_trees(tree):
  assert flat.flat_size(tree) == 0
  assert flat.flatten(tree, jnp.float32).shape == (0,)
  assert jax.tree.structure(flat.unflatten(jnp.zeros(0), tree)) == jax.tree.structure(tree)


def test_one_concatenation_for_any_number_of_leaves():
  """A loop of slice updates into the vector would copy it once per leaf."""
  tree = [jnp.ones((5, i + 1)) for i in range(40)]
  jaxpr = str(jax.make_jaxpr(lambda t: flat.flatten(t, jnp.float32))(tree))
  assert jaxpr.count("concatenate") == 1 and "dynamic_update_slice" not in jaxpr
