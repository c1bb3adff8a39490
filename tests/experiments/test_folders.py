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

EXPERIMENT = """
from experiments.grid import Experiment, Grid

EXPERIMENT = Experiment(
  question="Does the head norm interact with λ_init?",
  grids={
    "cpu": Grid.product(
      "tiny",
      {"model.lambda_init": [0.2, 0.5, 0.8], "model.head_norm": [True, False]},
      seeds=range(2),
    )
  },
  metrics={"loss": "validation/loss", "AR-Hit": "validation/ar_hit"},
)
"""
# The same with an empty figure, which takes little time.
EXPERIMENT_WITH_EMPTY_FIGURE = """
from matplotlib.figure import Figure

def plot(results):
  return Figure((1, 1))
""" + EXPERIMENT.replace("  question", "  plot=plot,\n  question")


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with an experiment.py, in the current directory."""
  path = tmp_path / "lambda_study"
  path.mkdir()
  (path / "experiment.py").write_text(EXPERIMENT_WITH_EMPTY_FIGURE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  return path


class FakeTraining:
  """Trainings that take no time.

  Attributes:
    errors: The errors of runs, by name. A text is the last line of a command
      that fails.
    losses: The losses of runs, by name. By default 2 plus the seed.
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


def test_one_file_makes_runs_a_table_and_a_plot(run, training, folder):
  (folder / "experiment.py").write_text(EXPERIMENT)

  out, errors = run("lambda_study")

  assert len(training.started) == 12
  assert f"{folder}: results.json, table.md, plot.png, plot.svg" in out
  assert "(12 of 12 runs)" in out
  assert f"results in {folder}" in errors
  table = (folder / "table.md").read_text()
  assert "| lambda_init=0.2,head_norm=True | 0.838 M | 2 | 2.5000 ±" in table


def test_results_have_the_values_of_the_factors(run, training, folder):
  name = "lambda_init=0.8,head_norm=False/seed_1"

  run("lambda_study", f"--only={name}")

  assert read_entries(folder)[name]["factors"] == {
    "model.lambda_init": 0.8,
    "model.head_norm": False,
  }


def test_finished_runs_are_not_repeated(run, training, folder):
  run("lambda_study")

  # The folder's path is another way to name it.
  _, errors = run(str(folder))

  assert "0 of 12 runs to do" in errors
  assert len(training.started) == 12


def test_a_trial_leaves_the_folder_unchanged(run, training, folder):
  before = sorted(folder.glob("*.*"))

  out, _ = run("lambda_study", "--steps=20")

  assert "(12 of 12 runs)" in out
  assert sorted(folder.glob("*.*")) == before


def test_the_runs_of_a_trial_are_not_those_of_the_grid(run, training, folder):
  only = "--only=lambda_init=0.2,head_norm=True/seed_0"
  run("lambda_study", "--steps=20", only)

  run("lambda_study", only)

  assert len(training.started) == 2
  assert (folder / "results.json").exists()


# A row with one failed run, and a row without any finished run.
PARTLY_FAILED = "lambda_init=0.2,head_norm=False"
FAILED = "lambda_init=0.5,head_norm=True"
ERRORS = {
  f"{PARTLY_FAILED}/seed_0": "diverged | at step 3",
  f"{FAILED}/seed_0": "out of memory",
  f"{FAILED}/seed_1": "out of memory",
}


def test_other_runs_go_on_after_a_failure(run, training, folder):
  training.errors = ERRORS

  out, errors = run("lambda_study", code=1)

  assert len(training.started) == 12
  assert "(9 of 12 runs)" in out
  assert errors.endswith(
    f"error: 3 of 12 runs failed: {', '.join(ERRORS)}; the same command tries"
    " them again\n"
  )


def test_failed_runs_are_in_the_table(run, training, folder):
  training.errors = ERRORS

  run("lambda_study", code=1)

  lines = (folder / "table.md").read_text().splitlines()
  mean_of_one = "| 0.837 M | 1 of 2 | 3.0000 (1 of 2) | – |"
  assert f"| {PARTLY_FAILED} {mean_of_one}  |" in lines
  no_mean = "| 0.838 M | 0 of 2 | failed: out of memory | – |"
  assert f"| {FAILED} {no_mean}  |" in lines
  assert f"- {PARTLY_FAILED}/seed_0 failed: diverged | at step 3" in lines


def test_failed_runs_have_entries_without_results(run, training, folder):
  training.errors = ERRORS

  run("lambda_study", code=1)

  entry = read_entries(folder)[f"{PARTLY_FAILED}/seed_0"]
  assert entry["failed"] == "diverged | at step 3"
  assert entry["results"]["validation/loss"] is None


