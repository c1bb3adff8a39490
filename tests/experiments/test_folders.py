"""Experiments in folders outside the repository, and runs that end with an error."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags

from diffjax.config import UserError
from experiments import folders, grid, imports, launch, results
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder with only an experiment.py; the current directory is another."""
  path = tmp_path / "lambda_study"
  path.mkdir()
  (path / "experiment.py").write_text(EXPERIMENT)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  return path


@pytest.fixture
def training(run, monkeypatch):
  """training.errors["lambda_init=0.2,…/seed_0"] = "diverged": a training that takes no time, or fails. `training.begun` lists them."""

  class Training:
    def __init__(self):
      self.errors = {}
      self.losses = {}
      self.begun = []
      self.commands = []
      self._finished = {}

    def call(self, launcher, command, env=None, log=None, *, tail=False):
      self.commands.append((command, env))
      if "diffjax.train" not in command:
        return
      (workdir,) = [
        argument.removeprefix("--workdir=")
        for argument in command
        if argument.startswith("--workdir=")
      ]
      name = "/".join(workdir.split("/")[-2:])
      self.begun.append(name)
      error = self.errors.get(name)
      if isinstance(error, str):
        raise launch.Failed(f"exit code 1: error: {error}", error)
      if error is not None:
        raise error
      loss = self.losses.get(name, 2.0 + int(name[-1]))
      self._finished[workdir] = {"validation/loss": loss}

    def trained(self, workdir, config, places):
      return self._finished.get(str(workdir))

  fake = Training()
  monkeypatch.setattr(
    launch.Launcher, "call", lambda *args, **kwargs: fake.call(*args, **kwargs)
  )
  monkeypatch.setattr(results, "trained", fake.trained)
  return fake


def entries(folder):
  stored = json.loads((folder / "results.json").read_text())
  return {run["name"]: run for run in stored["runs"]}


def test_one_file_makes_runs_a_table_and_a_plot(run, training, folder):
  out, errors = run("lambda_study")
  assert len(training.begun) == 12
  assert f"{folder}: results.json, table.md, plot.png, plot.svg" in out
  assert "(12 of 12 runs)" in out and f"results in {folder}" in errors
  stored = entries(folder)
  assert stored["lambda_init=0.8,head_norm=False/seed_1"]["factors"] == {
    "model.lambda_init": 0.8,
    "model.head_norm": False,
  }
  table = (folder / "table.md").read_text()
  assert "| lambda_init=0.2,head_norm=True | 0.838 M | 2 | 2.5000 ±" in table
  _, errors = run(str(folder))
  assert "0 of 12 runs to do" in errors


def test_a_trial_leaves_the_folder_to_the_whole_grid(run, training, folder):
  out, errors = run("lambda_study", "--steps=20")
  assert "(12 of 12 runs)" in out
  for name in ("results.json", "table.md", "plot.png"):
    assert not (folder / name).exists()
  run("lambda_study")
  assert len(training.begun) == 24
  assert (folder / "results.json").exists()


def test_a_run_that_failed_is_reported_and_tried_again(run, training, folder):
  """The others go on, the means leave it out, and the exit status is 1."""
  partly, wholly = (
    "lambda_init=0.2,head_norm=False",
    "lambda_init=0.5,head_norm=True",
  )
  training.errors = {
    f"{partly}/seed_0": "diverged | at step 3",
    f"{wholly}/seed_0": "out of memory",
    f"{wholly}/seed_1": "out of memory",
  }
  out, errors = run("lambda_study", code=1)
  assert len(training.begun) == 12 and "(9 of 12 runs)" in out
  assert errors.endswith(
    f"error: 3 of 12 runs failed: {partly}/seed_0, {wholly}/seed_0,"
    f" {wholly}/seed_1; the same command tries them again\n"
  )
  table = (folder / "table.md").read_text()
  assert f"| {partly} | 0.837 M | 1 of 2 | 3.0000 (1 of 2) | – |" in table
  assert f"| {wholly} | 0.838 M | 0 of 2 | failed: out of memory | – |" in table
  assert f"- {partly}/seed_0 failed: diverged | at step 3\n" in table
  failed = entries(folder)[f"{partly}/seed_0"]
  assert failed["failed"] == "diverged | at step 3"
  assert failed["results"]["validation/loss"] is None

  training.begun.clear()
  training.errors = {f"{wholly}/seed_1": "out of memory"}
  out, errors = run("lambda_study", f"--only={partly}")
  assert training.begun == [f"{partly}/seed_0"]
  assert "(10 of 12 runs)" in out and "; failed:" not in errors
  assert "failed" not in entries(folder)[f"{partly}/seed_0"]
  assert "failed" in entries(folder)[f"{wholly}/seed_0"], "not tried again"

  training.begun.clear()
  run("lambda_study", code=1)
  assert training.begun == [f"{wholly}/seed_0", f"{wholly}/seed_1"]
  training.errors = {}
  run("lambda_study")
  assert not list(folder.parent.rglob("failed.json"))
  assert not any("failed" in entry for entry in entries(folder).values())
  assert "failed" not in (folder / "table.md").read_text()


