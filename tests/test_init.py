"""The public names."""

import inspect

import exdyna_jax


def test_a_star_import_brings_the_public_names_and_no_modules():
  """Without `__all__` it brought modules such as `state` and `density`."""
  public = {
    name
    for name, value in vars(exdyna_jax).items()
    if not name.startswith("_") and not inspect.ismodule(value)
  }
  assert public == set(exdyna_jax.__all__) and len(exdyna_jax.__all__) == len(public)
  assert all(f"`{name}`" in exdyna_jax.__doc__ for name in public)
