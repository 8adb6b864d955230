"""What a training step becomes on TPUs and GPUs that are not there: compiled, never run.

Compiles one step for all devices of a topology, exdyna or dense in front of SGD, parameters and
state donated, and shows for each of the two, per device, what it

- needs: memory of arguments and outputs, what of it is aliased (donated and used again), and
  temporary, also in multiples of 4N bytes, one vector of the size of the parameters. On TPU also
  the program and the compiler's estimate of bytes accessed and flops, which counts a loop of
  unknown length once, and an element that is gathered or scattered as a whole tile
- sends: the collectives, in `main` or below it, in a `branch` of a conditional or in a `loop`
- computes of nearly N/3 elements and more: passes over the vector, copies. `S(1)` is a TPU's memory
  on the chip, into which vectors are moved if they fit: it is not part of `temporary`
- repeats: the trips of its loops, if known, and the instructions in each, with the condition's. A
  GPU launches a kernel for each of them

Run me: make aot-tpu, or make aot-cuda; for arguments, ARGS="--size 1e8". Or by hand:
  pip install . "jax[tpu]"
  python benchmarks/aot.py --platform tpu [--topology v5e:4x4] [--slices 2]
  pip install . "jax[cuda12-local]" nvidia-cuda-nvcc-cu12
  python benchmarks/aot.py --platform cuda [--topology 1x1x8] [--target FILE] 2>/dev/null
A TPU topology is a generation and its chips (v4:2x2x1, v5e:4x4, v5p:2x2x2, v6e:2x2); a CUDA
topology is slices x hosts x GPUs, of the GPU described in a file such as targets/h100.txtpb.
Also: [--size N] [--density D] [--model {flat,mlp}] [--json FILE] [--hlo FOLDER].
"""

import argparse
import functools
import json
import math
import os
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import dense, exdyna, local_params, state_specs

AXIS = "data"
TOPOLOGIES = {"tpu": "v5e:2x2", "cuda": "1x1x4"}
PACKAGES = {"tpu": '"jax[tpu]"', "cuda": '"jax[cuda12-local]" nvidia-cuda-nvcc-cu12'}
TARGET = pathlib.Path(__file__).parent / "targets" / "h100.txtpb"
# Else libtpu asks the network which TPU this machine is, and complains; any answer will do.
ANY_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
ANY_TPU["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
LAYERS, TILE = 3, 128  # of the MLP; a width of whole tiles, as models have
BATCH = 8  # inputs per device: the model is not what is looked at
LARGE = 0.3  # of N elements: the MLP's leaves count as large

COLLECTIVE = re.compile(r"all-|reduce-scatter|ragged-all-to-all|collective-|recv-done")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r" +(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w\-]+)\(")
LAYOUT = re.compile(r"\{[^{}]*?(S\(\d\))?\}|/\*.*?\*/")  # keeps the memory space
CALLS = re.compile(r"(\w+)=\{?((?:%[\w.\-]+(?:, )?)+)")
KERNEL = "/kernel"
DEEPER = dict.fromkeys(("body", "condition"), "/loop") | dict.fromkeys(
  ("branch_computations", "true_computation", "false_computation"), "/branch"
)
# These cost nothing, or what they call is listed; a -start is listed as its -done.
FREE = re.compile(
  r"(parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|after-all|.*-start)$"
)


def devices_of(args):
  """The devices that are not there."""
  try:
    if args.platform == "cuda":
      described = {"target_config": args.target.read_text(), "topology": args.topology}
      return topologies.get_topology_desc(platform="cuda", **described).devices
    slices = {"num_slices": args.slices} if args.slices > 1 else {}
    return topologies.get_topology_desc(args.topology, "tpu", **slices).devices
  # What JAX raises where there is no compiler for the platform, or no such topology.
  except (NotImplementedError, RuntimeError) as error:
    raise SystemExit(
      f"--platform {args.platform} --topology {args.topology}: {error}. If its compiler is not"
      f" installed: make aot-{args.platform}, or pip install . {PACKAGES[args.platform]}"
    ) from error


def model(name, size):
  """Abstract parameters, the shape of one input, and the loss."""
  if name == "flat":
    params = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    return params, (), lambda params, x: jnp.mean(x**2) * jnp.sum(params["w"] ** 2)
  width = max(round(math.sqrt(size / LAYERS) / TILE), 1) * TILE
  params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS

  def loss(params, x):
    return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x) ** 2)

  return params, (width,), loss


