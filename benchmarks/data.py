"""Tokens a second from data to batches on the device, by a process that is pinned to one core.

    python -m benchmarks.data

The embedded corpus: prepared rows, and text tokenised on the way, as bytes and by a BPE of 32,768 tokens trained on it. Every token of a
batch counts, padding (under 2%) too.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

from benchmarks import cpu_name

_SECONDS = 5.0  # of each measurement
_SHAPES = ((16, 256), (16, 2048))
_VOCABULARY = 32768


def measure(mode: str, tokenizer: str, batch_size: int, length: int) -> float:
  """Tokens a second of one combination, in this process, on one core."""
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  import jax  # only now, so that its threads share the core too

  from diffjax.config import Config, DataConfig, MeshConfig, TrainConfig
  from diffjax.data.pipeline import training_batches
  from diffjax.parallel.mesh import make_mesh, put_batch

  mesh = make_mesh(MeshConfig())
  data = DataConfig(mode=mode, tokenizer=tokenizer, length=length)
  batches = training_batches(
    Config(data=data, train=TrainConfig(batch_size=batch_size))
  )
  for _ in range(20):
    jax.block_until_ready(put_batch(next(batches), mesh))
  tokens, start = 0, time.perf_counter()
  while time.perf_counter() - start < _SECONDS:
    jax.block_until_ready(put_batch(next(batches), mesh))
    tokens += batch_size * length
  return tokens / (time.perf_counter() - start)


def main() -> None:
  if len(sys.argv) > 1:  # a child
    mode, tokenizer, *shape = sys.argv[1:]
    print(json.dumps(measure(mode, tokenizer, *map(int, shape))))
    return
  from diffjax.config import DataConfig
  from diffjax.data import prepared, sources
  from diffjax.data.tokenizer_training import train_tokenizer

  versions = ", ".join(
    f"{name} {importlib.metadata.version(name)}"
    for name in ("jax", "grain", "array_record", "tiktoken")
  )
  cores = len(os.sched_getaffinity(0))
  print(
    f"{cpu_name()}, one of {cores} cores, Python {platform.python_version()}, {versions}"
  )
  with tempfile.TemporaryDirectory() as directory:
    source = sources.documents("stdlib", "train", DataConfig())
    texts = (
      document.text for part in source.parts for document in source.read(part)
    )
    bpe = str(train_tokenizer(texts, _VOCABULARY, directory))
    for _, length in _SHAPES:
      prepared.prepare(DataConfig(length=length))
    for (mode, tokenizer), shape in itertools.product(
      (("prepared", "bytes"), ("streamed", "bytes"), ("streamed", bpe)), _SHAPES
    ):
      command = [
        sys.executable,
        "-m",
        "benchmarks.data",
        mode,
        tokenizer,
        *map(str, shape),
      ]
      output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
      ).stdout
      name = "bytes" if tokenizer == "bytes" else f"BPE of {_VOCABULARY:,}"
      print(
        f"{mode}, {name}, {shape[0]} × {shape[1]}: {json.loads(output.splitlines()[-1]) / 1e6:.2f} M tokens/s a core",
        flush=True,
      )


if __name__ == "__main__":
  main()
