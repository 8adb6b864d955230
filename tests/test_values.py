"""How values and indices travel: nothing gets lost, whatever the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from hypothesis import given, settings
from hypothesis import strategies as st

from exdyna_jax import Link, exdyna, packing, values
from exdyna_jax.blocks import even_blocks
from exdyna_jax.values import Wire

FEW_HOPS = Link(latency_us=1e6, bandwidth_gbit=1.0)  # the slowest start: gather
FEW_BYTES = Link(latency_us=1e-6, bandwidth_gbit=1e-3)  # the slowest line: psum or scatter


@settings(max_examples=50)
@given(numbers=st.lists(st.integers(0, 2**16 - 1), max_size=9))
def test_pairs_of_16_bits(numbers):
  numbers = jnp.array(numbers, jnp.uint16)
  words = packing.pack(numbers)
  assert words.dtype == jnp.int32 and len(words) == packing.packed_length(len(numbers))
  np.testing.assert_array_equal(packing.unpack(words, len(numbers)), numbers)


@functools.partial(jax.jit, static_argnums=(1, 2))
def there_and_back(rows, count, size):
  encoded = jax.vmap(lambda row: packing.encode(row, size))(rows)
  return encoded, packing.decode(encoded, count, size)


@pytest.mark.parametrize("count, size", [(3000, 2**31 - 2**16), (1500, 3 * 2**16), (1500, 70_001)])
@pytest.mark.parametrize("spread", ["even", "first", "last", "none"])
def test_indices_survive_their_short_form(count, size, spread):
  """Gaps of more than 16 bits, all in one place, empty slots behind, nothing at all."""
  if size >> 16 > count:  # more marks than indices: not worth it
    assert not packing.is_packed(count, size)
    return
  rng = np.random.default_rng(0)
  low, high = {"even": (0, size), "first": (0, 2000), "last": (size - 2000, size)}.get(
    spread, (0, 0)
  )
  found = np.sort(rng.choice(np.arange(low, high), 1400, replace=False)) if high else np.zeros(0)
  row = np.full(count, size)
  row[: len(found)] = found
  rows = jnp.asarray(np.stack([row, np.full(count, size)]), jnp.int32)
  encoded, decoded = there_and_back(rows, count, size)
  assert packing.is_packed(count, size)
  assert encoded.shape[1] == packing.encoded_length(count, size) <= 0.75 * count
  np.testing.assert_array_equal(decoded, rows)


def test_short_messages_stay_as_they_are():
  row = jnp.arange(10, dtype=jnp.int32)
  assert packing.encode(row, 70_000) is row and packing.encoded_length(10, 70_000) == 10


def on_workers(rows, wire):
  n = len(rows)
  run = jax.vmap(lambda x: values.sum_values(x, wire, w.AXIS, n), axis_name=w.AXIS)
  return run(jnp.asarray(rows))


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize("link", [None, FEW_HOPS, FEW_BYTES])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
def test_the_books_balance(n, count, link, dtype):
  """What the workers keep and what is summed is what they had; all have the same sums."""
  rows = np.random.default_rng(n).standard_normal((n, count)).astype(np.float32)
  rows[0, 0] = 1e5 if dtype == jnp.float16 else 3.0  # too large for float16: a part stays
  sums, kept = on_workers(rows, Wire(dtype, link))
  for row in sums[1:]:
    np.testing.assert_array_equal(row, sums[0])
  total = np.asarray(sums[0], np.float64)
  if dtype is None:
    assert kept is None
  else:
    total += np.asarray(kept, np.float64).sum(axis=0)
    assert np.abs(kept).max() > 0
    if dtype == jnp.bfloat16:
      assert (np.abs(sums[0] - rows.sum(axis=0)) <= 0.01 * np.abs(rows).sum(axis=0)).all()
  np.testing.assert_allclose(total, rows.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_a_residual_of_16_bits_stays_finite():
  """The error of a sum that is too large for 16 bits is more than one residual can hold."""
  n, size = 3, 40
  options = {"wire_dtype": jnp.float16, "residual_dtype": jnp.float16}
  workers = stepper("vmap", n, size, **options)
  grads = jnp.full((n, size), 6e4)
  _, state = workers.step(workers.init(jnp.zeros(size)), grads)
  assert np.isfinite(state.residual).all() and w.stats_of(workers, state).selected > 0


def test_what_is_not_finite_is_sent_and_leaves_nothing():
  rows = np.array([[np.inf, np.nan, 1.0], [1.0, 1.0, np.inf]], np.float32)
  sums, kept = on_workers(rows, Wire(jnp.bfloat16))
  assert not np.isfinite(sums).any() and np.isfinite(kept).all()


def test_the_way_follows_the_link():
  """By hand: 4 workers, m = 10,000 float32 values; hops 6, 3, 4; kB 60, 120, 60."""
  plain, half = functools.partial(Wire, None), functools.partial(Wire, jnp.bfloat16)
  assert values.choose(plain(None), 4, 10_000, 4) == "psum"
  assert values.choose(half(None), 4, 10_000, 4) == "scatter"
  assert values.choose(half(None), 2, 10_000, 4) == "gather"
  assert values.choose(plain(FEW_HOPS), 4, 10_000, 4) == "gather"
  assert values.choose(plain(FEW_BYTES), 4, 10_000, 4) in ("psum", "scatter")
  # One hop more costs 100 us, twice the bytes 480 us at 1 Gbit, and 48 us at 10 Gbit.
  assert values.choose(plain(Link(100, 1)), 4, 10_000, 4) == "scatter"
  assert values.choose(plain(Link(100, 10)), 4, 10_000, 4) == "gather"
  assert values.value_bytes("scatter", 4, 10_000, 2) == 2 * 3 / 4 * 10_000 * 2
  assert values.traffic(plain(Link(100, 10)), 4, 10_000, 4) == (3, 3 * 10_000 * 4)


@functools.cache
def stepper(how, n, size, **options):
  return w.run_on(exdyna(0.05, w.AXIS, num_workers=n, **options), n, jnp.zeros(size), how)


@pytest.mark.parametrize("how", ["shard_map", "unchecked", "vmap"])
@pytest.mark.parametrize("link", [None, FEW_HOPS])
def test_a_step_in_16_bits_keeps_the_mass(how, link):
  """n u + residuals = what there was, in every step; and the picks are those of full precision."""
  n, size = 4, 400
  half = stepper(how, n, size, wire_dtype=jnp.bfloat16, link=link)
  full = stepper(how, n, size)
  state, plain = half.init(jnp.zeros(size)), full.init(jnp.zeros(size))
  rng = np.random.default_rng(0)
  for t in range(3):
    grads = rng.standard_normal((n, size)).astype(np.float32) ** 3
    acc = grads + w.residuals(half, state)
    updates, state = half.step(state, jnp.asarray(grads))
    shared, _ = w.agreed(half, updates, state)
    after = w.residuals(half, state).astype(np.float64)
    np.testing.assert_allclose(
      n * shared.astype(np.float64) + after.sum(axis=0),
      acc.sum(axis=0, dtype=np.float64),
      atol=1e-5 * np.abs(acc).max(),
    )
    if t == 0:
      expected, plain = full.step(plain, jnp.asarray(grads))
      expected = w.agreed(full, expected, plain)[0]
      np.testing.assert_array_equal(shared != 0, expected != 0)
      np.testing.assert_allclose(shared, expected, rtol=0.02, atol=0.01 * np.abs(acc).max())


def test_packed_indices_arrive():
  """About 2,500 of each worker, packed: those that reach the threshold in its own range."""
  n, size = 2, 100_000
  workers = stepper("vmap", n, size)
  grads = jnp.asarray(np.random.default_rng(0).standard_normal((n, size)), jnp.float32)
  before = workers.init(jnp.zeros(size))
  updates, state = workers.step(before, grads)
  stats = w.stats_of(workers, state)
  slots = 3125
  assert packing.is_packed(slots, size)
  items = 2 + 8 + packing.encoded_length(slots, size)
  gathered = -(-items // 128) * 128 * 4
  assert stats.bytes_sent == gathered + n * slots * 4
  sent = np.flatnonzero(np.asarray(updates[0]))
  middle = int(before.boundaries[0, 1]) * even_blocks(size, 1024).block_size
  large = np.abs(np.asarray(grads)) >= np.float32(stats.threshold_used)
  expected = np.concatenate([large[0, :middle], large[1, middle:]])
  assert stats.overflow == 0 and len(sent) > 4000
  np.testing.assert_array_equal(sent, np.flatnonzero(expected))
  np.testing.assert_allclose(updates[0][sent], np.asarray(grads).mean(axis=0)[sent], rtol=1e-6)


@pytest.mark.parametrize(
  "options, error, words",
  [
    ({"wire_dtype": jnp.float32}, TypeError, "wire_dtype must be a float of 16 bits.*float32"),
    ({"wire_dtype": jnp.int8}, TypeError, "wire_dtype must be a floating-point dtype"),
    ({"link": (100, 1)}, TypeError, r"link must be exdyna_jax.Link\(.*got \(100, 1\)"),
    ({"link": Link(None, 1)}, TypeError, "link.latency_us must be a Python number, got None"),
    ({"link": Link(0, 1)}, ValueError, "link.latency_us must be positive.*got 0"),
  ],
)
def test_errors(options, error, words):
  with pytest.raises(error, match=words):
    exdyna(0.1, w.AXIS, **options)
