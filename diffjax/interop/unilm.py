"""The authors' layers, DIFF V1 and DIFF V2, as parts of a whole model.

Source: microsoft/unilm has code for the attention layers, not for whole models.

  V1  MultiheadFlashDiff1 in Diff-Transformer/multihead_flashdiff_1.py
  V2  MultiheadFlashDiffV2 in
      Diff-Transformer/Diff-Transformer-V2/multihead_flashdiffv2.py

The rest of the model is defined here. Its names are from the same authors'
decoders: self_attn_layer_norm from torchscale, the others from YOCO
(YOCO/yoco/models/decoder/yoco.py in the same repository). Unlike in YOCO,
embeddings are not multiplied by √E.

Layout: a directory with config.json, model.safetensors and tokenizer.json. The
tensors, with {} for the number of the layer, from 0, and the axes of
diffjax/parameters.py:

  embed_tokens.weight                         [N, E]
  layers.{}.self_attn_layer_norm.weight       [E]      RMSNorm before attention
  layers.{}.self_attn.q_proj.weight           [2HD, E]
  layers.{}.self_attn.k_proj.weight       V1  [2KD, E]
  layers.{}.self_attn.k_proj.weight       V2  [KD, E]
  layers.{}.self_attn.v_proj.weight       V1  [2KD, E]
  layers.{}.self_attn.v_proj.weight       V2  [KD, E]
  layers.{}.self_attn.out_proj.weight     V1  [E, 2HD]
  layers.{}.self_attn.subln.weight        V1  [2D]     gain of the head norm
  layers.{}.self_attn.lambda_{q1,k1,q2,k2}  V1  [D]
  layers.{}.self_attn.o_proj.weight       V2  [E, HD]
  layers.{}.self_attn.lambda_proj.weight  V2  [H, E]
  layers.{}.final_layer_norm.weight           [E]      RMSNorm before the FFN
  layers.{}.ffn.fc1.weight                    [F, E]
  layers.{}.ffn.gate.weight                   [F, E]
  layers.{}.ffn.fc2.weight                    [E, F]
  layer_norm.weight                           [E]      RMSNorm after all layers
  output_projection.weight                    [N, E]   only if not tied

The feed-forward layer is fc2(silu(fc1(x)) · gate(x)).

Sub-heads 2i and 2i + 1 of the queries are the signal and the noise of head i.
In V1, sub-heads 2i and 2i + 1 of the keys belong to key/value head i.

`config.json` holds diff_version (1 or 2) and the fields of `_FIELDS`, with the
names of the V2 layer's and YOCO's arguments. num_heads counts DIFF heads, which
have two sub-heads of queries each. The embedding is tied to the output
projection if share_input_output_embed is true.

Rotary rows: the authors rotate the rows 2j and 2j + 1 of each sub-head of W_Q
and W_K by the angle position · rope_theta^(−2j/D). diffjax rotates the rows j
and j + D/2. So the authors' rows 0, 1, 2, 3 are the rows 0, 2, 1, 3 of diffjax
if D = 4.

Not supported:
- in V1: norm_eps ≠ 1e-5, because the authors' head norm has this ε; embed_dim ≠
  2DH; λ_init other than the schedule's; a model without head norm.
- in V2: a head norm.
- in both: shared noise maps, windows, biases, scaled rotary angles and the
  other options that `layout.py` excludes by default.
"""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

from diffjax.config import ModelConfig, UserError
from diffjax.data.json_file import read_json
from diffjax.interop.directory import (
  SafetensorsDirectory,
  checked_config,
)
from diffjax.interop.directory import write as write_directory
from diffjax.interop.layout import Entry, Layout, Model
from diffjax.interop.tokenizer import read_tokenizer

_TIED_BY = "share_input_output_embed"

