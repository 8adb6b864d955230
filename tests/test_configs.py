"""JAX's own settings: a step works under each of them."""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workers as w
from family import DENSITY, FAMILY, PARAMS, early, gradients
from jax.sharding import PartitionSpec as P

from exdyna_jax import exdyna

N_WORKERS, SIZE = 2, 100

every = pytest.mark.parametrize("name", sorted(FAMILY))


def emulated(tx):
  """The first step of two workers, `[2, SIZE] -> updates [2, SIZE], state`."""
  return jax.vmap(lambda grads: tx.update(grads, tx.init(grads)), axis_name=w.AXIS)


def mapped(tx):
  """The same on two devices; the update comes once."""

  def step(grads):
    return tx.update(grads[0], tx.init(grads[0]))[0]

  return jax.shard_map(step, mesh=w.mesh_of(N_WORKERS), in_specs=P(w.AXIS), out_specs=P())


@functools.cache
def usual_update():
  """The update without any setting."""
  return np.asarray(jax.jit(emulated(exdyna(DENSITY, w.AXIS)))(values())[0])


def values():
  return jnp.asarray(np.random.default_rng(0).standard_normal((N_WORKERS, SIZE)), jnp.float32)


def strict_promotion():
  return jax.numpy_dtype_promotion("strict")


def no_rank_promotion():
  return jax.numpy_rank_promotion("raise")


@every
@pytest.mark.parametrize("setting", [strict_promotion, no_rank_promotion])
@pytest.mark.parametrize("density", [DENSITY, early])
def test_strict_promotion(name, setting, density):
  with setting():
    tx = FAMILY[name](density, w.AXIS)
    updates, _ = jax.eval_shape(emulated(tx), gradients(0, N_WORKERS))
  assert updates["w"].shape == (N_WORKERS, *PARAMS["w"].shape)


@pytest.mark.parametrize("setting", [strict_promotion, no_rank_promotion])
def test_strict_promotion_of_further_messages_and_half_precision(setting):
  with setting():
    tx = exdyna(DENSITY, w.AXIS, capacity_factor=None, residual_dtype=jnp.bfloat16)
    assert jax.eval_shape(emulated(tx), values())[0].dtype == jnp.float32


def test_promotion_of_the_user_is_untouched():
  with strict_promotion():
    jax.eval_shape(emulated(exdyna(DENSITY, w.AXIS)), values())
    with pytest.raises(jax.dtypes.TypePromotionError):
      jnp.ones(1, jnp.bfloat16) + jnp.ones(1, jnp.float32)


def test_debug_nans_finds_none_of_ours():
  """Not in a step that is skipped, either."""
  with jax.debug_nans(True):
    step = jax.jit(emulated(exdyna(DENSITY, w.AXIS)))
    np.testing.assert_array_equal(step(values())[0], usual_update())
    updates, state = step(values().at[0, 3].set(jnp.inf))
  assert not updates.any() and state.stats.skipped.tolist() == [1, 1]


def test_x64_gives_updates_of_its_precision():
  with jax.enable_x64(True):
    wide = values().astype(jnp.float64)
    updates, state = jax.jit(emulated(exdyna(DENSITY, w.AXIS, residual_dtype=jnp.float64)))(wide)
    assert updates.dtype == state.residual.dtype == jnp.float64
    np.testing.assert_allclose(updates, usual_update(), rtol=1e-6)


def test_disabled_jit_gives_the_same():
  # Under vmap: jax's own shard_map cannot run a loop without jit.
  with jax.disable_jit():
    updates, _ = emulated(exdyna(DENSITY, w.AXIS))(values())
  np.testing.assert_allclose(updates, usual_update(), rtol=1e-6)


@pytest.mark.parametrize("how", [emulated, mapped])
def test_no_tracer_leaks(how):
  with jax.checking_leaks():
    jax.eval_shape(how(exdyna(DENSITY, w.AXIS)), values())


CACHED_STEP = """
import json, sys
import jax, jax.numpy as jnp
from exdyna_jax import exdyna

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
tx = exdyna(0.05, "data")
step = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data"))
jax.block_until_ready(step(jnp.ones((2, 100))))
print(json.dumps([events.count("/jax/compilation_cache/cache_" + x) for x in ("hits", "misses")]))
"""


def test_a_fresh_process_finds_the_compiled_step(tmp_path):
  options = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }

  def run():
    command = [sys.executable, "-c", CACHED_STEP]
    done = subprocess.run(command, env=os.environ | options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

  _, compiled = run()
  hits, misses = run()
  assert compiled > 0 and misses == 0 and hits == compiled
