"""A Hugging Face tokenizer.json of any kind."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from diffjax.config import UserError
from diffjax.data.abstract_tokenizer import SEPARATOR, Tokenizer
from diffjax.data.document_tokens import DocumentTokens, separated_by

# Names of the token between documents in published tokenizer.json files, the
# likeliest first.
_SEPARATORS = (
  SEPARATOR,
  "<|end_of_text|>",
  "</s>",
  "<eos>",
  "<|eos|>",
  "[EOS]",
  "<|im_end|>",
  "[SEP]",
)

# SentencePiece's names of the tokens that stand for single bytes.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

# SentencePiece writes a space as this character.
_SPACE_MARK = "▁"


class _Anchor(NamedTuple):
  """A token that stands for the text before a continuation.

  Attributes:
    token: Its id.
    text: Its text, at the beginning of a text.
  """

  token: int
  text: str


class _ByteLengths(NamedTuple):
  """The numbers of UTF-8 bytes that tokens stand for.

  Attributes:
    after_text: Bytes of each token after other text.
    at_start: Bytes of each token at the beginning of a text.
    ends_word: Whether the decoder puts a space after each token, if there is
      another one.
  """

  after_text: Int32[np.ndarray, "N"]
  at_start: Int32[np.ndarray, "N"]
  ends_word: Bool[np.ndarray, "N"]


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer.json of any kind, run by Hugging Face tokenizers."""

  def __init__(
    self, spec: str, content: bytes, document_tokens: DocumentTokens | None
  ):
    """Parses the file.

    Args:
      spec: Where it was read.
      content: Its content.
      document_tokens: The tokens around a document; None for the separator
        that the file has.

    Raises:
      UserError: if it is not a tokenizer.json, or lacks the document tokens.
    """
    import tokenizers

    try:
      self._content = content.decode("utf-8")
      self._tokenizer = tokenizers.Tokenizer.from_str(self._content)
      self._description = json.loads(self._content)
    except Exception as error:  # tokenizers raises Exception itself
      raise UserError(
        f"config.data.tokenizer = {spec!r}: not a Hugging Face tokenizer.json"
        f" ({error})"
      ) from error
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.spec = spec
    # get_vocab_size() does not count gaps in the ids.
    self.vocab_size = max(vocabulary.values()) + 1
    fingerprint = hashlib.sha256(content)
    separator = find_separator(vocabulary)
    if document_tokens is None:
      if separator is None:
        raise UserError(
          f"config.data.tokenizer = {spec!r}: has no separator for documents;"
          f" looked for {', '.join(_SEPARATORS)}"
        )
      document_tokens = separated_by(separator)
    elif separator is None or document_tokens != separated_by(separator):
      self.has_own_document_tokens = True
      fingerprint.update(json.dumps(document_tokens).encode())
    self.document_tokens = document_tokens
    self.fingerprint = fingerprint.hexdigest()
    document_ids = document_tokens.control_ids()
    for token in document_ids.union(document_tokens.stop):
      if not 0 <= token < self.vocab_size:
        raise UserError(
          f"config.data.tokenizer = {spec!r}: has {self.vocab_size} tokens, but"
          f" the document tokens beside it name {token}: it is another model's"
          " tokenizer"
        )
    self._control_ids = set(document_ids)
    for token, added in self._tokenizer.get_added_tokens_decoder().items():
      if added.special or token in document_tokens.stop:
        self._control_ids.add(token)
    self._encoder = self._make_encoder(vocabulary)

  def _make_encoder(self, vocabulary: dict[str, int]) -> Any:
    """Returns a tokenizer with the same ids that never gives control tokens.

    If the text has "</s>", a model whose vocabulary has that token would give
    it. In the encoder, such tokens have names that no text contains.
    """
    import tokenizers

    control_names = set()
    for name, token in vocabulary.items():
      if token in self._control_ids:
        control_names.add(name)
    # tokenizers can ignore tokens in a text that were added as special ones.
    matched_names = set(self._tokenizer.get_vocab(with_added_tokens=False))
    for added in self._tokenizer.get_added_tokens_decoder().values():
      if not added.special:
        matched_names.add(added.content)
    encoder = self._tokenizer
    if not control_names.isdisjoint(matched_names):
      description = _with_hidden_names(self._description, control_names)
      encoder = tokenizers.Tokenizer.from_str(json.dumps(description))
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    return encoder

  def encode(self, text: str) -> list[int]:
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    # The fast method gives no offsets, which only spelled bytes need.
    encodings = self._encoder.encode_batch_fast(
      list(texts), add_special_tokens=False
    )
    ids = [encoding.ids for encoding in encodings]
    if self._matches_byte_names:
      for index, text in enumerate(texts):
        if self._may_spell_byte(text):
          ids[index] = self._encode_with_byte_names(text)
    return ids

  @functools.cached_property
  def _matches_byte_names(self) -> bool:
    """Whether "<0x41>" in a text would give the token of the byte 0x41."""
    # A Unigram takes such a name for a piece. Others look up single bytes only.
    # Only the vocabulary of a Unigram is a list.
    return isinstance(self._description["model"]["vocab"], list)

  def _may_spell_byte(self, text: str) -> bool:
    """Returns True if the text has the name of a byte token."""
    # A normalizer may turn other characters into those of a name.
    if not text.isascii() and self._encoder.normalizer is not None:
      text = self._encoder.normalizer.normalize_str(text)
    return _BYTE_TOKEN.search(text) is not None

  def _encode_with_byte_names(self, text: str) -> list[int]:
    """Returns the ids of a text that spells out names of byte tokens.

    The characters of such a name are encoded one by one.
    """
    encoding = self._encoder.encode(text, add_special_tokens=False)
    ids: list[int] = []
    for token, name, span in zip(
      encoding.ids, encoding.tokens, encoding.offsets, strict=True
    ):
      # The token of a byte that is not spelled out spans one character.
      num_characters = span[1] - span[0]
      if _BYTE_TOKEN.fullmatch(name) and num_characters == len(name):
        for character in name:
          pieces = self._encoder.model.tokenize(character)
          ids += [piece.id for piece in pieces]
      else:
        ids.append(token)
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode(self._text_ids(ids), skip_special_tokens=True)

  def decode_after(self, context: Sequence[int], ids: Iterable[int]) -> str:
    text_ids = self._text_ids(ids)
    # A long context is not searched to its beginning.
    last_token = next(filter(self._is_text, reversed(context)), None)
    if last_token is None:
      return self.decode(text_ids)
    anchor = self._make_anchor(last_token) or self._anchor
    if anchor is None:
      return self.decode(text_ids)
    text = self.decode([anchor.token, *text_ids])
    return text[len(anchor.text) :]

  def has_text(self, ids: Iterable[int]) -> bool:
    return any(self._is_text(token) for token in ids)

  def _is_text(self, token: int) -> bool:
    """Returns True for an id of the vocabulary that stands for text."""
    return 0 <= token < self.vocab_size and token not in self._control_ids

  def _text_ids(self, ids: Iterable[int]) -> list[int]:
    """Returns the ids that stand for text."""
    return [int(token) for token in ids if self._is_text(token)]

  @functools.cached_property
  def _anchor(self) -> _Anchor | None:
    """A token of letters or digits, which does not end a word if there is one.

    Some vocabularies mark the ends of words.
    """
    anchor = None
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
    for name, token in sorted(vocabulary.items()):
      if token in self._control_ids:
        continue
      candidate = self._make_anchor(token)
      if candidate is None:
        continue
      if not self._ends_word(name):
        return candidate
      anchor = anchor or candidate
    return anchor

  def _make_anchor(self, token: int) -> _Anchor | None:
    """Returns the token as an anchor if its text does not depend on the next."""
    text = self.decode([token])
    is_word = text.isalnum() and text.isascii()
    if is_word and self.decode([token, token]).startswith(text):
      return _Anchor(token, text)
    return None

  def _ends_word(self, name: str) -> bool:
    """Returns True for a token that the decoder puts a space after."""
    decoder = self._description.get("decoder") or {}
    suffix = decoder.get("suffix") or ""
    if decoder.get("type") != "BPEDecoder" or not suffix:
      return False
    return name.endswith(suffix)

  def token_bytes(self) -> Int32[np.ndarray, "N"]:
    return self._byte_lengths.after_text

  def target_bytes(
    self, tokens: Int[np.ndarray, "*B T"], targets: Int[np.ndarray, "*B T"]
  ) -> Int32[np.ndarray, "*B T"]:
    lengths = self._byte_lengths
    document_ids = list(self.document_tokens.control_ids())
    begins_text = np.isin(tokens, document_ids)
    num_bytes = np.where(
      begins_text, lengths.at_start[targets], lengths.after_text[targets]
    )
    # The space after a word counts for the next token.
    has_text = lengths.after_text[targets] > 0
    num_bytes += lengths.ends_word[tokens] & has_text
    # Of the byte tokens that spell ▁, the first one counts for the space: 1
    # byte, or 0 if the decoder strips it at the start of a text.
    is_space = _run_starts(targets, self._space_bytes)
    num_bytes[is_space] = 1
    num_bytes[is_space & begins_text] = len(self.decode(self._space_bytes))
    for offset in range(1, len(self._space_bytes)):
      num_bytes[..., offset:][is_space[..., :-offset]] = 0
    return num_bytes

  @functools.cached_property
  def _space_bytes(self) -> list[int]:
    """The byte tokens that the decoder turns into a space.

    A vocabulary without ▁ spells it in bytes. Empty if the decoder does not
    turn them into a space.
    """
    ids = []
    for byte in _SPACE_MARK.encode():
      token = self._tokenizer.token_to_id(f"<0x{byte:02X}>")
      if token is None:
        return []
      ids.append(token)
    if self._anchor is None:
      return []
    if self.decode_after([self._anchor.token], ids) != " ":
      return []
    return ids

  @functools.cached_property
  def _byte_lengths(self) -> _ByteLengths:
    decoder = json.dumps(self._description.get("decoder"))
    is_byte_level = '"ByteLevel"' in decoder
    added = self._tokenizer.get_added_tokens_decoder()
    after_text = np.zeros(self.vocab_size, np.int32)
    at_start = np.zeros(self.vocab_size, np.int32)
    ends_word = np.zeros(self.vocab_size, bool)
    # The decoder knows the length of the others.
    others = []
    for name, token in self._tokenizer.get_vocab(
      with_added_tokens=True
    ).items():
      if token in self._control_ids:
        continue
      ends_word[token] = self._ends_word(name)
      if is_byte_level and token in added:
        after_text[token] = at_start[token] = len(name.encode())
      elif is_byte_level:  # One character stands for one byte.
        after_text[token] = at_start[token] = len(name)
      elif _BYTE_TOKEN.fullmatch(name):
        after_text[token] = at_start[token] = 1
      else:
        others.append(token)
    at_start[others] = self._decoded_lengths([[token] for token in others])
    if self._anchor is None:
      after_text[others] = at_start[others]
    else:
      anchor, anchor_text = self._anchor
      pairs = [[anchor, token] for token in others]
      after_text[others] = self._decoded_lengths(pairs) - len(anchor_text)
    return _ByteLengths(after_text, at_start, ends_word)

  def _decoded_lengths(
    self, sequences: list[list[int]]
  ) -> Int32[np.ndarray, "n"]:
    """Returns the number of UTF-8 bytes of the text of each sequence."""
    texts = self._tokenizer.decode_batch(sequences, skip_special_tokens=True)
    return np.array([len(text.encode()) for text in texts], np.int32)

  def tokenizer_json(self) -> str:
    return self._content


