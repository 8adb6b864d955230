"""Sparse data-parallel gradients for optax: ExDyna and its relatives."""

from importlib.metadata import version as _version

from .sparsifiers.dense import dense as dense
from .sparsifiers.exdyna import exdyna as exdyna
from .state import State as State
from .state import Stats as Stats
from .state import get_stats as get_stats
from .state import state_specs as state_specs
from .varying import local_params as local_params

__version__ = _version("exdyna_jax")
