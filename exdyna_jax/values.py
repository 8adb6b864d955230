"""The workers' values at the agreed indices, summed: the ways, what they cost, which one to take.

With n workers and m values of b bytes, each worker sends, in so many dependent hops:

- ``psum``, a ring all-reduce: 2 (n - 1) / n m b bytes in 2 (n - 1) hops
- ``gather``, all values to all workers, which sum them: (n - 1) m b bytes in n - 1 hops
- ``scatter``, an all-to-all of parts, whose sums are gathered: 2 (n - 1) / n m b bytes in n hops

Values of 16 bits are summed in full precision, so psum is not for them: it works in 32 bits on CPUs
and rounds in every hop elsewhere.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import checks, packing
from .flat import cast
from .varying import AxisName, all_gather, all_to_all, axis_tuple, psum

FEW_ROWS = 64  # that are added one by one: the program grows with them


class Link(NamedTuple):
  """The network between the workers, as ``python -m exdyna_jax.advise`` measures it.

  Attributes:
    latency_us: microseconds from one worker to the next, for a message of no length.
    bandwidth_gbit: gigabits a second that a worker can send.
  """

  latency_us: float
  bandwidth_gbit: float


class Wire(NamedTuple):
  """How values travel."""

  dtype: Any = None  # a 16-bit float; None: in full
  link: Link | None = None  # None: as few bytes as possible


def check_wire(wire_dtype: Any, link: Any) -> Wire:
  """The checked arguments, see `exdyna`."""
  if wire_dtype is not None:
    wire_dtype = checks.check_float_dtype("wire_dtype", wire_dtype)
    bits = jnp.finfo(wire_dtype).bits
    if bits != 16:
      raise TypeError(
        f"wire_dtype must be a float of 16 bits, such as jnp.bfloat16, or None (values travel in"
        f" full), got {wire_dtype}, which has {bits}."
      )
  if link is not None:
    if not isinstance(link, Link):
      raise TypeError(
        f"link must be exdyna_jax.Link(latency_us=..., bandwidth_gbit=...) or None, got {link!r}."
      )
    for name, value in link._asdict().items():
      checks.check_positive(f"link.{name}", value)
  return Wire(wire_dtype, link)


def hops(way: str, num_workers: int) -> int:
  """Messages that wait for each other."""
  n = num_workers
  return {"psum": 2 * (n - 1), "gather": n - 1, "scatter": n}[way] if n > 1 else 0


def value_bytes(way: str, num_workers: int, count: int, item_bytes: int) -> float:
  """Bytes that each worker sends for the sums of ``count`` values."""
  n = num_workers
  if way == "gather":
    if item_bytes == 2:
      count = 2 * packing.packed_length(count)
    return float((n - 1) * count * item_bytes)
  if way == "scatter":
    count = n * _part(count, n)
  return 2.0 * (n - 1) / n * count * item_bytes


def seconds(num_hops: int, num_bytes: float, link: Link) -> float:
  """Time of a collective."""
  return num_hops * link.latency_us * 1e-6 + num_bytes * 8 / (link.bandwidth_gbit * 1e9)


def choose(wire: Wire, num_workers: int, count: int, item_bytes: int) -> str:
  """The way that takes the least time; the same on all workers, since it is known beforehand."""
  if wire.link is None:
    return "psum" if wire.dtype is None else "gather" if num_workers == 2 else "scatter"
  link, each = wire.link, _item_bytes(wire, item_bytes)

  def cost(way):
    num_bytes = value_bytes(way, num_workers, count, each)
    return seconds(hops(way, num_workers), num_bytes, link)

  return min(
    ("psum", "gather", "scatter") if wire.dtype is None else ("gather", "scatter"), key=cost
  )


def traffic(wire: Wire, num_workers: int, count: int, item_bytes: int) -> tuple[int, float]:
  """Hops, and bytes that each worker sends, for the sums of ``count`` values in the way chosen."""
  way = choose(wire, num_workers, count, item_bytes)
  num_bytes = value_bytes(way, num_workers, count, _item_bytes(wire, item_bytes))
  return hops(way, num_workers), num_bytes


def _item_bytes(wire, plain):
  return plain if wire.dtype is None else 2


def sum_values(
  values: jax.Array, wire: Wire, axis_name: AxisName, num_workers: int
) -> tuple[jax.Array, jax.Array | None]:
  """The sum over the workers, and what each keeps of its own.

  Args:
    values: ``[m]``, this worker's.
    wire: how they travel.
    axis_name: mesh axis of the workers.
    num_workers: their number n.

  Returns:
    The sums ``[m]``, the same on all workers, and the rounding errors ``[m]`` with which the books
    balance: ``sum(values) = sums + sum(kept)``, over the workers. None: there are none.
  """
  n, count = num_workers, values.shape[0]
  way = choose(wire, n, count, values.dtype.itemsize)
  if n == 1 or way == "psum":
    return psum(values, axis_name), None
  sent, kept = _rounded(values, wire.dtype)
  if way == "gather":
    rows = all_gather(_to_words(sent), axis_name).reshape(n, -1)
    return _sum_rows(_from_words(rows, count, sent), values.dtype), kept

  part = _part(count, n)
  parts = jnp.pad(sent, (0, n * part - count)).reshape(n, part)
  to_each = jnp.stack([_to_words(row) for row in parts])
  mine = _from_words(all_to_all(to_each, axis_name), part, sent)
  rounded, error = _rounded(_sum_rows(mine, values.dtype), wire.dtype)
  rows = all_gather(_to_words(rounded), axis_name).reshape(n, -1)
  sums = _from_words(rows, part, sent).reshape(-1)[:count].astype(values.dtype)
  if kept is not None:
    # The error of a sum belongs to nobody: the worker that has made it keeps it.
    start = lax.axis_index(axis_tuple(axis_name)) * part
    errors = lax.dynamic_update_slice(jnp.zeros_like(values, shape=(n * part,)), error, (start,))
    kept = kept + errors[:count]
  return sums, kept


def _part(count: int, num_workers: int) -> int:
  """Values that each worker sums, in whole words."""
  return 2 * -(-count // (2 * num_workers))


def _sum_rows(rows: jax.Array, dtype: Any) -> jax.Array:
  """The sum over the first dimension, in ``dtype``."""
  if len(rows) > FEW_ROWS:
    return jnp.sum(rows.astype(dtype), axis=0)
  # XLA for CPUs sums columns element by element, forty times slower than it adds rows; and it would
  # unpack each element where it is added.
  return functools.reduce(jnp.add, (row.astype(dtype) for row in lax.optimization_barrier(rows)))


def _rounded(values: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
  if dtype is None:
    return values, None
  # What is too large for 16 bits is sent in parts; what is not finite as it is, at once.
  finite = jnp.isfinite(values)
  sent = jnp.where(finite, cast(values, dtype, saturate=True), values.astype(dtype))
  # The barrier keeps XLA from taking the number that was sent for the one in full precision.
  sent = lax.optimization_barrier(sent)
  return sent, jnp.where(finite, values - sent.astype(values.dtype), 0)


def _to_words(values: jax.Array) -> jax.Array:
  if values.dtype.itemsize > 2:
    return values
  return packing.pack(lax.bitcast_convert_type(values, jnp.uint16))


def _from_words(words: jax.Array, count: int, like: jax.Array) -> jax.Array:
  if like.dtype.itemsize > 2:
    return words
  return lax.bitcast_convert_type(packing.unpack(words, count), like.dtype)