def test_only_the_chosen_failed_runs_are_tried_again(run, training, folder):
  training.errors = ERRORS
  run("lambda_study", code=1)
  training.errors = {}
  training.started.clear()

  out, errors = run("lambda_study", f"--only={PARTLY_FAILED}")

  assert training.started == [f"{PARTLY_FAILED}/seed_0"]
  assert "(10 of 12 runs)" in out
  assert "; failed:" not in errors
  entries = read_entries(folder)
  assert "failed" not in entries[f"{PARTLY_FAILED}/seed_0"]
  assert "failed" in entries[f"{FAILED}/seed_0"]


def test_runs_that_fail_again_stay_failed(run, training, folder):
  training.errors = ERRORS
  run("lambda_study", code=1)
  training.errors = {f"{FAILED}/seed_1": "out of memory"}
  training.started.clear()

  run("lambda_study", code=1)

  assert training.started == list(ERRORS)
  failed = []
  for name, entry in read_entries(folder).items():
    if "failed" in entry:
      failed.append(name)
  assert failed == [f"{FAILED}/seed_1"]


def test_failures_are_forgotten_after_success(run, training, folder):
  training.errors = ERRORS
  run("lambda_study", code=1)
  training.errors = {}

  run("lambda_study")

  assert not list(folder.parent.rglob("failed.json"))
  assert "failed" not in (folder / "results.json").read_text()
  assert "failed" not in (folder / "table.md").read_text()


def test_a_slice_reports_its_failed_runs(run, training, folder):
  name = "lambda_init=0.2,head_norm=True/seed_0"
  training.errors = {name: "diverged"}

  _, errors = run("lambda_study", "--slice=0/6", code=1)

  assert "this slice is done" in errors
  assert f"1 of 2 runs failed: {name}" in errors


def test_collecting_tries_the_failed_runs_of_a_slice_again(
  run, training, folder
):
  name = "lambda_init=0.2,head_norm=True/seed_0"
  training.errors = {name: "diverged"}
  run("lambda_study", "--slice=0/6", code=1)
  training.errors = {}

  out, _ = run("lambda_study")

  assert "(12 of 12 runs)" in out
  assert training.started.count(name) == 2


def test_failures_of_another_config_are_ignored(run, training, folder):
  """The changed setting may be the fix."""
  failed = "lambda_init=0.2,head_norm=True/seed_0"
  finished = "lambda_init=0.2,head_norm=True/seed_1"
  training.errors = {failed: "diverged"}
  run("lambda_study", f"--only={failed}", code=1)
  changed = [
    f"--workdir={folder.parent}/runs/experiments",
    f"--out={folder}",
    "--set=optimizer.learning_rate=1e-5",
  ]

  out, _ = run("lambda_study", f"--only={finished}", *changed)

  assert "(1 of 12 runs)" in out
  assert list(read_entries(folder)) == [finished]


def test_an_interrupt_stops_all_runs(run, training, folder):
  training.errors = {
    "lambda_init=0.2,head_norm=False/seed_0": KeyboardInterrupt()
  }

  _, errors = run("lambda_study", code=130)

  assert len(training.started) == 2
  assert "error: interrupted" in errors
  assert not (folder / "results.json").exists()


def test_a_run_without_a_loss_has_finished(run, training, folder):
  name = "lambda_init=0.2,head_norm=True/seed_0"
  training.losses = {name: None}

  run("lambda_study", "--only=lambda_init=0.2,head_norm=True")

  assert "failed" not in read_entries(folder)[name]
  table = (folder / "table.md").read_text()
  row = "| lambda_init=0.2,head_norm=True | 0.838 M | 2 | 3.0000 (1 of 2) | –"
  assert row in table


@pytest.fixture
def folder_with_plot(folder):
  """A folder with a plot that writes its rows into the file `drawn`."""
  plot = (
    "import pathlib\n"
    "from matplotlib.figure import Figure\n"
    "def plot(results):\n"
    "  names = sorted({run['variant'] for run in results['runs']})\n"
    f"  pathlib.Path({str(folder)!r}, 'drawn').write_text(' '.join(names))\n"
    "  return Figure((1, 1))\n"
  )
  experiment = EXPERIMENT.replace("  question", "  plot=plot,\n  question")
  (folder / "experiment.py").write_text(plot + experiment)
  return folder


def test_a_plot_gets_no_rows_with_a_failed_run(run, training, folder_with_plot):
  training.errors = {"lambda_init=0.2,head_norm=True/seed_1": "diverged"}

  run("lambda_study", "--only=lambda_init=0.2*", code=1)

  drawn = (folder_with_plot / "drawn").read_text()
  assert drawn == "lambda_init=0.2,head_norm=False"


