"""Experiments in folders outside the repository, and runs that fail."""

import json
import os
import re
import subprocess
import sys

import pytest
from absl import flags

from diffjax.config import UserError
from experiments import (
  draw,
  folders,
  grid,
  imports,
  launch,
  training_log,
)
from tests.harness import own_variants
from tests.harness.pages import python_blocks

# An experiment.py with three rows of two seeds: six runs. Their names are
# "lambda_init=0.2/seed_0", and so on. The empty figure takes little time.
SIX_RUNS = """
from matplotlib.figure import Figure

from experiments.grid import Experiment, Grid

def plot(results):
  return Figure((1, 1))

EXPERIMENT = Experiment(
  question="Which λ_init is best?",
  grids={
    "cpu": Grid.product(
      "tiny", {"model.lambda_init": [0.2, 0.5, 0.8]}, seeds=range(2)
    )
  },
  metrics={"loss": "validation/loss"},
  plot=plot,
)
"""


def documented_ablation():
  """Returns the last example of docs/variants.md, an experiment.py."""
  page = grid.FOLDER.parent / "docs/variants.md"
  *_, last_example = python_blocks(page.read_text(encoding="utf-8"))
  return last_example


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder lambda_study with SIX_RUNS, in the current directory."""
  path = tmp_path / "lambda_study"
  path.mkdir()
  (path / "experiment.py").write_text(SIX_RUNS)
  monkeypatch.chdir(tmp_path)
  # Commands add the folder to sys.path.
  monkeypatch.setattr(sys, "path", [*sys.path])
  return path


class FakeTraining:
  """Trainings that take no time.

  Attributes:
    errors: To be set: the errors of runs, by name. A text is the last line of a
      command that fails.
    losses: To be set: the losses of runs, by name. By default 2 plus the seed.
    started: The names of the runs that were started, in order.
    commands: The commands and their environment variables, in order.
  """

  def __init__(self):
    self.errors = {}
    self.losses = {}
    self.started = []
    self.commands = []
    self._finished = {}

  def call(self, launcher, command, env=None, log=None, *, tail=False):
    """Replaces `Launcher.call`."""
    self.commands.append((command, env))
    if "diffjax.train" not in command:
      return
    for argument in command:
      if argument.startswith("--workdir="):
        workdir = argument.removeprefix("--workdir=")
    name = "/".join(workdir.split("/")[-2:])
    self.started.append(name)
    error = self.errors.get(name)
    if isinstance(error, str):
      raise launch.Failed(f"exit code 1: error: {error}", error)
    if error is not None:
      raise error
    loss = self.losses.get(name, 2.0 + int(name[-1]))
    self._finished[workdir] = {"validation/loss": loss}

  def final_metrics(self, workdir, config, location_fields):
    """Replaces `training_log.final_metrics`."""
    return self._finished.get(str(workdir))


@pytest.fixture
def training(run, monkeypatch):
  """Replaces trainings by ones that take no time."""
  fake = FakeTraining()

  # A function, so that it becomes a method of the launcher.
  def call(launcher, *args, **kwargs):
    return fake.call(launcher, *args, **kwargs)

  monkeypatch.setattr(launch.Launcher, "call", call)
  monkeypatch.setattr(training_log, "final_metrics", fake.final_metrics)
  return fake


def read_entries(folder):
  """Returns the runs of a folder's results.json, by name."""
  stored = json.loads((folder / "results.json").read_text())
  return {run["name"]: run for run in stored["runs"]}


def table_row(folder, variant):
  """Returns the cells of a variant's row in a folder's table.md."""
  for line in (folder / "table.md").read_text().splitlines():
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    if cells and cells[0] == variant:
      return cells
  raise AssertionError(f"no row {variant}")


def test_one_file_makes_runs_a_table_and_a_plot(run, training, folder):
  """The file has three values of λ_init with two seeds each."""
  out, errors = run("lambda_study")

  assert len(training.started) == 3 * 2
  assert "(6 of 6 runs)" in out
  assert f"{folder}: results.json, table.md, plot.png, plot.svg" in out
  assert f"results in {folder}" in errors


def test_a_row_of_the_table_has_the_mean_of_its_seeds(run, training, folder):
  """`training` stands for the trainings, and has their losses."""
  training.losses = {
    "lambda_init=0.2/seed_0": 2.0,
    "lambda_init=0.2/seed_1": 3.0,
  }

  run("lambda_study")

  _, parameters, seeds, loss, *_ = table_row(folder, "lambda_init=0.2")
  # These are the parameters of the config `tiny`.
  assert parameters == "0.838 M"
  assert seeds == "2"
  assert loss.startswith("2.5000 ± ")


