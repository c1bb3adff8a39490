"""Tokenizers give back each text, and count its bytes.

A tokenizer has the same ids in all file formats.
"""

import base64
import hashlib
import json
import os
import pathlib
import random
from collections.abc import Iterator
from typing import NamedTuple

import chex
import numpy as np
import pytest
import rustbpe
import tokenizers
from tiktoken_ext import openai_public

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data import tokenizer, tokenizer_training
from diffjax.data.pipeline import check_vocabulary
from tests.harness import hub_server

UNUSUAL_TEXTS = [
  "",
  " ",
  "\n",
  "  \n\t",
  "\r\n\r\n  x",
  "a" * 999,
  " '" * 30,
  "😀👩‍👩‍👧 é e\u0301 中文 العربية ſ İ",
  "1234567890 3.14",
  "it's IT'S I'LL we'd",
  "<|endoftext|> in a text",
  "\u00a0\u2003 x\u200d",
  "\x00\x01\x7f",
  "def f(x):\n    return  x  # note\n\n\n",
  "\ufeffBOM",
  "�",
]


class TokenizerFiles(NamedTuple):
  """The paths of the files of one BPE, in both formats."""

  tiktoken: str
  json: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> TokenizerFiles:
  """Trains a BPE of 300 tokens."""
  rng = random.Random(0)
  words = ["self", "return", "  ", "\n", "αβγ", "😀", "12345", "it's", "."]
  words += ["aaaa", "def foo(x):"]
  documents = []
  for text in UNUSUAL_TEXTS:
    for _ in range(20):
      random_words = "".join(rng.choices(words, k=50))
      documents.append(random_words + text)
  directory = tmp_path_factory.mktemp("tokenizer")
  path = tokenizer_training.train_tokenizer(documents, 300, directory)
  return TokenizerFiles(str(path), str(path.parent / "tokenizer.json"))


def spec_of(kind, trained) -> str:
  """Returns config.data.tokenizer of a kind of tokenizer."""
  if kind == "bytes":
    return "bytes"
  return getattr(trained, kind)


@pytest.fixture(params=["bytes", "tiktoken", "json"])
def any_tokenizer(request, trained) -> tokenizer.Tokenizer:
  """Returns a tokenizer of each kind."""
  return tokenizer.load_tokenizer(spec_of(request.param, trained))


def random_texts(seed, alphabet, count, max_length) -> list[str]:
  """Returns texts of random pieces."""
  rng = random.Random(seed)
  texts = []
  for _ in range(count):
    length = rng.randrange(max_length)
    texts.append("".join(rng.choices(alphabet, k=length)))
  return texts


@pytest.mark.parametrize("text", UNUSUAL_TEXTS)
def test_decoded_ids_are_the_encoded_text(any_tokenizer, text):
  """The separator, which is between documents, is no part of a text."""
  separator = any_tokenizer.separator

  ids = any_tokenizer.encode(text)

  assert separator not in ids
  assert all(0 <= token < any_tokenizer.vocab_size for token in ids)
  assert any_tokenizer.decode(ids) == text
  assert any_tokenizer.decode([separator, *ids, separator]) == text


def test_a_batch_is_encoded_like_its_texts(any_tokenizer):
  batch_ids = any_tokenizer.encode_batch(UNUSUAL_TEXTS)

  expected = [any_tokenizer.encode(text) for text in UNUSUAL_TEXTS]
  assert batch_ids == expected


def test_ids_are_a_list_of_ints(any_tokenizer):
  """Callers join ids with +, and write them as JSON."""
  text_ids = any_tokenizer.encode("a é")
  (batch_ids,) = any_tokenizer.encode_batch(["a é"])
  prompt_ids = any_tokenizer.encode_prompt("a é")

  for ids in (text_ids, batch_ids, prompt_ids):
    assert type(ids) is list
    for token in ids:
      assert type(token) is int


