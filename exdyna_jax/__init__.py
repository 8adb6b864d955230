"""Sparse data-parallel gradients for optax: ExDyna and its relatives.

- `exdyna`: the sparse mean of the workers' gradients, as an optax transformation
- `dense`: the dense mean, with the same state and statistics
- `local_params`: the cast that keeps gradients on their worker
- `state_specs`: how the state lies on a mesh
- `get_stats`: what the last step did; `Stats` says what its fields mean
- `State`: the state of both
"""

from importlib.metadata import version as _version

from .sparsifiers.dense import dense as dense
from .sparsifiers.exdyna import exdyna as exdyna
from .state import State as State
from .state import Stats as Stats
from .state import get_stats as get_stats
from .state import state_specs as state_specs
from .varying import local_params as local_params

__version__ = _version("exdyna_jax")
