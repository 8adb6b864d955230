"""What the exchange of a step costs on a network, and what to do about it."""

import re
import subprocess
import sys

import jax
import pytest

from exdyna_jax import Link, advise, planning, probing
from exdyna_jax.planning import DENSE, DENSE_16, EXDYNA, EXDYNA_16, TOP_K

SLOW = Link(latency_us=100.0, bandwidth_gbit=0.1)
FAST = Link(latency_us=100.0, bandwidth_gbit=1000.0)


def test_costs_by_hand():
  """N = 1,000,000, density 0.001, n = 4: 313 slots a worker; 100 us a hop, 12.5 MB a second."""
  costs = planning.predict(1_000_000, 0.001, 4, SLOW)

  def ms(hops, num_bytes):
    return pytest.approx(1e-3 * (0.1 * hops + num_bytes / 12_500))

  # Ring all-reduce: 2 * 3 hops, 2 * 3 / 4 * 4 N bytes. In 16 bits: 4 hops, half of that.
  assert costs[DENSE] == (6e6, ms(6, 6e6))
  assert costs[DENSE_16] == (3e6, ms(4, 3e6))
  # Three times 1000 indices and values.
  assert costs[TOP_K] == (24_000, ms(3, 24_000))
  # Three times 2 + 9 numbers of the header, and 313 indices; then the sums of 1252 values, in parts
  # of 314, by four hops and 1.5 * 4 * 1256 bytes rather than three hops and twice the bytes.
  indices = 3 * 4 * (2 + 9 + 313)
  assert costs[EXDYNA] == (indices + 7536, ms(3 + 4, indices + 7536))
  assert costs[EXDYNA_16] == (indices + 3768, ms(3 + 4, indices + 3768))


def test_rounding_costs_the_dense_mean_in_16_bits_its_time():
  """Where CPUs round, it takes longer than a fast network needs for the other half of the bytes."""
  plain, rounded = (planning.predict(1_000_000, 0.001, 4, FAST, rounding=t) for t in (0.0, 1.0))
  assert rounded[DENSE_16].seconds == pytest.approx(plain[DENSE_16].seconds + 1)
  assert rounded == plain | {DENSE_16: rounded[DENSE_16]}
  assert probing.measure_rounding(probing.make_mesh(jax.devices()[:2]), 1000, FAST) >= 0


def test_rounding_is_measured_too(monkeypatch, capsys):
  """The function was there, and nobody called it."""
  monkeypatch.setattr(probing, "measure_link", lambda mesh, repeats: FAST)
  monkeypatch.setattr(probing, "measure_local", lambda *args: 0.0)
  monkeypatch.setattr(probing, "measure_rounding", lambda mesh, params, link: 1234.0)
  assert advise.main(["--params", "1e4", "--density", "0.1"]) == 0
  assert re.search(r"^dense, 16 bits .* 1.23e\+06$", capsys.readouterr().out, re.MULTILINE)


def test_the_fast_network_is_for_dense_the_slow_one_for_exdyna():
  for link, words in (
    (SLOW, "exdyna is 366 times faster than dense float32"),
    (FAST, "dense is faster here: dense, 16 bits"),
  ):
    costs = planning.predict(1_000_000, 0.001, 4, link)
    assert planning.recommend(costs, 0.001, link).startswith(words)


def test_the_own_part_of_a_step_counts():
  costs = planning.predict(1_000_000, 0.001, 4, SLOW)
  assert planning.recommend(costs, 0.001, SLOW, local=10.0).startswith("dense is faster")


def test_the_recommended_call_can_be_made():
  costs = planning.predict(10_000_000, 0.01, 4, SLOW)
  call = re.search(r"exdyna\(.*\)$", planning.recommend(costs, 0.01, SLOW)).group()
  names = {"exdyna": lambda *args, **options: (args, options), "Link": Link, "jnp": jax.numpy}
  args, options = eval(call, names | {"axis_name": "data"})
  assert args == (0.01, "data")
  assert options == {"wire_dtype": jax.numpy.bfloat16, "link": SLOW}


GRID = [
  (params, density, n, Link(latency, bandwidth), local)
  for params in (1, 1000, 30_000, 10**7)
  for density in (0.001, 0.1, 1.0)
  for n in (2, 3, 8)
  for latency in (1.0, 100.0)
  for bandwidth in (0.1, 1.0, 100.0)
  for local in (0.0, 1e-3)
]


