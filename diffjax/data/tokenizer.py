"""Text to token ids and back.

A tokenizer is UTF-8 bytes, a tiktoken file, a Hugging Face tokenizer.json, or
cl100k_base.

Control tokens stand before and after every document (document_tokens.py). For
models that are trained here, both are one separator. A control token that is
spelled out in a text is text.
"""

import base64
import binascii
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence

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

# The pattern of GPT-4-style tokenizers, in a form that has the same meaning in tiktoken, rustbpe and Hugging Face tokenizers. That of
# cl100k's possessive quantifiers differs.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# The description of cl100k_base, which is frozen. tiktoken's registry gives no access to the file's bytes, which the fingerprint needs.
_CL100K_URL = (
  "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
)
_CL100K_SHA256 = (
  "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
)
_CL100K_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
# The same for Hugging Face tokenizers, whose Oniguruma reads {1,3}+ as a repetition and $ as the end of any line. Possessive quantifiers
# are not needed: what they could give back never matches what comes next.
_CL100K_JSON_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
_CL100K_SPECIAL = {
  SEPARATOR: 100257,
  "<|fim_prefix|>": 100258,
  "<|fim_middle|>": 100259,
  "<|fim_suffix|>": 100260,
  "<|endofprompt|>": 100276,
}


def load_tokenizer(spec: str) -> Tokenizer:
  """Loads a tokenizer.

  Args:
    spec: "bytes", "cl100k_base" (downloaded once), or the path (gs:// and hf:// too) of a ``*.tiktoken`` file or of a Hugging Face
      ``tokenizer.json``.

  Returns:
    The tokenizer.

  Raises:
    UserError: if the file is missing, damaged or cannot be downloaded, or the spec is none of these. Names what would work.
  """
  if spec == "bytes":
    return _ByteTokenizer()
  if spec == "cl100k_base":
    return _load_cl100k()
  if not spec.endswith((".tiktoken", ".json")):
    raise UserError(
      f"config.data.tokenizer = {spec!r}: must be 'bytes', 'cl100k_base', or the path of a *.tiktoken file or of a "
      "Hugging Face tokenizer.json (python -m diffjax.prepare --train_tokenizer=DIR writes both)"
    )
  try:
    content = read_tokenizer_file(spec)
  except OSError as error:
    raise UserError(
      f"config.data.tokenizer = {spec!r}: cannot read this file ({error.strerror or error}); "
      "python -m diffjax.prepare --train_tokenizer=DIR trains one"
    ) from error
  if spec.endswith(".json"):
    return _load_tokenizer_json(spec, content)
  if hashlib.sha256(content).hexdigest() == _CL100K_SHA256:
    return _TiktokenTokenizer(spec, content, _CL100K_PATTERN, _CL100K_SPECIAL)
  return _TiktokenTokenizer(spec, content, PATTERN, None)


def _load_tokenizer_json(spec: str, content: bytes) -> Tokenizer:
  tokens = None
  if not is_on_hub(spec):  # `diffjax.convert` does not write there.
    tokens = document_tokens.read(epath.Path(spec).expanduser().parent)
  return HuggingFaceTokenizer(spec, content, tokens)


def read_tokenizer_file(spec: str) -> bytes:
  """Returns the content of a tokenizer's file.

  Args:
    spec: A path, local or on gs:// or hf://.

  Raises:
    OSError: if the file cannot be read.
    UserError: if the Hub cannot be reached or refuses, or has no such file.
  """
  if is_on_hub(spec):
    from diffjax.data import hub

    return hub.read_tokenizer(spec)
  return epath.Path(spec).expanduser().read_bytes()


@functools.lru_cache(maxsize=4)
def load_once(spec: str) -> Tokenizer:
  """`load_tokenizer`, once a process, so that worker processes are sent a spec and not a vocabulary."""
  return load_tokenizer(spec)


