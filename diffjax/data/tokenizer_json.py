"""Writes a byte-level BPE as a Hugging Face tokenizer.json.

The ids are the same as with tiktoken. The libraries differ in two points:

* tiktoken merges any two neighbors that form a token, the lowest id first.
  Hugging Face merges only listed pairs, in the order of the list. So the list
  has every split of every token into two tokens.
* In tiktoken, a piece of text that is a token becomes this token even if no
  merges lead to it. The option `ignore_merges` does the same.
"""

from collections.abc import Mapping
from typing import Any


def tokenizer_json(
  ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int]
) -> str:
  """Returns a byte-level BPE as the text of a tokenizer.json.

  Args:
    ranks: Tokens and their ids. If two pairs could be merged, the pair that
      forms the token with the lower id is merged first.
    pattern: The regular expression that splits a text before merging, in a form
      for Hugging Face tokenizers.
    special_tokens: Control tokens and their ids.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  byte_characters = _byte_characters()
  names = {token: _spell(token, byte_characters) for token in ranks}
  vocabulary = {names[token]: rank for token, rank in ranks.items()}
  # Special tokens get the next free ids when they are added. If their ids have
  # gaps, they must be in the vocabulary before.
  next_ids = range(len(ranks), len(ranks) + len(special_tokens))
  if sorted(special_tokens.values()) != list(next_ids):
    vocabulary.update(special_tokens)
  merges = []
  for left, right in _find_merges(ranks):
    merges.append((names[left], names[right]))

  tokenizer: Any = tokenizers.Tokenizer(
    models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
  )
  # A text is split by the pattern, and each byte becomes a character.
  split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
  tokenizer.decoder = decoders.ByteLevel()

  added_tokens = []
  for name in sorted(special_tokens, key=special_tokens.__getitem__):
    added_tokens.append(
      tokenizers.AddedToken(name, special=True, normalized=False)
    )
  tokenizer.add_special_tokens(added_tokens)
  return tokenizer.to_str(pretty=True)


def _find_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
  """Returns all pairs of tokens that form a token, in the order of merging.

  Pairs are sorted by the rank of the token that they form. Pairs that form the
  same token are sorted by their own ranks.

  Args:
    ranks: Tokens and their ids.
  """
  merges = []
  for token in sorted(ranks, key=ranks.__getitem__):
    # The ways to split the token into two tokens.
    pairs = []
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in ranks and right in ranks:
        pairs.append((left, right))
    pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    merges.extend(pairs)
  return merges


def _spell(token: bytes, byte_characters: list[str]) -> str:
  """Returns the name of a token: one printable character for each byte."""
  return "".join(byte_characters[byte] for byte in token)


def _byte_characters() -> list[str]:
  """Returns the printable characters that stand for the 256 bytes.

  GPT-2 and Hugging Face's ByteLevel use the same ones. For a byte that is a
  printable Latin-1 character, it is this character. The other bytes get the
  characters from U+0100 on.
  """
  printable = {
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
  }
  characters = []
  next_code = 0x100
  for byte in range(256):
    if byte in printable:
      characters.append(chr(byte))
    else:
      characters.append(chr(next_code))
      next_code += 1
  return characters
