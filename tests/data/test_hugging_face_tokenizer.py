"""The tokenizer.json files of published models can be used.

They give back each text and count its bytes.
"""

import chex
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
  """Returns a tokenizer with the conventions of each published model."""
  return load_tokenizer(tokenizer_files.save(tmp_path, request.param))


def save_and_load(backend, tmp_path):
  """Writes a tokenizer of `tokenizers`, and loads the file."""
  path = str(tmp_path / "tokenizer.json")
  backend.save(path)
  return load_tokenizer(path)


def count_bytes(loaded, ids) -> np.ndarray:
  """Returns the number of bytes of each id after the first one."""
  ids = np.array(ids)
  return loaded.target_bytes(ids[..., :-1], ids[..., 1:])


# Text that looks like tokens.


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
def test_the_names_of_control_tokens_are_text(published, text):
  """A document about tokenizers must not become control tokens."""
  if "[UNK]" in published.tokenizer_json() and "<0x" in text:
    # This vocabulary has no bytes and splits at spaces.
    text = text.replace("><", "> <")

  ids = published.encode(text)

  for token in ids:
    assert published.has_text([token])
  assert published.decode(ids) == text
  assert published.encode_batch(["hello", text])[1] == ids


def test_the_names_of_bytes_in_other_characters_are_text(tmp_path):
  """A normalizer makes them the ASCII characters of a name."""
  backend = tokenizer_files.unigram()
  backend.normalizer = tokenizers.normalizers.NFKC()
  loaded = save_and_load(backend, tmp_path)

  assert loaded.decode(loaded.encode("a＜0x41＞b")) == "a<0x41>b"


# The number of bytes of each token.