class _ByteTokenizer(Tokenizer):
  """The tokenizer whose ids are UTF-8 bytes. The separator is 255, a byte that UTF-8 never uses."""

  spec = "bytes"
  fingerprint = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 256
  document_tokens = separated_by(255)

  def encode(self, text: str) -> Int32[np.ndarray, "T"]:
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

  def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "T"]]:
    return [self.encode(text) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(
      int(token) for token in ids if 0 <= token < self.separator
    ).decode("utf-8", errors="replace")

  def token_bytes(self) -> Int32[np.ndarray, "N"]:
    return (np.arange(self.vocab_size) != self.separator).astype(np.int32)

  def tokenizer_json(self) -> str:
    return tokenizer_json(
      {bytes([byte]): byte for byte in range(self.separator)},
      PATTERN,
      {SEPARATOR: self.separator},
    )


class _TiktokenTokenizer(Tokenizer):
  """A byte-level BPE, run by tiktoken."""

  def __init__(
    self,
    spec: str,
    content: bytes,
    pattern: str,
    special_tokens: dict[str, int] | None,
  ):
    import tiktoken

    try:
      self._ranks = {}
      for line in content.splitlines():
        token, rank = line.split()
        self._ranks[base64.b64decode(token, validate=True)] = int(rank)
      if sorted(self._ranks.values()) != list(
        range(len(self._ranks))
      ) or not all(bytes([byte]) in self._ranks for byte in range(256)):
        raise ValueError("its ranks have gaps or lack a byte")
    except (ValueError, binascii.Error) as error:
      raise UserError(
        f"config.data.tokenizer = {spec!r}: not a complete tiktoken file, lines of BASE64 RANK that start with the 256 bytes ({error})"
      ) from error
    special_tokens = special_tokens or {SEPARATOR: len(self._ranks)}
    self._special_tokens, self._pattern = special_tokens, pattern
    self.spec = spec
    self.fingerprint = hashlib.sha256(
      content
      + pattern.encode()
      + json.dumps(special_tokens, sort_keys=True).encode()
    ).hexdigest()
    self.vocab_size = max(special_tokens.values()) + 1
    self.document_tokens = separated_by(special_tokens[SEPARATOR])
    self._encoding = tiktoken.Encoding(
      "diffjax",
      pat_str=pattern,
      mergeable_ranks=self._ranks,
      special_tokens=special_tokens,
    )

  def encode(self, text: str) -> list[int]:
    return self._encoding.encode_ordinary(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    return self._encoding.encode_ordinary_batch(
      list(texts), num_threads=os.cpu_count() or 1
    )

  def decode(self, ids: Iterable[int]) -> str:
    ordinary = [int(token) for token in ids if 0 <= token < len(self._ranks)]
    return self._encoding.decode_bytes(ordinary).decode(
      "utf-8", errors="replace"
    )

  def token_bytes(self) -> Int32[np.ndarray, "N"]:
    lengths = np.zeros(self.vocab_size, np.int32)
    for token, rank in self._ranks.items():
      lengths[rank] = len(token)
    return lengths

  def tokenizer_json(self) -> str:
    pattern = (
      _CL100K_JSON_PATTERN
      if self._pattern == _CL100K_PATTERN
      else self._pattern
    )
    return tokenizer_json(self._ranks, pattern, self._special_tokens)


def _load_cl100k() -> Tokenizer:
  """Loads cl100k_base. tiktoken downloads, caches and verifies its file."""
  import tiktoken.load

  try:
    content = tiktoken.load.read_file_cached(_CL100K_URL, _CL100K_SHA256)
  except (OSError, ValueError) as error:  # those of requests are OSErrors
    raise UserError(
      "config.data.tokenizer = 'cl100k_base': cannot get its file from"
      f" {_CL100K_URL} ({reason(_root_cause(error))}): download it on another"
      f" machine and put it at {_cl100k_cache_path()} (TIKTOKEN_CACHE_DIR"
      " chooses another directory), or set --config.data.tokenizer=bytes or"
      " --config.data.tokenizer=DIR/tokenizer.json; data that need no network"
      f" either: {WITHOUT_NETWORK}"
    ) from error
  return _TiktokenTokenizer(
    "cl100k_base", content, _CL100K_PATTERN, _CL100K_SPECIAL
  )


def _cl100k_cache_path() -> str:
  """Returns where tiktoken looks for the file: its name is a hash of the URL."""
  directory = os.environ.get("TIKTOKEN_CACHE_DIR")
  directory = directory or os.environ.get("DATA_GYM_CACHE_DIR")
  directory = directory or os.path.join(tempfile.gettempdir(), "data-gym-cache")
  return os.path.join(directory, hashlib.sha1(_CL100K_URL.encode()).hexdigest())


def _root_cause(error: BaseException) -> BaseException:
  """Returns the first error of a chain: those of requests repeat it at length."""
  while error.__context__ is not None:
    error = error.__context__
  return error
