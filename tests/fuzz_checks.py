"""What must hold in every step of a fuzzed run, whatever was drawn."""

import itertools
import math

import family_oracle
import fuzz_expected as expect
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import workers as w
from family import COMMON, EXCLUSIVE
from following import flat_rows
from fuzz_expected import LARGEST, TINY, flush, is_float, split, wanted

EPSILON = np.finfo(np.float32).eps
SEARCHED = 1 + 2**-11  # a searched threshold is the largest, but for the last bits


def rows_of(leaves, n):
  return flat_rows(leaves, n) if leaves else np.zeros((n, 0), np.float32)


def check_step(structure, workers, before, grads, updates, after):
  """Holds one step against the references; all trees are NumPy, with a row per worker."""
  n = structure.n
  shared, got = agreed(workers, (updates, after._replace(residual=())))
  for leaf, like in zip(jax.tree.leaves(shared), jax.tree.leaves(structure.params), strict=True):
    assert leaf.dtype == like.dtype and leaf.shape == like.shape
    assert is_float(like) or not leaf.any()
  sparse, dense = split(structure, grads)
  update, dense_update = split(structure, jax.tree.map(lambda x: x[None], shared))
  old = w.copies(workers, before._replace(residual=()))[0]
  size = sum(x[0].size for x in sparse)
  if structure.name == "dense":
    check_means(sparse, update, saturated=False)
    return check_dense_stats(structure, sparse, size, got)
  if size == 0:
    return jax.tree.map(np.testing.assert_array_equal, before, after)

  skips = structure.options["nonfinite"] == "skip"
  if skips and not all(np.isfinite(x.astype(np.float32)).all() for x in sparse + dense):
    return check_skipped(structure, before, old, after, got, update + dense_update)
  acc = expect.accumulated(structure, rows_of(sparse, n), before.residual)
  sent, counts, sent_counts = what_is_sent(structure, acc, old, got, after)
  check_conservation(acc, after.residual, sent)
  columns = np.cumsum([0] + [x[0].size for x in sparse])
  parts = [np.where(sent[a:b], acc[:, a:b], 0) for a, b in itertools.pairwise(columns)]
  check_means(parts, update, saturated=skips)
  check_means(dense, dense_update, saturated=skips)
  check_stats(structure, acc, old, got, sent, counts, sent_counts)
  if structure.name == "deft" and (counts == sent_counts).all() and np.isfinite(acc).all():
    check_pieces(structure, acc, int(old.step), sent)
  check_rules(structure, size, acc, old, got)
  if skips:
    held = jax.tree.leaves((after.residual, got.threshold, got.memory, got.stats, update))
    assert all(np.isfinite(x.astype(np.float32)).all() for x in held if is_float(x)), "NaN or Inf"


def agreed(workers, tree):
  """What all workers hold, once; fails unless it is the same, bit by bit."""
  for x in jax.tree.leaves(tree):
    assert all(row.tobytes() == x[0].tobytes() for row in x), "workers disagree"
  return w.copies(workers, tree)[0]


def check_conservation(acc, residual, sent):
  """An element stays on all workers, or is sent by all and leaves nothing behind; exactly."""
  np.testing.assert_array_equal(flush(residual), np.where(sent, 0, acc), "conservation")


