"""The recipe of the tiny pair trains, measures and compares pairs of models."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats

from diffjax.config import field
from diffjax.configs import tiny
from diffjax.evals import validation
from diffjax.training import checkpoint
from experiments import grid, launch
from tests.harness import ROOT, in_process

with in_process.own_flags():
  from recipes import tiny_pair


class FakeCommands:
  """Stands in for `diffjax.train` and `diffjax.evaluate`.

  It writes what the recipe reads of their outputs: the last checkpoint of a
  run, the last line of its log, and the results of suites.

  Attributes:
    started: names of the runs and measurements that were started, in order.
    training_is_interrupted: whether a training run ends without a checkpoint.
  """

  def __init__(self):
    self.started: list[str] = []
    self.training_is_interrupted = False

  def call(self, arguments: list[str]) -> None:
    """Stands in for a process.

    Args:
      arguments: the command line `[PYTHON, "-m", MODULE, FLAG...]`.
    """
    module = arguments[2]
    flag_arguments = arguments[3:]
    flags = {}
    for argument in flag_arguments:
      name, _, value = argument.partition("=")
      flags[name] = value
    if module == "diffjax.train":
      self._train(flags)
    else:
      self._evaluate(flags)

  def _train(self, flags: dict[str, str]) -> None:
    workdir = pathlib.Path(flags["--workdir"])
    self.started.append(workdir.name)
    if self.training_is_interrupted:
      return
    # The flag is --config=FILE:VARIANT.
    _, _, variant = flags["--config"].partition(":")
    config = tiny.get_config(variant)
    for name, value in flags.items():
      if name.startswith("--config."):
        changed_field = name.removeprefix("--config.")
        change = {changed_field: grid.read_value(value)}
        config.update_from_flattened_dict(change)

    # Another training gives other parameters.
    params = np.random.default_rng().normal(size=2)
    last_step = config.train.steps
    with checkpoint.Checkpoints(str(workdir), keep=1) as checkpoints:
      checkpoints.save(
        last_step, {"params": params}, data_state={}, config=config.to_dict()
      )
      checkpoints.wait()
    line = {"step": last_step, "validation/loss": 1.0}
    (workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")

  def _evaluate(self, flags: dict[str, str]) -> None:
    """Writes the figures of the suites.

    All are 2 + seed for DIFF, and 1 − seed for the Transformer.
    """
    out = pathlib.Path(flags["--out"])
    self.started.append(out.name)
    seed = int(out.name.removeprefix("pair_"))
    assert pathlib.Path(flags["--workdir"]).name == f"diff_{seed}"
    assert pathlib.Path(flags["--against"]).name == f"transformer_{seed}"
    suites = flags["--suite"].split(",")
    # Only the first pair gets a report.
    assert ("report" in suites) == (seed == 0)

    out.mkdir(exist_ok=True)
    for suite in suites:
      # A figure that the table does not show.
      figures = [{"name": "another", "at": {}, "value": 0.0, "against": None}]
      for row_suite, name, at in tiny_pair.ROWS.values():
        if row_suite == suite:
          figures.append(
            {
              "name": name,
              "at": at,
              "value": 2.0 + seed,
              "against": {"value": 1.0 - seed},
            }
          )
      results = json.dumps({"figures": figures})
      (out / f"{suite}.json").write_text(results)


@pytest.fixture
def fake_commands(monkeypatch):
  """Replaces the commands that the recipe starts, and lists them."""
  fake_commands = FakeCommands()

  def call(launcher, arguments):
    fake_commands.call(arguments)

  monkeypatch.setattr(launch.Launcher, "call", call)
  return fake_commands


def run_recipe(out: pathlib.Path, seeds: int) -> subprocess.CompletedProcess:
  """Runs the recipe, which must succeed."""
  result = in_process.call(
    "recipes.tiny_pair", f"--seeds={seeds}", f"--out={out}"
  )
  assert result.returncode == 0, result.stderr
  return result


def read_figures(out: pathlib.Path) -> dict[str, dict[str, list[float]]]:
  return json.loads((out / "tiny_pair.json").read_text())["figures"]


# What is run.


def test_each_seed_trains_both_models_and_measures_them(
  fake_commands, tmp_path
):
  """The recipe starts two trainings and one measurement for each seed."""
  run_recipe(tmp_path, seeds=2)

  assert fake_commands.started == [
    "transformer_0",
    "diff_0",
    "pair_0",
    "transformer_1",
    "diff_1",
    "pair_1",
  ]


def test_a_finished_recipe_runs_nothing_again(fake_commands, tmp_path):
  """The second call finds all results in the directory of the first."""
  run_recipe(tmp_path, seeds=2)
  figures = read_figures(tmp_path)
  # Forget what the first run has started.
  fake_commands.started.clear()

  run_recipe(tmp_path, seeds=2)

  assert fake_commands.started == []
  assert read_figures(tmp_path) == figures


def test_more_seeds_run_only_the_new_ones(fake_commands, tmp_path):
  """With two seeds in place of one, seed 1 is new, and seed 0 is done."""
  run_recipe(tmp_path, seeds=1)
  # Forget what the first run has started.
  fake_commands.started.clear()

  run_recipe(tmp_path, seeds=2)

  assert fake_commands.started == ["transformer_1", "diff_1", "pair_1"]


def test_other_parameters_are_measured_again(fake_commands, tmp_path):
  """If a model is trained again, results of its pair are no longer valid."""
  run_recipe(tmp_path, seeds=1)
  # Forget what the first run has started.
  fake_commands.started.clear()
  # Without its workdir, the model is trained again.
  (tmp_path / "diff_0").rename(tmp_path / "elsewhere")

  run_recipe(tmp_path, seeds=1)

  assert fake_commands.started == ["diff_0", "pair_0"]


def test_a_measurement_with_other_settings_is_not_done(fake_commands, tmp_path):
  """Results are valid only for the settings that they were measured with."""
  transformer = tiny_pair.Training(
    "transformer", seed=0, workdir=tmp_path / "transformer_0", fields={}
  )
  diff = tiny_pair.Training(
    "diff", seed=0, workdir=tmp_path / "diff_0", fields={}
  )
  measurement = tiny_pair.Measurement(
    pair=(transformer, diff),
    out=tmp_path / "pair_0",
    settings=["--set.validation.rows=8"],
    report=True,
  )
  # `fake_commands` stands in for the launcher of processes.
  transformer.run(fake_commands)
  diff.run(fake_commands)
  measurement.run(fake_commands)

  changed = dataclasses.replace(
    measurement, settings=["--set.validation.rows=9"]
  )

  assert measurement.is_done()
  assert not changed.is_done()


def test_other_defaults_of_a_suite_are_measured_again(
  fake_commands, monkeypatch, tmp_path
):
  """A new version of the project may have other defaults."""
  run_recipe(tmp_path, seeds=1)
  # Forget what the first run has started.
  fake_commands.started.clear()

  @dataclasses.dataclass(frozen=True)
  class ChangedValidation(validation.Validation):
    # The suite "validation" has another default.
    batch_size: int = field(9, "Rows in a batch.")

  monkeypatch.setattr(validation, "Validation", ChangedValidation)
  run_recipe(tmp_path, seeds=1)

  # The models are not trained again.
  assert fake_commands.started == ["pair_0"]


def test_an_interrupted_run_is_an_error(fake_commands, tmp_path):
  """The recipe must not measure a model that is not trained to the end."""
  fake_commands.training_is_interrupted = True

  result = in_process.call(
    "recipes.tiny_pair", "--seeds=1", f"--out={tmp_path}"
  )

  assert result.returncode == 1
  assert (
    "training transformer, seed 0: it ended before its last step;"
    " run the same command"
  ) in result.stderr


@pytest.mark.usefixtures("fake_commands")
def test_a_run_of_another_config_is_an_error(monkeypatch, tmp_path):
  """A run that is there may have been trained before its config changed."""
  run_recipe(tmp_path, seeds=1)
  get_config = tiny.get_config

  def get_config_with_a_smaller_batch(variant):
    config = get_config(variant)
    config.train.batch_size = 2
    return config

  monkeypatch.setattr(tiny, "get_config", get_config_with_a_smaller_batch)
  result = in_process.call(
    "recipes.tiny_pair", "--seeds=1", f"--out={tmp_path}"
  )

  assert result.returncode == 1
  # The run that is there has the batch size of tiny, 16.
  assert (
    "a run of another config: train.batch_size is 16 there and 2 now"
  ) in result.stderr


# What is printed.


@pytest.mark.usefixtures("fake_commands")
def test_the_table_shows_the_figures_of_every_seed(tmp_path):
  result = run_recipe(tmp_path, seeds=2)

  figures = read_figures(tmp_path)
  assert list(figures) == list(tiny_pair.ROWS)
  # `fake_commands` writes 1 − seed for the Transformer, and 2 + seed for DIFF.
  for values in figures.values():
    assert values == {"transformer": [1.0, 0.0], "diff": [2.0, 3.0]}
  assert result.stdout.endswith(tiny_pair.table(figures) + "\n")


@pytest.mark.usefixtures("fake_commands")
def test_a_line_for_each_job_says_when_all_is_done(tmp_path):
  result = run_recipe(tmp_path, seeds=2)

  # For each of two seeds, two models are trained, and the pair is measured.
  lines = result.stderr.splitlines()
  assert len(lines) == 6
  assert (
    "1 of 6: training transformer, seed 0;"
    " the next line will say when all is done"
  ) in lines[0]
  assert re.search(
    "6 of 6: measuring the pair of seed 1;"
    r" all is done in about \d+ s, \w{3} \d\d:\d\d$",
    lines[5],
  )


def test_a_mean_has_students_95_percent_interval():
  """Each value of a model comes from a run with another seed."""
  num_seeds = 5
  transformer = [1.02, 0.97, 1.01, 0.99, 1.06]
  diff = [1.21, 1.19, 1.20, 1.22, 1.19]

  text = tiny_pair.table({"loss": {"transformer": transformer, "diff": diff}})

  mean = np.mean(transformer)
  standard_error = np.std(transformer, ddof=1) / math.sqrt(num_seeds)
  # The interval leaves out 2.5% on each side.
  quantile = scipy.stats.t.ppf(0.975, df=num_seeds - 1)
  low = mean - quantile * standard_error
  high = mean + quantile * standard_error
  last_row = text.splitlines()[-1]
  assert last_row.startswith(
    f"| loss | {mean:.3f} [{low:.3f}, {high:.3f}] | {np.mean(diff):.3f} ["
  )


def test_a_difference_has_welchs_95_percent_interval():
  """Welch's interval does not assume that both variances are the same."""
  num_seeds = 5
  transformer = [1.02, 0.97, 1.01, 0.99, 1.06]
  diff = [1.21, 1.19, 1.20, 1.22, 1.19]

  text = tiny_pair.table({"loss": {"transformer": transformer, "diff": diff}})

  difference = np.mean(diff) - np.mean(transformer)
  # The variances of the means, and of their difference.
  transformer_variance = np.var(transformer, ddof=1) / num_seeds
  diff_variance = np.var(diff, ddof=1) / num_seeds
  variance = transformer_variance + diff_variance
  # The Welch–Satterthwaite equation.
  degrees_of_freedom = variance**2 / (
    transformer_variance**2 / (num_seeds - 1)
    + diff_variance**2 / (num_seeds - 1)
  )
  # The interval leaves out 2.5% on each side.
  quantile = scipy.stats.t.ppf(0.975, degrees_of_freedom)
  low = difference - quantile * math.sqrt(variance)
  high = difference + quantile * math.sqrt(variance)
  last_row = text.splitlines()[-1]
  assert last_row.endswith(f"| **{difference:.3f} [{low:.3f}, {high:.3f}]** |")