def test_each_token_has_a_number_of_bytes(any_tokenizer):
  num_bytes = any_tokenizer.token_bytes()

  chex.assert_shape(num_bytes, (any_tokenizer.vocab_size,))
  assert num_bytes.dtype == np.int32
  # The separator is no text.
  assert num_bytes[any_tokenizer.separator] == 0


def test_the_bytes_of_the_tokens_add_up_to_the_text(any_tokenizer):
  bytes_of_token = any_tokenizer.token_bytes()

  for text in UNUSUAL_TEXTS:
    ids = any_tokenizer.encode(text)
    num_bytes = sum(bytes_of_token[token] for token in ids)
    assert num_bytes == len(text.encode())


def test_half_a_character_is_decoded_to_a_replacement(any_tokenizer):
  """A model can generate the first byte of a character without the others.

  U+FFFD is the replacement character.
  """
  # The first token whose bytes are not a whole character.
  incomplete_token = next(
    token
    for token in range(any_tokenizer.vocab_size)
    if any_tokenizer.decode([token]) == "\ufffd"
  )

  text = any_tokenizer.decode([incomplete_token, *any_tokenizer.encode("é")])

  assert text == "\ufffdé"


def test_ids_outside_the_vocabulary_are_not_decoded(any_tokenizer):
  """A model can have more tokens than its tokenizer."""
  unknown_ids = [any_tokenizer.vocab_size, 10**6]
  ids = [*any_tokenizer.encode("é"), *unknown_ids]

  assert any_tokenizer.decode(ids) == "é"


def test_both_formats_give_the_same_ids(trained):
  """Training writes a BPE as tokenizer.tiktoken and as tokenizer.json."""
  from_tiktoken = tokenizer.load_tokenizer(trained.tiktoken)
  from_json = tokenizer.load_tokenizer(trained.json)
  characters = list("a  \n\t1'.é😀_中(\r\u200d")
  words = ["aa", "self", "it's", "123", "def "]
  texts = UNUSUAL_TEXTS + random_texts(
    seed=1, alphabet=characters + words, count=2000, max_length=80
  )

  ids_from_tiktoken = [from_tiktoken.encode(text) for text in texts]
  ids_from_json = [from_json.encode(text) for text in texts]

  assert ids_from_json == ids_from_tiktoken
  # Many tokens have several bytes.
  num_ids = sum(len(ids) for ids in ids_from_json)
  num_bytes = sum(len(text.encode()) for text in texts)
  assert num_ids < 0.9 * num_bytes


def test_both_formats_give_the_same_vocabulary(trained):
  """Training writes a BPE as tokenizer.tiktoken and as tokenizer.json."""
  from_tiktoken = tokenizer.load_tokenizer(trained.tiktoken)
  from_json = tokenizer.load_tokenizer(trained.json)

  # The fixture trained 300 tokens. The last one is the separator.
  assert from_tiktoken.vocab_size == 300
  assert from_json.vocab_size == 300
  assert from_tiktoken.separator == 299
  assert from_json.separator == 299
  chex.assert_trees_all_equal(
    from_json.token_bytes(), from_tiktoken.token_bytes()
  )


def train_with_cl100k_pattern() -> bytes:
  """Returns the tiktoken file of a BPE with the pattern of cl100k_base.

  The pattern does not split white space at the end of a text.
  """
  rng = random.Random(2)
  pieces = ["  ", "\n", "\t", " a", "it's", "12"]
  documents = []
  for _ in range(2000):
    num_pieces = rng.randrange(2, 8)
    documents.append("x" + "".join(rng.choices(pieces, k=num_pieces)))
  trainer = rustbpe.Tokenizer()
  trainer.train_from_iterator(
    iter(documents), 600, pattern=tokenizer.CL100K_PATTERN
  )
  ranks = trainer.get_mergeable_ranks()
  ranks.sort(key=lambda token_and_rank: token_and_rank[1])
  lines = []
  for token, rank in ranks:
    lines.append(base64.b64encode(bytes(token)) + b" %d\n" % rank)
  return b"".join(lines)


