"""The tokenizer of a run: a copy of its file in the workdir."""

from __future__ import annotations

import json
import os

from etils import epath

from diffjax.config import Config, UserError
from diffjax.data import document_tokens
from diffjax.data.files import is_on_hub
from diffjax.data.tokenizer import (
  Tokenizer,
  load_tokenizer,
  read_tokenizer_file,
)
from diffjax.host.files import write_atomically

# The formats of tokenizers that are read from files. Others are built in.
_FILE_SUFFIXES = (".json", ".tiktoken")


def load_workdir_tokenizer(
  workdir: epath.PathLike, config: Config
) -> Tokenizer:
  """Loads the tokenizer that a run's model was trained with.

  Args:
    workdir: The run's directory, local or gs://.
    config: The run's config.

  Raises:
    UserError: if the tokenizer is missing, or has more tokens than the model.
  """
  tokenizer = load_tokenizer(_tokenizer_spec(workdir, config.data.tokenizer))
  model_vocab_size = config.model.vocab_size
  if tokenizer.vocab_size > model_vocab_size:
    raise UserError(
      f"{workdir} was trained with {model_vocab_size} tokens, but its tokenizer"
      f" {tokenizer.spec!r} has {tokenizer.vocab_size}: it is another one; put"
      " the one used in training there"
    )
  return tokenizer


def is_same_tokenizer(first: Tokenizer, second: Tokenizer) -> bool:
  """Returns whether two tokenizers encode texts and documents in the same way.

  They can be the same even if their files have different formats, such as a
  *.tiktoken file and a tokenizer.json.
  """
  if first.fingerprint == second.fingerprint:
    return True
  if first.document_tokens != second.document_tokens:
    return False
  first_description = json.loads(first.tokenizer_json())
  second_description = json.loads(second.tokenizer_json())
  return first_description == second_description


def check_start_tokenizer(
  workdir: epath.PathLike, start_config: Config, tokenizer: Tokenizer
) -> None:
  """Checks that a run and the model that it starts from share a tokenizer.

  Args:
    workdir: The workdir of that model, from config.train.init_from.
    start_config: The config that the model was trained with.
    tokenizer: The tokenizer of the run.

  Raises:
    UserError: if the tokenizers differ.
  """
  start_tokenizer = load_workdir_tokenizer(workdir, start_config)
  if is_same_tokenizer(tokenizer, start_tokenizer):
    return
  raise UserError(
    f"config.train.init_from = {os.fspath(workdir)!r}: its model was trained"
    f" with the tokenizer {start_tokenizer.spec!r}, and config.data.tokenizer ="
    f" {tokenizer.spec!r} is another one; set config.data.tokenizer to"
    f" {start_tokenizer.spec!r}"
  )


def keep_tokenizer(workdir: epath.PathLike, tokenizer: Tokenizer) -> str:
  """Copies a tokenizer's file into a workdir.

  `load_workdir_tokenizer` then loads the copy, even if the original file is
  changed or moved. Built-in tokenizers need no file. If the tokenizer has its
  own document tokens, they are written to a second file beside the copy.

  Args:
    workdir: The run's directory, local or gs://.
    tokenizer: The tokenizer of the run.

  Returns:
    The path of the copy. For a built-in tokenizer, its name. `load_tokenizer`
    takes either. A converted model has it as config.data.tokenizer. A run keeps
    the config that the user gave.
  """
  path = _copy_path(workdir, tokenizer.spec)
  if path is None:
    return tokenizer.spec
  # An unchanged copy is not written again.
  content = read_tokenizer_file(tokenizer.spec)
  if not path.exists() or path.read_bytes() != content:
    write_atomically(path, content)
  if tokenizer.has_own_document_tokens:
    document_tokens.write(path.parent, tokenizer.document_tokens)
  return str(path)


def _copy_path(workdir: epath.PathLike, spec: str) -> epath.Path | None:
  """Returns where a tokenizer's file is copied. None for a built-in one."""
  suffix = epath.Path(spec).suffix
  if suffix not in _FILE_SUFFIXES:
    return None
  return epath.Path(workdir) / f"tokenizer{suffix}"


def _tokenizer_spec(workdir: epath.PathLike, spec: str) -> str:
  """Returns the path of a run's tokenizer, or the name of a built-in one.

  The path is the copy in the workdir. If there is none, it is the file in the
  config, which must exist and be local.

  Args:
    workdir: The run's directory.
    spec: `config.data.tokenizer`, a file or the name of a built-in tokenizer.

  Raises:
    UserError: if there is neither a copy nor such a file.
  """
  path = _copy_path(workdir, spec)
  if path is None:
    return spec
  if path.exists():
    return str(path)
  # Old versions did not copy the file, so it may only be at its old path. It is
  # not on the Hub, which these versions did not support.
  if is_on_hub(spec):
    raise UserError(
      f"there is no tokenizer beside the checkpoint: {path} does not exist; put"
      f" the tokenizer used in training, {spec}, there"
    )
  if epath.Path(spec).expanduser().exists():
    return spec
  raise UserError(
    f"there is no tokenizer beside the checkpoint: neither {path} nor the"
    f" tokenizer used in training, {spec}, exists; put it at {path}"
  )
