"""Small data sets on disk. Nothing is read from or written to the user's own cache."""

import json
import random

import pytest

from diffjax.config import Config, DataConfig, EvalConfig, TrainConfig

WORDS = "def return self import α β 😀 naïve class x = 1 0 42 ( ) : \n\t the of and λ".split(
  " "
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def texts():
  """300 different documents, from a few bytes to several rows long."""
  rng = random.Random(0)
  lengths = [rng.choice((1, 5, 20, 60, 300)) for _ in range(300)]
  return [
    f"document {index}: " + " ".join(rng.choices(WORDS, k=length))
    for index, length in enumerate(lengths)
  ]


@pytest.fixture
def jsonl(tmp_path, texts):
  """The documents as one JSONL file."""
  path = tmp_path / "documents.jsonl"
  path.write_text(
    "".join(
      json.dumps({"id": index, "text": text}) + "\n"
      for index, text in enumerate(texts)
    )
  )
  return path


def write_two_files(directory, name, lines):
  """Writes JSONL lines into two files, so that two workers can stream them.

  Returns:
    The source of both files.
  """
  middle = len(lines) // 2
  (directory / f"{name}0.jsonl").write_text("".join(lines[:middle]))
  (directory / f"{name}1.jsonl").write_text("".join(lines[middle:]))
  return f"jsonl:{directory}/{name}*.jsonl"


@pytest.fixture
def halves(jsonl, tmp_path):
  """The source of the documents in two JSONL files."""
  lines = jsonl.read_text().splitlines(keepends=True)
  return write_two_files(tmp_path, "half", lines)


@pytest.fixture
def make_config(jsonl):
  """make_config(…): a Config with short rows of the JSONL documents by default."""

  def make(batch_size=8, eval_rows=-1, **data):
    data = {
      "source": f"jsonl:{jsonl}",
      "length": 64,
      "validation_fraction": 0.1,
      **data,
    }
    return Config(
      data=DataConfig(**data),
      train=TrainConfig(batch_size=batch_size),
      eval=EvalConfig(rows=eval_rows),
    )

  return make


@pytest.fixture(scope="session")
def examples():
  """120 different questions and answers, from a few bytes to several rows long."""
  rng = random.Random(1)
  lengths = [
    (rng.choice((1, 4, 8)), rng.choice((1, 4, 8, 40))) for _ in range(120)
  ]
  return [
    (
      f"question {index}: " + " ".join(rng.choices(WORDS, k=asked)),
      f"answer {index}: " + " ".join(rng.choices(WORDS, k=answered)),
    )
    for index, (asked, answered) in enumerate(lengths)
  ]


@pytest.fixture
def make_example_config(make_config, tmp_path, examples):
  """make_example_config(…): the same with questions and answers.

  A record is a question and a conversation, whose last turn is the answer.
  """
  lines = []
  for asked, answered in examples:
    turns = [{"value": asked}, {"value": answered}]
    lines.append(json.dumps({"problem": asked, "turns": turns}) + "\n")
  source = write_two_files(tmp_path, "examples", lines)

  def make(**data):
    fields = {
      "prompt_field": "problem",
      "text_field": "turns.-1.value",
      "prompt_template": "Q: {prompt} A:",
      "length": 128,
    }
    return make_config(**{"source": source, **fields, **data})

  return make
