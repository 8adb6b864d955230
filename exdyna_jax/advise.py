"""Measures the network between the workers and says whether sparse gradients pay on it.

Start it as you start your training, once per process:

  python -m exdyna_jax.advise --params 11e6 --density 1e-3 --steps 5000 \
      --coordinator 10.0.0.1:29500 --num-processes 4 --process-id 0

- without --coordinator: the devices of this process; --cpu-devices N: N CPU devices, for a try
- --discover: cluster and processes as ``jax.distributed.initialize()`` finds them (Slurm, MPI, TPU)
- --latency-us, --bandwidth-gbit and --workers: for planning, nothing is measured

Predicted is the time of the exchange in each step. What exdyna takes on the worker itself is
measured too and counted in; for Top-k, which has to sort, it is not. Time to accuracy is another
matter: sparse training needs some more steps. `predict` and `recommend` are the same as functions:

Example:
  >>> from exdyna_jax import Link
  >>> from exdyna_jax.advise import predict, recommend
  >>> slow = Link(latency_us=100.0, bandwidth_gbit=1.0)
  >>> print(recommend(predict(11_000_000, 0.001, 4, slow), 0.001, slow))
  exdyna is ...
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from . import joining, planning, probing
from .flat import MAX_SIZE
from .planning import predict as predict
from .planning import recommend as recommend
from .values import Link


class _Parser(argparse.ArgumentParser):
  """Answers a bad argument with one line instead of the whole usage."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def _positive(text: str) -> float:
  value = float(text)
  if not 0 < value < float("inf"):
    raise argparse.ArgumentTypeError(f"must be above zero and finite, got {text}")
  return value


def _share(text: str) -> float:
  value = float(text)
  if not 0 < value <= 1:
    raise argparse.ArgumentTypeError(f"must lie in (0, 1], got {text}")
  return value


def _count(text: str) -> int:
  value = float(text)  # 11e6 is how people write it
  if not 1 <= value <= MAX_SIZE or value != int(value):
    raise argparse.ArgumentTypeError(f"must be a whole number in 1..{MAX_SIZE}, got {text}")
  return int(value)


def _rank(text: str) -> int:
  value = int(text)
  if value < 0:
    raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
  return value


