"""Synthetic gradients that any machine rebuilds bit for bit.

The recorded runs in `data/` hold results only; their inputs are rebuilt here. The values come from
numpy's raw PCG64 stream, which does not change between versions, by exact or correctly rounded
float64 operations, and are rounded to float32 once, at the end.

A gradient is `z * |z|` of roughly normal `z`, scaled layer by layer: heavy-tailed and signed, with
workers that correlate (a part of `z` is common to all workers of a step) and with layers whose
scales differ by up to 32 times, so that equal shares of the vector hold very unequal shares of the
large entries.
"""

import functools

import numpy as np

LAYER_PERCENT = (1, 2, 3, 4, 6, 8, 8, 12, 12, 16, 12, 16)  # of the vector; the last takes the rest
LAYER_LOG2_SCALE = {
  "unbalanced": (1, 0, -1, -1, -2, -1, -3, -2, -4, -3, -2, -1),
  "uniform": (0,) * len(LAYER_PERCENT),
}
COMMON_STREAM, WORKER_STREAM = 1, 2  # the two random streams of a seed
COMMON_WEIGHT, WORKER_WEIGHT = 0.6, 0.8  # squares sum to 1; workers correlate by 0.36
FIELD_BITS = 16  # a 64-bit word is read as four fields; their sum is nearly normal (Irwin-Hall)
FIELDS_MEAN, FIELDS_STD = 131070, 37837.0  # of the sum of the four fields


def grad(size, step, worker, *, seed=2026, scale=1.0, profile="unbalanced"):
  """The gradient of one worker in one step: float32 `[size]`, with an L2 norm of order `scale`."""
  z = COMMON_WEIGHT * _common_part(size, step, seed) + WORKER_WEIGHT * _normal(
    (seed, WORKER_STREAM, step, worker), size
  )
  return (z * np.abs(z) * _element_scales(size, profile) * scale).astype(np.float32)


def grads(size, step, num_workers, **options):
  """The gradients of all workers in one step: float32 `[n, size]`."""
  return np.stack([grad(size, step, worker, **options) for worker in range(num_workers)])


def _normal(key, size):
  """Roughly normal float64 `[size]`: mean 0, deviation 1, never beyond 3.47."""
  words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
  mask = np.uint64(2**FIELD_BITS - 1)
  shifts = [np.uint64(FIELD_BITS * field) for field in range(4)]
  total = sum((words >> shift) & mask for shift in shifts)
  return (total.astype(np.int64) - FIELDS_MEAN).astype(np.float64) / FIELDS_STD


# The workers of a step ask one after the other, so keeping the last few is enough.
@functools.lru_cache(maxsize=4)
def _common_part(size, step, seed):
  common = _normal((seed, COMMON_STREAM, step), size)
  common.flags.writeable = False
  return common


def layer_sizes(size):
  """Elements of each layer."""
  sizes = [percent * size // 100 for percent in LAYER_PERCENT[:-1]]
  return [*sizes, size - sum(sizes)]


@functools.lru_cache(maxsize=8)
def _element_scales(size, profile):
  """Layer scales, repeated per element; powers of two, so that scaling adds no rounding."""
  norm_log2 = round(float(np.log2(np.sqrt(size))))  # brings the norm of the vector to order 1
  scales = [2.0 ** (log2 - norm_log2) for log2 in LAYER_LOG2_SCALE[profile]]
  per_element = np.repeat(scales, layer_sizes(size))
  per_element.flags.writeable = False
  return per_element
