"""One picture per column of compare.py's table: n on the x axis, a line per algorithm."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

# Okabe and Ito's colours, which colour-blind people tell apart, less yellow; markers for the rest.
STYLES = {
  "exdyna": ("#D55E00", "o"),
  "micro": ("#E69F00", "s"),
  "deft": ("#009E73", "^"),
  "top_k": ("#000000", "D"),
  "clt_k": ("#56B4E9", "v"),
  "hard_threshold": ("#CC79A7", "P"),
  "sage": ("#0072B2", "X"),
  "sidco": ("#7F5539", "*"),
  "random_k": ("#999999", "<"),
  "dense": ("#555555", ">"),
}
# column -> axis label, whether it is logarithmic, and what is left out, since it would say nothing
COLUMNS = {
  "build-up": ("build-up: entries sent / asked for", True, {"dense"}),
  "density": ("density sent (0.01 asked for)", True, {"dense"}),
  "picked": ("picked / asked for, per worker", True, {"dense"}),
  "padding": ("padding ratio", True, {"dense"}),
  "bytes": ("bytes sent / dense", True, set()),
  "time": ("time of a worker's step / top_k's", True, {"dense"}),
  "accuracy": ("test accuracy on MNIST", False, set()),
}
TICKS = (1, 1.2, 1.5, 2, 3, 4, 5, 7)  # times a power of ten
LABEL_GAP = 0.055  # of the height of the axes
ROUNDS = 500  # of moving labels apart


def draw(rows, folder):
  """Writes ``folder/COLUMN.png`` for each column that the rows have."""
  folder.mkdir(parents=True, exist_ok=True)
  for column in COLUMNS:
    if any(column in row for row in rows):
      _picture(rows, column).savefig(folder / f"{column}.png", dpi=90)


def _picture(rows, column):
  label, is_log, left_out = COLUMNS[column]
  figure = Figure(figsize=(7, 4.6), layout="constrained")
  axes = figure.subplots()
  axes.set(xscale="log", xlabel="workers n", ylabel=label, yscale="log" if is_log else "linear")
  ends, workers = {}, set()
  for name in dict.fromkeys(row["algorithm"] for row in rows):
    points = [(r["n"], r[column]) for r in rows if r["algorithm"] == name and column in r]
    if points and name not in left_out:
      base, _, rules = name.partition("+")
      colour, marker = STYLES[base]
      x, y = zip(*points, strict=True)
      axes.plot(x, y, color=colour, marker=marker, ls="--" if rules else "-", lw=1.5, ms=6)
      ends[name] = (x[-1], y[-1], colour)
      workers.update(x)
  axes.set_xticks(sorted(workers), [str(n) for n in sorted(workers)])
  axes.xaxis.set_minor_locator(NullLocator())
  if is_log:
    low, high = axes.get_ylim()
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = TICKS if high / low < 10 else (1, 2, 5) if high / low < 1000 else (1,)
    shown = [t * 10.0**d for d in decades for t in ticks if low <= t * 10.0**d <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.yaxis.set_minor_formatter(NullFormatter())
  axes.grid(alpha=0.3)
  _label(axes, ends)
  return figure


def _label(axes, ends):
  """Names at the right ends of the lines, moved apart where they would overlap."""
  to_height = axes.transScale + axes.transLimits
  heights = {name: to_height.transform((x, y))[1] for name, (x, y, _) in ends.items()}
  order = sorted(heights, key=heights.get)
  places = np.array([heights[name] for name in order])
  for _ in range(ROUNDS):  # neighbours that are too close push each other away
    push = np.maximum(LABEL_GAP - np.diff(places), 0) / 2
    places[:-1] -= push
    places[1:] += push
    places = np.clip(places, 0, 1)
  places = dict(zip(order, places, strict=True))
  for name, (x, y, colour) in ends.items():
    axes.annotate(
      name,
      xy=(x, y),
      xytext=(1.06, places[name]),
      textcoords="axes fraction",
      color=colour,
      va="center",
      fontsize=9,
      arrowprops={
        "arrowstyle": "-",
        "color": colour,
        "lw": 0.6,
        "shrinkA": 1,
        "shrinkB": 4,
        "relpos": (0, 0.5),  # from the middle of the text's left end
      },
    )
