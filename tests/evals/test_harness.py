"""The harness suite on local questions, with models whose scores are known."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from diffjax.config import Config, ModelConfig, UserError  # noqa: E402
from diffjax.data.tokenizer import load_tokenizer  # noqa: E402
from diffjax.evals import harness  # noqa: E402
from diffjax.evals.measurement import Measurement  # noqa: E402
from diffjax.evals.methods import harness_tasks  # noqa: E402
from diffjax.evals.methods import lm_eval as adapter  # noqa: E402
from diffjax.evals.methods.scoring import Score  # noqa: E402
from diffjax.evals.report import intervals  # noqa: E402
from diffjax.inference.trained import Trained  # noqa: E402

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "model", Config(model=ModelConfig(max_length=512)), None, None, BYTES
)


def arc_record(digit: int) -> dict[str, Any]:
  """Returns a question of ARC whose answer is a digit from 0 to 3."""
  return {
    "question": f"Which is {digit}?",
    "choices": {"text": list("0123"), "label": list("ABCD")},
    "answerKey": "ABCD"[digit],
  }


def boolq_record(label: int) -> dict[str, Any]:
  """Returns a question of BoolQ."""
  return {"passage": "So it is.", "question": "is it so", "label": label}


def hellaswag_record(label: str) -> dict[str, Any]:
  """Returns a question of HellaSwag.

  lm-eval removes the brackets. Then the second ending has the most 2s, and the
  first one has the most 2s for its length.
  """
  return {
    "activity_label": "Cooking",
    "ctx_a": "A man stands.",
    "ctx_b": "he",
    "endings": ["[steps]2", "2 and 2", "3", "4"],
    "label": label,
  }


def piqa_record(label: int) -> dict[str, Any]:
  """Returns a question of PIQA."""
  return {
    "goal": "To eat",
    "sol1": "use a fork",
    "sol2": "use 2 forks",
    "label": label,
  }


OPENBOOKQA_RECORD = {
  "question_stem": "Water is",
  "choices": {"text": ["2", "dry", "hot", "red"], "label": list("ABCD")},
  "answerKey": "A",
}
WINOGRANDE_RECORD = {
  "sentence": "Ann told Bea 22 times that _ is late.",
  "option1": "Ann 2",
  "option2": "Bea",
  "answer": "1",
}

# Questions of the paper's tasks, for a model that prefers 2s (`score_twos`).
QUESTIONS = {
  "arc_easy": [arc_record(0), arc_record(1), arc_record(2), arc_record(3)],
  "arc_challenge": [arc_record(2)],
  "boolq": [boolq_record(0), boolq_record(0), boolq_record(1)],
  "hellaswag": [
    hellaswag_record("0"),
    hellaswag_record("0"),
    hellaswag_record("1"),
  ],
  "openbookqa": [OPENBOOKQA_RECORD],
  "piqa": [piqa_record(0), piqa_record(1)],
  "winogrande": [WINOGRANDE_RECORD],
}
TASKS_SCORED_ON_TEST = ("arc_easy", "arc_challenge", "openbookqa")


def score_twos(
  model: Any, params: Any, pairs: Sequence[Any], **options: Any
) -> list[Score]:
  """Returns scores by the number of 2s.

  A 2 in the continuation counts ten times as much as one in the context, where
  WinoGrande has its options.
  """
  scores = []
  for context, continuation in pairs:
    num_twos = bytes(continuation).count(b"2")
    num_twos_before = bytes(context).count(b"2")
    scores.append(Score(num_twos + 0.1 * num_twos_before, False))
  return scores


def score_two_nats_per_byte(
  model: Any, params: Any, pairs: Sequence[Any], **options: Any
) -> list[Score]:
  """Returns scores of −2 for each byte."""
  scores = []
  for _, continuation in pairs:
    scores.append(Score(-2.0 * len(continuation), True))
  return scores


# Manages all tasks of lm-eval. It takes seconds to read their files.
all_tasks = harness_tasks.task_manager


@functools.cache
def used_tasks() -> Any:
  """Returns lm-eval's manager of the tasks in this file."""
  from lm_eval import tasks

  folders = (
    "arc",
    "super_glue",
    "hellaswag",
    "openbookqa",
    "piqa",
    "winogrande",
    "wikitext",
    "mmlu/default",
    "gsm8k",
  )
  tasks_folder = pathlib.Path(tasks.__file__).parent
  paths = [str(tasks_folder / folder) for folder in folders]
  return tasks.TaskManager(include_path=paths, include_defaults=False)


