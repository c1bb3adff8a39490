"""The attention layers of Phi-4-mini-flash-reasoning: DIFF V1 without RoPE.

Sources: `FlashDiffAttention` in lit_gpt/diff_attn.py of microsoft/ArchScale for
the computation, and `Phi4FlashForCausalLM` in
vllm/model_executor/models/phi4flash.py of vLLM for the checkpoint.

Layout: a directory with config.json and safetensors files. Layers are counted
from 0. Of the model's L layers, the odd ones have attention:

  1, 3, …, L/2 − 1    a window of sliding_window keys
  L/2 + 1             no window
  L/2 + 3, …, L − 1   no keys and values of its own; reads layer L/2 + 1's

The tensors of a layer, with {} for its number, and the axes of
diffjax/parameters.py. E is 2HD:

  model.layers.{}.attn.Wqkv.weight                        [R, E]
  model.layers.{}.attn.Wqkv.bias                          [R]
  model.layers.{}.attn.out_proj.weight                    [E, 2HD]
  model.layers.{}.attn.out_proj.bias                      [E]
  model.layers.{}.attn.inner_cross_attn.lambda_{q1,k1,q2,k2}  [D]
  model.layers.{}.attn.inner_cross_attn.subln.weight      [2D]    head norm

- The R rows of Wqkv are 2HD rows for queries, 2KD for keys and 2KD for values.
  Above layer L/2 + 1, they are the 2HD rows for queries only.
- Query heads 2i and 2i + 1 are the signal and the noise of head i. Key heads 2i
  and 2i + 1 belong to key/value head i, and value heads 2i and 2i + 1 are the
  halves of its values.
- In config.json, num_attention_heads is 2H and num_key_value_heads is 2K.
- λ_init is `lambda_init_schedule(layer)`, where layers without attention count
  too.

Rotary rows: the layers have no RoPE, so no row is moved.

Not supported:
- whole models, because diffjax has neither Mamba-1 nor gated memory, the layers
  with even numbers. So this is no layout of `diffjax.convert`.
- mb_per_layer ≠ 2, which is another order of layers.
- layer_types is not read: the number of a layer determines its window.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import einops
import numpy as np

from diffjax.config import UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.interop.layout import Entry
from diffjax.model.attention import DiffAttention

_QKV_WEIGHT = "model.layers.{}.attn.Wqkv.weight"
_QKV_BIAS = "model.layers.{}.attn.Wqkv.bias"

# The parameters that are the rows of Wqkv, in this order, and their axes after
# E. The axes of rows and biases are the same.
_QKV_AXES = {"query": "Q G D", "key": "K M D", "value": "K V"}

_ENTRIES = (
  Entry("out", "model.layers.{}.attn.out_proj.weight", "H V E = E (H V)"),
  Entry("out_bias", "model.layers.{}.attn.out_proj.bias", "E = E"),
  Entry(
    "lambda_q1", "model.layers.{}.attn.inner_cross_attn.lambda_q1", "D = D"
  ),
  Entry(
    "lambda_k1", "model.layers.{}.attn.inner_cross_attn.lambda_k1", "D = D"
  ),
  Entry(
    "lambda_q2", "model.layers.{}.attn.inner_cross_attn.lambda_q2", "D = D"
  ),
  Entry(
    "lambda_k2", "model.layers.{}.attn.inner_cross_attn.lambda_k2", "D = D"
  ),
  Entry(
    "head_gain", "model.layers.{}.attn.inner_cross_attn.subln.weight", "V = V"
  ),
)

# ε of the head norm, a constant in the authors' code. Other norms have the ε of
# config.json, layer_norm_eps.
_HEAD_NORM_EPS = 1e-5

# Fields of config.json that are read here, or do not change the attention.
_KNOWN_FIELDS = (
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
  """Returns the attention of one layer of a checkpoint, and its parameters.

  Its λ_init is `lambda_init_schedule(layer)`.

  Args:
    path: The directory of the checkpoint.
    layer: The number of the layer among all layers of the model, from 0.

  Returns:
    The module, and its parameters in float32. Above layer L/2 + 1, they include
    no keys and values: call the module with the keys and values of layer
    L/2 + 1 as `keys_values`.

  Raises:
    UserError: if the layer has no attention, the directory is damaged, or it
      holds another model.
  """
  directory = pathlib.Path(path)
  config_path = directory / "config.json"
  stored_config = hugging_face.read_config_json(
    directory, (hugging_face.PHI_FLASH,), _KNOWN_FIELDS
  )
  hugging_face.check_values(config_path, stored_config, mb_per_layer=2)
  num_layers = 4 * hugging_face.divide_field(
    config_path, stored_config, "num_hidden_layers", 4
  )
  if layer not in range(1, num_layers, 2):
    raise UserError(
      f"layer {layer} has no attention: in {config_path}, layers 1, 3, …,"
      f" {num_layers - 1} have; pass one of them"
    )
  has_window = layer < num_layers // 2
  has_keys_values = layer <= num_layers // 2 + 1

  attention = _make_attention(config_path, stored_config, has_window)
  tensors = SafetensorsDirectory(directory)
  params = _read_params(tensors, layer, attention, has_keys_values)
  return attention, params


def tensors_of(
  params: Mapping[str, np.ndarray], layer: int
) -> dict[str, np.ndarray]:
  """Returns the tensors that `read_attention` converts to these parameters.

  Args:
    params: The parameters of a layer, with or without keys and values.
    layer: The number of the layer, for the names of the tensors.

  Returns:
    The tensors by name, with the exact numbers of the parameters.
  """
  qkv_weights = []
  qkv_biases = []
  for name, axes in _QKV_AXES.items():
    if name in params:
      rows = einops.rearrange(
        np.asarray(params[name]), f"E {axes} -> ({axes}) E"
      )
      qkv_weights.append(rows)
      qkv_biases.append(np.ravel(params[f"{name}_bias"]))
  tensors = {
    _QKV_WEIGHT: np.concatenate(qkv_weights),
    _QKV_BIAS: np.concatenate(qkv_biases),
  }
  for entry in _ENTRIES:
    tensors[entry.tensor] = einops.rearrange(
      np.asarray(params[entry.param]),
      f"{entry.param_axes} -> {entry.tensor_axes}",
    )

  layer_tensors = {}
  for name, tensor in tensors.items():
    layer_tensors[name.format(layer)] = np.ascontiguousarray(tensor)
  return layer_tensors


def _make_attention(
  config_path: pathlib.Path, stored_config: dict[str, Any], has_window: bool
) -> DiffAttention:
  """Returns the module of a layer with or without a window."""
  num_kv_heads = hugging_face.divide_field(
    config_path, stored_config, "num_key_value_heads", 2
  )
  heads_per_kv_head = hugging_face.divide_field(
    config_path, stored_config, "num_attention_heads", 2 * num_kv_heads
  )
  num_heads = heads_per_kv_head * num_kv_heads
  head_dim = hugging_face.divide_field(
    config_path, stored_config, "hidden_size", 2 * num_heads
  )
  window = None
  if has_window:
    window = hugging_face.divide_field(
      config_path, stored_config, "sliding_window", 1
    )
  return DiffAttention(
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    window=window,
    rope=False,
    projection_biases=True,
    norm_eps=_HEAD_NORM_EPS,
  )


def _read_params(
  tensors: SafetensorsDirectory,
  layer: int,
  attention: DiffAttention,
  has_keys_values: bool,
) -> dict[str, np.ndarray]:
  """Returns the parameters of a layer, with or without keys and values."""
  embed_dim = 2 * attention.num_heads * attention.head_dim
  sizes = attention.axis_sizes(embed_dim)
  qkv_axes = _QKV_AXES
  if not has_keys_values:
    qkv_axes = {"query": _QKV_AXES["query"]}
  num_rows = {}
  for name, axes in qkv_axes.items():
    num_rows[name] = math.prod(sizes[letter] for letter in axes.split())
  total_rows = sum(num_rows.values())
  weight = _read_tensor(
    tensors, _QKV_WEIGHT.format(layer), (total_rows, embed_dim)
  )
  bias = _read_tensor(tensors, _QKV_BIAS.format(layer), (total_rows,))

  params = {}
  start = 0
  for name, axes in qkv_axes.items():
    rows = slice(start, start + num_rows[name])
    params[name] = _rearrange(weight[rows], f"({axes}) E", f"E {axes}", sizes)
    params[f"{name}_bias"] = _rearrange(bias[rows], f"({axes})", axes, sizes)
    start += num_rows[name]
  for entry in _ENTRIES:
    name = entry.tensor.format(layer)
    shape = _tensor_shape(entry.tensor_axes, sizes)
    tensor = _read_tensor(tensors, name, shape)
    params[entry.param] = _rearrange(
      tensor, entry.tensor_axes, entry.param_axes, sizes
    )
  return params


def _tensor_shape(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Returns the shape of a tensor, such as (E, H·V) for "E (H V)"."""
  shape = []
  for group in re.findall(r"\([^)]*\)|\w", axes):
    letters = group.strip("()").split()
    shape.append(math.prod(sizes[letter] for letter in letters))
  return tuple(shape)


def _read_tensor(
  tensors: SafetensorsDirectory, name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Returns a tensor, and raises UserError if it has another shape."""
  stored_shapes = tensors.shapes()
  if name not in stored_shapes:
    raise UserError(
      f"{tensors} has no tensor {name}; for its config.json it must be"
      f" {list(shape)}"
    )
  if stored_shapes[name] != shape:
    raise UserError(
      f"{tensors} has {name} of shape {list(stored_shapes[name])}; for its"
      f" config.json it must be {list(shape)}"
    )
  return tensors.read(name)


def _rearrange(
  array: np.ndarray, before: str, after: str, sizes: Mapping[str, int]
) -> np.ndarray:
  """Returns an array with its axes rearranged by einops."""
  # einops accepts only the sizes of axes that the array has.
  array_sizes = {axis: sizes[axis] for axis in before if axis.isalpha()}
  return einops.rearrange(array, f"{before} -> {after}", **array_sizes)
