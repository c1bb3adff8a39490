"""Hugging Face's DiffLlama, DIFF V1 in another layout (transformers, models/diffllama).

It counts sub-heads: head i is sub-heads i and i + H, and its values are v_i ⊕ v_{i+H}. Its head norm has no gain: writing multiplies the
rows of W_O by the gain, and reading sets the gain to 1. λ_init is always the schedule's.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from diffjax.config import ModelConfig, UserError
from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.interop.directory import write as write_directory
from diffjax.interop.layout import Layout, Model
from diffjax.interop.tokenizer import read_tokenizer, token_fields


def read(path: str) -> Model:
  """Reads a directory that transformers wrote.

  Raises:
    UserError: if it is damaged, or holds a model that diffjax does not support.
  """
  directory = pathlib.Path(path)
  config = hugging_face.read_config(directory, "diffllama", maps=2)
  tokenizer = read_tokenizer(directory, config.vocab_size)
  params = _layout(config).params(SafetensorsDirectory(directory))
  params["layers"]["attention"]["head_gain"] = np.ones(
    (config.num_layers, 2 * config.head_dim), np.float32
  )
  return Model(config, params, tokenizer)


def write(path: str, model: Model, dtype: str) -> None:
  """Writes a directory that transformers loads.

  Raises:
    UserError: if this layout cannot hold the model, or the directory cannot be written.
  """
  config = model.config
  if config.attention != "diff":
    raise UserError(
      f"DiffLlama is DIFF V1: it cannot hold a model of attention {config.attention!r}"
    )
  if not config.head_norm:
    raise UserError(
      "DiffLlama always has the head norm: it cannot hold a model of head_norm False"
    )
  if config.lambda_init is not None:
    raise UserError(
      f"DiffLlama's λ_init is the schedule's: it cannot hold a model of lambda_init {config.lambda_init}"
    )
  layout, params = _layout(config), _with_gain_in_out(model.params)
  description = {
    "architectures": ["DiffLlamaForCausalLM"],
    "model_type": "diffllama",
    **hugging_face.make_config(config, maps=2),
    **token_fields(model.tokenizer),
    "dtype": dtype,
  }
  write_directory(
    pathlib.Path(path),
    description,
    layout.shapes(),
    lambda name: layout.tensor(params, name),
    model.tokenizer,
    dtype,
  )


def _layout(config: ModelConfig) -> Layout:
  entries = hugging_face.entries("map") + hugging_face.LAMBDAS
  return Layout(
    entries,
    config,
    tied_by=hugging_face.TIED_BY,
    supported=hugging_face.SUPPORTED,
  )


def _with_gain_in_out(params: dict[str, Any]) -> dict[str, Any]:
  attention = dict(params["layers"]["attention"])
  attention["out"] = (
    attention["out"] * attention.pop("head_gain")[:, None, :, None]
  )
  return {**params, "layers": {**params["layers"], "attention": attention}}
