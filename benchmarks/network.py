"""Dense and sparse exchanges between four hosts with slow links: time, bytes, and time to accuracy.

The hosts are network namespaces of this machine, each with one process, their links shaped to
100 Mbit, 1 Gbit, or not at all. They share its cores, in real-time scheduling, and have no distance
between them, so latency is that of the software alone. Needs Linux, root and iproute2; says so and
does nothing without.

Exchange: for each link and vector of N elements, density 0.001

- ms: median of one exchange, back to back with others; the contestants take turns. What is sent has
  been selected before; `exdyna, whole update` has accumulation and selection in it
- bytes: that a host really sends per exchange, headers of packets included; and in theory
- predicted ms: what `python -m exdyna_jax.advise` says, from latency and bandwidth as it measures
  them on the same link

Training: a perceptron with about N parameters on MNIST; exdyna with density 0.02 and values in 16
bits. Steps to an accuracy of 0.9 are counted once, for links do not change them; the time of a step
is measured on each link, and the time to accuracy is their product.

Run me: python benchmarks/network.py [--json FILE] [--out FOLDER] [--only exchange|training]
[--rates 100mbit 1gbit unlimited] [--sizes 1e6 1e7] [--quick]
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys

import hosts
import measure
import network_pictures

HOSTS = 4
DENSITY = 0.001
RATES = ("100mbit", "1gbit", "unlimited")
TRAINED_ON = ("100mbit", "1gbit")
SIZES = (10**6, 10**7)
TIMEOUT = 900.0


def on_hosts(network, rate, task, **arguments):
  """Runs a function of `exchanges` or `network_training` on all hosts; returns its result."""
  network.shape(None if rate == "unlimited" else rate)
  job = json.dumps({"task": task, "arguments": arguments})
  me = str(pathlib.Path(__file__).resolve())
  os.environ.update(measure.TUNED | {"JAX_PLATFORMS": "cpu"})
  output = network.run([sys.executable, me, "--host", job], TIMEOUT)
  return json.loads(output.splitlines()[-1])


def be_a_host(job, address, number, host):
  """The other side of `on_hosts`."""
  # One core each, before JAX makes its threads: they would wait for those of other hosts.
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[int(host) % len(cores)]})
  # Awake as soon as a message is there, as on a core of one's own: else a host that has slept waits
  # for the end of a time slice, some milliseconds, of the one that it shares a core with.
  with contextlib.suppress(PermissionError):  # some containers forbid it, to their times' cost
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
  import jax

  jax.distributed.initialize(address, int(number), int(host))
  import exchanges
  import network_training

  from exdyna_jax import probing

  tasks = {
    "exchange": exchanges.measure,
    "steps": network_training.steps_to_accuracy,
    "seconds": network_training.seconds_per_step,
  }
  job = json.loads(job)
  result = tasks[job["task"]](probing.make_mesh(), **job["arguments"])
  if jax.process_index() == 0:
    print(json.dumps(result), flush=True)


def exchange_rows(network, args):
  rows = []
  for rate in args.rates:
    found = on_hosts(
      network, rate, "exchange", sizes=args.sizes, density=DENSITY, rounds=2 if args.quick else 4
    )
    print(f"{rate}: {found['link']}", *found["advice"], sep="\n  ", file=sys.stderr)
    rows += [{"link": rate, **row} for row in found["rows"]]
  return with_ratios(rows, "ms")


def training_rows(network, args):
  sizes = args.sizes[:1] if args.quick else args.sizes
  counted = on_hosts(network, "unlimited", "steps", sizes=sizes)["rows"]
  steps = {(row["N"], row["contestant"]): row["steps"] for row in counted}
  rows = []
  for rate in args.rates:
    if rate not in TRAINED_ON:
      continue
    found = on_hosts(network, rate, "seconds", sizes=sizes, budget=1 if args.quick else 4)
    for row in found["rows"]:
      needed = steps[row["N"], row["contestant"]]
      rows.append(
        {"link": rate, **row, "steps": needed, "to accuracy, s": needed and needed * row["s"]}
      )
  return with_ratios(rows, "to accuracy, s")


def with_ratios(rows, column):
  """Rows with how much faster each is than the first of its link and size, dense float32."""
  first = {}
  for row in rows:
    base = first.setdefault((row["link"], row["N"]), row[column])
    row["dense / this"] = base / row[column] if base and row[column] else None
  return rows


def number(text):
  """1e6 is how people write it."""
  return int(float(text))


def parse(argv):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--json", type=pathlib.Path, help="write the rows here")
  add("--out", type=pathlib.Path, help="draw pictures in this folder")
  add("--only", choices=("exchange", "training"), help="half of it")
  add("--rates", nargs="+", default=RATES, help="of the links, as tc has them, or unlimited")
  add("--sizes", nargs="+", type=number, default=SIZES, help="numbers of elements N")
  add("--quick", action="store_true", help="few repetitions, training of the first size only")
  return parser.parse_args(argv)


def main(argv=None):
  args = parse(argv)
  why = hosts.unavailable()
  if why:
    print(f"skipped: {why}")
    return
  results = {}
  with hosts.hosts(HOSTS) as network:
    for name, rows_of in (("exchange", exchange_rows), ("training", training_rows)):
      if args.only in (None, name):
        results[name] = rows_of(network, args)
        measure.print_table(results[name])
  if args.json:
    args.json.write_text(json.dumps(results, indent=1))
  if args.out:
    network_pictures.draw(results, args.out)


if __name__ == "__main__":
  if sys.argv[1:2] == ["--host"]:
    be_a_host(*sys.argv[2:])
  else:
    main()
