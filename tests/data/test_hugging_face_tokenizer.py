"""The tokenizer.json files of published models can be used.

They give back each text and count its bytes.
"""

import numpy as np
import pytest
import tokenizers

from diffjax.config import UserError
from diffjax.data import document_tokens
from diffjax.data.document_tokens import DocumentTokens
from diffjax.data.hugging_face_tokenizer import find_sequence
from diffjax.data.tokenizer import load_tokenizer
from tests.harness import tokenizer_files


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
  """Returns the number of bytes of each id after the first one.

  Training needs them for targets, and the first id of a row is not a target.
  """
  ids = np.array(ids)
  inputs = ids[..., :-1]
  targets = ids[..., 1:]
  return loaded.target_bytes(inputs, targets)


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
  """The normalizer NFKC replaces the wide characters ＜ and ＞ by < and >.

  The vocabulary has the token <0x41> for a byte.
  """
  backend = tokenizer_files.unigram()
  backend.normalizer = tokenizers.normalizers.NFKC()
  loaded = save_and_load(backend, tmp_path)

  ids = loaded.encode("a＜0x41＞b")

  assert loaded.decode(ids) == "a<0x41>b"


# The number of bytes of each token.


@pytest.mark.parametrize(
  "text",
  [
    "The quick brown fox jumps over the lazy dog",
    "hello world",
    "the",
    "fox , an hello",
  ],
)
def test_the_bytes_of_the_tokens_add_up_to_the_text(published, text):
  """The separator after the text has no bytes."""
  separator = published.separator
  ids = [separator, *published.encode(text), separator]

  # The counts are of all ids but the first one.
  num_bytes = count_bytes(published, ids)

  decoded = published.decode(ids)
  assert num_bytes.sum() == len(decoded.encode())
  assert num_bytes[-1] == 0


def test_no_character_of_a_sentence_is_lost(published):
  """The text may differ, because not every vocabulary has a mark of spaces."""
  sentence = "The quick brown fox jumps over the lazy dog"

  decoded = published.decode(published.encode(sentence))

  assert len(decoded) == len(sentence)


def test_the_bytes_of_rows_of_several_texts_add_up(published):
  """A row has several texts, each after a separator."""
  row = []
  total_bytes = 0
  sentence = "The quick brown fox jumps over the lazy dog"
  for text in (sentence, "hello world", "the", "fox , an hello"):
    ids = published.encode(text)
    row += [published.separator, *ids]
    total_bytes += len(published.decode(ids).encode())

  two_rows = [row, row]
  num_bytes = count_bytes(published, two_rows)

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
  """An added token can be at the start of the text, or beside spaces."""
  backend = tokenizer_files.MAKERS[kind]()
  backend.add_tokens([tokenizers.AddedToken(added_token, normalized=True)])
  loaded = save_and_load(backend, tmp_path)
  ids = [loaded.separator, *loaded.encode(text)]

  num_bytes = count_bytes(loaded, ids)

  decoded = loaded.decode(ids)
  assert num_bytes.sum() == len(decoded.encode())


def test_the_bytes_after_an_unknown_token_include_the_space(tmp_path):
  """The unknown token has no bytes. The word after it has those of " the"."""
  loaded = save_and_load(tokenizer_files.word_piece(), tmp_path)
  (unknown,) = loaded.encode("é")
  (the,) = loaded.encode("the")
  ids = [loaded.separator, unknown, the]

  num_bytes = count_bytes(loaded, ids)

  # The counts are of all ids but the first one.
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
  """The result marks the first token of each occurrence in a row."""
  row = [1, 2, 7, 2, 1, 2]

  is_beginning = find_sequence(np.array([row, row]), sequence)

  assert np.flatnonzero(is_beginning[0]).tolist() == positions
  assert np.flatnonzero(is_beginning[1]).tolist() == positions


def test_a_sequence_is_found_in_an_array_without_rows():
  tokens = np.array([1, 2, 7, 2, 1, 2])

  is_beginning = find_sequence(tokens, [1, 2])

  expected = [True, False, False, False, True, False]
  assert is_beginning.tolist() == expected


# Continuations of a prompt.


def encode_world_after_hello(loaded) -> list[int]:
  """Returns the ids of " world" in the text "hello world"."""
  num_prompt_ids = len(loaded.encode("hello"))
  return loaded.encode("hello world")[num_prompt_ids:]


def test_a_continuation_keeps_its_space(published):
  """A decoder strips the space at the start of a text.

  A continuation is not at the start, so its space must stay.
  """
  prompt = published.encode_prompt("hello")
  world = encode_world_after_hello(published)

  text = published.decode_after(prompt, world)

  assert text == " world"


def test_a_continuation_can_be_decoded_token_by_token(published):
  """The text of a part may end with the replacement character U+FFFD."""
  prompt = published.encode_prompt("hello")
  world = encode_world_after_hello(published)

  for num_tokens in range(len(world) + 1):
    text = published.decode_after(prompt, world[:num_tokens])
    assert " world".startswith(text.rstrip("\ufffd"))