def use_as_cl100k(content, monkeypatch):
  """Makes the content of a file count as cl100k_base."""
  digest = hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(tokenizer, "CL100K_SHA256", digest)


def check_tokenizer_json(original, tmp_path):
  """Checks that a tokenizer is the same after a conversion to JSON."""
  path = tmp_path / "tokenizer.json"
  path.write_text(original.tokenizer_json())
  copy = tokenizer.load_tokenizer(str(path))

  assert copy.vocab_size == original.vocab_size
  assert copy.separator == original.separator
  chex.assert_trees_all_equal(copy.token_bytes(), original.token_bytes())
  characters = list("a  \n\t1'.é😀_中(\r\x85\u2028")
  words = ["it's", "'S", "'ſ", "123", "\n\n ", "  \n", "<|endoftext|>"]
  texts = UNUSUAL_TEXTS + random_texts(
    seed=3, alphabet=characters + words, count=2000, max_length=30
  )
  for text in texts:
    ids = original.encode(text)
    assert copy.encode(text) == ids, repr(text)
    assert original.decode(ids) == text
    assert copy.decode(ids) == text


def test_a_tokenizer_can_be_converted_to_json(any_tokenizer, tmp_path):
  check_tokenizer_json(any_tokenizer, tmp_path)


def test_cl100k_can_be_converted_to_json(tmp_path, monkeypatch):
  """A small tokenizer with the pattern of cl100k_base stands in for it."""
  content = train_with_cl100k_pattern()
  use_as_cl100k(content, monkeypatch)
  path = tmp_path / "x.tiktoken"
  path.write_bytes(content)
  original = tokenizer.load_tokenizer(str(path))

  check_tokenizer_json(original, tmp_path)


def test_tokenizers_have_different_fingerprints(trained, tmp_path):
  """A fingerprint tells whether rows were made with the same tokenizer."""
  other = tokenizer_training.train_tokenizer(
    ["abcabcabc abc abd abd"] * 9, vocab_size=260, directory=tmp_path
  )

  fingerprints = set()
  for spec in ("bytes", trained.tiktoken, trained.json, str(other)):
    fingerprint = tokenizer.load_tokenizer(spec).fingerprint
    # A second load gives the same fingerprint.
    assert tokenizer.load_tokenizer(spec).fingerprint == fingerprint
    fingerprints.add(fingerprint)

  assert len(fingerprints) == 4


# Checkpoints and prepared rows hold fingerprints of earlier versions.


def test_the_fingerprint_of_bytes_is_that_of_earlier_versions():
  """Rows that were prepared long ago hold this fingerprint."""
  loaded = tokenizer.load_tokenizer("bytes")

  assert loaded.fingerprint == (
    "277089d91c0bdf4f2e6862ba7e4a07605119431f5d13f726dd352b06f1b206a9"
  )


def test_the_fingerprint_of_a_bpe_is_that_of_earlier_versions(tmp_path):
  """Rows that were prepared long ago hold such fingerprints."""
  # In this file without merges, each byte is a token, and its id is its value.
  path = tmp_path / "tokenizer.tiktoken"
  lines = []
  for byte in range(256):
    lines.append(base64.b64encode(bytes([byte])) + b" %d\n" % byte)
  path.write_bytes(b"".join(lines))

  loaded = tokenizer.load_tokenizer(str(path))

  assert loaded.fingerprint == (
    "8f34d2f1d27563fbb2b9e147b939425f837e7713ea3a03d3f90bb24729f03dd0"
  )


