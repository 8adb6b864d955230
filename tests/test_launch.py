"""The launcher of several processes: what it passes on, and that it leaves none behind."""

import subprocess
import sys

import launch
import pytest


def run_launcher(folder, script, number):
  """Runs the launcher on a script, whose last argument is the process id."""
  (folder / "script.py").write_text(f"import sys, time\nprocess = int(sys.argv[-1])\n{script}")
  return subprocess.Popen(
    [sys.executable, launch.__file__, "-n", str(number), "--", folder / "script.py", "an option"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def test_output_of_process_0_and_success(tmp_path):
  done = run_launcher(tmp_path, "print(process, sys.argv[1:-1])", 2)
  output, errors = done.communicate(timeout=60)
  assert done.returncode == 0 and errors == ""
  address = output.split("'")[5]
  assert output == f"0 ['an option', '--coordinator', '{address}', '--num-processes', '2', " + (
    "'--process-id']\n"
  )
  assert address.startswith("127.0.0.1:")


def test_the_first_failure_is_told_and_returned(tmp_path):
  script = f"""
import pathlib
failed = pathlib.Path({str(tmp_path / "failed")!r})
if process == 2:
  failed.touch()
  sys.exit("the cause")
while not failed.exists():
  time.sleep(0.1)
time.sleep(2)  # the launcher has seen process 2 end by then
sys.exit(5)
"""
  done = run_launcher(tmp_path, script, 3)
  _, errors = done.communicate(timeout=60)
  assert done.returncode == 1
  assert errors.splitlines()[:2] == ["process 2 failed first, with status 1", "the cause"]


class Ended:
  """A process that has ended, as `subprocess.Popen` tells of it."""

  def __init__(self, returncode):
    self.returncode = returncode

  def poll(self):
    return self.returncode

  kill = wait = poll


@pytest.mark.parametrize(
  ("statuses", "cause"),
  [((0, 1, -9), 2), ((-6, 1, 1), 1), ((-6, 1, -11), 2), ((0, 0, -6), 2), ((3, 1, 0), 0)],
)
def test_of_several_that_end_at_once_the_cause_is_told(statuses, cause):
  """One that was killed ends the others within milliseconds: the first in order was blamed."""
  processes = [Ended(status) for status in statuses]
  assert launch.wait(processes) is processes[cause]


def test_those_that_do_not_notice_a_failure_are_killed(tmp_path):
  script = tmp_path / "script.py"
  script.write_text("import sys, time\nif sys.argv[-1] == '1': sys.exit(3)\ntime.sleep(600)")
  processes = launch.start([str(script)], [None, None])
  assert launch.wait(processes, grace=0.0) is processes[1]
  assert [process.returncode for process in processes] == [-9, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes of their parent")
def test_processes_die_with_a_launcher_that_is_killed(tmp_path):
  launcher = run_launcher(tmp_path, "print('up', flush=True)\ntime.sleep(600)", 1)
  assert launcher.stdout.readline() == "up\n"
  launcher.kill()
  launcher.communicate(timeout=60)  # until the process has closed the output that it shares
