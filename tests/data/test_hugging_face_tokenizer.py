"""tokenizer.json files with the conventions of published models."""

import numpy as np
import pytest
import tokenizers

from diffjax.config import UserError
from diffjax.data import document_tokens
from diffjax.data.document_tokens import DocumentTokens
from diffjax.data.hugging_face_tokenizer import find_sequence
from diffjax.data.tokenizer import load_tokenizer
from tests.harness import tokenizer_files

SENTENCE = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(params=tokenizer_files.MAKERS)
def published(request, tmp_path):
  return load_tokenizer(tokenizer_files.save(tmp_path, request.param))


@pytest.mark.parametrize(
  "text",
  [
    "the </s> fox",
    "<pad>",
    "<s>hello</s>",
    "[SEP]",
    "[CLS] hello",
    "<unk> x",
    "<0x41> fox",
    "hello <0xE2><0x96><0x81> world",
  ],
)
def test_spelled_control_tokens_are_text(published, text):
  if "[UNK]" in published.tokenizer_json() and "<0x" in text:
    # This vocabulary has no bytes and splits at spaces.
    text = text.replace("><", "> <")
  ids = published.encode(text)
  assert not published._control_ids.intersection(ids)
  assert published.decode(ids) == text
  assert published.encode_batch(["hello", text])[1] == ids


def test_bytes_of_a_text(published):
  """Each text is a document, after a control token."""
  start = published.separator
  total = 0
  texts = [SENTENCE, "hello world", "the", "fox , an hello"]
  for text in texts:
    ids = np.array([start, *published.encode(text), start])
    num_bytes = published.target_bytes(ids[:-1], ids[1:])
    expected = len(published.decode(ids).encode())
    assert num_bytes.sum() == expected
    assert num_bytes[-1] == 0
    total += expected
  assert len(published.decode(published.encode(SENTENCE))) == len(SENTENCE)
  # The texts in one row, and a batch of such rows.
  row = []
  for text in texts:
    row += [start, *published.encode(text)]
  rows = np.array([row, row])
  num_bytes = published.target_bytes(rows[:, :-1], rows[:, 1:])
  assert num_bytes.sum(axis=1).tolist() == [total, total]


@pytest.mark.parametrize(
  ("sequence", "positions"),
  [
    ([1, 2], [0, 4]),
    ([2], [1, 3, 5]),
    ([2, 3], []),
    ([1, 2, 1, 2, 1, 2, 1], []),
    ([], []),
  ],
)
def test_find_sequence(sequence, positions):
  targets = np.array([1, 2, 7, 2, 1, 2])
  begins = find_sequence(targets, sequence)
  assert np.flatnonzero(begins).tolist() == positions
  rows = np.stack([targets, targets])
  np.testing.assert_array_equal(
    find_sequence(rows, sequence), np.stack([begins, begins])
  )


def test_a_continuation_keeps_its_space(published):
  prompt = published.encode_prompt("hello")
  num_prompt_ids = len(published.encode("hello"))
  word = published.encode("hello world")[num_prompt_ids:]
  assert published.decode_after(prompt, word) == " world"
  # One token at a time, as it is printed while it is generated.
  for end in range(len(word) + 1):
    text = published.decode_after(prompt, word[:end])
    assert " world".startswith(text.rstrip("\ufffd"))
  # After a control token, the same ids begin a text.
  assert published.decode_after(published.encode_prompt(""), word) == "world"
  assert published.decode_after(prompt, [published.separator]) == ""


def test_a_continuation_of_half_a_character(tmp_path):
  """The bytes of a character do not change the text before it."""
  loaded = load_tokenizer(tokenizer_files.save(tmp_path, "llama_2"))
  prompt = loaded.encode_prompt("hello €")
  euro = loaded.encode("€")[1:]
  assert len(euro) == 3 and prompt[-3:] == euro
  assert loaded.decode_after(prompt, euro[:1]) == "\ufffd"
  assert loaded.decode_after(prompt, euro) == "€"


