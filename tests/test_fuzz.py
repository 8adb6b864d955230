"""The first runs of `make fuzz`: random configurations of every transformation."""

import fuzz
import pytest

RUNS = 100


@pytest.mark.parametrize("structure", range(RUNS // fuzz.RUNS_PER_STRUCTURE))
def test_run(structure):
  first = structure * fuzz.RUNS_PER_STRUCTURE
  for seed in range(first, first + fuzz.RUNS_PER_STRUCTURE):
    try:
      fuzz.run(seed)
    except AssertionError as error:
      raise AssertionError(f"repeat it with: python tests/fuzz.py --one {seed}") from error


def test_a_failure_is_reported_and_the_other_runs_go_on(monkeypatch, capsys):
  def run(seed):
    assert seed != 5, "broken"

  monkeypatch.setattr(fuzz, "run", run)
  monkeypatch.setattr("sys.argv", ["fuzz.py", "--runs", "4", "--seed", "4"])
  assert fuzz.main() == 1
  said = capsys.readouterr().out
  assert "seed 5 failed" in said and "broken" in said and "failed: [5]" in said
  monkeypatch.setattr("sys.argv", ["fuzz.py", "--runs", "5"])
  assert fuzz.main() == 0
