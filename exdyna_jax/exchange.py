"""What goes over the network: one gather of indices, one sum of values, and its cost in bytes."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .varying import AxisName, all_gather, psum

ITEM_BYTES = 4  # header entries, indices and float32 values
HEADER = 2  # this worker's count, and whether its accumulator is finite


class Agreed(NamedTuple):
  """The first message of every worker, the same on all of them."""

  counts: jax.Array  # int32 [n], true counts, also above the capacity; 0 unless finite
  finite: jax.Array  # bool [], no worker has seen a NaN or an Inf
  indices: jax.Array  # int32 [n * capacity], N in empty slots


def capacity_of(size: int, num_workers: int, k: int, factor: float | None) -> int:
  """Slots per worker and message: ``ceil(factor * k / n)``, within ``[1, N]``; None counts as 1."""
  slots = math.ceil((1.0 if factor is None else factor) * k / num_workers)
  return min(max(slots, 1), size)


def gather_first(
  count: jax.Array, finite: jax.Array, indices: jax.Array, axis_name: AxisName
) -> Agreed:
  """Gathers header and indices of all workers in one message."""
  header = jnp.stack([count, finite.astype(jnp.int32)])
  message = all_gather(jnp.concatenate([header, indices]), axis_name)
  message = message.reshape(-1, HEADER + indices.shape[0])
  finite = jnp.all(message[:, 1] > 0)
  counts = jnp.where(finite, message[:, 0], 0)
  return Agreed(counts, finite, message[:, HEADER:].reshape(-1))


def gather_more(indices: jax.Array, axis_name: AxisName) -> jax.Array:
  """Gathers a further message of ``[capacity]`` indices: int32 ``[n * capacity]``."""
  return all_gather(indices, axis_name)


def mean_at(
  acc: jax.Array, indices: jax.Array, finite: jax.Array, axis_name: AxisName, num_workers: int
) -> jax.Array:
  """Mean over the workers of ``acc`` at the agreed ``indices``; 0 unless ``finite``."""
  wide = jnp.promote_types(acc.dtype, jnp.float32)
  values = acc.at[indices].get(mode="fill", fill_value=0).astype(wide)
  values = jnp.where(finite, values, 0)
  return psum(values, axis_name) / num_workers


def message_bytes(num_workers: int, capacity: int, header: int, value_bytes: int) -> float:
  """Bytes that each worker sends for one message of indices and the sum of its values."""
  n = num_workers
  gather = all_gather_bytes(n, header + capacity)
  return gather + all_reduce_bytes(n, n * capacity, value_bytes)


def all_gather_bytes(num_workers: int, items: int, item_bytes: int = ITEM_BYTES) -> float:
  """Bytes that each worker sends in a ring all-gather of ``items`` per worker."""
  return float((num_workers - 1) * items * item_bytes)


def all_reduce_bytes(num_workers: int, items: int, item_bytes: int = ITEM_BYTES) -> float:
  """Bytes that each worker sends in a ring all-reduce of ``items``."""
  return 2.0 * (num_workers - 1) / num_workers * items * item_bytes
