"""Eight CPU devices before anything else touches JAX, and property tests that repeat."""

import hypothesis
import jax

MAX_WORKERS = 8

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", MAX_WORKERS)

# The first example of a configuration compiles it, so examples have no common deadline. The same
# examples are drawn every time: a red test is red for everybody.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
