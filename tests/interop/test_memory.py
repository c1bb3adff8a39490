"""A conversion holds a few tensors in memory, for models of any size."""

import subprocess
import sys

import pytest

# A model of 770 MB. Its tensors have 12.6 MB, and its arrays up to 252 MB.
MODEL_MEGABYTES = 770
# Prints the largest number of megabytes in memory, for each direction.
SCRIPT = """
import pathlib, re, sys, threading, time
import jax
import jax.numpy as jnp
import numpy as np
from diffjax.config import ModelConfig
from diffjax.data.tokenizer import load_tokenizer
from diffjax.interop import directory, motif, workdir
from diffjax.interop.layout import Model
from diffjax.model.decoder import Decoder


def make_model():
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

  def draw(leaf):
    # All rows are equal, so that the array takes no memory.
    row = rng.standard_normal(leaf.shape[-1]).astype(np.float32)
    return np.broadcast_to(row, leaf.shape)

  params = jax.tree.map(draw, shapes["params"])
  return Model(config, params, load_tokenizer("bytes"))


def megabytes_in_memory():
  status = pathlib.Path("/proc/self/status").read_text()
  kilobytes = int(re.search(r"RssAnon:\\s+(\\d+)", status)[1])
  return kilobytes / 1024


class PeakMemory:
  '''The largest number of megabytes, measured by a thread.'''

  def __init__(self):
    self.peak = 0
    threading.Thread(target=self.watch, daemon=True).start()

  def watch(self):
    while True:
      self.peak = max(self.peak, megabytes_in_memory())
      time.sleep(0.002)


home = pathlib.Path(sys.argv[1])
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
"""


@pytest.mark.full
@pytest.mark.usefixtures("system_allocator")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_conversion_holds_at_most_a_third_of_the_model(tmp_path):
  result = subprocess.run(
    [sys.executable, "-c", SCRIPT, str(tmp_path)],
    capture_output=True,
    text=True,
    check=False,
  )

  assert result.returncode == 0, result.stderr
  to_workdir, from_workdir = result.stdout.split()
  assert int(to_workdir) < MODEL_MEGABYTES / 3
  assert int(from_workdir) < MODEL_MEGABYTES / 3
  # The model is the same after both directions.
  for path in sorted((tmp_path / "source").glob("*.safetensors")):
    assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
