"""Tokenizers: round trips, byte counts, and two formats with equal ids."""

import base64
import hashlib
import json
import os
import pathlib
import random
from typing import NamedTuple

import numpy as np
import pytest
import rustbpe
import tokenizers

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data import tokenizer, tokenizer_training
from diffjax.data.pipeline import check_vocabulary
from tests.harness import hub_server

ODD = [
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


class Trained(NamedTuple):
  """The files of one BPE."""

  tiktoken: str
  json: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A BPE of 300 tokens."""
  rng = random.Random(0)
  words = [
    "self",
    "return",
    "  ",
    "\n",
    "αβγ",
    "😀",
    "12345",
    "it's",
    ".",
    "aaaa",
    "def foo(x):",
  ]
  documents = []
  for text in ODD:
    for _ in range(20):
      documents.append("".join(rng.choices(words, k=50)) + text)
  path = tokenizer_training.train_tokenizer(
    documents, 300, tmp_path_factory.mktemp("tokenizer")
  )
  return Trained(str(path), str(path.parent / "tokenizer.json"))


def spec_of(kind, trained):
  """Returns config.data.tokenizer of a kind of tokenizer."""
  if kind == "bytes":
    return "bytes"
  return getattr(trained, kind)


@pytest.fixture(params=["bytes", "tiktoken", "json"])
def any_tokenizer(request, trained):
  return tokenizer.load_tokenizer(spec_of(request.param, trained))


def random_texts(seed, alphabet, count, max_length):
  """Returns texts of random pieces."""
  rng = random.Random(seed)
  texts = []
  for _ in range(count):
    length = rng.randrange(max_length)
    texts.append("".join(rng.choices(alphabet, k=length)))
  return texts


def test_round_trip(any_tokenizer):
  separator = any_tokenizer.separator
  for text in ODD:
    ids = any_tokenizer.encode(text)
    assert separator not in ids
    assert all(0 <= token < any_tokenizer.vocab_size for token in ids)
    assert any_tokenizer.decode(ids) == text
    assert any_tokenizer.decode([separator, *ids, separator]) == text
  encoded = [any_tokenizer.encode(text) for text in ODD]
  assert any_tokenizer.encode_batch(ODD) == encoded


def test_ids_are_a_list_of_ints(any_tokenizer):
  """Callers join ids with +, and write them as JSON."""
  for ids in (
    any_tokenizer.encode("a é"),
    any_tokenizer.encode_batch(["a é"])[0],
    any_tokenizer.encode_prompt("a é"),
  ):
    assert type(ids) is list
    assert {type(token) for token in ids} == {int}


def test_token_bytes_add_up(any_tokenizer):
  lengths = any_tokenizer.token_bytes()
  assert lengths.shape == (any_tokenizer.vocab_size,)
  assert lengths.dtype == np.int32
  assert lengths[any_tokenizer.separator] == 0
  for text in ODD:
    num_bytes = sum(lengths[token] for token in any_tokenizer.encode(text))
    assert num_bytes == len(text.encode())


def test_decode_replaces_half_a_character_and_drops_what_is_no_token(
  any_tokenizer,
):
  ids = any_tokenizer.encode("é")
  halves = []
  for token in range(any_tokenizer.vocab_size):
    if any_tokenizer.decode([token]) == "�":
      halves.append(token)
  # Every byte-level vocabulary has tokens that are half a character.
  assert halves
  unknown = [any_tokenizer.vocab_size, 10**6]
  assert any_tokenizer.decode([halves[0], *ids, *unknown]) == "�é"


def test_both_formats_give_the_same_ids(trained):
  from_tiktoken = tokenizer.load_tokenizer(trained.tiktoken)
  from_json = tokenizer.load_tokenizer(trained.json)
  assert from_tiktoken.vocab_size == from_json.vocab_size == 300
  assert from_tiktoken.separator == from_json.separator == 299
  np.testing.assert_array_equal(
    from_tiktoken.token_bytes(), from_json.token_bytes()
  )
  alphabet = [
    *"a  \n\t1'.é😀_中(\r",
    "aa",
    "self",
    "it's",
    "123",
    "\u200d",
    "def ",
  ]
  num_merged = 0
  for text in ODD + random_texts(1, alphabet, 2000, 80):
    ids = from_tiktoken.encode(text)
    assert ids == from_json.encode(text), repr(text)
    if len(ids) < len(text.encode()):
      num_merged += 1
  # Otherwise the test would compare bytes.
  assert num_merged > 1000


def write_cl100k_stand_in(monkeypatch, path):
  """Writes a BPE that counts as cl100k_base, and returns its path.

  It is trained with the pattern of cl100k_base, which does not split white
  space at the end of a text.
  """
  rng = random.Random(2)
  pieces = ["  ", "\n", "\t", " a", "it's", "12"]
  documents = []
  for _ in range(2000):
    documents.append("x" + "".join(rng.choices(pieces, k=rng.randrange(2, 8))))
  trainer = rustbpe.Tokenizer()
  trainer.train_from_iterator(
    iter(documents), 600, pattern=tokenizer._CL100K_PATTERN
  )
  lines = []
  for token, rank in sorted(
    trainer.get_mergeable_ranks(), key=lambda item: item[1]
  ):
    lines.append(base64.b64encode(bytes(token)) + b" %d\n" % rank)
  content = b"".join(lines)
  path.write_bytes(content)
  digest = hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(tokenizer, "CL100K_SHA256", digest)
  return str(path)


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "cl100k", "json"])
def test_tokenizer_json_gives_the_same_ids(
  kind, trained, tmp_path, monkeypatch
):
  if kind == "cl100k":
    spec = write_cl100k_stand_in(monkeypatch, tmp_path / "x.tiktoken")
  else:
    spec = spec_of(kind, trained)
  original = tokenizer.load_tokenizer(spec)
  (tmp_path / "tokenizer.json").write_text(original.tokenizer_json())
  copy = tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert copy.vocab_size == original.vocab_size
  assert copy.separator == original.separator
  np.testing.assert_array_equal(copy.token_bytes(), original.token_bytes())
  alphabet = [
    *"a  \n\t1'.é😀_中(\r\x85\u2028",
    "it's",
    "'S",
    "'ſ",
    "123",
    "\n\n ",
    "  \n",
    "<|endoftext|>",
  ]
  for text in ODD + random_texts(3, alphabet, 2000, 30):
    ids = original.encode(text)
    assert ids == copy.encode(text), repr(text)
    assert original.decode(ids) == text
    assert copy.decode(ids) == text


def test_fingerprints_tell_tokenizers_apart(trained, tmp_path):
  other = tokenizer_training.train_tokenizer(
    ["abcabcabc abc abd abd"] * 9, 260, tmp_path
  )
  fingerprints = set()
  for spec in ("bytes", trained.tiktoken, trained.json, str(other)):
    fingerprint = tokenizer.load_tokenizer(spec).fingerprint
    assert fingerprint == tokenizer.load_tokenizer(spec).fingerprint
    fingerprints.add(fingerprint)
  assert len(fingerprints) == 4


def test_fingerprints_of_earlier_versions(tmp_path):
  """Checkpoints and prepared rows hold them."""
  assert tokenizer.load_tokenizer("bytes").fingerprint == (
    "277089d91c0bdf4f2e6862ba7e4a07605119431f5d13f726dd352b06f1b206a9"
  )
  path = tmp_path / "tokenizer.tiktoken"
  lines = []
  for byte in range(256):
    lines.append(base64.b64encode(bytes([byte])) + b" %d\n" % byte)
  path.write_bytes(b"".join(lines))
  bpe = tokenizer.load_tokenizer(str(path))
  assert bpe.fingerprint == (
    "8f34d2f1d27563fbb2b9e147b939425f837e7713ea3a03d3f90bb24729f03dd0"
  )
  content = bpe.tokenizer_json()
  (tmp_path / "tokenizer.json").write_text(content)
  # The text of a tokenizer.json depends on the version of `tokenizers`.
  digest = hashlib.sha256(content.encode()).hexdigest()
  from_json = tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert from_json.fingerprint == digest


def save_sentencepiece_like(path):
  """Writes a tokenizer.json with SentencePiece's conventions.

  It writes "▁" for a space and <0xE9> for a byte, has </s> between documents,
  and is not byte-level. It is saved with truncation and padding to 4 tokens.
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


def test_any_hugging_face_file(tmp_path):
  """Documents are neither cut nor padded to the length in the file."""
  save_sentencepiece_like(tmp_path / "tokenizer.json")
  loaded = tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert loaded.separator == 2
  assert loaded.vocab_size == 262
  text = "a a é"
  ids = loaded.encode(text)
  assert ids == [260, 261, 259, 3 + 0xC3, 3 + 0xA9]
  assert loaded.decode(ids) == text
  assert loaded.encode("a") == [260]
  assert loaded.token_bytes()[ids].tolist() == [1, 2, 1, 1, 1]
  assert loaded.token_bytes()[:3].tolist() == [0, 0, 0]


def test_training_refuses_sizes_that_cannot_be(tmp_path):
  with pytest.raises(UserError, match="at least 258"):
    tokenizer_training.train_tokenizer(["text"], 257, tmp_path)
  with pytest.raises(UserError, match="only yield"):
    tokenizer_training.train_tokenizer(["text"], 5000, tmp_path)


@pytest.fixture
def cl100k_server(tmp_path, monkeypatch, trained):
  """Serves a stand-in for cl100k_base to tiktoken, whose cache is empty."""
  folder = tmp_path / "hub" / "models" / "org" / "name"
  folder.mkdir(parents=True)
  content = pathlib.Path(trained.tiktoken).read_bytes()
  (folder / "cl100k_base.tiktoken").write_bytes(content)
  digest = hashlib.sha256(content).hexdigest()
  with hub_server.HubServer(tmp_path / "hub") as server:
    url = f"{server.url}/org/name/resolve/main/cl100k_base.tiktoken"
    monkeypatch.setattr(tokenizer, "CL100K_URL", url)
    monkeypatch.setattr(tokenizer, "CL100K_SHA256", digest)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    yield server


def test_cl100k_is_downloaded_once(cl100k_server, tmp_path):
  for _ in range(2):
    loaded = tokenizer.load_tokenizer("cl100k_base")
    assert (loaded.vocab_size, loaded.separator) == (100277, 100257)
  assert len(cl100k_server.requests) == 1
  (path,) = (tmp_path / "cache").iterdir()
  content = path.read_bytes()
  path.write_bytes(b"half a file")
  tokenizer.load_tokenizer("cl100k_base")
  assert path.read_bytes() == content


def check_cl100k_message():
  """Returns the message that says how to do without the download."""
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


def test_cl100k_without_network(cl100k_server):
  cl100k_server.close()
  assert "Connection refused" in check_cl100k_message()


def test_cl100k_that_the_server_refuses(cl100k_server):
  cl100k_server.fail(1, status=503)
  assert "503 Server Error" in check_cl100k_message()


def test_cl100k_that_is_another_file(cl100k_server, monkeypatch):
  monkeypatch.setattr(tokenizer, "CL100K_SHA256", "0" * 64)
  assert "Hash mismatch" in check_cl100k_message()


def test_cl100k_that_cannot_be_kept(cl100k_server, tmp_path):
  (tmp_path / "cache").write_text("not a directory")
  assert "File exists" in check_cl100k_message()


def test_cl100k_matches_what_tiktoken_declares(monkeypatch):
  """URL, checksum, pattern and special tokens equal tiktoken's."""
  from tiktoken_ext import openai_public

  declared = {}

  def load_tiktoken_bpe(url, expected_hash):
    declared["url"] = url
    declared["sha256"] = expected_hash

  monkeypatch.setattr(openai_public, "load_tiktoken_bpe", load_tiktoken_bpe)
  declared.update(openai_public.cl100k_base())
  assert declared["url"] == tokenizer.CL100K_URL
  assert declared["sha256"] == tokenizer.CL100K_SHA256
  assert declared["pat_str"] == tokenizer._CL100K_PATTERN
  assert declared["special_tokens"] == tokenizer._CL100K_SPECIAL


def test_cl100k_loads_where_its_file_is(tmp_path, monkeypatch, trained):
  """The trained BPE stands in for the file, which cannot be had offline."""
  content = pathlib.Path(trained.tiktoken).read_bytes()
  digest = hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(tokenizer, "CL100K_SHA256", digest)
  monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
  (tmp_path / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4").write_bytes(content)
  loaded = tokenizer.load_tokenizer("cl100k_base")
  assert (loaded.vocab_size, loaded.separator) == (100277, 100257)
  text = "it's <|endoftext|>"
  assert loaded.decode(loaded.encode(text)) == text
  # The same file at another path is cl100k_base too.
  assert tokenizer.load_tokenizer(trained.tiktoken).separator == 100257


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("missing.tiktoken", None, "missing.tiktoken.*cannot read"),
    ("missing.json", None, "missing.json.*cannot read"),
    (
      "bad.tiktoken",
      "not base64 at all\n",
      "bad.tiktoken.*not a complete tiktoken file",
    ),
    (
      "cut.tiktoken",
      "YQ== 0\nYg== 1\n",
      "cut.tiktoken.*not a complete tiktoken file",
    ),
    ("bad.json", "{", "bad.json.*not a Hugging Face tokenizer.json"),
    ("other.json", "{}", "other.json.*not a Hugging Face tokenizer.json"),
    ("model.vocab", "x", "must be 'bytes', 'cl100k_base'"),
  ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
  if content is not None:
    (tmp_path / name).write_text(content)
  with pytest.raises(UserError, match=message):
    tokenizer.load_tokenizer(str(tmp_path / name))


def test_a_tokenizer_without_separator_is_refused(tmp_path, trained):
  description = json.loads(pathlib.Path(trained.json).read_text())
  description["added_tokens"] = []
  (tmp_path / "tokenizer.json").write_text(json.dumps(description))
  with pytest.raises(UserError, match="no separator for documents"):
    tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
  ("size", "works"), [(255, False), (256, True), (511, True), (512, False)]
)
def test_vocabulary_of_the_model(size, works):
  config = Config(model=ModelConfig(vocab_size=size))
  loaded = tokenizer.load_tokenizer("bytes")
  if works:
    check_vocabulary(config, loaded)
    return
  with pytest.raises(
    UserError,
    match=f"config.model.vocab_size = {size}.*config.data.tokenizer.*256",
  ):
    check_vocabulary(config, loaded)