# Here, trainings take no time.
@pytest.mark.usefixtures("training")
def test_results_have_the_values_of_the_factors(run, folder):
  """A factor is a config field in which the runs of a product differ."""
  (folder / "experiment.py").write_text(documented_ablation())
  name = "lambda_init=0.8,head_norm=False/seed_1"

  run("lambda_study", f"--only={name}")

  assert read_entries(folder)[name]["factors"] == {
    "model.lambda_init": 0.8,
    "model.head_norm": False,
  }


def test_finished_runs_are_not_repeated(run, training, folder):
  """The experiment has three values of λ_init with two seeds each."""
  run("lambda_study")
  training.started.clear()

  # The folder's path is another way to name it.
  _, errors = run(str(folder))

  assert training.started == []
  assert "0 of 6 runs to do" in errors


# Here, trainings take no time.
@pytest.mark.usefixtures("training")
def test_a_trial_leaves_the_folder_unchanged(run, folder):
  """--steps is for trials, whose results do not belong to the grid."""
  files_before = sorted(folder.glob("*.*"))

  out, _ = run("lambda_study", "--steps=20")

  assert "(6 of 6 runs)" in out
  assert sorted(folder.glob("*.*")) == files_before


def test_a_run_is_trained_again_after_its_trial(run, training, folder):
  """--steps makes a trial, whose results do not belong to the grid."""
  run("lambda_study", "--only=lambda_init=0.2/seed_0", "--steps=20")

  run("lambda_study", "--only=lambda_init=0.2/seed_0")

  assert training.started == ["lambda_init=0.2/seed_0"] * 2
  assert (folder / "results.json").exists()


def test_other_runs_go_on_after_a_failure(run, training, folder):
  """The experiment has three values of λ_init with two seeds each."""
  training.errors = {
    "lambda_init=0.2/seed_0": "diverged",
    "lambda_init=0.5/seed_1": "out of memory",
  }

  out, errors = run(str(folder), code=1)

  assert len(training.started) == 3 * 2
  assert "(4 of 6 runs)" in out
  assert errors.endswith(
    "error: 2 of 6 runs failed: lambda_init=0.2/seed_0, lambda_init=0.5/seed_1;"
    " the same command tries them again\n"
  )


def test_a_row_with_a_failed_run_has_the_mean_of_the_others(
  run, training, folder
):
  """The row has two seeds. The first one fails."""
  # In the table, a vertical bar would end a cell. The error is below the table.
  error = "diverged | at step 3"
  training.errors = {"lambda_init=0.2/seed_0": error}
  training.losses = {"lambda_init=0.2/seed_1": 3.0}

  run("lambda_study", code=1)

  _, _, seeds, loss = table_row(folder, "lambda_init=0.2")
  assert seeds == "1 of 2"
  assert loss == "3.0000 (1 of 2)"
  lines = (folder / "table.md").read_text().splitlines()
  assert f"- lambda_init=0.2/seed_0 failed: {error}" in lines


def test_a_row_without_finished_runs_has_their_error(run, training, folder):
  training.errors = {
    "lambda_init=0.5/seed_0": "out of memory",
    "lambda_init=0.5/seed_1": "out of memory",
  }

  run("lambda_study", code=1)

  _, _, seeds, loss, *_ = table_row(folder, "lambda_init=0.5")
  assert seeds == "0 of 2"
  assert loss == "failed: out of memory"


def test_the_entry_of_a_failed_run_has_its_error_and_no_results(
  run, training, folder
):
  """An entry is a run in results.json."""
  training.errors = {"lambda_init=0.2/seed_0": "diverged"}

  run("lambda_study", code=1)

  entry = read_entries(folder)["lambda_init=0.2/seed_0"]
  assert entry["failed"] == "diverged"
  assert entry["results"]["validation/loss"] is None


def test_only_the_chosen_failed_runs_are_tried_again(run, training, folder):
  """Two of six runs fail: three values of λ_init with two seeds each."""
  training.errors = {
    "lambda_init=0.2/seed_0": "diverged",
    "lambda_init=0.5/seed_0": "diverged",
  }
  run("lambda_study", code=1)
  training.errors = {}
  training.started.clear()

  out, errors = run("lambda_study", "--only=lambda_init=0.2")

  assert training.started == ["lambda_init=0.2/seed_0"]
  assert "(5 of 6 runs)" in out
  assert "; failed:" not in errors
  entries = read_entries(folder)
  assert "failed" not in entries["lambda_init=0.2/seed_0"]
  assert "failed" in entries["lambda_init=0.5/seed_0"]


