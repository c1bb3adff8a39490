"""Times whole training steps of both models, by the clock, on packed rows and on rows of one document.

The two are apart because packed rows make stock attention read a bias of B·T·S numbers: a ratio on packed rows flatters the fused kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.gpu import clock
from benchmarks.train_step import stepper
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.model.flops import peak_flops, step_flops

REPETITIONS = 10
KERNELS = 20  # the longest of a step, whose times are kept


def prepare(case: dict[str, Any]) -> Callable[[], dict[str, Any]]:
  """Makes a model of the case's widths, and takes its first step."""
  differential, T, rows = case["attention"] == "diff", case["T"], case["B"]
  heads = case["embed_dim"] // case["head_dim"] // (2 if differential else 1)
  sizes = {
    name: case[name]
    for name in ("vocab_size", "num_layers", "embed_dim", "head_dim", "ffn_dim")
  }
  model = ModelConfig(
    attention=case["attention"],
    num_heads=heads,
    num_kv_heads=heads,
    head_norm=differential,
    attention_implementation=case["name"],
    max_length=T,
    dtype="bfloat16",
    **sizes,
  )
  step = stepper(
    Config(
      model=model, data=DataConfig(length=T), train=TrainConfig(batch_size=rows)
    ),
    packed=case["packed"],
  )

  def run() -> dict[str, Any]:
    step()
    taken = []
    for _ in range(REPETITIONS):
      start = time.perf_counter()
      step()
      taken.append(time.perf_counter() - start)
    median, peak = (
      statistics.median(taken),
      peak_flops(jax.devices()[0].device_kind),
    )
    row: dict[str, Any] = {
      "seconds_a_step": round(median, 5),
      "fastest": round(min(taken), 5),
      "tokens_per_second": round(rows * T / median),
    }
    try:
      row["kernels_ms"] = dict(list(clock.kernels(step).items())[:KERNELS])
    except Exception as error:  # the step's time is there without them
      row["no_kernels"] = f"{type(error).__name__}: {error}"[:300]
    return (
      row
      if not peak
      else {
        **row,
        "mfu": round(
          step_flops(model, T, rows * T).training / median / peak, 4
        ),
      }
    )

  return run
