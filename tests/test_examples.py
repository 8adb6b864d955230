"""The examples as a user runs them: data files, options, exit status, what they write."""

import gzip
import os
import pathlib
import struct
import subprocess
import sys

import jax.numpy as jnp
import mnist_data
import numpy as np
import pytest
import report
import train_mnist

SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "train_mnist.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIDE = 28


def idx_bytes(array):
  """An array of unsigned bytes in the IDX format."""
  header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
  return header + array.tobytes()


def write_idx_folder(folder, *, train=64, test=40, dash="-", packed=False):
  """A learnable data set in the four files of MNIST: the bright row of an image is its label."""
  for split, size in (("train", train), ("t10k", test)):
    labels = np.arange(size, dtype=np.uint8) % mnist_data.NUM_CLASSES
    images = np.zeros((size, SIDE, SIDE), np.uint8)
    images[np.arange(size), 2 * labels] = 255
    for name, array in ((f"images{dash}idx3", images), (f"labels{dash}idx1", labels)):
      content = idx_bytes(array)
      path = folder / f"{split}-{name}-ubyte{'.gz' if packed else ''}"
      path.write_bytes(gzip.compress(content) if packed else content)
  return folder


def run_demo(folder, *arguments):
  """Runs the example in `folder`, free of the settings of this test process."""
  inherited = {
    name: value
    for name, value in os.environ.items()
    if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONPATH")
  }
  return subprocess.run(
    [sys.executable, SCRIPT, *map(str, arguments)],
    cwd=folder,
    env=inherited | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dash", ["-", "."])
def test_idx_folder_is_read(tmp_path, packed, dash):
  write_idx_folder(tmp_path, packed=packed, dash=dash)
  data = mnist_data.load(tmp_path, seed=0)
  assert data.train_images.shape == (64, SIDE, SIDE, 1)
  assert data.test_images.shape == (40, SIDE, SIDE, 1)
  assert data.train_images.dtype == np.float32 and data.train_labels.dtype == np.int32
  assert data.train_images.min() == 0.0 and data.train_images.max() == 1.0
  np.testing.assert_array_equal(
    data.train_images[:, ::2].any(axis=(2, 3)).argmax(1), np.arange(64) % 10
  )


def test_idx_keeps_order_and_shape(tmp_path):
  array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
  (tmp_path / "file").write_bytes(idx_bytes(array))
  np.testing.assert_array_equal(mnist_data.read_idx(tmp_path / "file"), array)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "no IDX file"),
    (b"<!DOCTYPE html>", "no IDX file"),
    (struct.pack(">BBBBI", 0, 0, 0x0D, 1, 1) + b"\0\0\0\0", "no IDX file"),  # float32 elements
    (struct.pack(">BBBBI", 0, 0, 8, 3, 1), "inside its header"),
    (struct.pack(">BBBBI", 0, 0, 8, 1, 5) + b"1234", r"\(5,\) bytes but holds 4"),
    (gzip.compress(bytes(1000), mtime=0)[:-8], "broken gzip"),
  ],
  ids=["empty", "html", "float", "header", "short", "gzip"],
)
def test_broken_idx_file_is_named(tmp_path, content, message):
  path = tmp_path / "file"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message) as caught:
    mnist_data.read_idx(path)
  assert str(path) in str(caught.value)


def test_folder_without_a_file_says_which(tmp_path):
  write_idx_folder(tmp_path)
  (tmp_path / "t10k-labels-idx1-ubyte").unlink()
  with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte.gz"):
    mnist_data.load(tmp_path, seed=0)


def test_folder_whose_files_disagree(tmp_path):
  write_idx_folder(tmp_path)
  (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
  with pytest.raises(ValueError, match=r"\(64, 28, 28\), the labels \(3,\)"):
    mnist_data.load(tmp_path, seed=0)


def test_label_out_of_range(tmp_path):
  write_idx_folder(tmp_path)
  (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(64, 10, np.uint8)))
  with pytest.raises(ValueError, match=r"train labels must lie in 0\.\.9"):
    mnist_data.load(tmp_path, seed=0)


def test_packaged_images():
  data = mnist_data.load(None, seed=0)
  assert data.train_images.shape == (4000, SIDE, SIDE, 1)
  assert data.test_images.shape == (1000, SIDE, SIDE, 1)
  labels = np.concatenate([data.train_labels, data.test_labels])
  np.testing.assert_array_equal(np.bincount(labels), np.full(10, 500))
  again = mnist_data.load(None, seed=0)
  np.testing.assert_array_equal(data.test_images, again.test_images)
  assert (mnist_data.load(None, seed=1).test_labels != data.test_labels).any()


def test_batches_pass_over_all_images_before_the_next_pass():
  drawn = list(mnist_data.batches(num_images=10, batch_size=4, steps=4, seed=0))
  for first in (0, 2):  # two full batches fit in one pass
    assert len(np.unique(np.concatenate(drawn[first : first + 2]))) == 8
  again = mnist_data.batches(num_images=10, batch_size=4, steps=4, seed=0)
  np.testing.assert_array_equal(drawn, list(again))


