"""Optax around, before and behind us: fifty steps, the same parameters on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import workers as w
from optax import contrib
from train_loop import train

from exdyna_jax import dense, exdyna, state_specs

STEPS = 50
RATE = optax.cosine_decay_schedule(0.1, STEPS)
STATIC = ("density", "num_workers", "num_blocks", "capacity_factor", "residual_dtype")


def ours(density=0.1):
  return exdyna(density, w.AXIS)


def by_rank(params):
  """Labels for `optax.partition`."""
  return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


def sgd_of(learning_rate, density):
  return optax.chain(ours(density), optax.sgd(learning_rate))


WITH = {
  "schedules": lambda: optax.chain(
    ours(optax.exponential_decay(0.5, 10, 0.5, end_value=0.05)), optax.adam(RATE, b1=0.0)
  ),
  "inject_hyperparams around us alone": lambda: optax.chain(
    optax.inject_hyperparams(exdyna, static_args=STATIC)(0.1, w.AXIS), optax.sgd(0.1)
  ),
  "inject_hyperparams around the chain": lambda: optax.inject_hyperparams(
    sgd_of, static_args="density"
  )(learning_rate=RATE, density=0.1),
  "inject_hyperparams behind us": lambda: optax.chain(
    ours(), optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)
  ),
  "partition around us": lambda: optax.partition(
    {
      "matrix": optax.chain(ours(), optax.adam(0.02, b1=0.0)),
      "vector": optax.chain(dense(w.AXIS), optax.sgd(0.1)),
    },
    by_rank,
  ),
  "partition behind us": lambda: optax.chain(
    ours(), optax.partition({"matrix": optax.adam(0.02, b1=0.0), "vector": optax.sgd(0.1)}, by_rank)
  ),
  "schedule_free behind us": lambda: optax.chain(
    ours(), contrib.schedule_free(optax.sgd(0.5), learning_rate=0.5)
  ),
  "schedule_free around us": lambda: contrib.schedule_free(
    optax.chain(ours(), optax.sgd(0.5)), learning_rate=0.5
  ),
  "muon": lambda: optax.chain(ours(), contrib.muon(0.02)),
  "adamw": lambda: optax.chain(ours(), optax.adamw(0.02, b1=0.0)),
  "lion": lambda: optax.chain(ours(), optax.lion(0.005)),
  "weight decay and global clip behind us": lambda: optax.chain(
    ours(), optax.clip_by_global_norm(0.1), optax.add_decayed_weights(1e-3), optax.sgd(0.5)
  ),
  "local clip before us": lambda: optax.chain(
    optax.clip_by_global_norm(0.1), ours(), optax.sgd(0.3)
  ),
  "MultiSteps behind us": lambda: optax.chain(
    ours(), optax.MultiSteps(optax.adam(0.02, b1=0.0), 2).gradient_transformation()
  ),
}


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", WITH)
def test_all_devices_keep_the_same_parameters(name, check):
  params, losses = train(WITH[name](), STEPS, check)
  for leaf in jax.tree.leaves(params):
    for row in leaf[1:]:
      np.testing.assert_array_equal(row, leaf[0])
  assert losses[-1] < 0.5 * losses[0]


AROUND = {
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "masked": lambda tx: optax.masked(tx, lambda p: jax.tree.map(lambda x: x.ndim == 2, p)),
}


@pytest.mark.parametrize(
  "name, error, message",
  [
    ("MultiSteps", ValueError, "optax.MultiSteps around this one .accumulate local gradients in"),
    ("apply_if_finite", TypeError, "manual axis types do not match"),
    ("masked", TypeError, "manual axis types do not match"),
  ],
)
def test_what_must_not_be_around_us_is_refused_by_types(name, error, message):
  with pytest.raises(error, match=message):
    train(AROUND[name](sgd_of(0.1, 0.1)), 1)


@pytest.mark.parametrize(
  "name, cure",
  [
    ("MultiSteps", "accumulate local gradients in the step.* or put it behind"),
    ("apply_if_finite", "Drop it: nonfinite='skip' lets all workers skip a step together"),
  ],
)
def test_state_specs_refuse_it_where_types_are_not_checked(name, cure):
  for tx in (exdyna(0.1, w.AXIS, num_workers=4), dense(w.AXIS, num_workers=4)):
    around = optax.chain(AROUND[name](optax.chain(tx, optax.sgd(0.1))))
    with pytest.raises(ValueError, match=cure):
      state_specs(jax.eval_shape(around.init, jnp.zeros(10)), w.AXIS)
    behind = optax.chain(tx, AROUND[name](optax.sgd(0.1)))
    state_specs(jax.eval_shape(behind.init, jnp.zeros(10)), w.AXIS)