def test_the_fingerprint_of_a_tokenizer_json_is_the_digest_of_its_text(
  tmp_path,
):
  # The text depends on the version of `tokenizers`, so it is not written here.
  text = tokenizer.load_tokenizer("bytes").tokenizer_json()
  path = tmp_path / "tokenizer.json"
  path.write_text(text)

  loaded = tokenizer.load_tokenizer(str(path))

  digest = hashlib.sha256(text.encode()).hexdigest()
  assert loaded.fingerprint == digest


def save_sentencepiece_like(path) -> str:
  """Writes a tokenizer.json with SentencePiece's conventions.

  It writes "▁" for a space and <0xE9> for a byte, has </s> between documents,
  and is not byte-level. It is saved with truncation and padding to 4 tokens.

  Returns:
    The path of the file.
  """
  vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
  for byte in range(256):
    vocabulary[f"<0x{byte:02X}>"] = 3 + byte
  vocabulary.update({"▁": 259, "a": 260, "▁a": 261})
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
  )
  backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
  backend.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("▁", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  backend.add_special_tokens(["<unk>", "<s>", "</s>"])
  backend.enable_truncation(4)
  backend.enable_padding(length=4)
  backend.save(str(path))
  return str(path)


def test_the_ids_of_a_sentencepiece_tokenizer_are_used(tmp_path):
  """Many published models have such a tokenizer.json.

  A token "▁a" is " a", and <0xC3> is a byte.
  """
  path = save_sentencepiece_like(tmp_path / "tokenizer.json")
  backend = tokenizers.Tokenizer.from_file(path)

  loaded = tokenizer.load_tokenizer(path)
  ids = loaded.encode("a a é")

  tokens = [backend.id_to_token(index) for index in ids]
  assert tokens == ["a", "▁a", "▁", "<0xC3>", "<0xA9>"]
  assert loaded.decode(ids) == "a a é"


def test_the_bytes_of_a_sentencepiece_tokenizer_are_counted(tmp_path):
  path = save_sentencepiece_like(tmp_path / "tokenizer.json")

  loaded = tokenizer.load_tokenizer(path)

  bytes_of_token = loaded.token_bytes()
  # The tokens are "a", " a", " ", and the two bytes of "é".
  ids = loaded.encode("a a é")
  assert bytes_of_token[ids].tolist() == [1, 2, 1, 1, 1]
  # The ids of the control tokens <unk>, <s> and </s>, which are no text.
  control_ids = [0, 1, 2]
  assert bytes_of_token[control_ids].tolist() == [0, 0, 0]


def test_the_separator_of_a_sentencepiece_tokenizer_ends_a_document(tmp_path):
  path = save_sentencepiece_like(tmp_path / "tokenizer.json")
  backend = tokenizers.Tokenizer.from_file(path)

  loaded = tokenizer.load_tokenizer(path)

  assert loaded.separator == backend.token_to_id("</s>")
  assert loaded.vocab_size == backend.get_vocab_size()


def test_the_truncation_and_the_padding_of_a_file_are_not_used(tmp_path):
  """The file asks for 4 tokens, but a document has as many as it needs."""
  spec = save_sentencepiece_like(tmp_path / "tokenizer.json")

  loaded = tokenizer.load_tokenizer(spec)

  # The tokens are "a", " a", " ", and the two bytes of "é".
  long_ids = loaded.encode("a a é")
  assert len(long_ids) == 5
  # The id of "a" is 260.
  short_ids = loaded.encode("a")
  assert short_ids == [260]


@pytest.mark.parametrize(
  ("vocab_size", "message"), [(257, "at least 258"), (5000, "only yield")]
)
def test_training_refuses_impossible_sizes(tmp_path, vocab_size, message):
  """257 ids are 256 bytes and a separator, which leave no merge.

  The text "text" has too few pairs of letters for 5000 ids.
  """
  with pytest.raises(UserError, match=message):
    tokenizer_training.train_tokenizer(["text"], vocab_size, tmp_path)


# cl100k_base, whose file is downloaded. A small BPE stands in for it.


@pytest.fixture
def cl100k_server(
  tmp_path, monkeypatch, trained
) -> Iterator[hub_server.HubServer]:
  """Serves a stand-in for cl100k_base to tiktoken, whose cache is empty."""
  folder = tmp_path / "hub" / "models" / "org" / "name"
  folder.mkdir(parents=True)
  content = pathlib.Path(trained.tiktoken).read_bytes()
  (folder / "cl100k_base.tiktoken").write_bytes(content)
  use_as_cl100k(content, monkeypatch)
  with hub_server.HubServer(tmp_path / "hub") as server:
    url = f"{server.url}/org/name/resolve/main/cl100k_base.tiktoken"
    monkeypatch.setattr(tokenizer, "CL100K_URL", url)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    yield server


def test_cl100k_is_downloaded_once(cl100k_server):
  """The second time, the file is read from the cache."""
  first = tokenizer.load_tokenizer("cl100k_base")
  second = tokenizer.load_tokenizer("cl100k_base")

  # The published sizes of cl100k_base.
  for loaded in (first, second):
    assert loaded.vocab_size == 100_277
    assert loaded.separator == 100_257
  assert len(cl100k_server.requests) == 1


@pytest.mark.usefixtures("cl100k_server")
def test_a_damaged_download_of_cl100k_is_replaced(tmp_path):
  """An interrupted download leaves half a file in the cache.

  The fixture makes `tmp_path / "cache"` the cache of tiktoken.
  """
  tokenizer.load_tokenizer("cl100k_base")
  (path,) = (tmp_path / "cache").iterdir()
  content = path.read_bytes()
  path.write_bytes(b"half a file")

  tokenizer.load_tokenizer("cl100k_base")

  assert path.read_bytes() == content


def load_cl100k_with_error() -> str:
  """Returns the error of a download, and checks that it names alternatives."""
  with pytest.raises(UserError) as caught:
    tokenizer.load_tokenizer("cl100k_base")
  message = str(caught.value)
  assert "\n" not in message
  name = hashlib.sha1(tokenizer.CL100K_URL.encode()).hexdigest()
  path = os.path.join(os.environ["TIKTOKEN_CACHE_DIR"], name)
  for part in (
    f"cannot get its file from {tokenizer.CL100K_URL}",
    f"put it at {path}",
    "TIKTOKEN_CACHE_DIR",
    "--config.data.tokenizer=bytes",
    "--config.data.tokenizer=DIR/tokenizer.json",
    "--config=configs/tiny.py",
  ):
    assert part in message
  return message


def test_cl100k_without_a_network_is_an_error(cl100k_server):
  # From now on, the server refuses connections.
  cl100k_server.close()

  message = load_cl100k_with_error()

  assert "Connection refused" in message


def test_cl100k_that_the_server_refuses_is_an_error(cl100k_server):
  cl100k_server.fail(times=1, status=503)

  message = load_cl100k_with_error()

  assert "503 Server Error" in message


@pytest.mark.usefixtures("cl100k_server")
def test_another_file_than_cl100k_is_an_error(monkeypatch):
  """The hash of the downloaded file differs from the published one."""
  monkeypatch.setattr(tokenizer, "CL100K_SHA256", "0" * 64)

  message = load_cl100k_with_error()

  assert "Hash mismatch" in message


@pytest.mark.usefixtures("cl100k_server")
def test_cl100k_that_cannot_be_stored_is_an_error(tmp_path):
  """A file is in the place of the cache directory."""
  (tmp_path / "cache").write_text("not a directory")

  message = load_cl100k_with_error()

  assert "File exists" in message


def test_the_constants_of_cl100k_are_as_in_tiktoken(monkeypatch):
  """diffjax has its own copies of the constants of tiktoken."""
  download = {}

  def record_download(url, expected_hash):
    download["url"] = url
    download["expected_hash"] = expected_hash

  # `cl100k_base` downloads a file with this function.
  monkeypatch.setattr(openai_public, "load_tiktoken_bpe", record_download)

  encoding = openai_public.cl100k_base()

  assert tokenizer.CL100K_URL == download["url"]
  assert tokenizer.CL100K_SHA256 == download["expected_hash"]
  assert tokenizer.CL100K_PATTERN == encoding["pat_str"]
  assert tokenizer.CL100K_SPECIAL == encoding["special_tokens"]


def test_cl100k_is_read_from_tiktokens_cache(tmp_path, monkeypatch, trained):
  """A machine without a network can have the file there."""
  # A small file counts as the file of cl100k_base if it has its hash.
  content = pathlib.Path(trained.tiktoken).read_bytes()
  digest = hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(tokenizer, "CL100K_SHA256", digest)
  # tiktoken names files by the SHA-1 of their URL.
  name = hashlib.sha1(tokenizer.CL100K_URL.encode()).hexdigest()
  (tmp_path / name).write_bytes(content)
  monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))

  loaded = tokenizer.load_tokenizer("cl100k_base")

  # The published id of <|endoftext|>, which does not depend on the file.
  assert loaded.separator == 100_257
  text = "it's <|endoftext|>"
  assert loaded.decode(loaded.encode(text)) == text


