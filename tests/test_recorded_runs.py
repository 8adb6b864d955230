"""The paper mode replays recorded runs of the original implementation, in every step.

`data/README.md` says what was recorded. The original keeps its threshold in float64, so these
tests enable it; values are compared in float32, as everywhere.
"""

import functools
import json
import pathlib

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w

from exdyna_jax import exdyna

DATA = pathlib.Path(__file__).parent / "data"
SLOW_STEPS = 1000
# Sums over the workers are taken in another order than the original's.
VALUE_TOLERANCE = 1e-5
# Steps per compiled call: enough to make the loop cheap, few enough to hold their gradients.
STEPS_PER_CALL = 30


def recorded_runs():
  """The recorded runs as test parameters, the long ones marked slow."""
  runs = []
  for path in sorted(DATA.glob("exdyna_*.npz")):
    steps = int(path.stem.split("_it")[1])
    marks = [pytest.mark.slow] if steps >= SLOW_STEPS else []
    runs.append(pytest.param(path, id=path.stem, marks=marks))
  return runs


@functools.cache
def replayer(size, n, density):
  tx = exdyna(
    density, w.AXIS, threshold="paper", partition="paper", capacity_factor=None, num_workers=n
  )

  def steps(state, grads):
    def body(state, grads):
      used = state.boundaries
      update, state = tx.update(grads, state)
      nonzero = jnp.nonzero(update, size=size, fill_value=0)[0]
      wide = update.astype(jnp.float64)
      seen = {
        "counts": state.stats.counts,
        "total": state.stats.selected,
        "thr": state.stats.threshold_used,
        "blk_part": jnp.diff(used),
        "blk_pos": used[:-1],
        "idx_sum": nonzero.astype(jnp.int64).sum(),
        "idx_xor": jax.lax.reduce_xor(nonzero.astype(jnp.int64), axes=(0,)),
        "out_sum": wide.sum(),
        "out_abs": jnp.abs(wide).sum(),
        "res_norm": jnp.linalg.norm(state.residual.astype(jnp.float64)),
        "update": update,
      }
      return state, seen

    return jax.lax.scan(body, state, grads)

  init = jax.vmap(lambda _: tx.init(jnp.zeros(size)), axis_name=w.AXIS)
  return init(jnp.arange(n)), jax.jit(jax.vmap(steps, axis_name=w.AXIS))


def in_step(name, recorded, seen):
  """Compares one recorded array with ours, step by step."""
  exact = {"counts", "total", "thr", "blk_part", "blk_pos", "idx_sum", "idx_xor"}
  ours = np.concatenate(seen[name])
  if name in exact:
    np.testing.assert_array_equal(ours, recorded[name], err_msg=name)
  else:
    scale = np.concatenate(seen["out_abs"]) if name == "out_sum" else np.abs(recorded[name])
    assert np.all(np.abs(ours - recorded[name]) <= VALUE_TOLERANCE * scale), name


@pytest.mark.parametrize("path", recorded_runs())
def test_replays_every_step(path):
  recorded = np.load(path)
  meta = json.loads(str(recorded["meta"]))
  size, n, steps = meta["N"], meta["n"], meta["iters"]
  with jax.enable_x64(True):
    state, run = replayer(size, n, meta["density"])
    seen = {}
    for first in range(0, steps, STEPS_PER_CALL):
      grads = np.stack(
        [[inputs.grad(size, t, r) for t in range(first, first + STEPS_PER_CALL)] for r in range(n)]
      )
      state, got = run(state, grads)
      for name, value in got.items():
        value = np.asarray(value)
        per_worker = np.swapaxes(value, 0, 1) if name == "res_norm" else value[0]
        seen.setdefault(name, []).append(per_worker)
        if name == "update":
          seen[name] = [seen[name][0][:1], per_worker[-1:]]
  compared = [name for name in seen if name != "update" and name in recorded.files]
  assert {"counts", "total", "thr", "blk_part", "blk_pos"} <= set(compared)
  for name in compared:
    in_step(name, recorded, seen)
  if "idx_first" in recorded.files:
    for when, update in zip(("first", "last"), seen["update"], strict=True):
      indices = np.flatnonzero(update[0])
      np.testing.assert_array_equal(indices, recorded[f"idx_{when}"])
      np.testing.assert_allclose(
        update[0][indices], recorded[f"out_{when}"], rtol=VALUE_TOLERANCE, atol=1e-9
      )
