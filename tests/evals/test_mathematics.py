"""The mathematics suite, with models whose answers are known."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, ModelConfig, UserError
from diffjax.data.document import Document
from diffjax.data.packing import Tokenize
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import mathematics
from diffjax.evals.mathematics import Mathematics
from diffjax.evals.report import intervals
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder
from diffjax.training.checkpoint import Checkpoints
from tests.harness import in_process
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "a model",
  Config(
    model=ModelConfig(max_length=700),
    data=DataConfig(prompt_template="Q: {prompt}\nA:"),
  ),
  None,
  None,
  BYTES,
)


def gsm8k_record(number: int) -> dict[str, str]:
  """Returns the question for the double of a number, as GSM8K writes it."""
  double = 2 * number
  calculation = f"<<{number}+{number}={double}>>"
  return {
    "question": f"What is {number} + {number}?",
    "answer": (f"{number} + {number} = {calculation}{double}.\n#### {double}"),
  }


def math_record(number: int) -> dict[str, str]:
  """Returns the question for the half of a number, as MATH writes it."""
  return {
    "problem": f"Half of {number}?",
    "solution": rf"It is $\boxed{{\frac{{{number}}}{{2}}}}$.",
    "level": "Level 1",
  }


def math_500_record(number: int) -> dict[str, str]:
  """Returns the question for the half of a number, as MATH-500 writes it."""
  return {
    "problem": f"Half of {number}?",
    "solution": "See above.",
    "answer": rf"\frac{{{number}}}{{2}}",
  }


class Files(NamedTuple):
  """The paths of three benchmarks."""

  gsm8k: str
  math: str
  math500: str


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
  """Benchmarks of six, four and four questions, for example "Half of 1?"."""
  gsm8k = [gsm8k_record(number) for number in range(3, 9)]
  math = [math_record(number) for number in range(1, 5)]
  math_500 = [math_500_record(number) for number in range(1, 5)]
  return Files(
    write_records(tmp_path / "gsm8k.jsonl", gsm8k),
    write_records(tmp_path / "math.jsonl", math),
    write_records(tmp_path / "math500.jsonl", math_500),
  )


def write_records(path: pathlib.Path, records: list[dict[str, Any]]) -> str:
  """Writes a JSONL file, and returns its path."""
  lines = [json.dumps(record) + "\n" for record in records]
  path.write_text("".join(lines))
  return str(path)


class FakeSampler:
  """A sampler over a function from the text of a prompt to an answer."""

  def __init__(self, answer: Callable[[str], str], max_length: int):
    self.answer = answer
    self.max_length = max_length
    self.prompts: list[list[int]] = []

  def __call__(
    self, model: Any, params: Any, *, batch_size: int, capacity: int
  ) -> FakeSampler:
    assert capacity <= self.max_length
    self.capacity = capacity
    return self

  def generate(
    self,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    stop_ids: Sequence[int],
    stop: Callable[[list[int]], bool],
  ) -> list[list[int]]:
    answers = []
    for prompt in prompts:
      assert len(prompt) + max_new_tokens <= self.capacity
      self.prompts.append(prompt)
      whole_answer = BYTES.encode(self.answer(BYTES.decode(prompt)))
      answer: list[int] = []
      for token in whole_answer[:max_new_tokens]:
        answer.append(token)
        if stop(answer):
          break
      answers.append(answer)
    return answers


class Evaluation(NamedTuple):
  """The results of a suite.

  Attributes:
    results: The results by (name, file).
    prompts: The texts of the prompts.
    prompt_ids: The tokens of the prompts.
  """

  results: dict[tuple[str, str], dict[str, Any]]
  prompts: list[str]
  prompt_ids: list[list[int]]


def evaluate(
  monkeypatch: pytest.MonkeyPatch,
  suite: Mathematics,
  answer: Callable[[str], str],
  trained: Trained = TRAINED,
) -> Evaluation:
  """Returns the results of a model that answers by a function."""
  sampler = FakeSampler(answer, trained.config.model.max_length)
  monkeypatch.setattr(mathematics, "Sampler", sampler)
  results = {}
  for result in intervals.compare(suite.evaluate(trained)):
    results[result["name"], result["at"]["file"]] = result
  prompts = [BYTES.decode(prompt) for prompt in sampler.prompts]
  return Evaluation(results, prompts, sampler.prompts)


def with_template(prompt_template: str) -> Trained:
  """Returns a model that was fine-tuned with a template."""
  data = DataConfig(prompt_template=prompt_template)
  config = dataclasses.replace(TRAINED.config, data=data)
  return dataclasses.replace(TRAINED, config=config)


def answer_right(prompt: str) -> str:
  """Returns the right answer to the last question, in other words."""
  question = prompt.rpartition(": ")[2]
  number = int(question.split()[2].rstrip("?"))
  if question.startswith("What"):
    return f"Let me see. 17 + 4 ... The answer is {2 * number}.0"
  return rf"So \boxed{{{number / 2}}}"


def answer_gsm8k_only(prompt: str) -> str:
  """Returns right answers to questions of GSM8K, and nothing to others."""
  if prompt.startswith("Q: What is"):
    return answer_right(prompt)
  return ""


def test_right_answers_score_1(monkeypatch, files):
  """The files "gsm8k", "math" and "math500" have 6, 4 and 4 questions.

  "ended" is the share of answers that end before their maximum length.
  """
  suite = Mathematics(files=",".join(files), new_tokens=100)

  results = evaluate(monkeypatch, suite, answer_right).results

  assert results.keys() == {
    ("accuracy", "gsm8k"),
    ("accuracy", "math"),
    ("accuracy", "math500"),
    ("accuracy", "mean"),
    ("ended", "gsm8k"),
    ("ended", "math"),
    ("ended", "math500"),
  }
  for result in results.values():
    assert result["value"] == 1.0
  assert results["accuracy", "gsm8k"]["units"] == 6
  assert results["accuracy", "mean"]["units"] == 6 + 4 + 4


@pytest.mark.parametrize(
  "wrong_answer",
  [
    pytest.param("The answer is 1000.", id="number"),
    pytest.param("", id="empty"),
    pytest.param("nothing", id="no number"),
    pytest.param(r"\boxed{x}", id="variable"),
  ],
)
def test_wrong_answers_score_0(monkeypatch, files, wrong_answer):
  """All questions of the three files get the same wrong answer."""
  suite = Mathematics(files=",".join(files), new_tokens=100)

  def answer_wrong(prompt: str) -> str:
    return wrong_answer

  results = evaluate(monkeypatch, suite, answer_wrong).results

  for file in ("gsm8k", "math", "math500", "mean"):
    assert results["accuracy", file]["value"] == 0


def test_files_have_equal_weight_in_the_mean(monkeypatch, files):
  """All six answers of one file are right, and none of the other's four."""
  suite = Mathematics(files=f"{files.gsm8k},{files.math}", new_tokens=100)

  results = evaluate(monkeypatch, suite, answer_gsm8k_only).results

  gsm8k_accuracy = 6 / 6
  math_accuracy = 0 / 4
  assert results["accuracy", "gsm8k"]["value"] == gsm8k_accuracy
  assert results["accuracy", "math"]["value"] == math_accuracy
  mean = results["accuracy", "mean"]["value"]
  assert mean == pytest.approx((gsm8k_accuracy + math_accuracy) / 2)