@pytest.fixture(autouse=True)
def only_used_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes lm-eval read the files of few tasks."""
  monkeypatch.setattr(harness_tasks, "task_manager", used_tasks)


@pytest.fixture
def data_dir(tmp_path: pathlib.Path) -> pathlib.Path:
  """A directory with the questions of all the paper's tasks."""
  for task, records in QUESTIONS.items():
    write_questions(tmp_path, task, records)
  return tmp_path


def write_questions(
  data_dir: pathlib.Path, task: str, records: list[dict[str, Any]]
) -> None:
  """Writes the questions of a task that are scored."""
  split = "test" if task in TASKS_SCORED_ON_TEST else "validation"
  write_split(data_dir, task, split, records)


def write_split(
  data_dir: pathlib.Path,
  task: str,
  split: str,
  records: list[dict[str, Any]],
) -> None:
  """Writes the questions of a split of a task."""
  lines = [json.dumps(record) + "\n" for record in records]
  (data_dir / task).mkdir(exist_ok=True)
  (data_dir / task / f"{split}.jsonl").write_text("".join(lines))


def evaluate(**settings: Any) -> dict[tuple[str, str | None], Measurement]:
  """Returns the measurements by (name, task)."""
  measurements = {}
  for measurement in harness.Harness(**settings).evaluate(TRAINED):
    key = (measurement.name, measurement.at.get("task"))
    measurements[key] = measurement
  return measurements


def value(measurement: Measurement) -> float:
  """Returns the number of a measurement, without its interval."""
  return intervals.interval(measurement).value


PAPER_TASKS = tuple(QUESTIONS)


@pytest.mark.full
def test_the_papers_tasks_are_measured_with_all_tasks_of_lm_eval(
  monkeypatch, data_dir
):
  """In the other tests, lm-eval knows only a few tasks, to save time."""
  monkeypatch.setattr(harness_tasks, "task_manager", all_tasks)
  monkeypatch.setattr(adapter, "score", score_twos)

  measurements = evaluate(data_dir=str(data_dir))

  measured_tasks = {task for name, task in measurements if name == "acc"}
  assert measured_tasks == set(PAPER_TASKS)


@pytest.mark.full
@pytest.mark.parametrize("task", PAPER_TASKS)
def test_other_tests_use_the_same_task_files_as_lm_eval(task):
  """In the other tests, lm-eval knows only a few tasks, to save time."""
  file_among_all_tasks = all_tasks().task_index[task].yaml_path
  file_in_other_tests = used_tasks().task_index[task].yaml_path

  assert file_in_other_tests == file_among_all_tasks


def test_an_accuracy_is_the_share_of_right_choices(monkeypatch, data_dir):
  """`score_twos` makes the model choose the text with the most 2s.

  `data_dir` has questions of seven tasks.
  """
  monkeypatch.setattr(adapter, "score", score_twos)

  measurements = evaluate(data_dir=str(data_dir))

  # For each task: what the model chooses in every question, and the right
  # choices of the questions.
  choices = {
    "arc_easy": ("2", ["0", "1", "2", "3"]),
    "arc_challenge": ("2", ["2"]),
    # Neither "no" nor "yes" has a 2. Then the model chooses the first.
    "boolq": ("no", ["no", "no", "yes"]),
    "hellaswag": ("2 and 2", ["steps 2", "steps 2", "2 and 2"]),
    "openbookqa": ("2", ["2"]),
    "piqa": ("use 2 forks", ["use a fork", "use 2 forks"]),
    "winogrande": ("Ann 2", ["Ann 2"]),
  }
  for task, (choice, right_choices) in choices.items():
    accuracy = measurements["acc", task]
    num_questions = len(right_choices)
    expected = right_choices.count(choice) / num_questions
    assert value(accuracy) == pytest.approx(expected)
    assert len(accuracy.units) == num_questions


