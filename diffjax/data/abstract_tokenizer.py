"""The interface of all tokenizers."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int, Int32

from diffjax.data.document_tokens import DocumentTokens

# The name of the separator in tokenizers that are trained here.
SEPARATOR = "<|endoftext|>"


class Tokenizer(abc.ABC):
  """Converts text to token ids and back, and counts the bytes of tokens.

  Attributes:
    spec: The value of config.data.tokenizer that it was loaded from.
    fingerprint: sha256 (hex) of everything that its ids and document tokens
      depend on.
    vocab_size: Number of ids, control tokens included.
    document_tokens: The tokens before and after every document.
    has_own_document_tokens: Whether the document tokens differ from the
      separator in the tokenizer's file.
  """

  spec: str
  fingerprint: str
  vocab_size: int
  document_tokens: DocumentTokens
  has_own_document_tokens = False

  @property
  def separator(self) -> int:
    """Id of the token that ends a document.

    For models that are trained here, it also begins a document.
    """
    return self.document_tokens.end[-1]

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without control tokens."""

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of several texts, in parallel if the library can."""

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of a prompt: the start of a document and the text.

    There is at least one id. If both are empty, this is
    `document_tokens.no_context`.
    """
    ids = [*self.document_tokens.start, *self.encode(text)]
    if not ids:
      return [self.document_tokens.no_context]
    return ids

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of ids that begin a text.

    Control tokens and ids beyond the vocabulary are dropped. Invalid UTF-8
    becomes U+FFFD.
    """

  def has_text(self, ids: Iterable[int]) -> bool:
    """Returns True if one of the ids stands for text."""
    control_ids = self.document_tokens.control_ids()
    return any(token not in control_ids for token in ids)

  def decode_after(self, context: Sequence[int], ids: Iterable[int]) -> str:
    """Returns the text that ids add to the text of a context.

    Some decoders drop the space before the first word of a text. The added
    text keeps this space, unless the context has no text.

    Args:
      context: The preceding ids, such as a prompt.
      ids: The ids to decode.
    """
    # By default, the text of a token does not depend on the context.
    del context
    return self.decode(ids)

  @abc.abstractmethod
  def token_bytes(self) -> Int32[np.ndarray, "N"]:
    """Returns the number of UTF-8 bytes of each id, in the middle of a text.

    Control tokens have 0 bytes.
    """

  def target_bytes(
    self, tokens: Int[np.ndarray, "*B T"], targets: Int[np.ndarray, "*B T"]
  ) -> Int32[np.ndarray, "*B T"]:
    """Returns the number of UTF-8 bytes of text that each target adds.

    The sum over the tokens of a text is its number of bytes, by which bits per
    byte are computed.

    Args:
      tokens: The token before each target.
      targets: The ids to count.
    """
    # By default, the text of a token does not depend on the token before.
    del tokens
    return self.token_bytes()[targets]

  @abc.abstractmethod
  def tokenizer_json(self) -> str:
    """Returns a Hugging Face tokenizer.json with the same ids."""
