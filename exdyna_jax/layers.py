"""Layers cut into pieces, how much of each piece to send, and who looks for it (DEFT)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Pieces(NamedTuple):
  """A static cut of the flat vector."""

  starts: np.ndarray  # int32 [P], first element of each piece
  sizes: np.ndarray  # int32 [P], elements, at least 1


def cut_layers(layers: tuple[int, ...], num_workers: int) -> Pieces:
  """The layers as pieces; those larger than N / n in n pieces, the first ones longer by one."""
  sizes: list[int] = []
  for size in layers:
    parts = num_workers if size * num_workers > sum(layers) else 1
    share, rest = divmod(size, parts)
    sizes += [share + (part < rest) for part in range(parts)]
  kept = np.array([size for size in sizes if size], np.int32)
  return Pieces(np.cumsum(kept, dtype=np.int32) - kept, kept)


def piece_of(pieces: Pieces) -> jax.Array:
  """The piece of each element, int32 ``[N]``."""
  element = lax.iota(jnp.int32, int(pieces.sizes.sum()))
  return jnp.searchsorted(jnp.asarray(pieces.starts), element, side="right").astype(jnp.int32) - 1


def norms(magnitudes: jax.Array, pieces: Pieces) -> jax.Array:
  """L2 norm of each piece of ``[N]`` magnitudes, times a number, float32 ``[P]``."""
  # A power of two, so that nothing is rounded: squares neither overflow nor vanish.
  _, exponent = jnp.frexp(jnp.max(magnitudes))
  scaled = jnp.ldexp(magnitudes, -exponent)
  ends = pieces.starts + pieces.sizes
  squares = [
    jnp.sum(scaled[start:end] ** 2) for start, end in zip(pieces.starts, ends, strict=True)
  ]
  return jnp.sqrt(jnp.stack(squares))


def shares(norms: jax.Array, pieces: Pieces, k: int | jax.Array) -> jax.Array:
  """How many elements of each piece to send, int32 ``[P]``: about ``k``, as the norms are.

  Pieces of large norm come first, and each gets its share of what is left; at least one element,
  and at most all.
  """
  order = jnp.argsort(-norms, stable=True)
  ordered = norms[order]
  # Summed from the end, not subtracted from the start: the last piece gets all that is left.
  parts = jnp.where(ordered > 0, ordered / lax.cumsum(ordered, reverse=True), 0.0)

  def share(left_k, piece):
    part, size = piece
    wanted = left_k * part
    k_piece = jnp.where(wanted < size, wanted, size).astype(jnp.int32)
    k_piece = jnp.clip(k_piece, 1, size)
    return left_k - k_piece, k_piece

  start = jnp.zeros_like(norms, jnp.int32, shape=()) + k
  _, counts = lax.scan(share, start, (parts, jnp.asarray(pieces.sizes)[order]))
  return jnp.zeros_like(counts).at[order].set(counts)


def bins(counts: jax.Array, pieces: Pieces, num_workers: int) -> jax.Array:
  """Which worker looks for each piece's ``counts``, int32 ``[P]``; n where all of it is sent.

  The most expensive pieces first, each into the bin with the least cost so far; a piece costs its
  size times the logarithm of how many elements are looked for.
  """
  size = jnp.asarray(pieces.sizes, jnp.float32)
  cost = jnp.where(counts > 1, size * jnp.log2(jnp.maximum(counts, 2).astype(jnp.float32)), size)
  whole = counts == pieces.sizes
  order = jnp.argsort(-cost, stable=True)

  def put(loads, piece):
    cost, whole = piece
    least = jnp.argmin(loads).astype(jnp.int32)
    loads = loads.at[least].add(jnp.where(whole, 0.0, cost))
    return loads, jnp.where(whole, num_workers, least)

  loads = jnp.zeros_like(cost, shape=(num_workers,))
  _, ordered = lax.scan(put, loads, (cost[order], whole[order]))
  return jnp.zeros_like(ordered).at[order].set(ordered)
