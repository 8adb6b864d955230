"""Which elements of a range reach the threshold: dynamic range, static shapes.

The range is read once, in chunks, and one bit an element is kept; the cost follows the length of
the range, not of the vector. Afterwards the index of the j-th hit is found from the bits alone,
for as many j as are asked for, without a loop over hits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .integers import mul_div

BITS = 32  # elements per word of the mask
ROW = 32  # words per row; prefix sums are kept within rows and over rows
ROW_SIZE = BITS * ROW  # elements per row
CHUNK = 64 * ROW_SIZE  # elements per step of the loop: 256 kB of float32, within any L2 cache

OUTSIDE = -1.0  # no magnitude
GOLDEN = np.uint32(2654435769)  # 2**32 over the golden ratio
_BIT = np.uint32(1) << np.arange(BITS, dtype=np.uint32)


class Hits(NamedTuple):
  """The hits of a range, as bits."""

  words: jax.Array  # uint32 [chunks, words of a chunk], bit i of a word = its i-th element
  before: jax.Array  # int32 [rows, ROW], hits of the row up to and with this word
  total: jax.Array  # int32 [rows], hits up to and with this row
  first: jax.Array  # int32 [chunks], the element of a chunk's first bit


def find(acc: jax.Array, start: jax.Array, end: jax.Array, threshold: jax.Array) -> Hits:
  """Marks the elements of ``acc[start:end]`` that are not below ``threshold`` in magnitude.

  NaN is not below anything: it is marked, and shows itself, instead of sleeping for ever.

  Args:
    acc: ``[N]``, any float dtype; compared in float32.
    start: int32 scalar.
    end: int32 scalar, ``0 <= start <= end <= N``.
    threshold: scalar, any float dtype; compared in float32.

  Returns:
    The hits; ``count`` says how many, ``take`` where.
  """
  threshold = threshold.astype(jnp.float32)

  def pack(words, j, magnitude):
    word = _pack(magnitude, threshold)
    return lax.dynamic_update_slice(words, word[None], (j, jnp.int32(0)))

  chunk = _chunk_size(acc)
  chunks = -(-acc.shape[0] // chunk)
  # Zeros "like acc" vary over the mesh as acc does, which the loop's carry must.
  words = jnp.zeros_like(acc, jnp.uint32, shape=(chunks, chunk // BITS))
  words = _over_chunks(acc, start, end, pack, words)
  per_word = lax.population_count(words).astype(jnp.int32).reshape(-1, ROW)
  before = jnp.cumsum(per_word, axis=1, dtype=jnp.int32)
  total = jnp.cumsum(before[:, -1], dtype=jnp.int32)
  last = max(acc.shape[0] - chunk, 0)
  first = jnp.minimum(start + lax.iota(jnp.int32, chunks) * chunk, last)
  return Hits(words, before, total, first)


def count_reaching(
  acc: jax.Array, start: jax.Array, end: jax.Array, levels: jax.Array
) -> jax.Array:
  """How many elements of ``acc[start:end]`` are not below each of ``levels``.

  Arguments as in `find`, but with ``levels`` float32 ``[m]``; returns int32 ``[m]``.
  """

  def add(counts, j, magnitude):
    del j
    # Packing and counting bits takes half the time of counting booleans.
    words = _pack(magnitude, levels[:, None, None])
    return counts + jnp.sum(lax.population_count(words), axis=1, dtype=jnp.int32)

  zeros = jnp.zeros_like(acc, jnp.int32, shape=levels.shape)
  return _over_chunks(acc, start, end, add, zeros)


def _pack(magnitude: jax.Array, threshold: jax.Array) -> jax.Array:
  """One bit an element, set unless the element is below the threshold: uint32 ``[..., words]``."""
  magnitude = magnitude.reshape(-1, BITS)
  hit = ~(magnitude < threshold) & (magnitude != OUTSIDE)
  return jnp.sum(jnp.where(hit, _BIT, np.uint32(0)), axis=-1, dtype=jnp.uint32)


def _chunk_size(acc: jax.Array) -> int:
  return min(CHUNK, -(-acc.shape[0] // ROW_SIZE) * ROW_SIZE)


def _over_chunks(acc, start, end, step, carry):
  """Folds ``step(carry, j, magnitude)`` over the chunks of ``acc[start:end]``.

  ``magnitude`` is float32 ``[chunk]``, and ``OUTSIDE`` where the chunk exceeds the range.
  """
  chunk = _chunk_size(acc)
  if acc.shape[0] < chunk:
    acc = jnp.pad(acc, (0, chunk - acc.shape[0]))
  last = acc.shape[0] - chunk
  offset = lax.iota(jnp.int32, chunk)
  length = end - start
  trips = length // chunk + (length % chunk > 0)

  def body(state):
    j, carry = state
    # The last chunk is moved back to fit; what the one before it has seen is masked out.
    wanted = start + j * chunk
    low = jnp.minimum(wanted, last)
    position = low + offset
    inside = (position >= wanted) & (position < end)
    value = jnp.abs(lax.dynamic_slice(acc, (low,), (chunk,)).astype(jnp.float32))
    return j + 1, step(carry, j, jnp.where(inside, value, OUTSIDE))

  return lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), carry))[1]


def count(hits: Hits) -> jax.Array:
  """How many hits there are, int32."""
  return hits.total[-1]


def strided_ranks(
  slots: jax.Array, count: jax.Array, allowed: int | jax.Array, step: jax.Array
) -> jax.Array:
  """Rank of the hit that goes into each slot, if ``allowed`` of ``count`` hits may be sent.

  All hits if they fit, else an even stride, ``floor((slot * count + phase) / allowed)``. Keeping
  the first ones would starve the end of the range, and a stride without a phase, which differs from
  step to step, would starve what lies between its hits.

  Args:
    slots: int32 ``[m]``.
    count: int32 scalar.
    allowed: int32 scalar, at least 1.
    step: int32 scalar.

  Returns:
    int32 ``[m]``; ``count`` and above for empty slots.
  """
  # Multiples of the golden ratio fill [0, 1) evenly, however many there are.
  fraction = (step.astype(jnp.uint32) * GOLDEN) >> 8
  phase = (fraction.astype(jnp.float32) / 2**24 * count.astype(jnp.float32)).astype(jnp.int32)
  excess = jnp.maximum(count - allowed, 0)
  phase = jnp.where(excess > 0, jnp.clip(phase, 0, count - 1), 0)
  # slot * count / allowed = slot + slot * excess / allowed
  rest = mul_div(slots, excess % allowed, allowed, phase)
  ranks = slots + slots * (excess // allowed) + rest
  return jnp.where((slots >= 0) & (slots < allowed), jnp.minimum(ranks, slots + excess), count)


def take(hits: Hits, ranks: jax.Array, size: int) -> jax.Array:
  """Elements of the hits with these ranks, ascending; ``size`` where there is no such hit.

  Args:
    hits: from `find`.
    ranks: int32 ``[m]``, 0 for the first hit.
    size: N, the mark of an empty slot.

  Returns:
    int32 ``[m]``.
  """
  found = ranks < count(hits)
  rank = jnp.minimum(ranks, jnp.maximum(count(hits) - 1, 0))
  row = _descend(hits.total, jnp.zeros_like(rank), rank, hits.total.shape[0])
  rank = rank - (hits.total[row] - hits.before[row, -1])
  before = hits.before.reshape(-1)
  word = _descend(before, row * ROW, rank, ROW)
  rank = rank - jnp.where(word > row * ROW, before[jnp.maximum(word - 1, 0)], 0)
  chunk, inside = jnp.divmod(word, hits.words.shape[1])
  index = hits.first[chunk] + inside * BITS + _nth_bit(hits.words[chunk, inside], rank)
  return jnp.where(found, index, size)


def _descend(sums: jax.Array, first: jax.Array, rank: jax.Array, length: int) -> jax.Array:
  """The position, of ``length`` from ``first`` on, where the running sum first exceeds ``rank``.

  A binary search, unrolled: ``jnp.searchsorted`` fails on meshes that are manual in part.
  """
  position, last = first, first + length - 1
  step = 1 << (length - 1).bit_length()
  while step := step // 2:
    there = jnp.minimum(position + step, last)
    position = jnp.where(sums[there - 1] <= rank, there, position)
  return position


def _nth_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
  """Position of the set bit of ``word`` that has ``rank`` set bits below it, by halving."""
  position = jnp.zeros_like(rank)
  shift = BITS // 2
  while shift:
    low = word & np.uint32((1 << shift) - 1)
    below = lax.population_count(low).astype(jnp.int32)
    upper = rank >= below
    rank = jnp.where(upper, rank - below, rank)
    word = jnp.where(upper, word >> np.uint32(shift), low)
    position = position + jnp.where(upper, shift, 0)
    shift //= 2
  return position
