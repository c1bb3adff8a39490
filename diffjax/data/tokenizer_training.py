"""Trains a byte-level BPE on documents and writes it in tiktoken's and in Hugging Face's format, with the same ids."""

import base64
import os
from collections.abc import Iterable

from etils import epath

from diffjax.config import UserError
from diffjax.data import tokenizer


def train_tokenizer(
  documents: Iterable[str], vocab_size: int, directory: str | os.PathLike[str]
) -> epath.Path:
  """Trains a BPE and writes ``tokenizer.tiktoken`` and ``tokenizer.json``.

  Args:
    documents: Texts to train on.
    vocab_size: Number of ids, the 256 bytes and the separator (the last id) included.
    directory: Directory of the files.

  Returns:
    The tiktoken file.

  Raises:
    UserError: if vocab_size is below 258, or larger than the documents yield.
  """
  import rustbpe

  if vocab_size < 258:
    raise UserError(
      f"--vocab_size = {vocab_size}: must be at least 258: 256 bytes, a merge and the separator"
    )
  trainer = rustbpe.Tokenizer()
  trainer.train_from_iterator(
    iter(documents), vocab_size - 1, pattern=tokenizer.PATTERN
  )
  ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
  if len(ranks) != vocab_size - 1:
    raise UserError(
      f"--vocab_size = {vocab_size}: the documents only yield {len(ranks) + 1} tokens; lower it or train on more text"
    )
  home = epath.Path(directory)
  home.mkdir(parents=True, exist_ok=True)
  path = home / "tokenizer.tiktoken"
  path.write_bytes(
    b"".join(
      base64.b64encode(token) + b" %d\n" % rank
      for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
  )
  (home / "tokenizer.json").write_text(
    tokenizer.load_tokenizer(str(path)).tokenizer_json(), encoding="utf-8"
  )
  return path