for _function, _name in (
  (_positive, "number"),
  (_share, "number"),
  (_count, "int"),
  (_rank, "int"),
):
  _function.__name__ = _name  # argparse names the type in its messages


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(prog="python -m exdyna_jax.advise", description=str(__doc__).splitlines()[0])
  add = parser.add_argument
  add("--params", type=_count, required=True, help="number of parameters, such as 11e6")
  add("--density", type=_share, required=True, help="share of the gradient to send, such as 1e-3")
  add("--steps", type=_count, help="of the training: warns if the density is too low for them")
  add("--repeats", type=_count, default=20, help="of each measurement (%(default)s)")
  several = parser.add_argument_group("several processes")
  where = "where process 0 listens"
  several.add_argument("--coordinator", type=joining.address, metavar="HOST:PORT", help=where)
  several.add_argument("--num-processes", type=_count, help="how many there are")
  several.add_argument("--process-id", type=_rank, help="which of them this one is, from 0")
  discover = "let JAX find out all three, on a cluster that it knows"
  several.add_argument("--discover", action="store_true", help=discover)
  one = parser.add_argument_group("one process")
  one.add_argument("--cpu-devices", type=_count, help="so many CPU devices, for a try")
  plan = parser.add_argument_group("planning, without a measurement")
  plan.add_argument("--latency-us", type=_positive, help="from one worker to the next")
  plan.add_argument("--bandwidth-gbit", type=_positive, help="that a worker can send")
  plan.add_argument("--workers", type=_count, help="how many")
  return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Options that belong together come together, and no two kinds of them."""
  kinds = {
    "several processes": ("coordinator", "num_processes", "process_id"),
    "planning": ("latency_us", "bandwidth_gbit", "workers"),
  }
  chosen = [
    f"--{name.replace('_', '-')}" for name in ("discover", "cpu_devices") if getattr(args, name)
  ]
  for kind, names in kinds.items():
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is None]
    if 0 < len(missing) < len(names):
      parser.error(f"{kind}: {' and '.join(missing)} must be given too")
    if not missing:
      chosen.append(f"--{names[0].replace('_', '-')}")
  if len(chosen) > 1:
    parser.error(f"{' and '.join(chosen)} exclude each other: choose one")
  if args.process_id is not None and args.process_id >= args.num_processes:
    parser.error(
      f"--process-id {args.process_id} must be below --num-processes {args.num_processes}"
    )
  if args.workers == 1:
    parser.error("--workers 1: one worker has nothing to exchange")


def _report(
  args: argparse.Namespace,
  workers: int,
  link: Link,
  local: float | None = None,
  rounding: float = 0.0,
) -> str:
  costs = planning.predict(args.params, args.density, workers, link, rounding)
  lines = [
    f"{workers} workers, {args.params:,} parameters, density {args.density:g}",
    f"latency {link.latency_us:.3g} us, bandwidth {link.bandwidth_gbit:.3g} Gbit/s",
  ]
  if local is not None:
    lines.append(f"exdyna's own part of a step, besides the exchange: {1e3 * local:.3g} ms")
  lines.append(f"\n{'exchange of a step':24}{'bytes per worker':>18}{'ms':>10}")
  for name, cost in costs.items():
    lines.append(f"{name:24}{cost.num_bytes:18,.0f}{1e3 * cost.seconds:10.3g}")
  lines.append("\n" + planning.recommend(costs, args.density, link, local or 0.0))
  if local is None:
    lines.append(
      "Selection and copies on the worker, which cost exdyna and Top-k time, are left out."
    )
  if costs[planning.TOP_K].seconds < min(
    costs[name].seconds for name in (planning.EXDYNA, planning.EXDYNA_16)
  ):
    lines.append("Top-k's single message is faster than exdyna's exchange here; its sort is not.")
  warning = args.steps and planning.warning(args.density, args.steps)
  return "\n".join([*lines, f"Warning: {warning}"] if warning else lines)


def _start(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Connects the processes."""
  try:
    if args.coordinator or args.discover:
      # Ctrl-C ends the process also while it waits for the others; Python would let it wait.
      signal.signal(signal.SIGINT, signal.SIG_DFL)
      joining.join(args.coordinator, args.num_processes, args.process_id)
    elif args.cpu_devices:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", args.cpu_devices)
  except (RuntimeError, ValueError) as error:
    parser.error(" ".join(str(error).split()))


def _measure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
  """Measures, in all processes, and prints the report in the first."""
  if len(jax.devices()) == 1:
    parser.error(
      "JAX finds a single device, which has nothing to exchange. Start one process per host with"
      " --coordinator, --num-processes and --process-id; or plan, with --latency-us,"
      " --bandwidth-gbit and --workers."
    )
  if jax.process_count() > 1:
    joining.agree({name: getattr(args, name) for name in ("params", "density", "repeats")})
  mesh = probing.make_mesh()
  link = probing.measure_link(mesh, args.repeats)
  local = probing.measure_local(mesh, args.params, args.density, args.repeats)
  rounding = probing.measure_rounding(mesh, args.params, link)
  if jax.process_index() == 0:
    print(_report(args, mesh.size, link, local, rounding), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command."""
  parser = _parser()
  args = parser.parse_args(argv)
  _check(parser, args)
  if args.workers:
    link = Link(args.latency_us, args.bandwidth_gbit)
    print(_report(args, args.workers, link))
    return 0
  _start(parser, args)
  with joining.leaving_at_once(parser.prog):
    _measure(parser, args)
  return 0


if __name__ == "__main__":
  sys.exit(main())