def test_a_run_that_fails_again_stays_failed(run, training, folder):
  training.errors = {"lambda_init=0.5/seed_0": "diverged"}
  run("lambda_study", code=1)
  training.started.clear()

  run("lambda_study", code=1)

  assert training.started == ["lambda_init=0.5/seed_0"]
  assert "failed" in read_entries(folder)["lambda_init=0.5/seed_0"]


def test_a_failure_is_forgotten_after_success(run, training, folder):
  training.errors = {"lambda_init=0.2/seed_0": "diverged"}
  run("lambda_study", code=1)

  training.errors = {}
  run("lambda_study")

  assert not list(folder.parent.rglob("failed.json"))
  assert "failed" not in (folder / "results.json").read_text()
  assert "failed" not in (folder / "table.md").read_text()


def test_a_slice_reports_its_failed_runs(run, training, folder):
  """A slice is one host's part of the runs: here the first third of six."""
  training.errors = {"lambda_init=0.2/seed_0": "diverged"}

  _, errors = run(str(folder), "--slice=0/3", code=1)

  assert "this slice is done" in errors
  assert "1 of 2 runs failed: lambda_init=0.2/seed_0" in errors


def test_a_command_without_slice_tries_the_failed_runs_of_a_slice_again(
  run, training, folder
):
  """The slice "0/3" is the first third of the runs."""
  training.errors = {"lambda_init=0.2/seed_0": "diverged"}
  run(str(folder), "--slice=0/3", code=1)

  training.errors = {}
  out, _ = run(str(folder))

  assert "(6 of 6 runs)" in out
  # It was tried by both commands.
  assert training.started.count("lambda_init=0.2/seed_0") == 2


def test_failures_of_another_config_are_ignored(run, training, folder):
  """Results of a new config do not list a run that failed with another one."""
  directories = (f"--workdir={folder.parent}/runs", f"--out={folder}")
  training.errors = {"lambda_init=0.2/seed_0": "diverged"}
  first_seed = "--only=lambda_init=0.2/seed_0"
  run("lambda_study", first_seed, *directories, code=1)

  second_seed = "--only=lambda_init=0.2/seed_1"
  new_config = "--set=optimizer.learning_rate=1e-5"
  run("lambda_study", second_seed, new_config, *directories)

  assert list(read_entries(folder)) == ["lambda_init=0.2/seed_1"]


def test_no_run_starts_after_an_interrupt(run, training, folder):
  # The three values of λ_init run with seed 0, and then with seed 1. This
  # interrupts the second run.
  training.errors = {"lambda_init=0.5/seed_0": KeyboardInterrupt()}

  # 130 is the exit status of a command that was interrupted.
  _, errors = run("lambda_study", code=130)

  assert training.started == [
    "lambda_init=0.2/seed_0",
    "lambda_init=0.5/seed_0",
  ]
  assert "error: interrupted" in errors
  assert not (folder / "results.json").exists()


def test_a_run_without_a_loss_has_finished(run, training, folder):
  """A training whose last loss is not finite has no loss."""
  training.losses = {
    "lambda_init=0.2/seed_0": None,
    "lambda_init=0.2/seed_1": 3.0,
  }

  run("lambda_study", "--only=lambda_init=0.2")

  assert "failed" not in read_entries(folder)["lambda_init=0.2/seed_0"]
  # The columns are the name, the parameters, the seeds and the loss. The mean
  # loss is of one of two runs.
  row = table_row(folder, "lambda_init=0.2")
  assert row == ["lambda_init=0.2", "0.838 M", "2", "3.0000 (1 of 2)"]


# A plot that writes the names of the rows that it gets into the file "rows" of
# the current directory.
PLOT_THAT_WRITES_ITS_ROWS = """
import pathlib
from matplotlib.figure import Figure

def plot(results):
  rows = sorted({run["variant"] for run in results["runs"]})
  pathlib.Path("rows").write_text(" ".join(rows))
  return Figure((1, 1))
"""


@pytest.fixture
def plotted_rows(folder):
  """The file into which the experiment's plot writes the rows that it gets."""
  without_plot = SIX_RUNS.replace("def plot(", "def empty_plot(")
  (folder / "experiment.py").write_text(
    PLOT_THAT_WRITES_ITS_ROWS + without_plot
  )
  return folder.parent / "rows"


