"""Training steps of diffjax against Hugging Face's DiffLlama (PyTorch), same size, one process: python -m benchmarks.diffllama

Needs the extra `hf`. Both take the same tokens, in float32, and do all of a step: forward pass, loss, backward pass, AdamW. DiffLlama
runs with sdpa attention and the fused AdamW, without clipping; diffjax takes the step that training takes, which also clips, masks packed
documents and measures. Blocks of steps are taken in turn, so that a busy machine slows both alike; what is printed are medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time

import jax
import numpy as np
import torch
import transformers

from benchmarks import cpu_name
from diffjax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from diffjax.parallel.mesh import make_mesh, put_batch
from diffjax.training.flops import parameter_count
from diffjax.training.runtime import keep_freed_pages
from diffjax.training.step import make_init, make_train_step

MODEL = ModelConfig(vocab_size=256, num_layers=6, embed_dim=256, num_heads=4, num_kv_heads=4, head_dim=32, ffn_dim=688)
OPTIMIZER = OptimizerConfig(warmup_steps=0)
SHAPES = ((16, 256), (4, 1024))


def diffjax_step(tokens: np.ndarray):
  """A function of no arguments that takes one step and waits for its loss."""
  batch_size, length = tokens.shape
  config = Config(model=MODEL, data=DataConfig(length=length), optimizer=OPTIMIZER, train=TrainConfig(batch_size=batch_size))
  mesh = make_mesh(config.mesh)
  make_state, abstract = make_init(config, mesh)
  state, step = make_state(), make_train_step(config, mesh, abstract)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
  ones = np.ones(tokens.shape, np.int32)
  batch = dict(tokens=tokens, targets=np.roll(tokens, -1, axis=1), segment_ids=ones, positions=positions, weights=ones.astype(np.float32))

  def run() -> float:
    nonlocal state
    state, metrics = step(state, put_batch(batch, mesh))
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
  expected, found = parameter_count(dataclasses.replace(MODEL, head_norm=False)), sum(p.numel() for p in model.parameters())
  assert found == expected, f"DiffLlama has {found} parameters, expected {expected}"  # its head norm has no gain
  return model


def diffllama_step(tokens: np.ndarray):
  """What `diffjax_step` is, for DiffLlama."""
  model = diffllama(tokens.shape[1]).train()
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=OPTIMIZER.learning_rate, betas=(OPTIMIZER.b1, OPTIMIZER.b2), weight_decay=OPTIMIZER.weight_decay, fused=True
  )
  ids = torch.from_numpy(tokens.astype(np.int64))

  def run() -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())

  return run


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--blocks", type=int, default=8, help="blocks of steps of each")
  parser.add_argument("--steps", type=int, default=5, help="steps of a block")
  flags = parser.parse_args()
  keep_freed_pages()
  print(
    f"JAX {jax.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}; {cpu_name()}, "
    f"{len(os.sched_getaffinity(0))} CPUs, PyTorch uses {torch.get_num_threads()} threads"
  )
  for shape in SHAPES:
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, shape, np.int32)
    runs = {"diffjax": diffjax_step(tokens), "DiffLlama": diffllama_step(tokens)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(flags.blocks + 1):
      for name, run in runs.items():
        for _ in range(flags.steps):
          start = time.perf_counter()
          run()
          if block:  # the first one compiles and warms up
            seconds[name].append(time.perf_counter() - start)
    speed = {name: tokens.size / statistics.median(times) for name, times in seconds.items()}
    print(
      f"{shape[0]} × {shape[1]}: diffjax {speed['diffjax']:,.0f} tokens/s, DiffLlama {speed['DiffLlama']:,.0f} tokens/s, "
      f"ratio {speed['diffjax'] / speed['DiffLlama']:.2f}"
    )


if __name__ == "__main__":
  main()
