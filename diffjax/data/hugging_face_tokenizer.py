"""A Hugging Face tokenizer.json of any kind."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from diffjax.config import UserError
from diffjax.data.abstract_tokenizer import SEPARATOR, Tokenizer
from diffjax.data.document_tokens import DocumentTokens, separated_by

if TYPE_CHECKING:
  import tokenizers

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


class _Word(NamedTuple):
  """A token that is decoded to one ASCII word, before any other token.

  Attributes:
    token: Its id.
    text: The word.
  """

  token: int
  text: str


class _ByteLengths(NamedTuple):
  """The number of UTF-8 bytes of each token.

  Attributes:
    after_text: Bytes of the token after other text.
    at_start: Bytes of the token at the beginning of a text.
    adds_space: Whether the decoder puts a space between the token and the next
      one. This space is not included in the token's bytes.
  """

  after_text: Int32[np.ndarray, "N"]
  at_start: Int32[np.ndarray, "N"]
  adds_space: Bool[np.ndarray, "N"]


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

    separator_tokens = _find_separator_tokens(vocabulary)
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
    # The fast method gives no offsets. Only `_encode_with_byte_names` needs
    # them.
    encodings = self._encoder.encode_batch_fast(
      list(texts), add_special_tokens=False
    )
    ids = [encoding.ids for encoding in encodings]
    if self._is_unigram:
      for index, text in enumerate(texts):
        if self._has_byte_name(text):
          ids[index] = self._encode_with_byte_names(text)
    return ids

  @functools.cached_property
  def _is_unigram(self) -> bool:
    """Whether the model is a Unigram.

    A Unigram encodes the text "<0x41>" as the token of the byte 0x41, which is
    decoded to "A". Other models encode its characters.
    """
    # Only the vocabulary of a Unigram is a list.
    return isinstance(self._description["model"]["vocab"], list)

  def _has_byte_name(self, text: str) -> bool:
    """Returns True if the text has the name of a byte token, as "<0x41>"."""
    # A normalizer may turn non-ASCII characters into a name.
    if not text.isascii() and self._encoder.normalizer is not None:
      text = self._encoder.normalizer.normalize_str(text)
    return _BYTE_TOKEN.search(text) is not None

  def _encode_with_byte_names(self, text: str) -> list[int]:
    """Returns the ids of a text that has names of byte tokens, as "<0x41>".

    The characters of such a name are encoded one by one, so that the name is
    not taken for the byte.
    """
    encoding = self._encoder.encode(text, add_special_tokens=False)
    ids: list[int] = []
    for token, name, (start, stop) in zip(
      encoding.ids, encoding.tokens, encoding.offsets, strict=True
    ):
      is_byte_token = _BYTE_TOKEN.fullmatch(name) is not None
      # A byte token covers one character if the text has this byte, and six if
      # the text has the token's name.
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
    """Returns the text that ids add to the text of a context.

    Some decoders drop the space before the first word of a text. So the ids are
    decoded together with a word before them, whose text is then removed.
    """
    text_ids = self._text_ids(ids)
    word = self._find_word_for(context)
    if word is None:
      return self.decode(text_ids)
    text = self.decode([word.token, *text_ids])
    return text[len(word.text) :]

  def _find_word_for(self, context: Sequence[int]) -> _Word | None:
    """Returns a word that has the same effect on the next token as a context.

    Decoding the whole context would take long. Returns None if the context has
    no text, or if the vocabulary has no word.
    """
    last_token = self._last_text_id(context)
    if last_token is None:
      return None
    word = self._as_word(last_token)
    if word is not None:
      return word
    return self._any_word

  def has_text(self, ids: Iterable[int]) -> bool:
    return any(self._is_text(token) for token in ids)

  def _is_text(self, token: int) -> bool:
    """Returns True for an id of the vocabulary that stands for text."""
    return 0 <= token < self.vocab_size and token not in self._control_ids

  def _text_ids(self, ids: Iterable[int]) -> list[int]:
    """Returns the ids that stand for text."""
    return [int(token) for token in ids if self._is_text(token)]

  def _last_text_id(self, ids: Sequence[int]) -> int | None:
    """Returns the last id that stands for text, or None."""
    for token in reversed(ids):
      if self._is_text(token):
        return token
    return None

  @functools.cached_property
  def _any_word(self) -> _Word | None:
    """A word of the vocabulary, or None if it has no word.

    Other tokens are decoded after this word to get their text in the middle of
    a text. If possible, the decoder adds no space to the word.
    """
    word_with_space = None
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
    for name, token in sorted(vocabulary.items()):
      if token in self._control_ids:
        continue
      word = self._as_word(token)
      if word is None:
        continue
      if not self._adds_space(name):
        return word
      if word_with_space is None:
        word_with_space = word
    return word_with_space

  def _as_word(self, token: int) -> _Word | None:
    """Returns a token and its text, or None if the token is not a word."""
    text = self.decode([token])
    if not (text.isascii() and text.isalnum()):
      return None
    # In some decoders, the next token changes the text of a token.
    if not self.decode([token, token]).startswith(text):
      return None
    return _Word(token, text)

  def _adds_space(self, name: str) -> bool:
    """Returns True if the decoder puts a space after the token of this name.

    The names of such tokens end in a suffix, as in "fox</w>".
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
    """Returns the number of UTF-8 bytes of text that each target adds.

    Args:
      tokens: The token before each target.
      targets: The ids to count.
    """
    lengths = self._byte_lengths
    document_token_ids = list(self.document_tokens.control_ids())
    begins_text = np.isin(tokens, document_token_ids)
    num_bytes = np.where(
      begins_text, lengths.at_start[targets], lengths.after_text[targets]
    )

    # The space that the decoder puts after a token is counted with the next
    # token, if that one has text.
    has_text = lengths.after_text[targets] > 0
    follows_space = lengths.adds_space[tokens] & has_text
    num_bytes = np.where(follows_space, num_bytes + 1, num_bytes)
    if self._space_ids:
      self._correct_split_spaces(num_bytes, targets, begins_text)
    return num_bytes

  def _correct_split_spaces(
    self,
    num_bytes: Int32[np.ndarray, "*B T"],
    targets: Int[np.ndarray, "*B T"],
    begins_text: Bool[np.ndarray, "*B T"],
  ) -> None:
    """Counts each space that is split into byte tokens as one byte, in place.

    The first of its tokens gets this byte, and the others get 0. The decoder
    may strip a space at the beginning of a text, which then has 0 bytes.
    """
    space_ids = self._space_ids
    is_space = find_sequence(targets, space_ids)
    num_bytes[is_space] = 1
    num_bytes[is_space & begins_text] = len(self.decode(space_ids))
    for offset in range(1, len(space_ids)):
      # The tokens that are `offset` positions after the beginning of a space.
      is_later_token = is_space[..., :-offset]
      num_bytes[..., offset:][is_later_token] = 0

  @functools.cached_property
  def _space_ids(self) -> list[int]:
    """The ids of the byte tokens that are decoded to one space, or [].

    SentencePiece replaces a space by "▁". If the vocabulary lacks "▁", its
    three UTF-8 bytes become byte tokens, which some decoders turn into a space.
    """
    ids = []
    for byte in _SPACE_MARK.encode():
      token = self._tokenizer.token_to_id(f"<0x{byte:02X}>")
      if token is None:
        return []
      ids.append(token)
    word = self._any_word
    if word is None or self.decode_after([word.token], ids) != " ":
      return []
    return ids

  @functools.cached_property
  def _byte_lengths(self) -> _ByteLengths:
    """The number of bytes of each token. Control tokens have 0 bytes."""
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    added_tokens = self._tokenizer.get_added_tokens_decoder()
    after_text = np.zeros(self.vocab_size, np.int32)
    at_start = np.zeros(self.vocab_size, np.int32)
    adds_space = np.zeros(self.vocab_size, bool)
    # Tokens whose names do not give their lengths.
    to_decode = []
    for name, token in vocabulary.items():
      if token in self._control_ids:
        continue
      adds_space[token] = self._adds_space(name)
      num_bytes = self._length_from_name(name, is_added=token in added_tokens)
      if num_bytes is None:
        to_decode.append(token)
      else:
        after_text[token] = num_bytes
        at_start[token] = num_bytes

    single_tokens = [[token] for token in to_decode]
    at_start[to_decode] = self._decoded_lengths(single_tokens)
    word = self._any_word
    if word is None:
      after_text[to_decode] = at_start[to_decode]
    else:
      pairs = [[word.token, token] for token in to_decode]
      after_text[to_decode] = self._decoded_lengths(pairs) - len(word.text)
    return _ByteLengths(after_text, at_start, adds_space)

  def _length_from_name(self, name: str, is_added: bool) -> int | None:
    """Returns a token's number of bytes, or None if its name does not give it.

    Args:
      name: The token's name in the vocabulary.
      is_added: Whether it is an added token, whose name is its text.
    """
    if self._is_byte_level:
      if is_added:
        return len(name.encode())
      # Each character of the name stands for one byte.
      return len(name)
    if _BYTE_TOKEN.fullmatch(name):
      return 1
    return None

  @functools.cached_property
  def _is_byte_level(self) -> bool:
    """Whether the decoder, or a part of it, is ByteLevel."""
    decoder = json.dumps(self._description.get("decoder"))
    return '"ByteLevel"' in decoder

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


