"""Training steps of diffjax relative to Hugging Face's DiffLlama in PyTorch.

    python -m benchmarks.diffllama

Needs the extra `hf`. Both models have the same size, and train on the same
tokens in float32. A step is the forward pass, the loss, the backward pass and
AdamW. DiffLlama runs with sdpa attention and the fused AdamW, without clipping.
diffjax takes its normal training step, which also clips, masks packed documents
and computes metrics.

Each model has a process of its own, which keeps freed memory. The two take
turns, so that other programs slow both alike. The ratio is the median over
pairs of steps, with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import jax
import numpy as np
import torch
import transformers
from jaxtyping import Int

from benchmarks import machine
from diffjax.config import (
  Config,
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.host.runtime import keep_freed_memory
from diffjax.model.flops import parameter_count
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.program import build

MODEL = ModelConfig(
  vocab_size=256,
  num_layers=6,
  embed_dim=256,
  num_heads=4,
  num_kv_heads=4,
  head_dim=32,
  ffn_dim=688,
)
OPTIMIZER = OptimizerConfig(warmup_steps=0)
# Batch size and length.
SHAPES = ((16, 256), (4, 1024))
WARMUP_PAIRS = 2


class PairSeconds(NamedTuple):
  """Seconds of two steps, one after the other."""

  diffjax: float
  diffllama: float


def make_diffjax_step(
  tokens: Int[np.ndarray, "batch length"],
) -> Callable[[], float]:
  """Returns a function that takes a training step of diffjax.

  It returns the loss. Its reading from the device ends the step.

  Args:
    tokens: The batch of every step.
  """
  batch_size, length = tokens.shape
  config = Config(
    model=MODEL,
    data=DataConfig(length=length),
    optimizer=OPTIMIZER,
    train=TrainConfig(batch_size=batch_size),
  )
  mesh = make_mesh(config.mesh)
  program = build(config, mesh)
  positions = np.arange(length, dtype=np.int32)
  batch = {
    "tokens": tokens,
    "targets": np.roll(tokens, -1, axis=1),
    "segment_ids": np.ones(tokens.shape, np.int32),
    "positions": np.broadcast_to(positions, tokens.shape),
    "weights": np.ones(tokens.shape, np.float32),
  }
  state = program.init()

  def run() -> float:
    nonlocal state
    state, metrics = program.train_step(state, put_batch(batch, mesh))
    return float(metrics["loss"])

  return run


def make_diffllama(length: int) -> transformers.DiffLlamaForCausalLM:
  """Returns Hugging Face's DiffLlama at the size of MODEL.

  Args:
    length: The longest row.
  """
  config = transformers.DiffLlamaConfig(
    vocab_size=MODEL.vocab_size,
    hidden_size=MODEL.embed_dim,
    intermediate_size=MODEL.ffn_dim,
    num_hidden_layers=MODEL.num_layers,
    # DiffLlama counts the two maps of a head as two heads.
    num_attention_heads=2 * MODEL.num_heads,
    num_key_value_heads=2 * MODEL.num_kv_heads,
    head_dim=MODEL.head_dim,
    tie_word_embeddings=True,
    max_position_embeddings=length,
    attn_implementation="sdpa",
  )
  model = transformers.DiffLlamaForCausalLM(config)
  assert model.config._attn_implementation == "sdpa"

  # DiffLlama's head norm has no gain.
  without_gain = dataclasses.replace(MODEL, head_norm=False)
  expected = parameter_count(without_gain)
  actual = sum(parameter.numel() for parameter in model.parameters())
  assert actual == expected, f"{actual} parameters, expected {expected}"
  return model


def make_diffllama_step(
  tokens: Int[np.ndarray, "batch length"],
) -> Callable[[], float]:
  """Returns a function that takes a training step of DiffLlama.

  It returns the loss.

  Args:
    tokens: The batch of every step.
  """
  model = make_diffllama(tokens.shape[1]).train()
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=OPTIMIZER.learning_rate,
    betas=(OPTIMIZER.b1, OPTIMIZER.b2),
    weight_decay=OPTIMIZER.weight_decay,
    fused=True,
  )
  ids = torch.from_numpy(tokens.astype(np.int64))

  def run() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())

  return run


class StepProcess:
  """Another process that takes a training step whenever it is asked to."""

  def __init__(self, make_step: Callable, shape: tuple[int, int]):
    """Starts the process.

    Args:
      make_step: `make_diffjax_step` or `make_diffllama_step`.
      shape: Batch size and length.
    """
    spawn = multiprocessing.get_context("spawn")
    self._connection, child_connection = spawn.Pipe()
    process = spawn.Process(
      target=_serve_steps,
      args=(make_step, shape, child_connection),
      daemon=True,
    )
    process.start()
    # If the child dies, `recv` then raises EOFError instead of waiting.
    child_connection.close()

  def seconds_of_step(self) -> float:
    """Lets the process take a step; returns the seconds that it took."""
    self._connection.send(None)
    return self._connection.recv()


def _serve_steps(
  make_step: Callable, shape: tuple[int, int], connection: Connection
) -> None:
  """Takes a step for each message, and answers with its seconds.

  Args:
    make_step: As for `StepProcess`.
    shape: Batch size and length.
    connection: The end of the pipe in this process.
  """
  keep_freed_memory()
  rng = np.random.default_rng(0)
  run = make_step(rng.integers(0, MODEL.vocab_size, shape, np.int32))
  # The parent closes the connection when it ends.
  with contextlib.suppress(EOFError):
    while True:
      connection.recv()
      start = time.perf_counter()
      run()
      connection.send(time.perf_counter() - start)


def measure(seconds: float, shape: tuple[int, int]) -> list[PairSeconds]:
  """Times steps of diffjax and of DiffLlama in turn, after a warm-up.

  Args:
    seconds: How long to measure.
    shape: Batch size and length.
  """
  diffjax_process = StepProcess(make_diffjax_step, shape)
  diffllama_process = StepProcess(make_diffllama_step, shape)

  def measure_pair() -> PairSeconds:
    return PairSeconds(
      diffjax=diffjax_process.seconds_of_step(),
      diffllama=diffllama_process.seconds_of_step(),
    )

  for _ in range(WARMUP_PAIRS):
    measure_pair()
  pairs = []
  start = time.perf_counter()
  while time.perf_counter() - start < seconds:
    pairs.append(measure_pair())
  return pairs


def print_result(shape: tuple[int, int], pairs: list[PairSeconds]) -> None:
  """Prints the median speeds, and the ratio of diffjax's to DiffLlama's.

  Args:
    shape: Batch size and length.
    pairs: The seconds of pairs of steps.
  """
  batch_size, length = shape
  num_tokens = batch_size * length
  diffjax_seconds = statistics.median(pair.diffjax for pair in pairs)
  diffllama_seconds = statistics.median(pair.diffllama for pair in pairs)
  ratios = [pair.diffllama / pair.diffjax for pair in pairs]
  # The quartiles. The second one is the median.
  low, ratio, high = statistics.quantiles(ratios, n=4)
  print(
    f"{batch_size} × {length}, {len(pairs)} pairs of steps:"
    f" diffjax {num_tokens / diffjax_seconds:,.0f} tokens/s,"
    f" DiffLlama {num_tokens / diffllama_seconds:,.0f} tokens/s,"
    f" ratio {ratio:.2f} (quartiles {low:.2f} and {high:.2f})",
    flush=True,
  )


def main() -> None:
  """Measures each shape, and prints the speeds and their ratio."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--seconds", type=float, default=45, help="how long each shape is measured"
  )
  flags = parser.parse_args()
  print(
    f"{machine()}, {torch.get_num_threads()} of them for PyTorch;"
    f" Python {platform.python_version()}, JAX {jax.__version__},"
    f" PyTorch {torch.__version__}, transformers {transformers.__version__}",
    flush=True,
  )
  for shape in SHAPES:
    print_result(shape, measure(flags.seconds, shape))


if __name__ == "__main__":
  main()
