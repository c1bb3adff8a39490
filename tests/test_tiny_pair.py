"""The recipe of the tiny pair trains, measures and tabulates pairs of models."""

import dataclasses
import json
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
    are_interrupted: whether training ends without a checkpoint.
  """

  def __init__(self):
    self.started: list[str] = []
    self.are_interrupted = False

  def call(self, arguments: list[str]) -> None:
    """Runs a command: `python -m MODULE FLAGS`."""
    _, _, module, *flag_arguments = arguments
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
    if self.are_interrupted:
      return
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
    """Writes figures that depend on the seed: 2 + seed and 1 − seed."""
    out = pathlib.Path(flags["--out"])
    self.started.append(out.name)
    seed = int(out.name.removeprefix("pair_"))
    assert pathlib.Path(flags["--workdir"]).name == f"diff_{seed}"
    assert pathlib.Path(flags["--against"]).name == f"transformer_{seed}"
    suites = flags["--suite"].split(",")
    has_report = "report" in suites
    assert has_report == (seed == 0)

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
def commands(monkeypatch):
  """The commands that the recipe starts, which are not really run."""
  commands = FakeCommands()

  def call(launcher, arguments):
    commands.call(arguments)

  monkeypatch.setattr(launch.Launcher, "call", call)
  return commands


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


def test_each_seed_trains_both_models_and_measures_them(commands, tmp_path):
  run_recipe(tmp_path, seeds=2)

  assert commands.started == [
    "transformer_0",
    "diff_0",
    "pair_0",
    "transformer_1",
    "diff_1",
    "pair_1",
  ]


def test_a_finished_recipe_runs_nothing_again(commands, tmp_path):
  run_recipe(tmp_path, seeds=2)
  figures = read_figures(tmp_path)
  commands.started.clear()

  run_recipe(tmp_path, seeds=2)

  assert commands.started == []
  assert read_figures(tmp_path) == figures


def test_more_seeds_run_only_the_new_ones(commands, tmp_path):
  run_recipe(tmp_path, seeds=1)
  commands.started.clear()

  run_recipe(tmp_path, seeds=2)

  assert commands.started == ["transformer_1", "diff_1", "pair_1"]


def test_other_parameters_are_measured_again(commands, tmp_path):
  run_recipe(tmp_path, seeds=1)
  commands.started.clear()

  # Without its workdir, the run is trained again.
  (tmp_path / "diff_0").rename(tmp_path / "elsewhere")
  run_recipe(tmp_path, seeds=1)

  assert commands.started == ["diff_0", "pair_0"]


def test_other_settings_are_measured_again(commands, tmp_path):
  pair = []
  for variant in ("transformer", "diff"):
    workdir = tmp_path / f"{variant}_0"
    training = tiny_pair.Training(variant, 0, workdir, fields={})
    training.run(commands)
    pair.append(training)
  measurement = tiny_pair.Measurement(
    tuple(pair), tmp_path / "pair_0", settings=("--set.x=1",), report=True
  )
  measurement.run(commands)

  changed = dataclasses.replace(measurement, settings=("--set.x=2",))

  assert measurement.is_done()
  assert not changed.is_done()


def test_other_defaults_of_a_suite_are_measured_again(
  commands, monkeypatch, tmp_path
):
  run_recipe(tmp_path, seeds=1)
  commands.started.clear()

  changed_suite = dataclasses.make_dataclass(
    "Validation",
    [("batch_size", int, field(9, "Rows in a batch."))],
    bases=(validation.Validation,),
    frozen=True,
  )
  monkeypatch.setattr(validation, "Validation", changed_suite)
  run_recipe(tmp_path, seeds=1)

  assert commands.started == ["pair_0"]


def test_an_interrupted_run_is_an_error(commands, tmp_path):
  commands.are_interrupted = True

  result = in_process.call(
    "recipes.tiny_pair", "--seeds=1", f"--out={tmp_path}"
  )

  assert result.returncode == 1
  assert (
    "training transformer, seed 0: it ended before its last step;"
    " run the same command"
  ) in result.stderr


def test_a_run_of_another_config_is_an_error(commands, monkeypatch, tmp_path):
  run_recipe(tmp_path, seeds=1)
  get_config = tiny.get_config

  def get_smaller_batch(variant):
    config = get_config(variant)
    config.train.batch_size = 2
    return config

  monkeypatch.setattr(tiny, "get_config", get_smaller_batch)
  result = in_process.call(
    "recipes.tiny_pair", "--seeds=1", f"--out={tmp_path}"
  )

  assert result.returncode == 1
  assert (
    "a run of another config: train.batch_size is 16 there and 2 now"
  ) in result.stderr


# What is printed.


def test_the_table_shows_the_figures_of_every_seed(commands, tmp_path):
  result = run_recipe(tmp_path, seeds=2)

  figures = read_figures(tmp_path)
  assert list(figures) == list(tiny_pair.ROWS)
  for values in figures.values():
    assert values == {"transformer": [1.0, 0.0], "diff": [2.0, 3.0]}
  assert result.stdout.endswith(tiny_pair.table(figures) + "\n")


def test_a_line_for_each_job_says_when_all_is_done(commands, tmp_path):
  result = run_recipe(tmp_path, seeds=2)

  lines = result.stderr.splitlines()
  assert (
    "1 of 6: training transformer, seed 0;"
    " the next line will say when all is done"
  ) in lines[0]
  assert re.search(
    "6 of 6: measuring the pair of seed 1;"
    r" all is done in about \d+ s, \w{3} \d\d:\d\d$",
    lines[5],
  )


# Five seeds.
RNG = np.random.default_rng(0)
TRANSFORMER = RNG.normal(1, 0.03, 5)
DIFF = RNG.normal(1.2, 0.01, 5)


def table_numbers() -> list[float]:
  """Returns the numbers of the table's row for TRANSFORMER and DIFF.

  The mean and its interval of the Transformer, of DIFF and of the difference.
  """
  text = tiny_pair.table({"loss": {"transformer": TRANSFORMER, "diff": DIFF}})
  assert "mean of 5 seeds" in text
  last_row = text.splitlines()[-1]
  return [float(number) for number in re.findall(r"-?\d+\.\d+", last_row)]


def test_intervals_of_means_are_students():
  standard_error = TRANSFORMER.std(ddof=1) / 5**0.5
  half_width = scipy.stats.t.ppf(0.975, 4) * standard_error

  mean = TRANSFORMER.mean()
  expected = [mean, mean - half_width, mean + half_width]
  assert table_numbers()[:3] == pytest.approx(expected, abs=5e-4)


def test_intervals_of_differences_are_welchs():
  variances = np.array([TRANSFORMER.var(ddof=1), DIFF.var(ddof=1)]) / 5
  # The Welch–Satterthwaite equation. One sample has 4 degrees of freedom, and
  # both have 8 together. The result lies between them.
  degrees = variances.sum() ** 2 / (variances**2 / 4).sum()
  assert 4 < degrees < 8
  half_width = scipy.stats.t.ppf(0.975, degrees) * variances.sum() ** 0.5

  difference = DIFF.mean() - TRANSFORMER.mean()
  expected = [difference, difference - half_width, difference + half_width]
  assert table_numbers()[6:] == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
  ("diff", "is_bold"),
  [
    pytest.param(DIFF, True, id="interval without 0"),
    pytest.param(TRANSFORMER + 0.001, False, id="interval with 0"),
  ],
)
def test_significant_differences_are_bold(diff, is_bold):
  text = tiny_pair.table({"loss": {"transformer": TRANSFORMER, "diff": diff}})

  assert ("**" in text) == is_bold


def test_one_seed_has_no_intervals():
  text = tiny_pair.table(
    {"loss": {"transformer": TRANSFORMER[:1], "diff": DIFF[:1]}}
  )

  assert "one seed" in text
  assert "[" not in text


# The whole recipe.


@pytest.mark.longest
@pytest.mark.full
def test_the_recipe_prints_its_table_and_runs_nothing_again(tmp_path):
  """With two steps and few samples."""
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
  assert " of 3: " not in again.stderr
  assert again.stdout.endswith(table)
