"""Validation documents are whole, in order, and of the right source."""

import pathlib

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
  """The first file has the documents "a" and "bb", the second "ccc" and "dd"."""
  documents = list(validation_documents(make_trained(), two_files))

  texts = [document.text for document in documents]
  assert texts == ["a", "bb", "ccc", "dd"]


def test_documents_are_whole_documents_of_the_training_text(make_trained):
  """Rows of the data have 64 tokens, but documents are not cut.

  The text has 60 documents of up to 1,500 bytes. About half are for validation.
  """
  documents = list(validation_documents(make_trained()))

  assert 10 < len(documents) < 50
  for document in documents:
    assert document.text.startswith("document ")
  longest = max(len(document.text) for document in documents)
  assert longest > 1000


def test_a_missing_source_is_reported_before_reading(
  make_trained, two_files, tmp_path
):
  """The third source of a mixture is missing.

  The error comes from the call, before the first document is asked for.
  """
  mixture = f"{two_files},jsonl:{tmp_path}/none.jsonl=1"

  with pytest.raises(UserError, match="none.jsonl"):
    validation_documents(make_trained(), mixture)
