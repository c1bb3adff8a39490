"""Zero-shot tasks of the LM Evaluation Harness (lm-eval, the extra `eval`), from its own task files.

The paper's tables have ARC-C, ARC-E, BoolQ, HellaSwag, OBQA, PIQA and WinoGrande and do not say which accuracy they give. The row of
OpenLLaMA-3B-v2 agrees with that model's published figures if it is `acc_norm` (normalised by the endings' bytes) for HellaSwag and `acc`
for the other tasks. The mean here is of the same metrics. All metrics of a task are figures. They are shares of 1, per question.

lm-eval downloads questions from the Hugging Face hub. Without the hub, data_dir names a directory with one folder a task:

    DIR/TASK/test.jsonl or DIR/TASK/validation.jsonl     the questions, one JSON object a line
    DIR/TASK/train.jsonl                                 examples, only for tasks that show some

with the fields of the hub's datasets (`datasets.load_dataset(…)["test"].to_json(PATH)` writes such files):

    arc_challenge, arc_easy    question, choices {text: […], label: […]}, answerKey
    boolq                      passage, question, label (0 no, 1 yes)
    hellaswag                  activity_label, ctx_a, ctx_b, endings […], label
    openbookqa                 question_stem, choices {text: […], label: […]}, answerKey
    piqa                       goal, sol1, sol2, label (0 or 1)
    winogrande                 sentence (with _ for the gap), option1, option2, answer ("1" or "2")

Any other task of lm-eval works too, if every line of its file has the same fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from absl import logging

from diffjax.config import UserError, field
from diffjax.data.document import reason
from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.methods import jsonl, scoring
from diffjax.evals.report.results import TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.trained import Trained

PAPER = (
  "arc_challenge",
  "arc_easy",
  "boolq",
  "hellaswag",
  "openbookqa",
  "piqa",
  "winogrande",
)
_CHOICES = {"choices.text": list, "choices.label": list, "answerKey": str}
_FIELDS: dict[str, dict[str, type]] = {
  "arc_challenge": {"question": str, **_CHOICES},
  "arc_easy": {"question": str, **_CHOICES},
  "boolq": {"passage": str, "question": str, "label": int},
  "hellaswag": {
    "activity_label": str,
    "ctx_a": str,
    "ctx_b": str,
    "endings": list,
    "label": object,
  },
  "openbookqa": {"question_stem": str, **_CHOICES},
  "piqa": {"goal": str, "sol1": str, "sol2": str, "label": int},
  "winogrande": {
    "sentence": str,
    "option1": str,
    "option2": str,
    "answer": str,
  },
}


class _Data(NamedTuple):
  """lm-eval's tasks by name, and the directory of their files."""

  tasks: dict[str, Any]
  directory: tempfile.TemporaryDirectory


