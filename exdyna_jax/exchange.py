"""What goes over the network: messages of indices, the sums of their values, the cost in bytes.

A message carries up to so many indices per worker and is followed by the sum of the workers' values
at all of them. The first one also carries a header. A fixed density needs no other: what exceeds
the capacity stays behind. Without a capacity, and under a density schedule, further messages follow
until all is sent that may be; their number comes from the agreed counts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .density import Density, target_at, target_range
from .flat import MAX_SIZE
from .packing import decode, encode, encoded_length
from .values import Wire, traffic
from .varying import AxisName, all_gather

ITEM_BYTES = 4  # header entries and indices
HEADER = 2  # this worker's count, and whether its accumulator is finite

# How many times its share a worker may send, unless the user says otherwise.
CAPACITY_FACTOR = 1.25

# XLA for TPUs gathers messages of whole vectors of 128 numbers; others it adds up instead, zeros
# included, at twice the bytes (`make aot-tpu` shows it). Short ones are not worth the padding.
LANES = 128
SHORT = 8 * LANES

# Further messages grow by this factor until this many are enough: at most a quarter of their slots
# stays empty, and there are few sizes to compile.
GROWTH = 4
MAX_MESSAGES = 16


class Plan(NamedTuple):
  """How much a worker may send in a step, and in which messages."""

  allowed: int | jax.Array  # slots per worker and step
  slots: tuple[int, ...]  # per worker, of the first message and of further ones, ascending


class Agreed(NamedTuple):
  """The first message of every worker, the same on all of them."""

  counts: jax.Array  # int32 [n], true counts, also above the capacity; 0 unless finite
  finite: jax.Array  # bool [], no worker has seen a NaN or an Inf
  signals: jax.Array  # int32 [n, m], what each worker's algorithm sends in the header
  indices: jax.Array  # int32 [n * slots], N in empty slots, and everywhere unless finite


def capacity_of(k: int, size: int, sharers: int, factor: float | None) -> int:
  """Slots of one share of ``k``: ``ceil(factor * k / sharers)`` in ``[1, N]``; None means 1."""
  share = (1.0 if factor is None else factor) * k / sharers
  return max(math.ceil(min(share, size)), 1)


def plan(
  density: Density,
  factor: float | None,
  step: jax.Array,
  size: int,
  num_workers: int,
  *,
  exclusive: bool = True,
) -> Plan:
  """The messages for a density and a capacity factor, see `exdyna`.

  With ``exclusive`` picks, each worker has an equal share of the k indices; else it has k.
  """
  sharers = num_workers if exclusive else 1
  low, high = (capacity_of(k, size, sharers, factor) for k in target_range(density, size))
  # At density 1 all is wanted, so nothing may stay behind.
  if factor is None or density.is_one:
    # Sized for an equal share of the vector: more would take memory, and is rarely needed.
    return Plan(size, _ladder(low, -(-size // num_workers)))
  if density.at is None:
    return Plan(low, (low,))
  k = target_at(density, step, size)
  allowed = jnp.ceil(jnp.asarray(k, jnp.float32) * (factor / sharers)).astype(jnp.int32)
  allowed = jnp.where(k < size, jnp.clip(allowed, 1, size), size)
  return Plan(allowed, _ladder(low, high))


def _ladder(first: int, most: int) -> tuple[int, ...]:
  slots = [first]
  while slots[-1] * MAX_MESSAGES < most:
    slots.append(slots[-1] * GROWTH)
  return tuple(slots)


def gather_first(
  count: jax.Array,
  finite: jax.Array,
  signal: jax.Array | np.ndarray,
  indices: jax.Array,
  size: int,
  axis_name: AxisName,
  common: bool,
) -> Agreed:
  """Gathers header and indices of all workers in one message; no indices if they are ``common``."""
  header = jnp.stack([count, finite.astype(jnp.int32)])
  message = [header, signal] if common else [header, signal, encode(indices, size)]
  rows = gather_rows(jnp.concatenate(message), axis_name)
  header, signals, gathered = jnp.split(rows, [HEADER, HEADER + signal.shape[0]], axis=1)
  # The barrier keeps XLA from asking again for each element that depends on it.
  finite = lax.optimization_barrier(jnp.all(header[:, 1] > 0))
  counts = jnp.where(finite, header[:, 0], 0)
  if not common:
    indices = decode(gathered, indices.shape[0], size).reshape(-1)
  indices = jnp.where(finite, indices, size)
  return Agreed(counts, finite, signals, indices)


def gather_indices(indices: jax.Array, size: int, axis_name: AxisName) -> jax.Array:
  """Ascending ``indices [m]`` of every worker, ``[n * m]``, the same on all of them."""
  rows = gather_rows(encode(indices, size), axis_name)
  return decode(rows, indices.shape[0], size).reshape(-1)


def gather_rows(message: jax.Array, axis_name: AxisName) -> jax.Array:
  """``[m]`` of every worker as ``[n, m]``, the same on all of them."""
  items = message.shape[0]
  padded = jnp.pad(message, (0, padded_length(items) - items))
  return all_gather(padded, axis_name).reshape(-1, padded.shape[0])[:, :items]


def padded_length(items: int) -> int:
  """The length with which a message of so many ``items`` is sent."""
  return items if items < SHORT else -(-items // LANES) * LANES


def send_rest(
  send: Callable[[Any, jax.Array], Any],
  sending: Any,
  indices_in: Callable[[jax.Array], jax.Array],
  plan: Plan,
  largest: jax.Array,
  cost: Callable[[int], float],
) -> tuple[Any, jax.Array | float]:
  """Sends what the first message had no room for.

  Args:
    send: ``(sending, agreed indices) -> sending``: sums, updates and feeds back.
    sending: the carry of ``send`` after the first message.
    indices_in: slots int32 ``[m]`` -> the agreed indices in these slots of all workers.
    plan: with one size of message, nothing follows.
    largest: int32 scalar, agreed: the most indices that a worker sends in this step.
    cost: slots -> the bytes that each worker sends for a message of so many.

  Returns:
    ``sending`` after the last message, and the bytes that each worker has sent with them.
  """
  if len(plan.slots) == 1 and isinstance(plan.allowed, int) and plan.allowed <= plan.slots[0]:
    return sending, 0.0

  def message_of(slots, carry):
    done, sent_bytes, sending = carry
    agreed = indices_in(done + lax.iota(jnp.int32, slots))
    done = jnp.minimum(done, MAX_SIZE - slots) + slots  # no further than an int32 reaches
    return done, sent_bytes + cost(slots), send(sending, agreed)

  rest = largest - plan.slots[0]
  limits = jnp.array([slots * MAX_MESSAGES for slots in plan.slots[:-1]], jnp.int32)
  chosen = jnp.sum(rest > limits)
  carry = (jnp.int32(plan.slots[0]), jnp.float32(0), sending)
  # One loop after the other, of which one runs at most. (Inside of a conditional, XLA would copy
  # residual and update.) `largest` is agreed, so all workers enter and leave a loop together.
  for size, slots in enumerate(plan.slots):
    is_due = functools.partial(lambda size, carry: (chosen == size) & (carry[0] < largest), size)
    carry = lax.while_loop(is_due, functools.partial(message_of, slots), carry)
  _, sent_bytes, sending = carry
  return sending, sent_bytes


def message_bytes(
  num_workers: int,
  slots: int,
  size: int,
  wire: Wire,
  item_bytes: int,
  *,
  header: int = 0,
  common: bool = False,
) -> float:
  """Bytes that each worker sends for a header, indices unless ``common``, and sums of values."""
  n = num_workers
  items = header + (0 if common else encoded_length(slots, size))
  gather = all_gather_bytes(n, padded_length(items))
  return gather + traffic(wire, n, slots if common else n * slots, item_bytes)[1]


def all_gather_bytes(num_workers: int, items: int, item_bytes: int = ITEM_BYTES) -> float:
  """Bytes that each worker sends in a ring all-gather of ``items`` per worker."""
  return float((num_workers - 1) * items * item_bytes)


def all_reduce_bytes(num_workers: int, items: int, item_bytes: int = ITEM_BYTES) -> float:
  """Bytes that each worker sends in a ring all-reduce of ``items``."""
  return 2.0 * (num_workers - 1) / num_workers * items * item_bytes
