"""The example that logs statistics: what it writes, with and without TensorBoard."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import logging_stats
import numpy as np
import pytest

from exdyna_jax import Stats
from exdyna_jax.state import empty_stats

SCRIPT = pathlib.Path(logging_stats.__file__)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_a_short_run(tmp_path):
  inherited = {
    name: value
    for name, value in os.environ.items()
    if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
  }
  options = ["--workers", "2", "--steps", "12", "--density", "0.1", "--out", "run"]
  done = subprocess.run(
    [sys.executable, SCRIPT, *options],
    cwd=tmp_path,
    env=inherited,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert "12/12" in done.stderr and "padding_ratio=" in done.stderr

  steps = [json.loads(line) for line in (tmp_path / "run" / "stats.jsonl").open()]
  assert [step["step"] for step in steps] == list(range(12))
  assert all(0 < step["density"] <= 1 and step["threshold_used"] > 0 for step in steps)
  assert steps[-1]["loss"] < steps[0]["loss"]
  assert (tmp_path / "run" / "stats.png").read_bytes().startswith(PNG_SIGNATURE)
  # An empty event file has a header of less than a hundred bytes.
  (events,) = (tmp_path / "run").glob("events.out.tfevents.*")
  assert events.stat().st_size > 12 * len(steps[0]) * 10


def test_scalars_are_plain_numbers():
  stats = empty_stats(3)._replace(counts=np.array([5, 2, 9]))
  values = logging_stats.scalars(stats._asdict())
  assert values["counts/min"] == 2 and values["counts/max"] == 9
  assert set(values) == set(Stats._fields) - {"counts"} | {"counts/min", "counts/max"}
  assert json.loads(json.dumps(values)) == values


def test_without_tensorboard_nothing_is_written_for_it(tmp_path, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert logging_stats.tensorboard_writer(tmp_path) is None
  assert not list(tmp_path.iterdir())


def test_bad_density_gets_a_line(capsys):
  with pytest.raises(SystemExit):
    logging_stats.main(["--density", "1.5"])
  assert "density must be in (0, 1], got 1.5" in capsys.readouterr().err
