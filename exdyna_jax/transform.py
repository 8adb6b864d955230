"""The one optax transformation: accumulate, select, exchange, feed back, adapt.

An algorithm is a small bundle of pure functions; everything that algorithms share is here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from . import checks, exchange, flat
from .selection import strided_ranks
from .state import State, Stats, check_state, empty_stats
from .varying import (
  AxisName,
  axis_tuple,
  check_axis_name,
  check_bound,
  check_local,
  local_params,
  resolve_workers,
)


class Selection(NamedTuple):
  """What one worker picks."""

  found: jax.Array  # int32 [], how many
  take: Callable[[jax.Array], jax.Array]  # ranks int32 [m] -> indices; N from rank `found` on
  threshold: jax.Array  # the threshold used


class Algorithm(NamedTuple):
  """What differs between sparsifiers."""

  # (N, n) -> threshold and boundaries of the first step
  init: Callable[[int, int], tuple[jax.Array, jax.Array]]
  # (acc [N], state, rank) -> what this worker picks
  select: Callable[[jax.Array, State, jax.Array], Selection]
  # (state, threshold used, counts [n]) -> threshold and boundaries of the next step
  adapt: Callable[[State, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def target_count(density: float, size: int) -> int:
  """How many of ``size`` elements a density asks for: ``k = max(1, int(density * size))``."""
  return max(1, int(density * size))


def sparsifier(
  algorithm: Algorithm,
  density: float,
  axis_name: AxisName,
  *,
  num_workers: int | None,
  capacity_factor: float | None,
  residual_dtype: Any,
  nonfinite: str,
) -> optax.GradientTransformationExtraArgs:
  """Drives ``algorithm`` as an optax transformation; the arguments are those of `exdyna`."""
  density = checks.check_density(density)
  check_axis_name(axis_name)
  if num_workers is not None:
    checks.check_count("num_workers", num_workers)
  checks.check_positive("capacity_factor", capacity_factor, "never truncate")
  checks.check_float_dtype("residual_dtype", residual_dtype)
  checks.check_choice("nonfinite", nonfinite, ("skip", "propagate"))
  # At density 1 all is wanted, so nothing may stay behind.
  unbounded = capacity_factor is None or density == 1
  wide = jnp.promote_types(residual_dtype, jnp.float32)

  def init_fn(params):
    size = flat.flat_size(params)
    # A tree without elements, such as optax's placeholder for parameters, may come from anywhere.
    n, bound = resolve_workers(axis_name, num_workers, needed=size > 0)
    threshold, boundaries = algorithm.init(size, n)
    residual = jnp.zeros((size if bound else n * size,), residual_dtype)
    return State(
      step=jnp.zeros((), jnp.int32),
      residual=local_params(residual, axis_name) if bound else residual,
      threshold=threshold,
      boundaries=boundaries,
      stats=empty_stats(n),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    n = check_bound(axis_name, "update")
    check_local(updates, axis_name)
    size = flat.flat_size(updates)
    check_state(state, size, n)
    if size == 0:
      return flat.unflatten(jnp.zeros((0,)), updates), state
    k = target_count(density, size)
    capacity = exchange.capacity_of(size, n, k, None if unbounded else capacity_factor)

    # Accumulate.
    acc = flat.flatten(updates, wide) + state.residual.astype(wide)
    acc = acc.astype(residual_dtype)
    finite = jnp.all(jnp.isfinite(acc)) if nonfinite == "skip" else jnp.asarray(True)

    # Select.
    picked = algorithm.select(acc, state, lax.axis_index(axis_tuple(axis_name)))
    slots = lax.iota(jnp.int32, capacity)
    ranks = slots if unbounded else strided_ranks(picked.found, capacity)

    # Exchange, and feed back what is not sent.
    agreed = exchange.gather_first(picked.found, finite, picked.take(ranks), axis_name)

    def send(residual, update, indices):
      mean = exchange.mean_at(residual, indices, agreed.finite, axis_name, n)
      return _clear(residual, indices), update.at[indices].set(mean, mode="drop")

    def send_more(carry):
      done, residual, update = carry
      indices = exchange.gather_more(picked.take(slots + done), axis_name)
      return done + capacity, *send(residual, update, indices)

    residual, update = send(acc, jnp.zeros((size,), wide), agreed.indices)
    done = jnp.int32(capacity)
    if unbounded:
      # The counts are agreed, so all workers leave this loop together.
      done, residual, update = lax.while_loop(
        lambda carry: carry[0] < jnp.max(agreed.counts), send_more, (done, residual, update)
      )

    # Adapt. A skipped step leaves everything but the statistics as it was.
    threshold, boundaries = algorithm.adapt(state, picked.threshold, agreed.counts)
    new = State(optax.safe_increment(state.step), residual, threshold, boundaries, state.stats)
    if nonfinite == "skip":
      new = jax.tree.map(lambda new, old: jnp.where(agreed.finite, new, old), new, state)
    header = exchange.message_bytes(n, 0, exchange.HEADER, 0)
    message = exchange.message_bytes(n, capacity, 0, wide.itemsize)
    stats = _stats(
      agreed,
      sent=jnp.minimum(agreed.counts, done),
      size=size,
      threshold=picked.threshold,
      bytes_sent=header + (done // capacity).astype(jnp.float32) * message,
      skipped=state.stats.skipped,
    )
    return flat.unflatten(update, updates), new._replace(stats=stats)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _clear(residual: jax.Array, indices: jax.Array) -> jax.Array:
  """``residual`` with zeros at ``indices``, in place."""
  # The zeros are computed from the values that are read: a constant would let XLA order the write
  # before the read of the values to be sent, which costs a copy of the whole vector.
  value = residual.at[indices].get(mode="fill", fill_value=0)
  return residual.at[indices].set(jnp.where(value > jnp.inf, 1, 0).astype(value.dtype), mode="drop")


def _stats(
  agreed: exchange.Agreed,
  *,
  sent: jax.Array,
  size: int,
  threshold: jax.Array,
  bytes_sent: jax.Array,
  skipped: jax.Array,
) -> Stats:
  total = jnp.sum(agreed.counts, dtype=jnp.int32)
  selected = jnp.sum(sent, dtype=jnp.int32)
  largest = jnp.max(agreed.counts).astype(jnp.float32)
  padding = agreed.counts.shape[0] * largest / jnp.maximum(total, 1)
  return Stats(
    density=selected.astype(jnp.float32) / size,
    selected=selected,
    counts=agreed.counts,
    threshold_used=threshold,
    padding_ratio=jnp.where(total > 0, padding, 1.0),
    overflow=total - selected,
    skipped=skipped + ~agreed.finite,
    bytes_sent=bytes_sent,
  )
