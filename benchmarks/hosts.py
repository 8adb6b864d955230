"""Several hosts on one machine: network namespaces that a bridge joins, with shaped links.

Each host has a device ``e0``, whose counters a process on it reads. Needs Linux, root and iproute2
(`unavailable` says what is missing). Whatever ends the block of `hosts` tears them down.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

NETWORK = "10.77.0"
PORT = 29500
BURST = "128kb"  # what a link lets through at full speed after a pause
QUEUE = "4mb"
LAST = 5000  # characters of the errors of a host that failed


def unavailable() -> str | None:
  """Why there can be no hosts here; None: there can."""
  if not sys.platform.startswith("linux"):
    return "network namespaces need Linux"
  if os.geteuid() != 0:
    return "network namespaces need root"
  missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
  if missing:
    return f"{' and '.join(missing)} not found: install iproute2"
  probe = f"exdyna{os.getpid()}probe"
  made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
  if made.returncode:
    return f"no network namespaces here: {made.stderr.strip()}"
  _run("ip", "netns", "del", probe)
  return None


def _run(*command: str) -> None:
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Hosts:
  """Hosts that can talk to each other."""

  def __init__(self, number: int):
    self.number = number
    self.prefix = f"exdyna{os.getpid()}"  # several benchmarks may run
    self.switch = f"{self.prefix}s"

  def name(self, host: int) -> str:
    return f"{self.prefix}h{host}"

  def up(self) -> None:
    _run("ip", "netns", "add", self.switch)
    switch = ("ip", "-n", self.switch, "link")
    _run(*switch, "add", "br0", "type", "bridge")
    _run(*switch, "set", "br0", "up")
    for host in range(self.number):
      name, address = self.name(host), f"{NETWORK}.{host + 1}"
      link = ("ip", "-n", name, "link")
      _run("ip", "netns", "add", name)
      _run(*link, "set", "lo", "up")
      _run(*link, "add", "e0", "type", "veth", "peer", "name", f"p{host}", "netns", self.switch)
      _run(*switch, "set", f"p{host}", "master", "br0", "up")
      _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "e0")
      _run(*link, "set", "e0", "up")
      # Comes in place of /etc/hosts: gloo listens at the address of the host's name.
      settings = self._settings(host)
      settings.mkdir(parents=True)
      (settings / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

  def down(self) -> None:
    for host in range(self.number):
      subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True)
      shutil.rmtree(self._settings(host), ignore_errors=True)
    subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)
    with contextlib.suppress(OSError):
      self._settings(0).parent.rmdir()  # unless somebody else's are there

  def _settings(self, host: int) -> pathlib.Path:
    return pathlib.Path("/etc/netns") / self.name(host)

  def shape(self, rate: str | None) -> None:
    """Limits what each host sends and receives, such as "100mbit"; None: no limit."""
    for host in range(self.number):
      for where, device in ((self.name(host), "e0"), (self.switch, f"p{host}")):
        tc, to = ("tc", "-n", where, "qdisc"), ("dev", device, "root")
        subprocess.run([*tc, "del", *to], capture_output=True)  # there may be none
        if rate is not None:
          _run(*tc, "add", *to, "tbf", "rate", rate, "burst", BURST, "limit", QUEUE)

  def run(self, command: list[str], timeout: float) -> str:
    """Runs ``command`` on all hosts, each with a coordinator's address, their number and its own.

    Returns what host 0 printed. Raises RuntimeError with the end of its errors if a host fails.
    """
    processes, end = [], time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
      # Files, not pipes: nobody reads while they run.
      texts = [
        [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        for _ in range(self.number)
      ]
      try:
        for host, (output, errors) in enumerate(texts):
          where = ("ip", "netns", "exec", self.name(host))
          role = (f"{NETWORK}.1:{PORT}", str(self.number), str(host))
          process = subprocess.Popen([*where, *command, *role], stdout=output, stderr=errors)
          processes.append(process)
        while any(process.poll() is None for process in processes):
          if time.monotonic() > end:
            raise RuntimeError(f"not ready after {timeout} s: {_end_of(texts[0][1])}")
          if any(process.poll() for process in processes):
            break  # the others would wait for it
          time.sleep(0.1)
        for host, process in enumerate(processes):
          if process.poll():
            raise RuntimeError(f"host {host} failed: {_end_of(texts[host][1])}")
        return _text_of(texts[0][0])
      finally:
        for process in processes:
          process.kill()
          process.wait()


def _text_of(file) -> str:
  file.seek(0)
  return file.read()


def _end_of(file) -> str:
  return _text_of(file)[-LAST:]


@contextlib.contextmanager
def hosts(number: int) -> Iterator[Hosts]:
  """``number`` hosts for the length of a block."""
  made = Hosts(number)

  def stop(signum, frame):
    raise SystemExit(128 + signum)

  before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
  for signum, handler in before.items():
    if handler != signal.SIG_IGN:  # as nohup has it
      signal.signal(signum, stop)  # as on Ctrl-C, the block is left
  try:
    made.up()
    yield made
  finally:
    for signum in before:
      signal.signal(signum, signal.SIG_IGN)  # a second one would leave the rest
    made.down()
    for signum, handler in before.items():
      signal.signal(signum, handler)
