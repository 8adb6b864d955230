"""Wrappers of optax that must not stand around a sparsifier. Their state tells them."""

from collections.abc import Callable
from typing import Any

import jax
import optax

WRONG_AROUND: dict[type, str] = {
  optax.ApplyIfFiniteState: (
    "optax.apply_if_finite around a sparsifier lets each worker decide by its own gradients, and"
    " those that skip would leave the others waiting for ever. Drop it: nonfinite='skip' lets all"
    " workers skip a step together, and max_consecutive_skips= limits how often in a row."
  ),
  optax.MultiStepsState: (
    "optax.MultiSteps around a sparsifier would send every micro-step and throw it away. Drop it:"
    " accumulate local gradients in the step, and call update once for all of them; or put it"
    " behind: optax.chain(exdyna(...), optax.MultiSteps(optimizer, m).gradient_transformation())."
  ),
}


def check_wrappers(tree: Any, is_ours: Callable[[Any], bool]) -> None:
  """Raises ValueError if a sparsifier's state lies within the state of a wrong wrapper."""

  def is_wrapper(node):
    return type(node) in WRONG_AROUND

  for node in jax.tree.leaves(tree, is_leaf=is_wrapper):
    if is_wrapper(node) and any(map(is_ours, jax.tree.leaves(node, is_leaf=is_ours))):
      raise ValueError(WRONG_AROUND[type(node)])