def check_means(values, update, *, saturated):
  """The updates are the means of ``values``, leaf by leaf, as far as their dtypes allow."""
  for x, mean in zip(values, update, strict=True):
    n, dtype = len(x), mean.dtype
    wide, mean = x.astype(np.float64).reshape(n, -1), mean.astype(np.float64).reshape(-1)
    largest = float(jnp.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
      expected, scale = wide.mean(axis=0), np.abs(wide).mean(axis=0)
    if saturated:
      assert np.isfinite(mean).all(), "an update that is not finite"
      expected = np.clip(expected, -largest, largest)
    sums = np.finfo(np.float16).max if x.dtype == np.float16 else LARGEST
    fits = np.isfinite(expected) & (scale * n < float(sums)) & (np.abs(expected) < largest)
    rounding = n * max(EPSILON, float(jnp.finfo(x.dtype).eps)) * scale
    rounding += float(jnp.finfo(dtype).eps) * np.abs(expected) + n * TINY
    rounding += float(jnp.finfo(dtype).smallest_subnormal)
    with np.errstate(invalid="ignore"):
      assert (np.abs(mean - expected) <= rounding)[fits].all(), "a mean is wrong"
    assert np.isnan(mean[np.isnan(wide).any(axis=0)]).all(), "a NaN got lost"


def check_skipped(structure, before, old, after, got, update):
  """Nothing but the statistics changes; too many such steps in a row return NaN."""
  jax.tree.map(np.testing.assert_array_equal, before._replace(stats=()), after._replace(stats=()))
  skips, most = old.stats.consecutive_skips + 1, structure.options["max_consecutive_skips"]
  assert got.stats.consecutive_skips == skips
  stopped = most is not None and skips > most
  assert all(np.isnan(x).all() if stopped else not x.any() for x in update)
  stats = got.stats
  assert stats.skipped == old.stats.skipped + 1 and stats.selected == stats.overflow == 0
  assert not stats.counts.any() and stats.padding_ratio == 1 and stats.density == 0
  assert np.isfinite(stats.threshold_used)
  check_bytes(structure, before.residual.shape[1], 0, got)


def check_dense_stats(structure, leaves, size, got):
  n, stats = structure.n, got.stats
  assert stats.density == 1 and stats.selected == stats.counts.sum() == size
  assert np.ptp(stats.counts) <= 1 and stats.overflow == stats.skipped == 0
  traffic = sum(2 * (n - 1) / n * x[0].size * x.dtype.itemsize for x in leaves)
  np.testing.assert_allclose(stats.bytes_sent, traffic, rtol=1e-6)


def what_is_sent(structure, acc, old, got, after):
  """bool [N], what is sent; how many each worker picks, and sends."""
  size, t = acc.shape[1], int(old.step)
  picks = expect.picks_of(structure, acc, old, got)
  if picks is None:  # no reference: what has left the residual, and zeros that nobody would miss
    left = flush(after.residual)
    sent = ((left != acc) & ~(np.isnan(left) & np.isnan(acc))).any(axis=0)
    sent |= got.stats.selected == size
    counts = got.stats.counts
    limit = expect.allowed_of(structure, size, t)
    return sent, counts, counts if limit is None else np.minimum(counts, limit)
  limit = expect.allowed_of(structure, size, t)
  kept = [oracle.truncate(x, limit, t) for x in picks]
  sent = np.zeros(size, bool)
  sent[np.concatenate(kept).astype(int)] = True
  return sent, np.array([len(x) for x in picks]), np.array([len(x) for x in kept])


def check_bytes(structure, size, most, got):
  expected = expect.bytes_of(structure, size, most)
  np.testing.assert_allclose(got.stats.bytes_sent, expected, rtol=1e-5, err_msg="bytes")


def check_stats(structure, acc, old, got, sent, counts, sent_counts):
  size = acc.shape[1]
  stats, name, t = got.stats, structure.name, int(old.step)
  np.testing.assert_array_equal(stats.counts, counts, "counts")
  total, n = int(counts.sum()), structure.n
  k = wanted(structure, size, t)
  if name == "random_k":
    zeros = (acc == 0).all(axis=0) & ~sent  # which of them are sent, nobody can see
    assert (counts == k).all() and sent.sum() <= k <= sent.sum() + zeros.sum()
  else:
    assert stats.selected == sent.sum(), "selected"
  assert name not in EXCLUSIVE or stats.selected == sent_counts.sum(), "picked twice"
  assert stats.overflow == total - sent_counts.sum() or name in COMMON
  limit = expect.allowed_of(structure, size, t)
  assert limit is None or stats.selected <= limit * (1 if name in COMMON else n), "capacity"
  assert stats.skipped == old.stats.skipped and stats.consecutive_skips == 0
  assert got.step == old.step + 1
  np.testing.assert_allclose(stats.density, stats.selected / size, rtol=1e-6)
  padding = n * counts.max() / total if total else 1.0
  np.testing.assert_allclose(stats.padding_ratio, padding, rtol=1e-6)
  check_bytes(structure, size, int(sent_counts.max()), got)


def check_pieces(structure, acc, t, sent):
  """Of each piece the largest entries on one worker are sent, or what its listers have, if all.

  Who looks for which piece, and how many entries, rests on sums and logarithms in another order
  than that of the reference: any worker will do, and one entry more or less.
  """
  n, size = acc.shape
  if wanted(structure, size, t) == size:
    assert sent.all()
    return
  sizes = expect.pieces_of(structure)
  edges = list(itertools.pairwise(np.cumsum([0, *sizes])))
  norms = [[np.linalg.norm(row[a:b].astype(np.float64)) for a, b in edges] for row in acc]
  k = wanted(structure, size, t)
  shares = [family_oracle.deft_counts(row, sizes, k) for row in norms]
  lister = (np.arange(size) - t) % n
  listed = acc[lister, np.arange(size)] != 0
  for i, (a, b) in enumerate(edges):
    found = set(np.flatnonzero(sent[a:b]))
    possible = [
      set(family_oracle.largest(np.abs(acc[r, a:b]), max(shares[r][i] + more, 1)))
      for r in range(n)
      for more in (-1, 0, 1)
    ]
    if shares[t % n][i] + 1 >= b - a:
      possible.append(set(np.flatnonzero(listed[a:b])))
    assert found in possible, "the largest of a piece"


def check_rules(structure, size, acc, old, got):
  """Thresholds and boundaries of the next step."""
  name, options, t = structure.name, structure.options, int(old.step)
  assert np.isfinite(got.threshold) and got.threshold >= 0
  if name == "hard_threshold":
    k = wanted(structure, size, t + 1)
    expected = options.get("threshold") or 1 / (2 * math.sqrt(k))
    np.testing.assert_allclose(got.threshold, expected, rtol=1e-6)
  if name not in ("exdyna", "micro"):
    return
  k, total, counts = wanted(structure, size, t), int(got.stats.counts.sum()), got.stats.counts
  used = float(got.stats.threshold_used)
  is_one = structure.schedule is None and structure.density == 1
  if is_one or k == size:  # all is asked for
    assert used == 0
  elif options["threshold"] == "paper":
    assert used == old.threshold
  if is_one:
    assert got.threshold == old.threshold
  elif options["threshold"] == "paper":
    expected = oracle.paper_threshold(float(old.threshold), total, k)
    np.testing.assert_allclose(got.threshold, max(expected, TINY), rtol=1e-6)
  lost = getattr(old.memory, "threshold_rule", old.memory).lost
  if lost and k < size and not is_one and options["threshold"] != "paper":
    check_search(acc, t, expect.edges_of(structure, size, old), used, k)
  if name == "micro":
    np.testing.assert_array_equal(got.boundaries, expect.edges_of(structure, size, old))
    return
  n, lengths, blocks = structure.n, np.diff(got.boundaries), expect.blocks_of(structure, size)
  assert got.boundaries[0] == 0 and got.boundaries[-1] == blocks.num_blocks and lengths.min() >= 0
  if options["partition"] == "paper":
    by_partition = [int(counts[(p - t) % n]) for p in range(n)]
    expected = oracle.paper_sweep(old.boundaries.tolist(), by_partition, blocks)
    np.testing.assert_array_equal(got.boundaries, expected, "the paper's sweep")
  else:
    assert lengths.min() >= 1 or blocks.num_blocks < n


def check_search(acc, t, edges, used, k):
  """The largest threshold that k elements reach, or all that are not zero."""
  n = len(acc)
  parts = [(t + r) % n for r in range(n)]
  own = np.abs(np.concatenate([acc[r, edges[p] : edges[p + 1]] for r, p in enumerate(parts)]))
  if np.isfinite(own).all():
    reached, beyond = ((own >= x).sum() for x in (np.float32(used), used * SEARCHED))
    assert reached >= min(k, np.count_nonzero(own)) and beyond < k, "search"
