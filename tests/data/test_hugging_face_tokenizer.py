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
    "hello <0xE2> <0x96> <0x81> world",
  ],
)
def test_the_names_of_control_tokens_are_text(published, text):
  """A document about tokenizers must not become control tokens."""
  ids = published.encode(text)

  for token in ids:
    assert published.has_text([token])
  assert published.decode(ids) == text


@pytest.mark.parametrize(
  "kind", ["unigram", "unigram_without_space_mark", "llama_2"]
)
def test_the_names_of_bytes_are_text(tmp_path, kind):
  """These vocabularies have a token such as <0xE2> for each byte."""
  loaded = load_tokenizer(tokenizer_files.save(tmp_path, kind))
  # As bytes, E2 96 81 would be the character "▁".
  text = "hello <0xE2><0x96><0x81> world"

  ids = loaded.encode(text)

  for token in ids:
    assert loaded.has_text([token])
  assert loaded.decode(ids) == text


def test_a_batch_with_names_of_control_tokens_is_encoded_like_its_texts(
  published,
):
  texts = ["hello", "the </s> fox", "<pad>", "<s>hello</s>", "[SEP]"]
  texts += ["[CLS] hello", "<unk> x", "<0x41> fox", "<0xE2><0x96><0x81>"]

  batch_ids = published.encode_batch(texts)

  assert batch_ids == [published.encode(text) for text in texts]


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
  ("make_backend", "added_token"),
  [
    # Four spaces, as in Gemma: this tokenizer writes "▁" for a space.
    pytest.param(tokenizer_files.llama_2, "▁▁▁▁", id="spaces"),
    pytest.param(tokenizer_files.word_piece, "<tool>", id="word"),
  ],
)
def test_the_bytes_of_a_text_with_added_tokens_are_counted(
  tmp_path, make_backend, added_token, text
):
  """Tokens that are added to a trained vocabulary can contain spaces, too.

  The texts have them at the start, in the middle, or not at all.
  """
  backend = make_backend()
  # The token is looked for after the normalizer has replaced the spaces.
  backend.add_tokens([tokenizers.AddedToken(added_token, normalized=True)])
  loaded = save_and_load(backend, tmp_path)
  ids = [loaded.separator, *loaded.encode(text)]

  num_bytes = count_bytes(loaded, ids)

  decoded = loaded.decode(ids)
  assert num_bytes.sum() == len(decoded.encode())


def test_the_bytes_after_an_unknown_token_include_the_space(tmp_path):
  """The unknown token has no bytes. The next token has the bytes " the"."""
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
  # The vocabulary has no token for "€" (E2 82 AC), but one for each byte.
  # The ids of bytes follow the four control tokens.
  euro = [4 + 0xE2, 4 + 0x82, 4 + 0xAC]
  first_byte = [4 + 0xE2]
  prompt = loaded.encode_prompt("hello €")

  assert loaded.decode_after(prompt, first_byte) == "\ufffd"
  assert loaded.decode_after(prompt, euro) == "€"


# A file beside the tokenizer that names the tokens around documents.


@pytest.fixture
def llama_path(tmp_path) -> str:
  """Returns the path of a tokenizer with the conventions of Llama 2."""
  return tokenizer_files.save(tmp_path, "llama_2")


def test_without_document_tokens_json_the_separator_is_used(llama_path):
  """</s> is before and after each document."""
  loaded = load_tokenizer(llama_path)

  # The id of </s> is 2.
  assert loaded.document_tokens == DocumentTokens(
    start=(2,), end=(2,), stop=(2,), no_context=2
  )


def test_document_tokens_json_names_the_tokens_around_documents(
  llama_path, tmp_path
):
  """It is in the directory of tokenizer.json, which is `tmp_path`."""
  # The ids of the control tokens <s>, </s> and <pad>.
  bos, eos, pad = 1, 2, 3
  tokens = DocumentTokens(
    start=(bos,), end=(eos,), stop=(eos, pad), no_context=bos
  )
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.document_tokens == tokens


def test_a_prompt_begins_with_the_start_tokens(llama_path, tmp_path):
  ids_of_text = load_tokenizer(llama_path).encode("the")
  # The ids of the control tokens <s> and </s>.
  bos, eos = 1, 2
  tokens = DocumentTokens(start=(bos,), end=(eos,), stop=(eos,), no_context=bos)
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.encode_prompt("the") == [bos, *ids_of_text]


def test_other_document_tokens_have_another_fingerprint(llama_path, tmp_path):
  """Rows that were prepared with other tokens must not be used."""
  original = load_tokenizer(llama_path)
  tokens = DocumentTokens(start=(1,), end=(2,), stop=(2, 3), no_context=1)
  document_tokens.write(tmp_path, tokens)

  changed = load_tokenizer(llama_path)

  assert changed.fingerprint != original.fingerprint


def test_without_start_tokens_only_an_empty_prompt_gets_a_token(
  llama_path, tmp_path
):
  """A model needs at least one token to continue."""
  ids_of_text = load_tokenizer(llama_path).encode("the")
  # The id of the control token </s>.
  eos = 2
  tokens = DocumentTokens(start=(), end=(eos,), stop=(eos,), no_context=eos)
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  assert loaded.encode_prompt("the") == ids_of_text
  assert loaded.encode_prompt("") == [eos]


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
  """A comma that ends a generated answer is not removed from other texts."""
  # Llama 2 puts a space before each text.
  _, comma = load_tokenizer(llama_path).encode(",")
  # The id of the control token </s>.
  eos = 2
  tokens = DocumentTokens(
    start=(), end=(eos,), stop=(comma, eos), no_context=eos
  )
  document_tokens.write(tmp_path, tokens)

  loaded = load_tokenizer(llama_path)

  ids = loaded.encode("a,b")
  assert comma in ids
  assert loaded.decode(ids) == "a,b"


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