def test_a_plot_gets_no_rows_with_a_failed_run(run, training, plotted_rows):
  """The other runs of such a row would be a biased sample."""
  training.errors = {"lambda_init=0.2/seed_1": "diverged"}

  run("lambda_study", code=1)

  assert plotted_rows.read_text() == "lambda_init=0.5 lambda_init=0.8"


def test_there_is_no_plot_if_all_rows_have_a_failed_run(
  run, training, folder, plotted_rows
):
  training.errors = {"lambda_init=0.5/seed_0": "diverged"}

  # No other run is started.
  run("lambda_study", "--only=lambda_init=0.5/seed_0", code=1)

  assert not plotted_rows.exists()
  assert "failed: diverged" in (folder / "table.md").read_text()


def make_study_and_print_its_workdir(run, parent):
  """Returns NAME if the runs of PARENT/study are trained in /runs/NAME."""
  folder = parent / "study"
  folder.mkdir(parents=True)
  (folder / "experiment.py").write_text(SIX_RUNS)
  out, _ = run(str(folder), "--print", "--workdir=/runs")
  return re.search(r"--workdir=/runs/(\S+)/cpu/", out)[1]


def test_folders_of_the_same_name_have_different_workdirs(run, tmp_path):
  """The name of a workdir ends with a hash of the folder's path."""
  first = make_study_and_print_its_workdir(run, tmp_path / "a")
  second = make_study_and_print_its_workdir(run, tmp_path / "b")

  assert re.fullmatch(r"study_[0-9a-f]{8}", first)
  assert re.fullmatch(r"study_[0-9a-f]{8}", second)
  assert first != second


@pytest.mark.parametrize(
  "argument",
  [
    pytest.param("ablations", id="name"),
    pytest.param(str(grid.FOLDER / "ablations"), id="path"),
  ],
)
def test_a_folder_of_the_repository_has_a_name(argument):
  assert grid.resolve(argument) == "ablations"


def test_a_folder_without_experiment_py_is_an_error(run, tmp_path):
  _, errors = run(str(tmp_path), code=1)

  assert "has no experiment.py" in errors
  assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
  "content, message",
  [
    pytest.param(
      "x = 1\n",
      "experiment.py does not define EXPERIMENT",
      id="no_experiment",
    ),
    pytest.param(
      "x = 1\ny = x.z\n",
      "experiment.py:2: AttributeError: 'int' object",
      id="attribute_error",
    ),
    pytest.param(
      "def f(:\n", "experiment.py:1: SyntaxError: ", id="syntax_error"
    ),
    pytest.param(
      "import missing_module\n",
      "experiment.py:1: ModuleNotFoundError: No",
      id="missing_module",
    ),
  ],
)
def test_an_error_in_experiment_py_is_one_line_with_its_place(
  run, tmp_path, content, message
):
  (tmp_path / "experiment.py").write_text(content)

  _, errors = run(str(tmp_path), code=1)

  assert re.search(message, errors)
  assert len(errors.splitlines()) == 1


def test_the_error_of_an_unknown_name_mentions_paths():
  with pytest.raises(
    UserError, match="the path of a folder with an experiment"
  ):
    grid.load("nothing")


# A config.py of a folder, with a module of the folder.
CONFIG_THAT_IMPORTS_A_MODULE = """
import lambda_study_task
from diffjax.configs import tiny

def get_config(variant):
  config = tiny.get_config(variant)
  config.model.num_layers = lambda_study_task.LAYERS
  return config
"""

# An experiment that measures instead of training, in a process of its own.
EXPERIMENT_THAT_IMPORTS_A_MODULE = """
import lambda_study_task
from experiments.grid import Experiment, Grid

def measure(workdir, config):
  return {
    "layers in the config": config.model.num_layers,
    "layers in the module": lambda_study_task.LAYERS,
  }

EXPERIMENT = Experiment(
  question="?",
  grids={"cpu": Grid(variants=("diff_v2",), baseline="diff_v2")},
  metrics={"layers": "layers in the config"},
  trains=False,
  measure=measure,
)
"""


