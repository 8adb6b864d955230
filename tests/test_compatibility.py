"""The recipes of docs/recipes/optax.md run as they stand, one after the other."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "recipes" / "optax.md"


@pytest.mark.slow
def test_the_recipes_run():
  names: dict = {}
  for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL):
    exec(compile(block, str(DOCS), "exec"), names)
  before, after = (names["loss"](names[key], names["x"]) for key in ("params", "params_then"))
  assert after < before and jnp.isfinite(after)
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(names["opt_state"]))
