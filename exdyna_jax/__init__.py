"""Sparse data-parallel gradients for optax: ExDyna and its relatives.

- `exdyna`: the sparse mean of the workers' gradients, as an optax transformation
- `micro`, `deft`, `top_k`, `clt_k`, `hard_threshold`, `sage`, `sidco`, `random_k`: its relatives
- `dense`: the dense mean; all have the same state and statistics
- `local_params`: the cast that keeps gradients on their worker
- `state_specs`: how the state lies on a mesh
- `get_stats`: what the last step did; `Stats` says what its fields mean
- `State`: the state of all of them
"""

from importlib.metadata import version as _version

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
from .state import State as State
from .state import Stats as Stats
from .state import get_stats as get_stats
from .state import state_specs as state_specs
from .varying import local_params as local_params

__version__ = _version("exdyna_jax")
