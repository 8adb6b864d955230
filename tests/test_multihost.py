"""A training in several processes: agreement, the death of one, going on from a checkpoint.

They run `multihost_process.py`, whose model is small; what takes its time is to start them.
"""

import os
import pathlib
import shutil
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import launch
import multihost
import multihost_process
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_examples import is_refused, write_idx_folder

from exdyna_jax import exdyna, joining, reshard_state

pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(multihost.__file__).parent
SCRIPT = pathlib.Path(multihost_process.__file__)
OPTIONS = "--steps 20 --batch 48 --density 0.05 --optimizer momentum --save-every 8"
DIES_AFTER = 13  # steps: after the checkpoint of step 8, before that of step 16
PATIENCE = 60  # seconds until the survivors must have noticed; on a quiet machine it takes one
RESIDUAL = "[1][0].residual"  # the path of the one array that differs between workers
# Between sums in another order, after 20 steps. A wrong batch or state is off by a thousandth.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


class Ended(NamedTuple):
  """What is left of the processes of a training."""

  statuses: list[int]
  logs: list[str]  # what each has written
  held: list[dict]  # what the device of each held at the end: arrays by path
  seconds: float  # between the end of the first and the end of the last


class Trainings:
  """Runs trainings on the same images."""

  def __init__(self, folder):
    self.folder = write_idx_folder(folder, train=480)

  def options(self, name, more):
    """With a name, there are checkpoints."""
    saving = ["--checkpoints", self.folder / name] if name else []
    return [str(x) for x in (*OPTIONS.split(), "--data-dir", self.folder, *saving, *more)]

  def run(self, number, name, *more):
    """Starts `number` processes and waits for their end."""
    result = self.folder / f"{number}-{name}-{'-'.join(more)}"
    result.mkdir()
    logs = [open(result / f"{index}.log", "w+") for index in range(number)]
    command = [SCRIPT, *self.options(name, ("--result", result, *more))]
    path = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    processes = launch.start(command, logs, PYTHONPATH=os.pathsep.join(path))
    while all(process.poll() is None for process in processes):
      time.sleep(0.02)
    start = time.monotonic()
    launch.wait(processes, grace=PATIENCE)
    seconds = time.monotonic() - start
    for log in logs:
      log.seek(0)
    return Ended(
      statuses=[process.returncode for process in processes],
      logs=[log.read() for log in logs],
      held=[dict(np.load(file)) for file in sorted(result.glob("*.npz"))],
      seconds=seconds,
    )

  def emulate(self, number, name, *more):
    """The same with the devices of this process; returns what each of them holds."""
    args = multihost.make_parser().parse_args(self.options(name, more))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:number]), (multihost.AXIS,))
    tree = multihost_process.train(args, mesh)
    return [multihost_process.held(tree, device) for device in mesh.devices]

  def copy(self, name, to):
    shutil.copytree(self.folder / name, self.folder / to)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
  return Trainings(tmp_path_factory.mktemp("multihost"))


@pytest.fixture(scope="module")
def undisturbed(trainings):
  return trainings.run(4, None)


@pytest.fixture(scope="module")
def killed(trainings):
  ended = trainings.run(4, "four", "--die-after", str(DIES_AFTER))
  for copy in ("two", "two-emulated", "untouched"):  # before anybody goes on from it
    trainings.copy("four", copy)
  return ended


@pytest.fixture(scope="module")
def resumed(trainings, killed):
  return trainings.run(4, "four", "--resume")


@pytest.fixture(scope="module")
def resumed_by_two(trainings, killed):
  return trainings.run(2, "two", "--resume")


def assert_success(ended):
  assert not any(ended.statuses), "\n".join(ended.logs)


@pytest.mark.parametrize("name", ["undisturbed", "resumed_by_two"])
def test_all_processes_hold_the_same_bits_but_for_the_residuals(name, request):
  ended = request.getfixturevalue(name)
  assert_success(ended)
  assert len(ended.held) == len(ended.statuses)
  first, *others = ended.held
  for other in others:
    assert first.keys() == other.keys()
    differing = [path for path in first if not np.array_equal(first[path], other[path])]
    assert differing == [RESIDUAL]


def assert_close(held, emulated):
  for one, other in zip(held, emulated, strict=True):
    assert set(other) < set(one)
    for path in other:
      np.testing.assert_allclose(one[path], other[path], err_msg=path, **TOLERANCE)


def test_processes_train_as_devices_of_one_process(trainings, undisturbed):
  assert_success(undisturbed)
  assert_close(undisturbed.held, trainings.emulate(4, None))


def test_a_checkpoint_of_four_goes_on_with_two(trainings, resumed_by_two):
  assert_success(resumed_by_two)
  assert_close(resumed_by_two.held, trainings.emulate(2, "two-emulated", "--resume"))


def test_the_death_of_one_ends_the_others_with_an_error(killed):
  assert killed.statuses[1] == -9, killed.logs[1]
  assert killed.seconds < PATIENCE
  for index in (0, 2, 3):
    assert killed.statuses[index] > 0 or killed.statuses[index] == -6, killed.statuses  # SIGABRT
  assert any("--resume" in log for log in killed.logs)


def test_going_on_after_a_death_changes_no_bit(undisturbed, resumed):
  assert_success(resumed)
  for one, other in zip(undisturbed.held, resumed.held, strict=True):
    assert np.any(one[RESIDUAL])
    for path in one:
      np.testing.assert_array_equal(one[path], other[path], err_msg=path)


def test_reshard_state_gathers_the_residuals_of_all_processes(undisturbed):
  rows = [held[RESIDUAL] for held in undisturbed.held]
  state = exdyna(0.05, multihost.AXIS, num_workers=4).init(jnp.zeros(rows[0].size))
  state = state._replace(residual=np.concatenate(rows))
  expected = reshard_state(state, multihost_process.WORKERS_AFTER).residual
  for held in undisturbed.held:
    np.testing.assert_array_equal(held["resharded"], expected)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--process-id", "1"], "go together"),
    (["--coordinator", ""], "--coordinator: must be HOST:PORT"),
    (["--density", "2"], "density"),
    (["--data-dir", "missing"], "missing holds none of"),
  ],
)
def test_bad_argument_gets_one_line_before_anything_starts(arguments, message, capsys):
  is_refused(multihost.main, arguments, message, capsys)


def test_a_checkpoint_is_neither_overwritten_nor_taken_for_another_training(trainings, killed):
  with pytest.raises(joining.Refusal, match="holds step 8: add --resume"):
    trainings.emulate(2, "untouched")
  with pytest.raises(joining.Refusal, match="--seed is 1, but .* 0"):
    trainings.emulate(2, "untouched", "--resume", "--seed", "1")


@pytest.mark.parametrize("broken", ["missing", "truncated"])
def test_a_checkpoint_that_cannot_be_read_is_named(broken, tmp_path):
  """It was told to start again with --resume, which failed again."""
  checkpoints = multihost.open_checkpoints(tmp_path)
  for step in (12, 16):
    checkpoints.save(step, args=ocp.args.Composite(settings=ocp.args.JsonSave({"seed": 0})))

  def read(step):
    return multihost._read(checkpoints, step, "settings", ocp.args.JsonRestore())

  for step, place in ((16, "step 12"), (12, "the beginning")):
    assert read(step) == {"seed": 0}
    item = tmp_path / str(step) / "settings"
    if broken == "missing":
      shutil.rmtree(item)
    else:
      (item / "metadata").write_bytes(b"")
    words = f"step {step} in {tmp_path} cannot be read: remove it to go on from {place} "
    with pytest.raises(joining.Refusal, match=words):
      read(step)