def test_the_mean_uses_the_accuracy_by_length_where_a_task_has_one(
  monkeypatch, data_dir
):
  """HellaSwag's acc_norm divides the score of an ending by its length.

  The score is the number of 2s. The ending "2 and 2" has the best score, and is
  right once in three questions. "[steps]2" has the best score by length, since
  lm-eval removes the brackets, and is right twice.
  """
  monkeypatch.setattr(adapter, "score", score_twos)

  measurements = evaluate(
    data_dir=str(data_dir), tasks=("hellaswag", "piqa", "winogrande")
  )

  hellaswag_acc = value(measurements["acc", "hellaswag"])
  hellaswag_acc_norm = value(measurements["acc_norm", "hellaswag"])
  assert hellaswag_acc == pytest.approx(1 / 3)
  assert hellaswag_acc_norm == pytest.approx(2 / 3)
  # The model is right in one of two questions of PIQA, and in the only question
  # of WinoGrande.
  piqa_acc = 1 / 2
  winogrande_acc = 1.0
  # The mean belongs to no task.
  mean = value(measurements["mean accuracy", None])
  expected = (hellaswag_acc_norm + piqa_acc + winogrande_acc) / 3
  assert mean == pytest.approx(expected)


def test_one_right_answer_does_not_make_an_accuracy_certain(
  monkeypatch, data_dir
):
  """The model answers the only question of OpenBookQA, and is right.

  One right answer of one leaves a wide interval.
  """
  monkeypatch.setattr(adapter, "score", score_twos)

  measurements = evaluate(data_dir=str(data_dir), tasks=("openbookqa",))

  estimate = intervals.interval(measurements["acc", "openbookqa"])
  assert estimate.value == estimate.high == 1
  assert estimate.low < 0.6


def test_two_evaluations_have_the_same_questions_in_order(
  monkeypatch, data_dir
):
  """Otherwise the differences of two models could not be paired.

  Here the same model is evaluated twice, so that all differences are 0.
  """
  monkeypatch.setattr(adapter, "score", score_twos)
  tasks = ("arc_easy", "hellaswag")

  first = evaluate(data_dir=str(data_dir), tasks=tasks)
  second = evaluate(data_dir=str(data_dir), tasks=tasks)

  for result in intervals.compare(first.values(), second.values()):
    assert result["difference"]["value"] == 0
    # A unit is a question.
    assert result["difference"]["units"] == result["units"]


class ScoreRecorder:
  """Scores by the number of 2s, and records the pairs."""

  def __init__(self) -> None:
    self.pairs: list[Any] = []

  def __call__(
    self, model: Any, params: Any, pairs: Sequence[Any], **options: Any
  ) -> list[Score]:
    self.pairs += pairs
    return score_twos(model, params, pairs)


def test_limit_is_the_number_of_questions(monkeypatch, data_dir):
  """Two of the four questions of "arc_easy" are asked."""
  recorder = ScoreRecorder()
  monkeypatch.setattr(adapter, "score", recorder)

  measurements = evaluate(data_dir=str(data_dir), tasks=("arc_easy",), limit=2)

  num_questions = len(measurements["acc", "arc_easy"].units)
  assert num_questions == 2
  # Each choice is scored as a continuation of its question.
  num_choices = 4
  assert len(recorder.pairs) == 2 * num_choices


def test_examples_are_from_the_training_file(monkeypatch, data_dir):
  """Each scored prompt begins with the only question of the training file."""
  # Records the pairs of a context and a continuation that are scored.
  recorder = ScoreRecorder()
  monkeypatch.setattr(adapter, "score", recorder)
  choices = {"text": ["yes", "no"], "label": ["A", "B"]}
  example = {"question": "An example?", "choices": choices, "answerKey": "B"}
  write_split(data_dir, "arc_easy", "train", [example])

  evaluate(data_dir=str(data_dir), tasks=("arc_easy",), num_fewshot=1)

  assert recorder.pairs
  for context, _ in recorder.pairs:
    separator, *prompt = context
    assert separator == BYTES.separator
    example_text = "Question: An example?\nAnswer: no\n\n"
    assert BYTES.decode(prompt).startswith(f"{example_text}Question: Which is")


def test_examples_without_a_training_file_raise(data_dir):
  message = "set.harness.num_fewshot = 1: .*arc_easy holds no train.jsonl"
  with pytest.raises(UserError, match=message):
    evaluate(data_dir=str(data_dir), tasks=("arc_easy",), num_fewshot=1)


