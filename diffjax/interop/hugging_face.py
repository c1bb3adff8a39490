"""The common parts of Hugging Face's Llama and DiffLlama: names of tensors, and config.json."""

from __future__ import annotations

import pathlib
from typing import Any

from diffjax.config import ModelConfig, UserError
from diffjax.interop.directory import checked_config, read_json
from diffjax.interop.layout import Entry

TIED_BY = "tie_word_embeddings"

# Linear weights are [out, in]. The sub-heads of a map are consecutive: sub-head i of map g has index i + g·H. So are the halves of values.
ENTRIES = (
  Entry("embedding", "model.embed_tokens.weight", "N E = N E"),
  Entry("layers/attention_norm", "model.layers.{}.input_layernorm.weight", "E = E"),
  Entry("layers/attention/query", "model.layers.{}.self_attn.q_proj.weight", "E Q G D = (G Q D) E"),
  Entry("layers/attention/key", "model.layers.{}.self_attn.k_proj.weight", "E K M D = (M K D) E"),
  Entry("layers/attention/value", "model.layers.{}.self_attn.v_proj.weight", "E K (C D) = (C K D) E"),
  Entry("layers/attention/out", "model.layers.{}.self_attn.o_proj.weight", "H V E = E (H V)"),
  Entry("layers/ffn_norm", "model.layers.{}.post_attention_layernorm.weight", "E = E"),
  Entry("layers/ffn/gate", "model.layers.{}.mlp.gate_proj.weight", "E F = F E"),
  Entry("layers/ffn/up", "model.layers.{}.mlp.up_proj.weight", "E F = F E"),
  Entry("layers/ffn/down", "model.layers.{}.mlp.down_proj.weight", "F E = E F"),
  Entry("final_norm", "model.norm.weight", "E = E"),
  Entry("unembedding", "lm_head.weight", "N E = N E"),
)

# Our fields and theirs of the same meaning
_FIELDS = {
  "vocab_size": "vocab_size",
  "num_layers": "num_hidden_layers",
  "embed_dim": "hidden_size",
  "ffn_dim": "intermediate_size",
  "max_length": "max_position_embeddings",
  "norm_eps": "rms_norm_eps",
}


def read_config(directory: pathlib.Path, model_type: str, *, maps: int) -> ModelConfig:
  """Reads the sizes in a config.json. Attention and head norm keep their defaults.

  Args:
    directory: Directory of the file.
    model_type: The model_type that it must have.
    maps: Number of maps that it counts as heads. H and K are that many times fewer.

  Raises:
    UserError: if a field is missing, or has a value that diffjax does not support.
  """
  path = directory / "config.json"
  config = read_json(path)

  def get(name: str, default: Any = None) -> Any:
    if (value := config.get(name, default)) is None:
      raise UserError(f"{path} has no {name}")
    return value

  def require(name: str, wanted: Any) -> None:
    if (got := config.get(name, wanted)) not in (wanted, None):
      raise UserError(f"{path} has {name} = {got!r}: diffjax supports only {wanted!r}")

  if (got := config.get("model_type")) != model_type:
    raise UserError(f"{path} has model_type = {got!r}: this layout is {model_type!r}")
  require("hidden_act", "silu")
  require("attention_bias", False)
  require("mlp_bias", False)
  num_heads = _whole(path, "num_attention_heads", get("num_attention_heads"), maps)
  return checked_config(
    path,
    {field: get(name) for field, name in _FIELDS.items()}
    | {
      "num_heads": num_heads,
      "num_kv_heads": _whole(path, "num_key_value_heads", config.get("num_key_value_heads") or num_heads * maps, maps),
      "head_dim": config.get("head_dim") or _whole(path, "hidden_size", get("hidden_size"), 1) // (num_heads * maps),
      "rope_base": _rope_base(path, config),
      "tie_embeddings": config.get(TIED_BY, False),
    },
  )


def make_config(config: ModelConfig, *, maps: int) -> dict[str, Any]:
  """The config.json of a model, without its model_type.

  Args:
    config: The model's.
    maps: Number of maps that are counted as heads.
  """
  return {name: getattr(config, field) for field, name in _FIELDS.items()} | {
    "num_attention_heads": config.num_heads * maps,
    "num_key_value_heads": config.num_kv_heads * maps,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
    "rope_theta": config.rope_base,  # for transformers before version 5
    TIED_BY: config.tie_embeddings,
  }


def _whole(path: pathlib.Path, name: str, got: Any, maps: int) -> int:
  if not isinstance(got, int) or isinstance(got, bool) or got < maps or got % maps:
    raise UserError(f"{path} has {name} = {got!r}: it must be a positive multiple of {maps}")
  return got // maps


def _rope_base(path: pathlib.Path, config: dict[str, Any]) -> Any:
  """θ, from the fields of transformers 5 and of earlier versions. Scaled angles are an error."""
  rope = {"rope_theta": 10_000.0 if config.get("rope_theta") is None else config["rope_theta"]}
  for section in ("rope_scaling", "rope_parameters"):
    if not isinstance(fields := config.get(section) or {}, dict):
      raise UserError(f"{path} has {section} = {fields!r}: it must be an object")
    rope |= fields
  kind = rope.pop("rope_type", rope.pop("type", "default"))
  if kind != "default" or rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope.keys() != {"rope_theta"}:
    raise UserError(f"{path} scales its rotary angles ({ {'rope_type': kind} | rope }): diffjax supports plain angles only")
  return rope["rope_theta"]
