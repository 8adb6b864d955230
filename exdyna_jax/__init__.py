"""Sparse data-parallel gradients for optax: ExDyna and its relatives.

- `exdyna`: the sparse mean of the workers' gradients, as an optax transformation
- `micro`, `deft`, `top_k`, `clt_k`, `hard_threshold`, `sage`, `sidco`, `random_k`: its relatives
- `dense`: the dense mean; all have the same state and statistics
- `local_params`: the cast that keeps gradients on their worker
- `state_specs`: how the state lies on a mesh
- `reshard_state`: the same state for another number of workers
- `get_stats`: what the last step did; `Stats` says what its fields mean
- `State`: the state of all of them
- `Link`: a network, for the fastest way through it

A step of data-parallel training, with any of them in front of any optimizer:

  >>> import jax, jax.numpy as jnp, optax
  >>> from jax.sharding import PartitionSpec as P
  >>> from exdyna_jax import exdyna, get_stats, local_params, state_specs
  >>> mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
  >>> params = {"w": jnp.zeros(1000)}
  >>> tx = optax.chain(exdyna(density=0.01, axis_name="data", num_workers=1), optax.sgd(0.1))
  >>> opt_state = tx.init(params)
  >>> specs = state_specs(opt_state, "data")
  >>> def train_step(params, opt_state, target):
  ...   loss = lambda p: jnp.sum((p["w"] - target) ** 2)
  ...   grads = jax.grad(loss)(local_params(params, "data"))
  ...   updates, opt_state = tx.update(grads, opt_state, params)
  ...   return optax.apply_updates(params, updates), opt_state
  >>> step = jax.jit(jax.shard_map(train_step, mesh=mesh,
  ...                              in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
  >>> target = jax.random.normal(jax.random.key(0), (1000,))
  >>> params, opt_state = step(params, opt_state, target)
  >>> int(jnp.sum(params["w"] != 0)), int(get_stats(opt_state).selected)
  (10, 10)
"""

from importlib.metadata import version as _version

from .reshard import reshard_state
from .sparsifiers.clt_k import clt_k
from .sparsifiers.deft import deft
from .sparsifiers.dense import dense
from .sparsifiers.exdyna import exdyna
from .sparsifiers.hard_threshold import hard_threshold
from .sparsifiers.micro import micro
from .sparsifiers.random_k import random_k
from .sparsifiers.sage import sage
from .sparsifiers.sidco import sidco
from .sparsifiers.top_k import top_k
from .specs import get_stats, state_specs
from .state import State, Stats
from .values import Link
from .varying import local_params

__all__ = [
  "clt_k",
  "deft",
  "dense",
  "exdyna",
  "get_stats",
  "hard_threshold",
  "Link",
  "local_params",
  "micro",
  "random_k",
  "reshard_state",
  "sage",
  "sidco",
  "State",
  "state_specs",
  "Stats",
  "top_k",
]

__version__ = _version("exdyna_jax")
