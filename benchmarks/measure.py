"""Fair timing on a noisy machine: in turn, in one process, medians, and with both ways of malloc.

glibc gives large blocks back to the system when they are freed, and the next step pays for their
pages again. Page faults then cost more than the work on a vector of millions, and hide it. So
everything is measured twice: as the system comes, and with `TUNED`, which keeps the blocks (in one
arena: the others cannot hold more than 64 MB).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax

TUNED = {
  "MALLOC_MMAP_THRESHOLD_": str(2**32),
  "MALLOC_TRIM_THRESHOLD_": str(2**33),
  "MALLOC_TOP_PAD_": str(2**28),
  "MALLOC_ARENA_MAX": "1",
}


def medians(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
  """Seconds of each contestant, called in turn: twice to warm up, then ``repeats`` times."""
  times: dict[str, list[float]] = {name: [] for name in contestants}
  for repeat in range(-2, repeats):
    for name, run in contestants.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      if repeat >= 0:
        times[name].append(time.perf_counter() - start)
  return {name: statistics.median(values) for name, values in times.items()}


def main(measure: Callable[[argparse.Namespace], list[dict]], parser: argparse.ArgumentParser):
  """Runs ``measure(args)`` in a process per kind of malloc; prints its rows, writes ``--json``."""
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  parser.add_argument("--malloc", choices=("both", "default", "tuned"), default="both")
  parser.add_argument("--repeats", type=int, default=30, help="of each measurement, default 30")
  scale = "of all sizes, default 1; at small ones caches and the start of programs decide"
  parser.add_argument("--scale", type=float, default=1.0, help=scale)
  args = parser.parse_args()
  if args.malloc == "both":
    rows = [row for malloc in ("default", "tuned") for row in _in_a_process(malloc)]
  else:
    rows = [{"malloc": args.malloc, **row} for row in measure(args)]
  print_table(rows)
  if args.json:
    args.json.write_text(json.dumps(rows, indent=1))


def _in_a_process(malloc: str) -> list[dict]:
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "rows.json"
    # The last of two equal options counts.
    command = [sys.executable, *sys.argv, "--malloc", malloc, "--json", str(out)]
    environment = os.environ | (TUNED if malloc == "tuned" else {})
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def print_table(rows: list[dict]) -> None:
  """Rows as a Markdown table, one for each set of columns."""
  columns: list[str] = []
  for row in rows:
    if list(row) != columns:
      columns = list(row)
      print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    print("| " + " | ".join(_text(value) for value in row.values()) + " |")


def _text(value) -> str:
  if isinstance(value, float):
    return f"{value:.3g}"
  return f"{value:,}" if isinstance(value, int) else str(value or "")
