"""Short forms of what is sent: pairs of 16-bit numbers, and ascending indices as such.

Messages are int32 throughout, so that one array holds header, indices and values.
"""

import jax
import jax.numpy as jnp
from jax import lax

HALF = 16  # bits
LOW = 2**HALF - 1
# Below this many plain items, a message is all latency, and packing it only takes time.
WORTHWHILE = 1024


def pack(numbers: jax.Array) -> jax.Array:
  """uint16 ``[m]`` as int32 ``[ceil(m / 2)]``, the second half of the numbers in the high bits."""
  words = packed_length(numbers.shape[0])
  # Not neighbours: an array of pairs would be padded to vectors of 128 numbers on a TPU.
  low, high = numbers[:words], jnp.pad(numbers[words:], (0, 2 * words - numbers.shape[0]))
  word = low.astype(jnp.uint32) | (high.astype(jnp.uint32) << HALF)
  return lax.bitcast_convert_type(word, jnp.int32)


def unpack(words: jax.Array, count: int) -> jax.Array:
  """Inverse of `pack` along the last dimension: uint16 ``[..., count]``."""
  word = lax.bitcast_convert_type(words, jnp.uint32)
  # The barrier: XLA for CPUs would ask for each number of which half it is.
  halves = lax.optimization_barrier([(x & LOW).astype(jnp.uint16) for x in (word, word >> HALF)])
  return jnp.concatenate(halves, axis=-1)[..., :count]


def packed_length(count: int) -> int:
  """int32 items for so many 16-bit numbers."""
  return -(-count // 2)


def is_packed(count: int, size: int) -> bool:
  """Whether `encode` shortens ``count`` indices into a vector of ``size``, by a quarter or more."""
  short = _marks(size) + packed_length(count)
  return count > WORTHWHILE and 4 * short <= 3 * count


def encoded_length(count: int, size: int) -> int:
  """int32 items that `encode` makes of ``count`` indices."""
  return _marks(size) + packed_length(count) if is_packed(count, size) else count


def _marks(size):
  return size >> HALF


def encode(indices: jax.Array, size: int) -> jax.Array:
  """Ascending indices int32 ``[m]``, at most ``size``, as int32 ``[encoded_length(m, size)]``.

  The low 16 bits of each; and for each multiple of 65,536, how many indices lie below it.
  """
  if not is_packed(indices.shape[0], size):
    return indices
  edges = jnp.arange(1, _marks(size) + 1, dtype=jnp.int32) << HALF
  below = jnp.searchsorted(indices, edges).astype(jnp.int32)
  return jnp.concatenate([below, pack((indices & LOW).astype(jnp.uint16))])


def decode(rows: jax.Array, count: int, size: int) -> jax.Array:
  """Inverse of `encode` for each row: int32 ``[n, encoded length]`` -> ``[n, count]``."""
  if not is_packed(count, size):
    return rows
  below, words = jnp.split(rows, [_marks(size)], axis=1)
  slots = jnp.arange(count, dtype=jnp.int32)
  high = jax.vmap(lambda ends: jnp.searchsorted(ends, slots, side="right"))(below)
  return (high.astype(jnp.int32) << HALF) | unpack(words, count).astype(jnp.int32)