def test_a_folder_may_have_a_config_and_modules(run, folder):
  """config.py and experiment.py import a module that says LAYERS = 3.

  The experiment measures the number of layers in both.
  """
  (folder / "lambda_study_task.py").write_text("LAYERS = 3\n")
  (folder / "config.py").write_text(CONFIG_THAT_IMPORTS_A_MODULE)
  (folder / "experiment.py").write_text(EXPERIMENT_THAT_IMPORTS_A_MODULE)

  run("lambda_study")

  assert read_entries(folder)["diff_v2/seed_0"]["results"] == {
    "layers in the config": 3,
    "layers in the module": 3,
  }


def test_the_runs_of_a_folder_start_from_its_config(folder):
  """The base of a run is the config whose fields the run changes."""
  (folder / "config.py").write_text("from diffjax.configs.tiny import *\n")
  one_run = grid.Grid(variants=("diff_v2",), baseline="diff_v2")

  (expanded,) = grid.expand(str(folder), one_run, {})

  assert expanded.base == f"{folder}/config.py:diff_v2"


def test_commands_find_the_modules_of_the_folder(monkeypatch, tmp_path):
  """Commands run in the repository, so relative paths become absolute."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["repo", "/absolute"]))

  environment = folders.environment("/me/study", modules=["my_module"])

  # The folder, the current directory, and the paths from before.
  assert environment["PYTHONPATH"].split(os.pathsep) == [
    "/me/study",
    str(tmp_path),
    str(tmp_path / "repo"),
    "/absolute",
  ]


def test_commands_of_the_repository_need_no_path(monkeypatch):
  monkeypatch.delenv("PYTHONPATH", raising=False)

  assert folders.environment("ablations", modules=[]) == {}


# Here, trainings take no time.
@pytest.mark.usefixtures("training")
def test_a_folder_can_be_drawn_again(run, folder):
  """draw.main draws the plot from results.json and trains nothing."""
  run("lambda_study")
  first_plot = (folder / "plot.svg").read_bytes()
  (folder / "plot.svg").unlink()

  draw.main([str(folder)])

  assert (folder / "plot.svg").read_bytes() == first_plot


@pytest.fixture
def folder_with_module(folder, monkeypatch):
  """The folder, if its experiment.py needs --import=my_attention_module."""
  monkeypatch.syspath_prepend(str(folder))
  (folder / "my_attention_module.py").write_text("")
  # This fails unless the module was imported before.
  requirement = 'import sys\nassert "my_attention_module" in sys.modules\n'
  (folder / "experiment.py").write_text(requirement + SIX_RUNS)
  return folder


def test_the_flag_import_is_passed_to_all_commands(
  run, training, folder_with_module
):
  """A module of --import can register an attention variant."""
  run("lambda_study", "--only=*/seed_0", "--import=my_attention_module")

  # Each of the three runs, one for each λ_init, has a command or more.
  assert len(training.commands) >= 3
  for command, environment in training.commands:
    assert "--import=my_attention_module" in command
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert str(folder_with_module) in paths


@pytest.mark.usefixtures("training", "folder_with_module")
def test_printed_commands_import_the_modules_of_the_flag_import(run):
  """The folder lambda_study is in the current directory."""
  out, _ = run(
    "lambda_study", "--print", "--only=*/seed_0", "--import=my_attention_module"
  )

  # There are three values of λ_init with the seed 0.
  lines = out.splitlines()
  assert len(lines) == 3
  for line in lines:
    assert "-m diffjax.train --import=my_attention_module " in line


@pytest.fixture
def parse_import_flags(monkeypatch):
  """parse_import_flags("--import=a") parses the flags of this process."""
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  flags.DEFINE_multi_string("import", [], "", flag_values=values)

  def parse(*arguments):
    values(["command", *arguments])

  return parse


def test_a_command_without_import_passes_no_modules(monkeypatch):
  # No flag is defined.
  monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())

  assert imports.modules() == []
  assert imports.arguments() == []


def test_the_flag_import_is_passed_on(parse_import_flags):
  parse_import_flags("--import=a", "--import=b.c")

  assert imports.arguments() == ["--import=a", "--import=b.c"]


def test_modules_that_register_variants_are_passed_on(
  parse_import_flags, tmp_path
):
  parse_import_flags("--import=a,d")

  # In this context, modules of the test have registered attention variants.
  with own_variants.registered(tmp_path):
    modules = imports.modules()

  assert modules == ["a", "d", *own_variants.MODULES]


def test_import_flags_are_split_from_other_arguments():
  modules, arguments = imports.split(["x", "--import=a", "y"])

  assert modules == ["a"]
  assert arguments == ["x", "y"]


def test_the_command_that_measures_reports_a_module_that_is_missing(tmp_path):
  """The flag --import names a module that does not exist."""
  experiment = "ablations"
  grid_name = "cpu"
  workdir = result_dir = str(tmp_path)
  command = [sys.executable, "-m", "experiments.measure", "--import=no_such"]
  command += [experiment, grid_name, workdir, result_dir]

  result = subprocess.run(
    command, cwd=grid.FOLDER.parent, capture_output=True, text=True
  )

  assert result.returncode == 1
  assert result.stderr.startswith("error: cannot import 'no_such': ")


def test_the_documented_ablation_runs(run, training, folder):
  (folder / "experiment.py").write_text(documented_ablation())

  out, _ = run("lambda_study")

  # Three values of λ_init, with and without the head norm, with two seeds.
  assert len(training.started) == 3 * 2 * 2
  assert "(12 of 12 runs)" in out
  table = (folder / "table.md").read_text()
  for lambda_init in (0.2, 0.5, 0.8):
    assert f"| lambda_init={lambda_init},head_norm=True |" in table
    assert f"| lambda_init={lambda_init},head_norm=False |" in table
  # An empty figure takes fewer bytes.
  assert (folder / "plot.png").stat().st_size > 5000


# Config fields of a small model.
SMALL_FIELDS = {
  "model.num_layers": 1,
  "model.embed_dim": 32,
  "model.head_dim": 8,
  "model.ffn_dim": 32,
  "data.length": 64,
  "data.mode": "streamed",
  "data.validation_fraction": 0.3,
  "eval.rows": 8,
  "train.batch_size": 4,
  "train.max_skipped_in_a_row": 2,
  "optimizer.warmup_steps": 1,
}


@pytest.fixture
def small_run(run, folder, tmp_path):
  """small_run(steps, code): trains small models on a text, for real."""
  (tmp_path / "text").mkdir()
  for index in range(30):
    text = f"line {index} of a text\n" * 60
    (tmp_path / "text" / f"{index}.txt").write_text(text)
  fields = {**SMALL_FIELDS, "data.source": f"text:{tmp_path}/text/*.txt"}
  settings = [f"--set={field}={value}" for field, value in fields.items()]

  def train(steps, code=0):
    return run(
      "lambda_study",
      f"--steps={steps}",
      f"--workdir={tmp_path}/runs",
      f"--out={folder}",
      *settings,
      code=code,
    )

  return train


@pytest.mark.full
def test_a_training_that_diverges_is_reported(small_run, folder):
  """The learning rate is 1e9, so the loss becomes NaN or infinite."""
  (folder / "experiment.py").write_text("""
