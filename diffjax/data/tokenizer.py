"""Converts text to token ids and back.

A tokenizer is UTF-8 bytes, a tiktoken file, a Hugging Face tokenizer.json, or
cl100k_base.

Control tokens stand before and after every document (document_tokens.py). For
models that are trained here, both are one separator. A control token that is
spelled out in a text is encoded as text.

Three libraries are needed. `tokenizers` runs every tokenizer.json. It could run
*.tiktoken files with the same ids, but `tiktoken` encodes 4 to 5 times as fast
(20 instead of 5 MB/s), loads 100,000 tokens in 0.1 instead of 0.5 s and 40
instead of 190 MB, and accepts surrogates. `rustbpe` trains. The trainer of
`tokenizers` takes 2.5 times as long and breaks ties between pairs in another
order, which changes most ids (from 820 of 32,768 on).
"""

import base64
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epath
from jaxtyping import Int32

from diffjax.config import UserError
from diffjax.data import document_tokens
from diffjax.data.abstract_tokenizer import SEPARATOR, Tokenizer
from diffjax.data.document import WITHOUT_NETWORK, reason
from diffjax.data.document_tokens import separated_by
from diffjax.data.files import is_on_hub
from diffjax.data.hugging_face_tokenizer import HuggingFaceTokenizer
from diffjax.data.tokenizer_json import tokenizer_json

# The pattern of GPT-4-style tokenizers that splits a text before merging. This
# form has the same meaning in tiktoken, rustbpe and Hugging Face tokenizers.
# The original form has possessive quantifiers, which differ between them.
PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
  r"|[^\r\n\p{L}\p{N}]?\p{L}+"
  r"|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+"
  r"|\s+(?!\S)"
  r"|\s+"
)

# The definition of cl100k_base, which never changes. tiktoken can load it by
# name, but does not give the bytes of the file, which the fingerprint needs.
CL100K_URL = (
  "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
)
CL100K_SHA256 = (
  "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
)
CL100K_PATTERN = (
  r"'(?i:[sdmt]|ll|ve|re)"
  r"|[^\r\n\p{L}\p{N}]?+\p{L}++"
  r"|\p{N}{1,3}+"
  r"| ?[^\s\p{L}\p{N}]++[\r\n]*+"
  r"|\s++$"
  r"|\s*[\r\n]"
  r"|\s+(?!\S)"
  r"|\s"
)
# The same pattern for Hugging Face tokenizers. Their regular expressions
# (Oniguruma) read {1,3}+ as a repetition, and $ as the end of any line. The
# possessive quantifiers are not needed: no alternative would match after giving
# characters back.
_CL100K_JSON_PATTERN = (
  r"'(?i:[sdmt]|ll|ve|re)"
  r"|[^\r\n\p{L}\p{N}]?\p{L}+"
  r"|\p{N}{1,3}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s+\z"
  r"|\s*[\r\n]"
  r"|\s+(?!\S)"
  r"|\s"
)
CL100K_SPECIAL = {
  SEPARATOR: 100257,
  "<|fim_prefix|>": 100258,
  "<|fim_middle|>": 100259,
  "<|fim_suffix|>": 100260,
  "<|endofprompt|>": 100276,
}

# UTF-8 never uses this byte.
_BYTE_SEPARATOR = 255


def load_tokenizer(spec: str) -> Tokenizer:
  """Loads a tokenizer.

  Args:
    spec: "bytes", "cl100k_base" (downloaded once), or the path of a
      ``*.tiktoken`` file or of a Hugging Face ``tokenizer.json``. The path may
      begin with gs:// or hf://.

  Raises:
    UserError: if the spec is none of these, or if the file is missing, damaged
      or cannot be downloaded.
  """
  if spec == "bytes":
    return _ByteTokenizer()
  if spec == "cl100k_base":
    return _load_cl100k()
  if not spec.endswith((".tiktoken", ".json")):
    raise UserError(
      f"config.data.tokenizer = {spec!r}: must be 'bytes', 'cl100k_base', or"
      " the path of a *.tiktoken file or of a Hugging Face tokenizer.json"
      " (python -m diffjax.prepare --train_tokenizer=DIR writes both)"
    )
  try:
    content = read_tokenizer_file(spec)
  except OSError as error:
    raise UserError(
      f"config.data.tokenizer = {spec!r}: cannot read this file"
      f" ({error.strerror or error}); python -m diffjax.prepare"
      " --train_tokenizer=DIR trains one"
    ) from error
  if spec.endswith(".json"):
    return _load_tokenizer_json(spec, content)
  if hashlib.sha256(content).hexdigest() == CL100K_SHA256:
    # This file needs another pattern, and has more control tokens.
    return _make_cl100k(spec, content)
  return _TiktokenTokenizer(spec, content, PATTERN)


