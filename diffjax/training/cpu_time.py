"""The warning before a large model is trained without an accelerator."""

from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp

from diffjax.config import Config
from diffjax.model.flops import parameter_count, step_flops
from diffjax.training.optimizer import frozen_names

# The warning is for models with more parameters than this.
_MAX_PARAMETERS = 100_000_000
# The number of rows, and of columns, of the timed matrices.
_MATRIX_SIZE = 1024
# The number of timed products.
_NUM_TIMINGS = 2
_SECONDS_PER_DAY = 24 * 60 * 60


def warning(config: Config, platform: str) -> str | None:
  """Returns a warning if a large model would be trained on a CPU, else None.

  It says how many days the run takes at least: its FLOPs over the measured
  speed of a matrix product. Training is slower than one product. On two busy
  cores, training reached 20 to 22 GFLOP/s and the product 42 to 65.

  Args:
    config: the run's config.
    platform: the platform of the training devices, such as "cpu".
  """
  parameters = parameter_count(config.model)
  if platform != "cpu" or parameters <= _MAX_PARAMETERS:
    return None
  flops_per_second = product_flops_per_second()
  days = run_flops(config) / flops_per_second / _SECONDS_PER_DAY
  return (
    f"this machine has no accelerator: training {parameters / 1e6:,.0f} M"
    f" parameters takes at least {one_figure(days)} days on its CPU"
    f" ({flops_per_second / 1e9:,.0f} GFLOP/s in matrix products);"
    " use a GPU or a TPU, or --config=configs/tiny.py"
  )


def run_flops(config: Config) -> int:
  """Returns the FLOPs of a run from its first step to its last."""
  tokens = config.train.batch_size * config.data.length
  frozen = frozen_names(config.optimizer)
  step = step_flops(config.model, config.data.length, tokens, frozen)
  return config.train.steps * step.training


def product_flops_per_second() -> float:
  """Returns the speed of a float32 matrix product.

  It is the best of `_NUM_TIMINGS` timings. The product uses all cores, as
  training does. The measurement takes about 0.2 s, including compilation.
  """
  matrix = jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE), jnp.float32)
  multiply = jax.jit(jnp.dot)
  # The first call compiles.
  jax.block_until_ready(multiply(matrix, matrix))
  least_seconds = math.inf
  for _ in range(_NUM_TIMINGS):
    start = time.perf_counter()
    jax.block_until_ready(multiply(matrix, matrix))
    least_seconds = min(least_seconds, time.perf_counter() - start)
  flops = 2 * _MATRIX_SIZE**3
  return flops / least_seconds


def one_figure(value: float) -> str:
  """Returns a number rounded down to one significant figure, as text.

  Examples: 3456 → "3,000", 0.37 → "0.3"
  """
  if value <= 0:
    return "0"
  # The largest power of ten that is not above the value.
  scale = 10.0 ** math.floor(math.log10(value))
  # 1e-9 corrects quotients such as 0.04 / 0.01 = 3.9999999.
  rounded = math.floor(value / scale + 1e-9) * scale
  if rounded < 1:
    return f"{rounded:.1g}"
  return f"{rounded:,.0f}"
