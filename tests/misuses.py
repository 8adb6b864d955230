"""Wrong programs that newcomers write, what they are told, and what cures them."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from traced import (
  PARAMS,
  SIZE,
  Misuse,
  N,
  in_front_of_sgd,
  local_gradients,
  loss,
  loss_that_is_not_averaged,
  make,
  on_rows,
  restored_for_another_number_of_workers,
  state_not_placed_on_an_explicit_mesh,
  state_returned_as_replicated_without_checks,
  step_with_a_state_of_another_mesh,
  train,
)
from workers import AXIS
from wrong_arguments import WRONG_ARGUMENTS

from exdyna_jax import exdyna, get_stats, local_params, reshard_state, state_specs, top_k

SUMMED = "is the same on all workers of mesh axis"
UNBOUND = "which is not bound here"
ALL_RESIDUALS = "It holds the residuals of all workers"
ONE_RESIDUAL = "It is the residual of one worker"
OTHER_MODEL = "The state belongs to another model"
NO_STATE = "update needs the State that init returned"
DIFFERS = "out_specs which require replication"
AXIS_NAME = "axis_name must be the name of a mesh axis"

MISUSES = {
  **WRONG_ARGUMENTS,
  # Gradients
  "gradients that jax.grad has summed": Misuse(
    lambda: train(make(), gradients=jax.grad(loss)),
    ValueError, SUMMED, "differentiate with respect to exdyna_jax.local_params(params, 'data')",
  ),
  "gradients averaged before": Misuse(
    lambda: train(make(), gradients=lambda p, x: jax.lax.pmean(local_gradients(p, x), AXIS)),
    ValueError, SUMMED, "a pmean",
  ),
  "two sparsifiers in a chain": Misuse(
    lambda: train(in_front_of_sgd(make(), make())), ValueError, SUMMED, "another sparsifier",
  ),
  "complex parameters": Misuse(
    lambda: make().init({"c": jnp.zeros(3, jnp.complex64)}),
    TypeError, "complex gradients have no order", "into its real and imaginary parts",
  ),
  "integer parameters": Misuse(
    lambda: train(make(), params=PARAMS | {"steps": jnp.zeros((), jnp.int32)}),
    TypeError, "grad requires real- or complex-valued inputs", "got int32",
  ),
  # Axis and number of workers
  "no shard_map": Misuse(
    lambda: jax.jit(make().update)(PARAMS, make().init(PARAMS)),
    ValueError, UNBOUND, "Call it inside jax.shard_map over a mesh with that axis",
  ),
  "a typo in the axis": Misuse(
    lambda: train(make(axis_name="dta")), ValueError, UNBOUND, "here ('data' is)",
  ),
  "vmap without a name": Misuse(
    lambda: on_rows(jax.vmap), ValueError, UNBOUND, "jax.vmap with axis_name='data'",
  ),
  "pmap with another name": Misuse(
    lambda: on_rows(lambda f: jax.pmap(f, "batch")), ValueError, UNBOUND, "here ('batch' is)",
  ),
  "specs with another name": Misuse(
    lambda: train(make(), specs=state_specs(make().init(PARAMS), "dta")),
    ValueError, "must refer to an axis marked as manual", "residual refers to 'dta'",
  ),
  "a list of axes": Misuse(
    lambda: exdyna(0.1, ["data"]), TypeError, AXIS_NAME, "a tuple of names, got ['data']",
  ),
  "an axis twice": Misuse(
    lambda: exdyna(0.1, (AXIS, AXIS)),
    ValueError, "names an axis twice", "Name each mesh axis once",
  ),
  "arguments of state_specs swapped": Misuse(
    lambda: state_specs(AXIS, make().init(PARAMS)),
    TypeError, "are swapped: they are of", "the arguments of state_specs(tree, axis_name)",
  ),
  "init without the number of workers": Misuse(
    lambda: make(num_workers=None).init(PARAMS),
    ValueError, "is unknown in init", "Pass num_workers=, or call init under jax.set_mesh(mesh)",
  ),
  "a wrong number of workers": Misuse(
    lambda: train(make(num_workers=2)),
    ValueError, "num_workers=2, but mesh axis 'data' has 4 workers", "Leave it out or correct it",
  ),
  # State
  "state replicated": Misuse(
    lambda: train(make(), specs=P()),
    ValueError, ALL_RESIDUALS, "in_specs=exdyna_jax.state_specs(opt_state, axis_name)",
  ),
  "init outside of vmap": Misuse(
    lambda: on_rows(lambda f: jax.vmap(f, axis_name=AXIS), make().init(PARAMS)),
    ValueError, ALL_RESIDUALS, "call init inside of the mapped function",
  ),
  "state returned as replicated, unchecked": Misuse(
    state_returned_as_replicated_without_checks,
    ValueError, ONE_RESIDUAL, "out_specs=exdyna_jax.state_specs(opt_state, axis_name) too",
  ),
  "state of another number of workers": Misuse(
    lambda: train(make(), state=make(num_workers=2).init(PARAMS)),
    ValueError, "the state was made for 2 workers", "exdyna_jax.reshard_state(opt_state, 4)",
  ),
  "state of another model": Misuse(
    lambda: train(make(), state=make().init({"w": jnp.zeros((11, 10))})),
    ValueError, OTHER_MODEL, "make it anew with init for these parameters",
  ),
  "state of all of linen's variables": Misuse(
    lambda: train(make(), state=make().init({"params": PARAMS, "batch_stats": jnp.zeros(3)})),
    ValueError, OTHER_MODEL, "not the gradients of the parameters that init has seen",
  ),
  "loss and gradients as gradients": Misuse(
    lambda: train(
      make(), gradients=lambda p, x: jax.value_and_grad(loss)(local_params(p, AXIS), x)
    ),
    ValueError, OTHER_MODEL, "not the gradients of the parameters that init has seen",
  ),
  "state of another algorithm": Misuse(
    lambda: train(make(), state=top_k(0.1, AXIS, num_workers=N).init(PARAMS)),
    ValueError, "the state belongs to another algorithm", "anew with the init of this one",
  ),
  "state of another num_blocks": Misuse(
    lambda: train(make(), state=make(num_blocks=2).init(PARAMS)),
    ValueError, "the state was made for 2 blocks", "Keep num_blocks",
  ),
  "residual restored in another dtype": Misuse(
    lambda: train(make(residual_dtype=jnp.float16), state=make().init(PARAMS)),
    ValueError, "residual is of float32, but residual_dtype=float16", "in which it was saved",
  ),
  "the chain's state for a part of it": Misuse(
    lambda: train(make(), state=in_front_of_sgd(make()).init(PARAMS)),
    TypeError, NO_STATE, "pass the state of the whole chain",
  ),
  "a part's state for the chain": Misuse(
    lambda: train(in_front_of_sgd(make()), state=make().init(PARAMS)),
    ValueError, "The number of updates and states has to be the same in chain", "called init",
  ),
  "swapped arguments": Misuse(
    lambda: train(make(), update=lambda tx, grads, state, _: tx.update(state, grads)),
    TypeError, NO_STATE, "The gradients come first: update(gradients, state)",
  ),
  "state restored as a dict": Misuse(
    lambda: train(
      make(),
      state=make().init(PARAMS)._asdict(),
      specs=state_specs(make().init(PARAMS), AXIS)._asdict(),
    ),
    TypeError, NO_STATE, "restore into the structure of init, target = jax.eval_shape(tx.init",
  ),
  "state not placed on an explicit mesh": Misuse(
    state_not_placed_on_an_explicit_mesh,
    ValueError, "does not match the specs of the input", "P('data',)",
  ),
  "resharding the parameters": Misuse(
    lambda: reshard_state(PARAMS, 2),
    ValueError, "reshard_state found no state", "Pass the optimizer state that holds it",
  ),
  "resharding one worker's state": Misuse(
    lambda: reshard_state(make().init(PARAMS)._replace(residual=jnp.zeros(SIZE + 1)), 2),
    ValueError, "but reshard_state needs those of all", "Call it outside of the mapped function",
  ),
  "resharding the rows of pmap": Misuse(
    lambda: reshard_state(
      jax.vmap(lambda _: make().init(PARAMS), axis_name=AXIS)(jnp.arange(N)), 2
    ),
    ValueError, "but reshard_state needs those of all", "x[0] if spec == P() else x.reshape(-1)",
  ),
  "resharding shapes": Misuse(
    lambda: reshard_state(jax.eval_shape(make().init, PARAMS), 2),
    ValueError, "reshard_state needs the values of the state", "Restore the state for the old",
  ),
  "state that is still on the old mesh": Misuse(
    step_with_a_state_of_another_mesh,
    ValueError, "Received incompatible devices for jitted computation", "device ids [0, 1]",
  ),
  "a target for the new number of workers": Misuse(
    restored_for_another_number_of_workers,
    ValueError, "is not compatible with the stored shape", "Requested shape: (200,)",
  ),
  "resharding in the step": Misuse(
    lambda: jax.eval_shape(lambda: reshard_state(jax.jit(make().init)(PARAMS), 2)),
    ValueError, "reshard_state needs the values of the state", "Call it outside of them",
  ),
  "specs of the transformation": Misuse(
    lambda: state_specs(make(), AXIS),
    TypeError, "state_specs needs a state", "Pass jax.eval_shape(tx.init, params)",
  ),
  "statistics of the parameters": Misuse(
    lambda: get_stats(PARAMS),
    ValueError, "sparsifier states in a", "Pass the optimizer state that holds it",
  ),
  "statistics of two": Misuse(
    lambda: get_stats([make().init(PARAMS)] * 2),
    ValueError, "sparsifier states in a", "found 2",
  ),
  # What stands around or in front. Where nothing is ours to check, JAX finds that results differ.
  "MultiSteps around": Misuse(
    lambda: train(optax.MultiSteps(in_front_of_sgd(make()), 2)),
    ValueError, "optax.MultiSteps around a sparsifier", "accumulate local gradients in the step",
  ),
  "apply_if_finite around": Misuse(
    lambda: train(optax.apply_if_finite(in_front_of_sgd(make()), 2)),
    ValueError, "optax.apply_if_finite around a sparsifier", "Drop it: nonfinite='skip'",
  ),
  "masked around": Misuse(
    lambda: train(optax.masked(make(), {"w": True, "b": False})),
    ValueError, DIFFERS, "out_specs[0] is P()",
  ),
  "adam in front": Misuse(
    lambda: train(optax.chain(optax.scale_by_adam(), make())),
    ValueError, DIFFERS, "out_specs[1][0].mu['w'] is P()",
  ),
  "state returned as replicated": Misuse(
    lambda: train(make(), out=P()), ValueError, DIFFERS, "out_specs[1] is P()",
  ),
  "a loss that is not averaged": Misuse(
    loss_that_is_not_averaged, ValueError, DIFFERS, "out_specs is P()",
  ),
}  # fmt: skip
