"""The reference itself, against cases done by hand."""

import inputs
import numpy as np
import oracle
import pytest

# Four partitions of 8 blocks of 32 elements. With 400 picked entries the mean is 100, the upper
# bound 105, the lower one 95.2; a moved block takes int(32 * 400 / 1024) = 12 entries with it;
# partitions give blocks away down to 32 / (4 * 4) = 2 blocks.
SWEEP_BLOCKS = oracle.Blocks(size=1024, block_size=32, num_blocks=32)
SWEEP_START = [0, 8, 16, 24, 32]

SWEEP_CASES = {
  # 0 gives to 1: [118, 106, 80, 96]. Only now is 1 above 105, so it gives to 2: [118, 94, 92, 96].
  # Then 2 is low, but 3 is not high. With counts left as they were, 1 (94) would keep its block.
  "right_then_gives": ([130, 94, 80, 96], [0, 7, 15, 24, 32]),
  # 0 gives to 1: [108, 102, 110, 80]. Now 1 is in the band and takes nothing from 2; 2 gives to 3.
  # With counts left as they were, 1 (90) would take a block from 2 (110) as well.
  "right_then_takes_not": ([120, 90, 110, 80], [0, 7, 16, 23, 32]),
  # 0 takes from 1: [92, 94, 120, 94]. Only now is 1 below 95.2, so it takes from 2:
  # [92, 106, 108, 94], and 2 gives to 3. With counts left as they were, 1 (106) would take nothing.
  "left_then_takes": ([80, 106, 120, 94], [0, 9, 17, 23, 32]),
  # 0 takes from 1: [92, 96, 90, 122]. Now 1 is in the band and gives nothing to 2; 2 takes from 3.
  # With counts left as they were, 1 (108) would give a block to 2 (90) as well.
  "left_then_gives_not": ([80, 108, 90, 122], [0, 9, 16, 25, 32]),
  # 0 gives to 1: [118, 105, 80, 97]. The 12 entries are 12.5 rounded down, so 1 is not above 105.
  "right_rounded_down": ([130, 93, 80, 97], [0, 7, 16, 24, 32]),
}


@pytest.mark.parametrize("counts, expected", SWEEP_CASES.values(), ids=SWEEP_CASES.keys())
def test_sweep_sees_its_own_moves(counts, expected):
  """The counts move with the blocks inside a sweep.

  The recorded runs cannot tell: there a block takes no more than three entries with it.
  """
  assert oracle.paper_sweep(SWEEP_START, counts, SWEEP_BLOCKS) == expected


@pytest.mark.parametrize(
  "counts", [[190, 100, 10, 100], [105, 90, 105, 100]], ids=["inside", "on_the_edge"]
)
def test_sweep_needs_neighbours_on_both_sides_of_the_band(counts):
  """A weakness of the original that paper mode keeps: with one of them inside, nothing moves."""
  assert oracle.paper_sweep(SWEEP_START, counts, SWEEP_BLOCKS) == SWEEP_START


@pytest.mark.parametrize(
  "start, counts, expected",
  [
    ([0, 3, 16, 24, 32], [200, 0, 100, 100], [0, 2, 16, 24, 32]),
    ([0, 2, 16, 24, 32], [200, 0, 100, 100], [0, 2, 16, 24, 32]),
    ([0, 13, 16, 24, 32], [0, 200, 100, 100], [0, 14, 16, 24, 32]),
    ([0, 14, 16, 24, 32], [0, 200, 100, 100], [0, 14, 16, 24, 32]),
  ],
  ids=["last_to_the_right", "none_to_the_right", "last_to_the_left", "none_to_the_left"],
)
def test_sweep_stops_at_the_shortest_partition(start, counts, expected):
  """A partition of 3 blocks still gives one away, a partition of 2 keeps both."""
  assert oracle.paper_sweep(start, counts, SWEEP_BLOCKS) == expected


