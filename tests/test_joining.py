"""Several processes: what keeps them from meeting, and that none is left waiting."""

import argparse
import signal
import socket

import jax
import launch
import multihost
import numpy as np
import pytest
from test_examples import is_refused

from exdyna_jax import advise, joining

MEASURE = ["--params", "1e4", "--density", "0.1"]


@pytest.fixture
def joins(monkeypatch):
  """The calls of `jax.distributed.initialize`, which connects nobody."""
  calls = []
  monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append(args))
  monkeypatch.setenv("XLA_FLAGS", "")
  before = signal.getsignal(signal.SIGINT)
  yield calls
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("text", ["", "host", ":29500", "host:", "host:0", "host:70000", "host:x"])
def test_an_address_without_host_or_port(text):
  """An empty one, of a shell variable that is not set, was taken for none."""
  assert joining.address("[::1]:29500") == "[::1]:29500"
  with pytest.raises(argparse.ArgumentTypeError, match=f"HOST:PORT, .*, got '{text}'"):
    joining.address(text)


def test_ctrl_c_does_not_wait_for_the_others(joins):
  parser = advise._parser()
  cluster = ["--coordinator", "10.0.0.1:29500", "--num-processes", "2", "--process-id", "1"]
  advise._start(parser, parser.parse_args([*MEASURE, *cluster]))
  assert joins == [("10.0.0.1:29500", 2, 1)]
  assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.mark.parametrize(("main", "options"), [(advise.main, MEASURE), (multihost.main, [])])
def test_a_port_that_is_taken(main, options, joins, capsys):
  """JAX ended by a segmentation fault."""
  with socket.create_server(("127.0.0.1", 0)) as taken:
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    cluster = ["--coordinator", address, "--num-processes", "2", "--process-id", "0"]
    message = f"cannot listen at --coordinator {address}: Address already in use"
    is_refused(main, [*options, *cluster], message, capsys)
  assert not joins


@pytest.mark.parametrize(
  ("main", "options"), [(advise.main, [*MEASURE, "--discover"]), (multihost.main, [])]
)
def test_no_cluster(main, options, joins, monkeypatch, capsys):
  def initialize(*args, **options):
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  is_refused(main, options, "no cluster here (Slurm, Open MPI", capsys)


def test_what_differs_is_named(monkeypatch):
  """Also where float32, in which JAX would send it, cannot tell."""
  others = np.array([11_000_001, 0.1], np.float64).view(np.uint32)
  gather = "process_allgather"
  monkeypatch.setattr(joining.multihost_utils, gather, lambda mine: np.stack([mine, others]))
  joining.agree({"params": 11_000_001, "density": 0.1})
  with pytest.raises(joining.Refusal, match="--params differs .*: 11000000 and 11000001"):
    joining.agree({"params": 11_000_000, "density": 0.1})


@pytest.mark.parametrize("error", [RuntimeError("peer\n  closed"), KeyboardInterrupt()])
def test_one_of_several_leaves_at_once_with_one_line(error, monkeypatch, capsys):
  """It waited for the others, and was aborted after 100 seconds."""
  monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
  monkeypatch.setattr(joining.os, "_exit", lambda status: None)
  with joining.leaving_at_once("advise"):
    raise error
  line = f"advise: {type(error).__name__}: {' '.join(str(error).split())}".strip()
  assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.slow
def test_processes_that_measure_differently_end(tmp_path):
  """They waited for each other for ever."""
  script = tmp_path / "script.py"
  script.write_text(
    "import sys\nfrom exdyna_jax import advise\n"
    "repeats = ['--repeats', str(2 + int(sys.argv[-1]))]\n"
    f"advise.main([*{MEASURE}, *repeats, *sys.argv[1:]])\n"
  )
  logs = [open(tmp_path / f"{index}.log", "w+") for index in range(2)]
  processes = launch.start([str(script)], logs)
  for process in processes:
    process.wait(timeout=120)
  for log in logs:
    log.seek(0)
    assert "advise: --repeats differs between the processes: 2 and 3" in log.read()
  assert [process.returncode for process in processes] == [1, 1]
