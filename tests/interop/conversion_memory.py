"""python -m tests.interop.conversion_memory DIRECTORY measures memory.

It converts a model of 770 MB in the layout of Motif to a workdir and back, in
DIRECTORY/source, DIRECTORY/run and DIRECTORY/out. For each of both conversions
it prints the largest number of megabytes that were in memory. It runs in a
process of its own, so that nothing else is in memory.
"""

import pathlib
import re
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from diffjax.config import ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.interop import directory, motif, workdir
from diffjax.interop.layout import Model
from diffjax.model.decoder import Decoder


def make_model() -> Model:
  """Returns a model of 770 MB. Its arrays have up to 252 MB."""
  config = ModelConfig(
    num_layers=20,
    embed_dim=512,
    num_heads=8,
    num_noise_heads=2,
    head_dim=16,
    ffn_dim=6144,
    lambda_init_offset=1,
    ffn_activation="poly_norm",
  )
  ids = jnp.zeros((1, 1), jnp.int32)
  shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0), ids)
  rng = np.random.default_rng(0)

  def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    # All rows are equal, so that the array takes no memory.
    row = rng.standard_normal(leaf.shape[-1]).astype(np.float32)
    return np.broadcast_to(row, leaf.shape)

  params = jax.tree.map(draw, shapes["params"])
  return Model(config, params, load_tokenizer("bytes"))


def megabytes_in_memory() -> float:
  """Returns the memory of this process, without mapped files."""
  status = pathlib.Path("/proc/self/status").read_text()
  kilobytes = int(re.search(r"RssAnon:\s+(\d+)", status)[1])
  return kilobytes / 1024


class PeakMemory:
  """The largest number of megabytes in memory, measured by a thread."""

  def __init__(self):
    self.peak = 0
    threading.Thread(target=self.watch, daemon=True).start()

  def watch(self) -> None:
    """Measures without end."""
    while True:
      self.peak = max(self.peak, megabytes_in_memory())
      time.sleep(0.002)


def main(home: pathlib.Path) -> None:
  """Converts the model in both directions and prints the peaks."""
  source = str(home / "source")
  run = str(home / "run")
  out = str(home / "out")
  directory.SHARD_BYTES = 50_000_000
  motif.write(source, make_model(), "float32")

  before = megabytes_in_memory()
  memory = PeakMemory()
  workdir.write(run, motif.read(source))
  print(round(memory.peak - before))
  memory.peak = 0
  motif.write(out, workdir.read(run), "float32")
  print(round(memory.peak - before))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
