"""The processes of the example: what keeps them from meeting."""

import argparse
import socket

import cluster
import jax
import multihost
import pytest
from test_examples import is_refused


@pytest.mark.parametrize("text", ["", "host", ":29500", "host:", "host:0", "host:70000", "host:x"])
def test_an_address_without_host_or_port(text):
  """An empty one, of a shell variable that is not set, was taken for none."""
  assert cluster.address("[::1]:29500") == "[::1]:29500"
  with pytest.raises(argparse.ArgumentTypeError, match=f"HOST:PORT, .*, got '{text}'"):
    cluster.address(text)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
  """JAX finds none, whatever starts the tests."""

  def initialize(*args, **options):
    raise ValueError("coordinator_address should be defined.")

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  monkeypatch.setenv("XLA_FLAGS", "")


def test_a_port_that_is_taken(capsys):
  """JAX ended by a segmentation fault."""
  with socket.create_server(("127.0.0.1", 0)) as taken:
    place = f"127.0.0.1:{taken.getsockname()[1]}"
    options = ["--coordinator", place, "--num-processes", "2", "--process-id", "0"]
    message = f"cannot listen at --coordinator {place}: Address already in use"
    is_refused(multihost.main, options, message, capsys)


def test_no_cluster(capsys):
  is_refused(multihost.main, [], "no cluster here (Slurm, Open MPI", capsys)
