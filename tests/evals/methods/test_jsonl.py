"""Records of a JSONL file, and errors with the line that they are in."""

import pytest

from diffjax.config import UserError
from diffjax.evals.methods import jsonl


def test_records_keep_their_lines(tmp_path):
  """Blank lines are skipped, but they count as an editor counts lines."""
  record = '{"text": "a", "choices": {"label": ["A"]}, "more": 2}'
  path = tmp_path / "some.jsonl"
  path.write_text(f"\n{record}\r\n\n  \n{record}", encoding="utf-8")

  first, second = jsonl.read(path, {"text": str, "choices.label": list})

  assert first.location == f"{path}:2"
  assert second.location == f"{path}:5"
  assert first.value["choices"] == {"label": ["A"]}


@pytest.mark.parametrize(
  "line, message",
  [
    pytest.param(b'{"text": "a"', ":2: not JSON", id="no JSON"),
    pytest.param(b"\xff", ":2: not JSON", id="no UTF-8"),
    pytest.param(b"[1]", r":2: not a JSON object, but '\[1\]'", id="list"),
    pytest.param(
      b'{"choices": {"label": []}, "n": 1, "any": 1}',
      ":2: the field 'text' is missing; there are 'choices', 'n', 'any'",
      id="no field",
    ),
    pytest.param(
      b'{"text": "a", "choices": [], "n": 1, "any": 1}',
      ":2: the field 'choices.label' is missing",
      id="no nested field",
    ),
    pytest.param(
      b'{"text": 3, "choices": {"label": []}, "n": 1, "any": 1}',
      ":2: the field 'text' must be a string; got '3'",
      id="number instead of string",
    ),
    pytest.param(
      b'{"text": "", "choices": {"label": []}, "n": true, "any": 1}',
      ":2: the field 'n' must be a whole number",
      id="bool instead of number",
    ),
  ],
)
def test_an_invalid_record_is_reported_in_one_line(tmp_path, line, message):
  """The second line of the file has an error, and the first one is right."""
  fields = {"text": str, "choices.label": list, "n": int, "any": object}
  good = b'{"text": "a", "choices": {"label": ["A"]}, "n": 1, "any": null}\n'
  path = tmp_path / "some.jsonl"
  path.write_bytes(good + line)

  with pytest.raises(UserError, match=message) as error:
    jsonl.read(path, fields)
  text = str(error.value)
  assert "\n" not in text
  assert text.startswith(str(path))


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
