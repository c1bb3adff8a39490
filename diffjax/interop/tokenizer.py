"""The tokenizer of a published model, and the tokens around its documents.

A published model must be prompted as in transformers, which adds the tokens of
the post-processor in tokenizer.json to a prompt. The tokens that end a document
are in tokenizer_config.json, config.json and generation_config.json.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from diffjax.config import UserError
from diffjax.data import document_tokens
from diffjax.data.document_tokens import DocumentTokens
from diffjax.data.hugging_face_tokenizer import (
  HuggingFaceTokenizer,
  find_separator,
)
from diffjax.data.json_file import read_json, write_json
from diffjax.data.tokenizer import Tokenizer
from diffjax.host.progress import say

if TYPE_CHECKING:
  import tokenizers

_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"

# `tokenizers` has ids of 32 bits, and raises an OverflowError for others.
_MAX_ID = 2**32 - 1


class _StoredTokens(NamedTuple):
  """The tokens that the JSON files of a published model mention.

  Attributes:
    bos_name: The name of the token that begins a document, from
      tokenizer_config.json. None if it has none.
    eos_name: The name of the token that ends a document, from the same file.
    bos_ids: The ids of tokens that begin a document, from config.json and
      generation_config.json. May be empty.
    stop_ids: The stop ids in the same files: the tokens at which generation
      ends. May be empty.
  """

  bos_name: str | None
  eos_name: str | None
  bos_ids: list[int]
  stop_ids: list[int]


def read_tokenizer(directory: pathlib.Path, vocab_size: int) -> Tokenizer:
  """Reads the tokenizer in a model's directory.

  Args:
    directory: The directory.
    vocab_size: The number of tokens in the model's vocabulary.

  Returns:
    The tokenizer. Its document tokens are those in document_tokens.json. If
    this file does not exist, they are found in the files of a published model.
    If these have none, the tokenizer's separator is before and after each
    document.

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
    tokens = _find_published_tokens(directory)
  tokenizer = HuggingFaceTokenizer(str(path), path.read_bytes(), tokens)
  if tokenizer.vocab_size > vocab_size:
    raise UserError(
      f"{path} has {tokenizer.vocab_size} tokens, but the model has"
      f" {vocab_size}: replace it with the model's own tokenizer"
    )
  return tokenizer


def write_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer) -> None:
  """Writes a tokenizer and its document tokens.

  tokenizer.json and tokenizer_config.json are for transformers, and
  document_tokens.json is for diffjax.
  """
  text = tokenizer.tokenizer_json()
  (directory / _TOKENIZER).write_text(text, encoding="utf-8")
  tokens = tokenizer.document_tokens
  document_tokens.write(directory, tokens)
  bos, eos = token_names(tokenizer, [tokens.no_context, tokens.end[-1]])
  write_json(directory / _TOKENIZER_CONFIG, _make_tokenizer_config(bos, eos))