@dataclasses.dataclass(frozen=True)
class Harness(Suite[_Data]):
  """Zero-shot accuracy on tasks of the LM Evaluation Harness (lm-eval).

  The measurements are all metrics of the tasks, under lm-eval's names. "acc" is
  the fraction of questions with the right answer, "acc_norm" the same with
  likelihoods per byte of an answer. With several tasks, "mean accuracy" is their
  mean, as the paper's tables give it. The units are questions.
  """

  name: ClassVar[str] = "harness"
  table: ClassVar[TableSpec] = TableSpec(
    unit="questions",
    notes=(
      "acc: share of the questions with the right answer",
      "acc_norm: the same, with likelihoods per byte of an answer",
    ),
  )

  tasks: tuple[str, ...] = field(
    PAPER, "Names of lm-eval's tasks. The paper's seven by default."
  )
  data_dir: str = field(
    "",
    "Directory of local questions, DIR/TASK/test.jsonl and so on. Empty for the"
    " Hugging Face hub.",
  )
  num_fewshot: int = field(
    -1,
    "Answered questions before each question. -1 for the task's own number,"
    " which is 0 for the paper's seven.",
  )
  limit: int = field(0, "Questions of each task, the first ones. 0 for all.")
  seed: int = field(1234, "Seed of the choice of few-shot examples.")
  batch_tokens: int = field(
    scoring.BATCH_TOKENS, "Tokens of a batch, including padding."
  )

  def load(self, trained: Trained) -> _Data:
    """Returns the tasks with their questions."""
    if not self.tasks:
      raise UserError(
        f"set.harness.tasks is empty; the paper's are {','.join(PAPER)}"
      )
    try:
      import diffjax.evals.methods.lm_eval  # noqa: F401
    except ImportError as error:
      raise UserError(
        f"the harness needs lm-eval, which cannot be imported ({error}); pip install 'diffjax[eval]'"
      ) from error
    files = tempfile.TemporaryDirectory()
    tasks = _load(self, files.name)
    for name, task in tasks.items():
      _separate_examples(name, task, self)
    return _Data(tasks, files)

  def measure(self, trained: Trained, data: _Data) -> Iterator[Measurement]:
    """Yields metrics."""
    tasks, files = data
    import lm_eval
    from lm_eval.api.metrics import mean

    from diffjax.evals.methods.lm_eval import DiffjaxLM

    with files:
      result = lm_eval.simple_evaluate(
        DiffjaxLM(trained, batch_tokens=self.batch_tokens),
        tasks=list(tasks.values()),
        num_fewshot=None if self.num_fewshot < 0 else self.num_fewshot,
        limit=self.limit or None,
        bootstrap_iters=0,  # intervals are made in report/figures.py
        random_seed=None,  # keep the process's own random numbers
        numpy_random_seed=None,
        torch_random_seed=None,
        fewshot_random_seed=self.seed,
        task_manager=_manager(),
      )
    headline: dict[str, list[float]] = {}
    for name, task in tasks.items():
      samples = result["samples"][name]
      for metric, kind in dict.fromkeys(
        (metric, sample["filter"])
        for sample in samples
        for metric in sample["metrics"]
      ):
        values = [
          sample[metric] for sample in samples if sample["filter"] == kind
        ]
        place = (
          {"task": name} if kind == "none" else {"task": name, "filter": kind}
        )
        aggregation = task.aggregation()[metric]
        if aggregation is mean:
          right_or_wrong = all(value in (0, 1) for value in values)
          yield (proportion if right_or_wrong else mean_of)(
            metric, values, **place
          )
        else:  # such as a perplexity, of log-likelihoods and words: units are indices of the list of values
          again = lambda units, values=values, aggregation=aggregation: float(
            aggregation([values[int(index)] for index in units])
          )
          yield Measurement(metric, np.arange(len(values)), place, again)
        if metric == ("acc_norm" if name == "hellaswag" else "acc"):
          headline[name] = values
    if len(headline) > 1:
      groups = [
        index for index, values in enumerate(headline.values()) for _ in values
      ]
      yield proportion(
        "mean accuracy",
        itertools.chain.from_iterable(headline.values()),
        groups,
      )


@functools.cache
def _manager() -> Any:
  """lm-eval's own tasks, cached, since reading all their files takes seconds."""
  from lm_eval.tasks import TaskManager

  return TaskManager()


def _load(settings: Harness, temporary: str) -> dict[str, Any]:
  """The tasks with their data, by name. A group of tasks gives several."""
  from lm_eval.tasks import TaskManager

  manager = _manager()
  for name in settings.tasks:
    if name not in manager.all_tasks:
      near = difflib.get_close_matches(name, manager.all_tasks, n=3)
      raise UserError(
        f"set.harness.tasks: lm-eval has no task {name!r}"
        + (f"; similar ones are {', '.join(near)}" if near else "")
      )
  if not settings.data_dir:
    remedy = (
      "; without the hub, set.harness.data_dir names a directory of local files"
    )
    return {
      name: task
      for chosen in settings.tasks
      for name, task in _build(manager, chosen, remedy).items()
    }
  folder, questions = os.path.join(temporary, "tasks"), {}
  os.makedirs(folder)
  for name in settings.tasks:
    if name not in manager.all_subtasks:
      raise UserError(
        f"set.harness.tasks: {name!r} is a group of tasks; with local files, name the tasks"
      )
    files = _files(settings, name)
    fields = _FIELDS.get(name, {})
    records = {split: jsonl.read(path, fields) for split, path in files.items()}
    if not fields:  # lm-eval would read a missing field as an empty value
      for split, path in files.items():
        jsonl.read(path, dict.fromkeys(records[split][0].value, object))
    questions[name] = next(
      records[split] for split in ("test", "validation") if split in records
    )
    config = {
      "include": str(manager.task_index[name].yaml_path),
      "task": name,
      "dataset_path": "json",
      "dataset_name": None,
      "dataset_kwargs": {
        "data_files": files,
        "cache_dir": os.path.join(temporary, "cache", name),
      },
      "training_split": "train" if "train" in files else None,
      "validation_split": "validation" if "validation" in files else None,
      "test_split": "test" if "test" in files else None,
      "fewshot_split": None,
    }
    with open(
      os.path.join(folder, f"{name}.yaml"), "w", encoding="utf-8"
    ) as file:
      json.dump(config, file)  # JSON is YAML
  manager = TaskManager(include_path=folder, include_defaults=False)
  tasks = {
    name: _build(manager, name, f"; see {questions[name][0].place}")[name]
    for name in settings.tasks
  }
  for name, task in tasks.items():
    _check_questions(task, questions[name])
  return tasks


