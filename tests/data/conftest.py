"""Small data sets on disk, and a cache directory for each test."""

import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from diffjax.config import Config, DataConfig, EvalConfig, TrainConfig

WORDS = [
  *("def", "return", "self", "import", "naïve", "class", "the", "of", "and"),
  *("α", "β", "λ", "😀", "x", "=", "1", "0", "42", "(", ")", ":", "\n\t"),
]


@pytest.fixture(autouse=True)
def cache_of_the_test(
  tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Gives each test an empty cache directory."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def texts() -> list[str]:
  """Returns 300 different documents, of a few bytes to several rows."""
  rng = random.Random(0)
  texts = []
  for index in range(300):
    num_words = rng.choice((1, 5, 20, 60, 300))
    words = " ".join(rng.choices(WORDS, k=num_words))
    texts.append(f"document {index}: {words}")
  return texts


@pytest.fixture
def jsonl(tmp_path: pathlib.Path, texts: list[str]) -> pathlib.Path:
  """Returns the path of a JSONL file of the documents."""
  path = tmp_path / "documents.jsonl"
  with path.open("w") as file:
    for index, text in enumerate(texts):
      file.write(json.dumps({"id": index, "text": text}) + "\n")
  return path


def write_two_files(
  directory: pathlib.Path, name: str, lines: list[str]
) -> str:
  """Writes JSONL lines into two files, so that two workers can stream them.

  Returns:
    The source of both files.
  """
  middle = len(lines) // 2
  (directory / f"{name}0.jsonl").write_text("".join(lines[:middle]))
  (directory / f"{name}1.jsonl").write_text("".join(lines[middle:]))
  return f"jsonl:{directory}/{name}*.jsonl"


@pytest.fixture
def two_files(jsonl: pathlib.Path, tmp_path: pathlib.Path) -> str:
  """Returns the source of the documents in two JSONL files."""
  lines = jsonl.read_text().splitlines(keepends=True)
  return write_two_files(tmp_path, "half", lines)


@pytest.fixture
def make_config(jsonl: pathlib.Path) -> Callable[..., Config]:
  """Returns a function that makes configs of the JSONL file's documents.

  Its keyword arguments are batch_size, eval_rows, and the fields of DataConfig.
  """

  def make(batch_size: int = 8, eval_rows: int = -1, **fields: Any) -> Config:
    defaults = {
      "source": f"jsonl:{jsonl}",
      "length": 64,
      "validation_fraction": 0.1,
    }
    return Config(
      data=DataConfig(**{**defaults, **fields}),
      train=TrainConfig(batch_size=batch_size),
      eval=EvalConfig(rows=eval_rows),
    )

  return make


@pytest.fixture(scope="session")
def examples() -> list[tuple[str, str]]:
  """Returns 120 different questions with their answers.

  They have a few bytes to several rows.
  """
  rng = random.Random(1)
  examples = []
  for index in range(120):
    question_words = rng.choices(WORDS, k=rng.choice((1, 4, 8)))
    answer_words = rng.choices(WORDS, k=rng.choice((1, 4, 8, 40)))
    question = f"question {index}: {' '.join(question_words)}"
    answer = f"answer {index}: {' '.join(answer_words)}"
    examples.append((question, answer))
  return examples


@pytest.fixture
def make_example_config(
  make_config: Callable[..., Config],
  tmp_path: pathlib.Path,
  examples: list[tuple[str, str]],
) -> Callable[..., Config]:
  """Returns a function that makes configs of questions and answers.

  A record is a question and a conversation, whose last turn is the answer. The
  function has the keyword arguments of `make_config`.
  """
  lines = []
  for question, answer in examples:
    turns = [{"value": question}, {"value": answer}]
    record = {"problem": question, "turns": turns}
    lines.append(json.dumps(record) + "\n")
  source = write_two_files(tmp_path, "examples", lines)

  def make(**fields: Any) -> Config:
    defaults = {
      "source": source,
      "prompt_field": "problem",
      "text_field": "turns.-1.value",
      "prompt_template": "Q: {prompt} A:",
      "length": 128,
    }
    return make_config(**{**defaults, **fields})

  return make