def token_fields(tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns the fields of config.json with the ids of BOS and EOS.

  Example: {"bos_token_id": 1, "eos_token_id": 2}, or a list of ids for EOS if
  generation stops at several tokens.
  """
  tokens = tokenizer.document_tokens
  eos: int | list[int] = list(tokens.stop)
  if len(tokens.stop) == 1:
    eos = tokens.stop[0]
  return {"bos_token_id": tokens.no_context, "eos_token_id": eos}


def token_names(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
  """Returns the names that tokens have in tokenizer.json, such as "<s>".

  Args:
    tokenizer: The tokenizer.
    ids: The ids of the tokens.

  Returns:
    The name of each id, or "token ID" if the tokenizer does not have it.
  """
  import tokenizers

  backend = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json())
  return [backend.id_to_token(token) or f"token {token}" for token in ids]


def _make_tokenizer_config(bos: str, eos: str) -> dict[str, Any]:
  """Returns the tokenizer_config.json of an exported model.

  Args:
    bos: The name of the token that begins a document, such as "<s>".
    eos: The name of the token that ends a document, such as "</s>".
  """
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": bos,
    "eos_token": eos,
    # Without this field, transformers 4 adds token_type_ids, which DiffLlama
    # does not accept.
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
  }


def _find_published_tokens(directory: pathlib.Path) -> DocumentTokens | None:
  """Finds the tokens around documents in the files of a published model.

  Args:
    directory: The directory of the model. It has a tokenizer.json.

  Returns:
    The tokens. None if no token is known to end a document, or if diffjax 0.1.0
    exported the model.

  Raises:
    UserError: if a file is damaged.
  """
  backend = _load_backend(directory / _TOKENIZER)
  tokenizer_config = _read_optional(directory / _TOKENIZER_CONFIG)
  if _is_from_diffjax_0_1_0(tokenizer_config):
    return None
  stored = _read_stored_tokens(directory, tokenizer_config, backend)

  # transformers adds the tokens of the post-processor to every prompt.
  start, end = _added_by_post_processor(backend)
  if not end:
    eos_id = _find_eos(stored, backend)
    if eos_id is None:
      return None
    end = (eos_id,)

  bos_id = _find_bos(stored, backend)
  # The token that stands for an empty prompt.
  if start:
    no_context = start[-1]
  elif bos_id is not None:
    no_context = bos_id
  else:
    no_context = end[-1]

  # A dict removes duplicates and keeps the order.
  stop = dict.fromkeys([*stored.stop_ids, end[-1]])
  return DocumentTokens(start, end, tuple(stop), no_context)


def _load_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
  """Loads a tokenizer.json with Hugging Face's library.

  Raises:
    UserError: if the file is damaged.
  """
  import tokenizers

  try:
    return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
  # `tokenizers` raises plain Exceptions.
  except Exception as error:
    raise UserError(
      f"config.data.tokenizer = {str(path)!r}: not a Hugging Face"
      f" tokenizer.json ({error})"
    ) from error


def _is_from_diffjax_0_1_0(tokenizer_config: dict[str, Any]) -> bool:
  """Returns whether diffjax 0.1.0 wrote a tokenizer_config.json.

  That version had one token, the separator, for both BOS and EOS. It wrote no
  document_tokens.json.
  """
  separator = _token_name(tokenizer_config, "bos_token")
  if separator is None:
    return False
  return tokenizer_config == _make_tokenizer_config(
    bos=separator, eos=separator
  )


def _read_stored_tokens(
  directory: pathlib.Path,
  tokenizer_config: dict[str, Any],
  backend: tokenizers.Tokenizer,
) -> _StoredTokens:
  """Reads the tokens that the JSON files of a model mention.

  Args:
    directory: The directory of the model.
    tokenizer_config: The content of its tokenizer_config.json.
    backend: Its tokenizer.

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
  return _StoredTokens(
    bos_name=_token_name(tokenizer_config, "bos_token"),
    eos_name=_token_name(tokenizer_config, "eos_token"),
    bos_ids=bos_ids,
    stop_ids=stop_ids,
  )


def _find_bos(
  stored: _StoredTokens, backend: tokenizers.Tokenizer
) -> int | None:
  """Returns the id of the token that begins a document, or None if unknown."""
  bos_ids = list(stored.bos_ids)
  if stored.bos_name is not None:
    named_id = backend.token_to_id(stored.bos_name)
    if named_id is not None:
      bos_ids.append(named_id)
  # config.json may have LlamaConfig's default id 1, even if 1 is an ordinary
  # token of the vocabulary. Tokens that begin a document are added tokens.
  added_ids = _select_added(bos_ids, backend)
  if added_ids:
    return added_ids[0]
  return None


def _find_eos(
  stored: _StoredTokens, backend: tokenizers.Tokenizer
) -> int | None:
  """Returns the id of the token that ends a document, or None if unknown."""
  named_id = None
  if stored.eos_name is not None:
    named_id = backend.token_to_id(stored.eos_name)
  # LlamaConfig has the id 2 by default, which may be a token of the text.
  added_ids = _select_added(stored.stop_ids, backend)
  # The name is used if it is one of the stop ids, or if there are none.
  if added_ids and named_id not in added_ids:
    return added_ids[0]
  if named_id is not None:
    return named_id
  # The name is missing or unknown.
  return find_separator(backend.get_vocab(with_added_tokens=True))


def _select_added(
  ids: Sequence[int], backend: tokenizers.Tokenizer
) -> list[int]:
  """Returns those of `ids` that are added tokens, which no text contains."""
  added_ids = backend.get_added_tokens_decoder().keys()
  return [token for token in ids if token in added_ids]


def _added_by_post_processor(
  backend: tokenizers.Tokenizer,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the ids that the post-processor adds before and after a text.

  Turns off the padding and truncation of the tokenizer.
  """
  # Padding would be taken for tokens of the post-processor.
  backend.no_padding()
  backend.no_truncation()
  encoding = backend.encode("a", add_special_tokens=True)
  # 1 for each token that the post-processor has added, 0 for the text.
  is_added = encoding.special_tokens_mask
  # Without a token of the text, "before" and "after" have no meaning.
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


def _token_name(tokenizer_config: dict[str, Any], field: str) -> str | None:
  """Returns the name of a token in a tokenizer_config.json.

  Example: the field is "</s>" or {"content": "</s>", …}, and the name is
  "</s>".
  """
  value = tokenizer_config.get(field)
  if isinstance(value, dict):
    value = value.get("content")
  if not isinstance(value, str):
    return None
  return value


def _token_ids(
  path: pathlib.Path,
  config: dict[str, Any],
  field: str,
  backend: tokenizers.Tokenizer,
) -> list[int]:
  """Returns the ids in a field of a JSON file, which holds one id or a list.

  Ids that the tokenizer does not have are ignored with a message, as in
  transformers.

  Args:
    path: The path of the file, for messages.
    config: Its content.
    field: The name of the field.
    backend: The tokenizer.

  Raises:
    UserError: if the field holds something else.
  """
  value = config.get(field)
  if value is None:
    return []
  stored_ids = value if isinstance(value, list) else [value]
  ids = []
  for token in stored_ids:
    # isinstance(True, int) is true.
    if type(token) is not int:
      raise UserError(
        f"{path} has {field} = {value!r}: it must be a token id, or a list of"
        " them; correct it"
      )
    if _has_token(token, backend):
      ids.append(token)
    else:
      say(
        f"{path} has {field} = {value!r}: {_TOKENIZER} has no token {token},"
        " which is ignored"
      )
  return ids


def _has_token(token: int, backend: tokenizers.Tokenizer) -> bool:
  """Returns whether a tokenizer has a token of this id."""
  if not 0 <= token <= _MAX_ID:
    return False
  return backend.id_to_token(token) is not None
