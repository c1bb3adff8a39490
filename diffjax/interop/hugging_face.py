"""The common parts of Hugging Face's layouts: names of tensors, and config.json."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from diffjax.config import ModelConfig, UserError
from diffjax.data.json_file import read_json
from diffjax.interop.directory import checked_config
from diffjax.interop.layout import Entry

TIED_BY = "tie_word_embeddings"
PHI_FLASH = "phi4flash"  # a model_type of which no layout holds the whole model

_SHOWN = 60  # characters of an unknown field's value, at most

# What the layouts' config.json can say beyond the sizes.
SUPPORTED = {"rope_scaling": ...}


def entries(heads: str) -> tuple[Entry, ...]:
  """The tensors that all models have. Linear weights are [out, in].

  Args:
    heads: The order of the sub-heads: "map", where those of a map are consecutive (sub-head i of map g has index i + g·H, and so have the
      halves of values), or "head", where those of a head are.
  """
  query, key, value = {
    "map": ("(G Q D)", "(M K D)", "E K (C D) = (C K D) E"),
    "head": ("(Q G D)", "(K M D)", "E K V = (K V) E"),
  }[heads]
  return (
    Entry("embedding", "model.embed_tokens.weight", "N E = N E"),
    Entry(
      "layers/attention_norm", "model.layers.{}.input_layernorm.weight", "E = E"
    ),
    Entry(
      "layers/attention/query",
      "model.layers.{}.self_attn.q_proj.weight",
      f"E Q G D = {query} E",
    ),
    Entry(
      "layers/attention/key",
      "model.layers.{}.self_attn.k_proj.weight",
      f"E K M D = {key} E",
    ),
    Entry(
      "layers/attention/value", "model.layers.{}.self_attn.v_proj.weight", value
    ),
    Entry(
      "layers/attention/out",
      "model.layers.{}.self_attn.o_proj.weight",
      "H V E = E (H V)",
    ),
    Entry(
      "layers/ffn_norm",
      "model.layers.{}.post_attention_layernorm.weight",
      "E = E",
    ),
    Entry(
      "layers/ffn/gate", "model.layers.{}.mlp.gate_proj.weight", "E F = F E"
    ),
    Entry("layers/ffn/up", "model.layers.{}.mlp.up_proj.weight", "E F = F E"),
    Entry(
      "layers/ffn/down", "model.layers.{}.mlp.down_proj.weight", "F E = E F"
    ),
    Entry("final_norm", "model.norm.weight", "E = E"),
    Entry("unembedding", "lm_head.weight", "N E = N E"),
  )


LAMBDAS = tuple(
  Entry(
    f"layers/attention/lambda_{i}",
    f"model.layers.{{}}.self_attn.lambda_{i}",
    "D = D",
  )
  for i in ("q1", "k1", "q2", "k2")
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

# Fields that do not change what a model computes when it is read here: descriptions of the file, of training and of generation.
_DESCRIPTIVE = {
  "_name_or_path",
  "architectures",
  "attention_dropout",
  "auto_map",
  "bos_token_id",
  "dtype",
  "eos_token_id",
  "hidden_dropout",
  "initializer_range",
  "model_type",
  "pad_token_id",
  "pretraining_tp",
  "torch_dtype",
  "transformers_version",
  "unk_token_id",
  "use_cache",
}

# The ways to stretch rotary angles: their further fields, with the values that ops/rope.py has.
_SCALINGS: dict[str, dict[str, Any]] = {
  "linear": {},
  "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
  "yarn": {
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": True,
  },
}


def read_config_json(
  directory: pathlib.Path, model_types: Sequence[Any], known: Iterable[str]
) -> dict[str, Any]:
  """The content of a config.json.

  Args:
    directory: Directory of the file.
    model_types: The model_type that it may have.
    known: The fields that the layout reads, or knows to be of no effect.

  Raises:
    UserError: if the model is of another type, or has fields with an effect that is not known.
  """
  path = directory / "config.json"
  config = read_json(path)
  if (got := config.get("model_type")) not in model_types:
    partly = (
      "; it is a Phi-4-mini-flash, whose layers of Mamba-1 and gated memory diffjax does not have: of its layers with attention, "
      "diffjax.interop.phi_flash.read_attention reads each"
    )
    hint = partly * (got == PHI_FLASH)
    raise UserError(
      f"{path} has model_type = {got!r}: this layout is {' or '.join(map(repr, model_types))}{hint}"
    )
  read = {
    *_DESCRIPTIVE,
    *_FIELDS.values(),
    TIED_BY,
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
  }
  read |= {
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    *known,
  }
  if unknown := {
    name: value
    for name, value in config.items()
    if name not in read and value not in (None, False, 0, "", [], {})
  }:
    said = ", ".join(
      f"{name if name.isprintable() else repr(name)} = {repr(value)[:_SHOWN]}"
      for name, value in sorted(unknown.items())
    )
    raise UserError(
      f"{path} has fields that diffjax does not know: {said}; remove those that do not change what the model computes"
    )
  return config


def required_field(
  path: pathlib.Path, config: dict[str, Any], name: str
) -> Any:
  """A field of a config.json that must be there."""
  if (value := config.get(name)) is None:
    raise UserError(f"{path} has no {name}")
  return value


def check_values(
  path: pathlib.Path, config: dict[str, Any], **wanted: Any
) -> None:
  """Refuses fields, where they are there, that have another value than the only one that diffjax supports."""
  for name, value in wanted.items():
    if (got := config.get(name)) is not None and (
      got != value or type(got) is not type(value)
    ):
      raise UserError(
        f"{path} has {name} = {got!r}: diffjax supports only {value!r}"
      )


def shared_fields(path: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
  """The fields of our config that all models share, but for the numbers of heads."""
  fields = {
    field: required_field(path, config, name) for field, name in _FIELDS.items()
  }
  return (
    fields
    | _rope(path, config)
    | {"tie_embeddings": config.get(TIED_BY, False)}
  )


def read_config(
  directory: pathlib.Path, model_type: str, *, maps: int
) -> ModelConfig:
  """Reads the config.json of a Llama or DiffLlama. Attention and head norm keep their defaults.

  Args:
    directory: Directory of the file.
    model_type: The model_type that it must have.
    maps: Number of maps that it counts as heads. H and K are that many times fewer.

  Raises:
    UserError: if a field is missing, or has a value that diffjax does not support.
  """
  path = directory / "config.json"
  config = read_config_json(
    directory, (model_type,), ("attention_bias", "mlp_bias", "lambda_std_dev")
  )
  check_values(
    path, config, hidden_act="silu", attention_bias=False, mlp_bias=False
  )
  num_heads = divide_field(path, config, "num_attention_heads", maps)
  num_kv_heads = (
    num_heads
    if config.get("num_key_value_heads") is None
    else divide_field(path, config, "num_key_value_heads", maps)
  )
  head_dim = config.get("head_dim") or divide_field(
    path, config, "hidden_size", 1
  ) // (num_heads * maps)
  return checked_config(
    path,
    shared_fields(path, config)
    | {
      "num_heads": num_heads,
      "num_kv_heads": num_kv_heads,
      "head_dim": head_dim,
    },
  )


def make_config(config: ModelConfig, *, maps: int) -> dict[str, Any]:
  """The config.json of a model, without its model_type.

  Args:
    config: The model's.
    maps: Number of maps that are counted as heads.
  """
  rope: dict[str, Any] = {"rope_type": "default"}
  if config.rope_scaling != "none":
    rope = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    rope |= {
      name: value
      for name, value in _SCALINGS[config.rope_scaling].items()
      if value is not None
    }
    rope |= (
      {}
      if config.rope_scaling == "linear"
      else {"original_max_position_embeddings": config.rope_original_length}
    )
  older = {} if config.rope_scaling == "none" else {"rope_scaling": rope}
  return {name: getattr(config, field) for field, name in _FIELDS.items()} | {
    "num_attention_heads": config.num_heads * maps,
    "num_key_value_heads": config.num_kv_heads * maps,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": rope | {"rope_theta": config.rope_base},
    "rope_theta": config.rope_base,  # for transformers before version 5
    **older,
    TIED_BY: config.tie_embeddings,
  }


def divide_field(
  path: pathlib.Path, config: dict[str, Any], name: str, of: int
) -> int:
  """A field that is a positive multiple of a number, divided by it."""
  got = required_field(path, config, name)
  if not isinstance(got, int) or isinstance(got, bool) or got < of or got % of:
    raise UserError(
      f"{path} has {name} = {got!r}: it must be a positive multiple of {of}"
    )
  return got // of


def _rope(path: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
  """θ and what stretches the angles, from the fields of transformers 5 and of earlier versions."""
  rope = {
    "rope_theta": 10_000.0
    if config.get("rope_theta") is None
    else config["rope_theta"]
  }
  for section in ("rope_scaling", "rope_parameters"):
    if not isinstance(fields := config.get(section) or {}, dict):
      raise UserError(
        f"{path} has {section} = {fields!r}: it must be an object"
      )
    rope |= fields
  written, kind = dict(rope), rope.pop("rope_type", rope.pop("type", "default"))
  base, partial = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", 1.0)
  if kind == "default" and partial == 1.0 and not rope:
    return {"rope_base": base}
  original = rope.pop(
    "original_max_position_embeddings",
    config.get("original_max_position_embeddings"),
  )
  factor, rope = (
    rope.pop("factor", None),
    {name: value for name, value in rope.items() if value is not None},
  )
  plain = (
    isinstance(kind, str)
    and kind in _SCALINGS
    and partial == 1.0
    and factor is not None
    and rope.items() <= _SCALINGS[kind].items()
  )
  if not plain or (original is None and kind != "linear"):
    raise UserError(
      f"{path} scales its rotary angles as diffjax does not ({written}): it supports {', '.join(_SCALINGS)} with a factor and "
      "original_max_position_embeddings, and their usual further fields"
    )
  if factor == 1:
    return dict(rope_base=base)
  stretched = {"rope_base": base, "rope_scaling": kind, "rope_factor": factor}
  return (
    stretched
    if original is None
    else stretched | {"rope_original_length": original}
  )
