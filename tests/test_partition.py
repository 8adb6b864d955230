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
@given(size=st.integers(1, 10**7), n=st.integers(1, 64), num_blocks=st.sampled_from([1, 7, 1024]))
def test_geometry_tiles_the_vector(size, n, num_blocks):
  cut = geometry.even_blocks(size, n, num_blocks)
  assert cut == oracle.even_blocks(size, n, num_blocks)
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
  cut = geometry.paper_blocks(size, 1024) if paper else geometry.even_blocks(size, n, 1024)
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
  even = geometry.even_blocks(65535, 4, 1024)
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
