"""Exact integer arithmetic where products leave int32 and int64 is not enabled."""

import jax
import jax.numpy as jnp


def mul_div(a: jax.Array, b: jax.Array | int, c: jax.Array | int) -> jax.Array:
  """``floor(a * b / c)`` of int32 values, exact also where ``a * b`` is not an int32.

  Args:
    a: int32, any shape, not negative.
    b: int32, broadcast against ``a``, not negative.
    c: int32 scalar, positive. The quotient must be an int32.

  Returns:
    int32.
  """
  b, c = jnp.asarray(b, jnp.int32), jnp.asarray(c, jnp.int32)
  # The float32 estimate is wrong by a few parts in 2**24; the true remainder is then small, and
  # comes out right although both products wrap around.
  quotient = (a.astype(jnp.float32) * b.astype(jnp.float32) / c.astype(jnp.float32)).astype(
    jnp.int32
  )
  return quotient + (a * b - quotient * c) // c
