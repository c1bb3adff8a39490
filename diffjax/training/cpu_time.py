"""The warning before a large model is trained without an accelerator."""

from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp

from diffjax.config import Config
from diffjax.training.flops import parameter_count, step_flops
from diffjax.training.optimizer import frozen_names

# A model with more parameters than this causes a warning on a CPU.
_LARGE_MODEL = 100_000_000
# The number of rows, and of columns, of the timed matrices.
_SIZE = 1024
# The number of timed products.
_NUM_TIMINGS = 2
_SECONDS_PER_DAY = 24 * 60 * 60


def warning(config: Config, platform: str) -> str | None:
  """Returns a line with the days that a large run takes on a CPU, else None.

  A training step of a large model consists of matrix products, so the estimate
  is its FLOPs over the speed of one product. Training is slower, so the days
  are a lower bound: on two busy cores, training reached 20 to 22 GFLOP/s and
  the product 42 to 65.

  Args:
    config: the run's config.
    platform: the platform of the training devices, such as "cpu".
  """
  parameters = parameter_count(config.model)
  if platform != "cpu" or parameters <= _LARGE_MODEL:
    return None
  rate = product_flops_per_second()
  days = run_flops(config) / rate / _SECONDS_PER_DAY
  return (
    f"this machine has no accelerator: training {parameters / 1e6:,.0f} M"
    f" parameters takes at least {one_figure(days)} days on its CPU"
    f" ({rate / 1e9:,.0f} GFLOP/s in matrix products);"
    " use a GPU or a TPU, or --config=configs/tiny.py"
  )


def run_flops(config: Config) -> int:
  """Returns the FLOPs of a run from its first step to its last."""
  tokens = config.train.batch_size * config.data.length
  frozen = frozen_names(config.optimizer)
  step = step_flops(config.model, config.data.length, tokens, frozen)
  return config.train.steps * step.training


def product_flops_per_second() -> float:
  """Returns the speed of a float32 matrix product, the best of two timings.

  The product uses all cores, as training does. The measurement takes about
  0.2 s, including compilation.
  """
  matrix = jnp.ones((_SIZE, _SIZE), jnp.float32)
  multiply = jax.jit(jnp.dot)
  jax.block_until_ready(multiply(matrix, matrix))
  best = math.inf
  for _ in range(_NUM_TIMINGS):
    start = time.perf_counter()
    jax.block_until_ready(multiply(matrix, matrix))
    best = min(best, time.perf_counter() - start)
  return 2 * _SIZE**3 / best


def one_figure(value: float) -> str:
  """Returns a number rounded down to one significant figure, as text.

  Example: 3456 → "3,000"
  """
  if value <= 0:
    return "0"
  scale = 10.0 ** math.floor(math.log10(value))
  # 1e-9 corrects quotients such as 0.04 / 0.01 = 3.9999999.
  rounded = math.floor(value / scale + 1e-9) * scale
  if rounded < 1:
    return f"{rounded:.1g}"
  return f"{rounded:,.0f}"