def test_a_slice_with_a_run_that_failed(run, training, folder):
  """Its exit status is 1, too, and the command that collects tries again."""
  name = "lambda_init=0.2,head_norm=True/seed_0"
  training.errors = {name: "diverged"}
  _, errors = run("lambda_study", "--slice=0/6", code=1)
  assert (
    "this slice is done" in errors and f"1 of 2 runs failed: {name}" in errors
  )
  training.errors = {}
  out, _ = run("lambda_study")
  assert "(12 of 12 runs)" in out and training.begun.count(name) == 2


def test_a_changed_config_may_be_the_remedy(run, training, folder):
  """What failed with another config is neither reported nor refused."""
  failed, other = [
    f"lambda_init=0.2,head_norm=True/seed_{seed}" for seed in range(2)
  ]
  training.errors = {failed: "diverged"}
  run("lambda_study", f"--only={failed}", code=1)
  flags = [
    f"--workdir={folder.parent}/runs/experiments",
    f"--out={folder}",
    "--set=optimizer.learning_rate=1e-5",
  ]
  out, _ = run("lambda_study", f"--only={other}", *flags)
  assert "(1 of 12 runs)" in out and [*entries(folder)] == [other]
  training.errors = {}
  out, _ = run("lambda_study", f"--only={failed}", *flags)
  assert [*entries(folder)] == [failed, other]


def test_an_interrupt_stops_everything(run, training, folder):
  training.errors = {
    "lambda_init=0.2,head_norm=False/seed_0": KeyboardInterrupt()
  }
  _, errors = run("lambda_study", code=130)
  assert len(training.begun) == 2 and "error: interrupted" in errors
  assert not (folder / "results.json").exists()


def test_a_loss_that_is_no_number_is_in_the_table(run, training, folder):
  names = [f"lambda_init=0.2,head_norm=True/seed_{seed}" for seed in range(2)]
  training.losses = {names[0]: None}
  run("lambda_study")
  table = (folder / "table.md").read_text()
  assert (
    "| lambda_init=0.2,head_norm=True | 0.838 M | 2 | 3.0000 (1 of 2) | –"
    in table
  )
  assert names[0] in entries(folder)


def test_an_experiments_own_plot_gets_no_row_of_which_a_run_failed(
  run, training, folder
):
  own_plot = (
    "import pathlib\n"
    "from matplotlib.figure import Figure\n"
    "def plot(results):\n"
    "  names = sorted({run['variant'] for run in results['runs']})\n"
    f"  pathlib.Path({str(folder)!r}, 'drawn').write_text(' '.join(names))\n"
    "  return Figure()\n"
  )
  (folder / "experiment.py").write_text(
    own_plot + EXPERIMENT.replace("  question", "  plot=plot,\n  question")
  )
  training.errors = {"lambda_init=0.2,head_norm=True/seed_1": "diverged"}
  run("lambda_study", "--only=lambda_init=0.2*", code=1)
  assert (folder / "drawn").read_text() == "lambda_init=0.2,head_norm=False"
  training.errors = {
    f"lambda_init=0.5,head_norm=True/seed_{seed}": "diverged"
    for seed in range(2)
  }
  (folder / "drawn").unlink()
  only = "--only=lambda_init=0.5,head_norm=True"
  run(
    "lambda_study", only, f"--out={folder}/out", f"--workdir={folder}", code=1
  )
  assert not (folder / "drawn").exists(), "no row is left to draw"
  assert "failed: diverged" in (folder / "out/table.md").read_text()


