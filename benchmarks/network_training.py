"""What one host of network.py does: trains a perceptron on MNIST, until it is good enough."""

import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from exdyna_jax import dense, exdyna, local_params, probing, state_specs, values
from exdyna_jax.flat import flatten, unflatten
from exdyna_jax.planning import DENSE, DENSE_16, EXDYNA
from exdyna_jax.probing import AXIS
from exdyna_jax.values import Wire

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import mnist_data

PIXELS = 28 * 28
BATCH = 32  # images per worker and step
DENSITY = 0.02
LEARNING_RATE = 1e-3
ACCURACY = 0.9  # of the test images
EVERY = 5  # steps between two looks at them
MOST_STEPS = 400


def width_of(size):
  """Width of two hidden layers that make a perceptron of about ``size`` parameters."""
  both = PIXELS + mnist_data.NUM_CLASSES
  return max(1, round((np.sqrt(both**2 + 4 * size) - both) / 2))


def make_params(size):
  width, rng = width_of(size), np.random.default_rng(0)
  widths = [PIXELS, width, width, mnist_data.NUM_CLASSES]

  def layer(fan_in, fan_out):
    w = rng.standard_normal((fan_in, fan_out), np.float32) * np.float32(np.sqrt(2 / fan_in))
    return {"w": w, "b": np.zeros(fan_out, np.float32)}

  return [layer(*pair) for pair in zip(widths[:-1], widths[1:], strict=True)]


def logits_of(params, images):
  x = images.reshape(images.shape[0], -1)
  for layer in params[:-1]:
    x = jax.nn.relu(x @ layer["w"] + layer["b"])
  return x @ params[-1]["w"] + params[-1]["b"]


def dense_in_16_bits(wire):
  """The dense mean of bfloat16 values, as an optax transformation."""

  def update(grads, state, params=None):
    vector = flatten(grads, jnp.float32)
    n = jax.lax.axis_size(AXIS)
    return unflatten(values.sum_values(vector, wire, AXIS, n)[0] / n, grads), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def transformations(n, link):
  return {
    DENSE: dense(AXIS, num_workers=n),
    DENSE_16: dense_in_16_bits(Wire(jnp.bfloat16, link)),
    EXDYNA: exdyna(DENSITY, AXIS, num_workers=n, link=link, wire_dtype=jnp.bfloat16),
  }


class Training:
  """One training, step by step."""

  def __init__(self, mesh, transformation, size, data):
    tx = optax.chain(transformation, optax.adam(LEARNING_RATE, b1=0.0))
    params = make_params(size)
    self.mesh, self.data = mesh, data
    specs = state_specs(jax.eval_shape(tx.init, params), AXIS)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    everywhere = NamedSharding(mesh, P())
    # Made by every host, with the same seed: nothing has to be sent.
    self.params = jax.tree.map(self._replicated, params)
    self.opt_state = jax.jit(tx.init, out_shardings=placed)(self.params)
    self.test = self._replicated(data.test_images), self._replicated(data.test_labels)

    def step(params, opt_state, images, labels):
      def loss(params):
        logits = logits_of(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

      grads = jax.grad(loss)(local_params(params, AXIS))
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    in_specs = (P(), specs, P(AXIS), P(AXIS))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P(), specs))
    self._step = jax.jit(mapped, donate_argnums=(0, 1))

    def accuracy(params, images, labels):
      return jnp.mean(jnp.argmax(logits_of(params, images), axis=-1) == labels)

    self._accuracy = jax.jit(accuracy, out_shardings=everywhere)
    images = len(data.train_images)
    self._batches = mnist_data.batches(images, BATCH * mesh.size, 10**6, seed=0)

  def _replicated(self, array):
    sharding = NamedSharding(self.mesh, P())
    return jax.make_array_from_callback(array.shape, sharding, lambda where: array[where])

  def step(self):
    """Trains on one batch; returns seconds."""
    index = next(self._batches)
    sharding, arrays = NamedSharding(self.mesh, P(AXIS)), []
    for array in (self.data.train_images[index], self.data.train_labels[index]):
      arrays.append(
        jax.make_array_from_callback(array.shape, sharding, lambda where, a=array: a[where])
      )
    start = time.perf_counter()
    self.params, self.opt_state = self._step(self.params, self.opt_state, *arrays)
    jax.block_until_ready((self.params, self.opt_state))
    return time.perf_counter() - start

  def accuracy(self):
    return float(self._accuracy(self.params, *self.test))


def steps_to_accuracy(mesh, sizes):
  """A row per size and contestant: how many steps it takes; None: more than are made."""
  link, data, rows = probing.measure_link(mesh), mnist_data.load(None, 0), []
  for size in sizes:
    for name, transformation in transformations(mesh.size, link).items():
      training, reached = Training(mesh, transformation, size, data), None
      for step in range(1, MOST_STEPS + 1):
        training.step()
        if step % EVERY == 0 and training.accuracy() >= ACCURACY:
          reached = step
          break
      rows.append({"N": size, "contestant": name, "steps": reached})
  return {"link": link._asdict(), "rows": rows}


def seconds_per_step(mesh, sizes, budget):
  """A row per size and contestant, in about ``budget`` seconds each, at least three steps."""
  link, data, rows = probing.measure_link(mesh), mnist_data.load(None, 0), []
  for size in sizes:
    for name, transformation in transformations(mesh.size, link).items():
      training = Training(mesh, transformation, size, data)
      training.step()  # compiles
      once = probing.mean_of(mesh, training.step())  # the same on all hosts
      steps = int(np.clip(budget / once, 2, 100))
      times = [training.step() for _ in range(steps)]
      rows.append({"N": size, "contestant": name, "s": statistics.median(times)})
  return {"link": link._asdict(), "rows": rows}
