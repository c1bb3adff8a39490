"""The tokenizer of a published model, and the tokens around its documents.

transformers adds to a prompt what the post-processor of tokenizer.json adds. A
model must be prompted in the same way here. The tokens that end a document are
in tokenizer_config.json, config.json and generation_config.json.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from diffjax.config import UserError
from diffjax.data import document_tokens
from diffjax.data.document_tokens import DocumentTokens
from diffjax.data.hugging_face_tokenizer import (
  HuggingFaceTokenizer,
  find_separator,
)
from diffjax.data.json_file import read_json, write_json
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.host.progress import say

_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"


def read_tokenizer(directory: pathlib.Path, vocab_size: int) -> Tokenizer:
  """Reads the tokenizer in a model's directory.

  Args:
    directory: The directory.
    vocab_size: The model's number of tokens.

  Raises:
    UserError: if there is none, or it has more tokens than the model.
  """
  path = directory / _TOKENIZER
  if not path.exists():
    raise UserError(
      f"there is no tokenizer beside the model: put its tokenizer.json into {directory} (transformers writes one: "
      "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY))"
    )
  tokens = document_tokens.read(directory)
  if tokens is None:
    tokens = _published_tokens(directory)
  tokenizer: Tokenizer
  if tokens is None:
    tokenizer = load_tokenizer(str(path))
  else:
    tokenizer = HuggingFaceTokenizer(str(path), path.read_bytes(), tokens)
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"{path} has {tokenizer.vocab_size} tokens, but the model has {vocab_size}: replace it with the model's own tokenizer"
    )
  return tokenizer


def write_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer) -> None:
  """Writes a tokenizer, and the tokens around documents, for transformers."""
  text = tokenizer.tokenizer_json()
  (directory / _TOKENIZER).write_text(text, encoding="utf-8")
  tokens = tokenizer.document_tokens
  document_tokens.write(directory, tokens)
  bos, eos = token_names(tokenizer, [tokens.no_context, tokens.end[-1]])
  write_json(directory / _TOKENIZER_CONFIG, _tokenizer_config(bos, eos))


def token_fields(tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns the fields of a config.json that name the tokens."""
  tokens = tokenizer.document_tokens
  eos: int | list[int] = list(tokens.stop)
  if len(tokens.stop) == 1:
    eos = tokens.stop[0]
  return {"bos_token_id": tokens.no_context, "eos_token_id": eos}


def token_names(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
  """Returns the names of tokens in tokenizer.json."""
  import tokenizers

  backend = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json())
  return [backend.id_to_token(token) or f"token {token}" for token in ids]


def _tokenizer_config(bos: str, eos: str) -> dict[str, Any]:
  """Returns the tokenizer_config.json of an exported model."""
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": bos,
    "eos_token": eos,
    # Else transformers 4 adds token_type_ids, which DiffLlama does not accept.
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
  }


def _published_tokens(directory: pathlib.Path) -> DocumentTokens | None:
  """Returns the document tokens that the files of a published model name.

  Returns None for an export of diffjax 0.1.0, whose documents have separators,
  and if the files name no token that ends a document.

  Raises:
    UserError: if a file is damaged.
  """
  import tokenizers

  try:
    backend = tokenizers.Tokenizer.from_file(str(directory / _TOKENIZER))
  except Exception:  # tokenizers raises Exception itself
    return None  # The caller raises the error.
  tokenizer_config = _read_optional(directory / _TOKENIZER_CONFIG)
  bos_name = _name(tokenizer_config.get("bos_token"))
  eos_name = _name(tokenizer_config.get("eos_token"))
  # diffjax 0.1.0 exported models without document_tokens.json.
  if bos_name is not None and bos_name == eos_name:
    if tokenizer_config == _tokenizer_config(bos_name, bos_name):
      return None

  bos_ids: list[int] = []
  stop_ids: list[int] = []
  for name in ("generation_config.json", "config.json"):
    path = directory / name
    config = _read_optional(path)
    bos_ids += _token_ids(path, config, "bos_token_id", backend)
    stop_ids += _token_ids(path, config, "eos_token_id", backend)
  vocabulary = backend.get_vocab(with_added_tokens=True)
  if bos_name in vocabulary:
    bos_ids.append(vocabulary[bos_name])

  start, end = _added_by_post_processor(backend)
  if not end:
    eos_id = vocabulary.get(eos_name) if eos_name is not None else None
    # LlamaConfig has ids 1 and 2 by default, which may be tokens of the text.
    control_ids = backend.get_added_tokens_decoder().keys()
    control_stop_ids = [token for token in stop_ids if token in control_ids]
    if control_stop_ids and eos_id not in control_stop_ids:
      eos_id = control_stop_ids[0]
    if eos_id is None:
      eos_id = find_separator(vocabulary)
    if eos_id is None:
      return None
    end = (eos_id,)
  no_context = end[-1]
  if start:
    no_context = start[-1]
  else:
    for token in bos_ids:
      if token in backend.get_added_tokens_decoder():
        no_context = token
        break
  stop = dict.fromkeys([*stop_ids, end[-1]])
  return DocumentTokens(start, end, tuple(stop), no_context)


def _added_by_post_processor(
  backend: Any,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the ids that the post-processor adds before and after a text."""
  # Padding would be taken for tokens of the post-processor.
  backend.no_padding()
  backend.no_truncation()
  encoding = backend.encode("a", add_special_tokens=True)
  is_added = encoding.special_tokens_mask
  if 0 not in is_added:
    return (), ()
  num_before = is_added.index(0)
  num_after = is_added[::-1].index(0)
  ids = tuple(encoding.ids)
  return ids[:num_before], ids[len(ids) - num_after :]


def _read_optional(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file; {} if it does not exist."""
  return read_json(path) if path.exists() else {}


def _name(value: Any) -> str | None:
  """Returns the name of a token in a tokenizer_config.json."""
  if isinstance(value, dict):
    value = value.get("content")
  return value if isinstance(value, str) else None


def _token_ids(
  path: pathlib.Path, config: dict[str, Any], field: str, backend: Any
) -> list[int]:
  """Returns the ids in a field of a JSON file: none, one or several.

  Ids that the tokenizer does not have are ignored with a message, as in
  transformers.

  Raises:
    UserError: if the field holds something else.
  """
  value = config.get(field)
  if value is None:
    return []
  ids = []
  for token in value if isinstance(value, list) else [value]:
    if type(token) is not int:
      raise UserError(
        f"{path} has {field} = {value!r}: it must be a token id, or a list of"
        " them; correct it"
      )
    if token >= 0 and backend.id_to_token(token) is not None:
      ids.append(token)
    else:
      say(
        f"{path} has {field} = {value!r}: {_TOKENIZER} has no token {token},"
        " which is ignored"
      )
  return ids
