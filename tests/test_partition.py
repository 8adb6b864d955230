"""Block geometry and partitions against the NumPy reference and against cases done by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_oracle import SWEEP_BLOCKS, SWEEP_CASES, SWEEP_START

from exdyna_jax import blocks as geometry
from exdyna_jax import partition


@settings(max_examples=300)
@given(size=st.integers(1, 10**7), num_blocks=st.sampled_from([1, 7, 1024]))
def test_geometry_tiles_the_vector(size, num_blocks):
  cut = geometry.even_blocks(size, num_blocks)
  assert cut == oracle.even_blocks(size, num_blocks)
  assert (cut.num_blocks - 1) * cut.block_size < size <= cut.num_blocks * cut.block_size
  if size >= geometry.WORD * num_blocks:
    paper = geometry.paper_blocks(size, num_blocks)
    assert paper == oracle.paper_blocks(size, num_blocks)
    assert paper.block_size % geometry.WORD == 0 and paper.num_blocks == num_blocks


@pytest.mark.parametrize("size, n", [(65535, 4), (1000, 8), (3, 8), (1, 1), (200_000, 3)])
@pytest.mark.parametrize("paper", [True, False])
def test_partitions_tile_the_vector(size, n, paper):
  if paper and size < geometry.WORD * 1024:
    return
  cut = geometry.paper_blocks(size, 1024) if paper else geometry.even_blocks(size, 1024)
  boundaries = partition.equal_boundaries(cut.num_blocks, n)
  np.testing.assert_array_equal(boundaries, oracle.initial_boundaries(cut.num_blocks, n))
  ranges = [geometry.element_range(cut, boundaries, jnp.int32(p)) for p in range(n)]
  assert ranges[0][0] == 0 and ranges[-1][1] == size
  for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False):
    assert end == start
  if size >= n and not paper:
    assert all(start < end for start, end in ranges)


def test_the_original_tail_and_ours():
  """65535 elements, 4 workers: the original leaves half of the vector to the last partition."""
  paper = geometry.paper_blocks(65535, 1024)
  last = geometry.element_range(paper, partition.equal_boundaries(1024, 4), jnp.int32(3))
  assert (last[1] - last[0]) / 65535 > 0.6
  even = geometry.even_blocks(65535, 1024)
  last = geometry.element_range(even, partition.equal_boundaries(1024, 4), jnp.int32(3))
  assert abs((last[1] - last[0]) / 65535 - 1 / 4) < 0.01


def test_rotation():
  owners = [[int(partition.owned_partition(t, r, 3)) for r in range(3)] for t in range(4)]
  assert owners == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
  # Worker 0 owned partition 1 in step 1, so its count comes second.
  assert partition.by_partition(jnp.array([10, 20, 30]), jnp.int32(1)).tolist() == [30, 10, 20]


@functools.partial(jax.jit, static_argnums=2)
def sweep(boundaries, counts, cut):
  return partition.paper_boundaries(boundaries, counts, cut)


@pytest.mark.parametrize("counts, want", SWEEP_CASES.values(), ids=SWEEP_CASES.keys())
def test_counts_follow_within_the_sweep(counts, want):
  """The cases that `test_oracle.py` works out by hand."""
  got = sweep(jnp.array(SWEEP_START), jnp.array(counts), geometry.Blocks(*SWEEP_BLOCKS))
  assert got.tolist() == want


@settings(max_examples=200)
@given(n=st.integers(2, 9), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1, 20, 3000]))
def test_sweep_equals_the_reference(n, seed, spread):
  rng = np.random.default_rng(seed)
  cut = geometry.paper_blocks(200_000, 1024)
  edges = np.sort(rng.choice(np.arange(1, 1024), n - 1, replace=False))
  boundaries = [0, *edges.tolist(), 1024]
  counts = rng.integers(0, spread, n)
  want = oracle.paper_sweep(boundaries, counts, oracle.Blocks(*cut))
  got = sweep(jnp.array(boundaries, jnp.int32), jnp.array(counts, jnp.int32), cut)
  assert got.tolist() == want and got.dtype == jnp.int32


balance = jax.jit(partition.balanced_boundaries, static_argnums=1)


@settings(max_examples=200)
@given(
  # Few shapes: each one is compiled.
  num_blocks=st.sampled_from([1, 4, 5, 40]),
  n=st.sampled_from([1, 3, 4, 8]),
  kind=st.sampled_from(["random", "zeros", "one", "sparse", "ramp"]),
  seed=st.integers(0, 2**32 - 1),
)
def test_balanced_boundaries_are_equal_shares(num_blocks, n, kind, seed):
  rng = np.random.default_rng(seed)
  loads = {
    "random": rng.random(num_blocks),
    "zeros": np.zeros(num_blocks),
    "one": np.eye(1, num_blocks, num_blocks // 2)[0],
    "sparse": rng.random(num_blocks) * (rng.random(num_blocks) < 0.2),
    "ramp": np.arange(num_blocks) ** 3.0,
  }[kind].astype(np.float32)
  edges = np.asarray(balance(jnp.asarray(loads), n))
  assert edges.dtype == np.int32 and edges[0] == 0 and edges[-1] == num_blocks
  if num_blocks < n:
    assert (np.diff(edges) >= 0).all()
    return
  assert (np.diff(edges) >= 1).all()
  # A boundary that the one-block minimum does not push lies within half a block of its share.
  sums = np.concatenate([[0], np.cumsum(loads, dtype=np.float64)])
  wanted = sums[-1] * np.arange(n + 1) / n
  free = (np.diff(edges)[:-1] > 1) & (np.diff(edges)[1:] > 1)
  for p in np.flatnonzero(free) + 1:
    near = np.argmin(np.abs(sums - wanted[p]))
    assert np.isclose(sums[edges[p]], sums[near], rtol=1e-5, atol=1e-5 * sums[-1])


def test_block_counts():
  cut = geometry.Blocks(size=10, block_size=4, num_blocks=3)
  counts = partition.block_counts(jnp.array([0, 3, 4, 9, 10, 10]), cut)
  assert counts.tolist() == [2, 1, 1]
  with_tail = geometry.Blocks(size=14, block_size=4, num_blocks=3)  # 12 and 13 are the tail
  assert partition.block_counts(jnp.array([13, 14]), with_tail).tolist() == [0, 0, 1]


def test_loads_scale_up_what_the_capacity_cut_off():
  edges = jnp.array([0, 2, 4])
  loads = partition.expected_loads(
    jnp.zeros(4), jnp.array([1.0, 1.0, 2.0, 0.0]), jnp.array([8, 2]), jnp.array([2, 2]), edges, k=5
  )
  np.testing.assert_allclose(loads, 0.1 * np.array([4, 4, 2, 0]) / 5, rtol=1e-6)
  unchanged = partition.expected_loads(
    jnp.ones(4), jnp.zeros(4), jnp.zeros(2, int), jnp.zeros(2, int), edges, k=5
  )
  assert unchanged.tolist() == [1, 1, 1, 1]
