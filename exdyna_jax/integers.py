"""Exact integer arithmetic where products leave int32, and floats that travel as integers."""

import jax
import jax.numpy as jnp


def mul_div(
  a: jax.Array, b: jax.Array | int, c: jax.Array | int, add: jax.Array | int = 0
) -> jax.Array:
  """``floor((a * b + add) / c)`` of int32 values, exact also where ``a * b`` is not an int32.

  Args:
    a: int32, any shape, not negative.
    b: int32, broadcast against ``a``, not negative.
    c: int32 scalar, positive. The quotient must be an int32, and ``quotient * c`` below ``2**53``.
    add: int32 scalar, not negative.

  Returns:
    int32.
  """
  b, c, add = (jnp.asarray(x, jnp.int32) for x in (b, c, add))
  wide_a, wide_b, wide_c, wide_add = (x.astype(jnp.float32) for x in (a, b, c, add))
  # The float32 estimate is wrong by a few parts in 2**24; the true remainder is then small, and
  # comes out right although the products wrap around. Once more, and it is wrong by one at most.
  # (An integer division instead would not be vectorized.)
  quotient = ((wide_a * wide_b + wide_add) / wide_c).astype(jnp.int32)
  remainder = a * b + add - quotient * c
  more = jnp.floor(remainder.astype(jnp.float32) / wide_c).astype(jnp.int32)
  remainder = remainder - more * c
  return quotient + more + (remainder >= c).astype(jnp.int32) - (remainder < 0).astype(jnp.int32)


def saturated_sum(counts: jax.Array) -> jax.Array:
  """Sum of int32 ``[n]`` that are not negative; the largest int32 where it would be more."""
  most = jnp.iinfo(jnp.int32).max
  fits = jnp.sum(counts, dtype=jnp.float32) < most
  return jnp.where(fits, jnp.sum(counts, dtype=jnp.int32), most)


def as_bits(*numbers: jax.Array) -> jax.Array:
  """Scalars as float32, bit for bit in int32 ``[m]``."""
  return jax.lax.bitcast_convert_type(jnp.stack(numbers).astype(jnp.float32), jnp.int32)


def from_bits(bits: jax.Array) -> jax.Array:
  """Inverse of `as_bits`, any shape."""
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