def test_the_file_of_cl100k_at_another_path_is_cl100k(monkeypatch, trained):
  """The file is recognized by its hash. A small one stands in for it."""
  use_as_cl100k(pathlib.Path(trained.tiktoken).read_bytes(), monkeypatch)

  loaded = tokenizer.load_tokenizer(trained.tiktoken)

  # The published id of <|endoftext|> in cl100k_base.
  assert loaded.separator == 100_257


# Bad files and vocabularies.


@pytest.mark.parametrize("name", ["missing.tiktoken", "missing.json"])
def test_a_missing_file_is_named(tmp_path, name):
  with pytest.raises(UserError, match=f"{name}.*cannot read"):
    tokenizer.load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("bad.tiktoken", "not base64 at all\n", "not a complete tiktoken file"),
    # Only two of the 256 bytes.
    ("cut.tiktoken", "YQ== 0\nYg== 1\n", "not a complete tiktoken file"),
    ("bad.json", "{", "not a Hugging Face tokenizer.json"),
    ("other.json", "{}", "not a Hugging Face tokenizer.json"),
    ("model.vocab", "x", "must be 'bytes', 'cl100k_base'"),
  ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
  """The error says which format was expected."""
  path = tmp_path / name
  path.write_text(content)

  with pytest.raises(UserError, match=f"{name}.*{message}"):
    tokenizer.load_tokenizer(str(path))