def find_separator(vocabulary: dict[str, int]) -> int | None:
  """Returns the id of the token between documents; None if there is none."""
  for name in _SEPARATORS:
    if name in vocabulary:
      return vocabulary[name]
  return None


def _with_hidden_names(
  description: dict[str, Any], names: set[str]
) -> dict[str, Any]:
  """Returns a tokenizer.json in which some tokens cannot be matched by a text.

  Args:
    description: The tokenizer.json.
    names: The tokens. They keep their ids and get names that no text contains.
  """
  prefix = secrets.token_hex(16)

  def rename(name: str) -> str:
    return prefix + name if name in names else name

  model = dict(description["model"])
  vocabulary = model["vocab"]
  if isinstance(vocabulary, dict):
    model["vocab"] = {rename(name): id_ for name, id_ in vocabulary.items()}
  else:
    model["vocab"] = [[rename(name), score] for name, score in vocabulary]
  if model.get("unk_token") is not None:
    model["unk_token"] = rename(model["unk_token"])
  if "merges" in model:
    model["merges"] = _merges_without(model["merges"], names)
  added_tokens = []
  for added in description.get("added_tokens") or []:
    added_tokens.append({**added, "content": rename(added["content"])})
  return {
    **description,
    "model": model,
    "added_tokens": added_tokens,
    "post_processor": None,  # It may add control tokens by name.
  }


def _merges_without(merges: list[Any], names: set[str]) -> list[Any]:
  """Returns the merges of a BPE that neither need nor make one of the tokens."""
  allowed = []
  for merge in merges:
    # Older files write a pair as one string.
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if not names.intersection([*pair, "".join(pair)]):
      allowed.append(merge)
  return allowed


def _run_starts(
  targets: Int[np.ndarray, "*B T"], run: list[int]
) -> Bool[np.ndarray, "*B T"]:
  """Returns where a run of tokens begins; nowhere if it is empty."""
  begins = np.zeros(targets.shape, bool)
  num_starts = targets.shape[-1] - len(run) + 1
  if not run or num_starts < 1:
    return begins
  begins[..., :num_starts] = True
  for offset, token in enumerate(run):
    matches = targets[..., offset : offset + num_starts] == token
    begins[..., :num_starts] &= matches
  return begins
