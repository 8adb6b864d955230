"""The benchmarks run and write what they say, in their smallest form."""

import importlib
import json
import signal

import compare
import control
import device
import hosts
import inputs
import network
import network_pictures
import numpy as np
import pytest
import soak


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


@pytest.mark.parametrize("name", ["selection", "step"])
def test_costs_are_measured(name, tmp_path, monkeypatch, capsys):
  benchmark, table = importlib.import_module(name), tmp_path / "rows.json"
  arguments = [f"{name}.py", "--scale", "0.002", "--repeats", "3", "--malloc", "default"]
  monkeypatch.setattr("sys.argv", [*arguments, "--json", str(table)])
  benchmark.main()
  rows = json.loads(table.read_text())
  assert len(rows) >= 6 and all(row["ratio"] > 0 for row in rows)
  assert rows[0]["measure"] in capsys.readouterr().out


@pytest.mark.slow
def test_device_finds_nothing_wrong(tmp_path, monkeypatch):
  table = tmp_path / "rows.json"
  arguments = ["device.py", "--scale", "0.0002", "--repeats", "2", "--json", str(table)]
  monkeypatch.setattr("sys.argv", arguments)
  device.main()
  rows = json.loads(table.read_text())
  assert rows[0]["wrong"] == 0 and {"select", "step"} <= {row["measure"] for row in rows}


def test_soak_finds_nothing_wrong_in_a_few_steps(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(soak, "STEPS_PER_CALL", 20)
  small = {name: (size // 20, scale) for name, (size, scale) in soak.LAYERS.items()}
  monkeypatch.setattr(soak, "LAYERS", small)
  monkeypatch.setattr(soak, "SIZE", soak.SIZE // 20)
  monkeypatch.setattr(soak, "DENSITY", 0.02)
  table = tmp_path / "rows.json"
  monkeypatch.setattr("sys.argv", ["soak.py", "--steps", "100", "--json", str(table)])
  assert soak.main() == 0
  rows = json.loads(table.read_text())
  assert [row["steps"] for row in rows] == [40, 60, 80, 100]
  assert "wrong: nothing" in capsys.readouterr().out


def test_soak_says_what_is_wrong():
  row = {"K/k": 1.0, "in band": 1.0, "residual": 1.0, "memory": 10**9, "arrays": 10**6}
  assert soak.violations([row] * 5, different=0, compiled=0) == []
  worse = {"K/k": 0.8, "in band": 0.5, "residual": np.nan, "memory": 2 * 10**9, "arrays": 10**7}
  assert len(soak.violations([row] * 4 + [worse], different=1, compiled=2)) == 7


def test_network_says_why_it_measures_nothing(monkeypatch, capsys):
  monkeypatch.setattr(network.hosts.os, "geteuid", lambda: 1000)
  network.main(["--quick"])
  assert "skipped: network namespaces need" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_hosts_are_torn_down_by_a_signal(name, monkeypatch):
  """A closed terminal left the namespaces behind."""
  signum, done = signal.Signals[name], []

  def down(self):
    signal.raise_signal(signum)  # once more
    done.append("down")

  monkeypatch.setattr(hosts.Hosts, "up", lambda self: done.append("up"))
  monkeypatch.setattr(hosts.Hosts, "down", down)
  before = signal.signal(signum, signal.SIG_DFL)
  try:
    with pytest.raises(SystemExit, match=str(128 + signum)), hosts.hosts(2):
      assert callable(signal.getsignal(signum))  # else the signal would end the tests
      signal.raise_signal(signum)
    assert done == ["up", "down"]
    assert signal.getsignal(signum) == signal.SIG_DFL
    signal.signal(signum, signal.SIG_IGN)
    with hosts.hosts(2):
      signal.raise_signal(signum)
  finally:
    signal.signal(signum, before)


def test_network_draws_what_was_measured(tmp_path):
  row = {"link": "1gbit", "N": 10**6}
  exchanges = [
    {**row, "contestant": "exdyna", "ms": 2.0},
    {**row, "contestant": "top_k", "ms": 3.0},
  ]
  training = [{**row, "contestant": "exdyna", "to accuracy, s": None}]  # has not got there
  network_pictures.draw({"exchange": exchanges, "training": training}, tmp_path)
  assert {path.name for path in tmp_path.iterdir()} == {
    "network-exchange.png",
    "network-training.png",
  }
