"""A model's parameters and FLOPs, and the peak FLOP/s of devices.

FLOPs are nominal: they follow from the config, not from the implementation.
"""

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

# Peak dense bfloat16 FLOP/s of one JAX device, by the start of its
# `device_kind`. The first start that matches counts.
#
# TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. A TPU7x chip has
# 2307e12 and is two JAX devices.
# NVIDIA: the data sheets, without sparsity. H100 without PCIe or NVL is SXM, and
# B200 is HGX.
_PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v6": 918e12,
  "TPU7x": 1153.5e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100 NVL": 835e12,
  "NVIDIA H100": 989.4e12,
  "NVIDIA H200": 989.4e12,
  "NVIDIA B200": 2250e12,
}

# A chip for inference, which starts like "TPU v4".
_UNKNOWN_KIND = "TPU v4 lite"


def peak_flops(device_kind: str) -> float | None:
  """Returns the peak bfloat16 FLOP/s of a device, or None if it is unknown.

  Args:
    device_kind: `jax.Device.device_kind`, such as "TPU v5 lite".
  """
  if device_kind == _UNKNOWN_KIND:
    return None
  for start, flops in _PEAK_FLOPS.items():
    if device_kind.startswith(start):
      return flops
  return None


class StepFlops(NamedTuple):
  """FLOPs of the model's matrix products. A multiply-add is two FLOPs."""

  forward: int
  training: int


def step_flops(
  model: ModelConfig, length: int, tokens: int, frozen: Collection[str] = ()
) -> StepFlops:
  """Returns the nominal FLOPs of a number of tokens.

  The backward pass takes two products for each product of the forward pass, one
  for the gradient of each operand. A frozen matrix has no gradient, so it takes
  one. Rematerialisation is not counted.

  Counted are the projections (with DIFF V2's λ̂), the SwiGLU, the vocabulary
  projection, and QKᵀ and AV of every map. In DIFF V1, V is 2D wide. QKᵀ and AV
  count pairs of a token and a token that it sees: T(T+1)/2 in a causal row
  without a window.

  Not counted are the embedding's lookup, norms, RoPE and softmax. Packed
  documents count as one document.

  Args:
    model: the model's config.
    length: T, the tokens of a row.
    tokens: the number of tokens: B·T for a step, T for a row.
    frozen: names of parameters that are not trained, from
      `optimizer.frozen_names`.

  Returns:
    FLOPs of the forward pass, and of a training step.
  """
  matrix_sizes = _multiply_adds_per_token(model)
  row = length * sum(matrix_sizes.values())
  for stack in stacks(model).values():
    row += _attention_size(stack) * _num_pairs(stack, length)
  forward = 2 * row * tokens // length
  frozen_size = sum(matrix_sizes.get(name, 0) for name in frozen)
  training = 3 * forward - 2 * tokens * frozen_size
  return StepFlops(forward, training)


def _multiply_adds_per_token(model: ModelConfig) -> dict[str, int]:
  """Returns the multiply-adds of each matrix per token, by its name.

  The matrices of all layers have one name. Attention's maps are not included.
  """
  # The vocabulary projection, which may use the embedding.
  output = "embedding" if model.tie_embeddings else "unembedding"
  matrix_sizes = {output: model.vocab_size * model.embed_dim}
  sizes = axis_sizes(model)
  for path, shape in parameter_shapes(model).items():
    # The parameters of plain layers are named "plain_layers/query" and so on.
    name = path.rpartition("/")[2]
    if not is_matrix(name):
      continue
    # A matrix that heads share is multiplied once for each of them.
    num_uses = math.prod(sizes[axis] for axis in PARAMETERS[name].shared)
    size = math.prod(shape) * num_uses
    matrix_sizes[name] = matrix_sizes.get(name, 0) + size
  return matrix_sizes


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


def _num_pairs(model: ModelConfig, length: int) -> int:
  """Returns the pairs of a query and a key that it sees in a row.

  The pairs of all layers are summed.
  """
  total = 0
  for layer_window in layer_windows(model):
    window = length
    if layer_window is not None:
      window = min(layer_window, length)
    # The first queries see 1, 2, …, window keys, and the rest see `window`.
    num_rest = length - window
    causal_pairs = window * (window + 1) // 2 + num_rest * window
    if model.causal:
      total += causal_pairs
    else:
      # Each pair in both orders. A query and its own key are one pair.
      total += 2 * causal_pairs - length
  return total


def parameter_count(model: ModelConfig) -> int:
  """Returns the number of parameters, in closed form (paper.md §3).

  With tie_embeddings, there is one vocabulary matrix.
  """
  return sum(math.prod(shape) for shape in parameter_shapes(model).values())