def test_folders_of_the_same_name_have_their_own_runs(run, tmp_path):
  workdirs = []
  for parent in ("a", "b"):
    path = tmp_path / parent / "study"
    path.mkdir(parents=True)
    (path / "experiment.py").write_text(EXPERIMENT)
    out, _ = run(str(path), "--print", "--workdir=/runs")
    workdirs.append(re.search(r"--workdir=/runs/(\S+)/cpu/", out)[1])
  assert workdirs[0] != workdirs[1]
  assert all(re.fullmatch(r"study_[0-9a-f]{8}", name) for name in workdirs)


def test_a_folder_of_the_repository_is_called_by_its_name():
  assert grid.resolve(str(grid.FOLDER / "ablations")) == "ablations"
  assert grid.resolve("ablations") == "ablations"


@pytest.mark.parametrize(
  "content, message",
  [
    (None, "has no experiment.py"),
    ("x = 1\n", "experiment.py does not define EXPERIMENT"),
    ("x = 1\ny = x.z\n", r"experiment.py:2: AttributeError: 'int' object"),
    ("def f(:\n", r"experiment.py:1: SyntaxError: "),
    ("import missing_module\n", "experiment.py:1: ModuleNotFoundError: No"),
  ],
)
def test_mistakes_in_a_folder_are_one_line(run, tmp_path, content, message):
  if content is not None:
    (tmp_path / "experiment.py").write_text(content)
  _, errors = run(str(tmp_path), code=1)
  assert re.search(message, errors) and len(errors.splitlines()) == 1


def test_an_unknown_name_is_answered_with_the_path_of_a_folder():
  with pytest.raises(
    UserError, match="the path of a folder with an experiment"
  ):
    grid.load("nothing")


def test_a_folder_with_a_config_and_modules_of_its_own(run, folder):
  """Both files import a sibling. `measure` runs in a process of its own."""
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
    "EXPERIMENT = Experiment('?', {'cpu': Grid(('diff', 'diff_v2'), 'diff')},\n"
    "  {'layers': 'layers'}, trains=False, measure=measure)\n"
  )
  out, _ = run("lambda_study")
  assert "| diff_v2 | " in out
  for entry in entries(folder).values():
    assert entry["results"] == {"layers": 3, "same": True}
  printed = grid.expand(str(folder), grid.load(str(folder)).grids["cpu"], {})
  assert printed[1].base == f"{folder}/config.py:diff_v2"


