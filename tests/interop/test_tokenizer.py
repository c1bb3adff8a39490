"""The tokens around the documents of a published model."""

import dataclasses
import json

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

# Ids of tokenizer_files.CONTROL.
BOS, EOS, PAD = 1, 2, 3


def write_files(directory, starts_with=None, **files):
  """Writes a tokenizer.json, and the JSON files that are given by name."""
  directory.mkdir(parents=True, exist_ok=True)
  made = tokenizer_files.llama_2()
  if starts_with is not None:
    made = tokenizer_files.with_first_token(made, starts_with)
  made.save(str(directory / "tokenizer.json"))
  for name, content in files.items():
    (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
  "files, expected",
  [
    pytest.param(
      {}, DocumentTokens((), (EOS,), (EOS,), EOS), id="nothing is known"
    ),
    pytest.param(
      {"config": {"bos_token_id": BOS, "eos_token_id": EOS}},
      DocumentTokens((), (EOS,), (EOS,), BOS),
      id="nothing is added",
    ),
    pytest.param(
      {
        "starts_with": "<s>",
        "config": {"bos_token_id": BOS, "eos_token_id": EOS},
      },
      DocumentTokens((BOS,), (EOS,), (EOS,), BOS),
      id="a post-processor",
    ),
    pytest.param(
      {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}},
      DocumentTokens((), (EOS,), (EOS,), BOS),
      id="only names",
    ),
    pytest.param(
      {"tokenizer_config": {"eos_token": {"content": "<pad>"}}},
      DocumentTokens((), (PAD,), (PAD,), PAD),
      id="another end than the usual name",
    ),
    pytest.param(
      {
        "starts_with": "<s>",
        "config": {"eos_token_id": [PAD, EOS]},
        "tokenizer_config": {"eos_token": "</s>"},
      },
      DocumentTokens((BOS,), (EOS,), (PAD, EOS), BOS),
      id="several ends",
    ),
    pytest.param(
      {
        "config": {"eos_token_id": EOS},
        "generation_config": {"eos_token_id": [PAD, EOS]},
        "tokenizer_config": {"eos_token": "<s>"},
      },
      DocumentTokens((), (PAD,), (PAD, EOS), PAD),
      id="ends of generation",
    ),
    pytest.param(
      {
        # An export of diffjax 0.1.0.
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
      id="an old export",
    ),
  ],
)
def test_document_tokens_of_published_files(tmp_path, files, expected):
  write_files(tmp_path, **files)
  tokenizer = read_tokenizer(tmp_path, 1000)
  assert tokenizer.document_tokens == expected
  prompt = tokenizer.encode_prompt("the")
  assert prompt == [*expected.start, *tokenizer.encode("the")]
  assert tokenizer.encode_prompt("") == [expected.no_context]


def test_ids_that_the_tokenizer_lacks_are_ignored(tmp_path, capsys):
  for unknown in (9999, -1, 2**32 - 1, 2**70):
    write_files(tmp_path, config={"eos_token_id": [EOS, unknown]})
    tokens = read_tokenizer(tmp_path, 1000).document_tokens
    assert tokens.stop == (EOS,)
    assert (
      f"has no token {unknown}, which is ignored" in capsys.readouterr().err
    )


def test_a_field_that_is_no_id_is_refused(tmp_path):
  for wrong in (True, "</s>", 2.0):
    write_files(tmp_path, config={"eos_token_id": [EOS, wrong]})
    with pytest.raises(UserError, match="config.json has eos_token_id"):
      read_tokenizer(tmp_path, 1000)


def test_default_ids_that_are_tokens_of_the_text(tmp_path):
  """Llama's config has them if a model with another tokenizer sets none."""
  made = tokenizer_files.llama_2()
  first, second = made.token_to_id("a"), made.token_to_id("b")
  write_files(
    tmp_path,
    config={"bos_token_id": first, "eos_token_id": second},
    tokenizer_config={"eos_token": "</s>"},
  )
  tokenizer = read_tokenizer(tmp_path, 1000)
  # transformers stops there too.
  expected = DocumentTokens((), (EOS,), (second, EOS), EOS)
  assert tokenizer.document_tokens == expected
  assert tokenizer.decode(tokenizer.encode("a b ab")) == "a b ab"


def test_padding_of_the_file_is_not_part_of_a_document(tmp_path):
  made = tokenizer_files.with_first_token(tokenizer_files.llama_2(), "<s>")
  made.enable_padding(length=16, pad_id=PAD, pad_token="<pad>")
  made.enable_truncation(1)
  made.save(str(tmp_path / "tokenizer.json"))
  tokens = read_tokenizer(tmp_path, 1000).document_tokens
  assert tokens == DocumentTokens((BOS,), (EOS,), (EOS,), BOS)


def test_document_tokens_stay_with_the_model(make_model, convert, tmp_path):
  """Through a workdir, training data, an export and back."""
  write_files(
    tmp_path / "published",
    starts_with="<s>",
    config={"eos_token_id": [EOS, PAD]},
  )
  tokenizer = read_tokenizer(tmp_path / "published", 1000)
  model = make_model("diff", vocab_size=tokenizer.vocab_size)
  model = dataclasses.replace(model, tokenizer=tokenizer)
  diffllama.write(str(tmp_path / "exported"), model, "float32")

  result = convert(
    f"--from=diffllama:{tmp_path / 'exported'}",
    f"--to=diffjax:{tmp_path / 'run'}",
  )
  assert result.returncode == 0, result.stderr
  assert (
    "documents: <s> TEXT </s>; generation stops at </s> or <pad>\n"
    in result.stdout
  )
  tokens = DocumentTokens((BOS,), (EOS,), (EOS, PAD), BOS)
  trained = load(tmp_path / "run")
  assert trained.tokenizer.document_tokens == tokens

  # The printed flags name this file for further training.
  spec = trained.config.data.tokenizer
  example = Tokenize(spec)(Document("the fox", False, None))
  ids = tokenizer.encode("the fox")
  assert example.tokens.tolist() == [BOS, *ids, EOS]
  assert example.prompt_length == 0
  example = Tokenize(spec)(Document("fox", False, "the "))
  assert example.prompt_length == 1 + len(tokenizer.encode("the "))

  read_again = workdir.read(str(tmp_path / "run"))
  assert read_again.tokenizer.document_tokens == tokens
  config = json.loads((tmp_path / "exported" / "config.json").read_text())
  assert config["bos_token_id"] == BOS
  assert config["eos_token_id"] == [EOS, PAD]


def test_a_model_that_is_trained_here_keeps_its_separator(make_model, tmp_path):
  model = make_model("diff")
  diffllama.write(str(tmp_path), model, "float32")
  assert document_tokens.read(tmp_path) == separated_by(255)
  tokenizer = diffllama.read(str(tmp_path)).tokenizer
  assert tokenizer.document_tokens == separated_by(255)
  # The same rows as without the file.
  (tmp_path / document_tokens.FILE_NAME).unlink()
  plain = load_tokenizer(str(tmp_path / "tokenizer.json"))
  assert plain.fingerprint == tokenizer.fingerprint
