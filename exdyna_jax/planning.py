"""How long the exchange of a step takes on a network: dense, Top-k and exdyna, side by side.

All by the cost of a collective as in `values`: hops times latency, plus bytes over bandwidth. What
a worker computes for itself comes on top.
"""

from decimal import ROUND_UP, Context
from typing import NamedTuple

import jax.numpy as jnp

from . import exchange, values
from .density import target_count
from .packing import encoded_length
from .threshold import LADDER
from .values import Link, Wire

FULL, INDEX = 4, 4  # bytes

DENSE, DENSE_16, TOP_K = "dense, float32", "dense, 16 bits", "top_k"
EXDYNA, EXDYNA_16 = "exdyna", "exdyna, bfloat16 values"

# Below so many steps times density, most coordinates are never sent, or too rarely to be trained.
FEW_VISITS = 2.0
# 16-bit values are advised where they save more than this.
WORTHWHILE = 1.1

_HOW_TO_16 = (
  " Write it as jax.lax.pmean of gradients cast to jnp.bfloat16, if your hardware sums 16 bits;"
  " CPUs send 32 for it (docs/network.md)."
)


class Cost(NamedTuple):
  """The exchange of one step."""

  num_bytes: float  # that each worker sends
  seconds: float


def predict(
  params: int, density: float, num_workers: int, link: Link, rounding: float = 0.0
) -> dict[str, Cost]:
  """What the exchange of one step costs, for each way to do it.

  Args:
    params: number of parameters N.
    density: share of them to be sent, in (0, 1]; with Top-k, by each worker.
    num_workers: their number n.
    link: the network between them.
    rounding: seconds that the dense mean in 16 bits takes beyond its traffic; default 0.

  Returns:
    By name: the dense mean in 32 and in 16 bits; Top-k, which gathers indices and values of all
    workers in one message; exdyna, with values in 32 and in 16 bits.

  Example:
    >>> costs = predict(10_000_000, 0.001, 4, Link(latency_us=500.0, bandwidth_gbit=1.0))
    >>> for name, cost in costs.items():
    ...   print(f"{name:23} {cost.num_bytes:10.0f} bytes {1e3 * cost.seconds:5.1f} ms")
    dense, float32            60000000 bytes 483.0 ms
    dense, 16 bits            30000000 bytes 242.0 ms
    top_k                       240000 bytes   3.4 ms
    exdyna                       96528 bytes   4.3 ms
    exdyna, bfloat16 values      96504 bytes   3.8 ms
  """
  n, k = num_workers, target_count(density, params)
  slots = exchange.capacity_of(k, params, n, exchange.CAPACITY_FACTOR)
  header = exchange.HEADER + len(LADDER)
  items = exchange.padded_length(header + encoded_length(slots, params))
  indices = _gather(n, items * INDEX, link)
  full, half = Wire(None, link), Wire(jnp.bfloat16, link)
  return {
    DENSE: _sum(Wire(), n, params, link),
    DENSE_16: _both(_sum(half, n, params, link), Cost(0, rounding)),
    TOP_K: _gather(n, k * (INDEX + FULL), link),
    EXDYNA: _both(indices, _sum(full, n, n * slots, link)),
    EXDYNA_16: _both(indices, _sum(half, n, n * slots, link)),
  }


def recommend(costs: dict[str, Cost], density: float, link: Link, local: float = 0.0) -> str:
  """One line: what to use.

  Args:
    costs: from `predict`.
    density: as given to it.
    link: as given to it.
    local: seconds that exdyna takes besides the exchange, in each step.
  """
  full, half = (costs[name].seconds + local for name in (EXDYNA, EXDYNA_16))
  dense, dense_16 = costs[DENSE].seconds, costs[DENSE_16].seconds
  fastest_dense = min(dense, dense_16)
  own = f", its own part of {1e3 * local:.3g} ms counted in" if local else ""
  if fastest_dense <= min(full, half):
    name = EXDYNA if full <= half else EXDYNA_16
    return (
      f"dense is faster here: {DENSE if dense <= dense_16 else DENSE_16}, takes"
      f" {1e3 * fastest_dense:.3g} ms a step, {name}, {1e3 * min(full, half):.3g} ms{own}."
      f"{'' if dense <= dense_16 else _HOW_TO_16}"
    )
  # In full only where that, too, is faster than dense.
  is_half = full > min(WORTHWHILE * half, fastest_dense)
  sparse = half if is_half else full
  latency, bandwidth = (f"{x:.3g}" for x in link)
  dtype = "wire_dtype=jnp.bfloat16, " if is_half else ""
  return (
    f"exdyna is {dense / sparse:.3g} times faster than dense float32, and {dense_16 / sparse:.3g}"
    f" times than dense in 16 bits{own}: exdyna({density:g}, axis_name, {dtype}"
    f"link=Link(latency_us={latency}, bandwidth_gbit={bandwidth}))"
  )


def warning(density: float, steps: int) -> str | None:
  """What to say about a density that is too low for so many steps; None: nothing."""
  if steps * density >= FEW_VISITS or density == 1:
    return None
  # Rounded up, as below it the warning would come again.
  rounded_up = Context(prec=2, rounding=ROUND_UP).create_decimal(repr(FEW_VISITS / steps))
  cure = f"a density of {float(rounded_up):g}, or more steps" if rounded_up <= 1 else "more steps"
  return (
    f"{steps} steps at density {density:g} send a coordinate {steps * density:.2g} times on"
    f" average, and most never. Below about {FEW_VISITS:g}, accuracy suffers: take {cure}."
  )


def _gather(num_workers, item_bytes, link):
  num_bytes = exchange.all_gather_bytes(num_workers, 1, item_bytes)
  return Cost(num_bytes, values.seconds(values.hops("gather", num_workers), num_bytes, link))


def _sum(wire, num_workers, count, link):
  num_hops, num_bytes = values.traffic(wire, num_workers, count, FULL)
  return Cost(num_bytes, values.seconds(num_hops, num_bytes, link))


def _both(first, second):
  return Cost(first.num_bytes + second.num_bytes, first.seconds + second.seconds)