def test_there_is_no_plot_if_all_rows_have_a_failed_run(
  run, training, folder_with_plot
):
  training.errors = {f"{FAILED}/seed_0": "diverged"}

  run("lambda_study", f"--only={FAILED}/seed_0", code=1)

  assert not (folder_with_plot / "drawn").exists()
  assert "failed: diverged" in (folder_with_plot / "table.md").read_text()


def test_folders_of_the_same_name_have_different_workdirs(run, tmp_path):
  names = []
  for parent in ("a", "b"):
    path = tmp_path / parent / "study"
    path.mkdir(parents=True)
    (path / "experiment.py").write_text(EXPERIMENT)
    out, _ = run(str(path), "--print", "--workdir=/runs")
    names.append(re.search(r"--workdir=/runs/(\S+)/cpu/", out)[1])

  first, second = names
  assert first != second
  for name in names:
    assert re.fullmatch(r"study_[0-9a-f]{8}", name)


@pytest.mark.parametrize(
  "argument",
  [
    pytest.param("ablations", id="name"),
    pytest.param(str(grid.FOLDER / "ablations"), id="path"),
  ],
)
def test_a_folder_of_the_repository_has_a_name(argument):
  assert grid.resolve(argument) == "ablations"


@pytest.mark.parametrize(
  "content, message",
  [
    pytest.param(None, "has no experiment.py", id="no_file"),
    pytest.param(
      "x = 1\n",
      "experiment.py does not define EXPERIMENT",
      id="no_experiment",
    ),
    pytest.param(
      "x = 1\ny = x.z\n",
      r"experiment.py:2: AttributeError: 'int' object",
      id="attribute_error",
    ),
    pytest.param(
      "def f(:\n", r"experiment.py:1: SyntaxError: ", id="syntax_error"
    ),
    pytest.param(
      "import missing_module\n",
      "experiment.py:1: ModuleNotFoundError: No",
      id="missing_module",
    ),
  ],
)
def test_errors_in_a_folder_are_one_line(run, tmp_path, content, message):
  if content is not None:
    (tmp_path / "experiment.py").write_text(content)

  _, errors = run(str(tmp_path), code=1)

  assert re.search(message, errors)
  assert len(errors.splitlines()) == 1


def test_the_error_of_an_unknown_name_mentions_paths():
  with pytest.raises(
    UserError, match="the path of a folder with an experiment"
  ):
    grid.load("nothing")


def test_a_folder_may_have_a_config_and_modules(run, folder):
  """Both files import a module of the folder, also in `measure`'s process."""
  (folder / "lambda_study_task.py").write_text("LAYERS = 3\n")
  (folder / "config.py").write_text(
    "import lambda_study_task\n"
    "from diffjax.configs import tiny\n"
    "def get_config(variant):\n"
    "  config = tiny.get_config(variant)\n"
    "  config.model.num_layers = lambda_study_task.LAYERS\n"
    "  return config\n"
  )
  (folder / "experiment.py").write_text(
    "import lambda_study_task\n"
    "from experiments.grid import Experiment, Grid\n"
    "def measure(workdir, config):\n"
    "  layers = config.model.num_layers\n"
    "  return {'layers': layers, 'same': layers == lambda_study_task.LAYERS}\n"
    "EXPERIMENT = Experiment('?', {'cpu': Grid(('diff_v2',), 'diff_v2')},\n"
    "  {'layers': 'layers'}, trains=False, measure=measure)\n"
  )

  run("lambda_study")

  entry = read_entries(folder)["diff_v2/seed_0"]
  assert entry["results"] == {"layers": 3, "same": True}
  experiment = grid.load(str(folder))
  (expanded,) = grid.expand(str(folder), experiment.grids["cpu"], {})
  assert expanded.base == f"{folder}/config.py:diff_v2"


