"""How DEFT cuts layers, shares k and packs bins: by hand and against the oracle."""

import family_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from hypothesis import given, settings
from hypothesis import strategies as st

from exdyna_jax import deft, layers


def test_cut_by_hand():
  pieces = layers.cut_layers((10, 0, 3, 1, 11), 4)
  # 25 / 4 is more than 3 and less than 10.
  assert pieces.sizes.tolist() == [3, 3, 2, 2, 3, 1, 3, 3, 3, 2]
  assert pieces.starts.tolist() == [0, 3, 6, 8, 10, 13, 14, 17, 20, 23]
  np.testing.assert_array_equal(
    layers.piece_of(pieces), np.repeat(np.arange(len(pieces.sizes)), pieces.sizes)
  )


def test_an_equal_share_is_not_cut():
  assert layers.cut_layers((4, 4, 4, 4), 4).sizes.tolist() == [4, 4, 4, 4]
  assert layers.cut_layers((5,), 1).sizes.tolist() == [5]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), n=st.sampled_from([1, 2, 3, 8]), k=st.integers(1, 300))
def test_shares_and_bins_are_the_oracles(seed, n, k):
  rng = np.random.default_rng(seed)
  pieces = layers.cut_layers((40, 1, 7, 100, 12, 3, 60, 1), n)
  sizes = pieces.sizes.tolist()
  vector = rng.standard_normal(sum(sizes)) ** 3 * np.repeat(rng.uniform(0.1, 10, len(sizes)), sizes)
  norms = layers.norms(jnp.abs(jnp.asarray(vector, jnp.float32)), pieces)
  expected = [np.linalg.norm(x) for x in np.split(vector, pieces.starts[1:])]
  scale = np.asarray(norms)[0] / expected[0]  # a power of two
  assert np.log2(scale) == pytest.approx(round(np.log2(scale)), abs=1e-5)
  np.testing.assert_allclose(norms, scale * np.array(expected), rtol=1e-5)

  counts = layers.shares(norms, pieces, k)
  expected = oracle.deft_counts([float(x) for x in norms], sizes, k)
  np.testing.assert_array_equal(counts, expected)
  bins = layers.bins(counts, pieces, n)
  np.testing.assert_array_equal(bins, oracle.deft_bins(expected, sizes, n))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e37, np.nan, np.inf])
def test_norms_of_any_size_give_counts_in_range(scale):
  pieces = layers.cut_layers((8, 5, 1), 2)
  magnitudes = jnp.arange(14, dtype=jnp.float32) * scale
  counts = layers.shares(layers.norms(magnitudes, pieces), pieces, 6)
  assert (counts >= 1).all() and (counts <= pieces.sizes).all()
  if 0 < scale < np.inf:
    np.testing.assert_array_equal(
      counts, layers.shares(layers.norms(magnitudes / scale, pieces), pieces, 6)
    )


@pytest.mark.parametrize("n", [1, 4])
def test_more_layers_than_k_are_all_sent(n):
  """Sixty scalars and k = 1: every layer sends one entry, its only one."""
  params = [jnp.zeros(()) for _ in range(60)]
  workers = w.run_on(deft(1e-3, w.AXIS, capacity_factor=None), n, params, "vmap")
  values = np.random.default_rng(0).standard_normal((60, n))
  updates, state = workers.step(workers.init(params), [jnp.asarray(x, jnp.float32) for x in values])
  np.testing.assert_allclose(np.stack(updates)[:, 0], values.mean(axis=1), atol=1e-6)
  stats = w.stats_of(workers, state)
  assert stats.counts.tolist() == [60 // n] * n and stats.selected == 60
  assert not np.any(state.residual)


def test_equal_magnitudes_are_not_over_selected():
  """Where all entries tie, still only k_l of a layer are sent, the first ones."""
  n, params = 2, [jnp.zeros(100), jnp.zeros(10)]
  workers = w.run_on(deft(0.2, w.AXIS, capacity_factor=None), n, params, "vmap")
  updates, state = workers.step(
    workers.init(params), jax.tree.map(lambda x: 1 + jnp.zeros((n, *x.shape)), params)
  )
  acc = np.ones((n, 110), np.float32)
  picks = np.concatenate(oracle.deft(0, acc, 22, [100, 10]))
  np.testing.assert_array_equal(np.flatnonzero(np.concatenate(updates, axis=1)[0]), np.sort(picks))
