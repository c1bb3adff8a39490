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

# Peak dense bfloat16 FLOP/s of one JAX device, by a prefix of `device_kind`.
# The first matching prefix applies.
#
# TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. A TPU7x chip has
# 2307e12 and is two JAX devices.
# NVIDIA: the data sheets, without sparsity. H100 without PCIe or NVL is SXM,
# and B200 is HGX.
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

# A chip for inference, whose peak is not in the table. It would match "TPU v4".
_TPU_V4_LITE = "TPU v4 lite"


def peak_flops(device_kind: str) -> float | None:
  """Returns the peak bfloat16 FLOP/s of a device, or None if it is unknown.

  Args:
    device_kind: `jax.Device.device_kind`, such as "TPU v5 lite".
  """
  if device_kind == _TPU_V4_LITE:
    return None
  for prefix, flops in _PEAK_FLOPS.items():
    if device_kind.startswith(prefix):
      return flops
  return None


class StepFlops(NamedTuple):
  """FLOPs of the model's matrix products. A multiply-add is two FLOPs.

  Attributes:
    forward: FLOPs of the forward pass.
    training: FLOPs of the forward and the backward pass.
  """

  forward: int
  training: int


def step_flops(
  model: ModelConfig, length: int, tokens: int, frozen: Collection[str] = ()
) -> StepFlops:
  """Returns the nominal FLOPs of the forward pass and of a training step.

  Counted are the projections (with DIFF V2's λ̂), the SwiGLU, the vocabulary
  projection, and QKᵀ and AV of every map. In DIFF V1, values are twice as wide
  as keys. QKᵀ and AV count only pairs of a query and a key that it sees:
  T(T+1)/2 in a causal row without a window.

  Not counted are the embedding's lookup, norms, RoPE, softmax and
  rematerialisation. Packed documents count as one document.

  Args:
    model: The model's config.
    length: T, the tokens of a row.
    tokens: The number of tokens: B·T for a step, T for a row.
    frozen: Names of parameters that are not trained, from
      `optimizer.frozen_names`.
  """
  matrix_sizes = _multiply_adds_per_token(model)
  row_multiply_adds = length * sum(matrix_sizes.values())
  for stack in stacks(model).values():
    row_multiply_adds += _attention_size(stack) * _num_pairs(stack, length)
  # A multiply-add is two FLOPs.
  forward = 2 * row_multiply_adds * tokens // length
  # The backward pass takes two products for each product of the forward pass,
  # one for the gradient of each operand. A frozen matrix has no gradient, which
  # saves one product.
  frozen_size = sum(matrix_sizes.get(name, 0) for name in frozen)
  frozen_flops = 2 * tokens * frozen_size
  training = 3 * forward - frozen_flops
  return StepFlops(forward, training)


def _multiply_adds_per_token(model: ModelConfig) -> dict[str, int]:
  """Returns the multiply-adds per token of each matrix, by parameter name.

  The matrices of all layers with the same name are summed. QKᵀ and AV are not
  included, since they have no parameters.
  """
  # The embedding may also be the matrix of the vocabulary projection.
  output = "embedding" if model.tie_embeddings else "unembedding"
  matrix_sizes = {output: model.vocab_size * model.embed_dim}
  sizes = axis_sizes(model)
  for full_name, shape in parameter_shapes(model).items():
    # The parameters of plain layers are named "plain_layers/query" and so on.
    name = full_name.rpartition("/")[2]
    if not is_matrix(name):
      continue
    # A matrix that all heads share is multiplied once for each head.
    num_uses = math.prod(sizes[axis] for axis in PARAMETERS[name].shared)
    size = math.prod(shape) * num_uses
    matrix_sizes[name] = matrix_sizes.get(name, 0) + size
  return matrix_sizes


def _attention_size(stack: ModelConfig) -> int:
  """Returns the multiply-adds of a layer's attention per query and key.

  QKᵀ costs D (the width of keys) for each map, and AV costs V (the width of
  values) for each product with the values. A fused variant multiplies every map
  with the values. Other variants first combine the maps of a head into one.
  """
  sizes = axis_sizes(stack)
  # Q groups of G maps each.
  num_maps = sizes["Q"] * sizes["G"]
  if attention_class(stack).fused:
    num_products = num_maps
  else:
    num_heads = sizes["H"]
    num_products = num_heads
  return num_maps * sizes["D"] + num_products * sizes["V"]


def _num_pairs(stack: ModelConfig, length: int) -> int:
  """Returns the number of visible (query, key) pairs in a row.

  They are summed over the layers of a stack. A pair is visible if the causal
  mask and the layer's window allow it.
  """
  total = 0
  for layer_window in layer_windows(stack):
    window = length
    if layer_window is not None:
      window = min(layer_window, length)
    # The first queries see 1, 2, …, window keys, and the rest see `window`.
    num_other_queries = length - window
    causal_pairs = window * (window + 1) // 2 + num_other_queries * window
    if stack.causal:
      total += causal_pairs
    else:
      # Each pair of two tokens has the reverse pair too. Causal pairs include
      # the `length` pairs of a token with itself, which count once.
      total += 2 * causal_pairs - length
  return total


def parameter_count(model: ModelConfig) -> int:
  """Returns a model's number of parameters, without making them (paper.md §3).

  With tie_embeddings, there is one vocabulary matrix.
  """
  return sum(math.prod(shape) for shape in parameter_shapes(model).values())