def test_few_answers_leave_wide_intervals(monkeypatch, files):
  """6 of 6 answers are right in one file, and 0 of 4 in the other."""
  suite = Mathematics(files=f"{files.gsm8k},{files.math}", new_tokens=100)

  results = evaluate(monkeypatch, suite, answer_gsm8k_only).results

  assert results["accuracy", "gsm8k"]["low"] < 0.7
  assert results["accuracy", "math"]["high"] > 0.3
  mean = results["accuracy", "mean"]
  assert mean["low"] < 0.5 < mean["high"]


@pytest.mark.parametrize("right_answer", ["The answer is 6.", r"\boxed{6}"])
def test_text_after_the_next_question_does_not_count(
  monkeypatch, tmp_path, right_answer
):
  """A model often continues its answer with a question of its own."""
  # The template of prompts with which the model was fine-tuned.
  trained = with_template("Exercise 9: {prompt}\nA:")
  record = {"question": "What is 3 + 3?", "answer": "6"}
  path = write_records(tmp_path / "a.jsonl", [record])
  suite = Mathematics(files=path, new_tokens=200)

  def answer_and_ask(prompt: str) -> str:
    return f"{right_answer}\n\nExercise 9: What is 1 + 1?\nA: 2."

  results = evaluate(monkeypatch, suite, answer_and_ask, trained).results

  assert results["accuracy", "a"]["value"] == 1
  # The answer ends before the maximum length of 200 tokens, here bytes.
  assert results["ended", "a"]["value"] == 1


