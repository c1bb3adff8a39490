"""The attention layers of Phi-4-mini-flash-reasoning: DIFF V1 with projection biases, without RoPE.

Every other layer has attention: with a window in the lower half of the model, then one layer without, and above it layers that read that
layer's keys and values (`keys_values` of the layer's call). The layers between them, Mamba-1 and gated memory, are not in diffjax, so that
this is no layout of `diffjax.convert`. Written from the public code of vLLM (vllm/model_executor/models/phi4flash.py).
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Mapping

import numpy as np

from diffjax.config import UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.model.attention import DiffAttention

_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
_FUSED = ("query", "key", "value")  # the order of Wqkv's rows

# Without effect on the attention, or read here.
_KNOWN = (
  "embd_pdrop",
  "layer_norm_eps",
  "layer_types",
  "lm_head_bias",
  "mamba_conv_bias",
  "mamba_d_conv",
  "mamba_d_state",
  "mamba_dt_rank",
  "mamba_expand",
  "mamba_proj_bias",
  "mb_per_layer",
  "mlp_bias",
  "resid_pdrop",
  "sliding_window",
)


def read_attention(
  path: str, layer: int
) -> tuple[DiffAttention, dict[str, np.ndarray]]:
  """The attention of one layer of a checkpoint, and its parameters. Its λ_init is `lambda_init_schedule(layer)`.

  Args:
    path: directory with config.json and safetensors files.
    layer: number of the layer among all of the model, from 0.

  Raises:
    UserError: if the layer has no attention, or the directory is damaged or of another model.
  """
  directory, file = pathlib.Path(path), pathlib.Path(path) / "config.json"
  config = hugging_face.read_config_json(
    directory, (hugging_face.PHI_FLASH,), _KNOWN
  )
  hugging_face.check_values(file, config, mb_per_layer=2)
  num_layers = (
    hugging_face.divide_field(file, config, "num_hidden_layers", 4) * 4
  )
  if layer not in range(1, num_layers, 2):
    raise UserError(
      f"layer {layer} has no attention: in {file}, layers 1, 3, …, {num_layers - 1} have"
    )
  num_kv_heads = hugging_face.divide_field(
    file, config, "num_key_value_heads", 2
  )
  num_heads = (
    hugging_face.divide_field(
      file, config, "num_attention_heads", 2 * num_kv_heads
    )
    * num_kv_heads
  )
  attention = DiffAttention(
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=hugging_face.divide_field(
      file, config, "hidden_size", 2 * num_heads
    ),
    window=hugging_face.divide_field(file, config, "sliding_window", 1)
    if layer < num_layers // 2
    else None,
    rope=False,
    projection_biases=True,
    norm_eps=1e-5,  # of the head norm; that of the others is layer_norm_eps
  )
  return attention, _params(
    SafetensorsDirectory(directory),
    layer,
    attention,
    reads_others=layer > num_layers // 2 + 1,
  )


def _params(
  tensors: SafetensorsDirectory,
  layer: int,
  attention: DiffAttention,
  *,
  reads_others: bool,
) -> dict[str, np.ndarray]:
  H, K, D = (
    attention.num_heads,
    attention.num_kv_heads or attention.num_heads,
    attention.head_dim,
  )
  E = 2 * H * D
  heads = dict(zip(_FUSED, ((H, 2, D), (K, 2, D), (K, 2 * D)), strict=True))
  if reads_others:
    heads = {"query": heads["query"]}
  found = tensors.shapes()

  def read(name: str, *shape: int) -> np.ndarray:
    name = _name(layer, name)
    if found.get(name) != shape:
      has = (
        f"has {name} of shape {list(found[name])}"
        if name in found
        else f"has no tensor {name}"
      )
      raise UserError(
        f"{tensors} {has}; for its config.json it must be {list(shape)}"
      )
    return tensors.read(name)

  ends = [*itertools.accumulate(math.prod(shape) for shape in heads.values())]
  weights, biases = (
    np.split(array, ends[:-1])
    for array in (read("Wqkv.weight", ends[-1], E), read("Wqkv.bias", ends[-1]))
  )
  params: dict[str, np.ndarray] = {}
  for (name, shape), weight, bias in zip(
    heads.items(), weights, biases, strict=True
  ):
    params |= {
      name: weight.T.reshape(E, *shape),
      f"{name}_bias": bias.reshape(shape),
    }
  params |= {
    "out": read("out_proj.weight", E, E).T.reshape(H, 2 * D, E),
    "out_bias": read("out_proj.bias", E),
  }
  params |= {name: read(f"inner_cross_attn.{name}", D) for name in _LAMBDAS}
  return params | {"head_gain": read("inner_cross_attn.subln.weight", 2 * D)}


def tensors_of(
  params: Mapping[str, np.ndarray], layer: int
) -> dict[str, np.ndarray]:
  """The tensors of a checkpoint that `read_attention` makes these parameters of, bit for bit, in float32."""
  parts = [name for name in _FUSED if name in params]
  E = params["out"].shape[-1]
  tensors = {
    "Wqkv.weight": np.concatenate(
      [np.reshape(params[name], (E, -1)) for name in parts], axis=1
    ).T,
    "Wqkv.bias": np.concatenate(
      [np.ravel(params[f"{name}_bias"]) for name in parts]
    ),
    "out_proj.weight": np.reshape(params["out"], (-1, E)).T,
    "out_proj.bias": params["out_bias"],
    **{f"inner_cross_attn.{name}": params[name] for name in _LAMBDAS},
    "inner_cross_attn.subln.weight": params["head_gain"],
  }
  return {
    _name(layer, name): np.ascontiguousarray(tensor)
    for name, tensor in tensors.items()
  }


def _name(layer: int, name: str) -> str:
  return f"model.layers.{layer}.attn.{name}"
