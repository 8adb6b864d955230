"""What training runs say about themselves: a table, a picture, and whether one diverged."""

import pathlib
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_COLORS = {"dense": "#777777", "exdyna": "#d1495b"}
_HEADINGS = (
  "",
  "accuracy",
  "loss",
  "density",
  "target",
  "padding",
  "bytes/step",
  "vs. dense",
  "steps/s",
)
_TICKS = (1, 2, 3, 5, 7)  # times a power of ten
_MARGIN = 1.5  # factor left free above and below a curve
SMOOTHING = 20  # steps that a smoothed loss looks back
_CHANCE_FACTOR = 1.5  # an accuracy below this many times chance has learned nothing


class Run(NamedTuple):
  """One training run; every array holds one value per step."""

  name: str
  accuracy: float  # on the test set, after the last step
  steps_per_second: float  # without the first step, which compiles; NaN if there is only one
  loss: np.ndarray  # mean over the workers
  density: np.ndarray  # share of the gradient that was sent
  threshold: np.ndarray
  padding_ratio: np.ndarray  # largest count of a worker over the mean count
  bytes_sent: np.ndarray  # by one worker
  counts: np.ndarray  # [steps, n], entries that qualified on each worker, sent or not
  parameters: int  # length of the gradient


def divergence(run: Run, num_classes: int) -> str | None:
  """Says in a sentence how the run diverged; None if it did not, or is too short to tell."""
  first, last = run.loss[0], run.loss[-SMOOTHING:].mean()
  if not np.isfinite(run.loss).all():
    return f"{run.name} diverged: the loss is {run.loss[-1]} after {len(run.loss)} steps."
  if len(run.loss) < SMOOTHING:
    return None
  if last > first:
    return f"{run.name} diverged: the loss rose from {first:.3f} to {last:.3f}."
  if run.accuracy < _CHANCE_FACTOR / num_classes:
    return f"{run.name} learned nothing: its accuracy of {run.accuracy:.3f} is that of guessing."
  return None


def table(runs: list[Run], target_density: float) -> str:
  """Formats one row per run; the first run is the dense one."""
  dense_bytes = runs[0].bytes_sent.mean()
  rows = [_HEADINGS]
  for run in runs:
    target = 1.0 if run is runs[0] else target_density
    rows.append(
      (
        run.name,
        f"{run.accuracy:.3f}",
        f"{run.loss[-SMOOTHING:].mean():.4f}",
        f"{run.density.mean():.5f}",
        f"{target:g}",
        f"{run.padding_ratio.mean():.2f}",
        f"{run.bytes_sent.mean():,.0f}",
        f"{run.bytes_sent.mean() / dense_bytes:.1%}" if dense_bytes else "-",
        f"{run.steps_per_second:.1f}" if np.isfinite(run.steps_per_second) else "-",
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
  )


def plot(runs: list[Run], target_density: float, title: str, path: pathlib.Path) -> None:
  """Draws loss, density and threshold over the steps; density and threshold of sparse runs only."""
  figure = Figure(figsize=(8, 9), layout="constrained")
  loss, density, threshold = figure.subplots(3, 1, sharex=True)
  for run in runs:
    color, steps = _COLORS[run.name], np.arange(len(run.loss))
    window = min(SMOOTHING, len(steps))
    median = np.median(np.lib.stride_tricks.sliding_window_view(run.loss, window), axis=1)
    loss.plot(steps, run.loss, color=color, alpha=0.3, linewidth=0.8)
    label = f"{run.name}, test accuracy {run.accuracy:.3f}"
    loss.plot(steps[window - 1 :], median, color=color, label=label)
  for run in runs[1:]:
    color, steps = _COLORS[run.name], np.arange(len(run.loss))
    label = f"{run.name}, mean {run.density.mean():.4f}"
    density.plot(steps, run.density, color=color, label=label)
    threshold.plot(steps, run.threshold, color=color, label=run.name)
  density.axhline(target_density, color="black", linestyle="--", label=f"target {target_density:g}")

  loss.set(title=title, ylabel=f"training loss, median of {SMOOTHING}")
  density.set(ylabel="share of the gradient sent")
  threshold.set(ylabel="threshold", xlabel="step")
  for axes in (loss, density, threshold):
    axes.grid(alpha=0.3)
    axes.legend()
    if np.isfinite(axes.dataLim.minposy):  # a logarithm needs a value above zero
      axes.set_yscale("log")
  for axes in (density, threshold):  # less than a decade: powers of ten are not enough as ticks
    if axes.get_yscale() == "log":
      axes.set_ylim(axes.dataLim.minposy / _MARGIN, axes.dataLim.ymax * _MARGIN)
      axes.yaxis.set_major_locator(LogLocator(subs=_TICKS))
      axes.yaxis.set_major_formatter("{x:g}")
      axes.yaxis.set_minor_formatter(NullFormatter())
  figure.savefig(path, format="png", dpi=120)