def test_a_number_in_the_template_is_not_an_answer(monkeypatch, tmp_path):
  """The last number of a text is the answer.

  Here the text ends with the template of the next question, whose number 9 does
  not count.
  """
  # The template of prompts with which the model was fine-tuned.
  trained = with_template("Exercise 9: {prompt}\nA:")
  record = {"question": "What is 3 + 3?", "answer": "6"}
  path = write_records(tmp_path / "a.jsonl", [record])
  suite = Mathematics(files=path, new_tokens=200)

  def answer_and_ask(prompt: str) -> str:
    return "6\nExercise 9: What"

  results = evaluate(monkeypatch, suite, answer_and_ask, trained).results

  assert results["accuracy", "a"]["value"] == 1


def test_an_answer_of_the_maximum_length_has_not_ended(monkeypatch, files):
  """One answer of six has 200 tokens, here bytes, and is cut after 50.

  "ended" is the share of answers that end before their maximum length.
  """
  suite = Mathematics(files=files.gsm8k, new_tokens=50)

  def answer_first_question_at_length(prompt: str) -> str:
    # Only the first question is "What is 3 + 3?".
    return "3" * 200 if "3 + 3" in prompt else "no"

  evaluation = evaluate(monkeypatch, suite, answer_first_question_at_length)

  ended = evaluation.results["ended", "gsm8k"]
  assert ended["value"] == pytest.approx(5 / 6)


def test_demonstrations_precede_each_question(monkeypatch, files):
  """The first two records of the file "math500" are shown as demonstrations.

  Three questions of the file "gsm8k" are asked.
  """
  suite = Mathematics(
    files=files.gsm8k,
    shots=2,
    shots_file=files.math500,
    questions=3,
    new_tokens=100,
  )

  evaluation = evaluate(monkeypatch, suite, answer_right)

  shots = "Q: Half of 1?\nA:See above.\n\nQ: Half of 2?\nA:See above.\n\n"
  assert evaluation.prompts == [
    f"{shots}Q: What is 3 + 3?\nA:",
    f"{shots}Q: What is 4 + 4?\nA:",
    f"{shots}Q: What is 5 + 5?\nA:",
  ]
  assert evaluation.results["accuracy", "gsm8k"]["value"] == 1.0


def test_a_demonstration_that_is_a_scored_question_raises(monkeypatch, files):
  """The files "math" and "math500" both ask "Half of 1?"."""
  suite = Mathematics(
    files=f"{files.gsm8k},{files.math}",
    shots=1,
    shots_file=files.math500,
    new_tokens=100,
  )

  message = (
    "math500.jsonl:1: this demonstration is also a scored question .*"
    "math.jsonl:1"
  )
  with pytest.raises(UserError, match=message):
    evaluate(monkeypatch, suite, answer_right)


def test_prompts_are_those_of_fine_tuning(monkeypatch, tmp_path):
  """A prompt has the tokens that precede the answer in a training example."""
  record = {"question": "2 + 2?", "answer": "4"}
  path = write_records(tmp_path / "a.jsonl", [record])
  trained = with_template("Q: {prompt}\nA:")
  training_document = Document(text="4", replaced=False, prompt="Q: 2 + 2?\nA:")
  tokenize = Tokenize("bytes")
  training_example = tokenize(training_document)
  suite = Mathematics(files=path, new_tokens=100)

  def answer_4(prompt: str) -> str:
    return "4"

  evaluation = evaluate(monkeypatch, suite, answer_4, trained)

  num_prompt_tokens = training_example.prompt_length
  expected = training_example.tokens[:num_prompt_tokens].tolist()
  assert evaluation.prompt_ids == [expected]


@pytest.mark.parametrize(
  "record, message",
  [
    pytest.param(
      {"answer": "5"},
      "a.jsonl:2: the field 'question' or 'problem' is missing; there are"
      " 'answer'",
      id="no question",
    ),
    pytest.param(
      {"question": "5?"},
      "a.jsonl:2: the field 'answer' or 'solution' is missing; there are"
      " 'question'",
      id="no answer",
    ),
    pytest.param(
      {"question": "5?", "answer": ["5"]},
      "a.jsonl:2: the field 'answer' must be a string; got \"['5']\"",
      id="list",
    ),
    pytest.param(
      {"question": 5, "answer": True},
      "a.jsonl:2: the field 'answer' must be a string; got 'True'",
      id="bool",
    ),
    pytest.param(
      {"question": "5?", "answer": " "},
      "a.jsonl:2: there is no final answer in ' '",
      id="blank answer",
    ),
    pytest.param(
      {"question": "5?", "answer": r"\boxed{}"},
      "a.jsonl:2: there is no final answer",
      id="empty box",
    ),
    # The template "Q: {prompt}\nA:" and a separator take 7 tokens, here bytes.
    pytest.param(
      {"question": "x" * 700, "answer": "5"},
      "a.jsonl:2: a prompt of 707 tokens, demonstrations included, and"
      " set.mathematics.new_tokens = 50 are more than the model's 700",
      id="long question",
    ),
  ],
)
def test_an_invalid_record_is_reported_in_one_line(tmp_path, record, message):
  """The invalid record is the second line of the file "a.jsonl"."""
  valid = {"question": "What is 3 + 3?", "answer": "6"}
  path = write_records(tmp_path / "a.jsonl", [valid, record])
  suite = Mathematics(files=path, new_tokens=50)

  with pytest.raises(UserError, match=re.escape(message)) as error:
    list(suite.evaluate(TRAINED))
  assert "\n" not in str(error.value)


