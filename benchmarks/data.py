"""Tokens per second from data to batches on the device, on one core.

    python -m benchmarks.data

The data are the embedded corpus: prepared rows, and text that is tokenized
while it is read, as bytes and by a BPE of 32,768 tokens that is trained on it.
Every token of a batch counts, including padding, which is less than 2%.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

from benchmarks import cpu_name

# Duration of each measurement.
MEASURED_SECONDS = 5.0
WARMUP_BATCHES = 20
# Batch size and length.
SHAPES = ((16, 256), (16, 2048))
VOCABULARY = 32768
PACKAGES = ("jax", "grain", "array_record", "tiktoken")


def tokens_per_second(
  mode: str, tokenizer: str, batch_size: int, length: int
) -> float:
  """Returns the speed of reading batches in this process, on one core.

  Pins the process to the core.

  Args:
    mode: "prepared" or "streamed".
    tokenizer: "bytes" or the path of a tokenizer.
    batch_size: Rows of a batch.
    length: Tokens of a row.
  """
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  # JAX is imported only now, so that its threads run on the same core.
  import jax

  from diffjax.config import Config, DataConfig, MeshConfig, TrainConfig
  from diffjax.data.pipeline import training_batches
  from diffjax.parallel.mesh import make_mesh, put_batch

  mesh = make_mesh(MeshConfig())
  config = Config(
    data=DataConfig(mode=mode, tokenizer=tokenizer, length=length),
    train=TrainConfig(batch_size=batch_size),
  )
  batches = training_batches(config)
  for _ in range(WARMUP_BATCHES):
    jax.block_until_ready(put_batch(next(batches), mesh))

  num_tokens = 0
  start = time.perf_counter()
  while time.perf_counter() - start < MEASURED_SECONDS:
    jax.block_until_ready(put_batch(next(batches), mesh))
    num_tokens += batch_size * length
  return num_tokens / (time.perf_counter() - start)


def measure_in_child(
  mode: str, tokenizer: str, batch_size: int, length: int
) -> float:
  """Calls `tokens_per_second` in another process.

  The call pins its process to one core.
  """
  child = subprocess.run(
    [
      sys.executable,
      "-m",
      "benchmarks.data",
      mode,
      tokenizer,
      str(batch_size),
      str(length),
    ],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )
  last_line = child.stdout.splitlines()[-1]
  return json.loads(last_line)


def train_bpe(directory: str) -> str:
  """Trains a BPE tokenizer on the embedded corpus, and returns its path."""
  from diffjax.config import DataConfig
  from diffjax.data import sources
  from diffjax.data.tokenizer_training import train_tokenizer

  source = sources.documents("stdlib", "train", DataConfig())

  def texts():
    for part in source.parts:
      for document in source.read(part):
        yield document.text

  return str(train_tokenizer(texts(), VOCABULARY, directory))


def print_rates() -> None:
  """Measures all combinations of data and shapes, and prints them."""
  from diffjax.config import DataConfig
  from diffjax.data import prepared

  versions = []
  for package in PACKAGES:
    versions.append(f"{package} {importlib.metadata.version(package)}")
  num_cores = len(os.sched_getaffinity(0))
  print(
    f"{cpu_name()}, one of {num_cores} cores,"
    f" Python {platform.python_version()}, {', '.join(versions)}"
  )
  with tempfile.TemporaryDirectory() as directory:
    bpe = train_bpe(directory)
    # The rows of the mode "prepared".
    for _, length in SHAPES:
      prepared.prepare(DataConfig(length=length))
    # The mode, the tokenizer, and the tokenizer's name in the output.
    combinations = (
      ("prepared", "bytes", "bytes"),
      ("streamed", "bytes", "bytes"),
      ("streamed", bpe, f"BPE of {VOCABULARY:,}"),
    )
    for mode, tokenizer, tokenizer_name in combinations:
      for batch_size, length in SHAPES:
        rate = measure_in_child(mode, tokenizer, batch_size, length)
        print(
          f"{mode}, {tokenizer_name}, {batch_size} × {length}:"
          f" {rate / 1e6:.2f} M tokens/s a core",
          flush=True,
        )


def main() -> None:
  """Prints all rates. With arguments, measures one of them in this process."""
  if len(sys.argv) == 1:
    print_rates()
    return
  # This is the process that measure_in_child has started.
  mode, tokenizer, batch_size, length = sys.argv[1:]
  rate = tokens_per_second(mode, tokenizer, int(batch_size), int(length))
  print(json.dumps(rate))


if __name__ == "__main__":
  main()
