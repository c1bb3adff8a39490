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
# most likely first.
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
  """The number of UTF-8 bytes of each token.

  Attributes:
    after_text: Bytes of the token after other text.
    at_start: Bytes of the token at the beginning of a text.
    ends_word: Whether the decoder puts a space between the token and the next
      one.
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
      document_tokens: The tokens around a document. None for the separator in
        the file.

    Raises:
      UserError: if the content is not a tokenizer.json, or has no separator, or
        lacks one of the document tokens.
    """
    import tokenizers

    try:
      self._content = content.decode("utf-8")
      self._tokenizer = tokenizers.Tokenizer.from_str(self._content)
      self._description = json.loads(self._content)
    # `tokenizers` raises plain Exceptions.
    except Exception as error:
      raise UserError(
        f"config.data.tokenizer = {spec!r}: not a Hugging Face tokenizer.json"
        f" ({error})"
      ) from error
    self.spec = spec
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    # get_vocab_size() does not count gaps in the ids.
    self.vocab_size = max(vocabulary.values()) + 1

    separator_tokens = None
    separator = find_separator(vocabulary)
    if separator is not None:
      separator_tokens = separated_by(separator)
    if document_tokens is None:
      document_tokens = separator_tokens
    if document_tokens is None:
      raise UserError(
        f"config.data.tokenizer = {spec!r}: has no separator for documents;"
        f" looked for {', '.join(_SEPARATORS)}"
      )
    _check_document_tokens(spec, document_tokens, self.vocab_size)
    self.document_tokens = document_tokens
    self.has_own_document_tokens = document_tokens != separator_tokens

    fingerprint = hashlib.sha256(content)
    if self.has_own_document_tokens:
      fingerprint.update(json.dumps(document_tokens).encode())
    self.fingerprint = fingerprint.hexdigest()

    self._control_ids = _find_control_ids(self._tokenizer, document_tokens)
    self._encoder = _make_encoder(
      self._tokenizer, self._description, self._control_ids
    )

  def encode(self, text: str) -> list[int]:
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    # The fast method gives no offsets. Only names of bytes need offsets.
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
    # A Unigram takes such a name for a piece. Other models look up single bytes
    # only. Only the vocabulary of a Unigram is a list.
    return isinstance(self._description["model"]["vocab"], list)

  def _may_spell_byte(self, text: str) -> bool:
    """Returns True if the text has the name of a byte token."""
    # A normalizer may turn non-ASCII characters into a name.
    if not text.isascii() and self._encoder.normalizer is not None:
      text = self._encoder.normalizer.normalize_str(text)
    return _BYTE_TOKEN.search(text) is not None

  def _encode_with_byte_names(self, text: str) -> list[int]:
    """Returns the ids of a text that spells out names of byte tokens.

    The characters of such a name are encoded one by one.
    """
    encoding = self._encoder.encode(text, add_special_tokens=False)
    ids: list[int] = []
    for token, name, (start, stop) in zip(
      encoding.ids, encoding.tokens, encoding.offsets, strict=True
    ):
      is_byte_token = _BYTE_TOKEN.fullmatch(name) is not None
      # A byte token that stands for a byte spans one character. A byte token
      # that is spelled out spans its name.
      if is_byte_token and stop - start == len(name):
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
    last_token = self._last_text_id(context)
    if last_token is None:
      return self.decode(text_ids)
    # Decoding the whole context would take long. The last token, or any other
    # word, has the same effect on the first word of the continuation.
    anchor = self._make_anchor(last_token)
    if anchor is None:
      anchor = self._anchor
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

  def _last_text_id(self, ids: Sequence[int]) -> int | None:
    """Returns the last id that stands for text, or None. Searches backward."""
    for token in reversed(ids):
      if self._is_text(token):
        return token
    return None

  @functools.cached_property
  def _anchor(self) -> _Anchor | None:
    """An anchor for any context. None if no token is one.

    If possible, it does not end a word: some decoders put a space after words.
    """
    word_end = None
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
    for name, token in sorted(vocabulary.items()):
      if token in self._control_ids:
        continue
      anchor = self._make_anchor(token)
      if anchor is None:
        continue
      if not self._ends_word(name):
        return anchor
      if word_end is None:
        word_end = anchor
    return word_end

  def _make_anchor(self, token: int) -> _Anchor | None:
    """Returns the token as an anchor if its text does not depend on the next.

    Its text must consist of ASCII letters or digits.
    """
    text = self.decode([token])
    is_word = text.isalnum() and text.isascii()
    if is_word and self.decode([token, token]).startswith(text):
      return _Anchor(token, text)
    return None

  def _ends_word(self, name: str) -> bool:
    """Returns True if the decoder puts a space after a token.

    Such a token ends in a mark, as in "fox</w>".
    """
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
    # The space after a word is counted with the next token.
    has_text = lengths.after_text[targets] > 0
    num_bytes += lengths.ends_word[tokens] & has_text
    if not self._space_bytes:
      return num_bytes

    # A space that is spelled as three byte tokens is counted with the first
    # one. It has no bytes if the decoder strips it at the start of a text.
    is_space = _run_starts(targets, self._space_bytes)
    num_bytes[is_space] = 1
    num_bytes[is_space & begins_text] = len(self.decode(self._space_bytes))
    for offset in range(1, len(self._space_bytes)):
      num_bytes[_shift(is_space, offset)] = 0
    return num_bytes

  @functools.cached_property
  def _space_bytes(self) -> list[int]:
    """The byte tokens that spell "▁", if the decoder makes them a space.

    A vocabulary without "▁" spells it in bytes. Empty if the decoder does not
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
    """The number of bytes of each token, from its name or the decoder."""
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    added = self._tokenizer.get_added_tokens_decoder()
    decoder = json.dumps(self._description.get("decoder"))
    is_byte_level = '"ByteLevel"' in decoder
    after_text = np.zeros(self.vocab_size, np.int32)
    at_start = np.zeros(self.vocab_size, np.int32)
    ends_word = np.zeros(self.vocab_size, bool)
    # The tokens whose length depends on the decoder.
    decoded = []
    for name, token in vocabulary.items():
      if token in self._control_ids:
        continue
      ends_word[token] = self._ends_word(name)
      if is_byte_level and token in added:
        num_bytes = len(name.encode())
      elif is_byte_level:
        # Each character of the name stands for one byte.
        num_bytes = len(name)
      elif _BYTE_TOKEN.fullmatch(name):
        num_bytes = 1
      else:
        decoded.append(token)
        continue
      after_text[token] = num_bytes
      at_start[token] = num_bytes

    at_start[decoded] = self._decoded_lengths([[token] for token in decoded])
    if self._anchor is None:
      after_text[decoded] = at_start[decoded]
    else:
      anchor = self._anchor
      pairs = [[anchor.token, token] for token in decoded]
      after_text[decoded] = self._decoded_lengths(pairs) - len(anchor.text)
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
  """Returns the id of the token between documents, or None.

  Args:
    vocabulary: Names and ids of all tokens.
  """
  for name in _SEPARATORS:
    if name in vocabulary:
      return vocabulary[name]
  return None


def _check_document_tokens(
  spec: str, document_tokens: DocumentTokens, vocab_size: int
) -> None:
  """Raises UserError if a document token is beyond the vocabulary."""
  for token in document_tokens.control_ids().union(document_tokens.stop):
    if not 0 <= token < vocab_size:
      raise UserError(
        f"config.data.tokenizer = {spec!r}: has {vocab_size} tokens, but"
        f" the document tokens beside it name {token}: it is another model's"
        " tokenizer"
      )


def _find_control_ids(
  tokenizer: Any, document_tokens: DocumentTokens
) -> set[int]:
  """Returns the ids that never stand for text."""
  control_ids = document_tokens.control_ids()
  for token, added in tokenizer.get_added_tokens_decoder().items():
    if added.special or token in document_tokens.stop:
      control_ids.add(token)
  return control_ids


def _make_encoder(
  tokenizer: Any, description: dict[str, Any], control_ids: set[int]
) -> Any:
  """Returns a tokenizer with the same ids that never gives control tokens.

  If a text has "</s>", a model whose vocabulary has that token would give it.
  In the encoder, such tokens have names that no text contains.

  Args:
    tokenizer: A tokenizers.Tokenizer. It may be changed.
    description: Its tokenizer.json.
    control_ids: The ids of the control tokens.
  """
  import tokenizers

  control_names = set()
  vocabulary = tokenizer.get_vocab(with_added_tokens=True)
  for name, token in vocabulary.items():
    if token in control_ids:
      control_names.add(name)
  # `encode_special_tokens` hides only tokens that were added as special ones.
  matched_names = set(tokenizer.get_vocab(with_added_tokens=False))
  for added in tokenizer.get_added_tokens_decoder().values():
    if not added.special:
      matched_names.add(added.content)

  encoder = tokenizer
  if not control_names.isdisjoint(matched_names):
    description = _with_hidden_names(description, control_names)
    encoder = tokenizers.Tokenizer.from_str(json.dumps(description))
  encoder.encode_special_tokens = True
  encoder.no_truncation()
  encoder.no_padding()
  return encoder


def _with_hidden_names(
  description: dict[str, Any], names: set[str]
) -> dict[str, Any]:
  """Returns a tokenizer.json in which some tokens cannot be matched by a text.

  Args:
    description: The tokenizer.json.
    names: The tokens. They keep their ids and get names that no text contains.
  """
  prefix = secrets.token_hex(16)
  hidden_names = {name: prefix + name for name in names}

  model = dict(description["model"])
  model["vocab"] = _rename_vocabulary(model["vocab"], hidden_names)
  unknown = model.get("unk_token")
  if unknown is not None:
    model["unk_token"] = hidden_names.get(unknown, unknown)
  if "merges" in model:
    model["merges"] = _merges_without(model["merges"], names)

  added_tokens = []
  for added in description.get("added_tokens") or []:
    name = added["content"]
    added_tokens.append({**added, "content": hidden_names.get(name, name)})
  return {
    **description,
    "model": model,
    "added_tokens": added_tokens,
    # It may add control tokens by name.
    "post_processor": None,
  }


def _rename_vocabulary(vocabulary: Any, new_names: dict[str, str]) -> Any:
  """Returns the vocabulary of a tokenizer.json with new names of some tokens.

  Args:
    vocabulary: {name: id}, or [[name, score], …] in a Unigram.
    new_names: New names by old names.
  """
  if isinstance(vocabulary, dict):
    renamed = {}
    for name, token in vocabulary.items():
      renamed[new_names.get(name, name)] = token
    return renamed
  return [[new_names.get(name, name), score] for name, score in vocabulary]


def _merges_without(merges: list[Any], names: set[str]) -> list[Any]:
  """Returns the merges of a BPE that neither need nor make one of the tokens.

  Args:
    merges: Pairs of names. Older files write a pair as one string, "a b".
    names: The tokens.
  """
  allowed = []
  for merge in merges:
    pair = merge
    if isinstance(merge, str):
      pair = merge.split(" ")
    merged = "".join(pair)
    if names.isdisjoint([*pair, merged]):
      allowed.append(merge)
  return allowed


def _run_starts(
  targets: Int[np.ndarray, "*B T"], run: list[int]
) -> Bool[np.ndarray, "*B T"]:
  """Returns where a run of ids begins. The run is not empty."""
  begins = np.ones(targets.shape, bool)
  for offset, token in enumerate(run):
    begins &= _shift(targets == token, -offset)
  return begins


def _shift(
  mask: Bool[np.ndarray, "*B T"], offset: int
) -> Bool[np.ndarray, "*B T"]:
  """Returns a mask moved to the right, or to the left by a negative offset.

  Positions that enter are False.
  """
  shifted = np.roll(mask, offset, axis=-1)
  if offset > 0:
    shifted[..., :offset] = False
  elif offset < 0:
    shifted[..., offset:] = False
  return shifted
