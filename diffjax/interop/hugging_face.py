"""What Hugging Face's Llama and DiffLlama have in common: names of tensors, and config.json."""

from __future__ import annotations

import pathlib
from typing import Any

from diffjax.config import ModelConfig, UserError
from diffjax.interop.directory import checked_config, read_json
from diffjax.interop.layout import Row

TIED_BY = "tie_word_embeddings"

# Linear weights are [out, in]. Sub-heads of equal map stand together: sub-head i of map g is row i + g·H; so do the halves of values.
ROWS = (
  Row("embedding", "model.embed_tokens.weight", "N E = N E"),
  Row("layers/attention_norm", "model.layers.{}.input_layernorm.weight", "E = E"),
  Row("layers/attention/query", "model.layers.{}.self_attn.q_proj.weight", "E H G D = (G H D) E"),
  Row("layers/attention/key", "model.layers.{}.self_attn.k_proj.weight", "E K M D = (M K D) E"),
  Row("layers/attention/value", "model.layers.{}.self_attn.v_proj.weight", "E K (C D) = (C K D) E"),
  Row("layers/attention/out", "model.layers.{}.self_attn.o_proj.weight", "H V E = E (H V)"),
  Row("layers/ffn_norm", "model.layers.{}.post_attention_layernorm.weight", "E = E"),
  Row("layers/ffn/gate", "model.layers.{}.mlp.gate_proj.weight", "E F = F E"),
  Row("layers/ffn/up", "model.layers.{}.mlp.up_proj.weight", "E F = F E"),
  Row("layers/ffn/down", "model.layers.{}.mlp.down_proj.weight", "F E = E F"),
  Row("final_norm", "model.norm.weight", "E = E"),
  Row("unembedding", "lm_head.weight", "N E = N E"),
)

# Fields of the same meaning
_FIELDS = {
  "vocab_size": "vocab_size",
  "num_layers": "num_hidden_layers",
  "embed_dim": "hidden_size",
  "ffn_dim": "intermediate_size",
  "max_length": "max_position_embeddings",
  "norm_eps": "rms_norm_eps",
}


def read_config(directory: pathlib.Path, model_type: str, *, maps: int) -> ModelConfig:
  """The sizes in a config.json; attention and head norm are left at their defaults.

  Args:
    directory: Where it lies.
    model_type: What it must be of.
    maps: Into how many maps its attention heads are counted; H and K are that many times fewer.

  Raises:
    UserError: if it lacks a field, or has what diffjax cannot hold.
  """
  path = directory / "config.json"
  config = read_json(path)

  def get(name: str, default: Any = None) -> Any:
    if (value := config.get(name, default)) is None:
      raise UserError(f"{path} has no {name}")
    return value

  def require(name: str, wanted: Any) -> None:
    if (got := config.get(name, wanted)) not in (wanted, None):
      raise UserError(f"{path} has {name} = {got!r}: diffjax has only {wanted!r}")

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
  """The config.json of a model, without its type."""
  return {name: getattr(config, field) for field, name in _FIELDS.items()} | {
    "num_attention_heads": config.num_heads * maps,
    "num_key_value_heads": config.num_kv_heads * maps,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
    "rope_theta": config.rope_base,  # where transformers before version 5 looks
    TIED_BY: config.tie_embeddings,
  }


def _whole(path: pathlib.Path, name: str, got: Any, maps: int) -> int:
  if not isinstance(got, int) or isinstance(got, bool) or got < maps or got % maps:
    raise UserError(f"{path} has {name} = {got!r}: it must be a positive multiple of {maps}")
  return got // maps


def _rope_base(path: pathlib.Path, config: dict[str, Any]) -> Any:
  """θ, from where transformers 5 and its predecessors have it; angles that are scaled in any way are refused."""
  rope = {"rope_theta": 10_000.0 if config.get("rope_theta") is None else config["rope_theta"]}
  for section in ("rope_scaling", "rope_parameters"):
    if not isinstance(fields := config.get(section) or {}, dict):
      raise UserError(f"{path} has {section} = {fields!r}: it must be an object")
    rope |= fields
  kind = rope.pop("rope_type", rope.pop("type", "default"))
  if kind != "default" or rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope.keys() != {"rope_theta"}:
    raise UserError(f"{path} scales its rotary angles ({ {'rope_type': kind} | rope }): diffjax has plain angles only")
  return rope["rope_theta"]
