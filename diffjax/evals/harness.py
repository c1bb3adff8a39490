"""Zero-shot tasks of the LM Evaluation Harness (lm-eval, the extra `eval`).

The paper's tables have ARC-C, ARC-E, BoolQ, HellaSwag, OBQA, PIQA and
WinoGrande. They do not say which accuracy they give. The row of OpenLLaMA-3B-v2
agrees with that model's published figures if its HellaSwag column is `acc_norm`
(log-likelihoods are divided by the endings' lengths in bytes) and the other
tasks are `acc`. "mean accuracy" is the mean of these metrics. All metrics of a
task are measured. Accuracies are fractions of the questions.

lm-eval downloads questions from the Hugging Face hub. Without the hub, data_dir
names a directory with one folder per task:

    DIR/TASK/test.jsonl or DIR/TASK/validation.jsonl   the questions
    DIR/TASK/train.jsonl                               examples, if a task shows
                                                       some

Each line is a JSON object with the fields of the hub's dataset. The expression
`datasets.load_dataset(…)["test"].to_json(PATH)` writes such a file. The fields:

    arc_challenge   question, choices {text: […], label: […]}, answerKey
    arc_easy        question, choices {text: […], label: […]}, answerKey
    boolq           passage, question, label (0 no, 1 yes)
    hellaswag       activity_label, ctx_a, ctx_b, endings […], label
    openbookqa      question_stem, choices {text: […], label: […]}, answerKey
    piqa            goal, sol1, sol2, label (0 or 1)
    winogrande      sentence (with _ for the gap), option1, option2,
                    answer ("1" or "2")

Any other task of lm-eval works too, if all lines of its file have the same
fields.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from diffjax.config import UserError, field
from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.methods import harness_tasks, scoring
from diffjax.evals.report.results import MainFigure, TableSpec
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

# lm-eval's record of one question that the model was asked. It has the fields
# "filter", "metrics" (the names of metrics), and the value of each metric.
_Sample = Mapping[str, Any]


class _Metric(NamedTuple):
  """A metric of a task.

  Attributes:
    name: lm-eval's name of the metric, such as "acc".
    filter: lm-eval's name of the filter that extracts the answer from the
      model's text. "none" if the whole text is the answer.
  """

  name: str
  filter: str


class _Data(NamedTuple):
  """What `measure` needs.

  Attributes:
    tasks: lm-eval's tasks by name.
    work_dir: A directory with files of the tasks. `measure` deletes it.
  """

  tasks: dict[str, harness_tasks.Task]
  work_dir: tempfile.TemporaryDirectory


@dataclasses.dataclass(frozen=True)
class Harness(Suite[_Data]):
  """Accuracy on tasks of the LM Evaluation Harness (lm-eval).

  The measurements are all metrics of the tasks, under lm-eval's names. "acc" is
  the fraction of questions with the right answer, "acc_norm" the same with
  log-likelihoods per byte of an answer. With several tasks, "mean accuracy" is
  their mean, as in the paper's tables. The units are questions.
  """

  name: ClassVar[str] = "harness"
  table: ClassVar[TableSpec] = TableSpec(
    unit="questions",
    notes=(
      "acc: share of the questions with the right answer",
      "acc_norm: the same, with likelihoods per byte of an answer",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure("mean accuracy of the harness", "mean accuracy", "higher"),
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
    """Returns the tasks with their questions.

    Raises:
      UserError: if lm-eval is not installed, a task is unknown, or its data
        cannot be read.
    """
    if not self.tasks:
      raise UserError(
        f"set.harness.tasks is empty; the paper's are {','.join(PAPER)}"
      )
    # `measure` imports the module. Here, a missing lm-eval is reported early.
    try:
      import diffjax.evals.methods.lm_eval  # noqa: F401
    except ImportError as error:
      raise UserError(
        f"the harness needs lm-eval, which cannot be imported ({error}); pip"
        " install 'diffjax[eval]'"
      ) from error

    work_dir = tempfile.TemporaryDirectory()
    if self.data_dir:
      tasks = harness_tasks.load_local(
        self.tasks, self.data_dir, self.num_fewshot, work_dir.name
      )
    else:
      tasks = harness_tasks.load_from_hub(self.tasks)
    for name, task in tasks.items():
      harness_tasks.remove_scored_examples(
        name, task, self.num_fewshot, self.data_dir
      )
    return _Data(tasks, work_dir)

  def measure(self, trained: Trained, data: _Data) -> Iterator[Measurement]:
    """Yields all metrics of the tasks, and the mean accuracy of the tasks."""
    # Deletes the directory when all questions are asked.
    with data.work_dir:
      samples_by_task = self._run_lm_eval(trained, data.tasks)

    paper_outcomes = {}
    for task_name, task in data.tasks.items():
      samples = samples_by_task[task_name]
      for metric in _distinct_metrics(samples):
        values = _values_of(samples, metric)
        yield _to_measurement(task_name, task, metric, values)
        if metric.name == _paper_metric(task_name):
          paper_outcomes[task_name] = values
    if len(paper_outcomes) > 1:
      yield _mean_accuracy(paper_outcomes)

  def _run_lm_eval(
    self, trained: Trained, tasks: Mapping[str, harness_tasks.Task]
  ) -> dict[str, list[_Sample]]:
    """Runs lm-eval, which asks the model all questions.

    Args:
      trained: The model.
      tasks: lm-eval's tasks by name.

    Returns:
      lm-eval's records of the questions, by task.
    """
    import lm_eval

    from diffjax.evals.methods.lm_eval import DiffjaxLM

    # To lm-eval, None means the task's own number of examples, and no limit.
    num_fewshot = self.num_fewshot if self.num_fewshot >= 0 else None
    limit = self.limit if self.limit != 0 else None
    results = lm_eval.simple_evaluate(
      DiffjaxLM(trained, batch_tokens=self.batch_tokens),
      tasks=list(tasks.values()),
      num_fewshot=num_fewshot,
      limit=limit,
      # diffjax computes the intervals (report/intervals.py).
      bootstrap_iters=0,
      # With None, lm-eval does not reseed this process's random generators.
      random_seed=None,
      numpy_random_seed=None,
      torch_random_seed=None,
      fewshot_random_seed=self.seed,
      task_manager=harness_tasks.task_manager(),
    )
    return results["samples"]


def _distinct_metrics(samples: Sequence[_Sample]) -> list[_Metric]:
  """Returns each metric of a task once, in the order of the samples.

  Args:
    samples: lm-eval's records of a task. A question that is read with several
      filters has several.
  """
  metrics = []
  for sample in samples:
    for name in sample["metrics"]:
      metric = _Metric(name, sample["filter"])
      if metric not in metrics:
        metrics.append(metric)
  return metrics


def _values_of(samples: Sequence[_Sample], metric: _Metric) -> list[Any]:
  """Returns the value of a metric for each question.

  Args:
    samples: lm-eval's records of a task. There is a record for each question
      and each filter.
    metric: One of the task's metrics.
  """
  values = []
  for sample in samples:
    if sample["filter"] == metric.filter:
      values.append(sample[metric.name])
  return values


def _paper_metric(task_name: str) -> str:
  """Returns the metric that the paper's tables give for a task."""
  return "acc_norm" if task_name == "hellaswag" else "acc"


