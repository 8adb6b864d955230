"""The paper's threshold rule against the NumPy reference, and at the ends of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from exdyna_jax import threshold as rules


@pytest.mark.parametrize("k", [1, 10, 655, 2000, 10**6])
def test_bands_are_exact(k):
  """Around both edges of the band; 1.1 k and 0.909 k belong to the lower side."""
  with jax.enable_x64(True):
    scaled = jax.jit(rules.paper_scaled, static_argnums=2)
    start = rules.as_threshold(rules.paper_initial(k))
    assert start.dtype == jnp.float64 and start == oracle.initial_threshold(k)
    edges = [int(edge * k) for edge in (oracle.RATIO_LOW, oracle.RATIO_HIGH)]
    for selected in {max(edge + shift, 0) for edge in [*edges, 0, k] for shift in (-1, 0, 1)}:
      want = oracle.paper_threshold(float(start), selected, k)
      assert float(scaled(start, jnp.int32(selected), k)) == want, (selected, k)


def test_stays_a_positive_normal_number():
  limits = jnp.finfo(jnp.float32)
  low = rules.paper_scaled(jnp.float32(limits.tiny), jnp.int32(0), 10)
  high = rules.paper_scaled(jnp.float32(limits.max), jnp.int32(100), 10)
  assert low == limits.tiny and high == limits.max
  assert rules.as_threshold(0.5).dtype == np.float32