def gsm8k_records(numbers: Sequence[int]) -> list[dict[str, Any]]:
  """Returns a question of GSM8K for each number."""
  records = []
  for number in numbers:
    record = {
      "question": f"What is number {number}?",
      "answer": f"It is {number}.\n#### {number}",
    }
    records.append(record)
  return records


# Questions with numbers from 10 to 17.
SCORED = gsm8k_records(range(10, 18))

# The same questions with other answers.
REWORDED = [{**record, "answer": "It is 7.\n#### 7"} for record in SCORED]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """The prompts of questions that are answered in writing, so far."""
  prompts = []

  def generate_until(
    self: Any, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    prompts.extend(request.args[0] for request in requests)
    return ["#### 1"] * len(requests)

  monkeypatch.setattr(adapter.DiffjaxLM, "generate_until", generate_until)
  return prompts


@pytest.mark.parametrize(
  "num_fewshot, num_shown",
  [
    pytest.param(-1, 5, id="default"),
    pytest.param(0, 0, id="none"),
    pytest.param(3, 3, id="three"),
  ],
)
def test_no_prompt_shows_a_scored_question(
  prompts, tmp_path, num_fewshot, num_shown
):
  """Examples are from the training file, without questions that are scored.

  -1 is the task's default number of examples, which is 5. The fixture `prompts`
  records the prompts.
  """
  scored = [10, 11, 12, 13, 14, 15, 16, 17]
  not_scored = [20, 21, 22, 23, 24, 25]
  # A question of GSM8K is, for example, "What is number 10?".
  train_records = gsm8k_records([10, 11, 12, *not_scored])
  write_split(tmp_path, "gsm8k", "test", gsm8k_records(scored))
  write_split(tmp_path, "gsm8k", "train", train_records)

  evaluate(tasks=("gsm8k",), data_dir=str(tmp_path), num_fewshot=num_fewshot)

  for number, prompt in zip(scored, prompts, strict=True):
    questions = re.findall(r"Question: What is number (\d+)\?", prompt)
    *shown, scored_number = map(int, questions)
    assert len(shown) == num_shown
    assert set(shown) <= set(not_scored)
    assert scored_number == number
    assert prompt.endswith(f"What is number {number}?\nAnswer:")


@pytest.mark.parametrize("num_fewshot", [-1, 3])
@pytest.mark.parametrize(
  "train",
  [
    pytest.param(None, id="no file"),
    pytest.param(SCORED, id="copy"),
    pytest.param(REWORDED, id="other answers"),
  ],
)
@pytest.mark.usefixtures("prompts")
def test_examples_that_are_scored_questions_raise(tmp_path, train, num_fewshot):
  """An example with the answer of a scored question would give it away.

  The training file has only scored questions (SCORED), or these with other
  answers (REWORDED), or it is missing. For `num_fewshot`, −1 is the default of
  the task, which is five examples.
  """
  write_split(tmp_path, "gsm8k", "test", SCORED)
  if train is not None:
    write_split(tmp_path, "gsm8k", "train", train)

  with pytest.raises(UserError, match="set.harness.num_fewshot"):
    evaluate(tasks=("gsm8k",), data_dir=str(tmp_path), num_fewshot=num_fewshot)


def test_without_examples_no_training_file_is_needed(prompts, tmp_path):
  """The fixture `prompts` records the prompts."""
  scored = gsm8k_records([10, 11])
  write_split(tmp_path, "gsm8k", "test", scored)

  evaluate(tasks=("gsm8k",), data_dir=str(tmp_path), num_fewshot=0)

  assert prompts == [
    "Question: What is number 10?\nAnswer:",
    "Question: What is number 11?\nAnswer:",
  ]


@pytest.mark.usefixtures("prompts")
def test_the_error_names_the_tasks_default_number_of_examples(tmp_path):
  """By default, a prompt of "gsm8k" shows five examples.

  They come from the training file, which is missing here.
  """
  write_split(tmp_path, "gsm8k", "test", SCORED)

  message = (
    "num_fewshot = -1: gsm8k shows 5 examples, and has 0 that are not scored"
    " questions; set.harness.num_fewshot=0 asks without .*gsm8k/train.jsonl"
  )
  with pytest.raises(UserError, match=message):
    evaluate(tasks=("gsm8k",), data_dir=str(tmp_path))


def test_a_validation_file_is_a_source_of_examples(prompts, tmp_path):
  """There is no training file. The fixture `prompts` records the prompts."""
  scored = gsm8k_records([10, 11])
  others = gsm8k_records([20, 21, 22, 23, 24, 25])
  write_split(tmp_path, "gsm8k", "test", scored)
  write_split(tmp_path, "gsm8k", "validation", others)

  evaluate(tasks=("gsm8k",), data_dir=str(tmp_path))

  # The task shows five examples by default. Their numbers begin with 2.
  assert prompts
  for prompt in prompts:
    assert prompt.count("number 2") == 5


@pytest.fixture
def task_with_scored_examples(
  monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
  """A task and a group of it, whose examples are from the scored split."""
  from lm_eval import tasks

  write_split(tmp_path, "gsm8k", "test", SCORED)
  task_config = {
    "include": str(used_tasks().task_index["gsm8k"].yaml_path),
    "task": "own_gsm8k",
    "dataset_path": "json",
    "dataset_name": None,
    "dataset_kwargs": {
      "data_files": {"test": str(tmp_path / "gsm8k" / "test.jsonl")},
      "cache_dir": str(tmp_path / "cache"),
    },
    "training_split": None,
    "fewshot_split": "test",
  }
  group_config = {"group": "own_group", "task": ["own_gsm8k"]}
  (tmp_path / "own_gsm8k.yaml").write_text(json.dumps(task_config))
  (tmp_path / "own_group.yaml").write_text(json.dumps(group_config))
  manager = tasks.TaskManager(
    include_path=str(tmp_path), include_defaults=False
  )

  def task_manager() -> Any:
    return manager

  monkeypatch.setattr(harness_tasks, "task_manager", task_manager)


@pytest.mark.parametrize("name", ["own_gsm8k", "own_group"])
def test_examples_from_the_scored_split_raise(
  task_with_scored_examples, prompts, name
):
  """The task "own_gsm8k" takes its examples from the split that it scores.

  "own_group" is a group of this task. Without examples, both can be measured.
  """
  message = "own_gsm8k shows 5 examples, and has 0"
  with pytest.raises(UserError, match=message):
    evaluate(tasks=(name,))

  evaluate(tasks=(name,), num_fewshot=0)
  # A prompt has only the scored question, whose number begins with 1.
  assert prompts
  for prompt in prompts:
    assert prompt.count("number 1") == 1


def test_perplexity_is_of_words_and_of_bytes(monkeypatch, tmp_path):
  """A perplexity is the exponential of the mean loss of a word or a byte."""
  nats_per_byte = 2
  monkeypatch.setattr(adapter, "score", score_two_nats_per_byte)
  records = [{"page": "four words are here"}, {"page": "and two"}]
  write_split(tmp_path, "wikitext", "test", records)

  measurements = evaluate(data_dir=str(tmp_path), tasks=("wikitext",))

  byte_perplexity = value(measurements["byte_perplexity", "wikitext"])
  assert byte_perplexity == pytest.approx(np.exp(nats_per_byte))
  num_bytes = len("four words are here") + len("and two")
  num_words = 4 + 2
  nats_per_word = nats_per_byte * num_bytes / num_words
  word_perplexity = value(measurements["word_perplexity", "wikitext"])
  assert word_perplexity == pytest.approx(np.exp(nats_per_word))


def test_perplexity_has_an_interval(monkeypatch, tmp_path):
  monkeypatch.setattr(adapter, "score", score_two_nats_per_byte)
  # Pages with different numbers of bytes per word.
  records = [{"page": "four words are here"}, {"page": "and two"}]
  write_split(tmp_path, "wikitext", "test", records)

  measurements = evaluate(data_dir=str(tmp_path), tasks=("wikitext",))

  estimate = intervals.interval(measurements["word_perplexity", "wikitext"])
  assert np.isfinite([estimate.low, estimate.high]).all()


@pytest.mark.parametrize(
  "task, records, message",
  [
    pytest.param(
      "boolq",
      [boolq_record(0), {"passage": "x", "label": 0}],
      "boolq/validation.jsonl:2: the field 'question' is missing",
      id="missing field",
    ),
    pytest.param(
      "arc_easy",
      [arc_record(0), {**arc_record(0), "answerKey": "E"}],
      "test.jsonl:2: arc_easy cannot read this",
      id="no choice has the label E, second record",
    ),
    # lm-eval reads the first question while it loads a task.
    pytest.param(
      "arc_easy",
      [{**arc_record(0), "answerKey": "E"}],
      "'arc_easy' cannot be loaded .*; see .*test.jsonl:1",
      id="no choice has the label E, first record",
    ),
    pytest.param(
      "winogrande",
      [{**WINOGRANDE_RECORD, "sentence": "no gap"}],
      "'winogrande' cannot be loaded",
      id="no gap in the sentence",
    ),
    pytest.param(
      "hellaswag",
      [{**hellaswag_record("0"), "label": "x"}],
      "'hellaswag' cannot be loaded",
      id="label that is no number",
    ),
    pytest.param("piqa", [], "validation.jsonl: is empty", id="empty file"),
  ],
)
def test_an_invalid_question_is_reported_in_one_line(
  monkeypatch, tmp_path, task, records, message
):
  """The error names the task, or the file and the line of the question."""
  monkeypatch.setattr(adapter, "score", score_twos)
  write_questions(tmp_path, task, records)

  with pytest.raises(UserError, match=message) as error:
    evaluate(data_dir=str(tmp_path), tasks=(task,))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "content, message",
  [
    pytest.param(
      '\n{"question": "?", "choices": {"text": []}, "answerKey": "A"}\n',
      "jsonl:2: the field 'choices.label' is missing",
      id="field",
    ),
    pytest.param(
      f"{json.dumps(arc_record(0))}\n\n"
      f"{json.dumps({**arc_record(0), 'answerKey': 'E'})}\n",
      "jsonl:3: arc_easy cannot read this",
      id="answer",
    ),
    pytest.param("{", "test.jsonl:1: not JSON", id="not JSON"),
  ],
)
def test_empty_lines_count_in_the_line_of_an_error(tmp_path, content, message):
  """An error names the line as an editor numbers it."""
  (tmp_path / "arc_easy").mkdir()
  (tmp_path / "arc_easy" / "test.jsonl").write_text(content)

  with pytest.raises(UserError, match=message):
    evaluate(data_dir=str(tmp_path), tasks=("arc_easy",))


@pytest.mark.parametrize(
  "tasks, message",
  [
    pytest.param(
      ("arc_esy",),
      "lm-eval has no task 'arc_esy'; similar ones are arc_easy",
      id="unknown",
    ),
    pytest.param((), "set.harness.tasks is empty", id="none"),
    pytest.param(("mmlu",), "'mmlu' is a group of tasks", id="group"),
    pytest.param(
      ("boolq",),
      "boolq holds neither test.jsonl nor validation.jsonl.*with the fields"
      " passage, question, label",
      id="no file",
    ),
  ],
)
def test_invalid_tasks_raise(tmp_path, tasks, message):
  with pytest.raises(UserError, match=message):
    evaluate(tasks=tasks, data_dir=str(tmp_path))


def test_without_the_hub_the_error_names_data_dir(monkeypatch):
  """Without `data_dir`, the questions come from the Hugging Face Hub."""
  import datasets

  def raise_connection_error(*arguments: Any, **options: Any) -> None:
    raise ConnectionError("no network")

  monkeypatch.setattr(datasets, "load_dataset", raise_connection_error)

  message = r"'boolq' cannot be loaded \(no network\); .*set.harness.data_dir"
  with pytest.raises(UserError, match=message):
    evaluate(tasks=("boolq",))


def test_the_suite_needs_lm_eval(monkeypatch):
  # None makes the import of a module fail.
  monkeypatch.setitem(sys.modules, "diffjax.evals.methods.lm_eval", None)

  message = r"the harness needs lm-eval, .*pip install 'diffjax\[eval\]'"
  with pytest.raises(UserError, match=message):
    evaluate(tasks=("boolq",))


def test_the_settings_do_not_need_lm_eval(monkeypatch):
  monkeypatch.setitem(sys.modules, "diffjax.evals.methods.lm_eval", None)

  assert dataclasses.fields(harness.Harness)
