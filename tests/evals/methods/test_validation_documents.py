"""Validation documents are whole, in order, and of the right source."""

import math
import pathlib
from glob import glob

import pytest

from diffjax.config import UserError
from diffjax.evals.methods.validation_documents import validation_documents


@pytest.fixture
def two_files(tmp_path: pathlib.Path) -> str:
  """The source of a mixture of two files with two documents each."""
  (tmp_path / "first.jsonl").write_text('{"text": "a"}\n{"text": "bb"}\n')
  (tmp_path / "second.jsonl").write_text('{"text": "ccc"}\n{"text": "dd"}\n')
  return f"jsonl:{tmp_path}/first.jsonl=1,jsonl:{tmp_path}/second.jsonl=2"


def test_documents_of_a_source_have_its_order(make_trained, two_files):
  """The first file has the documents "a" and "bb", the other "ccc" and "dd"."""
  documents = list(validation_documents(make_trained(), two_files))

  texts = [document.text for document in documents]
  assert texts == ["a", "bb", "ccc", "dd"]


def test_documents_are_whole_documents_of_the_training_text(
  make_trained, text_source
):
  """Training cuts the text into rows of 64 tokens. Documents are not cut.

  The text has 60 documents. Half of them are for validation.
  """
  pattern = text_source.removeprefix("text:")
  training_texts = {pathlib.Path(path).read_text() for path in glob(pattern)}

  documents = list(validation_documents(make_trained()))

  texts = {document.text for document in documents}
  assert texts < training_texts
  # Each document is drawn with a probability of 1/2. The number is within five
  # standard deviations of its mean.
  standard_deviation = math.sqrt(60 * 1 / 2 * 1 / 2)
  assert abs(len(texts) - 30) < 5 * standard_deviation


def test_a_missing_source_is_reported_before_reading(
  make_trained, two_files, tmp_path
):
  """The third source of a mixture is missing.

  The error comes from the call, before the first document is asked for.
  """
  mixture = f"{two_files},jsonl:{tmp_path}/none.jsonl=1"

  with pytest.raises(UserError, match="none.jsonl"):
    validation_documents(make_trained(), mixture)