def test_an_answer_can_be_a_number(tmp_path):
  """A JSON number instead of a string, as the benchmark AIME has it."""
  record = {"problem": "?", "answer": 25}
  path = write_records(tmp_path / "aime.jsonl", [record])

  (question,) = mathematics.read(path)

  assert question.answer == "25"


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"files": " ,"},
      "set.mathematics.files names JSONL files",
      id="no files",
    ),
    pytest.param(
      {"files": "/nowhere/a.jsonl"},
      "/nowhere/a.jsonl: cannot be read",
      id="missing file",
    ),
    pytest.param(
      {"files": "a/b.jsonl,c/b.jsonl"},
      "two files have the same name",
      id="equal names",
    ),
    pytest.param(
      {"shots": 1},
      "set.mathematics.shots_file must name a file",
      id="no shots_file",
    ),
    pytest.param(
      {"shots": -1},
      "set.mathematics.shots = -1: must be at least 0",
      id="negative shots",
    ),
    pytest.param(
      {"new_tokens": 0},
      "set.mathematics.new_tokens = 0: must be at least 1",
      id="no new tokens",
    ),
  ],
)
def test_an_invalid_setting_raises(files, settings, message):
  all_settings = {"files": ",".join(files), **settings}
  with pytest.raises(UserError, match=message):
    list(Mathematics(**all_settings).evaluate(TRAINED))


def test_more_demonstrations_than_records_raise(files):
  """The file "math" of this test has four questions."""
  suite = Mathematics(files=files.gsm8k, shots=9, shots_file=files.math)

  message = "set.mathematics.shots = 9: .*math.jsonl has 4 records"
  with pytest.raises(UserError, match=message):
    list(suite.evaluate(TRAINED))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The directory of a run whose model is not trained."""
  config = Config(
    model=ModelConfig(
      num_layers=1,
      embed_dim=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=8,
      ffn_dim=16,
      max_length=256,
    )
  )
  tokens = jax.ShapeDtypeStruct((1, 4), np.int32)
  params = parameters(Decoder(config.model), tokens)
  directory = tmp_path_factory.mktemp("run")
  with Checkpoints(directory, keep=1) as checkpoints:
    checkpoints.save(
      0, {"params": params}, data_state={}, config=config.to_dict(), scores={}
    )
    checkpoints.wait()
  return directory


def test_the_command_writes_the_results(files, workdir):
  """Three questions of each of two files are asked."""
  result = in_process.call(
    "diffjax.evaluate",
    "--suite=mathematics",
    f"--workdir={workdir}",
    f"--set.mathematics.files={files.gsm8k},{files.math}",
    "--set.mathematics.new_tokens=9",
    "--set.mathematics.questions=3",
  )

  assert result.returncode == 0, result.stderr
  suite_results = json.loads((workdir / "evals/mathematics.json").read_text())
  rows = []
  for figure in suite_results["figures"]:
    rows.append((figure["name"], figure["at"]["file"], figure["units"]))
  # The last number is the number of questions.
  assert rows == [
    ("accuracy", "gsm8k", 3),
    ("ended", "gsm8k", 3),
    ("accuracy", "math", 3),
    ("ended", "math", 3),
    ("accuracy", "mean", 3 + 3),
  ]


def test_the_command_reports_an_invalid_record(tmp_path, workdir):
  valid = {"question": "What is 3 + 3?", "answer": "6"}
  without_answer = {"question": "?"}
  path = write_records(tmp_path / "bad.jsonl", [valid, without_answer])

  result = in_process.call(
    "diffjax.evaluate",
    "--suite=mathematics",
    f"--workdir={workdir}",
    f"--set.mathematics.files={path}",
    "--set.mathematics.new_tokens=9",
  )

  assert result.returncode == 1
  last_line = result.stderr.splitlines(keepends=True)[-1]
  assert last_line == (
    f"error: {path}:2: the field 'answer' or 'solution' is missing;"
    " there are 'question'\n"
  )