def test_commands_find_the_modules_of_the_folder(monkeypatch, tmp_path):
  """They run in the repository: relative paths would mean others there."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["repo", "/absolute"]))
  found = folders.environment("/me/study", ["my_module"])
  assert found["PYTHONPATH"].split(os.pathsep) == [
    "/me/study",
    str(tmp_path),
    str(tmp_path / "repo"),
    "/absolute",
  ]
  monkeypatch.delenv("PYTHONPATH")
  assert folders.environment("ablations", []) == {}


def test_drawing_a_folder_again(run, training, folder):
  from experiments import draw

  run("lambda_study")
  before = (folder / "plot.svg").read_bytes()
  (folder / "plot.svg").unlink()
  draw.main([str(folder)])
  assert (folder / "plot.svg").read_bytes() == before


def test_imports_reach_every_command(run, training, folder, monkeypatch):
  """And this one, before it reads a config."""
  monkeypatch.syspath_prepend(str(folder))
  (folder / "my_attention_module.py").write_text("LOADED = True\n")
  experiment = EXPERIMENT.replace(
    "from experiments",
    "import sys\nassert sys.modules['my_attention_module'].LOADED\nfrom experiments",
    1,
  )
  (folder / "experiment.py").write_text(experiment)
  flag = "--import=my_attention_module"
  run("lambda_study", "--only=*0.2*/seed_0", flag)
  assert len(training.commands) > 2
  for command, environment in training.commands:
    assert "--import=my_attention_module" in command
    assert str(folder) in environment["PYTHONPATH"].split(os.pathsep)
  out, _ = run("lambda_study", "--print", "--only=*0.2*/seed_0", flag)
  assert out.count("-m diffjax.train --import=my_attention_module ") == 2


def test_modules_of_import_are_read_and_loaded(monkeypatch, tmp_path):
  values = flags.FlagValues()
  monkeypatch.setattr(flags, "FLAGS", values)
  assert imports.modules() == [] == imports.arguments()
  flags.DEFINE_multi_string("import", [], "", flag_values=values)
  values(["command", "--import=a", "--import=b.c"])
  assert imports.arguments() == ["--import=a", "--import=b.c"]
  assert imports.split(["x", "--import=a", "y"]) == (["a"], ["x", "y"])
  values(["command", "--import=a,d"])
  with own_variants.registered(tmp_path):
    assert imports.modules() == [
      "a",
      "b.c",
      "d",
      *own_variants.MODULES,
    ]


def test_measuring_imports_modules(tmp_path):
  command = [sys.executable, "-m", "experiments.measure", "--import=no_such"]
  result = subprocess.run(
    [*command, "ablations", "cpu", str(tmp_path), str(tmp_path)],
    cwd=grid.FOLDER.parent,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 1
  assert result.stderr.startswith("error: cannot import 'no_such': ")


@pytest.mark.full
def test_two_real_runs(run, folder, tmp_path):
  """A product is trained, collected and drawn. One run diverges."""
  (tmp_path / "text").mkdir()
  for index in range(30):
    text = f"line {index} of a text\n" * 60
    (tmp_path / "text" / f"{index}.txt").write_text(text)
  rates = "{'optimizer.learning_rate': [1e-3, 1e9]}"
  (folder / "experiment.py").write_text(
    "from experiments.grid import Experiment, Grid\n"
    "EXPERIMENT = Experiment('?', {'cpu': Grid.product('tiny', "
    f"{rates})}}, {{'loss': 'validation/loss'}})\n"
  )
  fields = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "model.head_dim": 8,
    "model.ffn_dim": 32,
    "data.source": f"text:{tmp_path}/text/*.txt",
    "data.validation_fraction": 0.3,
    "eval.rows": 8,
    "train.batch_size": 4,
    "train.max_skipped_in_a_row": 2,
    "optimizer.warmup_steps": 1,
  }
  settings = [f"--set={field}={value}" for field, value in fields.items()]
  out, errors = run(
    "lambda_study",
    "--steps=6",
    f"--workdir={tmp_path}/runs",
    f"--out={folder}",
    *settings,
    code=1,
  )
  assert "(1 of 2 runs)" in out and "error: 1 of 2 runs failed" in errors
  good, bad = entries(folder).values()
  assert good["factors"] == {"optimizer.learning_rate": 0.001}
  assert good["results"]["validation/loss"] > 0 and good["seconds"] > 0
  assert bad["failed"].startswith("stopped at step ")
  assert pathlib.Path(folder, "plot.png").stat().st_size > 5000


def test_the_documented_ablation(run, training, folder):
  """docs/variants.md: 2 × 3 settings with two seeds."""
  *_, ablation = python_blocks(own_variants.PAGE.read_text())
  (folder / "experiment.py").write_text(ablation)
  out, _ = run("lambda_study")
  assert len(training.begun) == 12 and "(12 of 12 runs)" in out
  table = (folder / "table.md").read_text()
  for lambda_init in (0.2, 0.5, 0.8):
    for head_norm in (True, False):
      assert f"| lambda_init={lambda_init},head_norm={head_norm} |" in table
  assert (folder / "plot.png").stat().st_size > 5000


@pytest.mark.full
def test_variants_of_equal_size_train(run, folder, tmp_path, monkeypatch):
  """The factor "variant" with one of a user's own, which experiment.py imports."""
  own_variants.write_modules(folder)
  (folder / "experiment.py").write_text(
    "import dint\n"
    "from experiments.grid import Experiment, Grid\n"
    "EXPERIMENT = Experiment('?', {'cpu': Grid.product('tiny', "
    "{'variant': ['diff', 'dint']})}, {'loss': 'validation/loss'})\n"
  )
  (tmp_path / "text").mkdir()
  for index in range(20):
    text = f"document {index}: " + "a few words " * 30
    (tmp_path / "text" / f"{index}.txt").write_text(text)
  fields = {
    "model.num_layers": 1,
    "data.source": f"text:{tmp_path}/text/*.txt",
    "data.validation_fraction": 0.3,
    "data.length": 64,
    "eval.rows": 8,
    "train.batch_size": 4,
  }
  settings = [f"--set={field}={value}" for field, value in fields.items()]
  with own_variants.restore_registry():
    run(
      "lambda_study",
      "--steps=2",
      f"--workdir={tmp_path}/runs",
      f"--out={folder}",
      *settings,
    )
  runs = entries(folder)
  diff = runs["variant=diff/seed_0"]
  dint = runs["variant=dint/seed_0"]
  assert diff["parameters"] == dint["parameters"]
  assert (
    diff["results"]["validation/loss"] != dint["results"]["validation/loss"]
  )
