"""Reads a Transformer in Hugging Face's Llama layout as a DIFF V2 model of the same function, for further training.

Each query head is doubled and W_λ is 0, so λ = sigmoid(0) = ½: out = A V − ½ A V = ½ A V, and W_O is doubled to make up for the ½. Training
then makes the two maps differ, since the gradient of the second is −½ of the first's.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from diffjax.interop import hugging_face
from diffjax.interop.directory import SafetensorsDirectory, read_tokenizer
from diffjax.interop.layout import Layout, Model


def read(path: str) -> Model:
  """Reads a directory that transformers wrote.

  Raises:
    UserError: if it is damaged, or holds a model that diffjax does not support.
  """
  directory = pathlib.Path(path)
  llama = dataclasses.replace(hugging_face.read_config(directory, "llama", maps=1), attention="softmax", head_norm=False)
  config = dataclasses.replace(llama, attention="diff_v2")
  tokenizer = read_tokenizer(directory, config.vocab_size)
  params = Layout(hugging_face.entries("map"), llama, tied_by=hugging_face.TIED_BY, says=hugging_face.SAYS).params(
    SafetensorsDirectory(directory)
  )
  attention = params["layers"]["attention"]
  attention["query"] = np.repeat(attention["query"], 2, axis=-2)
  attention["out"] *= 2
  attention["lambda_hat"] = np.zeros((config.num_layers, config.embed_dim, config.num_heads), np.float32)
  return Model(config, params, tokenizer)
