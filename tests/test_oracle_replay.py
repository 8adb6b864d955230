"""The reference against recorded runs of the original, in every step."""

import json
import pathlib

import inputs
import numpy as np
import oracle
import pytest

DATA = pathlib.Path(__file__).parent / "data"
SLOW_STEPS = 1000  # runs of at least this many steps are marked slow
# The original sums workers in float32, in an order of its own, so values agree only nearly.
VALUE_TOLERANCE = 1e-5

EXACT = ("counts", "total", "thr", "blk_part", "blk_pos", "idx_sum", "idx_xor")
ENDS = ("first", "last")


def _recorded_runs():
  """Names of the recorded runs, as test parameters."""
  runs = []
  for name in sorted(path.stem for path in DATA.glob("exdyna_*.npz")):
    is_slow = int(name.rpartition("_it")[2]) >= SLOW_STEPS
    runs.append(pytest.param(name, marks=pytest.mark.slow if is_slow else ()))
  return runs


def _replay(meta):
  """Runs the oracle as `meta` says and records what the recorded runs hold, under their names."""
  size, n, density = meta["N"], meta["n"], meta["density"]
  gradients = (inputs.grads(size, t, n) for t in range(meta["iters"]))
  steps = []
  ends = {}
  start = oracle.init(size, n, density)
  for update, state, info in oracle.simulate(start, gradients, density=density):
    nonzero = np.flatnonzero(update)
    exact_update = update.astype(np.float64)
    bounds = info["boundaries_used"]
    steps.append(
      {
        "counts": info["counts"],
        "total": info["selected"],
        "thr": info["threshold_used"],
        "blk_part": np.diff(bounds),
        "blk_pos": bounds[:-1],
        "idx_sum": nonzero.sum(),
        "idx_xor": np.bitwise_xor.reduce(nonzero),
        "out_sum": exact_update.sum(),
        "out_abs": np.abs(exact_update).sum(),
        "res_norm": np.sqrt(np.square(state.residual, dtype=np.float64).sum(axis=1)),
      }
    )
    ends.setdefault("first", (nonzero, update[nonzero]))
    ends["last"] = (nonzero, update[nonzero])
  return {key: np.array([row[key] for row in steps]) for key in steps[0]}, ends


def test_recorded_runs_are_there():
  """Without the files the test below would have no cases and pass in silence."""
  assert _recorded_runs()


@pytest.mark.parametrize("run", _recorded_runs())
def test_recorded_run(run):
  """Every step picks what the original picked, with its threshold, partitions and residuals."""
  with np.load(DATA / f"{run}.npz") as arrays:
    recorded = dict(arrays)
  replayed, ends = _replay(json.loads(str(recorded["meta"])))

  for key in EXACT:
    if key in recorded:
      np.testing.assert_array_equal(replayed[key], recorded[key], err_msg=key)
  if "out_abs" in recorded:
    for key in ("out_abs", "res_norm"):
      np.testing.assert_allclose(replayed[key], recorded[key], VALUE_TOLERANCE, err_msg=key)
    # The sum cancels, so its error is measured against the sum of magnitudes.
    error = np.abs(replayed["out_sum"] - recorded["out_sum"])
    assert (error <= VALUE_TOLERANCE * recorded["out_abs"]).all()
  for end in ENDS:
    if f"idx_{end}" in recorded:
      nonzero, values = ends[end]
      np.testing.assert_array_equal(nonzero, recorded[f"idx_{end}"])
      scale = np.abs(recorded[f"out_{end}"]).mean()
      np.testing.assert_allclose(
        values, recorded[f"out_{end}"], VALUE_TOLERANCE, atol=VALUE_TOLERANCE * scale
      )