def test_commands_find_the_modules_of_the_folder(monkeypatch, tmp_path):
  """They run in the repository, so relative paths become absolute."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["repo", "/absolute"]))

  environment = folders.environment("/me/study", ["my_module"])

  assert environment["PYTHONPATH"].split(os.pathsep) == [
    "/me/study",
    str(tmp_path),
    str(tmp_path / "repo"),
    "/absolute",
  ]


def test_commands_of_the_repository_need_no_path(monkeypatch):
  monkeypatch.delenv("PYTHONPATH", raising=False)

  assert folders.environment("ablations", []) == {}


def test_a_folder_can_be_drawn_again(run, training, folder):
  run("lambda_study")
  before = (folder / "plot.svg").read_bytes()
  (folder / "plot.svg").unlink()

  draw.main([str(folder)])

  assert (folder / "plot.svg").read_bytes() == before


@pytest.fixture
def folder_with_module(folder, monkeypatch):
  """A folder whose experiment.py requires that --import was read before it."""
  monkeypatch.syspath_prepend(str(folder))
  (folder / "my_attention_module.py").write_text("LOADED = True\n")
  check = "import sys\nassert sys.modules['my_attention_module'].LOADED\n"
  experiment = check + EXPERIMENT_WITH_EMPTY_FIGURE
  (folder / "experiment.py").write_text(experiment)
  return folder


def test_all_commands_import_the_modules_of_import(
  run, training, folder_with_module
):
  run("lambda_study", "--only=*0.2*/seed_0", "--import=my_attention_module")

  assert len(training.commands) > 2
  for command, environment in training.commands:
    assert "--import=my_attention_module" in command
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert str(folder_with_module) in paths


def test_printed_commands_import_the_modules_of_import(
  run, training, folder_with_module
):
  out, _ = run(
    "lambda_study",
    "--print",
    "--only=*0.2*/seed_0",
    "--import=my_attention_module",
  )

  assert out.count("-m diffjax.train --import=my_attention_module ") == 2


@pytest.fixture
def import_flag(monkeypatch):
  """A parser of --import. Returns a function that parses arguments."""
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  flags.DEFINE_multi_string("import", [], "", flag_values=values)

  def parse(*arguments):
    values(["command", *arguments])

  return parse


def test_a_command_without_import_passes_no_modules(monkeypatch):
  monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())

  assert imports.modules() == []
  assert imports.arguments() == []


def test_the_flag_import_is_passed_on(import_flag):
  import_flag("--import=a", "--import=b.c")

  assert imports.arguments() == ["--import=a", "--import=b.c"]


def test_modules_that_register_variants_are_passed_on(import_flag, tmp_path):
  import_flag("--import=a,d")

  with own_variants.registered(tmp_path):
    assert imports.modules() == ["a", "d", *own_variants.MODULES]


def test_the_flag_import_is_split_from_other_arguments():
  modules, arguments = imports.split(["x", "--import=a", "y"])

  assert modules == ["a"]
  assert arguments == ["x", "y"]


def test_measuring_imports_the_modules(tmp_path):
  command = [sys.executable, "-m", "experiments.measure", "--import=no_such"]

  result = subprocess.run(
    [*command, "ablations", "cpu", str(tmp_path), str(tmp_path)],
    cwd=grid.FOLDER.parent,
    capture_output=True,
    text=True,
  )

  assert result.returncode == 1
  assert result.stderr.startswith("error: cannot import 'no_such': ")


def test_the_documented_ablation_runs(run, training, folder):
  """The last example of docs/variants.md has 2 × 3 settings and two seeds."""
  *_, ablation = python_blocks(own_variants.PAGE.read_text())
  (folder / "experiment.py").write_text(ablation)

  out, _ = run("lambda_study")

  assert len(training.started) == 12
  assert "(12 of 12 runs)" in out
  table = (folder / "table.md").read_text()
  for lambda_init in (0.2, 0.5, 0.8):
    assert f"| lambda_init={lambda_init},head_norm=True |" in table
    assert f"| lambda_init={lambda_init},head_norm=False |" in table
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
  (folder / "experiment.py").write_text(
    "from experiments.grid import Experiment, Grid\n"
    "EXPERIMENT = Experiment('?', {'cpu': Grid.product('tiny', "
    "{'optimizer.learning_rate': [1e9]})}, {'loss': 'validation/loss'})\n"
  )

  out, errors = small_run(steps=6, code=1)

  assert "(0 of 1 runs)" in out
  assert "error: 1 of 1 runs failed" in errors
  (entry,) = read_entries(folder).values()
  assert entry["factors"] == {"optimizer.learning_rate": 1e9}
  assert entry["failed"].startswith("stopped at step ")


@pytest.mark.full
def test_a_product_is_trained_collected_and_drawn(small_run, folder):
  """experiment.py imports the module that registers a variant of the user.

  The factor "variant" gives both models the same size.
  """
  own_variants.write_modules(folder)
  (folder / "experiment.py").write_text(
    "import dint\n"
    "from experiments.grid import Experiment, Grid\n"
    "EXPERIMENT = Experiment('?', {'cpu': Grid.product('tiny', "
    "{'variant': ['diff', 'dint']})}, {'loss': 'validation/loss'})\n"
  )

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
  assert dint_loss not in (None, diff_loss)
  assert diff["seconds"] > 0
  assert (folder / "plot.png").stat().st_size > 5000
