"""The benchmarks run and write what they say, in their smallest form."""

import json

import compare
import control
import inputs
import numpy as np
import pytest


def test_control_measures_and_draws(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(control, "RULES", (("secant", "balanced"),))
  small = {"size": 4096, "n": 2, "steps": 40, "jump": 1.0}
  monkeypatch.setattr(control, "CASES", {"small": small})
  table, picture = tmp_path / "rows.json", tmp_path / "picture.png"
  monkeypatch.setattr("sys.argv", ["control.py", "--json", str(table), "--out", str(picture)])
  control.main()
  (row,) = json.loads(table.read_text())
  assert row["case"] == "small" and row["first"] == 0 and row["error"] < 0.5
  assert "small" in capsys.readouterr().out
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_first_in_band():
  assert control.first_in_band(np.array([3.0, 1.2, 1.05])) == 2
  assert control.first_in_band(np.array([3.0])) is None


@pytest.mark.slow
def test_compare_measures_once_and_draws(tmp_path, monkeypatch, capsys):
  # Devices are set up already.
  monkeypatch.setattr(compare.train_mnist, "use_devices", lambda number, parser: None)
  table, pictures = tmp_path / "rows.json", tmp_path / "pictures"
  arguments = ["--quick", "--only", "exdyna", "top_k", "--json", str(table), "--out", str(pictures)]
  monkeypatch.setattr("sys.argv", ["compare.py", *arguments])
  compare.main()
  exdyna, top_k = json.loads(table.read_text())
  assert (exdyna["algorithm"], exdyna["n"], top_k["algorithm"]) == ("exdyna", 2, "top_k")
  assert exdyna["build-up"] == exdyna["picked"] < 1.5 < top_k["build-up"] <= 2
  assert top_k["time"] == 1 and top_k["padding"] == 1
  assert 0 < exdyna["bytes"] < 0.1 and 0 < exdyna["MNIST bytes"] < 0.1
  assert "top_k" in capsys.readouterr().out
  drawn = {path.stem for path in pictures.iterdir()}
  assert drawn == {"build-up", "density", "picked", "padding", "bytes", "time", "accuracy"}

  for part in ("on_trace", "times", "on_mnist"):  # what the file holds is not measured again
    monkeypatch.setattr(compare, part, None)
  compare.main()
  assert json.loads(table.read_text()) == [exdyna, top_k]


def test_inputs_repeat():
  first = inputs.grad(4096, 3, 1)
  np.testing.assert_array_equal(first, inputs.grad(4096, 3, 1))
  assert first.dtype == np.float32 and np.any(first != inputs.grad(4096, 3, 0))
