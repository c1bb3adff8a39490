"""The number of a model's parameters and FLOPs, and the peak FLOP/s of devices."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from diffjax.config import ModelConfig
from diffjax.model.attention import attention_class
from diffjax.model.decoder import layer_windows
from diffjax.model.shapes import axis_sizes, parameter_shapes
from diffjax.model.stacks import stacks
from diffjax.parameters import PARAMETERS, is_matrix

# Peak dense bfloat16 FLOP/s of one JAX device, by the start of its `device_kind`; the first that fits counts.
# TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. A TPU7x chip (2307e12) is two JAX devices.
# NVIDIA: the data sheets (without sparsity) of A100, H100 (SXM; PCIe and NVL stand apart), H200 and HGX B200.
_PEAK_FLOPS = (
  ("TPU v4", 275e12),
  ("TPU v5 lite", 197e12),
  ("TPU v5e", 197e12),
  ("TPU v5", 459e12),
  ("TPU v6", 918e12),
  ("TPU7x", 1153.5e12),
  ("NVIDIA A100", 312e12),
  ("NVIDIA H100 PCIe", 756e12),
  ("NVIDIA H100 NVL", 835e12),
  ("NVIDIA H100", 989.4e12),
  ("NVIDIA H200", 989.4e12),
  ("NVIDIA B200", 2250e12),
)


def peak_flops(device_kind: str) -> float | None:
  """Peak bfloat16 FLOP/s of a device, or None if this file does not know it.

  Args:
    device_kind: `jax.Device.device_kind`, such as "TPU v5 lite" or "NVIDIA H200".
  """
  return next(
    (
      flops
      for start, flops in _PEAK_FLOPS
      if device_kind.startswith(start) and device_kind != "TPU v4 lite"
    ),
    None,
  )


class StepFlops(NamedTuple):
  """FLOPs (a multiply-add is two) of the model's matrix products."""

  forward: int
  training: int


def step_flops(
  model: ModelConfig, length: int, tokens: int, frozen: Collection[str] = ()
) -> StepFlops:
  """Nominal model FLOPs: every matrix product once forward, and twice its forward backward, once with a frozen matrix; nothing for
  rematerialisation.

  Counted: the projections (DIFF V2's λ̂ too), QKᵀ and AV of every map (AV is V = 2D wide in DIFF V1) over the pairs of a token and one that
  it sees, T(T+1)/2 of a causal row without a window; the SwiGLU and the vocabulary projection. Not counted: the embedding's lookup, norms,
  RoPE, softmax, and what packed documents save by not attending to each other.

  Args:
    model: The model's config.
    length: T, tokens a row.
    tokens: Tokens counted; B·T for a step, T for one row.
    frozen: Names of parameters that are not trained (`optimizer.frozen_names`).

  Returns:
    FLOPs of the forward pass over those tokens, and of a training step on them.
  """
  output = "embedding" if model.tie_embeddings else "unembedding"
  matrices = {
    output: model.vocab_size * model.embed_dim
  }  # multiply-adds of a token, by name
  upper = axis_sizes(model)
  for path, shape in parameter_shapes(model).items():
    name = path.rpartition("/")[2]
    if is_matrix(name):
      matrices[name] = matrices.get(name, 0) + math.prod(shape) * math.prod(
        upper[axis] for axis in PARAMETERS[name].shared
      )
  row = length * sum(matrices.values())
  for stack in stacks(model).values():
    row += _attention_size(stack) * _pairs(stack, length)
  forward = 2 * row * tokens // length
  return StepFlops(
    forward,
    3 * forward - 2 * tokens * sum(matrices.get(name, 0) for name in frozen),
  )


def _attention_size(stack: ModelConfig) -> int:
  """Returns the multiply-adds of a layer's attention per query and key.

  Every map costs D for its logit. A fused variant multiplies every map with the
  values. Other variants multiply the weights of a head with them.
  """
  sizes = axis_sizes(stack)
  num_maps = sizes["Q"] * sizes["G"]
  num_products = num_maps
  if not attention_class(stack).fused:
    num_products = sizes["H"]
  return num_maps * sizes["D"] + num_products * sizes["V"]


def parameter_count(model: ModelConfig) -> int:
  """Number of parameters, in closed form (paper.md §3 with one vocabulary matrix: tie_embeddings)."""
  return sum(map(math.prod, parameter_shapes(model).values()))


def _pairs(model: ModelConfig, length: int) -> int:
  """Pairs of a query and a key that it sees, in one row, summed over layers."""
  total = 0
  for layer_window in layer_windows(model):
    window = min(layer_window or length, length)
    before = (
      window * (window + 1) // 2 + (length - window) * window
    )  # with the token itself
    total += before if model.causal else 2 * before - length
  return total
