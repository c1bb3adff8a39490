"""Records of a JSONL file, and errors with the line that they are in."""

import pytest

from diffjax.config import UserError
from diffjax.evals.methods import jsonl


def test_records_keep_their_lines(tmp_path):
  """Blank lines are skipped, but they count as an editor counts lines."""
  record = '{"text": "a", "choices": {"label": ["A"]}, "more": null}'
  path = tmp_path / "some.jsonl"
  path.write_text(f"\n{record}\r\n\n  \n{record}", encoding="utf-8")
  # A field of the type `object` can have any value, also null.
  fields = {"text": str, "choices.label": list, "more": object}

  first, second = jsonl.read(path, fields)

  assert first.location == f"{path}:2"
  assert second.location == f"{path}:5"
  assert first.value["choices"] == {"label": ["A"]}


@pytest.mark.parametrize(
  "line, message",
  [
    (b'{"count": 1', "not JSON"),
    # This byte is not UTF-8.
    (b"\xff", "not JSON"),
    (b"[1]", r"not a JSON object, but '\[1\]'"),
    (b'{"count": true}', "the field 'count' must be a whole number"),
    (b'{"count": 1, "text": 3}', "the field 'text' must be a string; got '3'"),
    (
      b'{"count": 1, "any": 2}',
      "the field 'text' is missing; there are 'count', 'any'",
    ),
    (
      b'{"count": 1, "text": "a", "choices": []}',
      "the field 'choices.label' is missing",
    ),
  ],
)
def test_an_invalid_record_is_reported_in_one_line(tmp_path, line, message):
  """The first record of the file is right, and the second one is not."""
  fields = {"count": int, "text": str, "choices.label": list}
  valid_line = b'{"count": 1, "text": "a", "choices": {"label": ["A"]}}\n'
  path = tmp_path / "some.jsonl"
  path.write_bytes(valid_line + line)

  with pytest.raises(UserError, match=f"^{path}:2: {message}") as error:
    jsonl.read(path, fields)
  assert "\n" not in str(error.value)


def test_a_file_without_records_raises(tmp_path):
  path = tmp_path / "empty.jsonl"
  path.write_text("\n \n")

  message = (
    "empty.jsonl: is empty; it must hold one JSON object a line, with the"
    " fields text"
  )
  with pytest.raises(UserError, match=message):
    jsonl.read(path, {"text": str})


def test_a_missing_file_raises(tmp_path):
  message = "none.jsonl: cannot be read .*with the fields text"
  with pytest.raises(UserError, match=message):
    jsonl.read(tmp_path / "none.jsonl", {"text": str})


def test_a_directory_raises(tmp_path):
  with pytest.raises(UserError, match="cannot be read"):
    jsonl.read(tmp_path, {"text": str})