def test_demo_trains_and_draws(tmp_path):
  write_idx_folder(tmp_path)
  arguments = ["--workers", 2, "--batch", 16, "--steps", 25, "--density", 0.05]
  done = run_demo(tmp_path, "--data-dir", tmp_path, "--out", "picture.png", *arguments)
  assert done.returncode == 0, done.stderr
  for word in ("dense", "exdyna", "accuracy", "density", "padding", "bytes/step", "steps/s"):
    assert word in done.stdout
  assert (tmp_path / "picture.png").read_bytes().startswith(PNG_SIGNATURE)
  assert "25/25" in done.stderr and "loss=" in done.stderr and "density=" in done.stderr


def test_demo_reports_divergence(tmp_path):
  write_idx_folder(tmp_path)
  arguments = ["--workers", 2, "--batch", 16, "--steps", 10, "--optimizer", "sgd", "--lr", 1e20]
  done = run_demo(tmp_path, "--data-dir", tmp_path, *arguments)
  assert done.returncode == 1
  for name in ("dense", "exdyna"):
    assert f"{name} diverged: the loss is " in done.stderr
  assert "Traceback" not in done.stderr


def is_refused(main, arguments, message, capsys):
  """An example's command ends with one line that says what is wrong."""
  with pytest.raises(SystemExit) as caught:
    main(arguments)
  assert caught.value.code == 2
  errors = capsys.readouterr().err
  assert message in errors
  assert len(errors.splitlines()) == 1, errors


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--density", "0"], "density"),
    (["--density", "1.5"], "1.5"),
    (["--density", "much"], "--density: invalid float value: 'much'"),
    (["--workers", "0"], "--workers: must be at least 1, got 0"),
    (["--workers", "two"], "--workers: invalid int value: 'two'"),
    (["--steps", "-1"], "--steps: must be at least 1, got -1"),
    (["--seed", "-1"], "--seed: must be at least 0, got -1"),
    (["--lr", "nan"], "--lr: must be above zero, got nan"),
    (["--optimizer", "sdg"], "'sdg'"),
    (["--threshold", "papre"], "'papre'"),
    (["--partition", "papre"], "'papre'"),
    (["--workers", "3", "--batch", "2000"], "3 workers times 2000 images"),
    (["--out", "missing/picture.png"], "--out: there is no folder missing"),
    (["--data-dir", "missing"], "missing holds none of train-images-idx3-ubyte"),
  ],
)
def test_bad_argument_gets_one_line(arguments, message, capsys):
  is_refused(train_mnist.main, arguments, message, capsys)


@pytest.mark.parametrize("optimizer", train_mnist.OPTIMIZERS)
def test_default_learning_rates_descend(optimizer):
  make_optimizer, learning_rate = train_mnist.OPTIMIZERS[optimizer]
  tx = make_optimizer(learning_rate)
  x = jnp.ones(())
  state = tx.init(x)
  for _ in range(10):
    update, state = tx.update(x, state, x)  # the gradient of x**2 / 2
    x += update
  assert abs(x) < 1


def make_run(name="dense", *, loss=(2.3, 0.5), accuracy=0.9, **changes):
  """A run as the report takes it."""
  values = np.full(len(loss), 0.5)
  arrays = dict.fromkeys(("density", "threshold", "padding_ratio", "bytes_sent"), values) | changes
  arrays |= {"loss": np.asarray(loss), "counts": np.ones((len(loss), 2), int), "parameters": 4}
  return report.Run(name=name, accuracy=accuracy, steps_per_second=3.0, **arrays)


@pytest.mark.parametrize(
  ("run", "sentence"),
  [
    (make_run(), None),
    (make_run(loss=(2.3, 2.4), accuracy=0.1), None),  # too short to tell
    (make_run(loss=(2.3, np.nan)), "dense diverged: the loss is nan after 2 steps."),
    (make_run(loss=(2.0, *[3.0] * 30)), "dense diverged: the loss rose from 2.000 to 3.000."),
    (
      make_run(loss=[2.3] * 30, accuracy=0.11),
      "dense learned nothing: its accuracy of 0.110 is that of guessing.",
    ),
  ],
)
def test_divergence(run, sentence):
  assert report.divergence(run, mnist_data.NUM_CLASSES) == sentence


def test_table_compares_with_the_dense_run():
  runs = [
    make_run(bytes_sent=np.array([1000.0, 1000.0]), density=np.ones(2)),
    make_run("exdyna", bytes_sent=np.array([10.0, 30.0]), density=np.array([0.01, 0.03])),
  ]
  head, first, second = report.table(runs, target_density=0.025).splitlines()
  assert len({len(head), len(first), len(second)}) == 1
  assert first.split() == "dense 0.900 1.4000 1.00000 1 0.50 1,000 100.0% 3.0".split()
  assert second.split() == "exdyna 0.900 1.4000 0.02000 0.025 0.50 20 2.0% 3.0".split()


@pytest.mark.parametrize("loss", [(2.3,), (2.3, np.nan), np.linspace(2.3, 0.0, 50)])
def test_picture_of_any_run(tmp_path, loss):
  runs = [make_run(loss=loss), make_run("exdyna", loss=loss, threshold=np.zeros(len(loss)))]
  report.plot(runs, target_density=0.01, title="title", path=tmp_path / "picture.png")
  assert (tmp_path / "picture.png").read_bytes().startswith(PNG_SIGNATURE)