def _build(manager: Any, name: str, remedy: str) -> dict[str, Any]:
  try:
    return manager.load([name])["tasks"]
  except Exception as error:  # lm-eval and the libraries that load its data raise exceptions of many kinds
    raise UserError(
      f"set.harness.tasks: {name!r} cannot be loaded ({reason(error)}){remedy}"
    ) from error


def _files(settings: Harness, name: str) -> dict[str, str]:
  """The local files of a task, by split."""
  folder = os.path.join(
    os.path.abspath(os.path.expanduser(settings.data_dir)), name
  )
  files = {
    split: os.path.join(folder, f"{split}.jsonl")
    for split in ("train", "validation", "test")
  }
  files = {split: path for split, path in files.items() if os.path.exists(path)}
  if not {"validation", "test"} & set(files):
    fields = (
      f", with the fields {', '.join(_FIELDS[name])}" if name in _FIELDS else ""
    )
    raise UserError(
      f"{folder} holds neither test.jsonl nor validation.jsonl: the task's questions, one JSON object a line{fields}"
    )
  if settings.num_fewshot > 0 and "train" not in files:
    raise UserError(
      f"set.harness.num_fewshot = {settings.num_fewshot}: {folder} holds no train.jsonl with examples"
    )
  return files


def _separate_examples(name: str, task: Any, settings: Harness) -> None:
  """Removes scored questions from the examples that a task draws from.

  Raises:
    UserError: if too few examples are left.
  """
  num_shots = _num_shots(task, settings)
  if num_shots == 0:
    return
  scored_split = task.config.test_split or task.config.validation_split
  examples: list[Mapping[str, Any]] = []
  # A task can process its examples and its questions differently, so that no
  # question of the same split is recognized.
  if task.fewshot_cfg.split != scored_split:
    scored = {_question(task, document) for document in task.eval_docs}
    for document in task.sampler.df:
      if _question(task, document) not in scored:
        examples.append(document)
  if len(examples) < num_shots:
    message = (
      f"set.harness.num_fewshot = {settings.num_fewshot}: {name} shows"
      f" {num_shots} examples, and has {len(examples)} that are not scored"
      " questions; set.harness.num_fewshot=0 asks without examples"
    )
    if settings.data_dir:
      message += f", {settings.data_dir}/{name}/train.jsonl can hold more"
    raise UserError(message)
  num_removed = len(task.sampler.df) - len(examples)
  if num_removed > 0:
    logging.warning(
      "%s: %d examples are scored questions and are not shown",
      name,
      num_removed,
    )
    task.sampler.replace_df(examples)


def _num_shots(task: Any, settings: Harness) -> int:
  """Returns the number of examples that lm-eval shows before a question."""
  default = task.config.num_fewshot
  # lm-eval keeps the 0 of a task that is defined without examples.
  if default == 0 or settings.num_fewshot < 0:
    return default or 0
  return settings.num_fewshot


def _question(task: Any, document: Mapping[str, Any]) -> str:
  """Returns what tells a document from others: its question.

  The same question may have another wording of the answer, or another id. If
  the task renders no text before the answer, all fields are compared.
  """
  try:
    text = task.doc_to_text(document)
  except Exception:  # Templates and functions of tasks raise many kinds.
    text = None
  if isinstance(text, str) and text.strip():
    return " ".join(text.split())
  return json.dumps(document, sort_keys=True, default=str)


def _check_questions(task: Any, records: Sequence[jsonl.Record]) -> None:
  """Renders every question, so that a question that the task cannot read is reported with its line."""
  for record, question in zip(records, task.eval_docs, strict=True):
    try:
      task.doc_to_text(question)
      task.doc_to_target(question)
      if task.config.doc_to_choice is not None:
        task.doc_to_choice(question)
    except Exception as error:  # templates and functions of tasks raise exceptions of many kinds
      raise UserError(
        f"{record.place}: {task.task_name} cannot read this question ({reason(error)})"
      ) from error
