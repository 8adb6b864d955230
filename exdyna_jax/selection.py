"""Which elements of a range reach the threshold: dynamic range, static shapes.

The range is read once, in chunks, and one bit an element is kept; the cost follows the length of
the range, not of the vector. Afterwards the j-th hit is found from the bits alone, for as many j as
are asked for; see `ranks`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import accumulator
from .accumulator import Accumulator

BITS = 32  # elements per word of the mask
ROW_SIZE = BITS * BITS  # elements per row: as many words as a word has bits
# Elements per step of the loop: 512 kB of float32, about an L2 cache, and little of a TPU's memory,
# where words of 32 are padded to 128; on GPUs enough to make the start of a step cheap.
CHUNK = 128 * ROW_SIZE
GPU_CHUNK = 1024 * ROW_SIZE

_BIT = np.uint32(1) << np.arange(BITS, dtype=np.uint32)

# Longer ranges than so many equal shares are rare; a small window saves nothing.
WINDOW_SHARES = 4
MIN_WINDOW = 2**18


class Hits(NamedTuple):
  """The hits of a range, as bits."""

  words: jax.Array  # uint32 [words], bit i of a word = its i-th element
  found: jax.Array  # int32 [], how many bits are set
  start: jax.Array  # int32 [], the element of the first bit
  moved_from: jax.Array  # int32 [], from this bit on,
  moved_by: jax.Array  # int32 [], bits belong to elements so much further to the left
  size: int  # N
  # Whether the range is longer than the window, and what finds its hits then.
  is_long: jax.Array | None = None
  all_of_them: Callable[[], "Hits"] | None = None


def find(
  acc: Accumulator,
  start: jax.Array,
  end: jax.Array,
  threshold: jax.Array,
  *,
  window: int | None = None,
  chunk: int | None = None,
) -> Hits:
  """Marks the elements of ``acc[start:end]`` that are not below ``threshold`` in magnitude.

  NaN is not below anything: it is marked, and shows itself, instead of sleeping for ever.

  Args:
    acc: ``[N]``, any float dtype; compared in float32.
    start: int32 scalar.
    end: int32 scalar, ``0 <= start <= end <= N``.
    threshold: scalar, any float dtype; compared in float32.
    window: elements. A longer range may come, but is read twice instead of once. The words
      for a window are what costs time and memory, whatever the length of the range. None for N,
      which also must be taken where ``acc`` is overwritten before `ranks.take` is called.
    chunk: elements that are read at once; None chooses by platform.

  Returns:
    The hits; `ranks.take` says where they are.
  """
  threshold = threshold.astype(jnp.float32)
  size = accumulator.size(acc)
  if window is not None and window < size:
    return _find_within(acc, start, end, threshold, window, chunk)
  return _find(acc, start, end, threshold, size, chunk)


def window_of(share: int) -> int:
  """The window for ranges that are equal shares of a vector, more or less."""
  return max(WINDOW_SHARES * share, MIN_WINDOW)


def _find_within(acc, start, end, threshold, window, chunk):
  """`find` for a range that is not longer than the ``window``, unless ``is_long``."""
  is_long = end - start > window
  hits = _find(acc, start, jnp.where(is_long, start, end), threshold, window, chunk)

  def count():
    return count_reaching(acc, start, end, threshold[None], chunk=chunk)[0]

  found = lax.cond(is_long, count, lambda: hits.found)
  everything = functools.partial(_find, acc, start, end, threshold, hits.size, chunk)
  return hits._replace(found=found, is_long=is_long, all_of_them=everything)


def _find(acc, start, end, threshold, window, chunk):
  size = accumulator.size(acc)
  num_words = max(_num_words(size, window, c) for c in (CHUNK, GPU_CHUNK, chunk or 1))

  def mark(chunk, start, end, threshold, *parts):
    def keep(words, j, reached):
      # The barrier keeps the packing, a loop over bits, out of the write, a loop over words.
      new = lax.optimization_barrier(pack(reached(threshold)))
      return lax.dynamic_update_slice(words, new, (j * new.shape[0],))

    mine = acc._replace(parts=parts)
    chunk = _fitting(size, chunk)
    words = accumulator.zeros(mine, (num_words,), jnp.uint32)
    words = _over_chunks(mine, start, end, keep, words, chunk)
    last = jnp.maximum(_trips(start, end, chunk) - 1, 0) * chunk
    return words, last, jnp.maximum(start + last - max(size - chunk, 0), 0)

  words, last, moved_by = _by_chunk(chunk, mark, start, end, threshold, *acc.parts)
  # Counted here in one pass: in the loop, the sum of each chunk would cost more than its bits.
  count = jnp.sum(lax.population_count(words), dtype=jnp.int32)
  return Hits(words, count, start, last, moved_by, size)


def count_reaching(
  acc: Accumulator,
  start: jax.Array,
  end: jax.Array,
  levels: jax.Array,
  *,
  every: int = 1,
  step: jax.Array | int = 0,
  chunk: int | None = None,
) -> jax.Array:
  """How many elements of ``acc[start:end]`` are not below each of ``levels``.

  Arguments as in `find`, but with ``levels`` float32 ``[m]``; returns int32 ``[m]``. Looks at one
  row of 1024 elements of ``every`` rows only, another one in each ``step``.
  """

  def count(chunk, start, end, levels, step, *parts):
    def add(counts, j, reached):
      del j
      # Packing and counting bits takes half the time of counting booleans.
      words = pack(reached(levels[:, None, None]))
      return counts + jnp.sum(lax.population_count(words), axis=1, dtype=jnp.int32)

    mine = acc._replace(parts=parts)
    nothing = accumulator.zeros(mine, levels.shape, jnp.int32)
    chunk = _fitting(accumulator.size(mine), chunk)
    rows = math.gcd(every, chunk // ROW_SIZE)
    return _over_chunks(mine, start, end, add, nothing, chunk, rows, step)

  return _by_chunk(chunk, count, start, end, levels, jnp.asarray(step), *acc.parts)


def _by_chunk(chunk, function, *args):
  """``function(chunk, *args)``, by default with the platform's chunk."""
  if chunk is not None:
    return function(chunk, *args)
  here, on_gpu = (functools.partial(function, chunk) for chunk in (CHUNK, GPU_CHUNK))
  return lax.platform_dependent(*args, cuda=on_gpu, rocm=on_gpu, default=here)


