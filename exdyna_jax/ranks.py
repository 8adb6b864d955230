"""Which hits are sent, by their rank among all hits of a worker, and where these hits are.

Found from the bits alone: on CPUs by one walk over the words, elsewhere for all ranks at once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .integers import mul_div
from .selection import BITS, Hits, pack

GOLDEN = np.uint32(2654435769)  # 2**32 over the golden ratio
ONE, ONES = np.uint32(1), np.uint32(2**BITS - 1)


class Ranks(NamedTuple):
  """Which hits go into some slots: rank ``floor((slot * found + phase) / allowed)`` into a slot.

  If ``found <= allowed``, the rank is the slot. Otherwise this is an even stride: keeping the first
  hits would starve the end of the range, and a stride without a phase, which differs from step to
  step, would starve what lies between its hits.
  """

  slots: jax.Array  # int32 [m], consecutive
  found: jax.Array  # int32 [], how many hits there are
  allowed: int | jax.Array  # how many may be sent, at least 1
  phase: jax.Array  # int32 [], 0 if all may be sent


def strided(slots: jax.Array, count: jax.Array, allowed: int | jax.Array, step: jax.Array) -> Ranks:
  """The ranks for ``slots`` in ``step``; see `Ranks`."""
  # Multiples of the golden ratio fill [0, 1) evenly, however many there are.
  fraction = (step.astype(jnp.uint32) * GOLDEN) >> 8
  phase = (fraction.astype(jnp.float32) / 2**24 * count.astype(jnp.float32)).astype(jnp.int32)
  phase = jnp.where(count > allowed, jnp.clip(phase, 0, count - 1), 0)
  return Ranks(slots, count, allowed, phase)


def rank_of(ranks: Ranks) -> jax.Array:
  """The rank of the hit in each slot, int32 ``[m]``; ``found`` for empty slots."""
  slots, count, allowed, phase = ranks
  excess = jnp.maximum(count - allowed, 0)
  # All vary over the mesh: both branches must, and JAX's vmap of a conditional asks for it.
  varying = 0 * (excess + phase)
  slots = slots + varying
  if not isinstance(allowed, int):
    allowed = allowed + varying

  def stride(slots, excess):
    # slot * count / allowed = slot + slot * excess / allowed. The barrier keeps XLA from dividing
    # these two numbers again for each slot.
    whole, part = lax.optimization_barrier((excess // allowed, excess % allowed))
    return slots + slots * whole + mul_div(slots, part, allowed, phase)

  rank = lax.cond(excess > 0, stride, lambda slots, excess: slots, slots, excess)
  return jnp.where((slots >= 0) & (slots < jnp.minimum(count, allowed)), rank, count)


def take(hits: Hits, ranks: Ranks, *, method: Callable[..., jax.Array] | None = None) -> jax.Array:
  """Elements of the hits of these ranks, int32 ``[m]``, ascending; N in empty slots.

  Args:
    hits: from `selection.find`.
    ranks: from `strided`, of ``hits.found``.
    method: `walk` or `look_up`, which find the same; None chooses by platform.
  """
  if hits.all_of_them is not None:
    window, everything = hits._replace(all_of_them=None), hits.all_of_them
    return lax.cond(
      hits.is_long,
      lambda: take(everything(), ranks, method=method),
      lambda: take(window, ranks, method=method),
    )
  wanted = rank_of(ranks)
  method = method or functools.partial(lax.platform_dependent, cpu=walk, default=look_up)
  bit = method(hits.words, ranks, wanted)
  moved = bit.astype(jnp.uint32) >= hits.moved_from.astype(jnp.uint32)
  element = hits.start + bit - jnp.where(moved, hits.moved_by, 0)
  return jnp.where(wanted < hits.found, element, hits.size)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
  """``x[index]`` without a look at whether it is in bounds."""
  return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def walk(words: jax.Array, ranks: Ranks, wanted: jax.Array) -> jax.Array:
  """Bits of these ranks, by a walk over the bits that are set, in the words where some are wanted.

  All scalars, which a CPU handles in a few nanoseconds and others in a launch each. Unsigned ones:
  a signed index would be looked at for being negative.

  Args:
    words: uint32 ``[words]``.
    ranks: the ranks.
    wanted: `rank_of` these.

  Returns:
    int32 ``[m]``; anything in empty slots.
  """
  slots = wanted.shape[0]
  full_slots = jnp.sum(wanted < ranks.found, dtype=jnp.uint32)
  # And a rank to look at behind the last one.
  all_ranks = jnp.append(wanted, ranks.found).astype(jnp.uint32)
  marks = pack(words.reshape(-1, BITS) != 0)  # one bit a word

  def load(x, index):
    return lax.dynamic_slice(x, (index,), (1,))[0]

  def visit(carry):
    place, rank, slot, out = carry
    # The word of this place, or the next one with a bit set, if its mark is in the same word.
    j = place // BITS
    word = load(words, j) & (ONES << (place % BITS))
    later = load(marks, j // BITS) & (ONES << (j % BITS)) & ~(ONE << (j % BITS))
    jump = word == 0
    j = jnp.where(jump, j // BITS * BITS + _lowest(later), j)
    word = jnp.where(jump, load(words, j), word)
    here, next_rank = lax.population_count(word), load(all_ranks, slot)
    skip = rank + here <= next_rank  # also if there is no bit at all
    bit = j * BITS + _lowest(word)
    # Written anyway, and again by whom the slot is for.
    out = lax.dynamic_update_slice(out, bit[None], (slot,))
    sent = ~skip & (rank == next_rank)
    place = jnp.where(skip, (j + 1) * BITS, bit + 1)
    rank = rank + jnp.where(skip, here, ONE)
    return place, rank, slot + sent.astype(jnp.uint32), out

  zero = jnp.zeros_like(full_slots)
  state = (zero, zero, zero, jnp.zeros_like(all_ranks))

  def unfinished(carry):
    place, _, slot, _ = carry
    return (slot < full_slots) & (place < np.uint32(words.shape[0] * BITS))

  bits = lax.while_loop(unfinished, visit, state)[-1]
  return bits[:slots].astype(jnp.int32)


def _lowest(word: jax.Array) -> jax.Array:
  """Position of the lowest set bit, ``BITS`` if there is none."""
  return lax.population_count(~word & (word - ONE))


def look_up(words: jax.Array, ranks: Ranks, wanted: jax.Array) -> jax.Array:
  """As `walk`, for all ranks at once: down a tree of counts to the word, then to the bit in it."""
  counts = lax.population_count(words).astype(jnp.int32)
  leaves = 1 << (words.shape[0] - 1).bit_length()
  levels = [jnp.pad(counts, (0, leaves - words.shape[0]))]
  while levels[-1].shape[0] > 1:
    levels.append(_sums_of_pairs(levels[-1]))
  # A heap: the root is node 1, the children of a node 2 * node and 2 * node + 1.
  tree = jnp.concatenate([jnp.zeros_like(counts[:1]), *levels[::-1]])

  def descend(_, carry):
    node, rank = carry
    left = _at(tree, 2 * node)
    is_right = rank >= left
    return 2 * node + is_right, jnp.where(is_right, rank - left, rank)

  rank = jnp.minimum(wanted, jnp.maximum(ranks.found - 1, 0))
  # A loop, for unrolled, XLA on CPUs computes each level anew for each of the next.
  node, rank = lax.fori_loop(0, len(levels) - 1, descend, (jnp.ones_like(rank), rank))
  word = node - leaves
  return word * BITS + _nth_bit(_at(words, word), rank)


def _sums_of_pairs(counts: jax.Array) -> jax.Array:
  # A TPU would keep the pairs as rows of 128.
  return lax.platform_dependent(
    counts,
    tpu=lambda counts: counts[::2] + counts[1::2],
    default=lambda counts: jnp.sum(counts.reshape(-1, 2), axis=1, dtype=jnp.int32),
  )


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