def _find_separator_tokens(vocabulary: dict[str, int]) -> DocumentTokens | None:
  """Returns document tokens that consist of the separator, or None."""
  separator = find_separator(vocabulary)
  if separator is None:
    return None
  return separated_by(separator)


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
  tokenizer: tokenizers.Tokenizer, document_tokens: DocumentTokens
) -> set[int]:
  """Returns the ids that never stand for text.

  These are document tokens, special tokens, and the added tokens at which
  generation ends.
  """
  control_ids = document_tokens.control_ids()
  for token, added in tokenizer.get_added_tokens_decoder().items():
    if added.special or token in document_tokens.stop:
      control_ids.add(token)
  return control_ids


def _make_encoder(
  tokenizer: tokenizers.Tokenizer,
  description: dict[str, Any],
  control_ids: set[int],
) -> tokenizers.Tokenizer:
  """Returns a tokenizer that encodes the names of control tokens as text.

  For example, "</s>" in a text becomes the ids of "<", "/", "s" and ">", not
  the id that ends a document. All other ids stay the same.

  Args:
    tokenizer: The tokenizer. It is changed and returned if its options are
      enough. Its decoding stays the same.
    description: Its tokenizer.json.
    control_ids: The ids of the control tokens.
  """
  import tokenizers

  control_names = set()
  vocabulary = tokenizer.get_vocab(with_added_tokens=True)
  for name, token in vocabulary.items():
    if token in control_ids:
      control_names.add(name)

  if _can_match_text(control_names, tokenizer):
    # The tokens get names that no text contains.
    hidden_description = _hide_from_texts(description, control_names)
    encoder = tokenizers.Tokenizer.from_str(json.dumps(hidden_description))
  else:
    encoder = tokenizer
  # Special tokens in a text are encoded as text.
  encoder.encode_special_tokens = True
  # The file may limit the length of texts.
  encoder.no_truncation()
  encoder.no_padding()
  return encoder


