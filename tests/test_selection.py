"""Selection against np.flatnonzero, at the limits of its chunks, words and rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exdyna_jax import accumulator, ranks, selection
from exdyna_jax.integers import mul_div

SIZES = (1, 33, 1000, selection.CHUNK - 1, selection.CHUNK, 3 * selection.CHUNK + 5)
CAPACITY = 500
METHODS = {"walk": ranks.walk, "look_up": ranks.look_up}


@functools.partial(jax.jit, static_argnames=("capacity", "method", "chunk", "window"))
def select(acc, start, end, threshold, capacity, step=0, method=None, chunk=None, window=None):
  hits = selection.find(accumulator.made(acc), start, end, threshold, chunk=chunk, window=window)
  wanted = ranks.strided(jnp.arange(capacity), hits.found, capacity, jnp.int32(step))
  return ranks.take(hits, wanted, method=method), hits.found


def expected(acc, start, end, threshold, capacity):
  hits = np.flatnonzero(~(np.abs(acc[start:end]) < threshold)) + start
  slots = np.full(capacity, len(acc))
  kept = min(len(hits), capacity)
  slots[:kept] = hits[np.arange(kept) * len(hits) // kept] if kept else hits
  return slots, len(hits)


@settings(max_examples=40)
@given(
  size=st.sampled_from(SIZES),
  ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
  threshold=st.sampled_from([0.0, 0.5, 2.0, 3.0, 9.0]),
  fill=st.sampled_from(["normal", "cluster", "nan", "infinite", "equal"]),
  seed=st.integers(0, 2**32 - 1),
)
def test_equals_flatnonzero(size, ends, threshold, fill, seed):
  rng = np.random.default_rng(seed)
  acc = rng.standard_normal(size).astype(np.float32)
  start, end = sorted(round(x * size) for x in ends)
  if fill == "cluster":
    acc[max(end - 700, 0) : end] = 5
  elif fill == "equal":
    acc[:] = threshold
  elif fill != "normal":
    acc[rng.integers(0, size, size // 20)] = np.nan if fill == "nan" else -np.inf
  want, want_count = expected(acc, start, end, threshold, CAPACITY)
  # The last two: most ranges are longer than the window.
  ways = [(ranks.walk, None, None), (ranks.look_up, None, None), (ranks.look_up, 2048, None)]
  ways += [(ranks.walk, None, 500), (ranks.look_up, None, 500)]
  for method, chunk, window in ways:
    limits = jnp.int32(start), jnp.int32(end)
    how = {"method": method, "chunk": chunk, "window": window}
    got, count = select(acc, *limits, np.float32(threshold), CAPACITY, **how)
    assert count == want_count
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("allowed", [100, 700, 5000])
def test_slots_of_further_messages(method, allowed):
  rng = np.random.default_rng(0)
  acc = rng.standard_normal(5000).astype(np.float32)
  whole = accumulator.made(jnp.asarray(acc))
  hits = selection.find(whole, jnp.int32(7), jnp.int32(4800), jnp.float32(1))
  want = np.flatnonzero(np.abs(acc[7:4800]) >= 1) + 7
  want = want[oracle.truncate(range(len(want)), allowed, 3)]
  want = np.append(want, [len(acc)] * 5000)
  for first in (0, 1, 90, 650, 1400, 4000):
    slots = jnp.arange(first, first + 50)
    wanted = ranks.strided(slots, hits.found, allowed, jnp.int32(3))
    got = ranks.take(hits, wanted, method=METHODS[method])
    np.testing.assert_array_equal(got, want[first : first + 50])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_accumulators_are_compared_in_float32(dtype):
  # Rounded to the narrow dtype, the threshold would equal the value below it.
  acc = jnp.asarray([1.0, 1.0078125, 2.0], dtype)
  got, count = select(acc, jnp.int32(0), jnp.int32(3), np.float32(1.001), 4)
  assert count == 2 and got.tolist() == [1, 2, 3, 3]


@settings(max_examples=80)
@given(
  capacity=st.sampled_from([1, 3, 7, 1000, 65537]),
  count=st.integers(0, 2**31 - 2),
  step=st.integers(0, 2**31 - 1),
)
def test_strided_ranks_are_exact(capacity, count, step):
  strided = ranks.strided(jnp.arange(capacity), jnp.int32(count), capacity, jnp.int32(step))
  got = np.asarray(ranks.rank_of(strided))
  want = np.arange(count, dtype=np.int64) if count <= capacity else None
  if want is None:
    want = oracle.truncate(range(count), capacity, step)
  np.testing.assert_array_equal(got[: len(want)], want)
  assert (got[len(want) :] == count).all()


def test_strides_reach_every_hit():
  """With the same stride in every step, what lies between its hits would wait for ever."""
  capacity, count = 10, 73
  sent = [
    ranks.rank_of(ranks.strided(jnp.arange(capacity), jnp.int32(count), capacity, jnp.int32(step)))
    for step in range(20)
  ]
  assert len(np.unique(sent)) == count


@settings(max_examples=80)
@given(a=st.integers(0, 2**31 - 1), b=st.integers(0, 2**31 - 1), c=st.integers(1, 2**20))
def test_mul_div_is_exact(a, b, c):
  b = min(b, (2**31 - 1) * c // max(a, 1) // 2)  # the quotient must be an int32
  assert int(mul_div(jnp.int32(a), jnp.int32(b), c)) == a * b // c
  assert int(mul_div(jnp.int32(a), jnp.int32(b), c, add=c)) == a * b // c + 1


@pytest.mark.parametrize("chunk", [4096, 8192])
@pytest.mark.parametrize("every", [1, 4])
def test_counts_at_levels(chunk, every):
  """Of every few rows from the start of the range on, the one whose turn it is in this step."""
  rng = np.random.default_rng(0)
  acc = rng.standard_normal(7 * 4096).astype(np.float32)
  start, end, step = 777, 777 + 4 * 4096 - 100, 6
  levels = np.array([0.5, 1.0, 2.0], np.float32)
  whole = accumulator.made(jnp.asarray(acc))
  got = selection.count_reaching(
    whole, jnp.int32(start), jnp.int32(end), levels, every=every, step=step, chunk=chunk
  )
  part = np.abs(acc[start : start + 4 * 4096])
  part[end - start :] = 0
  seen = part.reshape(-1, every, selection.ROW_SIZE)[:, step % every]
  assert got.tolist() == [int((seen >= level).sum()) for level in levels]
