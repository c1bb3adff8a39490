"""Training steps of diffjax against Hugging Face's DiffLlama (PyTorch), same size: python -m benchmarks.diffllama

Needs the extra `hf`. Both take the same tokens, in float32, and do all of a step: forward pass, loss, backward pass, AdamW. DiffLlama
runs with sdpa attention and the fused AdamW, without clipping; diffjax takes the step that training takes, which also clips, masks packed
documents and measures. Each has a process of its own, as in use; for both the C library keeps freed memory, which helps both. They take
one step each in turn, so that a busy machine slows both alike: the ratio is the median of the pairs', with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import platform
import statistics
import time

import jax
import numpy as np
import torch
import transformers

from benchmarks import cpu_name
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
SHAPES = ((16, 256), (4, 1024))


def diffjax_step(tokens: np.ndarray):
  """A function of no arguments that takes one step and waits for its loss."""
  batch_size, length = tokens.shape
  config = Config(
    model=MODEL,
    data=DataConfig(length=length),
    optimizer=OPTIMIZER,
    train=TrainConfig(batch_size=batch_size),
  )
  mesh = make_mesh(config.mesh)
  program = build(config, mesh)
  state = program.init()
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
  ones = np.ones(tokens.shape, np.int32)
  batch = dict(
    tokens=tokens,
    targets=np.roll(tokens, -1, axis=1),
    segment_ids=ones,
    positions=positions,
    weights=ones.astype(np.float32),
  )

  def run() -> float:
    nonlocal state
    state, metrics = program.train_step(state, put_batch(batch, mesh))
    return float(metrics["loss"])

  return run


def diffllama(length: int) -> transformers.DiffLlamaForCausalLM:
  """DiffLlama of the same size, for rows of at most so many tokens. It counts a head's two maps as two heads."""
  config = transformers.DiffLlamaConfig(
    vocab_size=MODEL.vocab_size,
    hidden_size=MODEL.embed_dim,
    intermediate_size=MODEL.ffn_dim,
    num_hidden_layers=MODEL.num_layers,
    num_attention_heads=2 * MODEL.num_heads,
    num_key_value_heads=2 * MODEL.num_kv_heads,
    head_dim=MODEL.head_dim,
    tie_word_embeddings=True,
    max_position_embeddings=length,
    attn_implementation="sdpa",
  )
  model = transformers.DiffLlamaForCausalLM(config)
  assert model.config._attn_implementation == "sdpa"
  expected, found = (
    parameter_count(dataclasses.replace(MODEL, head_norm=False)),
    sum(p.numel() for p in model.parameters()),
  )
  assert found == expected, (
    f"DiffLlama has {found} parameters, expected {expected}"
  )  # its head norm has no gain
  return model


def diffllama_step(tokens: np.ndarray):
  """The counterpart of `diffjax_step` for DiffLlama."""
  model = diffllama(tokens.shape[1]).train()
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


STEPS = {"diffjax": diffjax_step, "DiffLlama": diffllama_step}


def steps_in_turn(
  seconds: float, shape: tuple[int, int]
) -> list[tuple[float, float]]:
  """Seconds of a step of diffjax and of the step of DiffLlama after it, for so long; two pairs warm up first."""
  spawn = multiprocessing.get_context("spawn")
  pipes = []
  for name in STEPS:
    ours, theirs = spawn.Pipe()
    spawn.Process(
      target=_step_when_asked, args=(name, shape, theirs), daemon=True
    ).start()
    theirs.close()  # so that a child that dies is an EOFError here
    pipes.append(ours)

  def pair() -> tuple[float, ...]:
    times = []
    for pipe in pipes:
      pipe.send(None)
      times.append(pipe.recv())
    return tuple(times)

  for _ in range(2):
    pair()
  start, pairs = time.perf_counter(), []
  while time.perf_counter() - start < seconds:
    pairs.append(pair())
  return pairs


def _step_when_asked(name: str, shape: tuple[int, int], pipe) -> None:
  """A child's work: a step, and its seconds, for whatever comes through the pipe."""
  keep_freed_memory()
  run = STEPS[name](
    np.random.default_rng(0).integers(0, MODEL.vocab_size, shape, np.int32)
  )
  with contextlib.suppress(EOFError):  # the parent has what it wants
    while True:
      pipe.recv()
      start = time.perf_counter()
      run()
      pipe.send(time.perf_counter() - start)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--seconds", type=float, default=45, help="how long each shape is measured"
  )
  flags = parser.parse_args()
  print(
    f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs, PyTorch uses {torch.get_num_threads()}; Python {platform.python_version()}, "
    f"JAX {jax.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}",
    flush=True,
  )
  for shape in SHAPES:
    pairs = steps_in_turn(flags.seconds, shape)
    ours, theirs = (
      shape[0] * shape[1] / statistics.median(times)
      for times in zip(*pairs, strict=True)
    )
    low, ratio, high = statistics.quantiles(
      (theirs / ours for ours, theirs in pairs), n=4
    )
    print(
      f"{shape[0]} × {shape[1]}, {len(pairs)} pairs of steps: diffjax {ours:,.0f} tokens/s, DiffLlama {theirs:,.0f} tokens/s, "
      f"ratio {ratio:.2f} (quartiles {low:.2f} and {high:.2f})",
      flush=True,
    )


if __name__ == "__main__":
  main()
