"""The harness on local questions: bundled tasks give the known accuracies, and errors in files are reported with their lines."""

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from diffjax.config import Config, ModelConfig, UserError  # noqa: E402
from diffjax.data.tokenizer import load_tokenizer  # noqa: E402
from diffjax.evals import harness  # noqa: E402
from diffjax.evals.methods import harness_tasks  # noqa: E402
from diffjax.evals.methods import lm_eval as adapter  # noqa: E402
from diffjax.evals.methods.scoring import Score  # noqa: E402
from diffjax.evals.report import intervals  # noqa: E402
from diffjax.inference.trained import Trained  # noqa: E402

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "model", Config(model=ModelConfig(max_length=512)), None, None, BYTES
)
LETTERS = {"label": list("ABCD")}
QUESTIONS = {
  "arc_easy": [
    {
      "question": f"Which is {n}?",
      "choices": {"text": list("0123"), **LETTERS},
      "answerKey": "ABCD"[n],
    }
    for n in range(4)
  ],
  "arc_challenge": [
    {
      "question": "Which is 2?",
      "choices": {"text": list("0123"), **LETTERS},
      "answerKey": "C",
    }
  ],
  "boolq": [
    {"passage": "So it is.", "question": "is it so", "label": label}
    for label in (0, 0, 1)
  ],
  "hellaswag": [  # the second ending has most 2s, the first most for its length, once its brackets are gone
    {
      "activity_label": "Cooking",
      "ctx_a": "A man stands.",
      "ctx_b": "he",
      "endings": ["[steps]2", "2 and 2", "3", "4"],
      "label": label,
    }
    for label in "001"
  ],
  "openbookqa": [
    {
      "question_stem": "Water is",
      "choices": {"text": ["2", "dry", "hot", "red"], **LETTERS},
      "answerKey": "A",
    }
  ],
  "piqa": [
    {
      "goal": "To eat",
      "sol1": "use a fork",
      "sol2": "use 2 forks",
      "label": label,
    }
    for label in (0, 1)
  ],
  "winogrande": [
    {
      "sentence": "Ann told Bea 22 times that _ is late.",
      "option1": "Ann 2",
      "option2": "Bea",
      "answer": "1",
    }
  ],
}
SPLITS = {
  task: "test"
  if task in ("arc_easy", "arc_challenge", "openbookqa")
  else "validation"
  for task in QUESTIONS
}


def score_twos(model, params, pairs, *, batch_tokens):
  """A model that prefers 2s, in the continuation and, for WinoGrande, in the context."""
  count = lambda ids: bytes(ids).count(b"2")
  return [
    Score(float(count(continuation)) + 0.1 * count(context), False)
    for context, continuation in pairs
  ]


ALL = (
  harness_tasks.task_manager
)  # of lm-eval's thousands of tasks: to read their files takes seconds


@functools.cache
def few():
  """Restricts lm-eval to the tasks of these tests."""
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
  paths = [
    str(pathlib.Path(tasks.__file__).parent / folder) for folder in folders
  ]
  return tasks.TaskManager(include_path=paths, include_defaults=False)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
  monkeypatch.setattr(harness_tasks, "task_manager", few)


@pytest.mark.full
def test_the_papers_tasks_are_found_among_all(monkeypatch, data):
  monkeypatch.setattr(harness_tasks, "task_manager", ALL)
  monkeypatch.setattr(adapter, "score", score_twos)
  assert {task for _, task in run(data_dir=str(data))} == {*QUESTIONS, None}
  for name in QUESTIONS:
    assert ALL().task_index[name].yaml_path == few().task_index[name].yaml_path


@pytest.fixture
def data(tmp_path):
  for task, rows in QUESTIONS.items():
    write(tmp_path, task, rows)
  return tmp_path


def write(directory, task, rows, split=None):
  path = directory / task / f"{split or SPLITS[task]}.jsonl"
  path.parent.mkdir(exist_ok=True)
  path.write_text(
    "".join(
      row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows
    )
  )
  return path


def run(**settings):
  found = list(harness.Harness(**settings).evaluate(TRAINED))
  return {(figure.name, figure.at.get("task")): figure for figure in found}


