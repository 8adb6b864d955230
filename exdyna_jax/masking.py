"""Leaves that are averaged densely, beside the sparse ones."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import flat


def split(tree: Any, dense_mask: Any) -> tuple[Any, Any]:
  """``tree`` without the dense leaves, and with these only: None stands for what is left out.

  Args:
    tree: gradients or parameters.
    dense_mask: tree of bools with the structure of ``tree``, or of its upper part; or a function
      that makes one of ``tree``. True: dense. None: no leaf is.

  Returns:
    Two trees with the structure of ``tree``, for `merge`.

  Raises:
    TypeError: a leaf of the mask is no bool, or the function fails on the tree.
    ValueError: the mask has another structure, or True for all elements.
  """
  # A tree without leaves, such as optax's placeholder for parameters, may have any structure.
  if dense_mask is None or not jax.tree.leaves(tree):
    return tree, jax.tree.map(lambda _: None, tree)
  # A model that is a tree of bools may be callable too.
  leaves = jax.tree.leaves(dense_mask)
  is_tree = len(leaves) > 0 and all(isinstance(leaf, (bool, np.bool_)) for leaf in leaves)
  is_function = callable(dense_mask) and not is_tree
  mask = _called(dense_mask, tree) if is_function else dense_mask
  for path, leaf in jax.tree_util.tree_leaves_with_path(mask):
    if not isinstance(leaf, (bool, np.bool_)):
      raise TypeError(
        f"dense_mask{jax.tree_util.keystr(path)} must be True or False, got {leaf!r}. Compute it"
        " from shapes and names, which are known when the step is compiled."
      )
  try:
    flags = jax.tree.broadcast(mask, tree)
  except ValueError as error:
    raise ValueError(
      f"dense_mask has the structure {jax.tree.structure(mask)}, which is not that of the gradients"
      f" or of their upper part: {jax.tree.structure(tree)}. A function of the tree always fits:"
      " dense_mask=lambda tree: jax.tree.map(lambda x: x.ndim < 2, tree)."
    ) from error
  sparse = jax.tree.map(lambda flag, leaf: None if flag else leaf, flags, tree)
  dense = jax.tree.map(lambda flag, leaf: leaf if flag else None, flags, tree)
  return sparse, dense


def _called(dense_mask: Callable[[Any], Any], tree: Any) -> Any:
  try:
    return dense_mask(tree)
  except (AttributeError, TypeError) as error:
    raise TypeError(
      f"dense_mask is called with the whole tree, here a {type(tree).__name__}, and raises:"
      f" {error}. A function of a leaf goes through jax.tree.map:"
      " dense_mask=lambda tree: jax.tree.map(lambda x: x.ndim < 2, tree); one of its path and"
      " itself through jax.tree_util.tree_map_with_path."
    ) from error


def merge(sparse: Any, dense: Any) -> Any:
  """Inverse of `split`."""
  return jax.tree.map(
    lambda one, other: other if one is None else one, sparse, dense, is_leaf=lambda x: x is None
  )


def sparse_size(parts: tuple[Any, Any]) -> int:
  """Elements of the sparse leaves that `split` returns; ValueError if only dense ones have any."""
  sparse, dense = (flat.flat_size(tree) for tree in parts)
  if dense and not sparse:
    raise ValueError(
      "dense_mask leaves no element to be sent sparsely. For a dense mean of all leaves, use"
      " exdyna_jax.dense(axis_name)."
    )
  return sparse