@pytest.mark.parametrize(
  ("diff", "is_bold"),
  [
    pytest.param([1.21, 1.19, 1.20], True, id="interval without 0"),
    pytest.param([1.03, 0.98, 1.02], False, id="interval with 0"),
  ],
)
def test_significant_differences_are_bold(diff, is_bold):
  """A difference is significant if its 95% interval does not contain 0."""
  transformer = [1.02, 0.97, 1.01]

  text = tiny_pair.table({"loss": {"transformer": transformer, "diff": diff}})

  assert ("**" in text) == is_bold


def test_one_seed_has_no_intervals():
  text = tiny_pair.table({"loss": {"transformer": [1.0], "diff": [1.2]}})

  last_row = text.splitlines()[-1]
  # The cells are both models' figures, and the difference.
  assert "one seed" in text
  assert last_row == "| loss | 1.000 | 1.200 | 0.200 |"


# The whole recipe.


@pytest.mark.longest
@pytest.mark.full
def test_the_recipe_prints_its_table_and_runs_nothing_again(tmp_path):
  """Runs real commands. --try_out means two steps and few samples."""
  flags = ["--seeds=1", "--try_out", f"--out={tmp_path}"]

  first = subprocess.run(
    [sys.executable, "-m", "recipes.tiny_pair", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert first.returncode == 0, first.stderr
  _, _, table = first.stdout.partition("| one seed |")
  for title in tiny_pair.ROWS:
    assert f"| {title} |" in table
  assert (tmp_path / "pair_0/report.html").exists()

  again = in_process.call("recipes.tiny_pair", *flags)
  assert again.returncode == 0, again.stderr
  # Each of the three jobs would print a line such as "1 of 3: training".
  assert " of 3: " not in again.stderr
  assert again.stdout.endswith(table)
