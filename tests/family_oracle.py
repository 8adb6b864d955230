"""What the relatives of ExDyna pick, in slow and obvious NumPy.

Each function takes the step t, the workers' accumulators `acc [n, N]` and what it has to know
beside them, and returns a list of indices per worker.
"""

import math

import numpy as np

SAGE_RATE = 0.0025
SIDCO_FIRST = 0.25


def largest(magnitudes, k):
  """The k largest that are not zero; of equal ones the first."""
  order = np.argsort(-magnitudes, kind="stable")[:k]
  return order[magnitudes[order] > 0]


def micro(t, acc, threshold):
  n, size = acc.shape
  edges = np.cumsum([0] + [size // n + (p < size % n) for p in range(n)])
  picks = []
  for r in range(n):
    p = (t + r) % n
    part = np.abs(acc[r, edges[p] : edges[p + 1]])
    picks.append(edges[p] + np.flatnonzero(part >= np.float32(threshold)))
  return picks


def top_k(t, acc, k):
  return [largest(np.abs(row), k) for row in acc]


def clt_k(t, acc, k):
  n = len(acc)
  return [largest(np.abs(acc[t % n]), k)] * n


def hard_threshold(t, acc, threshold):
  return [np.flatnonzero(np.abs(row) >= np.float32(threshold)) for row in acc]


def pieces(layers, n):
  """Sizes of the pieces of the layers."""
  sizes = []
  for size in layers:
    if size > sum(layers) / n:
      sizes += [size // n + (part < size % n) for part in range(n)]
    elif size:
      sizes.append(size)
  return sizes


def deft_counts(norms, sizes, k):
  counts = [0] * len(sizes)
  left_k, left_norm = k, sum(norms)
  for i in sorted(range(len(sizes)), key=lambda i: -norms[i]):
    q = int(left_k * norms[i] / left_norm) if left_norm > 0 else 0
    counts[i] = sizes[i] if q > sizes[i] else max(1, q)
    left_k -= counts[i]
    left_norm -= norms[i]
  return counts


def deft_bins(counts, sizes, n):
  cost = [s * math.log2(c) if c > 1 else s for s, c in zip(sizes, counts, strict=True)]
  loads, bins = [0.0] * n, [n] * len(sizes)
  for i in sorted(range(len(sizes)), key=lambda i: -cost[i]):
    if counts[i] < sizes[i]:
      bins[i] = loads.index(min(loads))
      loads[bins[i]] += cost[i]
  return bins


def deft(t, acc, k, layers):
  """Pieces that are sent whole are picked by all together: every n-th element by each."""
  n = len(acc)
  sizes = pieces(layers, n)
  ends = np.cumsum(sizes)

  def counts(row):
    parts = np.split(row.astype(np.float64), ends[:-1])
    return deft_counts([float(np.float32(np.linalg.norm(x))) for x in parts], sizes, k)

  bins = deft_bins(counts(acc[t % n]), sizes, n)
  picks = []
  for r in range(n):
    mine = []
    own = counts(acc[r])
    for i, (end, size) in enumerate(zip(ends, sizes, strict=True)):
      start = end - size
      if bins[i] == (t + r) % n:
        mine += list(start + largest(np.abs(acc[r, start:end]), own[i]))
      elif bins[i] == n:
        mine += [j for j in range(start, end) if j % n == (t + r) % n and acc[r, j]]
    picks.append(np.array(mine, int))
  return picks


def sage_threshold(row, threshold, mean, mean_before, density):
  """The threshold after the first step; `mean` is that of the sample, which is not drawn here."""
  alpha = mean / mean_before
  exam = np.mean(np.abs(row) >= threshold * alpha)
  beta = 2 / (1 + math.exp(density - exam))
  gamma = 0.95 if exam / density < 0.1 else 1.05 if exam / density > 10 else 1
  return threshold * alpha * beta * gamma


def sidco_threshold(row, density, stages, fit):
  x = np.abs(row.astype(np.float64))
  first, low = density, 0.0
  if stages > 1 and density < SIDCO_FIRST:
    first, later = SIDCO_FIRST, (density / SIDCO_FIRST) ** (1 / (stages - 1))
  else:
    stages, later = 1, 1
  for stage in range(stages):
    q = later if stage else first
    low = x.min() if stage else 0.0
    excess = x - low
    if fit == "exponential":
      threshold = low - excess.mean() * math.log(q)
    else:
      ratio = excess.mean() ** 2 / excess.var(ddof=1)
      a, c = 0.5 * excess.mean() * (ratio + 1), 0.5 * (ratio - 1)
      threshold = low + a * (1 - q**c) / c
    x = x[x > threshold]
  return threshold
