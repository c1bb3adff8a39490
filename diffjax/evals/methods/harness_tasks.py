"""Tasks of the LM Evaluation Harness (lm-eval) from the hub or local files.

lm-eval downloads questions itself. For local questions, this module writes a
config of the task that includes lm-eval's config and replaces its data source.
`harness.py` lists the local files and their fields.

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

_CHOICE_FIELDS = {"choices.text": list, "choices.label": list, "answerKey": str}

# The fields of the questions of the paper's tasks, and their types.
_FIELDS: Mapping[str, Mapping[str, type]] = {
  "arc_challenge": {"question": str, **_CHOICE_FIELDS},
  "arc_easy": {"question": str, **_CHOICE_FIELDS},
  "boolq": {"passage": str, "question": str, "label": int},
  "hellaswag": {
    "activity_label": str,
    "ctx_a": str,
    "ctx_b": str,
    "endings": list,
    "label": object,
  },
  "openbookqa": {"question_stem": str, **_CHOICE_FIELDS},
  "piqa": {"goal": str, "sol1": str, "sol2": str, "label": int},
  "winogrande": {
    "sentence": str,
    "option1": str,
    "option2": str,
    "answer": str,
  },
}

# The hint in the message if a task cannot be loaded from the hub.
_HUB_HINT = (
  "without the hub, set.harness.data_dir names a directory of local files"
)


@functools.cache
def task_manager() -> TaskManager:
  """Returns the manager of lm-eval's built-in tasks.

  It is cached, because lm-eval takes seconds to read the files of the tasks.
  """
  from lm_eval import tasks

  return tasks.TaskManager()


def load_from_hub(names: Sequence[str]) -> dict[str, Task]:
  """Returns tasks with questions from the Hugging Face hub, by name.

  Args:
    names: The names of tasks, or of groups. A group is replaced by its tasks.

  Raises:
    UserError: if a task is unknown or cannot be loaded.
  """
  manager = task_manager()
  _check_names(names, manager)
  tasks = {}
  for name in names:
    tasks.update(_build(manager, name, _HUB_HINT))
  return tasks


def load_local(
  names: Sequence[str], data_dir: str, num_fewshot: int, work_dir: str
) -> dict[str, Task]:
  """Returns tasks with questions from local files, by name.

  Writes a config of each task, which lm-eval then loads.

  Args:
    names: The names of the tasks.
    data_dir: The directory with one folder of files per task.
    num_fewshot: The number of examples before a question. Negative for the
      task's own number.
    work_dir: An empty directory for the configs and converted questions. It
      must exist as long as the tasks are used.

  Raises:
    UserError: if a task is unknown, or its files are missing or have questions
      that the task cannot read.
  """
  from lm_eval import tasks as lm_eval_tasks

  builtin_manager = task_manager()
  _check_names(names, builtin_manager)
  config_dir = os.path.join(work_dir, "tasks")
  cache_dir = os.path.join(work_dir, "cache")
  os.makedirs(config_dir)
  questions_by_task = {}
  for name in names:
    _check_is_no_group(name, builtin_manager)
    paths = _local_paths(name, data_dir, num_fewshot)
    questions_by_task[name] = _read_scored_questions(name, paths)
    builtin_path = builtin_manager.task_index[name].yaml_path
    _write_config(name, paths, str(builtin_path), config_dir, cache_dir)

  # This manager knows only the tasks of the written configs.
  local_manager = lm_eval_tasks.TaskManager(
    include_path=config_dir, include_defaults=False
  )
  tasks = {}
  for name in names:
    first_question = questions_by_task[name][0]
    hint = f"see {first_question.location}"
    tasks.update(_build(local_manager, name, hint))
  for name, task in tasks.items():
    _check_questions(task, questions_by_task[name])
  return tasks


def _check_names(names: Sequence[str], manager: TaskManager) -> None:
  """Raises UserError if lm-eval has no task or group of one of the names."""
  for name in names:
    if name in manager.all_tasks:
      continue
    message = f"set.harness.tasks: lm-eval has no task {name!r}"
    similar = difflib.get_close_matches(name, manager.all_tasks, n=3)
    if similar:
      message += f"; similar ones are {', '.join(similar)}"
    raise UserError(message)


def _check_is_no_group(name: str, manager: TaskManager) -> None:
  """Raises UserError if a name is that of a group of tasks."""
  if name not in manager.all_subtasks:
    raise UserError(
      f"set.harness.tasks: {name!r} is a group of tasks; with local files, name"
      " the tasks"
    )


def _build(manager: TaskManager, name: str, hint: str) -> dict[str, Task]:
  """Loads a task or the tasks of a group, with their questions.

  Args:
    manager: lm-eval's manager, which knows the task or group.
    name: The name of a task or of a group of tasks.
    hint: The end of the error message, which says what the user can do.

  Returns:
    The tasks by name.
  """
  try:
    return manager.load([name])["tasks"]
  # lm-eval and the libraries that load its data raise errors of many types.
  except Exception as error:
    raise UserError(
      f"set.harness.tasks: {name!r} cannot be loaded ({reason(error)}); {hint}"
    ) from error


def _local_paths(name: str, data_dir: str, num_fewshot: int) -> dict[str, str]:
  """Returns the paths of a task's local files, by split.

  Files of splits may be missing. Raises UserError if there are no questions, or
  no examples although `num_fewshot` asks for some.
  """
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


def _read_scored_questions(
  name: str, paths: Mapping[str, str]
) -> list[jsonl.Record]:
  """Returns the records of the split whose questions are scored.

  That is "test" if its file exists, else "validation". The records of all
  splits are checked. If one lacks a field, raises UserError, because lm-eval
  would read an empty value.

  Args:
    name: The name of the task.
    paths: The files by split.
  """
  records_by_split = {}
  for split, path in paths.items():
    records_by_split[split] = jsonl.read(path, _required_fields(name, path))
  if "test" in records_by_split:
    return records_by_split["test"]
  return records_by_split["validation"]


def _required_fields(name: str, path: str) -> Mapping[str, type]:
  """Returns the fields that each record of a task's file must have.

  For tasks that the paper does not use, they are the fields of the first record
  and may have any type.
  """
  if name in _FIELDS:
    return _FIELDS[name]
  first_record = jsonl.read(path, {})[0]
  return dict.fromkeys(first_record.value, object)


def _write_config(
  name: str,
  paths: Mapping[str, str],
  builtin_path: str,
  config_dir: str,
  cache_dir: str,
) -> None:
  """Writes a config of lm-eval for a task that reads local files.

  Args:
    name: The name of the task.
    paths: The files by split.
    builtin_path: The path of lm-eval's config of the task. Its fields hold
      unless the written config replaces them.
    config_dir: The directory of the config.
    cache_dir: The directory where lm-eval stores converted files of all tasks.
  """
  data_files = {
    "data_files": dict(paths),
    "cache_dir": os.path.join(cache_dir, name),
  }
  config = {
    "include": builtin_path,
    "task": name,
    "dataset_path": "json",
    "dataset_name": None,
    "dataset_kwargs": data_files,
    "training_split": "train" if "train" in paths else None,
    "validation_split": "validation" if "validation" in paths else None,
    "test_split": "test" if "test" in paths else None,
    "fewshot_split": None,
  }
  config_path = os.path.join(config_dir, f"{name}.yaml")
  with open(config_path, "w", encoding="utf-8") as file:
    # lm-eval reads YAML, which includes JSON.
    json.dump(config, file)


def _check_questions(task: Task, questions: Sequence[jsonl.Record]) -> None:
  """Raises UserError if a task cannot make a prompt and choices of a question.

  Args:
    task: lm-eval's task, which has loaded the questions.
    questions: The records of the same questions, for the location in the error.
  """
  for record, document in zip(questions, task.eval_docs, strict=True):
    try:
      # The results do not matter here, only whether there is an error.
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
  """Removes scored questions from the few-shot examples of a task.

  Otherwise the model could read a question's answer in its prompt.

  Args:
    name: The name of the task.
    task: The task. Its examples are changed.
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
  """Returns the number of examples that lm-eval shows before a question.

  Args:
    task: The task.
    num_fewshot: The number that the user wants. Negative for the task's own.
  """
  own_number = task.config.num_fewshot
  # If a task is defined with 0 examples, lm-eval ignores the user's number.
  if own_number == 0:
    return 0
  if num_fewshot >= 0:
    return num_fewshot
  if own_number is None:
    return 0
  return own_number


def _examples_to_show(task: Task) -> list[Mapping[str, Any]]:
  """Returns the task's few-shot examples that are not scored questions."""
  scored_split = task.config.test_split or task.config.validation_split
  # If both come from one split, all examples are scored questions. Comparing
  # their texts could miss this, because a task can process examples and
  # questions differently.
  if task.fewshot_cfg.split == scored_split:
    return []
  scored_questions = {_question_text(task, doc) for doc in task.eval_docs}
  examples = []
  for document in task.sampler.df:
    if _question_text(task, document) not in scored_questions:
      examples.append(document)
  return examples


def _question_text(task: Task, document: Mapping[str, Any]) -> str:
  """Returns the question of a document, to recognize equal questions.

  It does not include the answer and ids, which can differ between copies of a
  question. It is the text that the task shows before the answer. If there is no
  such text, all fields are used.
  """
  try:
    text = task.doc_to_text(document)
  # Templates and functions of tasks raise errors of many types.
  except Exception:
    text = None
  if isinstance(text, str) and text.strip():
    # Texts that differ only in spaces are the same.
    return " ".join(text.split())
  return json.dumps(document, sort_keys=True, default=str)