def compile_step(first, mesh, params, one_input, loss):
  """The compiled step of ``optax.chain(first, optax.sgd(...))``."""
  tx = optax.chain(first, optax.sgd(0.1))
  state = jax.eval_shape(tx.init, params)
  specs = (P(), state_specs(state, AXIS), P(AXIS))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()))
  def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(local_params(params, AXIS), x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(value, AXIS)

  def place(spec, tree):
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

  x = jax.ShapeDtypeStruct((BATCH * mesh.size, *one_input), jnp.float32)
  return step.lower(*jax.tree.map(place, specs, (params, state, x))).compile()


def needs(compiled, size):
  """Memory and estimated cost per device, one row each."""
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
  fields = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporary": "temp"}
  values = {name: getattr(memory, f"{field}_size_in_bytes") for name, field in fields.items()}
  if cost:  # TPU; on CUDA there is none, and the size of the program is 0
    values |= {"program": memory.generated_code_size_in_bytes}
    values |= {name: cost.get(name, 0) for name in ("bytes accessed", "flops")}
  for name, value in values.items():
    ratio = None if name == "flops" else value / (4 * size)
    yield {"what": "needs", "kind": name, "value": int(value), "of 4N": ratio}


def places(computations, entry):
  """Computation -> where it runs, such as ``main/branch/loop``."""
  where, todo = {}, [(entry, "main")]
  while todo:
    name, place = todo.pop()
    if name in where:
      continue
    where[name] = place
    for line in computations[name]:
      inside = " fusion(" in line or ("to_apply=" in line and " call(" not in line)
      for attribute, called in CALLS.findall(line):
        deeper = place.removesuffix(KERNEL) + (KERNEL if inside else DEEPER.get(attribute, ""))
        todo += [(x, deeper) for x in called.replace("%", "").split(", ") if x in computations]
  return where


def contents(hlo, size):
  """Collectives, large results and loops of a compiled program, one row each."""
  computations, entry = {}, None
  for line in hlo.splitlines():
    if start := COMPUTATION.match(line):
      lines = computations[start[2]] = []
      entry = start[2] if start[1] else entry
    elif computations:
      lines.append(line)
  for name, place in places(computations, entry).items():
    for line in computations[name]:
      found = INSTRUCTION.match(line)
      if not found:
        continue
      shape, kind = LAYOUT.sub(r"\1", found[1]), found[2]
      source = re.search(r'op_name="jit\(\w+\)/(?:shard_map/)?([^"]*)"', line)
      row = {"kind": kind.removesuffix("-done"), "shape": shape, "where": place}
      row["from"] = source[1] if source else ""
      dims = re.findall(r"\[([\d,]+)\]", shape)
      largest = max((math.prod(map(int, d.split(","))) for d in dims), default=1)
      if kind == "while":
        known = re.search(r'known_trip_count":\{"n":"(\d+)', line)
        called = [computations[x] for x in re.findall(r"(?:body|condition)=%([\w.\-]+)", line)]
        inside = [x[2] for x in map(INSTRUCTION.match, sum(called, [])) if x]
        row["instructions"] = sum(not FREE.match(kind) for kind in inside)
        row["trips"] = int(known[1]) if known else None
        shape = f"{row['trips'] or '?'} trips of {row['instructions']} instructions"
        yield row | {"what": "repeats", "shape": shape}
      elif COLLECTIVE.match(kind) and not kind.endswith("-start"):
        yield row | {"what": "sends"}
      elif largest >= LARGE * size and not FREE.match(kind) and KERNEL not in place:
        yield row | {"what": "computes"}


def show(rows):
  """The tables of one program."""
  for what in ("needs", "sends", "computes", "repeats"):
    print(f"\n  {what}")
    for row in (row for row in rows if row["what"] == what):
      if what == "needs":
        ratio = "" if row["of 4N"] is None else f"{row['of 4N']:9.3f} x 4N"
        print(f"    {row['kind']:14} {row['value']:>15,} {ratio}".rstrip())
      else:
        print(f"    {row['kind']:14} {row['shape']:30} {row['where']:17} {row['from']}".rstrip())


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--platform", choices=TOPOLOGIES, required=True)
  parser.add_argument("--topology", help=f"default {TOPOLOGIES}")
  parser.add_argument("--slices", type=int, default=1, help="of a TPU topology")
  parser.add_argument("--target", type=pathlib.Path, default=TARGET, help="which GPU")
  parser.add_argument("--model", choices=("flat", "mlp"), default="flat", help="one leaf, or three")
  parser.add_argument("--size", type=float, default=1e7, help="number of parameters")
  parser.add_argument("--density", type=float, default=0.01)
  parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
  parser.add_argument("--hlo", type=pathlib.Path, help="write the compiled programs here")
  args = parser.parse_args()
  args.topology = args.topology or TOPOLOGIES[args.platform]
  jax.config.update("jax_platforms", "cpu")  # compiling takes no device
  for name, value in ANY_TPU.items():
    os.environ.setdefault(name, value)
  devices = devices_of(args)
  mesh = Mesh(np.array(devices), (AXIS,))
  params, one_input, loss = model(args.model, int(args.size))
  size = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  case = {"platform": args.platform, "topology": args.topology, "devices": mesh.size}
  case |= {"model": args.model, "size": size, "density": args.density}
  sparse = exdyna(args.density, AXIS, num_workers=mesh.size)
  out = []
  for name, first in {"exdyna": sparse, "dense": dense(AXIS, num_workers=mesh.size)}.items():
    start = time.perf_counter()
    compiled = compile_step(first, mesh, params, one_input, loss)
    seconds = time.perf_counter() - start
    title = f"{name}, {mesh.size} x {devices[0].device_kind}, {args.model}, N = {size:,}"
    print(f"\n{title}, density {args.density:g}: compiled in {seconds:.0f} s")
    rows = [*needs(compiled, size), *contents(compiled.as_text(), size)]
    show(rows)
    out += [{"program": name} | case | row for row in rows]
    if args.hlo:
      args.hlo.mkdir(parents=True, exist_ok=True)
      (args.hlo / f"{args.platform}-{args.model}-{name}.txt").write_text(compiled.as_text())
  if args.json:
    args.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
  main()