# (P J) is D in diffjax's order of rotary rows, (J P) in the authors' order.
_ENTRIES = (
  Entry("embedding", "embed_tokens.weight", "N E = N E"),
  Entry(
    "layers/attention_norm", "layers.{}.self_attn_layer_norm.weight", "E = E"
  ),
  Entry(
    "layers/attention/query",
    "layers.{}.self_attn.q_proj.weight",
    "E Q G (P J) = (Q G J P) E",
  ),
  Entry(
    "layers/attention/key",
    "layers.{}.self_attn.k_proj.weight",
    "E K M (P J) = (K M J P) E",
  ),
  Entry(
    "layers/attention/value",
    "layers.{}.self_attn.v_proj.weight",
    "E K V = (K V) E",
  ),
  Entry("layers/ffn_norm", "layers.{}.final_layer_norm.weight", "E = E"),
  Entry("layers/ffn/gate", "layers.{}.ffn.fc1.weight", "E F = F E"),
  Entry("layers/ffn/up", "layers.{}.ffn.gate.weight", "E F = F E"),
  Entry("layers/ffn/down", "layers.{}.ffn.fc2.weight", "F E = E F"),
  Entry("final_norm", "layer_norm.weight", "E = E"),
  Entry("unembedding", "output_projection.weight", "N E = N E"),
)
_V1_ENTRIES = (
  Entry(
    "layers/attention/out",
    "layers.{}.self_attn.out_proj.weight",
    "H V E = E (H V)",
  ),
  Entry(
    "layers/attention/head_gain", "layers.{}.self_attn.subln.weight", "V = V"
  ),
  Entry("layers/attention/lambda_q1", "layers.{}.self_attn.lambda_q1", "D = D"),
  Entry("layers/attention/lambda_k1", "layers.{}.self_attn.lambda_k1", "D = D"),
  Entry("layers/attention/lambda_q2", "layers.{}.self_attn.lambda_q2", "D = D"),
  Entry("layers/attention/lambda_k2", "layers.{}.self_attn.lambda_k2", "D = D"),
)
_V2_ENTRIES = (
  Entry(
    "layers/attention/out",
    "layers.{}.self_attn.o_proj.weight",
    "H V E = E (H V)",
  ),
  Entry(
    "layers/attention/lambda_hat",
    "layers.{}.self_attn.lambda_proj.weight",
    "E H = H E",
  ),
)

# Maps fields of config.model to fields of config.json with the same value.
_FIELDS = {
  "vocab_size": "vocab_size",
  "num_layers": "n_layers",
  "embed_dim": "d_model",
  "num_heads": "num_heads",
  "num_kv_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "ffn_dim": "hidden_dim",
  "max_length": "max_seq_len",
  "rope_base": "rope_theta",
  "norm_eps": "norm_eps",
  "tie_embeddings": _TIED_BY,
}

# ε of the head norm, a constant in the code of the V1 layer.
_V1_HEAD_NORM_EPS = 1e-5


class _Version(NamedTuple):
  """A version of the authors' layer.

  Attributes:
    attention: The value of config.model.attention.
    has_head_norm: Whether the layer normalizes its heads.
    entries: The tensors that only this version has.
  """

  attention: str
  has_head_norm: bool
  entries: tuple[Entry, ...]


# The versions, by the value of diff_version in config.json.
_VERSIONS = {
  1: _Version("diff", has_head_norm=True, entries=_V1_ENTRIES),
  2: _Version("diff_v2", has_head_norm=False, entries=_V2_ENTRIES),
}


def read(path: str) -> Model:
  """Reads a model with the authors' layers from a directory.

  Raises:
    UserError: if the directory is damaged, or the model is not supported.
  """
  directory = pathlib.Path(path)
  config_path = directory / "config.json"
  stored_config = read_json(config_path)
  version = _read_version(config_path, stored_config)
  config = _read_config(config_path, stored_config, version)
  layout = make_layout(config, version)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  params = layout.params(SafetensorsDirectory(directory))
  return Model(config, params, tokenizer)


