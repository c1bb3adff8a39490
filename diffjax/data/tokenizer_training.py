"""Trains a byte-level BPE on documents and writes it in tiktoken's and in Hugging Face's format, which give identical ids."""

import base64
import os
from collections.abc import Iterable

from etils import epath

from diffjax.config import UserError
from diffjax.data import tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int, directory: str | os.PathLike[str]) -> epath.Path:
  """Trains a BPE and writes ``tokenizer.tiktoken`` and ``tokenizer.json``.

  Args:
    documents: Texts to train on.
    vocab_size: Number of ids, the 256 bytes and the separator (the last id) included.
    directory: Where to write.

  Returns:
    The tiktoken file.

  Raises:
    UserError: if vocab_size is too small, or larger than the documents can fill.
  """
  import rustbpe

  if vocab_size < 258:
    raise UserError(f"--vocab_size = {vocab_size}: must be at least 258: 256 bytes, a merge and the separator")
  trainer = rustbpe.Tokenizer()
  trainer.train_from_iterator(iter(documents), vocab_size - 1, pattern=tokenizer.PATTERN)
  ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
  if len(ranks) != vocab_size - 1:
    raise UserError(f"--vocab_size = {vocab_size}: the documents only yield {len(ranks) + 1} tokens; lower it or train on more text")
  home = epath.Path(directory)
  home.mkdir(parents=True, exist_ok=True)
  path = home / "tokenizer.tiktoken"
  path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])))
  (home / "tokenizer.json").write_text(_hugging_face_json(ranks))
  return path


def _hugging_face_json(ranks: dict[bytes, int]) -> str:
  """The tokenizer.json that gives tiktoken's ids."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  characters = _byte_characters()

  def spell(token: bytes) -> str:
    return "".join(characters[byte] for byte in token)

  # tiktoken joins whatever neighbours make a known token, lowest rank first; Hugging Face only joins listed pairs. So every way to split
  # a token into two known ones is listed, in the order of the tokens' ranks.
  merges = []
  for token in sorted(ranks, key=ranks.__getitem__):
    splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    known = [split for split in splits if split[0] in ranks and split[1] in ranks]
    merges += [(spell(left), spell(right)) for left, right in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
  # ignore_merges: a piece that is a token is that token, as in tiktoken.
  model = models.BPE(vocab={spell(token): rank for token, rank in ranks.items()}, merges=merges, ignore_merges=True)
  out = tokenizers.Tokenizer(model)
  out.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(tokenizer.PATTERN), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  out.decoder = decoders.ByteLevel()
  out.add_special_tokens([tokenizers.AddedToken(tokenizer.SEPARATOR, special=True, normalized=False)])
  return out.to_str(pretty=True)


def _byte_characters() -> list[str]:
  """GPT-2's printable stand-ins for the 256 bytes, which Hugging Face's ByteLevel uses."""
  printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
  others = [byte for byte in range(256) if byte not in printable]
  return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
