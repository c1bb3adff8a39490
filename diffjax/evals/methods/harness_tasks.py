"""Tasks of the LM Evaluation Harness (lm-eval) from the hub or local files.

lm-eval downloads questions from the Hugging Face hub. For local questions, a
task file is written that includes lm-eval's own file of the task, and replaces
the source of the data. `harness.py` lists the local files and their fields.

lm-eval is imported by the functions that use it, because it is optional and
takes seconds.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from diffjax.config import UserError
from diffjax.data.document import reason
from diffjax.evals.methods import jsonl

# An lm_eval.api.task.ConfigurableTask.
Task = Any
# An lm_eval.tasks.TaskManager.
TaskManager = Any

_CHOICES = {"choices.text": list, "choices.label": list, "answerKey": str}

# The fields of the questions of the paper's tasks, and their types.
_FIELDS: Mapping[str, Mapping[str, type]] = {
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

_HUB_REMEDY = (
  "; without the hub, set.harness.data_dir names a directory of local files"
)


@functools.cache
def task_manager() -> TaskManager:
  """Returns the tasks that lm-eval comes with.

  They are cached, because lm-eval takes seconds to read their files.
  """
  from lm_eval import tasks

  return tasks.TaskManager()


def load_from_hub(names: Sequence[str]) -> dict[str, Task]:
  """Returns tasks with questions from the Hugging Face hub, by name.

  A group of tasks gives several.

  Raises:
    UserError: if a task is unknown or cannot be loaded.
  """
  manager = task_manager()
  _check_names(names, manager)
  tasks = {}
  for name in names:
    tasks.update(_build(manager, name, _HUB_REMEDY))
  return tasks


def load_local(
  names: Sequence[str], data_dir: str, num_fewshot: int, work_dir: str
) -> dict[str, Task]:
  """Returns tasks with questions from local files, by name.

  Args:
    names: The names of the tasks.
    data_dir: The directory with one folder of files per task.
    num_fewshot: The number of examples before a question. Negative for the
      task's own number.
    work_dir: An empty directory for files that the tasks need.

  Raises:
    UserError: if a task is unknown, or its files are missing or have questions
      that the task cannot read.
  """
  from lm_eval import tasks as lm_eval_tasks

  manager = task_manager()
  _check_names(names, manager)
  config_dir = os.path.join(work_dir, "tasks")
  os.makedirs(config_dir)
  questions_by_task = {}
  for name in names:
    if name not in manager.all_subtasks:
      raise UserError(
        f"set.harness.tasks: {name!r} is a group of tasks; with local files,"
        " name the tasks"
      )
    paths = _local_paths(name, data_dir, num_fewshot)
    questions_by_task[name] = _read_questions(name, paths)
    config = _local_config(
      name,
      paths,
      original_path=str(manager.task_index[name].yaml_path),
      cache_dir=os.path.join(work_dir, "cache", name),
    )
    config_path = os.path.join(config_dir, f"{name}.yaml")
    with open(config_path, "w", encoding="utf-8") as file:
      # JSON is YAML.
      json.dump(config, file)

  local_manager = lm_eval_tasks.TaskManager(
    include_path=config_dir, include_defaults=False
  )
  tasks = {}
  for name in names:
    first_question = questions_by_task[name][0]
    built = _build(local_manager, name, f"; see {first_question.location}")
    tasks[name] = built[name]
  for name, task in tasks.items():
    _check_questions(task, questions_by_task[name])
  return tasks


def _check_names(names: Sequence[str], manager: TaskManager) -> None:
  """Raises UserError if lm-eval lacks a task."""
  for name in names:
    if name in manager.all_tasks:
      continue
    message = f"set.harness.tasks: lm-eval has no task {name!r}"
    similar = difflib.get_close_matches(name, manager.all_tasks, n=3)
    if similar:
      message += f"; similar ones are {', '.join(similar)}"
    raise UserError(message)


def _build(manager: TaskManager, name: str, remedy: str) -> dict[str, Task]:
  """Returns the tasks of a name, with their questions.

  Args:
    manager: The tasks to choose from.
    name: The name of a task or of a group of tasks.
    remedy: The end of the error message.
  """
  try:
    return manager.load([name])["tasks"]
  # lm-eval and the libraries that load its data raise errors of many types.
  except Exception as error:
    raise UserError(
      f"set.harness.tasks: {name!r} cannot be loaded ({reason(error)}){remedy}"
    ) from error


def _local_paths(name: str, data_dir: str, num_fewshot: int) -> dict[str, str]:
  """Returns the local files of a task that exist, by split."""
  absolute_dir = os.path.abspath(os.path.expanduser(data_dir))
  folder = os.path.join(absolute_dir, name)
  paths = {}
  for split in ("train", "validation", "test"):
    path = os.path.join(folder, f"{split}.jsonl")
    if os.path.exists(path):
      paths[split] = path

  if "validation" not in paths and "test" not in paths:
    message = (
      f"{folder} holds neither test.jsonl nor validation.jsonl: the task's"
      " questions, one JSON object a line"
    )
    if name in _FIELDS:
      message += f", with the fields {', '.join(_FIELDS[name])}"
    raise UserError(message)
  if num_fewshot > 0 and "train" not in paths:
    raise UserError(
      f"set.harness.num_fewshot = {num_fewshot}: {folder} holds no train.jsonl"
      " with examples"
    )
  return paths


def _read_questions(name: str, paths: Mapping[str, str]) -> list[jsonl.Record]:
  """Checks the fields of all files of a task. Returns the scored questions.

  lm-eval would read a missing field as an empty value.

  Args:
    name: The name of the task.
    paths: The files by split.
  """
  records_by_split = {}
  for split, path in paths.items():
    records = jsonl.read(path, _FIELDS.get(name, {}))
    records_by_split[split] = records
  if name not in _FIELDS:
    # Each line must have the fields of the first one.
    for split, path in paths.items():
      first_record = records_by_split[split][0]
      jsonl.read(path, dict.fromkeys(first_record.value, object))
  if "test" in records_by_split:
    return records_by_split["test"]
  return records_by_split["validation"]


def _local_config(
  name: str, paths: Mapping[str, str], *, original_path: str, cache_dir: str
) -> dict[str, Any]:
  """Returns the config of a task that reads local files.

  Args:
    name: The name of the task.
    paths: The files by split.
    original_path: lm-eval's config of the task.
    cache_dir: A directory for the converted files.
  """
  return {
    "include": original_path,
    "task": name,
    "dataset_path": "json",
    "dataset_name": None,
    "dataset_kwargs": {"data_files": dict(paths), "cache_dir": cache_dir},
    "training_split": "train" if "train" in paths else None,
    "validation_split": "validation" if "validation" in paths else None,
    "test_split": "test" if "test" in paths else None,
    "fewshot_split": None,
  }


def _check_questions(task: Task, questions: Sequence[jsonl.Record]) -> None:
  """Raises UserError with the line of a question that the task cannot read."""
  for record, document in zip(questions, task.eval_docs, strict=True):
    try:
      task.doc_to_text(document)
      task.doc_to_target(document)
      if task.config.doc_to_choice is not None:
        task.doc_to_choice(document)
    # Templates and functions of tasks raise errors of many types.
    except Exception as error:
      raise UserError(
        f"{record.location}: {task.task_name} cannot read this question"
        f" ({reason(error)})"
      ) from error


def remove_scored_examples(
  name: str, task: Task, num_fewshot: int, data_dir: str
) -> None:
  """Removes scored questions from the examples that a task draws from.

  Args:
    name: The name of the task.
    task: The task.
    num_fewshot: The number of examples before a question. Negative for the
      task's own number.
    data_dir: The directory of local files, for the error. Empty for the hub.

  Raises:
    UserError: if too few examples are left.
  """
  num_shown = _num_shown_examples(task, num_fewshot)
  if num_shown == 0:
    return
  examples = _examples_to_show(task)
  if len(examples) < num_shown:
    message = (
      f"set.harness.num_fewshot = {num_fewshot}: {name} shows {num_shown}"
      f" examples, and has {len(examples)} that are not scored questions;"
      " set.harness.num_fewshot=0 asks without examples"
    )
    if data_dir:
      message += f", {data_dir}/{name}/train.jsonl can hold more"
    raise UserError(message)

  num_removed = len(task.sampler.df) - len(examples)
  if num_removed > 0:
    logging.warning(
      "%s: %d examples are scored questions and are not shown",
      name,
      num_removed,
    )
    task.sampler.replace_df(examples)


def _num_shown_examples(task: Task, num_fewshot: int) -> int:
  """Returns the number of examples that lm-eval shows before a question."""
  own_number = task.config.num_fewshot
  # lm-eval keeps the 0 of a task that is defined without examples.
  if own_number == 0:
    return 0
  if num_fewshot < 0:
    return own_number or 0
  return num_fewshot


def _examples_to_show(task: Task) -> list[Mapping[str, Any]]:
  """Returns the task's examples that are not scored questions."""
  scored_split = task.config.test_split or task.config.validation_split
  # A task can process examples and questions differently. So a question of the
  # same split would not be recognized.
  if task.fewshot_cfg.split == scored_split:
    return []
  scored = {_identify(task, document) for document in task.eval_docs}
  examples = []
  for document in task.sampler.df:
    if _identify(task, document) not in scored:
      examples.append(document)
  return examples


def _identify(task: Task, document: Mapping[str, Any]) -> str:
  """Returns the text that identifies a document: its question.

  The same question may have another wording of the answer, or another id. If
  the task renders no text before the answer, the text consists of all fields.
  """
  try:
    text = task.doc_to_text(document)
  # Templates and functions of tasks raise errors of many types.
  except Exception:
    text = None
  if isinstance(text, str) and text.strip():
    return " ".join(text.split())
  return json.dumps(document, sort_keys=True, default=str)