@pytest.mark.parametrize("num_blocks, n", [(0, 1), (0, 3), (1, 4), (3, 8), (5, 4), (1024, 7)])
def test_sweeps_keep_partitions_tiling(num_blocks, n):
  """Boundaries stay ordered and nobody loses the last block, empty partitions included."""
  rng = np.random.default_rng(0)
  blocks = oracle.Blocks(size=num_blocks * 2, block_size=2, num_blocks=num_blocks)
  boundaries = oracle.initial_boundaries(num_blocks, n)
  had_one = np.diff(boundaries) > 0
  for _ in range(100):
    boundaries = oracle.paper_sweep(boundaries, rng.integers(0, 20, n), blocks)
    assert boundaries[0] == 0 and boundaries[-1] == num_blocks and len(boundaries) == n + 1
    assert (np.diff(boundaries) >= had_one).all()


def test_paper_threshold_has_three_gains():
  """Each edge of the band belongs to the gain below it."""
  wanted, threshold = 1000, 2.0
  edges = [(1101, 1.005), (1100, 1.00125), (910, 1.00125), (909, 0.995), (0, 0.995)]
  for picked, gain in edges:
    assert oracle.paper_threshold(threshold, picked, wanted) == threshold * gain


def test_paper_blocks_leave_the_tail_to_the_last_partition():
  """Nearly half of this vector is tail, the original's worst case."""
  blocks = oracle.paper_blocks(65535)
  assert blocks == oracle.Blocks(size=65535, block_size=32, num_blocks=1024)
  assert oracle.position(blocks, 1023) == 1023 * 32
  assert oracle.position(blocks, 1024) == 65535
  with pytest.raises(ValueError, match="32767"):
    oracle.paper_blocks(32767)


@pytest.mark.parametrize("size", [0, 1, 2, 31, 127, 128, 1000, 4096, 32768, 65535, 1_000_003])
def test_even_blocks_cover_every_size(size):
  """No block is longer than the others, the last one is not empty, large ones are aligned."""
  blocks = oracle.even_blocks(size)
  ends = [oracle.position(blocks, b) for b in range(blocks.num_blocks + 1)]
  lengths = np.diff(ends)
  assert ends[0] == 0 and ends[-1] == size
  assert (lengths[:-1] == blocks.block_size).all()
  assert (lengths > 0).all() and (lengths <= blocks.block_size).all()
  assert blocks.num_blocks <= oracle.DEFAULT_NUM_BLOCKS
  if size >= oracle.ALIGNMENT * oracle.DEFAULT_NUM_BLOCKS:
    assert blocks.block_size % oracle.ALIGNMENT == 0


def test_select_takes_what_is_not_below_the_threshold():
  """The threshold itself qualifies, in float32 (where 0.7 is less than in float64), and NaN too."""
  acc = np.array([9.0, 0.7, -0.7, 0.69, np.nan, -np.inf, 9.0], np.float32)
  assert oracle.select(acc, 1, 6, 0.7, 0).tolist() == [1, 2, 4, 5]


def test_select_falls_back_to_one_index_per_step():
  """The index walks through the range; an empty range has none to offer."""
  acc = np.zeros(10, np.float32)
  assert [oracle.select(acc, 4, 7, 1.0, t).tolist() for t in range(4)] == [[4], [5], [6], [4]]
  assert oracle.select(acc, 4, 4, 1.0, 0).size == 0
  assert oracle.select(acc, 4, 7, 1.0, 0, fallback=False).size == 0


def test_truncate_strides_evenly():
  """Rank j of 4 keeps hit floor((j * 10 + phase) / 4), phase 0 and then 6; what fits is left."""
  indices = np.arange(100, 110)
  assert oracle.truncate(indices, 4, 0).tolist() == [100, 102, 105, 107]
  assert oracle.truncate(indices, 4, 1).tolist() == [101, 104, 106, 109]
  assert oracle.truncate(indices, 10, 1).tolist() == indices.tolist()
  assert oracle.truncate(indices, None, 1).tolist() == indices.tolist()


def test_capacity_stays_between_one_and_the_vector():
  """At least one index a worker, at most all of them, and no limit where none is wanted."""
  assert oracle.capacity(100_000, 8, 1e-3, 1.25) == 16  # 1.25 * 100 / 8, rounded up
  assert oracle.capacity(5, 8, 1e-3, 1.25) == 1
  assert oracle.capacity(5, 1, 0.9, 100.0) == 5
  assert oracle.capacity(100_000, 8, 1e-3, None) is None
  assert oracle.capacity(100_000, 8, 1.0, 1.25) is None


