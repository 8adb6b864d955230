"""Sparse data-parallel gradients for optax: ExDyna and its relatives.

- `exdyna`: the sparse mean of the workers' gradients, as an optax transformation
- `micro`, `deft`, `top_k`, `clt_k`, `hard_threshold`, `sage`, `sidco`, `random_k`: its relatives
- `dense`: the dense mean; all have the same state and statistics
- `local_params`: the cast that keeps gradients on their worker
- `state_specs`: how the state lies on a mesh
- `get_stats`: what the last step did; `Stats` says what its fields mean
- `State`: the state of all of them

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

from .reshard import reshard_state as reshard_state
from .sparsifiers.clt_k import clt_k as clt_k
from .sparsifiers.deft import deft as deft
from .sparsifiers.dense import dense as dense
from .sparsifiers.exdyna import exdyna as exdyna
from .sparsifiers.hard_threshold import hard_threshold as hard_threshold
from .sparsifiers.micro import micro as micro
from .sparsifiers.random_k import random_k as random_k
from .sparsifiers.sage import sage as sage
from .sparsifiers.sidco import sidco as sidco
from .sparsifiers.top_k import top_k as top_k
from .specs import get_stats as get_stats
from .specs import state_specs as state_specs
from .state import State as State
from .state import Stats as Stats
from .values import Link as Link
from .varying import local_params as local_params

__version__ = _version("exdyna_jax")