def _can_match_text(names: set[str], tokenizer: tokenizers.Tokenizer) -> bool:
  """Returns True if a name in a text may be encoded as the token of this name.

  The option `encode_special_tokens` prevents this for special tokens that were
  added, but not for other added tokens or for the model's own vocabulary.
  """
  model_vocabulary = tokenizer.get_vocab(with_added_tokens=False)
  if not names.isdisjoint(model_vocabulary):
    return True
  for added in tokenizer.get_added_tokens_decoder().values():
    if added.content in names and not added.special:
      return True
  return False


def _hide_from_texts(
  description: dict[str, Any], names: set[str]
) -> dict[str, Any]:
  """Returns a tokenizer.json in which tokens have names that no text contains.

  Args:
    description: The tokenizer.json.
    names: The tokens to rename. They keep their ids.
  """
  # No text contains this random prefix.
  prefix = secrets.token_hex(16)
  new_names = {name: prefix + name for name in names}

  model = dict(description["model"])
  model["vocab"] = _rename_vocabulary(model["vocab"], new_names)
  unknown = model.get("unk_token")
  if unknown is not None:
    model["unk_token"] = new_names.get(unknown, unknown)
  if "merges" in model:
    model["merges"] = _merges_without(model["merges"], names)

  added_tokens = []
  for added in description.get("added_tokens") or []:
    name = added["content"]
    added_tokens.append({**added, "content": new_names.get(name, name)})
  return {
    **description,
    "model": model,
    "added_tokens": added_tokens,
    # It may refer to control tokens by their old names.
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


def _merges_without(
  merges: list[str | list[str]], names: set[str]
) -> list[str | list[str]]:
  """Returns the merges of a BPE in which none of the tokens takes part.

  Args:
    merges: Pairs of names, which are merged to one token. Older files write a
      pair as one string, "a b".
    names: The tokens that are neither merged nor formed by a merge.
  """
  allowed = []
  for merge in merges:
    if isinstance(merge, str):
      pair = merge.split(" ")
    else:
      pair = merge
    merged = "".join(pair)
    if names.isdisjoint([*pair, merged]):
      allowed.append(merge)
  return allowed


def find_sequence(
  targets: Int[np.ndarray, "*B T"], sequence: list[int]
) -> Bool[np.ndarray, "*B T"]:
  """Returns a mask of the positions where a sequence of ids begins.

  All positions are False if the sequence is empty or longer than T.

  Example: for the targets 7, 1, 2, 5 and the sequence 1, 2, only the position
  of 1 is True.
  """
  begins = np.zeros(targets.shape, bool)
  # Only the first positions have enough targets after them.
  num_candidates = targets.shape[-1] - len(sequence) + 1
  if not sequence or num_candidates < 1:
    return begins
  begins[..., :num_candidates] = True
  for offset, token in enumerate(sequence):
    matches = targets[..., offset : offset + num_candidates] == token
    begins[..., :num_candidates] &= matches
  return begins
