"""Times training steps of DIFF and of the Transformer."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax

from benchmarks.gpu import inputs
from benchmarks.train_step import stepper
from diffjax.config import Config, DataConfig, ModelConfig, TrainConfig
from diffjax.model.flops import peak_flops, step_flops


@dataclasses.dataclass(frozen=True)
class StepCase:
  """A training step. The defaults are the widths of `diff_1b`.

  Attributes:
    attention: "diff" or "softmax". The Transformer has twice as many heads.
    name: the implementation of attention.
    packed: whether several documents are packed into a row. Stock attention
      then reads a mask with T·S elements per row, so a ratio on packed rows
      favours the fused kernels.
    B: the number of rows.
    T: the number of tokens of a row.
    vocab_size, num_layers, embed_dim, head_dim, ffn_dim: as in ModelConfig.
  """

  attention: str
  name: str
  packed: bool
  B: int = 4
  T: int = 4096
  vocab_size: int = 100_288
  num_layers: int = 4
  embed_dim: int = 2048
  head_dim: int = 128
  ffn_dim: int = 5440

  def __str__(self) -> str:
    rows = "packed rows" if self.packed else "one document per row"
    return f"step {self.attention} {self.name} B {self.B} T {self.T}, {rows}"


def step_cases() -> list[StepCase]:
  """Returns the steps that are timed."""
  cases = []
  for packed in (False, True):
    for attention in ("diff", "softmax"):
      for name in ("pallas_gpu", "two_call"):
        cases.append(StepCase(attention, name, packed))
  return cases


def tiny_cases() -> list[StepCase]:
  """Returns steps for a CPU.

  They use `chunked`, because flax cannot scan over layers with interpreted
  kernels.
  """
  cases = []
  for attention in ("diff", "softmax"):
    case = StepCase(
      attention,
      "chunked",
      packed=True,
      B=1,
      T=64,
      vocab_size=64,
      num_layers=1,
      embed_dim=128,
      head_dim=64,
      ffn_dim=64,
    )
    cases.append(case)
  return cases


def config(case: StepCase) -> Config:
  """Returns the config of a run with this step."""
  is_differential = case.attention == "diff"
  num_heads = case.embed_dim // case.head_dim
  if is_differential:
    num_heads //= 2
  model = ModelConfig(
    attention=case.attention,
    attention_implementation=case.name,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_norm=is_differential,
    max_length=case.T,
    dtype="bfloat16",
    vocab_size=case.vocab_size,
    num_layers=case.num_layers,
    embed_dim=case.embed_dim,
    head_dim=case.head_dim,
    ffn_dim=case.ffn_dim,
  )
  return Config(
    model=model,
    data=DataConfig(length=case.T),
    train=TrainConfig(batch_size=case.B),
  )


def time_step(case: StepCase, repetitions: int) -> dict[str, Any]:
  """Times a training step.

  Returns a row with the median time and the throughput. If the peak of the GPU
  is known, `mfu` is the model FLOP/s relative to it.

  Args:
    case: the model and the batch.
    repetitions: the number of steps that are timed.
  """
  run_config = config(case)
  step = stepper(run_config, packed=case.packed)
  # A warm-up.
  step()
  seconds = []
  for _ in range(repetitions):
    start = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - start)

  median = statistics.median(seconds)
  num_tokens = case.B * case.T
  row = {
    "case": {"do": "step", **inputs.to_json(case)},
    "seconds_a_step": round(median, 5),
    "tokens_per_second": round(num_tokens / median),
  }
  peak = peak_flops(jax.devices()[0].device_kind)
  if peak is not None:
    flops = step_flops(run_config.model, case.T, num_tokens).training
    row["mfu"] = round(flops / median / peak, 4)
  return row