def test_a_continuation_after_a_control_token_has_no_space(published):
  # An empty prompt consists of the separator only.
  prompt = published.encode_prompt("")
  world = encode_world_after_hello(published)

  text = published.decode_after(prompt, world)

  assert text == "world"


def test_a_control_token_is_an_empty_continuation(published):
  """A model ends its answer with the separator, which is a control token."""
  prompt = published.encode_prompt("hello")

  text = published.decode_after(prompt, [published.separator])

  assert text == ""


def test_a_continuation_can_be_half_a_character(tmp_path):
  """An incomplete character is decoded to the replacement character U+FFFD."""
  loaded = load_tokenizer(tokenizer_files.save(tmp_path, "llama_2"))
  prompt = loaded.encode_prompt("hello €")
  # The character is three bytes, and so three tokens. A space comes before it.
  euro = loaded.encode("€")[1:]
  assert len(euro) == 3
  assert prompt[-3:] == euro

  first_byte = loaded.decode_after(prompt, euro[:1])
  all_bytes = loaded.decode_after(prompt, euro)

  assert first_byte == "\ufffd"
  assert all_bytes == "€"


# A file beside the tokenizer that names the tokens around documents.


@pytest.fixture
def llama_path(tmp_path) -> str:
  """Returns the path of a tokenizer with the conventions of Llama 2."""
  return tokenizer_files.save(tmp_path, "llama_2")


def test_without_a_file_the_tokenizer_determines_the_document_tokens(
  llama_path,
):
  """One separator, </s>, is before and after each document."""
  loaded = load_tokenizer(llama_path)

  # The id of </s> is 2.
  assert loaded.document_tokens == DocumentTokens(
    start=(2,), end=(2,), stop=(2,), no_context=2
  )


def test_a_file_of_document_tokens_is_used(llama_path, tmp_path):
  """The file is in the directory of tokenizer.json, which is `tmp_path`."""
  without_file = load_tokenizer(llama_path)
  tokens = DocumentTokens(start=(1,), end=(2,), stop=(2, 3), no_context=1)
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.document_tokens == tokens
  # A prompt begins with the start token, 1.
  assert loaded.encode_prompt("the") == [1, *without_file.encode("the")]
  assert loaded.fingerprint != without_file.fingerprint


def test_without_start_tokens_only_an_empty_prompt_has_a_separator(
  llama_path, tmp_path
):
  """A model needs at least one token to continue."""
  without_file = load_tokenizer(llama_path)
  # The file is read from the directory of the tokenizer.
  tokens = DocumentTokens(start=(), end=(2,), stop=(2,), no_context=2)
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.encode_prompt("the") == without_file.encode("the")
  assert loaded.encode_prompt("") == [2]


def test_a_damaged_file_of_document_tokens_is_an_error(llama_path, tmp_path):
  """The file lacks the end tokens."""
  (tmp_path / "document_tokens.json").write_text('{"start": [1]}')

  with pytest.raises(UserError, match="is damaged"):
    load_tokenizer(llama_path)


def test_document_tokens_of_another_vocabulary_are_an_error(
  llama_path, tmp_path
):
  """The vocabulary has no token 9999."""
  tokens = DocumentTokens(start=(9999,), end=(2,), stop=(2,), no_context=2)
  document_tokens.write(tmp_path, tokens)

  with pytest.raises(UserError, match="another model's"):
    load_tokenizer(llama_path)


def test_a_stop_token_can_be_text(llama_path, tmp_path):
  """Generation stops at a comma, but a comma in a text is kept."""
  comma = load_tokenizer(llama_path).encode(",")[-1]
  tokens = DocumentTokens(start=(), end=(2,), stop=(comma, 2), no_context=2)
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.decode(loaded.encode("a,b")) == "a,b"


# Words that end with the mark </w>, for which the decoder puts a space.


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


def encode_document(loaded, text) -> list[int]:
  """Returns the ids of a text between separators."""
  return [loaded.separator, *loaded.encode(text), loaded.separator]


def test_words_with_end_marks_are_decoded_with_spaces(word_tokenizer):
  ids = encode_document(word_tokenizer, "abba ab a bab")

  assert word_tokenizer.decode(ids) == "abba ab a bab"


def test_the_bytes_of_words_with_end_marks_add_up(word_tokenizer):
  text = "abba ab a bab"
  ids = encode_document(word_tokenizer, text)

  num_bytes = count_bytes(word_tokenizer, ids)

  assert num_bytes.sum() == len(text)


def test_words_with_end_marks_can_be_continued_everywhere(word_tokenizer):
  """The document is cut into a prompt and a continuation at each token."""
  text = "abba ab a bab"
  ids = encode_document(word_tokenizer, text)

  for num_prompt_ids in range(1, len(ids)):
    prompt_ids = ids[:num_prompt_ids]
    prompt = word_tokenizer.decode(prompt_ids)
    continuation = word_tokenizer.decode_after(prompt_ids, ids[num_prompt_ids:])
    assert prompt + continuation == text
