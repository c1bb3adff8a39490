"""The tokenizer in a run's workdir: a copy of the file that the run was given."""

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


def load_workdir_tokenizer(
  workdir: epath.PathLike, config: Config
) -> Tokenizer:
  tokenizer = load_tokenizer(_tokenizer_spec(workdir, config.data.tokenizer))
  if tokenizer.vocab_size > config.model.vocab_size:
    raise UserError(
      f"{workdir} was trained with {config.model.vocab_size} tokens, but its tokenizer {tokenizer.spec!r} has {tokenizer.vocab_size}: "
      "it is another one; put the one that it was trained with there"
    )
  return tokenizer


def is_same_tokenizer(first: Tokenizer, second: Tokenizer) -> bool:
  """Returns True if two tokenizers are the same, also in different files.

  A *.tiktoken file and a tokenizer.json may hold the same tokenizer.
  """
  if first.fingerprint == second.fingerprint:
    return True
  if first.document_tokens != second.document_tokens:
    return False
  first_description = json.loads(first.tokenizer_json())
  return first_description == json.loads(second.tokenizer_json())


def check_start_tokenizer(
  workdir: epath.PathLike, start_config: Config, tokenizer: Tokenizer
) -> None:
  """Raises UserError if the run's tokenizer is not that of its start model.

  Args:
    workdir: The workdir that config.train.init_from names.
    start_config: The config that its model was trained with.
    tokenizer: The tokenizer of the run.
  """
  start_tokenizer = load_workdir_tokenizer(workdir, start_config)
  if is_same_tokenizer(tokenizer, start_tokenizer):
    return
  raise UserError(
    f"config.train.init_from = {os.fspath(workdir)!r}: its model was trained with"
    f" the tokenizer {start_tokenizer.spec!r}, and config.data.tokenizer ="
    f" {tokenizer.spec!r} is another one; set config.data.tokenizer to"
    f" {start_tokenizer.spec!r}"
  )


def keep_tokenizer(workdir: epath.PathLike, tokenizer: Tokenizer) -> str:
  """Copies a tokenizer's file into the workdir, where `load` finds it.

  Document tokens that are not the separator are written beside it. Built-in
  tokenizers need no file.

  Returns:
    The spec of the copy.
  """
  path = _copy_path(workdir, tokenizer.spec)
  if path is None:
    return tokenizer.spec
  content = read_tokenizer_file(tokenizer.spec)
  # A resumed run has the copy. It must survive a kill at this moment.
  if not path.exists() or path.read_bytes() != content:
    path.write_bytes(content)
  if tokenizer.has_own_document_tokens:
    document_tokens.write(path.parent, tokenizer.document_tokens)
  return str(path)


def _copy_path(workdir: epath.PathLike, spec: str) -> epath.Path | None:
  suffix = epath.Path(spec).suffix
  return (
    epath.Path(workdir) / f"tokenizer{suffix}"
    if suffix in (".json", ".tiktoken")
    else None
  )


def _tokenizer_spec(workdir: epath.PathLike, spec: str) -> str:
  """The copy in the workdir, else where the config says."""
  path = _copy_path(workdir, spec)
  if path is None or path.exists():
    return spec if path is None else str(path)
  # A run older than the copies. None of them read a tokenizer from the Hub.
  if not is_on_hub(spec) and epath.Path(spec).expanduser().exists():
    return spec
  raise UserError(
    f"there is no tokenizer beside the checkpoint: neither {path} nor {spec}, which it was trained with, is there; put it at {path}"
  )