SIZE, WORKERS, DENSITY = 300, 3, 0.05  # of the small runs below
ROUNDING = {"rtol": 1e-6, "atol": 1e-7}  # of a float32 mean of values of order 1


def _run(num_steps, *, density=DENSITY, **options):
  """Yields acc, update, the state before and after, and the info of each step of a small run."""
  after = oracle.init(SIZE, WORKERS, density)
  for t in range(num_steps):
    before, grads = after, inputs.grads(SIZE, t, WORKERS)
    update, after, info = oracle.step(before, grads, density=density, **options)
    yield grads + before.residual, update, before, after, info


@pytest.mark.parametrize("limit", [None, 2])
def test_nothing_is_lost(limit):
  """What is not sent stays in the residual, what the capacity cuts off included."""
  overflow = 0
  for acc, update, _, state, info in _run(40, capacity=limit):
    sent = np.zeros(SIZE, bool)
    sent[info["indices"]] = True
    assert sent.sum() == info["selected"] == info["counts"].sum() - info["overflow"]
    np.testing.assert_array_equal(state.residual, np.where(sent, 0, acc))
    np.testing.assert_allclose(update, np.where(sent, acc.mean(axis=0), 0), **ROUNDING)
    assert limit is None or info["selected"] <= limit * WORKERS
    overflow += info["overflow"]
  assert (overflow > 0) == (limit is not None)


def test_workers_choose_from_partitions_in_rotation():
  """Worker r owns partition (t + r) mod n, so in every step each of them picks from its own."""
  blocks = oracle.geometry(SIZE)
  for t, (_, _, before, _, info) in enumerate(_run(2 * WORKERS)):
    ends = [oracle.position(blocks, b) for b in before.boundaries]
    per_partition, _ = np.histogram(info["indices"], ends)
    assert [per_partition[(t + r) % WORKERS] for r in range(WORKERS)] == info["counts"].tolist()


def test_density_one_sends_everything_for_ever():
  """The threshold stays 0 and a capacity does not bind, so nothing ever waits in the residual."""
  for acc, update, _, state, info in _run(5, density=1.0, capacity=1):
    assert info["selected"] == SIZE and info["overflow"] == 0
    assert state.threshold == 0.0 and not state.residual.any()
    np.testing.assert_allclose(update, acc.mean(axis=0), **ROUNDING)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_skip_the_step(bad):
  """One bad entry on one worker: nobody moves, and only the skip is remembered."""
  *_, (_, _, _, before, _) = _run(4)
  grads = inputs.grads(SIZE, before.step, WORKERS)
  grads[1, 7] = bad
  update, after, info = oracle.step(before, grads, density=DENSITY)
  assert info["skipped"] and info["selected"] == 0 and not update.any()
  np.testing.assert_array_equal(after.residual, before.residual)
  assert after.skipped == before.skipped + 1
  assert (after.step, after.threshold, after.boundaries) == (
    before.step,
    before.threshold,
    before.boundaries,
  )


def test_nonfinite_gradients_propagate_on_request():
  """The owner of the entry picks NaN, so it reaches the update at once."""
  state = oracle.init(SIZE, WORKERS, DENSITY)
  grads = inputs.grads(SIZE, 0, WORKERS)
  grads[0, 7] = np.nan  # in step 0 worker 0 owns the first partition
  update, after, info = oracle.step(state, grads, density=DENSITY, nonfinite="propagate")
  assert np.flatnonzero(np.isnan(update)).tolist() == [7]
  assert not info["skipped"] and after.step == 1 and np.isfinite(after.residual).all()


@pytest.mark.parametrize("size, n", [(1, 1), (1, 3), (5, 8), (500, 1), (40_000, 5)])
def test_any_size_and_number_of_workers_runs(size, n):
  """More workers than elements, one worker, and sizes on both sides of the original's least."""
  gradients = [inputs.grads(size, t, n) for t in range(5)]
  run = list(oracle.simulate(oracle.init(size, n, DENSITY), gradients, density=DENSITY))
  for t, (_, state, info) in enumerate(run):
    assert len(np.unique(info["indices"])) == info["selected"] >= 1
    assert state.step == t + 1
