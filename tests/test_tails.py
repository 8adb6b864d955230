"""Thresholds of fitted tails: known distributions, degenerate ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from exdyna_jax.tails import FITS, tail_threshold

SIZE = 20000


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("density", [0.3, 0.05, 0.01])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_share_of_an_exponential_distribution(fit, stages, density, scale):
  x = np.random.default_rng(0).exponential(size=SIZE).astype(np.float32) * np.float32(scale)
  threshold = tail_threshold(jnp.asarray(x), density, stages, FITS[fit])
  assert np.mean(x > threshold) == pytest.approx(density, rel=0.15)


def test_the_share_of_a_heavy_tail():
  """A Pareto tail is too heavy for one exponential; its own fit and further stages are closer."""
  x = (np.random.default_rng(0).pareto(6, SIZE)).astype(np.float32)

  def error(fit, stages, density=0.005):
    share = np.mean(x > tail_threshold(jnp.asarray(x), density, stages, FITS[fit]))
    return abs(np.log(share / density))

  assert error("generalized_pareto", 1) < 0.2
  assert error("exponential", 3) < error("exponential", 1) / 2


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
  "vector", [[0.0] * 9, [1.0] * 9, [0.0] * 8 + [5.0], [3.0], [np.nan, 1.0, 2.0], [np.inf, 1.0, 2.0]]
)
def test_degenerate_vectors(fit, stages, vector):
  vector = np.array(vector, np.float32)
  threshold = float(tail_threshold(jnp.asarray(vector), 0.01, stages, FITS[fit]))
  assert 0 <= threshold <= np.abs(vector[np.isfinite(vector)]).max()


def test_the_pareto_fit_has_the_exponential_as_its_limit():
  share = jnp.float32(0.01)
  pareto, exponential = FITS["generalized_pareto"], FITS["exponential"]
  for variance in (1.0, 1.0 - 1e-6, 1.0 + 1e-6):
    got = pareto(jnp.float32(1), jnp.float32(variance), share)
    np.testing.assert_allclose(got, exponential(1.0, 0.0, share), rtol=1e-4)
