"""Pytree of gradients <-> one flat vector, in the order of the tree's leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Indices are int32, and the number of elements itself is the "no index" mark.
MAX_SIZE = 2**31 - 2


def _dtype(leaf: Any) -> Any:
  return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_float(leaf: Any) -> bool:
  """True for leaves that have a gradient: of a floating-point dtype."""
  return jnp.issubdtype(_dtype(leaf), jnp.floating)


def flat_size(tree: Any) -> int:
  """Number of elements of all floating-point leaves of ``tree``; checks the leaves.

  Args:
    tree: a pytree of arrays or of anything with ``shape`` and ``dtype``. Integer, boolean and
      float0 leaves have no gradient: they count as zero elements.

  Returns:
    The length N of the flat vector, a Python int.

  Raises:
    TypeError: a leaf is complex.
    ValueError: N exceeds 2**31 - 2, the range of int32 indices.
  """
  size = sum(leaf_sizes(tree))
  if size > MAX_SIZE:
    raise ValueError(
      f"the tree has {size} elements, but indices are int32 and reach {MAX_SIZE}. Split it into"
      " groups of leaves with optax.partition, each with its own transformation."
    )
  return size


def leaf_sizes(tree: Any) -> tuple[int, ...]:
  """Number of elements of each floating-point leaf of ``tree``; raises TypeError if complex."""
  sizes = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype = _dtype(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
      raise TypeError(
        f"leaf {jax.tree_util.keystr(path)} is {dtype}: complex gradients have no order by which"
        " to select. Split the parameter into its real and imaginary parts."
      )
    if is_float(leaf):
      sizes.append(int(np.prod(np.shape(leaf), dtype=np.int64)))
  return tuple(sizes)


def zeros(leaf: Any) -> Any:
  """Zeros of the shape and dtype of ``leaf``, float0 included."""
  # float0 has no bytes: only NumPy can hold it.
  make = np.zeros if _dtype(leaf) == jax.dtypes.float0 else jnp.zeros
  return make(np.shape(leaf), _dtype(leaf))


def flatten(tree: Any, dtype: Any) -> jax.Array:
  """All floating-point leaves of ``tree`` as one vector ``[N]`` of ``dtype``."""
  leaves = [jnp.ravel(x).astype(dtype) for x in jax.tree.leaves(tree) if is_float(x)]
  # One concatenation: XLA fuses the casts into it. Writing leaf after leaf into a vector would
  # copy the vector once per leaf.
  return jnp.concatenate(leaves) if leaves else jnp.zeros((0,), dtype)


def all_finite(x: jax.Array) -> jax.Array:
  """True if ``x`` holds no NaN and no Inf, bool ``[]``."""
  # With that setting, jax would stop at the NaN that is made below.
  if getattr(jax.config, "jax_debug_nans"):  # noqa: B009 (mypy: not in jax's type stubs)
    return jnp.all(jnp.isfinite(x))
  # 0 * x is NaN for these. XLA would write the N booleans of jnp.isfinite to memory.
  return jnp.sum(x * 0) == 0


def cast(x: jax.Array, dtype: Any, *, saturate: bool) -> jax.Array:
  """``x`` as ``dtype``; with ``saturate``, what is too large for it becomes its largest number."""
  if saturate and jnp.finfo(dtype).max <= jnp.finfo(x.dtype).max:
    largest = jnp.finfo(dtype).max.astype(x.dtype)
    x = jnp.clip(x, -largest, largest)
  return x.astype(dtype)


def mean_of(sums: jax.Array, n: int, *, saturate: bool) -> jax.Array:
  """``sums / n``; with ``saturate`` of finite terms, it is finite too."""
  if saturate:
    # Partial sums that are infinite, of both signs: the terms were large and of both signs.
    sums = jnp.where(jnp.isnan(sums), 0, sums)
  return cast(sums / n, sums.dtype, saturate=saturate)


def unflatten(vector: jax.Array, like: Any, *, saturate: bool = False) -> Any:
  """Inverse of `flatten`: the tree ``like`` with the values of ``vector``, in the leaves' dtypes.

  Leaves without a gradient (integer, boolean, float0) come back as zeros of their kind.
  """
  leaves, treedef = jax.tree.flatten(like)
  out, position = [], 0
  for leaf in leaves:
    if not is_float(leaf):
      out.append(zeros(leaf))
      continue
    end = position + int(np.prod(np.shape(leaf), dtype=np.int64))
    part = vector[position:end].reshape(np.shape(leaf))
    out.append(cast(part, _dtype(leaf), saturate=saturate and _dtype(leaf) != vector.dtype))
    position = end
  return jax.tree.unflatten(treedef, out)