def test_document_tokens_beside_a_tokenizer(tmp_path):
  path = tokenizer_files.save(tmp_path, "llama_2")
  plain = load_tokenizer(path)
  assert plain.document_tokens == DocumentTokens((2,), (2,), (2,), 2)
  tokens = DocumentTokens((1,), (2,), (2, 3), 1)
  document_tokens.write(tmp_path, tokens)
  loaded = load_tokenizer(path)
  assert loaded.document_tokens == tokens
  assert loaded.fingerprint != plain.fingerprint
  assert loaded.encode_prompt("the") == [1, *plain.encode("the")]

  document_tokens.write(tmp_path, DocumentTokens((), (2,), (2,), 2))
  loaded = load_tokenizer(path)
  assert loaded.encode_prompt("the") == plain.encode("the")
  assert loaded.encode_prompt("") == [2]

  (tmp_path / document_tokens.FILE_NAME).write_text('{"start": [1]}')
  with pytest.raises(UserError, match="is damaged"):
    load_tokenizer(path)
  document_tokens.write(tmp_path, DocumentTokens((9999,), (2,), (2,), 2))
  with pytest.raises(UserError, match="another model's"):
    load_tokenizer(path)


def test_byte_names_in_other_characters_are_text(tmp_path):
  """A normalizer makes them the ASCII characters of a name."""
  made = tokenizer_files.unigram()
  made.normalizer = tokenizers.normalizers.NFKC()
  made.save(str(tmp_path / "tokenizer.json"))
  loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert loaded.decode(loaded.encode("a＜0x41＞b")) == "a<0x41>b"


def test_bytes_of_added_tokens_and_after_unknown_ones(tmp_path):
  """Gemma adds runs of spaces as tokens."""
  made = tokenizer_files.llama_2()
  made.add_tokens([tokenizers.AddedToken("▁▁▁▁", normalized=True)])
  made.save(str(tmp_path / "tokenizer.json"))
  assert_bytes_add_up(load_tokenizer(str(tmp_path / "tokenizer.json")))
  made = tokenizer_files.word_piece()
  made.add_tokens(["<tool>"])
  made.save(str(tmp_path / "tokenizer.json"))
  loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert_bytes_add_up(loaded)
  unknown = loaded.encode("é")
  ids = np.array([loaded.separator, *unknown, *loaded.encode("the")])
  assert loaded.target_bytes(ids[:-1], ids[1:]).tolist() == [0, len(" the")]


def assert_bytes_add_up(loaded):
  for text in ("hello     world", "hello <tool> the", "        the", "the"):
    ids = np.array([loaded.separator, *loaded.encode(text)])
    num_bytes = loaded.target_bytes(ids[:-1], ids[1:])
    assert num_bytes.sum() == len(loaded.decode(ids).encode())


def test_words_that_end_in_a_mark(tmp_path):
  """The decoder puts a space after </w>, and none inside a word."""
  names = ["<unk>", "</s>", "a", "b", "ab", "a</w>", "b</w>", "ab</w>"]
  vocabulary = {name: index for index, name in enumerate(names)}
  merges = [("a", "b"), ("a", "b</w>")]
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocabulary, merges, unk_token="<unk>", end_of_word_suffix="</w>"
    )
  )
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.decoder = tokenizers.decoders.BPEDecoder()
  made.add_special_tokens(["<unk>", "</s>"])
  made.save(str(tmp_path / "tokenizer.json"))
  loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
  text = "abba ab a bab"
  ids = [loaded.separator, *loaded.encode(text), loaded.separator]
  assert loaded.decode(ids) == text
  row = np.array(ids)
  assert loaded.target_bytes(row[:-1], row[1:]).sum() == len(text)
  for end in range(1, len(ids)):
    before, after = ids[:end], ids[end:]
    whole = loaded.decode(before) + loaded.decode_after(before, after)
    assert whole == text


def test_a_model_may_stop_at_a_token_of_its_text(tmp_path):
  path = tokenizer_files.save(tmp_path, "llama_2")
  comma = load_tokenizer(path).encode(",")[-1]
  document_tokens.write(tmp_path, DocumentTokens((), (2,), (comma, 2), 2))
  loaded = load_tokenizer(path)
  assert loaded.decode(loaded.encode("a,b")) == "a,b"
