"""Recorded runs of the original implementations are replayed, in every step.

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

import exdyna_jax

# How the recorded algorithms are asked for.
RECORDED = {
  "exdyna": (exdyna_jax.exdyna, {"threshold": "paper", "partition": "paper"}),
  "micro": (exdyna_jax.micro, {"threshold": "paper"}),
  "deft": (exdyna_jax.deft, {}),
  "topk": (exdyna_jax.top_k, {}),
  "cltk": (exdyna_jax.clt_k, {}),
  "thresh": (exdyna_jax.hard_threshold, {}),
}

DATA = pathlib.Path(__file__).parent / "data"
SLOW_STEPS = 1000
# Sums over the workers are taken in another order than the original's.
VALUE_TOLERANCE = 1e-5
# Steps per compiled call: enough to make the loop cheap, few enough to hold their gradients.
STEPS_PER_CALL = 30


def recorded_runs():
  """The recorded runs as test parameters, the long ones marked slow."""
  runs = []
  for path in sorted(DATA.glob("*.npz")):
    steps = int(path.stem.split("_it")[1])
    marks = [pytest.mark.slow] if steps >= SLOW_STEPS else []
    runs.append(pytest.param(path, id=path.stem, marks=marks))
  return runs


@functools.cache
def replayer(name, size, n, density):
  make, options = RECORDED[name]
  if name not in ("topk", "cltk"):  # they never truncate
    options = {**options, "capacity_factor": None}
  tx = make(density, w.AXIS, num_workers=n, **options)
  # The layers, which deft has to know.
  edges = np.cumsum(inputs.layer_sizes(size))[:-1]

  def layers(vector):
    return jnp.split(vector, edges)

  def steps(state, grads):
    def body(state, grads):
      used = state.boundaries
      updates, state = tx.update(layers(grads), state)
      update = jnp.concatenate(updates)
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

  init = jax.vmap(lambda _: tx.init(layers(jnp.zeros(size))), axis_name=w.AXIS)
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
  name = path.stem.split("_")[0]
  recorded = np.load(path)
  meta = json.loads(str(recorded["meta"]))
  size, n, steps = meta["N"], meta["n"], meta["iters"]
  with jax.enable_x64(True):
    state, run = replayer(name, size, n, meta["density"])
    seen = {}
    for first in range(0, steps, STEPS_PER_CALL):
      last = min(first + STEPS_PER_CALL, steps)
      grads = np.stack([[inputs.grad(size, t, r) for t in range(first, last)] for r in range(n)])
      state, got = run(state, grads)
      for quantity, value in got.items():
        value = np.asarray(value)
        per_worker = np.swapaxes(value, 0, 1) if quantity == "res_norm" else value[0]
        seen.setdefault(quantity, []).append(per_worker)
        if quantity == "update":
          seen[quantity] = [seen[quantity][0][:1], per_worker[-1:]]
  # Only some algorithms have a threshold or blocks: where there are none, nothing is recorded.
  compared = {x for x in seen if x in recorded.files and not np.isnan(recorded[x]).any()}
  assert {"counts", "total"} <= compared
  assert ({"thr"} <= compared) == (name in ("exdyna", "micro"))
  assert ({"blk_part", "blk_pos"} <= compared) == (name == "exdyna")
  for quantity in compared:
    in_step(quantity, recorded, seen)
  if "idx_first" in recorded.files:
    for when, update in zip(("first", "last"), seen["update"], strict=True):
      indices = np.flatnonzero(update[0])
      np.testing.assert_array_equal(indices, recorded[f"idx_{when}"])
      np.testing.assert_allclose(
        update[0][indices], recorded[f"out_{when}"], rtol=VALUE_TOLERANCE, atol=1e-9
      )
