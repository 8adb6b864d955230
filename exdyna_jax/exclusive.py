"""Selection in a range of one's own, by one threshold for all workers that follows the density."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import accumulator, checks, ranks, selection
from .accumulator import Accumulator
from .algorithm import Outcome, Selection
from .density import Density, parse_density, target_at
from .state import State
from .threshold import (
  RULES,
  Memory,
  Rule,
  anchored,
  as_threshold,
  fresh_memory,
  levels_around,
  sample_every,
)
from .varying import AxisName, psum


class Online(NamedTuple):
  """The checked arguments of an algorithm with such a threshold."""

  density: Density
  rule: Rule
  given: float | None  # the first threshold; None lets the rule find it
  at_least_one: bool  # the original's fallback
  one_message: bool  # all is taken before the residual is overwritten
  axis_name: AxisName


def online(
  density: float | Callable[[jax.Array], jax.Array],
  threshold: Any,
  initial_threshold: Any,
  capacity_factor: float | None,
  axis_name: AxisName,
) -> Online:
  """Checks the arguments, which are those of `exdyna`."""
  hint = " A number goes into initial_threshold."
  checks.check_choice("threshold", threshold, tuple(RULES), hint)
  given = checks.check_positive(
    "initial_threshold", initial_threshold, "chosen by the threshold rule"
  )
  wanted = parse_density(density)
  one_message = capacity_factor is not None and wanted.at is None and not wanted.is_one
  return Online(wanted, RULES[threshold], given, threshold == "paper", one_message, axis_name)


def first(mode: Online, size: int) -> tuple[jax.Array, Memory]:
  """The threshold of the first step, and the memory of its rule."""
  value = mode.given or mode.rule.first(target_at(mode.density, jnp.int32(0), size))
  return as_threshold(value), fresh_memory(lost=mode.given is None)


def select(
  mode: Online, acc: Accumulator, state: State, memory: Memory, start: jax.Array, end: jax.Array
) -> Selection:
  """The elements of ``acc[start:end]`` that reach the threshold of this step.

  Args:
    mode: from `online`.
    acc: ``[N]``.
    state: the state before the step.
    memory: that of the threshold's rule.
    start: int32 scalar.
    end: int32 scalar, the end of the own range.

  Returns:
    The selection; its signal is what `follow` needs.
  """
  size, n = accumulator.size(acc), state.boundaries.shape[0] - 1

  def count(levels, **sample):
    return selection.count_reaching(acc, start, end, levels, **sample)

  # Where everything is wanted, everything qualifies; the threshold is put aside.
  used, ladder = as_threshold(0.0), jnp.zeros((0,), jnp.int32)
  if not mode.density.is_one:
    k = target_at(mode.density, state.step, size)
    used = mode.rule.use(state.threshold, memory, lambda x: psum(count(x), mode.axis_name), k)
    used = jnp.where(k < size, used, 0.0)
    if mode.rule.wants_ladder:
      ladder = count(levels_around(used), every=sample_every(size // n), step=state.step)
  window = selection.window_of(size // n) if mode.one_message else None
  hits = selection.find(acc, start, end, used, window=window)
  picked = Selection(
    found=hits.found,
    take=functools.partial(ranks.take, hits),
    threshold=used,
    signal=ladder,
    sums=0 if mode.density.is_one else mode.rule.sums,
  )
  # The original never sends nothing, and the mode that replays it does the same.
  return _at_least_one(picked, start, end, state.step, size) if mode.at_least_one else picked


def follow(
  mode: Online, state: State, memory: Memory, outcome: Outcome
) -> tuple[jax.Array, Memory]:
  """The threshold of the next step, and the memory of its rule."""
  if mode.density.is_one:
    return state.threshold, memory
  size = state.residual.shape[0]
  k, next_k = (target_at(mode.density, state.step + ahead, size) for ahead in (0, 1))
  selected = jnp.sum(outcome.counts, dtype=jnp.int32)
  used = jnp.where(k < size, outcome.threshold, state.threshold)
  ladder = jnp.sum(outcome.signals, axis=0, dtype=jnp.int32)
  if mode.rule.wants_ladder:
    ladder = anchored(ladder, selected)
  return mode.rule.adapt(used, memory, selected, ladder, k, next_k)


def _at_least_one(
  picked: Selection, start: jax.Array, end: jax.Array, step: jax.Array, size: int
) -> Selection:
  """The original's fallback: a worker that finds nothing sends one index, whatever its value."""
  length = end - start
  alone = (picked.found == 0) & (length > 0)
  index = start + step % jnp.maximum(length, 1)

  def take(ranks):
    return jnp.where(alone, jnp.where(ranks.slots == 0, index, size), picked.take(ranks))

  return picked._replace(found=jnp.where(alone, 1, picked.found), take=take)
