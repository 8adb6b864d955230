"""How several processes meet, agree and part."""

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

# The connections of a process that is killed are closed: the others get an error in their next
# collective, at once. These timeouts are for what leaves connections open.
HEARTBEAT_SECONDS = 20  # until a machine that fell silent counts as dead; JAX's default is 100
SHUTDOWN_SECONDS = 60  # that a process waits for the others at its end; JAX's default is 300
COLLECTIVE_SECONDS = 60  # that CPUs wait for a process that lives but is late; the default is 1800

MAX_PORT = 65535

NO_CLUSTER = (
  "JAX finds no cluster here (Slurm, Open MPI, TPU pods ...): use --coordinator, --num-processes"
  " and --process-id"
)


class Refusal(Exception):
  """Says what is wrong with options or files, where it takes all processes to find out."""


def address(text: str) -> str:
  """An argparse type: where process 0 listens."""
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
    raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 10.0.0.1:29500, got {text!r}")
  return text


def join(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Connects this process with the others: the given ones, or those that JAX finds.

  Before anything else touches JAX's devices.

  Raises:
    RuntimeError, ValueError: it cannot, and why.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_cpu_collective_timeout_seconds" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_timeout_seconds={COLLECTIVE_SECONDS}"
  if coordinator is not None and process_id == 0:
    _check_port(coordinator)
  # Not jax_enable_recoverability: with it, processes no longer wait for each other at the end, and
  # those that end after process 0 are aborted.
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
  except ValueError as error:
    raise ValueError(NO_CLUSTER if coordinator is None else str(error)) from error


def _check_port(coordinator: str) -> None:
  """Refuses a port where process 0 cannot listen: JAX would end by a segmentation fault."""
  port = int(coordinator.rpartition(":")[2])
  both = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both else socket.AF_INET
  try:
    socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
  except OSError as error:
    raise ValueError(
      f"process 0 cannot listen at --coordinator {coordinator}: {os.strerror(error.errno or 0)}."
      " Take another port, in all processes."
    ) from error


def agree(options: Mapping[str, float]) -> None:
  """Refuses options that differ between the processes.

  With other numbers, some would wait for ever for collectives that others do not call, or measure
  something else.
  """
  mine = np.array(list(options.values()), np.float64)
  # As words: JAX would round doubles to 32 bits.
  words = multihost_utils.process_allgather(mine.view(np.uint32))
  rows = np.ascontiguousarray(words).reshape(-1, 2 * len(mine)).view(np.float64)
  for name, column in zip(options, rows.T, strict=True):
    if len(set(column)) > 1:
      values = " and ".join(np.format_float_positional(x, trim="-") for x in sorted(set(column)))
      raise Refusal(f"--{name} differs between the processes: {values}. Give all the same.")


@contextlib.contextmanager
def leaving_at_once(name: str) -> Iterator[None]:
  """Ends one of several processes at once after an error, with a line that begins with ``name``.

  Else it would wait for the others at its end, and they for it in their next collective.
  """
  try:
    yield
  except (Exception, KeyboardInterrupt) as error:
    if not jax.distributed.is_initialized():
      raise
    kind = "" if isinstance(error, Refusal) else f" {type(error).__name__}:"
    words = f"{name}:{kind} {error}".split()
    sys.stdout.flush()
    print(*words, file=sys.stderr, flush=True)
    os._exit(1)