def pack(bits: jax.Array) -> jax.Array:
  """bool ``[..., BITS]`` as words, uint32 ``[...]``; bit i of a word is its i-th element."""
  return jnp.sum(jnp.where(bits, _BIT, np.uint32(0)), axis=-1, dtype=jnp.uint32)


def _fitting(size: int, chunk: int) -> int:
  """Elements of a chunk of a vector of ``size``: whole rows, and no more than there are."""
  return min(chunk, max(size // ROW_SIZE, 1) * ROW_SIZE)


def _num_words(size: int, window: int, chunk: int) -> int:
  """Words of all chunks of a range of ``window`` elements."""
  chunk = _fitting(size, chunk)
  return -(-window // chunk) * chunk // BITS


def _trips(start: jax.Array, end: jax.Array, chunk: int) -> jax.Array:
  length = end - start
  return length // chunk + (length % chunk > 0)


def _sampled(words, every, step):
  """One row of ``every`` of ``[words, BITS]``."""
  if every == 1:
    return words
  rows = words.reshape(-1, every, BITS, BITS)
  return lax.dynamic_index_in_dim(rows, step % every, 1, keepdims=False).reshape(-1, BITS)


def _over_chunks(acc, start, end, fold, carry, chunk, every=1, step=0):
  """Folds ``fold(carry, j, reached)`` over the chunks of ``acc[start:end]``.

  ``reached(threshold)`` is bool ``[..., words of a chunk, BITS]``, true for the elements of chunk j
  that are in the range and not below the threshold.
  """
  if accumulator.size(acc) < chunk:
    acc = accumulator.padded(acc, chunk)
  last = accumulator.size(acc) - chunk
  shape = (chunk // BITS, BITS)
  trips = _trips(start, end, chunk)

  def body(state):
    j, carry = state
    # The last chunk is moved back to fit; what the one before it has seen is masked out: its
    # positions are negative, and huge as unsigned numbers.
    wanted = start + j * chunk
    low = jnp.minimum(wanted, last)
    # Made here and of two dimensions, for XLA would keep a vector of positions in memory, and read
    # it as often as the elements.
    word, bit = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    position = (low - wanted + word * BITS + bit).astype(jnp.uint32)
    inside = position < (end - wanted).astype(jnp.uint32)
    magnitude = jnp.abs(accumulator.read(acc, low, chunk).astype(jnp.float32)).reshape(shape)
    inside, magnitude = (_sampled(x, every, step) for x in (inside, magnitude))
    return j + 1, fold(carry, j, lambda threshold: ~(magnitude < threshold) & inside)

  return lax.while_loop(lambda state: state[0] < trips, body, (jnp.int32(0), carry))[1]
