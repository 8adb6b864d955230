"""Starts a script in several processes on this machine, as a cluster would on several.

  python launch.py -n 4 -- multihost.py --steps 100

Every process gets the options --coordinator, --num-processes and --process-id, and the CPU unless
JAX_PLATFORMS asks for other hardware. What process 0 writes is shown; of the others, the end
of what the first one to fail has written. Ends with the exit status of that one.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

GRACE_SECONDS = 60  # after the first failure, until those that have not noticed it are killed
_POLL_SECONDS = 0.1
_TAIL_BYTES = 4000
# Ties a process to the life of its parent, which may be killed and then can stop nobody.
_TIE = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def free_port():
  """A TCP port of this machine that nobody listens on now."""
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def start(command, outputs, **environment):
  """Starts `command` in a process per output, a file or None for the terminal."""
  env = {"JAX_PLATFORMS": "cpu"} | os.environ | environment
  cluster = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(len(outputs)))
  tie = ("-c", _TIE) if sys.platform == "linux" else ()
  return [
    subprocess.Popen(
      [sys.executable, *tie, *command, *cluster, "--process-id", str(index)],
      env=env,
      stdout=output,
      stderr=output,
    )
    for index, output in enumerate(outputs)
  ]


def _follows(process):
  """Sorts those that ended within a poll: rather a consequence of the others' end, the higher."""
  if process.returncode == -signal.SIGABRT:  # how JAX ends those that have lost the others
    return 2
  return 0 if process.returncode < 0 else 1


def wait(processes, grace=GRACE_SECONDS):
  """Waits until all have ended, and ends them itself if need be; returns the first that failed."""
  first, deadline = None, float("inf")
  try:
    while time.monotonic() < deadline:
      statuses = [process.poll() for process in processes]
      failed = [process for process in processes if process.returncode]
      if first is None and failed:
        first, deadline = min(failed, key=_follows), time.monotonic() + grace
      if None not in statuses:
        break
      time.sleep(_POLL_SECONDS)
  finally:
    for process in processes:
      process.kill()  # does nothing to those that have ended
      process.wait()
  return first


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("-n", type=int, default=4, help="number of processes (%(default)s)")
  parser.add_argument("command", nargs="+", help="script and its arguments, after --")
  args = parser.parse_args()
  if args.n < 1:
    parser.error(f"argument -n: must be at least 1, got {args.n}")

  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  outputs = [None] + [tempfile.TemporaryFile() for _ in range(args.n - 1)]
  processes = start(args.command, outputs)
  failed = wait(processes)
  if failed is None:
    return 0
  index, status = processes.index(failed), failed.returncode
  print(f"process {index} failed first, with status {status}", file=sys.stderr)
  if outputs[index] is not None:
    size = outputs[index].seek(0, os.SEEK_END)
    outputs[index].seek(max(0, size - _TAIL_BYTES))
    print(outputs[index].read().decode(errors="replace"), file=sys.stderr)
  return status if status > 0 else 128 - status  # as a shell tells of a signal


if __name__ == "__main__":
  sys.exit(main())
