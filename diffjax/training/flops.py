"""What a model costs: parameters and FLOPs, and what chips can do."""

from __future__ import annotations

from typing import NamedTuple

from diffjax.config import ModelConfig

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
  return next((flops for start, flops in _PEAK_FLOPS if device_kind.startswith(start) and device_kind != "TPU v4 lite"), None)


class StepFlops(NamedTuple):
  """FLOPs (a multiply-add is two) of the model's matrix products."""

  forward: int
  training: int


def step_flops(model: ModelConfig, length: int, tokens: int) -> StepFlops:
  """Nominal model FLOPs: every matrix product once forward, and twice its forward backward; nothing for rematerialisation.

  Counted: the projections (DIFF V2's λ̂ too), QKᵀ and AV of every map (AV is V = 2D wide in DIFF V1) over the T(T+1)/2 pairs of a
  causal row, the SwiGLU and the vocabulary projection. Not counted: the embedding's lookup, norms, RoPE, softmax, and what packed
  documents save by not attending to each other.

  Args:
    model: The model's config.
    length: T, tokens a row.
    tokens: Tokens counted; B·T for a step, T for one row.

  Returns:
    FLOPs of the forward pass over those tokens, and of a training step on them.
  """
  maps, _, width = _maps(model)
  sizes = _layer_sizes(model)
  matrices = sum(size for name, size in sizes.items() if name in ("query", "key", "value", "out", "ffn", "lambda_hat"))
  pair = model.num_heads * maps * (model.head_dim + width)
  row = length * (model.num_layers * matrices + model.vocab_size * model.embed_dim) + model.num_layers * pair * length * (length + 1) // 2
  forward = 2 * row * tokens // length
  return StepFlops(forward, 3 * forward)


def parameter_count(model: ModelConfig) -> int:
  """Number of parameters, in closed form (paper.md §3 with one vocabulary matrix: tie_embeddings)."""
  vocabulary = model.vocab_size * model.embed_dim * (1 if model.tie_embeddings else 2)
  return vocabulary + model.embed_dim + model.num_layers * sum(_layer_sizes(model).values())


def _maps(model: ModelConfig) -> tuple[int, int, int]:
  """G, M and V."""
  v2 = (2, 1, model.head_dim)
  return {"softmax": (1, 1, model.head_dim), "diff": (2, 2, 2 * model.head_dim), "diff_v2": v2, "diff_v2_linear": v2}[model.attention]


def _layer_sizes(model: ModelConfig) -> dict[str, int]:
  maps, key_maps, width = _maps(model)
  E, D, H, K = model.embed_dim, model.head_dim, model.num_heads, model.num_kv_heads
  return {
    "query": E * H * maps * D,
    "key": E * K * key_maps * D,
    "value": E * K * width,
    "out": H * width * E,
    "ffn": 3 * E * model.ffn_dim,
    "norms": 2 * E,
    "lambda": 4 * D if model.attention == "diff" else 0,
    "lambda_hat": E * H if model.attention in ("diff_v2", "diff_v2_linear") else 0,
    "head_gain": width if model.head_norm else 0,
  }
