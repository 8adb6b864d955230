"""Pictures of network.py's tables: a group of bars for each link and size, a bar per contestant."""

from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people tell apart.
COLOURS = {
  "dense, float32": "#555555",
  "dense, 16 bits": "#999999",
  "top_k": "#0072B2",
  "exdyna": "#D55E00",
  "exdyna, bfloat16 values": "#E69F00",
  "exdyna, whole update": "#009E73",
}
PICTURES = {
  "exchange": ("ms", "ms per exchange, four hosts"),
  "training": ("to accuracy, s", "seconds to a test accuracy of 0.9 on MNIST"),
}
GAP = 0.2  # between groups, of their width


def draw(results, folder):
  """Writes ``folder/network-exchange.png`` and ``network-training.png``, as far as measured."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, rows in results.items():
    _picture(rows, *PICTURES[name]).savefig(folder / f"network-{name}.png", dpi=90)


def _picture(rows, column, label):
  groups = list(dict.fromkeys((row["link"], row["N"]) for row in rows))
  names = list(dict.fromkeys(row["contestant"] for row in rows))
  found = {(row["link"], row["N"], row["contestant"]): row[column] for row in rows}
  figure = Figure(figsize=(2.5 + 1.5 * len(groups), 4.8), layout="constrained")
  axes, width = figure.subplots(), (1 - GAP) / len(names)
  legend = {}
  for place, name in enumerate(names):
    for group, key in enumerate(groups):
      value = found.get((*key, name))
      if not value:
        continue
      x = group + (place - (len(names) - 1) / 2) * width
      bar = legend[name] = axes.bar(x, value, width, color=COLOURS[name])
      axes.bar_label(
        bar,
        [f"{value:.0f}" if value >= 100 else f"{value:.2g}"],
        rotation=90,
        padding=3,
        fontsize=8,
      )
  axes.set(yscale="log", ylabel=label)
  axes.set_xticks(range(len(groups)), [f"{link}\nN = {size:.0e}" for link, size in groups])
  axes.margins(y=0.2)
  axes.grid(axis="y", alpha=0.3)
  figure.legend(
    list(legend.values()), list(legend), loc="outside upper center", ncols=3, frameon=False
  )
  return figure
