"""What an algorithm is: a small bundle of pure functions that `transform` drives."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .accumulator import Accumulator
from .ranks import Ranks
from .state import State
from .threshold import as_threshold

NO_SIGNAL = np.zeros(0, np.int32)


class Selection(NamedTuple):
  """What one worker picks."""

  found: jax.Array  # int32 [], how many
  take: Callable[[Ranks], jax.Array]  # the indices of these hits, int32 [m]; N in empty slots
  # The threshold used, agreed. None: each worker has its own, the first number of its signal.
  threshold: jax.Array | None
  # int32 [m], the algorithm's own numbers, for `Algorithm.adapt`
  signal: jax.Array | np.ndarray = NO_SIGNAL
  sums: int = 0  # how many numbers were summed over the workers in order to select


class Outcome(NamedTuple):
  """What all workers know after the exchange."""

  threshold: jax.Array  # the threshold used; the mean of the workers' own ones
  counts: jax.Array  # int32 [n], picked by each worker
  sent: jax.Array  # int32 [n], of these, sent
  signals: jax.Array  # int32 [n, m], of each worker
  seen: Any  # sum over the messages of `Algorithm.observe`


def no_partitions(n: int) -> jax.Array:
  """The boundaries where the vector is not shared out, int32 ``[n + 1]``: zeros."""
  return jnp.zeros((n + 1,), jnp.int32)


def _init_nothing(size, n):
  return as_threshold(0.0), no_partitions(n), ()


def _observe_nothing(indices, size, n):
  return jnp.zeros((0,))


def _adapt_nothing(state, outcome):
  return state.threshold, state.boundaries, state.memory


class Algorithm(NamedTuple):
  """What differs between sparsifiers."""

  # (acc [N], state, rank) -> what this worker picks
  select: Callable[[Accumulator, State, jax.Array], Selection]
  # (N, n) -> threshold, boundaries and memory of the first step
  init: Callable[[int, int], tuple[jax.Array, jax.Array, Any]] = _init_nothing
  # (indices of a message, N, n) -> arrays to be summed over the messages, for `adapt`
  observe: Callable[[jax.Array, int, int], Any] = _observe_nothing
  # (state, outcome) -> threshold, boundaries and memory of the next step
  adapt: Callable[[State, Outcome], tuple[jax.Array, jax.Array, Any]] = _adapt_nothing
  # "exclusive": no index is picked by two workers; about k / n each.
  # "overlapping": workers pick about k each and may pick the same.
  # "common": `take` returns the same on all workers, so that indices need not be gathered.
  picks: Literal["exclusive", "overlapping", "common"] = "exclusive"
  # Whether `take` returns ascending indices, as messages have them.
  ascending: bool = True
  # how many numbers `take` sums over the workers for each slot
  sums_per_slot: int = 0
