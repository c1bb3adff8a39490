"""The tokens around the documents of a published model."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from diffjax.config import UserError
from diffjax.data import document_tokens
from diffjax.data.document import Document
from diffjax.data.document_tokens import DocumentTokens, separated_by
from diffjax.data.packing import Tokenize
from diffjax.data.tokenizer import load_tokenizer
from diffjax.inference.trained import load
from diffjax.interop import diffllama, workdir
from diffjax.interop.tokenizer import read_tokenizer
from tests.harness import tokenizer_files
from tests.interop.small_models import convert, make_model

# Ids of <s>, </s> and <pad> in tokenizer_files.llama_2().
BOS, EOS, PAD = 1, 2, 3


def write_files(
  directory: pathlib.Path, first_token: str | None = None, **contents: Any
) -> None:
  """Writes a tokenizer.json and other JSON files.

  Args:
    directory: where to write them. It is made if it does not exist.
    first_token: a token that the tokenizer.json adds to each text.
    contents: the contents of the other files by name, without ".json".
  """
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer = tokenizer_files.llama_2()
  if first_token is not None:
    tokenizer = tokenizer_files.with_first_token(tokenizer, first_token)
  tokenizer.save(str(directory / "tokenizer.json"))
  for name, content in contents.items():
    (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
  ("files", "expected"),
  [
    pytest.param(
      {},
      DocumentTokens(start=(), end=(EOS,), stop=(EOS,), no_context=EOS),
      id="no JSON file: the usual name </s>",
    ),
    pytest.param(
      {"config": {"bos_token_id": BOS, "eos_token_id": EOS}},
      DocumentTokens(start=(), end=(EOS,), stop=(EOS,), no_context=BOS),
      id="ids in config.json, and no token added to a text",
    ),
    pytest.param(
      {
        "first_token": "<s>",
        "config": {"bos_token_id": BOS, "eos_token_id": EOS},
      },
      DocumentTokens(start=(BOS,), end=(EOS,), stop=(EOS,), no_context=BOS),
      id="ids in config.json, and <s> added to each text",
    ),
    pytest.param(
      {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}},
      DocumentTokens(start=(), end=(EOS,), stop=(EOS,), no_context=BOS),
      id="names in tokenizer_config.json",
    ),
    pytest.param(
      {"tokenizer_config": {"eos_token": {"content": "<pad>"}}},
      DocumentTokens(start=(), end=(PAD,), stop=(PAD,), no_context=PAD),
      id="another name in tokenizer_config.json",
    ),
    pytest.param(
      {
        "first_token": "<s>",
        "config": {"eos_token_id": [PAD, EOS]},
        "tokenizer_config": {"eos_token": "</s>"},
      },
      DocumentTokens(start=(BOS,), end=(EOS,), stop=(PAD, EOS), no_context=BOS),
      id="two stops, and the name of one of them",
    ),
    pytest.param(
      {
        "config": {"eos_token_id": EOS},
        "generation_config": {"eos_token_id": [PAD, EOS]},
        "tokenizer_config": {"eos_token": "<s>"},
      },
      DocumentTokens(start=(), end=(PAD,), stop=(PAD, EOS), no_context=PAD),
      id="generation_config.json before the other files",
    ),
    pytest.param(
      {
        "config": {"bos_token_id": EOS, "eos_token_id": EOS},
        "tokenizer_config": {
          "tokenizer_class": "PreTrainedTokenizerFast",
          "bos_token": "</s>",
          "eos_token": "</s>",
          "model_input_names": ["input_ids", "attention_mask"],
          "clean_up_tokenization_spaces": False,
        },
      },
      separated_by(EOS),
      id="an export of diffjax 0.1.0",
    ),
  ],
)
def test_the_document_tokens_are_read_from_published_files(
  tmp_path, files, expected
):
  """Several JSON files of a published model may name them, by id or by text.

  - `start` and `end` surround a document. A prompt begins with `start`.
  - Generation stops at one of `stop`.
  - An empty prompt is replaced by `no_context`.

  The ids of <s>, </s> and <pad> are BOS, EOS and PAD. If `files` has a
  first_token, the tokenizer adds it to each text.
  """
  write_files(tmp_path, **files)

  tokenizer = read_tokenizer(tmp_path, vocab_size=1000)

  assert tokenizer.document_tokens == expected
  prompt = tokenizer.encode_prompt("the")
  assert prompt == [*expected.start, *tokenizer.encode("the")]
  assert tokenizer.encode_prompt("") == [expected.no_context]


@pytest.mark.parametrize("unknown_id", [9999, -1, 2**32 - 1, 2**70])
def test_an_end_of_text_that_the_tokenizer_lacks_is_ignored(
  unknown_id, tmp_path, capsys
):
  """A warning on stderr names it."""
  write_files(tmp_path, config={"eos_token_id": [EOS, unknown_id]})

  tokens = read_tokenizer(tmp_path, vocab_size=1000).document_tokens

  assert tokens.stop == (EOS,)
  message = f"has no token {unknown_id}, which is ignored"
  assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong_id", [True, "</s>", 2.0])
def test_an_end_of_text_that_is_not_an_integer_is_rejected(wrong_id, tmp_path):
  """The list has a valid id, and a wrong one."""
  write_files(tmp_path, config={"eos_token_id": [EOS, wrong_id]})

  with pytest.raises(UserError, match="config.json has eos_token_id"):
    read_tokenizer(tmp_path, vocab_size=1000)


def test_ids_of_letters_in_the_config_do_not_surround_documents(tmp_path):
  """A config.json may have default ids, which mean letters in this tokenizer.

  Only generation stops at such an id, as it does in transformers.
  """
  letters = tokenizer_files.llama_2()
  id_of_a = letters.token_to_id("a")
  id_of_b = letters.token_to_id("b")
  write_files(
    tmp_path,
    config={"bos_token_id": id_of_a, "eos_token_id": id_of_b},
    tokenizer_config={"eos_token": "</s>"},
  )

  tokenizer = read_tokenizer(tmp_path, vocab_size=1000)

  id_of_eos = letters.token_to_id("</s>")
  document_tokens = tokenizer.document_tokens
  assert document_tokens.start == ()
  assert document_tokens.end == (id_of_eos,)
  assert document_tokens.stop == (id_of_b, id_of_eos)
  assert document_tokens.no_context == id_of_eos
  assert tokenizer.decode(tokenizer.encode("a b ab")) == "a b ab"


def test_settings_for_batches_do_not_change_the_document_tokens(tmp_path):
  """Document tokens are found by tokenizing a text.

  It must not be padded or cut, as this tokenizer.json says for batches.
  """
  tokenizer = tokenizer_files.with_first_token(tokenizer_files.llama_2(), "<s>")
  bos = tokenizer.token_to_id("<s>")
  eos = tokenizer.token_to_id("</s>")
  pad = tokenizer.token_to_id("<pad>")
  tokenizer.enable_padding(length=16, pad_id=pad, pad_token="<pad>")
  tokenizer.enable_truncation(max_length=1)
  tokenizer.save(str(tmp_path / "tokenizer.json"))

  tokens = read_tokenizer(tmp_path, vocab_size=1000).document_tokens

  assert tokens == DocumentTokens(
    start=(bos,), end=(eos,), stop=(eos,), no_context=bos
  )


# The tokens stay with the model. It is exported and imported by the command.

PUBLISHED_TOKENS = DocumentTokens(
  start=(BOS,), end=(EOS,), stop=(EOS, PAD), no_context=BOS
)


@pytest.fixture(scope="module")
def published_tokenizer(tmp_path_factory):
  """Returns a tokenizer that has PUBLISHED_TOKENS."""
  directory = tmp_path_factory.mktemp("published")
  write_files(directory, first_token="<s>", config={"eos_token_id": [EOS, PAD]})
  return read_tokenizer(directory, vocab_size=1000)


@pytest.fixture(scope="module")
def exported(published_tokenizer, tmp_path_factory):
  """Returns a directory with a model that has the published tokenizer."""
  directory = tmp_path_factory.mktemp("exported") / "model"
  model = make_model("diff", vocab_size=published_tokenizer.vocab_size)
  model = dataclasses.replace(model, tokenizer=published_tokenizer)
  diffllama.write(str(directory), model, "float32")
  return directory


@pytest.fixture(scope="module")
def imported(exported, tmp_path_factory):
  """Returns a workdir with the exported model, and the command's output."""
  run = tmp_path_factory.mktemp("imported") / "run"
  result = convert(f"--from=diffllama:{exported}", f"--to=diffjax:{run}")
  assert result.returncode == 0, result.stderr
  return run, result.stdout