def test_a_tokenizer_without_separator_is_refused(tmp_path, trained):
  """The separator is one of the added tokens of tokenizer.json."""
  description = json.loads(pathlib.Path(trained.json).read_text())
  description["added_tokens"] = []
  (tmp_path / "tokenizer.json").write_text(json.dumps(description))

  with pytest.raises(UserError, match="no separator for documents"):
    tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("vocab_size", [256, 511])
def test_the_model_can_have_up_to_255_unused_tokens(vocab_size):
  """The tokenizer has 256 tokens, and 256 + 255 = 511.

  `check_vocabulary` raises an error if the sizes do not fit.
  """
  config = Config(model=ModelConfig(vocab_size=vocab_size))

  check_vocabulary(config, tokenizer.load_tokenizer("bytes"))


@pytest.mark.parametrize("vocab_size", [255, 512])
def test_a_model_with_another_vocabulary_is_refused(vocab_size):
  """The tokenizer has 256 tokens. 255 are too few, and 256 + 256 too many."""
  config = Config(model=ModelConfig(vocab_size=vocab_size))

  message = f"config.model.vocab_size = {vocab_size}.*data.tokenizer.*256"
  with pytest.raises(UserError, match=message):
    check_vocabulary(config, tokenizer.load_tokenizer("bytes"))
