"""The authors' layers (microsoft/unilm, Diff-Transformer and Diff-Transformer-V2), as parts of a whole model.

Their public code has the attention layers alone, so the rest is defined here, with the names of their decoder YOCO in the same repository.
`model.safetensors` is a state dict:

    embed_tokens.weight                                   [N, E]; not multiplied by √E
    layers.N.self_attn_layer_norm.weight                  before attention
    layers.N.self_attn.{q,k,v}_proj.weight                as in their layers; RoPE rotates pairs (2j, 2j+1)
    layers.N.self_attn.{out_proj,subln}.weight            V1
    layers.N.self_attn.lambda_{q1,k1,q2,k2}               V1
    layers.N.self_attn.{o_proj,lambda_proj}.weight        V2
    layers.N.final_layer_norm.weight                      before the feed-forward part
    layers.N.ffn.{fc1,gate,fc2}.weight                    fc2(silu(fc1(x)) · gate(x))
    layer_norm.weight                                     after the last layer
    output_projection.weight                              missing if config.json has share_input_output_embed: true

`config.json` holds diff_version (1 or 2) and arguments of their classes: the V2 layer's d_model, num_heads (DIFF heads in both
versions), num_kv_heads and head_dim, and YOCO's n_layers, hidden_dim, vocab_size, max_seq_len, rope_theta, norm_eps and
share_input_output_embed. The directory also holds `tokenizer.json`.
"""

from __future__ import annotations

import pathlib

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

# Sub-heads 2i and 2i + 1 belong to head i. P and J are swapped in queries and keys: diffjax rotates the pairs (j, j + D/2).
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
  *(
    Entry(
      f"layers/attention/lambda_{i}",
      f"layers.{{}}.self_attn.lambda_{i}",
      "D = D",
    )
    for i in ("q1", "k1", "q2", "k2")
  ),
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

# Version: attention, head norm, entries
_VERSIONS = {1: ("diff", True, _V1_ENTRIES), 2: ("diff_v2", False, _V2_ENTRIES)}
_SUBLN_EPS = 1e-5  # in the V1 layer's code


def read(path: str) -> Model:
  """Reads a directory of this layout.

  Raises:
    UserError: if it is damaged, or holds a model that diffjax does not support.
  """
  directory = pathlib.Path(path)
  description = read_json(directory / "config.json")
  version = description.pop("diff_version", None)
  if version not in (1, 2):
    raise UserError(
      f"{directory / 'config.json'} has diff_version = {version!r}: it must be 1 or 2"
    )
  if missing := sorted(set(_FIELDS.values()) - description.keys()):
    raise UserError(f"{directory / 'config.json'} has no {missing[0]}")
  attention, head_norm, _ = _VERSIONS[version]
  fields = {field: description[name] for field, name in _FIELDS.items()} | {
    "attention": attention,
    "head_norm": head_norm,
  }
  config = checked_config(directory / "config.json", fields)
  layout = _layout(config, version)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  return Model(
    config, layout.params(SafetensorsDirectory(directory)), tokenizer
  )


def write(path: str, model: Model, dtype: str) -> None:
  """Writes a directory of this layout.

  Raises:
    UserError: if this layout cannot hold the model, or the directory cannot be written.
  """
  config = model.config
  version = next(
    (
      number
      for number, (attention, *_) in _VERSIONS.items()
      if attention == config.attention
    ),
    None,
  )
  if version is None:
    raise UserError(
      f"the authors' layers are DIFF V1 and V2: they cannot hold a model of attention {config.attention!r}"
    )
  if config.head_norm != _VERSIONS[version][1]:
    raise UserError(
      f"the authors' V{version} layer has {'a' if version == 1 else 'no'} head norm: it cannot hold head_norm {config.head_norm}"
    )
  if config.lambda_init is not None:
    raise UserError(
      f"the authors' V1 layer has the schedule's λ_init: it cannot hold a model of lambda_init {config.lambda_init}"
    )
  layout = _layout(config, version)
  description = {"diff_version": version} | {
    name: getattr(config, field) for field, name in _FIELDS.items()
  }
  write_directory(
    pathlib.Path(path),
    description,
    layout.shapes(),
    lambda name: layout.tensor(model.params, name),
    model.tokenizer,
    dtype,
  )


def _layout(config: ModelConfig, version: int) -> Layout:
  if version == 1 and config.norm_eps != _SUBLN_EPS:
    raise UserError(
      f"the authors' V1 layer normalises heads with ε = {_SUBLN_EPS}: it cannot hold a model of norm_eps {config.norm_eps}"
    )
  if (
    version == 1 and config.embed_dim != 2 * config.head_dim * config.num_heads
  ):
    raise UserError(
      f"the heads of the authors' V1 layer make up the model's width: embed_dim {config.embed_dim} is not "
      f"2 · {config.head_dim} · {config.num_heads}"
    )
  return Layout(_ENTRIES + _VERSIONS[version][2], config, tied_by=_TIED_BY)
