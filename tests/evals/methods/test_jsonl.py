"""Every error in a file of records is reported in one line with its place."""

import pytest

from diffjax.config import UserError
from diffjax.evals.methods import jsonl

FIELDS = {"text": str, "choices.label": list, "n": int, "any": object}
GOOD = (
  '{"text": "a", "choices": {"label": ["A"]}, "n": 1, "any": null, "more": 2}'
)


def test_records_keep_their_lines(tmp_path):
  path = tmp_path / "some.jsonl"
  path.write_text(f"\n{GOOD}\r\n\n  \n{GOOD}", encoding="utf-8")
  first, second = jsonl.read(path, FIELDS)
  assert first.location == f"{path}:2"
  assert second.location == f"{path}:5"
  assert first.value["choices"] == {"label": ["A"]}


@pytest.mark.parametrize(
  "line, message",
  [
    ('{"text": "a"', ":2: not JSON"),
    ("[1]", r":2: not a JSON object, but '\[1\]'"),
    (
      '{"choices": {"label": []}, "n": 1, "any": 1}',
      ":2: the field 'text' is missing; there are 'choices', 'n', 'any'",
    ),
    (
      '{"text": "a", "choices": [], "n": 1, "any": 1}',
      ":2: the field 'choices.label' is missing",
    ),
    (
      '{"text": 3, "choices": {"label": []}, "n": 1, "any": 1}',
      ":2: the field 'text' must be a string; got '3'",
    ),
    (
      '{"text": "", "choices": {"label": []}, "n": true, "any": 1}',
      ":2: the field 'n' must be a whole number",
    ),
    (b"\xff", ":2: not JSON"),
  ],
)
def test_bad_lines(tmp_path, line, message):
  path = tmp_path / "some.jsonl"
  if isinstance(line, str):
    line = line.encode()
  path.write_bytes(GOOD.encode() + b"\n" + line)
  with pytest.raises(UserError, match=message) as error:
    jsonl.read(path, FIELDS)
  text = str(error.value)
  assert "\n" not in text
  assert text.startswith(str(path))


def test_no_records(tmp_path):
  (tmp_path / "empty.jsonl").write_text("\n \n")
  with pytest.raises(
    UserError,
    match="empty.jsonl: is empty; it must hold one JSON object a line, with the"
    " fields text",
  ):
    jsonl.read(tmp_path / "empty.jsonl", FIELDS)
  with pytest.raises(
    UserError, match="none.jsonl: cannot be read .*with the fields text"
  ):
    jsonl.read(tmp_path / "none.jsonl", FIELDS)
  with pytest.raises(UserError, match="cannot be read"):
    jsonl.read(tmp_path, FIELDS)