def test_an_exported_config_has_the_document_tokens(exported):
  """A document begins with <s>; generation ends at </s> or <pad>."""
  config = json.loads((exported / "config.json").read_text())

  assert config["bos_token_id"] == BOS
  assert config["eos_token_id"] == [EOS, PAD]


def test_the_command_prints_the_document_tokens(imported):
  """TEXT stands for the text of a document."""
  _, output = imported

  expected = "documents: <s> TEXT </s>; generation stops at </s> or <pad>\n"
  assert expected in output


def test_a_workdir_keeps_the_document_tokens(imported):
  """Generation loads the workdir, and another conversion reads it."""
  run, _ = imported

  loaded = load(run)
  read = workdir.read(str(run))

  assert loaded.tokenizer.document_tokens == PUBLISHED_TOKENS
  assert read.tokenizer.document_tokens == PUBLISHED_TOKENS


@pytest.fixture(scope="module")
def tokenize(imported):
  """Returns the tokenization of further training.

  The command prints the flag config.data.tokenizer with this path.
  """
  run, _ = imported
  return Tokenize(load(run).config.data.tokenizer)


def test_training_documents_have_the_document_tokens(
  tokenize, published_tokenizer
):
  """A document begins with <s> and ends with </s>."""
  example = tokenize(Document("the fox", replaced=False, prompt=None))

  ids = published_tokenizer.encode("the fox")
  assert example.tokens.tolist() == [BOS, *ids, EOS]
  assert example.prompt_length == 0


def test_the_first_token_is_part_of_a_training_prompt(
  tokenize, published_tokenizer
):
  """The loss leaves out the prompt, and the token <s> before it."""
  example = tokenize(Document("fox", replaced=False, prompt="the "))

  expected = [BOS, *published_tokenizer.encode("the ")]
  assert example.prompt_length == len(expected)


# A model that was trained by diffjax has a separator between documents.


def test_an_exported_model_of_diffjax_keeps_its_separator(tmp_path):
  """diffjax trains with one separator before and after each document.

  In a tokenizer of bytes it is 255, which occurs in no UTF-8 text.
  """
  diffllama.write(str(tmp_path), make_model("diff"), "float32")

  written = document_tokens.read(tmp_path)
  read = diffllama.read(str(tmp_path)).tokenizer.document_tokens

  assert written == separated_by(255)
  assert read == separated_by(255)


def test_the_file_of_the_separator_does_not_change_the_fingerprint(tmp_path):
  """Tokens of a data set are stored by the fingerprint of their tokenizer."""
  diffllama.write(str(tmp_path), make_model("diff"), "float32")
  tokenizer = diffllama.read(str(tmp_path)).tokenizer

  (tmp_path / document_tokens.FILE_NAME).unlink()

  without_file = load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert without_file.fingerprint == tokenizer.fingerprint
