"""Wrong programs end, before they run, in an error that says what to do.

docs/troubleshooting.md has an entry for the symptom of each, and for nothing else.
"""

import pathlib
import re

import pytest
from misuses import MISUSES
from traced import SIZE, N, in_front_of_sgd, make, train

TROUBLESHOOTING = pathlib.Path(__file__).parent.parent / "docs" / "troubleshooting.md"


def test_the_right_program_is_traced():
  params, state = train(in_front_of_sgd(make()))
  assert params["w"].shape == (11, 9) and state[0].residual.shape == (N * SIZE,)


@pytest.mark.parametrize("name", MISUSES)
def test_wrong_programs_are_told_the_cure(name):
  misuse = MISUSES[name]
  with pytest.raises(misuse.error) as caught:
    misuse.program()
  assert misuse.symptom in str(caught.value) and misuse.cure in str(caught.value)


def test_troubleshooting_has_an_entry_for_each_symptom():
  entries = re.findall(r"^- `(.+?)`", TROUBLESHOOTING.read_text(), re.MULTILINE)
  assert len(entries) == len(set(entries))
  assert set(entries) == {misuse.symptom for misuse in MISUSES.values()}
