"""Greedy generation with the cache against the whole forward pass for every token, and against DiffLlama's: python -m benchmarks.generate

Needs the extra `hf`. The model is that of benchmarks.diffllama, in float32. All three continue one prompt of 16 tokens by 512, in turn, in
one process; what is printed are medians. The forward pass without a cache always has the final length, as one compiled program must.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from benchmarks import cpu_name
from benchmarks.diffllama import MODEL, diffllama
from diffjax.inference.sampler import Sampler
from diffjax.model.decoder import Decoder, logits

PROMPT, NEW = 16, 512


def generators(prompt: list[int]):
  """Functions of no arguments that add NEW tokens to the prompt."""
  model = Decoder(MODEL)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))[
    "params"
  ]
  sampler = Sampler(model, params, capacity=PROMPT + NEW)

  @jax.jit
  def again(params, window, filled):
    hidden = model.apply({"params": params}, window)
    return window.at[0, filled].set(
      jnp.argmax(logits(params, hidden[:, filled - 1, None])[0, 0]).astype(
        jnp.int32
      )
    )

  def without_cache() -> list[int]:
    window = (
      jnp.zeros((1, PROMPT + NEW), jnp.int32)
      .at[0, :PROMPT]
      .set(jnp.asarray(prompt))
    )
    for filled in range(PROMPT, PROMPT + NEW):
      window = again(params, window, filled)
    return np.asarray(window)[0, PROMPT:].tolist()

  torch_model, ids = diffllama(PROMPT + NEW).eval(), torch.tensor([prompt])
  options = dict(
    max_new_tokens=NEW,
    min_new_tokens=NEW,
    do_sample=False,
    use_cache=True,
    pad_token_id=0,
  )

  def theirs() -> list[int]:
    with torch.inference_mode():
      return torch_model.generate(
        ids, attention_mask=torch.ones_like(ids), **options
      )[0, PROMPT:].tolist()

  return {
    "with the cache": lambda: sampler.generate([prompt], NEW)[0],
    "without": without_cache,
    "DiffLlama with its cache": theirs,
  }


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--repeats", type=int, default=5)
  flags = parser.parse_args()
  print(
    f"JAX {jax.__version__}, PyTorch {torch.__version__}, transformers {transformers.__version__}; {cpu_name()}, "
    f"{len(os.sched_getaffinity(0))} CPUs, PyTorch uses {torch.get_num_threads()} threads"
  )
  runs = generators(
    np.random.default_rng(0).integers(0, MODEL.vocab_size, PROMPT).tolist()
  )
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for repeat in range(flags.repeats + 1):
    for name, run in runs.items():
      start = time.perf_counter()
      assert len(run()) == NEW
      if repeat:  # the first one compiles and warms up
        seconds[name].append(time.perf_counter() - start)
  median = {name: statistics.median(times) for name, times in seconds.items()}
  for name, value in median.items():
    print(
      f"{name}: {NEW / value:,.0f} tokens/s, {value / median['with the cache']:.2f}× the time with the cache"
    )


if __name__ == "__main__":
  main()
