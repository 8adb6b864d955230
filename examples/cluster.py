"""How the processes of `multihost.py` join each other, and leave after an error."""

import argparse
import contextlib
import os
import socket
import sys
import traceback

import jax
from jax.experimental import multihost_utils

# The connections of a process that is killed are closed: the others get an error in their next
# collective, at once. These timeouts are for what leaves connections open.
HEARTBEAT_SECONDS = 20  # until a machine that fell silent counts as dead; JAX's default is 100
SHUTDOWN_SECONDS = 60  # that a process waits for the others at its end; JAX's default is 300
COLLECTIVE_SECONDS = 60  # that CPUs wait for a process that lives but is late; the default is 1800

MAX_PORT = 65535


def address(text):
  """An argparse type: where process 0 listens."""
  host, _, port = text.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
    raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 10.0.0.1:29500, got {text!r}")
  return text


class Refusal(Exception):
  """Says what is wrong with options or files, where it takes all processes to find out."""


@contextlib.contextmanager
def leaving_at_once():
  """Ends the process at once after an error; else it would wait for the others, and they for it."""
  try:
    yield
  except BaseException as error:
    try:
      if not isinstance(error, Refusal):
        traceback.print_exc()
        error = "ended by the error above. Then start all again with --resume: docs/multihost.md"
      print(f"process {jax.process_index()}: {error}", file=sys.stderr, flush=True)
      sys.stdout.flush()
    finally:  # without devices, nobody knows the index
      os._exit(1)


def start(coordinator, num_processes, process_id):
  """Joins the other processes, before anything else touches JAX's devices; None: JAX finds them.

  Raises ValueError if there are none to be found, or if this one cannot be their coordinator.
  """
  if coordinator is not None and process_id == 0:
    _check_port(coordinator)
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_cpu_collective_timeout_seconds" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_timeout_seconds={COLLECTIVE_SECONDS}"
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
    if coordinator is not None:
      raise
    raise ValueError(
      "JAX finds no cluster here (Slurm, Open MPI, TPU pods ...): use --coordinator,"
      " --num-processes and --process-id"
    ) from error
  # CPUs connect in the first collective, and give up on a process that comes 30 seconds late. Here,
  # no process is still compiling.
  with leaving_at_once():
    multihost_utils.sync_global_devices("start")


def _check_port(coordinator):
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
