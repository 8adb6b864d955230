"""One process of a training with examples/multihost.py, as test_multihost starts several of them.

Beside the options of the example it takes --die-after STEP, after which process 1 kills itself, and
--result FILE, to which it writes what its own device holds at the end.
"""

import os
import pathlib
import signal

import flax.linen as nn
import jax
import mnist_data
import multihost
import numpy as np

from exdyna_jax import reshard_state

WORKERS_AFTER = 3  # for which the process shares out the residuals of all


class Small(nn.Module):
  """One hidden layer: compiles fast."""

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(16)(x.reshape(x.shape[0], -1)))
    return nn.Dense(mnist_data.NUM_CLASSES)(x)


def train(args, mesh, die_after=None):
  """Trains the small model; returns parameters and state after the last step."""
  data = mnist_data.load(args.data_dir, args.seed)
  for step, params, opt_state, *_ in multihost.train(Small(), data, args, mesh):
    last = params, opt_state
    if step == die_after and jax.process_index() == 1:
      os.kill(os.getpid(), signal.SIGKILL)
  return last


def held(tree, device):
  """What a device holds of the arrays of a tree, by their paths."""
  return {
    jax.tree_util.keystr(path): np.asarray(shard.data)
    for path, x in jax.tree.leaves_with_path(tree)
    for shard in x.addressable_shards
    if shard.device == device
  }


def main():
  parser = multihost.make_parser()
  parser.add_argument("--die-after", type=int)
  parser.add_argument("--result", type=pathlib.Path, required=True)
  args = parser.parse_args()
  multihost.start(args.coordinator, args.num_processes, args.process_id)
  with multihost.leaving_at_once():
    last = train(args, multihost.make_mesh(), args.die_after)
    resharded = reshard_state(last[1], WORKERS_AFTER)[0].residual
    np.savez(
      args.result / f"{jax.process_index()}.npz",
      resharded=resharded,
      **held(last, jax.local_devices()[0]),
    )


if __name__ == "__main__":
  main()