from experiments.grid import Experiment, Grid

EXPERIMENT = Experiment(
  question="?",
  grids={"cpu": Grid.product("tiny", {"optimizer.learning_rate": [1e9]})},
  metrics={"loss": "validation/loss"},
)
""")

  out, errors = small_run(steps=6, code=1)

  assert "(0 of 1 runs)" in out
  assert "error: 1 of 1 runs failed" in errors
  (entry,) = read_entries(folder).values()
  assert entry["factors"] == {"optimizer.learning_rate": 1e9}
  assert entry["failed"].startswith("stopped at step ")


@pytest.mark.full
def test_a_variant_of_the_user_is_trained_and_compared(small_run, folder):
  """The module dint.py of docs/variants.md registers the variant "dint".

  The factor "variant" gives all models the same size.
  """
  own_variants.write_modules(folder)
  (folder / "experiment.py").write_text("""
import dint
from experiments.grid import Experiment, Grid

EXPERIMENT = Experiment(
  question="?",
  grids={"cpu": Grid.product("tiny", {"variant": ["diff", "dint"]})},
  metrics={"loss": "validation/loss"},
)
""")

  # This process forgets the variant afterwards.
  with own_variants.restore_registry():
    out, _ = small_run(steps=2)

  assert "(2 of 2 runs)" in out
  entries = read_entries(folder)
  diff = entries["variant=diff/seed_0"]
  dint = entries["variant=dint/seed_0"]
  assert diff["parameters"] == dint["parameters"]
  diff_loss = diff["results"]["validation/loss"]
  dint_loss = dint["results"]["validation/loss"]
  assert diff_loss > 0
  assert dint_loss > 0
  assert dint_loss != diff_loss
  assert diff["seconds"] > 0
  # An empty figure takes fewer bytes.
  assert (folder / "plot.png").stat().st_size > 5000
