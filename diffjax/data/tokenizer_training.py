"""Trains a byte-level BPE.

It is written in the formats of tiktoken and of Hugging Face, with the same ids.
"""

import base64
import os
from collections.abc import Iterable, Mapping

from etils import epath

from diffjax.config import UserError
from diffjax.data import tokenizer
from diffjax.host.files import write_atomically

# The 256 bytes, one merge and the separator.
_MIN_VOCAB_SIZE = 258


def train_tokenizer(
  documents: Iterable[str], vocab_size: int, directory: str | os.PathLike[str]
) -> epath.Path:
  """Trains a BPE and writes it as tokenizer.tiktoken and tokenizer.json.

  Args:
    documents: Texts to train on.
    vocab_size: Number of ids. They include the 256 bytes and the separator,
      which is the last id.
    directory: Directory of the files. It is created if it does not exist.

  Returns:
    The path of the tiktoken file.

  Raises:
    UserError: if vocab_size is below 258, or larger than the documents yield.
  """
  import rustbpe

  if vocab_size < _MIN_VOCAB_SIZE:
    raise UserError(
      f"--vocab_size = {vocab_size}: must be at least {_MIN_VOCAB_SIZE}:"
      " 256 bytes, a merge and the separator"
    )
  # The separator has no rank.
  num_ranks = vocab_size - 1
  trainer = rustbpe.Tokenizer()
  trainer.train_from_iterator(
    iter(documents), num_ranks, pattern=tokenizer.PATTERN
  )
  ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
  if len(ranks) != num_ranks:
    raise UserError(
      f"--vocab_size = {vocab_size}: the documents only yield"
      f" {len(ranks) + 1} tokens; lower it or train on more text"
    )

  output_dir = epath.Path(directory)
  output_dir.mkdir(parents=True, exist_ok=True)
  path = output_dir / "tokenizer.tiktoken"
  write_atomically(path, _tiktoken_file(ranks))
  trained = tokenizer.load_tokenizer(str(path))
  write_atomically(output_dir / "tokenizer.json", trained.tokenizer_json())
  return path


def _tiktoken_file(ranks: Mapping[bytes, int]) -> bytes:
  """Returns the content of a tiktoken file: lines of BASE64 RANK."""
  lines = []
  for token in sorted(ranks, key=ranks.__getitem__):
    lines.append(base64.b64encode(token) + b" %d\n" % ranks[token])
  return b"".join(lines)
