"""Writes a byte-level BPE as a Hugging Face tokenizer.json with the same ids as tiktoken's."""

from collections.abc import Mapping


def tokenizer_json(
  ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int]
) -> str:
  """Makes the text of a tokenizer.json.

  Args:
    ranks: Tokens and their ids. Of two pairs, the one whose joint token has the lower id is merged first.
    pattern: The regular expression that splits a text before merging, in a form for Hugging Face tokenizers.
    special_tokens: Further tokens and their ids.

  Returns:
    The text of the tokenizer.json.
  """
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  characters = _byte_characters()

  def spell(token: bytes) -> str:
    return "".join(characters[byte] for byte in token)

  # tiktoken merges any neighbours that make a known token, the lowest rank first; Hugging Face only merges listed pairs. So every split of
  # a token into two known ones is listed, in the order of the tokens' ranks.
  merges = []
  for token in sorted(ranks, key=ranks.__getitem__):
    splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
    known = [
      split for split in splits if split[0] in ranks and split[1] in ranks
    ]
    merges += [
      (spell(left), spell(right))
      for left, right in sorted(
        known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])
      )
    ]
  vocabulary = {spell(token): rank for token, rank in ranks.items()}
  if sorted(special_tokens.values()) != list(
    range(len(ranks), len(ranks) + len(special_tokens))
  ):
    vocabulary |= special_tokens  # if they were only added, they would get the next free ids
  # ignore_merges: a piece of text that is a token becomes that token, as in tiktoken.
  out = tokenizers.Tokenizer(
    models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
  )
  out.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  out.decoder = decoders.ByteLevel()
  in_order = sorted(special_tokens, key=special_tokens.__getitem__)
  out.add_special_tokens(
    [
      tokenizers.AddedToken(name, special=True, normalized=False)
      for name in in_order
    ]
  )
  return out.to_str(pretty=True)


def _byte_characters() -> list[str]:
  """The printable characters for the 256 bytes of GPT-2 and of Hugging Face's ByteLevel."""
  printable = [
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
  ]
  others = [byte for byte in range(256) if byte not in printable]
  return [
    chr(byte) if byte in printable else chr(256 + others.index(byte))
    for byte in range(256)
  ]
