"""The one optax transformation: accumulate, select, exchange, feed back, adapt.

An algorithm is a small bundle of pure functions; everything that algorithms share is here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import accumulator, checks, exchange, flat
from .accumulator import Accumulator
from .density import Density
from .ranks import Ranks, strided
from .state import State, Stats, check_state, empty_stats
from .varying import (
  AxisName,
  axis_tuple,
  check_axis_name,
  check_bound,
  check_local,
  check_num_workers,
  local_params,
  resolve_workers,
)


class Selection(NamedTuple):
  """What one worker picks."""

  found: jax.Array  # int32 [], how many
  take: Callable[[Ranks], jax.Array]  # the indices of these hits, int32 [m]; N in empty slots
  threshold: jax.Array  # the threshold used, agreed
  signal: jax.Array  # int32 [m], the algorithm's own numbers, summed over the workers
  sums: int  # how many numbers were summed over the workers in order to select


class Outcome(NamedTuple):
  """What all workers know after the exchange."""

  threshold: jax.Array  # the threshold used
  counts: jax.Array  # int32 [n], picked by each worker
  sent: jax.Array  # int32 [n], of these, sent
  signal: jax.Array  # int32 [m], summed over the workers
  seen: Any  # sum over the messages of `Algorithm.observe`


class Algorithm(NamedTuple):
  """What differs between sparsifiers."""

  # (N, n) -> threshold, boundaries and memory of the first step
  init: Callable[[int, int], tuple[jax.Array, jax.Array, Any]]
  # (acc [N], state, rank) -> what this worker picks
  select: Callable[[Accumulator, State, jax.Array], Selection]
  # (indices of a message, N, n) -> arrays to be summed over the messages, for `adapt`
  observe: Callable[[jax.Array, int, int], Any]
  # (state, outcome) -> threshold, boundaries and memory of the next step
  adapt: Callable[[State, Outcome], tuple[jax.Array, jax.Array, Any]]


def sparsifier(
  algorithm: Algorithm,
  density: Density,
  axis_name: AxisName,
  *,
  num_workers: int | None,
  capacity_factor: float | None,
  residual_dtype: Any,
  nonfinite: str,
) -> optax.GradientTransformationExtraArgs:
  """Drives ``algorithm`` as an optax transformation; the arguments are those of `exdyna`."""
  check_axis_name(axis_name)
  if num_workers is not None:
    num_workers = checks.check_count("num_workers", num_workers)
  capacity_factor = checks.check_positive("capacity_factor", capacity_factor, "never truncate")
  residual_dtype = checks.check_float_dtype("residual_dtype", residual_dtype)
  checks.check_choice("nonfinite", nonfinite, ("skip", "propagate"))
  skip = nonfinite == "skip"
  wide = jnp.promote_types(residual_dtype, jnp.float32)

  def init_fn(params):
    size = flat.flat_size(params)
    # A tree without elements, such as optax's placeholder for parameters, may come from anywhere.
    n, bound = resolve_workers(axis_name, num_workers, needed=size > 0)
    threshold, boundaries, memory = algorithm.init(size, n)
    residual = jnp.zeros((size if bound else n * size,), residual_dtype)
    return State(
      step=jnp.zeros((), jnp.int32),
      residual=local_params(residual, axis_name) if bound else residual,
      threshold=threshold,
      boundaries=boundaries,
      memory=memory,
      stats=empty_stats(n),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    n = check_bound(axis_name, "update")
    check_num_workers(axis_name, num_workers, n)
    check_local(updates, axis_name)
    size = flat.flat_size(updates)
    check_state(state, size, n)
    if size == 0:
      return flat.unflatten(jnp.zeros((0,)), updates), state

    # Accumulate. Finite gradients never make an infinite residual, which could never be sent.
    grads = flat.flatten(updates, wide)
    acc = accumulator.accumulate(grads, state.residual, saturate=skip)
    finite = flat.all_finite(grads) if skip else jnp.asarray(True)
    if not skip:
      acc = accumulator.made(accumulator.whole(acc))

    # Select.
    picked = algorithm.select(acc, state, lax.axis_index(axis_tuple(axis_name)))
    plan = exchange.plan(density, capacity_factor, state.step, size, n)

    def indices_in(slots):
      return picked.take(strided(slots, picked.found, plan.allowed, state.step))

    # Exchange, and feed back what is not sent.
    slots = lax.iota(jnp.int32, plan.slots[0])
    agreed = exchange.gather_first(
      picked.found, finite, picked.signal, indices_in(slots), size, axis_name
    )

    # The old residual, which a skipped step keeps, is overwritten only now that all have voted.
    residual = accumulator.whole(acc)
    if skip:
      residual = jnp.where(agreed.finite, residual, state.residual)

    def send(sending, indices):
      residual, update, seen = sending
      mean = exchange.mean_at(residual, indices, axis_name, n)
      mean = flat.cast(mean, wide, saturate=skip)
      update = update.at[indices].set(mean, mode="drop")
      seen = jax.tree.map(jnp.add, seen, algorithm.observe(indices, size, n))
      return _clear(residual, indices), update, seen

    nothing_seen = jax.tree.map(jnp.zeros_like, algorithm.observe(slots[:0], size, n))
    sending = send((residual, jnp.zeros((size,), wide), nothing_seen), agreed.indices)
    sent = jnp.minimum(agreed.counts, plan.allowed)
    sending, more_bytes = exchange.send_rest(
      send, sending, indices_in, plan, jnp.max(sent), axis_name, n, wide.itemsize
    )
    residual, update, seen = sending

    # Adapt. A skipped step leaves everything but the statistics as it was.
    outcome = Outcome(picked.threshold, agreed.counts, sent, agreed.signal, seen)
    threshold, boundaries, memory = algorithm.adapt(state, outcome)
    step = optax.safe_increment(state.step)
    small = (step, threshold, boundaries, memory)
    if skip:
      old = (state.step, state.threshold, state.boundaries, state.memory)
      small = jax.tree.map(lambda new, old: jnp.where(agreed.finite, new, old), small, old)
    step, threshold, boundaries, memory = small
    header = exchange.HEADER + picked.signal.shape[0]
    stats = _stats(
      outcome,
      size=size,
      skipped=state.stats.skipped + ~agreed.finite,
      bytes_sent=exchange.message_bytes(n, plan.slots[0], wide.itemsize, header)
      + exchange.all_reduce_bytes(n, picked.sums)
      + more_bytes,
    )
    new = State(step, residual, threshold, boundaries, memory, stats)
    return flat.unflatten(update, updates, saturate=skip), new

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _clear(residual: jax.Array, indices: jax.Array) -> jax.Array:
  """``residual`` with zeros at ``indices``, in place."""
  # The zeros are computed from the values that are read: a constant would let XLA order the write
  # before the read of the values to be sent, which costs a copy of the whole vector.
  value = residual.at[indices].get(mode="fill", fill_value=0)
  return residual.at[indices].set(jnp.where(value > jnp.inf, 1, 0).astype(value.dtype), mode="drop")


def _stats(
  outcome: Outcome, *, size: int, skipped: jax.Array, bytes_sent: jax.Array | float
) -> Stats:
  counts = outcome.counts
  total = jnp.sum(counts, dtype=jnp.int32)
  selected = jnp.sum(outcome.sent, dtype=jnp.int32)
  padding = counts.shape[0] * jnp.max(counts).astype(jnp.float32) / jnp.maximum(total, 1)
  return Stats(
    density=selected.astype(jnp.float32) / size,
    selected=selected,
    counts=counts,
    threshold_used=outcome.threshold,
    padding_ratio=jnp.where(total > 0, padding, 1.0),
    overflow=total - selected,
    skipped=skipped,
    bytes_sent=jnp.asarray(bytes_sent, jnp.float32),
  )