def test_the_papers_tasks_on_local_questions(monkeypatch, data):
  monkeypatch.setattr(adapter, "score", score_twos)
  found = run(data_dir=str(data))
  accuracy = {
    "arc_easy": 0.25,
    "arc_challenge": 1.0,
    "boolq": 2 / 3,
    "openbookqa": 1.0,
    "piqa": 0.5,
    "winogrande": 1.0,
  }
  for task, expected in accuracy.items():
    assert intervals.interval(found["acc", task]).value == pytest.approx(
      expected
    )
    assert len(found["acc", task].units) == len(QUESTIONS[task])
  assert intervals.interval(found["acc", "hellaswag"]).value == pytest.approx(
    1 / 3
  )
  assert intervals.interval(
    found["acc_norm", "hellaswag"]
  ).value == pytest.approx(2 / 3)
  certain = intervals.interval(found["acc", "openbookqa"])
  assert certain.value == certain.high == 1 and certain.low < 0.6
  assert intervals.interval(
    found["mean accuracy", None]
  ).value == pytest.approx(np.mean([*accuracy.values(), 2 / 3]))
  # Pairing: the same questions in the same order
  rows = list(
    intervals.compare(found.values(), run(data_dir=str(data)).values())
  )
  assert all(
    row["difference"] == row["difference"] | {"value": 0, "units": row["units"]}
    for row in rows
  )


def test_a_few_questions_and_examples(monkeypatch, data):
  seen = []
  monkeypatch.setattr(
    adapter,
    "score",
    lambda model, params, pairs, **_: (
      seen.extend(pairs) or score_twos(model, params, pairs, **_)
    ),
  )
  assert (
    len(
      run(data_dir=str(data), tasks=("arc_easy",), limit=2)[
        "acc", "arc_easy"
      ].units
    )
    == 2
    and len(seen) == 8
  )
  with pytest.raises(
    UserError,
    match="set.harness.num_fewshot = 1: .*arc_easy holds no train.jsonl",
  ):
    run(data_dir=str(data), tasks=("arc_easy",), num_fewshot=1)
  write(
    data,
    "arc_easy",
    [QUESTIONS["arc_easy"][3] | {"question": "An example?"}],
    "train",
  )
  seen.clear()
  run(data_dir=str(data), tasks=("arc_easy",), num_fewshot=1)
  assert all(
    bytes(context[1:]).startswith(
      b"Question: An example?\nAnswer: 3\n\nQuestion: Which is"
    )
    for context, _ in seen
  )


def gsm8k(*numbers):
  return [
    {"question": f"What is number {n}?", "answer": f"It is {n}.\n#### {n}"}
    for n in numbers
  ]


@pytest.fixture
def prompts(monkeypatch):
  """Collects the prompts of questions that are answered in writing."""
  prompts = []

  def generate_until(self, requests, disable_tqdm=False):
    prompts.extend(request.args[0] for request in requests)
    return ["#### 1"] * len(requests)

  monkeypatch.setattr(adapter.DiffjaxLM, "generate_until", generate_until)
  return prompts


def test_no_prompt_shows_a_scored_question(prompts, tmp_path):
  scored = gsm8k(*range(10, 18))
  write(tmp_path, "gsm8k", scored, "test")
  other = gsm8k(*range(20, 26))
  # The training file is absent, a copy, has the questions with other answers,
  # or shares some questions.
  reworded = [
    question | {"answer": "It is 7.\n#### 7", "id": 1} for question in scored
  ]
  for train in (None, scored, reworded, scored[:3] + other):
    if train is not None:
      write(tmp_path, "gsm8k", train, "train")
    for num_fewshot in (-1, 0, 3):
      prompts.clear()
      asked = dict(
        tasks=("gsm8k",), data_dir=str(tmp_path), num_fewshot=num_fewshot
      )
      if num_fewshot != 0 and train in (None, scored, reworded):
        with pytest.raises(UserError, match="set.harness.num_fewshot"):
          run(**asked)
        continue
      run(**asked)
      assert len(prompts) == len(scored)
      num_shown = {-1: 5, 0: 0, 3: 3}[num_fewshot]
      for question, prompt in zip(scored, prompts, strict=True):
        assert prompt.count("Question:") == 1 + num_shown
        assert prompt.count("number 1") == 1
        assert prompt.endswith(f"{question['question']}\nAnswer:")


def test_a_default_number_of_examples_is_checked_like_a_chosen_one(
  prompts, tmp_path
):
  write(tmp_path, "gsm8k", gsm8k(*range(10, 18)), "test")
  message = (
    "num_fewshot = -1: gsm8k shows 5 examples, and has 0 that are not scored"
    " questions; set.harness.num_fewshot=0 asks without .*gsm8k/train.jsonl"
  )
  with pytest.raises(UserError, match=message):
    run(tasks=("gsm8k",), data_dir=str(tmp_path))
  # A validation file is a source of examples, as lm-eval defines it.
  write(tmp_path, "gsm8k", gsm8k(*range(20, 25)), "validation")
  run(tasks=("gsm8k",), data_dir=str(tmp_path))
  assert all(prompt.count("number 2") == 5 for prompt in prompts)