def test_the_recommendation_is_the_fastest_of_the_table():
  """Dense was compared with float32 values where 16 bits save less than 10%: it was recommended
  where the exdyna of 16 bits was faster.
  """
  for params, density, n, link, local in GRID:
    costs = planning.predict(params, density, n, link)
    line = planning.recommend(costs, density, link, local)
    ms = {name: 1e3 * cost.seconds for name, cost in costs.items()}
    sparse = {name: ms[name] + 1e3 * local for name in (EXDYNA, EXDYNA_16)}
    dense = {name: ms[name] for name in (DENSE, DENSE_16)}
    if line.startswith("dense is faster"):
      best, other = min(dense, key=dense.get), min(sparse, key=sparse.get)
      assert f"{best}, takes" in line and f" {other}, " in line
      assert dense[best] <= sparse[other]
      assert ("jax.lax.pmean" in line) == (best == DENSE_16)  # nothing to import for it
    else:
      named = EXDYNA_16 if "wire_dtype" in line else EXDYNA
      assert sparse[named] <= min(dense.values())
      assert sparse[named] <= planning.WORTHWHILE * min(sparse.values())
      ratios = [float(x) for x in re.findall(r"(\S+) times", line)]
      assert ratios == pytest.approx([x / sparse[named] for x in dense.values()], rel=5e-3)
      assert min(ratios) >= 1
    assert ("its own part of 1 ms counted in" in line) == (local > 0)


def test_too_few_steps_for_the_density():
  assert planning.warning(0.001, 2000) is None
  assert "1000 steps at density 0.001 send a coordinate 1 times" in planning.warning(0.001, 1000)
  assert "take a density of 0.001, or more steps" in planning.warning(1e-4, 2000)
  assert "take more steps" in planning.warning(0.5, 1)
  assert planning.warning(1.0, 1) is None


def test_the_advised_density_is_enough():
  """Rounded to the nearest, it was often too low, and the same warning came again."""
  for steps in [*range(2, 3000), *(10**k + 7 for k in range(4, 10))]:
    advised = re.search(r"a density of (\S+),", planning.warning(1e-12, steps)).group(1)
    assert float(advised) <= 1
    assert planning.warning(float(advised), steps) is None


PLAN = ["--params", "1e6", "--density", "1e-3"]


def test_plans_on_the_command_line():
  """In a process of its own, as users start it; without a device."""
  options = ["--latency-us", "100", "--bandwidth-gbit", "0.1", "--workers", "4", "--steps", "100"]
  command = [sys.executable, "-P", "-m", "exdyna_jax.advise", *PLAN, *options]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert "4 workers, 1,000,000 parameters" in done.stdout
  assert re.search(r"dense, float32 +6,000,000 +481\n", done.stdout)
  assert "exdyna is" in done.stdout and "Warning: 100 steps" in done.stdout


def test_measures_the_devices_of_this_process(capsys):
  assert advise.main(["--params", "2000", "--density", "0.1", "--repeats", "2"]) == 0
  printed = capsys.readouterr().out
  assert "8 workers, 2,000 parameters, density 0.1" in printed
  assert re.search(r"latency \S+ us, bandwidth \S+ Gbit/s", printed)
  assert "own part of a step" in printed and "faster" in printed


def test_a_line_through_two_measurements(monkeypatch):
  """Collectives of 4 workers that take 50 us a hop and a second per GB are found to do so."""
  mesh = probing.make_mesh(jax.devices()[:4])
  collectives = iter(["psum", "gather", "all_to_all"] * 10)

  def median_seconds(run, repeats):
    name, items = next(collectives), run.args[0].size // 4
    hops = {"psum": 6, "gather": 3, "all_to_all": 1}[name]
    return 50e-6 * hops + 1e-9 * probing._bytes(name, 4, items)

  monkeypatch.setattr(probing, "median_seconds", median_seconds)
  assert probing.measure_link(mesh) == pytest.approx(Link(50.0, 8.0), rel=1e-4)


@pytest.mark.parametrize(
  "options, words",
  [
    (["--density", "2"], r"--density: must lie in \(0, 1\], got 2"),
    (["--density", "nan"], r"--density: must lie in \(0, 1\], got nan"),
    (["--params", "1.5"], "--params: must be a whole number in 1.*got 1.5"),
    (["--params", "inf"], "--params: must be a whole number in 1.*got inf"),
    (["--params", "many"], "--params: invalid int value: 'many'"),
    (["--latency-us", "100"], "--bandwidth-gbit and --workers must be given too"),
    (["--coordinator", "a:1", "--process-id", "0"], "--num-processes must be given too"),
    (["--coordinator", "a:1", "--process-id", "2", "--num-processes", "2"], "must be below"),
    (["--coordinator", ""], "--coordinator: must be HOST:PORT, such as .*, got ''"),
    (["--discover", "--cpu-devices", "2"], "--discover and --cpu-devices exclude each other"),
    (["--latency-us", "1", "--bandwidth-gbit", "1", "--workers", "1"], "nothing to exchange"),
  ],
)
def test_errors(options, words, capsys):
  with pytest.raises(SystemExit, match="2"):
    advise.main([*PLAN, *options])
  errors = capsys.readouterr().err
  assert re.search(words, errors) and len(errors.splitlines()) == 1, errors
