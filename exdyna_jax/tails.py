"""Thresholds from a distribution that is fitted to the magnitudes, in stages (SIDCo).

The first stage fits all of them, each further one those above the threshold before it, and asks
them for a larger share: the tail, which decides, need not look like the rest.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The share that the first of several stages asks for; denser than this, one stage does.
FIRST_SHARE = 0.25

# Keeps mean**2 / variance finite where all magnitudes are equal.
LEAST_VARIANCE = 1e-6
TINY = np.finfo(np.float32).tiny


def exponential(mean: jax.Array, variance: jax.Array, share: jax.Array) -> jax.Array:
  """What a ``share`` of an exponential distribution exceeds: ``-mean log(share)``."""
  return -mean * jnp.log(share)


def generalized_pareto(mean: jax.Array, variance: jax.Array, share: jax.Array) -> jax.Array:
  """What a ``share`` of a generalised Pareto distribution of these moments exceeds.

  ``a (1 - share ** c) / c`` with ``a = mean (mean² / variance + 1) / 2``, ``c = (mean² / variance -
  1) / 2``.
  """
  square = mean * mean
  ratio = square / jnp.maximum(jnp.maximum(variance, LEAST_VARIANCE * square), TINY)
  scale, shape = mean * (ratio + 1) / 2, (ratio - 1) / 2
  log = jnp.log(share)
  # expm1 keeps the digits where c is small; at c = 0 the distribution is exponential.
  safe = jnp.where(shape == 0, 1.0, shape)
  return scale * jnp.where(shape == 0, -log, -jnp.expm1(shape * log) / safe)


FITS = {"exponential": exponential, "generalized_pareto": generalized_pareto}


def tail_threshold(
  vector: jax.Array,
  density: float | jax.Array,
  stages: int | jax.Array,
  fit: Callable[..., jax.Array],
) -> jax.Array:
  """The magnitude that about a share ``density`` of the elements exceeds.

  Args:
    vector: ``[N]``, any float dtype; NaN and Inf count as 0.
    density: in (0, 1].
    stages: at least 1.
    fit: one of ``FITS``.

  Returns:
    float32 scalar; at most the largest magnitude.
  """
  x = jnp.abs(vector.astype(jnp.float32))
  x = jnp.where(jnp.isfinite(x), x, 0.0)
  # The fits have no unit: this keeps squares from becoming too large or too small.
  largest = jnp.max(x)
  unit = jnp.where(largest > 0, largest, 1.0)
  x = x / unit

  density = jnp.asarray(density, jnp.float32)
  stages = jnp.where(density >= FIRST_SHARE, 1, stages)
  first_share = jnp.where(stages == 1, density, FIRST_SHARE)
  later_share = (density / FIRST_SHARE) ** (1 / jnp.maximum(stages - 1, 1))

  def fitted(above, low, share):
    count = jnp.sum(above, dtype=jnp.float32)
    excess = jnp.where(above, x - low, 0.0)
    mean = jnp.sum(excess) / jnp.maximum(count, 1)
    deviation = jnp.where(above, excess - mean, 0.0)
    variance = jnp.sum(deviation**2) / jnp.maximum(count - 1, 1)
    # A distribution that knows no bounds may ask for more than there is.
    return jnp.minimum(low + fit(mean, variance, share), 1.0)

  def stage(_, threshold):
    above = x > threshold
    low = jnp.min(jnp.where(above, x, 1.0))
    return jnp.where(jnp.any(above), fitted(above, low, later_share), threshold)

  threshold = fitted(jnp.ones_like(x, bool), 0.0, first_share)
  return lax.fori_loop(1, stages, stage, threshold) * unit