def test_a_task_may_not_draw_examples_from_the_split_that_is_scored(
  monkeypatch, prompts, tmp_path
):
  """Documents can differ, since examples can be processed differently."""
  from lm_eval import tasks

  write(tmp_path, "gsm8k", gsm8k(*range(10, 18)), "test")
  config = {
    "include": str(few().task_index["gsm8k"].yaml_path),
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
  (tmp_path / "own_gsm8k.yaml").write_text(json.dumps(config))
  (tmp_path / "own_group.yaml").write_text(
    json.dumps({"group": "own_group", "task": ["own_gsm8k"]})
  )
  manager = tasks.TaskManager(
    include_path=str(tmp_path), include_defaults=False
  )
  monkeypatch.setattr(harness_tasks, "task_manager", lambda: manager)
  for name in ("own_gsm8k", "own_group"):
    with pytest.raises(
      UserError, match="own_gsm8k shows 5 examples, and has 0"
    ):
      run(tasks=(name,))
    run(tasks=(name,), num_fewshot=0)
  assert all(prompt.count("number 1") == 1 for prompt in prompts)


def test_a_perplexity_and_a_task_beyond_the_papers(monkeypatch, tmp_path):
  monkeypatch.setattr(
    adapter,
    "score",
    lambda model, params, pairs, **_: [
      Score(-2.0 * len(c), True) for _, c in pairs
    ],
  )
  write(
    tmp_path,
    "wikitext",
    [{"page": "four words are here"}, {"page": "and two"}],
    "test",
  )
  found = run(data_dir=str(tmp_path), tasks=("wikitext",))
  letters = len("four words are hereand two")
  assert intervals.interval(
    found["byte_perplexity", "wikitext"]
  ).value == pytest.approx(np.exp(2))
  assert intervals.interval(
    found["word_perplexity", "wikitext"]
  ).value == pytest.approx(np.exp(2 * letters / 6))
  assert np.isfinite(
    intervals.interval(found["word_perplexity", "wikitext"]).low
  )


@pytest.mark.parametrize(
  "task, rows, message",
  [
    (
      "boolq",
      [QUESTIONS["boolq"][0], {"passage": "x", "label": 0}],
      "boolq/validation.jsonl:2: the field 'question' is missing",
    ),
    (
      "arc_easy",
      ["\n", {"question": "?", "choices": {"text": []}, "answerKey": "A"}],
      "jsonl:2: the field 'choices.label' is missing",
    ),
    (
      "arc_easy",
      [
        QUESTIONS["arc_easy"][0],
        "\n",
        QUESTIONS["arc_easy"][0] | {"answerKey": "E"},
      ],
      "jsonl:3: arc_easy cannot read this",
    ),
    (
      "arc_easy",
      [QUESTIONS["arc_easy"][0] | {"answerKey": "E"}],
      "'arc_easy' cannot be loaded .*; see .*test.jsonl:1",
    ),
    (
      "winogrande",
      [QUESTIONS["winogrande"][0] | {"sentence": "no gap"}],
      "'winogrande' cannot be loaded",
    ),
    (
      "hellaswag",
      [QUESTIONS["hellaswag"][0] | {"label": "x"}],
      "'hellaswag' cannot be loaded",
    ),
    ("piqa", [], "validation.jsonl: is empty"),
    ("piqa", ["{"], "validation.jsonl:1: not JSON"),
  ],
)
def test_bad_questions(monkeypatch, tmp_path, task, rows, message):
  monkeypatch.setattr(adapter, "score", score_twos)
  write(tmp_path, task, rows)
  with pytest.raises(UserError, match=message) as error:
    run(data_dir=str(tmp_path), tasks=(task,))
  assert "\n" not in str(error.value)


def test_bad_settings(tmp_path):
  with pytest.raises(
    UserError, match="lm-eval has no task 'arc_esy'; similar ones are arc_easy"
  ):
    run(tasks=("arc_esy",))
  with pytest.raises(UserError, match="set.harness.tasks is empty"):
    run(tasks=())
  with pytest.raises(UserError, match="'mmlu' is a group of tasks"):
    run(tasks=("mmlu",), data_dir=str(tmp_path))
  with pytest.raises(
    UserError,
    match="boolq holds neither test.jsonl nor validation.jsonl.*with the fields passage, question, label",
  ):
    run(tasks=("boolq",), data_dir=str(tmp_path))


def test_without_the_hub_the_remedy_is_said(monkeypatch):
  import datasets

  def refuse(*_, **__):
    raise ConnectionError("no network")

  monkeypatch.setattr(datasets, "load_dataset", refuse)
  with pytest.raises(
    UserError,
    match="'boolq' cannot be loaded .no network.; .*set.harness.data_dir",
  ):
    run(tasks=("boolq",))


def test_it_needs_lm_eval(monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "diffjax.evals.methods.lm_eval", None)
  with pytest.raises(
    UserError,
    match=r"the harness needs lm-eval, .*pip install 'diffjax\[eval\]'",
  ):
    run(tasks=("boolq",))
  assert dataclasses.fields(harness.Harness)  # the settings do not