TEXTS = [SENTENCE, "hello world", "the", "fox , an hello"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_add_up_to_the_text(published, text):
  """The separators have no bytes."""
  separator = published.separator
  ids = [separator, *published.encode(text), separator]

  num_bytes = count_bytes(published, ids)

  assert num_bytes.sum() == len(published.decode(ids).encode())
  assert num_bytes[-1] == 0


def test_no_character_of_a_sentence_is_lost(published):
  assert len(published.decode(published.encode(SENTENCE))) == len(SENTENCE)


def test_the_bytes_of_rows_of_several_texts_add_up(published):
  row = []
  total_bytes = 0
  for text in TEXTS:
    ids = published.encode(text)
    row += [published.separator, *ids]
    total_bytes += len(published.decode(ids).encode())

  num_bytes = count_bytes(published, [row, row])

  assert num_bytes.sum(axis=1).tolist() == [total_bytes, total_bytes]


@pytest.mark.parametrize(
  "text", ["hello     world", "hello <tool> the", "        the", "the"]
)
@pytest.mark.parametrize(
  ("kind", "added_token"),
  [
    # Gemma has runs of spaces as tokens.
    pytest.param("llama_2", "▁▁▁▁", id="spaces"),
    pytest.param("word_piece", "<tool>", id="word"),
  ],
)
def test_the_bytes_of_added_tokens_add_up(tmp_path, kind, added_token, text):
  """Also if an added token is at the start, or beside spaces."""
  backend = tokenizer_files.MAKERS[kind]()
  backend.add_tokens([tokenizers.AddedToken(added_token, normalized=True)])
  loaded = save_and_load(backend, tmp_path)
  ids = [loaded.separator, *loaded.encode(text)]

  num_bytes = count_bytes(loaded, ids)

  assert num_bytes.sum() == len(loaded.decode(ids).encode())


def test_the_bytes_after_an_unknown_token_include_the_space(tmp_path):
  loaded = save_and_load(tokenizer_files.word_piece(), tmp_path)
  unknown = loaded.encode("é")
  ids = [loaded.separator, *unknown, *loaded.encode("the")]

  num_bytes = count_bytes(loaded, ids)

  assert num_bytes.tolist() == [0, len(" the")]


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
def test_a_sequence_is_found_where_it_begins(sequence, positions):
  """The result marks the first token of each occurrence."""
  targets = np.array([1, 2, 7, 2, 1, 2])

  is_beginning = find_sequence(targets, sequence)

  assert np.flatnonzero(is_beginning).tolist() == positions
  rows = np.stack([targets, targets])
  chex.assert_trees_all_equal(
    find_sequence(rows, sequence), np.stack([is_beginning, is_beginning])
  )


# Continuations of a prompt.


def encode_continuation(loaded) -> list[int]:
  """Returns the ids of " world" after "hello"."""
  num_prompt_ids = len(loaded.encode("hello"))
  return loaded.encode("hello world")[num_prompt_ids:]


def test_a_continuation_keeps_its_space(published):
  prompt = published.encode_prompt("hello")
  word = encode_continuation(published)

  assert published.decode_after(prompt, word) == " world"


def test_a_continuation_can_be_decoded_token_by_token(published):
  prompt = published.encode_prompt("hello")
  word = encode_continuation(published)

  for end in range(len(word) + 1):
    text = published.decode_after(prompt, word[:end])
    assert " world".startswith(text.rstrip("\ufffd"))


def test_a_continuation_after_a_control_token_has_no_space(published):
  word = encode_continuation(published)

  assert published.decode_after(published.encode_prompt(""), word) == "world"


def test_a_control_token_is_an_empty_continuation(published):
  prompt = published.encode_prompt("hello")

  assert published.decode_after(prompt, [published.separator]) == ""


def test_a_continuation_can_be_half_a_character(tmp_path):
  """The bytes of a character do not change the text before it."""
  loaded = load_tokenizer(tokenizer_files.save(tmp_path, "llama_2"))
  prompt = loaded.encode_prompt("hello €")
  euro = loaded.encode("€")[1:]
  assert len(euro) == 3
  assert prompt[-3:] == euro

  assert loaded.decode_after(prompt, euro[:1]) == "\ufffd"
  assert loaded.decode_after(prompt, euro) == "€"


# A file beside the tokenizer that names the tokens around documents.


@pytest.fixture
def llama_path(tmp_path) -> str:
  """Returns the path of a tokenizer with the conventions of Llama 2."""
  return tokenizer_files.save(tmp_path, "llama_2")


def test_without_a_file_the_tokenizer_determines_the_document_tokens(
  llama_path,
):
  loaded = load_tokenizer(llama_path)

  assert loaded.document_tokens == DocumentTokens(
    start=(2,), end=(2,), stop=(2,), no_context=2
  )


def test_a_file_of_document_tokens_is_used(llama_path, tmp_path):
  """It replaces the tokens around documents, and so changes the fingerprint."""
  without_file = load_tokenizer(llama_path)
  tokens = DocumentTokens(start=(1,), end=(2,), stop=(2, 3), no_context=1)
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.document_tokens == tokens
  assert loaded.fingerprint != without_file.fingerprint
  assert loaded.encode_prompt("the") == [1, *without_file.encode("the")]


def test_without_start_tokens_only_an_empty_prompt_has_a_separator(
  llama_path, tmp_path
):
  """A model needs at least one token to continue."""
  without_file = load_tokenizer(llama_path)
  document_tokens.write(
    tmp_path, DocumentTokens(start=(), end=(2,), stop=(2,), no_context=2)
  )

  loaded = load_tokenizer(llama_path)

  assert loaded.encode_prompt("the") == without_file.encode("the")
  assert loaded.encode_prompt("") == [2]


def test_a_damaged_file_of_document_tokens_is_an_error(llama_path, tmp_path):
  (tmp_path / document_tokens.FILE_NAME).write_text('{"start": [1]}')

  with pytest.raises(UserError, match="is damaged"):
    load_tokenizer(llama_path)


def test_document_tokens_of_another_vocabulary_are_an_error(
  llama_path, tmp_path
):
  document_tokens.write(
    tmp_path, DocumentTokens(start=(9999,), end=(2,), stop=(2,), no_context=2)
  )

  with pytest.raises(UserError, match="another model's"):
    load_tokenizer(llama_path)


def test_a_stop_token_can_be_text(llama_path, tmp_path):
  comma = load_tokenizer(llama_path).encode(",")[-1]
  document_tokens.write(
    tmp_path, DocumentTokens(start=(), end=(2,), stop=(comma, 2), no_context=2)
  )

  loaded = load_tokenizer(llama_path)

  assert loaded.decode(loaded.encode("a,b")) == "a,b"


# Words that end with the mark </w>, for which the decoder puts a space.

WORD_TEXT = "abba ab a bab"


@pytest.fixture
def word_tokenizer(tmp_path):
  """Returns a tokenizer whose tokens at the end of a word have a mark."""
  names = ["<unk>", "</s>", "a", "b", "ab", "a</w>", "b</w>", "ab</w>"]
  vocabulary = {name: index for index, name in enumerate(names)}
  model = tokenizers.models.BPE(
    vocabulary,
    [("a", "b"), ("a", "b</w>")],
    unk_token="<unk>",
    end_of_word_suffix="</w>",
  )
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  backend.decoder = tokenizers.decoders.BPEDecoder()
  backend.add_special_tokens(["<unk>", "</s>"])
  return save_and_load(backend, tmp_path)


def encode_document(loaded) -> list[int]:
  """Returns the ids of a text between separators."""
  return [loaded.separator, *loaded.encode(WORD_TEXT), loaded.separator]


def test_words_with_end_marks_are_decoded_with_spaces(word_tokenizer):
  ids = encode_document(word_tokenizer)

  assert word_tokenizer.decode(ids) == WORD_TEXT


def test_the_bytes_of_words_with_end_marks_add_up(word_tokenizer):
  ids = encode_document(word_tokenizer)

  assert count_bytes(word_tokenizer, ids).sum() == len(WORD_TEXT)


def test_words_with_end_marks_can_be_continued_everywhere(word_tokenizer):
  ids = encode_document(word_tokenizer)

  for end in range(1, len(ids)):
    prompt = word_tokenizer.decode(ids[:end])
    continuation = word_tokenizer.decode_after(ids[:end], ids[end:])
    assert prompt + continuation == WORD_TEXT
