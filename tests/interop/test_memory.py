"""What a conversion holds in memory, there and back: a few tensors, however many the model has."""

import subprocess
import sys

import pytest

# A model of 770 MB, whose tensors have 12.6 MB and arrays 252 MB. Prints MB held at the most in each of the two directions.
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

directory.SHARD_BYTES = 50_000_000
source, run, out = (str(pathlib.Path(sys.argv[1]) / name) for name in ("source", "run", "out"))
config = ModelConfig(
  num_layers=20, embed_dim=512, num_heads=8, num_noise_heads=2, head_dim=16, ffn_dim=6144, lambda_init_offset=1, ffn_activation="poly_norm"
)
shapes = jax.eval_shape(lambda: Decoder(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"])
rng = np.random.default_rng(0)
params = jax.tree.map(lambda leaf: np.broadcast_to(rng.standard_normal(leaf.shape[-1]).astype(np.float32), leaf.shape), shapes)
motif.write(source, Model(config, params, load_tokenizer("bytes")), "float32")

def held():
  return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024

def watch():
  while True:
    seen.append(held())
    time.sleep(0.002)

before, seen = held(), [0]
threading.Thread(target=watch, daemon=True).start()
for convert in (lambda: workdir.write(run, motif.read(source)), lambda: motif.write(out, workdir.read(run), "float32")):
  seen.clear()
  convert()
  print(round(max(seen) - before))
"""


@pytest.mark.full
@pytest.mark.usefixtures("system_allocator")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_conversion_holds_a_third_of_the_model_at_most(tmp_path):
  found = subprocess.run(
    [sys.executable, "-c", SCRIPT, str(tmp_path)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert found.returncode == 0, found.stderr
  there, back = map(int, found.stdout.split())
  assert max(there, back) < 770 / 3, (there, back)
  for file in sorted((tmp_path / "source").glob("*.safetensors")):
    assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
