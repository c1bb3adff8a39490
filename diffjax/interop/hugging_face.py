"""The common parts of the layouts of Hugging Face's transformers.

These are the names of the tensors, and the fields of config.json. llama.py,
diffllama.py, motif.py and phi_flash.py add what is specific to a model.

Weights of linear layers are [outputs, inputs]. RoPE rotates the pairs
(j, j + D/2) of a head, as in diffjax, so the rows of the query and key
projections are not permuted.

Not supported: biases; activations other than SiLU and PolyNorm; RoPE of a part
of each head; and rope_scaling other than "linear", "llama3" and "yarn". Unknown
fields of config.json are errors.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from diffjax.config import ModelConfig, UserError
from diffjax.data.json_file import read_json
from diffjax.interop.directory import checked_config
from diffjax.interop.layout import ANY_VALUE, Entry

# The field that says whether the embedding is also the output projection.
TIED_BY = "tie_word_embeddings"

# The model_type of Phi-4-mini-flash. Only its attention is supported.
PHI_FLASH = "phi4flash"

# What these layouts support beyond the defaults of `Layout`.
SUPPORTED = {"rope_scaling": ANY_VALUE}

# The maximum number of characters of an unknown field's value in a message.
_MAX_SHOWN_CHARACTERS = 60

# Maps fields of config.model to fields of config.json with the same value.
_FIELDS = {
  "vocab_size": "vocab_size",
  "num_layers": "num_hidden_layers",
  "embed_dim": "hidden_size",
  "ffn_dim": "intermediate_size",
  "max_length": "max_position_embeddings",
  "norm_eps": "rms_norm_eps",
}

# Other fields that are read, or checked, for all models.
_OTHER_FIELDS = {
  TIED_BY,
  "rope_theta",
  "rope_scaling",
  "rope_parameters",
  "original_max_position_embeddings",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "hidden_act",
}

# Fields about the file, training and generation. They do not change what the
# model computes.
_IGNORED_FIELDS = {
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

# An unknown field with one of these values is ignored: it switches nothing on.
_EMPTY_VALUES: tuple[Any, ...] = (None, False, 0, "", [], {})

# The methods that scale rotary angles. For each, its other fields, and the
# values that ops/rope.py uses.
_ROPE_SCALINGS: dict[str, dict[str, Any]] = {
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

# Fields about rotary angles that every method may have.
_COMMON_ROPE_FIELDS = (
  "rope_theta",
  "rope_type",
  "type",
  "partial_rotary_factor",
)

# The base of the rotary angles if config.json has none.
_DEFAULT_ROPE_BASE = 10_000.0


def entries(order: Literal["map", "head"]) -> tuple[Entry, ...]:
  """Returns the entries of the tensors that all models have.

  A head of differential attention has two attention maps. In these layouts,
  each map is a head of its own, with half of the values of the DIFF head.

  Args:
    order: The order of the maps in the rows of the projections. "map": the
      first maps of all heads, then their second maps. "head": both maps of the
      first head, then both maps of the next; if heads share a noise map, all
      maps of the first group of heads, then all maps of the next. A model with
      one map per head is the same in both orders.
  """
  # The axes of a parameter, and those of its tensor (see `layout.Entry`). Each
  # of Q groups of heads has G query maps. Each of K key/value heads has M key
  # maps, and values of width V, which are C parts of width D.
  if order == "map":
    query_axes = "E Q G D = (G Q D) E"
    key_axes = "E K M D = (M K D) E"
    value_axes = "E K (C D) = (C K D) E"
  elif order == "head":
    query_axes = "E Q G D = (Q G D) E"
    key_axes = "E K M D = (K M D) E"
    value_axes = "E K V = (K V) E"
  else:
    raise ValueError(f"order = {order!r}: must be 'map' or 'head'")
  attention = "model.layers.{}.self_attn"
  ffn = "model.layers.{}.mlp"
  return (
    Entry("embedding", "model.embed_tokens.weight", "N E = N E"),
    Entry(
      "layers/attention_norm", "model.layers.{}.input_layernorm.weight", "E = E"
    ),
    Entry("layers/attention/query", f"{attention}.q_proj.weight", query_axes),
    Entry("layers/attention/key", f"{attention}.k_proj.weight", key_axes),
    Entry("layers/attention/value", f"{attention}.v_proj.weight", value_axes),
    Entry(
      "layers/attention/out", f"{attention}.o_proj.weight", "H V E = E (H V)"
    ),
    Entry(
      "layers/ffn_norm",
      "model.layers.{}.post_attention_layernorm.weight",
      "E = E",
    ),
    Entry("layers/ffn/gate", f"{ffn}.gate_proj.weight", "E F = F E"),
    Entry("layers/ffn/up", f"{ffn}.up_proj.weight", "E F = F E"),
    Entry("layers/ffn/down", f"{ffn}.down_proj.weight", "F E = E F"),
    Entry("final_norm", "model.norm.weight", "E = E"),
    Entry("unembedding", "lm_head.weight", "N E = N E"),
  )


def _lambda_entry(name: str) -> Entry:
  """Returns the entry of one of the vectors from which DIFF V1 computes λ."""
  tensor = f"model.layers.{{}}.self_attn.{name}"
  return Entry(f"layers/attention/{name}", tensor, "D = D")


# The entries that DIFF V1 has in addition.
LAMBDAS = tuple(
  _lambda_entry(name)
  for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
)


@dataclasses.dataclass(frozen=True)
class StoredConfig:
  """The content of a config.json.

  Attributes:
    path: The path of the file, for messages.
    fields: Its fields. null is None.
  """

  path: pathlib.Path
  fields: Mapping[str, Any]

  def get(self, name: str) -> Any:
    """Returns a field, or None if it is missing or null."""
    return self.fields.get(name)

  def get_required(self, name: str) -> Any:
    """Returns a field.

    Raises:
      UserError: if the field is missing or null.
    """
    value = self.get(name)
    if value is None:
      raise UserError(f"{self.path} has no {name}")
    return value

  def get_integer(self, name: str, *, multiple_of: int = 1) -> int:
    """Returns a field that must be a positive integer.

    Args:
      name: The name of the field.
      multiple_of: A number that must divide the integer.

    Raises:
      UserError: if the field is missing, is not a positive integer, or is not a
        multiple of the number.
    """
    value = self.get_required(name)
    # isinstance(True, int) is true.
    is_positive_integer = type(value) is int and value > 0
    if not is_positive_integer or value % multiple_of != 0:
      raise UserError(
        f"{self.path} has {name} = {value!r}: it must be a positive multiple of"
        f" {multiple_of}"
      )
    return value

  def check_values(self, supported: Mapping[str, Any]) -> None:
    """Checks fields for which diffjax supports only one value.

    Args:
      supported: The supported value of each field, by the name of the field. A
        field that is missing or null is not an error.

    Raises:
      UserError: if a field has another value.
    """
    for name, supported_value in supported.items():
      value = self.get(name)
      if value is None:
        continue
      # True and 1 are equal, but not the same value in JSON.
      has_same_type = type(value) is type(supported_value)
      if value != supported_value or not has_same_type:
        raise UserError(
          f"{self.path} has {name} = {value!r}: diffjax supports only"
          f" {supported_value!r}"
        )


def read_config_json(
  directory: pathlib.Path,
  model_types: Sequence[str],
  known_fields: Iterable[str],
) -> StoredConfig:
  """Reads the config.json of a model.

  Args:
    directory: The directory of the model.
    model_types: The values of model_type that are supported.
    known_fields: The names of the fields that only this layout has.

  Raises:
    UserError: if the model has another type, or if config.json has unknown
      fields, which may change what the model computes.
  """
  path = directory / "config.json"
  stored_config = StoredConfig(path, read_json(path))
  model_type = stored_config.get("model_type")
  if model_type not in model_types:
    supported = " or ".join(repr(name) for name in model_types)
    message = (
      f"{path} has model_type = {model_type!r}: this layout supports only"
      f" {supported}"
    )
    if model_type == PHI_FLASH:
      message += (
        "; diffjax does not have the Mamba-1 and gated-memory layers of"
        " Phi-4-mini-flash; read its attention layers with"
        " diffjax.interop.phi_flash.read_attention"
      )
    raise UserError(message)
  _check_no_unknown_fields(stored_config, known_fields)
  return stored_config


def _check_no_unknown_fields(
  stored_config: StoredConfig, known_fields: Iterable[str]
) -> None:
  """Raises UserError if a config.json has unknown fields that are not empty."""
  names = {*_FIELDS.values(), *_OTHER_FIELDS, *_IGNORED_FIELDS, *known_fields}
  unknown = []
  for name, value in sorted(stored_config.fields.items()):
    if name not in names and value not in _EMPTY_VALUES:
      unknown.append(_format_field(name, value))
  if unknown:
    raise UserError(
      f"{stored_config.path} has fields that diffjax does not know:"
      f" {', '.join(unknown)}; remove the fields that do not change what the"
      " model computes"
    )


def _format_field(name: str, value: Any) -> str:
  """Returns a field for a message, in one line and not too long."""
  if not name.isprintable():
    name = repr(name)
  return f"{name} = {repr(value)[:_MAX_SHOWN_CHARACTERS]}"


def read_config(
  directory: pathlib.Path, model_type: str, *, maps: int
) -> ModelConfig:
  """Reads the config.json of a Llama or DiffLlama.

  Args:
    directory: The directory of the model.
    model_type: The model_type that it must have.
    maps: The number of attention maps of a head. config.json counts each map as
      a head.

  Returns:
    The config. `attention` and `head_norm` have their defaults.

  Raises:
    UserError: if a field is missing, or has a value that diffjax does not
      support.
  """
  stored_config = read_config_json(
    directory,
    model_types=(model_type,),
    known_fields=("attention_bias", "mlp_bias", "lambda_std_dev"),
  )
  stored_config.check_values(
    {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
  )

  # The numbers of heads in the file, where each map is a head.
  stored_heads = stored_config.get_integer(
    "num_attention_heads", multiple_of=maps
  )
  stored_kv_heads = stored_heads
  if stored_config.get("num_key_value_heads") is not None:
    stored_kv_heads = stored_config.get_integer(
      "num_key_value_heads", multiple_of=maps
    )
  head_dim = stored_config.get("head_dim")
  if not head_dim:
    head_dim = stored_config.get_integer("hidden_size") // stored_heads

  fields = shared_fields(stored_config)
  fields["num_heads"] = stored_heads // maps
  fields["num_kv_heads"] = stored_kv_heads // maps
  fields["head_dim"] = head_dim
  return checked_config(stored_config.path, fields)


def shared_fields(stored_config: StoredConfig) -> dict[str, Any]:
  """Returns the fields of config.model that all models read in the same way.

  These are all fields except the number and width of heads, and fields that
  only some models have.

  Raises:
    UserError: if a field is missing, or if the rotary angles are scaled in a
      way that is not supported.
  """
  fields = {}
  for field, stored_name in _FIELDS.items():
    fields[field] = stored_config.get_required(stored_name)
  fields.update(_read_rope(stored_config))
  fields["tie_embeddings"] = stored_config.fields.get(TIED_BY, False)
  return fields


def _read_rope(stored_config: StoredConfig) -> dict[str, Any]:
  """Returns the fields of config.model about rotary angles."""
  rope = _stored_rope(stored_config)
  base = rope["rope_theta"]
  # The method that scales the angles. Old files have the name "type".
  scaling = rope.get("rope_type", rope.get("type", "default"))
  # The part of a head's width that is rotated.
  rotated_share = rope.get("partial_rotary_factor", 1.0)
  # The fields of the method.
  scaling_fields = {}
  for name, value in rope.items():
    if name not in _COMMON_ROPE_FIELDS:
      scaling_fields[name] = value
  fields: dict[str, Any] = {"rope_base": base}
  if scaling == "default" and rotated_share == 1.0 and not scaling_fields:
    return fields

  factor = scaling_fields.pop("factor", None)
  # Some files have this field outside the section of rotary angles.
  original_length = scaling_fields.pop(
    "original_max_position_embeddings",
    stored_config.get("original_max_position_embeddings"),
  )
  is_supported = (
    rotated_share == 1.0
    and factor is not None
    and (original_length is not None or scaling == "linear")
    and _has_supported_values(scaling, scaling_fields)
  )
  if not is_supported:
    raise UserError(
      f"{stored_config.path} scales its rotary angles in a way that diffjax"
      f" does not support ({rope}); it supports {', '.join(_ROPE_SCALINGS)}"
      " with a factor, original_max_position_embeddings and the usual values of"
      " other fields"
    )
  # A factor of 1 scales nothing.
  if factor == 1:
    return fields
  fields["rope_scaling"] = scaling
  fields["rope_factor"] = factor
  if original_length is not None:
    fields["rope_original_length"] = original_length
  return fields


def _stored_rope(stored_config: StoredConfig) -> dict[str, Any]:
  """Returns the fields of a config.json about rotary angles.

  transformers 5 writes all of them into the object rope_parameters. Earlier
  versions write the field rope_theta and the object rope_scaling.
  """
  base = stored_config.get("rope_theta")
  if base is None:
    base = _DEFAULT_ROPE_BASE
  rope = {"rope_theta": base}
  for section_name in ("rope_scaling", "rope_parameters"):
    section = stored_config.get(section_name) or {}
    if not isinstance(section, dict):
      raise UserError(
        f"{stored_config.path} has {section_name} = {section!r}: it must be an"
        " object"
      )
    rope.update(section)
  return rope


def _has_supported_values(scaling: Any, fields: Mapping[str, Any]) -> bool:
  """Returns whether a scaling of rotary angles has only supported values.

  Args:
    scaling: The method that scales the rotary angles, such as "yarn".
    fields: The fields that only this method has. The values of
      `_ROPE_SCALINGS` are supported. A field that is None is ignored.
  """
  if not isinstance(scaling, str) or scaling not in _ROPE_SCALINGS:
    return False
  usual_values = _ROPE_SCALINGS[scaling]
  for name, value in fields.items():
    if value is None:
      continue
    if name not in usual_values or value != usual_values[name]:
      return False
  return True


def make_config(config: ModelConfig, *, maps: int) -> dict[str, Any]:
  """Returns the fields of a model's config.json that all layouts have.

  Args:
    config: The config of the model.
    maps: The number of attention maps of a head. config.json counts each map as
      a head.
  """
  stored_config = {}
  for field, stored_name in _FIELDS.items():
    stored_config[stored_name] = getattr(config, field)
  stored_config["num_attention_heads"] = config.num_heads * maps
  stored_config["num_key_value_heads"] = config.num_kv_heads * maps
  stored_config["head_dim"] = config.head_dim
  stored_config["hidden_act"] = "silu"
  stored_config["attention_bias"] = False

  rope_scaling = _make_rope_scaling(config)
  stored_config["rope_parameters"] = {
    **rope_scaling,
    "rope_theta": config.rope_base,
  }
  # transformers before version 5 reads these two fields.
  stored_config["rope_theta"] = config.rope_base
  if config.rope_scaling != "none":
    stored_config["rope_scaling"] = rope_scaling

  stored_config[TIED_BY] = config.tie_embeddings
  return stored_config


def _make_rope_scaling(config: ModelConfig) -> dict[str, Any]:
  """Returns the fields of a config.json that scale rotary angles."""
  if config.rope_scaling == "none":
    return {"rope_type": "default"}
  scaling: dict[str, Any] = {
    "rope_type": config.rope_scaling,
    "factor": config.rope_factor,
  }
  for name, value in _ROPE_SCALINGS[config.rope_scaling].items():
    if value is not None:
      scaling[name] = value
  if config.rope_scaling != "linear":
    scaling["original_max_position_embeddings"] = config.rope_original_length
  return scaling
