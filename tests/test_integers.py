"""Integers at the limits of int32, floats as integers."""

import jax.numpy as jnp
import numpy as np
import pytest

from exdyna_jax.integers import as_bits, from_bits, saturated_sum

MOST = 2**31 - 1


@pytest.mark.parametrize(
  "counts", [[0, 0], [1, 2, 3], [2**30, 2**30 - 300], [2**30, 2**30], [MOST] * 8, [MOST, 0]]
)
def test_saturated_sum(counts):
  got = int(saturated_sum(jnp.array(counts, jnp.int32)))
  assert got == min(sum(counts), MOST) and got >= 0


def test_floats_travel_bit_for_bit():
  numbers = np.array([0.1, -0.0, np.inf, np.nan, 1e-42], np.float32)
  back = from_bits(as_bits(*jnp.asarray(numbers)))
  np.testing.assert_array_equal(np.asarray(back).view(np.int32), numbers.view(np.int32))