def read_tokenizer_file(spec: str) -> bytes:
  """Returns the content of a tokenizer's file.

  Args:
    spec: A path, local or on gs:// or hf://.

  Raises:
    OSError: if the file cannot be read.
    UserError: if the Hub cannot be reached, refuses access, or has no such
      file.
  """
  if is_on_hub(spec):
    from diffjax.data import hub

    return hub.read_tokenizer(spec)
  return epath.Path(spec).expanduser().read_bytes()


@functools.lru_cache(maxsize=4)
def load_once(spec: str) -> Tokenizer:
  """Returns `load_tokenizer(spec)`, loaded once per process.

  Worker processes are sent only the spec, and load the tokenizer themselves.
  """
  return load_tokenizer(spec)


class _ByteTokenizer(Tokenizer):
  """A tokenizer whose ids are UTF-8 bytes. The separator is 255."""

  spec = "bytes"
  fingerprint = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 256
  document_tokens = separated_by(_BYTE_SEPARATOR)

  def encode(self, text: str) -> list[int]:
    return list(text.encode("utf-8"))

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    return [self.encode(text) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    content = bytes(int(token) for token in ids if 0 <= token < _BYTE_SEPARATOR)
    return content.decode("utf-8", errors="replace")

  def token_bytes(self) -> Int32[np.ndarray, "N"]:
    num_bytes = np.ones(self.vocab_size, np.int32)
    num_bytes[_BYTE_SEPARATOR] = 0
    return num_bytes

  def tokenizer_json(self) -> str:
    ranks = {bytes([byte]): byte for byte in range(_BYTE_SEPARATOR)}
    return tokenizer_json(ranks, PATTERN, {SEPARATOR: _BYTE_SEPARATOR})


class _TiktokenTokenizer(Tokenizer):
  """A byte-level BPE from a *.tiktoken file, run by tiktoken.

  Such a file holds the ranks of the tokens: their ids, in the order of merging.
  """

  def __init__(
    self,
    spec: str,
    content: bytes,
    pattern: str,
    special_tokens: Mapping[str, int] | None = None,
  ):
    """Parses the file.

    Args:
      spec: Where it was read.
      content: Its content.
      pattern: The regular expression that splits a text before merging.
      special_tokens: The control tokens and their ids, SEPARATOR included. None
        for SEPARATOR alone, with the id after the last rank.

    Raises:
      UserError: if the content is not a complete tiktoken file.
    """
    import tiktoken

    self._ranks = _parse_ranks(spec, content)
    self._pattern = pattern
    if special_tokens is None:
      special_tokens = {SEPARATOR: len(self._ranks)}
    self._special_tokens = dict(special_tokens)
    self._encoding = tiktoken.Encoding(
      "diffjax",
      pat_str=pattern,
      mergeable_ranks=self._ranks,
      special_tokens=self._special_tokens,
    )

    self.spec = spec
    # The ids of special tokens may have gaps.
    self.vocab_size = max(special_tokens.values()) + 1
    self.document_tokens = separated_by(special_tokens[SEPARATOR])
    special_tokens_json = json.dumps(self._special_tokens, sort_keys=True)
    fingerprint = hashlib.sha256(content)
    fingerprint.update(pattern.encode())
    fingerprint.update(special_tokens_json.encode())
    self.fingerprint = fingerprint.hexdigest()

  def encode(self, text: str) -> list[int]:
    return self._encoding.encode_ordinary(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    num_threads = os.cpu_count() or 1
    return self._encoding.encode_ordinary_batch(
      list(texts), num_threads=num_threads
    )

  def decode(self, ids: Iterable[int]) -> str:
    # The ids from `num_ranks` on are control tokens.
    num_ranks = len(self._ranks)
    text_ids = [int(token) for token in ids if 0 <= token < num_ranks]
    content = self._encoding.decode_bytes(text_ids)
    return content.decode("utf-8", errors="replace")

  def token_bytes(self) -> Int32[np.ndarray, "N"]:
    # Control tokens have 0 bytes.
    num_bytes = np.zeros(self.vocab_size, np.int32)
    for token, rank in self._ranks.items():
      num_bytes[rank] = len(token)
    return num_bytes

  def tokenizer_json(self) -> str:
    pattern = self._pattern
    if pattern == CL100K_PATTERN:
      # Hugging Face needs another form of this pattern.
      pattern = _CL100K_JSON_PATTERN
    return tokenizer_json(self._ranks, pattern, self._special_tokens)


def _parse_ranks(spec: str, content: bytes) -> dict[bytes, int]:
  """Returns the tokens of a tiktoken file and their ids.

  A line is a token in base64 and its rank, such as b"aGVsbG8= 15339".

  Args:
    spec: Where the file was read, for the message of the error.
    content: The file.

  Raises:
    UserError: if the file is damaged or incomplete.
  """
  ranks = {}
  try:
    for line in content.splitlines():
      token, rank = line.split()
      ranks[base64.b64decode(token, validate=True)] = int(rank)
    _check_ranks(ranks)
  except ValueError as error:
    raise UserError(
      f"config.data.tokenizer = {spec!r}: not a complete tiktoken file, lines"
      f" of BASE64 RANK that include the 256 bytes ({error})"
    ) from error
  return ranks


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
  """Raises ValueError unless the ranks are 0, 1, … and include all bytes."""
  if sorted(ranks.values()) != list(range(len(ranks))):
    raise ValueError("its ranks have gaps")
  for byte in range(256):
    if bytes([byte]) not in ranks:
      raise ValueError(f"it lacks the byte {byte}")


def _load_tokenizer_json(spec: str, content: bytes) -> Tokenizer:
  """Returns the tokenizer of a tokenizer.json.

  The tokens around a document are those in ``document_tokens.json`` beside it.
  Without that file, they are the separator of the tokenizer.json.
  """
  if is_on_hub(spec):
    # Only `diffjax.convert` writes document tokens, and never to the Hub.
    tokens = None
  else:
    tokens = document_tokens.read(epath.Path(spec).expanduser().parent)
  return HuggingFaceTokenizer(spec, content, tokens)


def _make_cl100k(spec: str, content: bytes) -> Tokenizer:
  """Returns cl100k_base, given the content of its file."""
  return _TiktokenTokenizer(spec, content, CL100K_PATTERN, CL100K_SPECIAL)


def _load_cl100k() -> Tokenizer:
  """Returns cl100k_base, whose file tiktoken downloads, caches and verifies."""
  import tiktoken.load

  try:
    content = tiktoken.load.read_file_cached(CL100K_URL, CL100K_SHA256)
  # tiktoken downloads with requests, whose errors are OSErrors.
  except (OSError, ValueError) as error:
    raise UserError(
      "config.data.tokenizer = 'cl100k_base': cannot get its file from"
      f" {CL100K_URL} ({reason(_root_cause(error))}): download it on another"
      f" machine and put it at {_cl100k_cache_path()} (TIKTOKEN_CACHE_DIR"
      " chooses another directory), or set --config.data.tokenizer=bytes or"
      " --config.data.tokenizer=DIR/tokenizer.json; data that need no network"
      f" either: {WITHOUT_NETWORK}"
    ) from error
  return _make_cl100k("cl100k_base", content)


def _cl100k_cache_path() -> str:
  """Returns the path at which tiktoken caches the file of cl100k_base.

  The rule is tiktoken's: the first of two variables that is set gives the
  directory, and the name is a hash of the URL.
  """
  directory = os.environ.get("TIKTOKEN_CACHE_DIR")
  if not directory:
    directory = os.environ.get("DATA_GYM_CACHE_DIR")
  if not directory:
    directory = os.path.join(tempfile.gettempdir(), "data-gym-cache")
  return os.path.join(directory, hashlib.sha1(CL100K_URL.encode()).hexdigest())


def _root_cause(error: BaseException) -> BaseException:
  """Returns the first error of a chain, which caused the others.

  Network errors of `requests` are chains of errors. Their later messages
  contain the first one, among much else.
  """
  while error.__context__ is not None:
    error = error.__context__
  return error