def _to_measurement(
  task_name: str,
  task: harness_tasks.Task,
  metric: _Metric,
  values: Sequence[Any],
) -> Measurement:
  """Converts a metric's values to a measurement whose units are the questions.

  Args:
    task_name: The name of the task.
    task: lm-eval's task, which says how the values are aggregated.
    metric: The metric.
    values: The metric's value for each question. For some metrics, such as a
      perplexity, a value is a tuple.
  """
  from lm_eval.api.metrics import mean

  coordinates: dict[str, Any] = {"task": task_name}
  if metric.filter != "none":
    coordinates["filter"] = metric.filter
  # The function with which lm-eval computes one number from the values.
  aggregation = task.aggregation()[metric.name]
  if aggregation is mean:
    is_yes_or_no = all(value in (0, 1) for value in values)
    if is_yes_or_no:
      return proportion(metric.name, values, **coordinates)
    return mean_of(metric.name, values, **coordinates)
  # Other functions can take values that are no numbers, and units must be an
  # array. So the units are indices into the values.
  indices = np.arange(len(values))
  statistic = _statistic_of_indices(aggregation, values)
  return Measurement(metric.name, indices, coordinates, statistic)


def _statistic_of_indices(
  aggregation: Callable[[list[Any]], float], values: Sequence[Any]
) -> Callable[[Int[ndarray, "units"]], float]:
  """Returns a function that aggregates the values at given indices.

  It is the statistic of a measurement. A bootstrap calls it with resampled
  indices.
  """

  def statistic(indices: Int[ndarray, "units"]) -> float:
    values_at_indices = [values[int(index)] for index in indices]
    return float(aggregation(values_at_indices))

  return statistic


def _mean_accuracy(
  outcomes_by_task: Mapping[str, Sequence[float]],
) -> Measurement:
  """Returns the mean of the tasks' accuracies. Each task has equal weight.

  Args:
    outcomes_by_task: For each task, 1 (right) or 0 (wrong) for each question.
  """
  all_outcomes: list[float] = []
  # For each outcome, the index of its task.
  groups: list[int] = []
  for index, outcomes in enumerate(outcomes_by_task.values()):
    all_outcomes += outcomes
    groups += [index] * len(outcomes)
  return proportion("mean accuracy", all_outcomes, groups)
