"""The one optax transformation: accumulate, select, exchange, feed back, adapt.

What differs between algorithms is in `Algorithm`; everything that they share is here.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import accumulator, checks, exchange, flat, masking, packing, values
from .algorithm import Algorithm, Outcome
from .density import Density
from .integers import from_bits, saturated_sum
from .ranks import strided
from .state import State, Stats, check_memory, check_state, empty_residual, empty_stats
from .threshold import as_threshold
from .varying import (
  AxisName,
  axis_tuple,
  check_axis_name,
  check_bound,
  check_local,
  check_num_workers,
  check_split,
  check_whole,
  other_axes,
  psum,
  resolve_workers,
  vary,
)


class Options(NamedTuple):
  """What all sparsifiers take, as `exdyna` documents it."""

  num_workers: int | None
  capacity_factor: float | None
  residual_dtype: Any
  nonfinite: str
  dense_mask: Any
  max_consecutive_skips: int | None
  wire: values.Wire = values.Wire()


def sparsifier(
  algorithm: Algorithm, density: Density, axis_name: AxisName, options: Options
) -> optax.GradientTransformationExtraArgs:
  """Drives ``algorithm`` as an optax transformation."""
  num_workers, capacity_factor, residual_dtype, nonfinite, dense_mask, max_skips, wire = options
  check_axis_name(axis_name)
  if num_workers is not None:
    num_workers = checks.check_count("num_workers", num_workers)
  capacity_factor = checks.check_positive("capacity_factor", capacity_factor, "never truncate")
  residual_dtype = checks.check_float_dtype("residual_dtype", residual_dtype)
  checks.check_choice("nonfinite", nonfinite, ("skip", "propagate"))
  skip = nonfinite == "skip"
  if max_skips is not None:
    max_skips = checks.check_count("max_consecutive_skips", max_skips)
    if not skip:
      raise ValueError(
        f"max_consecutive_skips={max_skips} needs nonfinite='skip', but it is {nonfinite!r}, under"
        " which no step is skipped. Leave one of them out."
      )
  wide = checks.default_promotion(jnp.promote_types)(residual_dtype, jnp.float32)
  overlapping, common = (algorithm.picks == picks for picks in ("overlapping", "common"))

  @checks.default_promotion
  def init_fn(params):
    size = masking.sparse_size(masking.split(params, dense_mask))
    # A tree without elements, such as optax's placeholder for parameters, may come from anywhere.
    n, bound = resolve_workers(axis_name, num_workers, needed=size > 0)
    threshold, boundaries, memory = algorithm.init(size, n)
    state = State(
      step=jnp.zeros((), jnp.int32),
      residual=empty_residual(axis_name, size, n, bound, residual_dtype),
      threshold=threshold,
      boundaries=boundaries,
      memory=memory,
      stats=empty_stats(n),
    )
    return vary(state, other_axes(params, axis_name)) if bound else state

  @checks.default_promotion
  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    n = check_bound(axis_name, "update")
    check_num_workers(axis_name, num_workers, n)
    check_whole(updates)
    sparse, dense = masking.split(updates, dense_mask)
    size = masking.sparse_size((sparse, dense))
    check_state(state, size, n, residual_dtype)
    check_local(updates, axis_name)
    check_memory(state, functools.partial(algorithm.init, size, n))
    if size == 0:
      return flat.unflatten(jnp.zeros((0,)), updates), state

    # What the workers agree on may still differ along other axes: no constant enters a loop there.
    others = other_axes((updates, state), axis_name)
    check_split(updates, others, axis_name)
    state = vary(state, others)

    # Accumulate. Finite gradients never make an infinite residual, which could never be sent.
    grads, dense_grads = (flat.flatten(tree, wide) for tree in (sparse, dense))
    layers = flat.leaf_sizes(sparse)
    acc = accumulator.accumulate(grads, state.residual, layers, saturate=skip)
    finite = flat.all_finite(grads) & flat.all_finite(dense_grads) if skip else jnp.asarray(True)
    if not skip:
      acc = accumulator.made(accumulator.whole(acc), layers)

    # Select.
    picked = algorithm.select(acc, state, lax.axis_index(axis_tuple(axis_name)))
    plan = exchange.plan(
      density, capacity_factor, state.step, size, n, exclusive=algorithm.picks == "exclusive"
    )

    def mine_in(slots):
      mine = picked.take(strided(slots, picked.found, plan.allowed, state.step))
      ordered = common or algorithm.ascending or not packing.is_packed(slots.shape[0], size)
      return mine if ordered else jnp.sort(mine)

    def indices_in(slots):
      mine = mine_in(slots)
      return mine if common else exchange.gather_indices(mine, size, axis_name)

    def cost(slots, header=0):
      message = exchange.message_bytes(
        n, slots, size, wire, wide.itemsize, header=header, common=common
      )
      return message + exchange.all_reduce_bytes(n, slots * algorithm.sums_per_slot)

    # Exchange, and feed back what is not sent.
    slots = lax.iota(jnp.int32, plan.slots[0])
    agreed = exchange.gather_first(
      picked.found, finite, picked.signal, mine_in(slots), size, axis_name, common
    )
    # What one worker has picked for all, all have picked.
    counts = jnp.full_like(agreed.counts, jnp.max(agreed.counts)) if common else agreed.counts

    # The old residual, which a skipped step keeps, is overwritten only now that all have voted.
    residual = accumulator.whole(acc)
    if skip:
      residual = jnp.where(agreed.finite, residual, state.residual)

    def send(sending, indices):
      residual, update, seen, chosen = sending
      if overlapping:
        # What an earlier message has sent is zero by now.
        again = chosen.at[indices].get(mode="fill", fill_value=False)
        indices = jnp.where(again, size, indices)
        chosen = chosen.at[indices].set(True, mode="drop")
      mine = residual.at[indices].get(mode="fill", fill_value=0)
      sums, kept = values.sum_values(mine.astype(wide), wire, axis_name, n)
      update = update.at[indices].set(flat.mean_of(sums, n, saturate=skip), mode="drop")
      seen = jax.tree.map(jnp.add, seen, algorithm.observe(indices, size, n))
      left = None if kept is None else flat.cast(kept, residual.dtype, saturate=skip)
      return _leave(residual, indices, mine, left), update, seen, chosen

    nothing_seen = jax.tree.map(jnp.zeros_like, algorithm.observe(slots[:0], size, n))
    # Which elements are sent, where their number does not follow from the counts.
    chosen = jnp.zeros((size if overlapping else 0,), bool)
    # An update in which nothing is sent: zeros, until too many steps in a row have been skipped.
    skips = jnp.where(agreed.finite, 0, optax.safe_increment(state.stats.consecutive_skips))
    nothing = jnp.float32(0) if max_skips is None else jnp.where(skips > max_skips, jnp.nan, 0.0)
    sending = (residual, jnp.full((size,), nothing, wide), nothing_seen, chosen)
    sending = send(sending, agreed.indices)
    sent = jnp.minimum(counts, plan.allowed)
    sending, more_bytes = exchange.send_rest(send, sending, indices_in, plan, jnp.max(sent), cost)
    residual, update, seen, chosen = sending
    if overlapping:
      selected = jnp.sum(chosen, dtype=jnp.int32)
    else:
      selected = sent[0] if common else jnp.sum(sent, dtype=jnp.int32)

    # The dense leaves.
    dense_mean = jnp.zeros((0,), wide)
    if dense_grads.size:
      mean = flat.mean_of(psum(dense_grads, axis_name), n, saturate=skip)
      dense_mean = jnp.where(agreed.finite, mean, nothing.astype(wide))

    # Adapt. A skipped step leaves everything but the statistics as it was.
    used = picked.threshold
    if used is None:
      used = as_threshold(jnp.mean(from_bits(agreed.signals[:, 0])))
      used = jnp.where(agreed.finite, used, state.threshold)
    outcome = Outcome(used, counts, sent, agreed.signals, seen)
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
      selected=selected,
      skipped=state.stats.skipped + ~agreed.finite,
      consecutive_skips=skips,
      bytes_sent=cost(plan.slots[0], header)
      + exchange.all_reduce_bytes(n, picked.sums)
      + exchange.all_reduce_bytes(n, dense_grads.size, wide.itemsize)
      + more_bytes,
    )
    new = State(step, residual, threshold, boundaries, memory, stats)
    updates = masking.merge(
      flat.unflatten(update, sparse, saturate=skip),
      flat.unflatten(dense_mean, dense, saturate=skip),
    )
    return updates, vary(new, others)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _leave(
  residual: jax.Array, indices: jax.Array, sent: jax.Array, kept: jax.Array | None
) -> jax.Array:
  """``residual`` with what is ``kept``, or zeros, at the ``indices`` of what is ``sent``."""
  # The zeros are computed from the values that are read: a constant would let XLA order the write
  # before the read of the values to be sent, which costs a copy of the whole vector.
  left = jnp.where(sent > jnp.inf, 1, 0) if kept is None else kept
  return residual.at[indices].set(left.astype(residual.dtype), mode="drop")


def _stats(
  outcome: Outcome,
  *,
  size: int,
  selected: jax.Array,
  skipped: jax.Array,
  consecutive_skips: jax.Array,
  bytes_sent: jax.Array | float,
) -> Stats:
  counts = outcome.counts
  # Not an int32: where workers pick the same, the sum of their counts may exceed its range.
  total = jnp.sum(counts, dtype=jnp.float32)
  padding = counts.shape[0] * jnp.max(counts).astype(jnp.float32) / jnp.maximum(total, 1)
  return Stats(
    density=selected.astype(jnp.float32) / size,
    selected=selected,
    counts=counts,
    threshold_used=outcome.threshold,
    padding_ratio=jnp.where(total > 0, padding, 1.0),
    overflow=saturated_sum(counts - outcome.sent),
    skipped=skipped,
    consecutive_skips=consecutive_skips,
    bytes_sent=jnp.asarray(bytes_sent, jnp.float32),
  )
