"""Reads a Transformer in Hugging Face's Llama layout; `adapt` makes a model of differential attention of it."""

from __future__ import annotations

import dataclasses
import pathlib

from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory
from diffjax.interop.layout import Layout, Model
from diffjax.interop.tokenizer import read_tokenizer


def read(path: str) -> Model:
  """Reads a directory that transformers wrote.

  Raises:
    UserError: if it is damaged, or holds a model that diffjax does not support.
  """
  directory = pathlib.Path(path)
  config = dataclasses.replace(
    hugging_face.read_config(directory, "llama", maps=1),
    attention="softmax",
    head_norm=False,
  )
  tokenizer = read_tokenizer(directory, config.vocab_size)
  layout = Layout(
    hugging_face.entries("map"),
    config,
    tied_by=hugging_face.TIED_BY,
    supported=hugging_face.SUPPORTED,
  )
  return Model(
    config, layout.params(SafetensorsDirectory(directory)), tokenizer
  )
