"""The recipes of docs/recipes that say so run as they stand, one after the other."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "recipes"


def run(blocks, names):
  for block in blocks:
    exec(compile(block, str(DOCS), "exec"), names)
  return names


def blocks_of(name):
  return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def behind_a_clip(sparse):
  return optax.chain(optax.clip(1.0), sparse, optax.adam(1e-3))


def within_inject_hyperparams(sparse):
  make = optax.inject_hyperparams(lambda rate: optax.chain(sparse, optax.adam(rate)))
  return make(rate=1e-3)


@pytest.mark.parametrize("place", [behind_a_clip, within_inject_hyperparams])
def test_hold_finds_the_sparsifier_wherever_it_stands(place):
  """It took the first of a chain for the sparsifier, and undid `skipped` if it was another."""
  beginning, *others = blocks_of("optax.md")
  (hold,) = [re.search(r"def hold.*?\n\n\n", b, re.DOTALL)[0] for b in others if "def hold" in b]
  names = run([beginning, hold], {})
  tx, n = place(names["sparse"]), names["mesh"].size

  def step(state, grads):
    updates, new = tx.update(grads, state)
    return names["hold"](state, new, updates)

  rows = jax.tree.map(lambda p: jnp.ones((n, *p.shape)), names["params"])
  step = jax.jit(jax.vmap(step, axis_name="data"))
  _, good = step(jax.vmap(tx.init, axis_name="data")(rows), rows)
  updates, bad = step(good, jax.tree.map(lambda x: x.at[0].set(jnp.nan), rows))
  assert not any(jnp.any(u) for u in jax.tree.leaves(updates))
  assert jax.tree.structure(bad) == jax.tree.structure(good)
  before, after = (optax.tree_utils.tree_get(state, "skipped") for state in (good, bad))
  assert (before == 0).all() and (after == 1).all()
  before, after = (optax.tree_utils.tree_get(state, "mu")["b"] for state in (good, bad))
  assert jnp.any(before) and (before == after).all()


def test_the_program_with_pmap_runs():
  (block,) = [block for block in blocks_of("libraries.md") if "jax.pmap(tx.init" in block]
  names = run([block], {})
  assert names["loss"][0] < 1 and names["stats"].counts.shape == (names["n"],)


@pytest.mark.slow
def test_the_recipes_run():
  names = run(blocks_of("optax.md"), {})
  before, after = (names["loss"](names[key], names["x"]) for key in ("params", "params_then"))
  assert after < before and jnp.isfinite(after)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(names["opt_state"]))
  # The loss scale stops above zero, through which gradients are divided.
  _, (_, scale, _) = names["train"](
    lambda params: (names["tx"].init(params), jnp.float32(2.0), jnp.int32(0)),
    lambda params, training, x: names["scaled_step"](params, training, x * jnp.nan),
  )
  assert scale == 1
