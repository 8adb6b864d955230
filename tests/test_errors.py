"""Bad input raises at once or at trace time, names the value, and gives the cure."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from jax.sharding import PartitionSpec as P

from exdyna_jax import (
  dense,
  exdyna,
  get_stats,
  local_params,
  random_k,
  reshard_state,
  sidco,
  state_specs,
)

SIZE = 100


@pytest.mark.parametrize(
  "options, error, message",
  [
    ({"density": 0}, ValueError, r"density must be in \(0, 1\], got 0"),
    ({"density": -0.1}, ValueError, "got -0.1"),
    ({"density": 1.5}, ValueError, "got 1.5"),
    ({"density": float("nan")}, ValueError, "got nan"),
    ({"density": "much"}, TypeError, "got 'much'"),
    ({"density": True}, TypeError, "got True"),
    ({"density": 10**400}, ValueError, r"density must be in \(0, 1\], got inf"),
    ({"density": -(10**400)}, ValueError, "got -inf"),
    ({"density": lambda step: None}, TypeError, "density must make a real number .* got None"),
    ({"density": jnp.asarray(0.1)}, TypeError, "static_args"),
    ({"axis_name": 3}, TypeError, "axis_name must be .* got 3"),
    ({"axis_name": ()}, TypeError, r"got \(\)"),
    ({"axis_name": ("a", 1)}, TypeError, "got"),
    ({"axis_name": ("a", "a")}, ValueError, r"\('a', 'a'\) names an axis twice"),
    (
      {"threshold": "newton"},
      ValueError,
      "threshold must be one of 'paper', 'secant', .*got 'newton'",
    ),
    ({"partition": "even"}, ValueError, "partition must be one of 'paper'.*got 'even'"),
    ({"nonfinite": "ignore"}, ValueError, "'skip', 'propagate', got 'ignore'"),
    ({"threshold": 0.1}, ValueError, "got 0.1. A number goes into initial_threshold"),
    ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
    ({"num_workers": 2**31}, ValueError, "num_workers must be at most 2147483647, got 2147483648"),
    ({"num_workers": 2.0}, TypeError, "num_workers must be an integer, got 2.0"),
    ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
    ({"capacity_factor": 0.0}, ValueError, "capacity_factor must be positive.*got 0.0"),
    ({"capacity_factor": float("inf")}, ValueError, "got inf"),
    ({"capacity_factor": 10**400}, ValueError, "capacity_factor must be positive and finite"),
    ({"capacity_factor": "1"}, TypeError, "got '1'"),
    ({"initial_threshold": -1.0}, ValueError, "initial_threshold must be positive.*got -1.0"),
    ({"initial_threshold": float("nan")}, ValueError, "got nan"),
    ({"initial_threshold": 10**400}, ValueError, "initial_threshold must be positive and finite"),
    ({"residual_dtype": jnp.int32}, TypeError, "residual_dtype must be a floating-point"),
    ({"residual_dtype": jnp.float8_e4m3fn}, TypeError, "at least 16 bits.*jnp.float32, got"),
    ({"residual_dtype": "float8"}, TypeError, "residual_dtype must be .*jnp.float32, got 'float8'"),
    ({"residual_dtype": [1]}, TypeError, r"residual_dtype must be .*jnp.float32, got \[1\]"),
    ({"residual_dtype": None}, TypeError, "residual_dtype must be .*jnp.float32, got None"),
  ],
)
def test_arguments(options, error, message):
  with pytest.raises(error, match=message):
    exdyna(**{"density": 0.1, "axis_name": w.AXIS, **options})


@pytest.mark.parametrize("array", [np.ones(2), jnp.ones(2)])
@pytest.mark.parametrize(
  "make, name",
  [
    (exdyna, "threshold"),
    (exdyna, "partition"),
    (exdyna, "nonfinite"),
    (exdyna, "residual_dtype"),
    (sidco, "fit"),
    (sidco, "stages"),
    (random_k, "seed"),
  ],
)
def test_arrays_are_no_options(make, name, array):
  with pytest.raises(
    TypeError, match=f"{name} must be .*, not an array, for it decides what is co"
  ):
    make(0.1, w.AXIS, **{name: array})


@pytest.mark.parametrize("tx", [exdyna(0.1, w.AXIS), dense(w.AXIS)])
def test_number_of_workers_unknown(tx):
  with pytest.raises(ValueError, match="num_workers=, or call init under jax.set_mesh"):
    tx.init(jnp.zeros(SIZE))


def test_number_of_workers_wrong():
  tx = exdyna(0.1, w.AXIS, num_workers=3)
  message = r"num_workers=3, but mesh axis 'data' has 4.*TrainState.*replace\(tx=...\)"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(jax.vmap(tx.init, axis_name=w.AXIS), jnp.zeros((4, SIZE)))


@pytest.mark.parametrize("make", [lambda **k: exdyna(0.1, **k), dense])
def test_axis_not_bound(make):
  tx = make(axis_name=w.AXIS, num_workers=4)
  with pytest.raises(ValueError, match="mesh axis 'data', which is not bound.*jax.shard_map"):
    tx.update(jnp.zeros(SIZE), tx.init(jnp.zeros(SIZE)))
  with pytest.raises(ValueError, match="local_params needs the mesh axis 'data'"):
    local_params(jnp.zeros(3), w.AXIS)


@pytest.mark.parametrize(
  "axes, shape, bound",
  [(("dat",), (4,), r"\('dat' is\)"), (("a", "b"), (2, 2), r"\('a', 'b' are\)")],
)
def test_axes_that_are_bound_instead_are_named(axes, shape, bound):
  mapped = jax.shard_map(
    lambda x: local_params(x, w.AXIS), mesh=w.mesh_of(4, axes, shape), in_specs=P(), out_specs=P()
  )
  with pytest.raises(ValueError, match=f"not bound here {bound}. Call it"):
    jax.eval_shape(mapped, jnp.zeros(3))


def test_the_axes_of_the_mesh_are_named_where_init_finds_no_workers():
  with jax.set_mesh(w.mesh_of(4)), pytest.raises(ValueError, match="mesh that is set has 'data'"):
    exdyna(0.1, "dat").init(jnp.zeros(SIZE))


@pytest.mark.parametrize(
  "call", [lambda state: state_specs(w.AXIS, state), lambda state: local_params(w.AXIS, state),
           lambda state: reshard_state(2, state)],
)  # fmt: skip
def test_swapped_arguments_are_named_by_their_types_alone(call):
  """They printed the whole state in front of the message."""
  with pytest.raises(TypeError, match="are swapped: they are of (str|int) and State.$"):
    call(exdyna(0.1, w.AXIS, num_workers=2).init(jnp.zeros(SIZE)))


def trace(tx, state, specs, grads, n=4):
  """Traces one sharded step, without computing anything."""
  step = jax.shard_map(
    lambda state, grads: tx.update(grads, state),
    mesh=w.mesh_of(n), in_specs=(specs, P()), out_specs=(P(), specs), check_vma=False,
  )  # fmt: skip
  jax.eval_shape(step, state, grads)


@pytest.mark.parametrize(
  "made_for, specs_of, message",
  [
    # The whole residual where a worker's own part is due: init outside, but P() everywhere.
    (SIZE, lambda s: P(), r"shape \(400,\).*need \(100,\).*in_specs=exdyna_jax.state_specs"),
    (SIZE - 1, lambda s: state_specs(s, w.AXIS), r"shape \(99,\).*another model"),
    (2 * SIZE, lambda s: state_specs(s, w.AXIS), r"shape \(200,\).*another model"),
  ],
)
def test_residual_of_the_wrong_shape(made_for, specs_of, message):
  tx = exdyna(0.1, w.AXIS, num_workers=4)
  state = tx.init(jnp.zeros(made_for))
  with pytest.raises(ValueError, match=message):
    trace(tx, state, specs_of(state), jnp.zeros(SIZE))


def test_state_of_another_mesh_or_transformation():
  tx = exdyna(0.1, w.AXIS)
  state = exdyna(0.1, w.AXIS, num_workers=2).init(jnp.zeros(SIZE))
  with pytest.raises(ValueError, match="made for 2 workers, but the mesh axis has 4"):
    trace(tx, state, state_specs(state, w.AXIS), jnp.zeros(SIZE))
  with pytest.raises(TypeError, match="update needs the State that init returned, got tuple"):
    trace(tx, (state,), (state_specs(state, w.AXIS),), jnp.zeros(SIZE))
  for rule in ("paper", "balanced"):
    other, tx = (exdyna(0.1, w.AXIS, num_workers=4, partition=rule, num_blocks=b) for b in (2, 8))
    state = other.init(jnp.zeros(SIZE))
    with pytest.raises(ValueError, match="state was made for 2 blocks, but num_blocks=8 makes"):
      trace(tx, state, state_specs(state, w.AXIS), jnp.zeros(SIZE))


@pytest.mark.parametrize("make", [lambda **k: exdyna(0.1, **k), dense])
def test_gradients_that_are_already_summed(make):
  """The trap that every user falls into: replicated parameters, differentiated as they are."""
  tx = make(axis_name=w.AXIS, num_workers=4)
  params = {"w": jnp.zeros(SIZE), "scale": jnp.ones(())}
  state = tx.init(params)
  specs = state_specs(state, w.AXIS)

  def step(cast, uses_scale=True):
    def run(params, state, x):
      def loss(p):
        return jnp.sum(p["w"] * x) * (p["scale"] if uses_scale else 1.0)

      return tx.update(jax.grad(loss)(cast(params)), state)

    mapped = jax.shard_map(
      run, mesh=w.mesh_of(4), in_specs=(P(), specs, P(w.AXIS)), out_specs=(P(), specs)
    )
    return jax.eval_shape(mapped, params, state, jnp.zeros(4 * SIZE))

  with pytest.raises(ValueError, match=r"gradient\['scale'\] is the same on all workers.*local_pa"):
    step(lambda params: params)
  step(lambda params: local_params(params, w.AXIS))
  # No false alarm for parameters that the loss does not use.
  step(lambda params: local_params(params, w.AXIS), uses_scale=False)


@pytest.mark.parametrize("call", ["init", "update"])
def test_leaves_that_cannot_be_selected(call):
  tx = exdyna(0.1, w.AXIS)
  state = exdyna(0.1, w.AXIS, num_workers=4).init(jnp.zeros(SIZE))

  def run(tree):
    def on_worker(_):
      return tx.init(tree) if call == "init" else tx.update(tree, state)

    return jax.eval_shape(jax.vmap(on_worker, axis_name=w.AXIS), jnp.arange(4))

  with pytest.raises(TypeError, match=r"leaf \['c'\] is complex64.*real and imaginary"):
    run({"a": jnp.zeros(3), "c": jnp.zeros(3, jnp.complex64)})
  huge = {"a": jax.ShapeDtypeStruct((2**30,), jnp.float32)}
  huge["b"] = huge["a"]
  with pytest.raises(ValueError, match="2147483648 elements.*optax.partition"):
    run(huge)


def test_inject_hyperparams_says_what_to_do():
  make = optax.inject_hyperparams(exdyna)
  options = {"density": 0.1, "axis_name": w.AXIS, "num_workers": 4}
  with pytest.raises(TypeError, match="in static_args, num_blocks among them"):
    make(**options).init(jnp.zeros(SIZE))
  static = ("density", "num_workers", "num_blocks", "capacity_factor")
  with pytest.raises(TypeError, match="in static_args, residual_dtype among them"):
    optax.inject_hyperparams(exdyna, static_args=static)(**options).init(jnp.zeros(SIZE))
  static += ("residual_dtype",)
  optax.inject_hyperparams(exdyna, static_args=static)(**options).init(jnp.zeros(SIZE))


def test_get_stats_needs_one_state():
  tx = exdyna(0.1, w.AXIS, num_workers=4)
  state = tx.init(jnp.zeros(SIZE))
  with pytest.raises(ValueError, match="found 0 sparsifier states in a dict"):
    get_stats({"a": np.zeros(3)})
  with pytest.raises(ValueError, match="found 2 sparsifier states in a tuple"):
    get_stats((state, state))
