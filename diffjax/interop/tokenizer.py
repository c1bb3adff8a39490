"""The tokenizer of a published model, and the tokens around its documents.

A published model must be prompted as in transformers, which adds the tokens of
the post-processor in tokenizer.json to a prompt. The tokens that end a document
are in tokenizer_config.json, config.json and generation_config.json.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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


class _StoredIds(NamedTuple):
  """Ids in the config.json and generation_config.json of a model.

  Attributes:
    bos: Ids of tokens that begin a document. May be empty.
    stop: Ids of tokens at which generation ends. May be empty.
  """

  bos: list[int]
  stop: list[int]


def read_tokenizer(directory: pathlib.Path, vocab_size: int) -> Tokenizer:
  """Reads the tokenizer in a model's directory.

  Args:
    directory: The directory.
    vocab_size: The number of tokens in the model's vocabulary.

  Returns:
    The tokenizer. Its document tokens are read from document_tokens.json. If
    this file does not exist, they are read from the files of a published model.

  Raises:
    UserError: if the directory has no tokenizer, the tokenizer has more tokens
      than the model, or a file is damaged.
  """
  path = directory / _TOKENIZER
  if not path.exists():
    raise UserError(
      "there is no tokenizer beside the model: put its tokenizer.json into"
      f" {directory} (transformers writes one:"
      " AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY))"
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
      f"{path} has {tokenizer.vocab_size} tokens, but the model has"
      f" {vocab_size}: replace it with the model's own tokenizer"
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
  """Returns the names that tokens have in tokenizer.json, such as "<s>".

  Args:
    tokenizer: The tokenizer.
    ids: The ids of the tokens. The name of an unknown id is "token ID".
  """
  import tokenizers

  backend = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json())
  names = []
  for token in ids:
    name = backend.id_to_token(token)
    names.append(name or f"token {token}")
  return names


def _tokenizer_config(bos: str, eos: str) -> dict[str, Any]:
  """Returns the tokenizer_config.json of an exported model."""
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": bos,
    "eos_token": eos,
    # Without this field, transformers 4 adds token_type_ids, which DiffLlama
    # does not accept.
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

  stored_ids = _read_ids(directory, backend)
  vocabulary = backend.get_vocab(with_added_tokens=True)
  start, end = _added_by_post_processor(backend)
  if not end:
    eos_id = _find_eos(backend, vocabulary, eos_name, stored_ids.stop)
    if eos_id is None:
      return None
    end = (eos_id,)

  bos_ids = list(stored_ids.bos)
  if bos_name in vocabulary:
    bos_ids.append(vocabulary[bos_name])
  control_bos_ids = _control_ids(backend, bos_ids)
  if start:
    no_context = start[-1]
  elif control_bos_ids:
    no_context = control_bos_ids[0]
  else:
    no_context = end[-1]

  # A dict removes duplicates and keeps the order.
  stop = dict.fromkeys([*stored_ids.stop, end[-1]])
  return DocumentTokens(start, end, tuple(stop), no_context)


def _read_ids(directory: pathlib.Path, backend: Any) -> _StoredIds:
  """Reads the ids in the config.json and generation_config.json of a model.

  Raises:
    UserError: if a file is damaged.
  """
  bos_ids = []
  stop_ids = []
  for file_name in ("generation_config.json", "config.json"):
    path = directory / file_name
    config = _read_optional(path)
    bos_ids += _token_ids(path, config, "bos_token_id", backend)
    stop_ids += _token_ids(path, config, "eos_token_id", backend)
  return _StoredIds(bos=bos_ids, stop=stop_ids)


def _find_eos(
  backend: Any,
  vocabulary: dict[str, int],
  eos_name: str | None,
  stop_ids: Sequence[int],
) -> int | None:
  """Returns the id of the token that ends a document, or None if unknown.

  Args:
    backend: The tokenizer.
    vocabulary: The ids of the tokenizer's tokens by name.
    eos_name: The token's name in tokenizer_config.json.
    stop_ids: The ids of the other files at which generation ends.
  """
  eos_id = None
  if eos_name is not None:
    eos_id = vocabulary.get(eos_name)
  # LlamaConfig has ids 1 and 2 by default, which may be tokens of the text.
  control_stop_ids = _control_ids(backend, stop_ids)
  if control_stop_ids and eos_id not in control_stop_ids:
    return control_stop_ids[0]
  if eos_id is not None:
    return eos_id
  return find_separator(vocabulary)


def _control_ids(backend: Any, ids: Sequence[int]) -> list[int]:
  """Returns the ids of added tokens, which are not tokens of a text."""
  control_ids = backend.get_added_tokens_decoder().keys()
  return [token for token in ids if token in control_ids]


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
  """Returns the content of a JSON file, or {} if it does not exist."""
  if not path.exists():
    return {}
  return read_json(path)


def _name(value: Any) -> str | None:
  """Returns the name of a token, given its value in a tokenizer_config.json.

  Example: "</s>" or {"content": "</s>", …} → "</s>"
  """
  if isinstance(value, dict):
    value = value.get("content")
  if not isinstance(value, str):
    return None
  return value


def _token_ids(
  path: pathlib.Path, config: dict[str, Any], field: str, backend: Any
) -> list[int]:
  """Returns the ids in a field of a JSON file, which holds one id or a list.

  Ids that the tokenizer does not have are ignored with a message, as in
  transformers.

  Raises:
    UserError: if the field holds something else.
  """
  value = config.get(field)
  if value is None:
    return []
  stored_ids = value if isinstance(value, list) else [value]
  ids = []
  for token in stored_ids:
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