def write(path: str, model: Model, dtype: str) -> None:
  """Writes a model with the authors' layers to a directory.

  Args:
    path: The directory. It is made if it does not exist.
    model: The model.
    dtype: The type of the tensors, "float32" or "bfloat16".

  Raises:
    UserError: if the authors' layers cannot compute the model's attention, or
      the directory cannot be written.
  """
  config = model.config
  version = _find_version(config)
  _check_attention(config, version)
  layout = make_layout(config, version)
  stored_config: dict[str, Any] = {"diff_version": version}
  for field, stored_name in _FIELDS.items():
    stored_config[stored_name] = getattr(config, field)
  write_directory(
    pathlib.Path(path),
    stored_config,
    layout.tensors(model.params),
    model.tokenizer,
    dtype,
  )


def _read_version(
  config_path: pathlib.Path, stored_config: dict[str, Any]
) -> int:
  """Returns the diff_version of a config.json, which is 1 or 2."""
  version = stored_config.get("diff_version")
  # The value may be a list, which is not hashable. So this searches a tuple.
  if version not in tuple(_VERSIONS):
    raise UserError(
      f"{config_path} has diff_version = {version!r}: it must be 1 or 2"
    )
  return version


def _read_config(
  config_path: pathlib.Path, stored_config: dict[str, Any], version: int
) -> ModelConfig:
  """Returns the config of the model that a config.json describes.

  Args:
    config_path: The path of the file, for messages.
    stored_config: Its content.
    version: Its diff_version.
  """
  missing = sorted(set(_FIELDS.values()) - stored_config.keys())
  if missing:
    raise UserError(f"{config_path} has no {missing[0]}")
  fields: dict[str, Any] = {
    "attention": _VERSIONS[version].attention,
    "head_norm": _VERSIONS[version].has_head_norm,
  }
  for field, stored_name in _FIELDS.items():
    fields[field] = stored_config[stored_name]
  return checked_config(config_path, fields)


def _find_version(config: ModelConfig) -> int:
  """Returns the version of the authors' layer with a model's attention.

  Raises:
    UserError: if neither version has it.
  """
  for number, version in _VERSIONS.items():
    if version.attention == config.attention:
      return number
  raise UserError(
    "the authors' layers support only attention = 'diff' or 'diff_v2'; the"
    f" model has {config.attention!r}"
  )


def _check_attention(config: ModelConfig, version: int) -> None:
  """Raises UserError if the authors' layer differs from the model's.

  Args:
    config: The config of the model.
    version: 1 or 2, the version of the layer.
  """
  has_head_norm = _VERSIONS[version].has_head_norm
  if config.head_norm != has_head_norm:
    raise UserError(
      f"the authors' V{version} layer supports only head_norm ="
      f" {has_head_norm}; the model has {config.head_norm}"
    )
  # V2 has no λ_init.
  if version == 1 and config.lambda_init is not None:
    raise UserError(
      "the authors' V1 layer supports only lambda_init = None, the schedule;"
      f" the model has {config.lambda_init}"
    )


def make_layout(config: ModelConfig, version: int) -> Layout:
  """Returns the layout of a model with the authors' V1 or V2 layers.

  Args:
    config: The config of the model.
    version: 1 or 2.

  Raises:
    UserError: if these layers cannot compute the model's attention.
  """
  if version == 1:
    _check_v1_sizes(config)
  entries = _ENTRIES + _VERSIONS[version].entries
  return Layout(entries, config, tied_by=_TIED_BY)


def _check_v1_sizes(config: ModelConfig) -> None:
  """Raises UserError if the V1 layer cannot have the model's ε and width."""
  if config.norm_eps != _V1_HEAD_NORM_EPS:
    raise UserError(
      "the authors' V1 layer supports only norm_eps ="
      f" {_V1_HEAD_NORM_EPS}, the ε of its head norm; the model has"
      f" {config.norm_eps}"
    )
  if config.embed_dim != 2 * config.head_dim * config.num_heads:
    raise UserError(
      "the authors' V1 layer supports only embed_dim = 2 · head_dim ·"
      f" num_heads; the model has {config.embed_dim}, which is not"
      f" 2 · {config.head_dim} · {config.num_heads}"
    )
