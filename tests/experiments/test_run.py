"""python -m experiments.run: what it trains, collects, prints and refuses."""

import importlib.util
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import matplotlib.image
import pytest

from diffjax.compiled import plan
from diffjax.config import from_config_dict
from diffjax.model.flops import parameter_count
from experiments import (
  collect,
  cost,
  execute,
  grid,
  launch,
  machine,
  pace,
  results,
  study,
  training_log,
)
from experiments.ablations.config import get_config
from tests.experiments.printed import configs_by_workdir

# Flags of a model so small that the start of a command takes most of its time.
SMALL_MODEL = [
  "--set=model.num_layers=1",
  "--set=model.embed_dim=32",
  "--set=model.head_dim=8",
  "--set=model.ffn_dim=32",
  "--set=eval.rows=8",
  "--set=train.batch_size=4",
]


def text_flags(directory):
  """Writes a small text, and returns the flags that make runs read it."""
  text_dir = directory / "text"
  text_dir.mkdir()
  for index in range(30):
    (text_dir / f"{index}.txt").write_text(f"line {index} of a text\n" * 60)
  return [
    f"--set=data.source=text:{text_dir}/*.txt",
    "--set=data.validation_fraction=0.3",
  ]


@pytest.fixture
def trained_workdirs(run, monkeypatch):
  """Makes trainings take no time. Returns the workdirs that were trained.

  A command only adds the name of its module to its log, if it has one.
  """
  trained = []

  def call(launcher, command, env=None, log=None, *, tail=False):
    for argument in command:
      if argument.startswith("--workdir="):
        trained.append(argument.removeprefix("--workdir="))
    _, _, module, *_ = command
    if module == "experiments.measure":
      *_, workdir, _ = command
      (pathlib.Path(workdir) / "measured.json").write_text("{}")
    if log is not None:
      with log.open("a") as file:
        file.write(f"{module}\n")

  def final_metrics(workdir, config, location_fields):
    if str(workdir) in trained:
      return {"validation/loss": 2.0}
    return None

  monkeypatch.setattr(launch.Launcher, "call", call)
  monkeypatch.setattr(training_log, "final_metrics", final_metrics)
  return trained


@pytest.fixture
def finished_run(tmp_path):
  """The results of the run diff/seed_0, written into its workdir."""
  options = study.Options(
    steps=2, only=("diff/seed_0",), workdir=f"{tmp_path}/runs"
  )
  ablations = study.plan("ablations", options)
  (run,) = ablations.chosen
  workdir = ablations.workdir(run)
  losses = {"validation/loss": 1.0}
  results.write_run(
    workdir,
    run,
    task={},
    results=losses,
    seconds=100.0,
    machine="a machine",
  )
  return results.read_run(workdir, run, task={}, location_fields=())


@pytest.fixture
def flags(tmp_path):
  """Flags of `experiments.run` with which `finished_run` has finished."""
  return [f"--workdir={tmp_path}/runs", f"--out={tmp_path}/out", "--steps=2"]


# Here, trainings take no time.
@pytest.mark.usefixtures("trained_workdirs")
def test_a_slice_does_not_collect_results(run, flags, tmp_path):
  """A slice is one host's part of the runs: here the second half of two."""
  _, errors = run(
    "ablations",
    *flags,
    "--only=diff/seed_0",
    "--only=transformer/seed_0",
    "--slice=1/2",
  )

  assert "1 of 1 runs to do" in errors
  assert "this slice is done" in errors
  assert not (tmp_path / "out/results.json").exists()


# diff/seed_0 has finished.
@pytest.mark.usefixtures("finished_run")
def test_finished_runs_are_not_repeated(run, trained_workdirs, flags, tmp_path):
  out, errors = run("ablations", *flags, "--only=diff/seed_[01]")

  assert trained_workdirs == [f"{tmp_path}/runs/ablations/cpu/diff/seed_1"]
  assert "1 of 2 runs to do" in errors
  # The grid has 13 variants with five seeds. The table has the finished runs.
  assert "(2 of 65 runs)" in out


# Here, commands only write their names.
@pytest.mark.usefixtures("trained_workdirs")
def test_runs_side_by_side_write_their_output_to_their_workdirs(
  run, flags, tmp_path
):
  run(
    "long_context",
    *flags,
    "--only=diff/seed_[012]",
    # The first and the third of three runs.
    "--slice=0/2",
    "--side_by_side=2",
  )

  runs_dir = tmp_path / "runs/long_context/cpu/diff"
  outputs = {}
  for path in runs_dir.glob("*/output.txt"):
    outputs[path.parent.name] = path.read_text()
  # A model is trained on short rows, then on long ones, and then measured.
  commands = "diffjax.train\ndiffjax.train\nexperiments.measure\n"
  assert outputs == {"seed_0": commands, "seed_2": commands}


def write_results_json(path, entry):
  """Writes a results.json of ablations with the results of one run."""
  results.write_folder(path, "ablations", "cpu", "transformer", [entry])


def test_a_run_in_results_json_is_not_repeated_without_its_workdir(
  run, trained_workdirs, finished_run, flags, tmp_path
):
  """Results are committed, and workdirs are not."""
  write_results_json(tmp_path / "out/results.json", finished_run)
  (tmp_path / "runs/ablations/cpu/diff/seed_0/result.json").unlink()

  _, errors = run("ablations", *flags, "--only=diff/seed_0", "--slice=0/2")

  assert trained_workdirs == []
  assert "0 of 1 runs to do" in errors


# Here, trainings take no time.
@pytest.mark.usefixtures("trained_workdirs")
def test_the_progress_tells_how_many_runs_are_left(run, flags):
  # The first half of four runs.
  _, errors = run(
    "ablations",
    *flags,
    "--only=diff/seed_[0123]",
    "--slice=0/2",
    "--side_by_side=2",
  )

  # This line comes after the first of two runs.
  assert "1 run left, about " in errors


@pytest.mark.usefixtures("trained_workdirs")
def test_a_results_json_of_another_config_is_refused(
  run, finished_run, flags, tmp_path
):
  """One table cannot have runs with batches of 16 rows and of 4 rows."""
  write_results_json(tmp_path / "out/results.json", finished_run)

  _, errors = run("ablations", *flags, "--set=train.batch_size=4", code=1)

  assert len(errors.splitlines()) == 1
  assert "results.json holds results of another config" in errors
  assert "train.batch_size is 16 there and 4 now" in errors


# diff/seed_0 has finished, with batches of 16 rows.
@pytest.mark.usefixtures("finished_run")
def test_results_that_cannot_be_collected_are_refused_before_training(
  run, trained_workdirs, flags
):
  """Results of different configs are not collected in one table."""
  _, errors = run(
    "ablations",
    *flags,
    "--set=train.batch_size=4",
    "--only=transformer/seed_0",
    code=1,
  )

  assert "result.json holds results of another config (diff/seed_0)" in errors
  assert not trained_workdirs


def test_a_workdir_of_another_config_is_refused(run, flags, make_workdir):
  """The workdir of diff/seed_0 already has a run of a model with two layers."""
  (diff,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  # The models of the grid have four layers.
  make_workdir(
    "runs/ablations/cpu/diff/seed_0", diff.config, {"model.num_layers": 2}
  )

  _, errors = run("ablations", *flags, "--only=diff/seed_0", code=1)

  assert "diff/seed_0 holds a run of another config" in errors
  assert "model.num_layers is 2 there and 4 now" in errors


# Here, trainings take no time, and end with a loss of 2.
@pytest.mark.usefixtures("trained_workdirs")
def test_a_notebook_runs_and_collects_a_study(tmp_path):
  """A notebook calls functions instead of the command experiments.run."""
  options = study.Options(
    steps=20, only=("diff/seed_0",), workdir=f"{tmp_path}/runs"
  )

  ablations = study.plan("ablations", options)
  ablations = study.prepare(ablations)
  missing = collect.missing_runs(ablations)
  failed = execute.run_all(ablations, missing)
  text = collect.write_results(ablations)

  assert [run.name for run in missing] == ["diff/seed_0"]
  assert failed == []
  (run,) = missing
  millions = parameter_count(run.config.model) / 1e6
  num_seeds = 1
  assert f"| diff | {millions:.3f} M | {num_seeds} | 2.0000 |" in text
  # The grid has 13 variants with five seeds.
  assert f"(1 of {13 * 5} runs)" in text


# Here, trainings take no time, and end with a loss of 2.
@pytest.mark.usefixtures("trained_workdirs")
def test_a_notebook_trains_a_single_run(tmp_path):
  """A notebook calls functions instead of the command experiments.run."""
  options = study.Options(
    steps=20, only=("diff/seed_0",), workdir=f"{tmp_path}/runs"
  )
  ablations = study.plan("ablations", options)
  (run,) = ablations.chosen
  (training,) = study.trainings(ablations, run)

  with launch.Launcher() as launcher:
    # A slot is a part of this machine's devices, which does one run at a time.
    (slot,) = execute.make_slots(ablations, launcher)
    losses = execute.train(training, ablations.places, slot)

  assert losses == {"validation/loss": 2.0}
  seconds, machine_name = execute.time_spent(training.workdir)
  assert seconds >= 0
  assert machine_name == slot.machine


def test_the_time_of_a_command_is_added_to_that_of_earlier_commands(
  monkeypatch, tmp_path
):
  """A run that was stopped continues with another command.

  The file spent.json in its workdir has the time of the earlier ones.
  """

  def take_no_time(launcher, command, *arguments, **options):
    """Stands for `Launcher.call`, which starts a process."""

  monkeypatch.setattr(launch.Launcher, "call", take_no_time)
  earlier_seconds = 1e6
  results.write(
    tmp_path / "spent.json", {"seconds": earlier_seconds, "machine": "old"}
  )
  slot = execute.Slot(launch.Launcher(), environment={}, machine="new")

  slot.call(["a command"], workdir=tmp_path)

  seconds, machine_name = execute.time_spent(tmp_path)
  assert earlier_seconds <= seconds < earlier_seconds + 1
  assert machine_name == "new"


def check_is_a_plot(path):
  """Checks that a file is a picture with several colors."""
  pixels = matplotlib.image.imread(path)
  assert pixels.min() < pixels.max()


@pytest.mark.full
def test_runs_that_are_trained_side_by_side_have_their_own_losses(
  run, flags, tmp_path
):
  """Three runs are trained for two steps, two runs at a time."""
  run(
    "ablations",
    *flags,
    *text_flags(tmp_path),
    *SMALL_MODEL,
    "--only=diff/seed_[01]",
    "--only=transformer/seed_0",
    "--side_by_side=2",
  )

  stored = json.loads((tmp_path / "out/results.json").read_text())
  assert stored["config"]["train.steps"] == 2
  loss_by_name = {}
  for entry in stored["runs"]:
    loss_by_name[entry["name"]] = entry["results"]["validation/loss"]
  # The baseline comes first.
  assert list(loss_by_name) == [
    "transformer/seed_0",
    "diff/seed_0",
    "diff/seed_1",
  ]
  assert len(set(loss_by_name.values())) == 3
  assert min(loss_by_name.values()) > 0
  assert "| diff | " in (tmp_path / "out/table.md").read_text()
  check_is_a_plot(tmp_path / "out/plot.png")


def start(*args):
  """Starts experiments.run as a user does, in a process of its own."""
  return subprocess.Popen(
    [sys.executable, "-m", "experiments.run", *args],
    cwd=grid.FOLDER.parent,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )


def logged_steps(workdir):
  """Returns the steps in a workdir's metrics.jsonl."""
  path = workdir / "metrics.jsonl"
  if not path.exists():
    return []
  # The last line may be incomplete while the run writes it.
  *lines, _ = path.read_text().split("\n")
  return [json.loads(line)["step"] for line in lines]


def wait_for_step(workdir, step, process):
  """Waits until a process has logged a step in a workdir."""
  deadline = time.monotonic() + 300
  while step not in logged_steps(workdir):
    assert time.monotonic() < deadline
    assert process.poll() is None, "the process has ended"
    time.sleep(0.02)


@pytest.fixture
def run_stopped_at_step_5(tmp_path):
  """An ended process: its arguments, exit status and standard error.

  The process got SIGTERM at step 5 of the 600 steps of a run.
  """
  flags = [
    *text_flags(tmp_path),
    *SMALL_MODEL,
    "--set=train.log_interval=1",
    "--set=data.length=64",
    "--steps=600",
    "--only=diff/seed_0",
    f"--workdir={tmp_path}/runs",
    f"--out={tmp_path}/out",
  ]
  process = start("ablations", *flags)
  wait_for_step(tmp_path / "runs/ablations/cpu/diff/seed_0", 5, process)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=120)
  return subprocess.CompletedProcess(
    ["ablations", *flags], process.returncode, stderr=errors
  )


@pytest.mark.full
def test_sigterm_saves_the_run_and_writes_no_results(
  run_stopped_at_step_5, tmp_path
):
  """The process of the fixture got SIGTERM at step 5 of 600 steps."""
  errors = run_stopped_at_step_5.stderr

  # 130 is the status of interrupted commands.
  assert run_stopped_at_step_5.returncode == 130, errors
  assert "SIGTERM: saving" in errors
  assert "0 of 1 runs are done; the same command goes on\n" in errors
  assert "error: interrupted" in errors
  workdir = tmp_path / "runs/ablations/cpu/diff/seed_0"
  assert not (workdir / "result.json").exists()
  assert not list((tmp_path / "out").glob("*"))


@pytest.mark.full
def test_a_run_that_sigterm_stopped_is_resumed(
  run, run_stopped_at_step_5, tmp_path
):
  """The same command trains the rest of the 600 steps."""
  workdir = tmp_path / "runs/ablations/cpu/diff/seed_0"
  last_step = logged_steps(workdir)[-1]
  assert 5 <= last_step < 600
  seconds, machine_name = execute.time_spent(workdir)
  assert seconds > 0
  # As if the stopped process had taken days, so that its time is visible in the
  # time of both.
  seconds_of_stopped_process = 1e6
  results.write(
    workdir / "spent.json",
    {"seconds": seconds_of_stopped_process, "machine": machine_name},
  )

  out, errors = run(*run_stopped_at_step_5.args)

  assert f"resuming from step {last_step}" in errors
  assert "| diff |" in out
  result = json.loads((workdir / "result.json").read_text())
  assert result["config"]["train"]["steps"] == 600
  assert result["seconds"] > seconds_of_stopped_process


NAMES = ", ".join(grid.names())


@pytest.mark.parametrize(
  "args, code, message",
  [
    (
      [],
      2,
      "error: name an experiment: python -m experiments.run NAME; there are"
      f" {NAMES}",
    ),
    (
      ["nothing"],
      1,
      f"error: there is no experiment 'nothing'; there are {NAMES}",
    ),
    (["--only=diff", "banana"], 1, "error: there is no experiment 'banana'"),
    (["ablations", "banana"], 2, "error: unexpected argument 'banana'"),
    (
      ["ablations", "--grid=moon"],
      1,
      "error: --grid=moon: ablations has no such grid; there are cpu, gpu, tpu",
    ),
    (["ablations", "--only=banana"], 1, "error: --only=banana matches no run"),
    (
      ["ablations", "--slice=2/2"],
      1,
      "error: --slice=2/2: must be INDEX/COUNT",
    ),
    (["ablations", "--steps=0"], 2, "error: flag --steps=0"),
    (
      ["ablations", "--set=train.step=3"],
      1,
      "error: config.train.step is not a config field: did you mean"
      " train.steps?",
    ),
    (
      ["ablations", "--set=dif:eval.rows=4"],
      1,
      "error: --set=dif:eval.rows: the grid has no variant 'dif'; there are"
      " transformer",
    ),
    (
      ["ablations", "--set=train"],
      1,
      "error: --set=train: must be FIELD=VALUE",
    ),
    (
      ["ablations", "--set=data.seed=7"],
      1,
      "error: --set=data.seed: seeds are the grid's, 0, 1, 2, 3, 4;"
      " --only='*/seed_0' chooses one",
    ),
    (
      ["ablations", "--workdir=gs://bucket/runs"],
      1,
      "error: --workdir=gs://bucket/runs: must be a local directory",
    ),
    (
      ["ablations", "--grid=gpu", "--workdir=/proc/nowhere"],
      1,
      "error: cannot write in /proc/nowhere/ablations/gpu: No such",
    ),
    (
      ["throughput", "--grid=gpu", "--cost"],
      1,
      "error: throughput trains nothing",
    ),
    (
      ["noisy_lookup", "--aot=v5e:1x1"],
      1,
      "error: noisy_lookup takes no step of diffjax.train, so there is nothing"
      " to compile",
    ),
    (
      ["ablations", "--aot=v5e:3x3"],
      1,
      "error: transformer: --topology=v5e:3x3: there is no such slice",
    ),
  ],
)
def test_a_mistake_is_reported_in_one_line(run, tmp_path, args, code, message):
  """The exit status is 2 for wrong usage, and 1 for other errors."""
  _, errors = run(*args, f"--out={tmp_path}", code=code)

  assert errors.startswith(message)
  assert len(errors.splitlines()) == 1


def table_row(text, name):
  """Returns a row of a Markdown table, by the names of the columns.

  Args:
    text: A text with one table.
    name: The first cell of the row.
  """
  table = []
  for line in text.splitlines():
    if line.startswith("|"):
      table.append([cell.strip() for cell in line.strip("|").split("|")])
  header, _, *rows = table
  (row,) = [row for row in rows if row[0] == name]
  return dict(zip(header, row, strict=True))


def test_the_cost_of_a_large_grid_is_in_flops_and_chip_hours(run):
  """The table also has the parameters and the training tokens of a variant."""
  out, _ = run("ablations", "--grid=tpu", "--cost")

  assert out.startswith("chip-hours at 40% of the peak\n")
  row = table_row(out, "diff,size=1b")
  config = from_config_dict(get_config("diff,size=1b"))
  parameters = parameter_count(config.model)
  steps = 40_000
  rows_per_step = 128
  tokens_per_row = 2048
  tokens = steps * rows_per_step * tokens_per_row
  assert row["runs"] == "1"
  assert row["parameters"] == f"{parameters / 1e6:,.0f} M"
  assert row["tokens"] == f"{tokens / 1e9:.3g} B"
  assert row["FLOPs"] == f"{pace.training_flops(config):.2e}"
  # Each token takes 6 FLOPs per parameter, and the attention takes a few more.
  flops_of_parameters = 6 * parameters * tokens
  assert 1 < float(row["FLOPs"]) / flops_of_parameters < 1.2


def test_print_prints_the_commands_that_train(run):
  out, _ = run("ablations", "--print", "--only=diff/seed_3", "--workdir=/runs")

  assert out.endswith(
    "-m diffjax.train --config=experiments/ablations/config.py:diff"
    " --workdir=/runs/ablations/cpu/diff/seed_3"
    " --config.train.seed=3 --config.data.seed=3\n"
  )


def this_machine():
  """Returns the name of this machine, as the results of runs have it."""
  devices = launch.Devices(backend="cpu", kind="cpu", number=1)
  return machine.describe(devices, num_slots=1)


@pytest.fixture
def finished_ablations(tmp_path):
  """Flags for a grid in which four runs of DIFF have finished.

  Two finished on this machine, in 100 and 200 seconds. One finished on another
  machine, and the time of the last one is not known.
  """
  another_machine = machine.describe(
    launch.Devices(backend="cpu", kind="other", number=1), num_slots=1
  )
  runs = grid.expand(
    "ablations",
    grid.Grid(variants=("diff",), baseline="diff", seeds=range(4)),
    {"data.source": "text:x"},
  )

  def finish(run, seconds, machine_name):
    results.write_run(
      tmp_path / "ablations/cpu" / run.name,
      run,
      task={},
      results={"validation/loss": 1.0},
      seconds=seconds,
      machine=machine_name,
    )

  finish(runs[0], 100.0, this_machine())
  finish(runs[1], 200.0, this_machine())
  finish(runs[2], 900.0, another_machine)
  finish(runs[3], None, this_machine())
  return [
    "--set=data.source=text:x",
    f"--workdir={tmp_path}",
    f"--out={tmp_path}/out",
    "--only=diff",
  ]


def test_cost_uses_the_runs_that_finished_on_this_machine(
  run, finished_ablations
):
  """Two runs finished here, in 100 and 200 seconds, and one elsewhere."""
  out, _ = run("ablations", *finished_ablations, "--cost")

  median_seconds = (100 + 200) // 2
  num_seeds = 5
  hours = num_seeds * median_seconds / 3600
  assert out.startswith(f"hours of {this_machine()}, 1 at a time\n")
  row = table_row(out, "diff")
  assert row["seconds a run"] == f"{median_seconds}"
  assert row["hours"] == f"{hours:.3g}"
  # The column "by" tells how the time is estimated.
  assert row["by"] == "2 finished runs"


def test_cost_ignores_runs_of_another_config(
  run, finished_ablations, monkeypatch
):
  """The finished runs have more than 400 steps, so their times do not count.

  The time of a step is measured instead.
  """

  def time_steps(config_by_shape, env):
    """Stands for a measurement: a step of every model takes 0.25 seconds."""
    return dict.fromkeys(config_by_shape, 0.25)

  monkeypatch.setattr(cost, "time_steps", time_steps)

  out, _ = run(
    "ablations", *finished_ablations, "--cost", "--set=train.steps=400"
  )

  seconds_per_run = 400 * 0.25
  num_seeds = 5
  hours = num_seeds * seconds_per_run / 3600
  row = table_row(out, "diff")
  assert row["seconds a run"] == f"{seconds_per_run:.0f}"
  assert row["hours"] == f"{hours:.3g}"
  # The column "by" tells how the time is estimated.
  assert row["by"] == "steps of 0.25 s"


def workdir_name(run, *flags):
  """Returns NAME if flags of `ablations` make it train in runs/NAME/."""
  out, _ = run("ablations", "--print", "--only=diff/seed_0", *flags)
  match = re.search(r"--workdir=\S+/runs/(\S+)/ablations/cpu/diff/seed_0", out)
  return match[1]


def test_a_field_that_does_not_affect_results_keeps_the_workdir(run):
  """The fields of the mesh say how arrays are divided among devices."""
  assert workdir_name(run) == "experiments"
  assert workdir_name(run, "--set=mesh.fsdp=1") == "experiments"


def test_changed_grids_have_workdirs_of_their_own(run):
  """The names of the workdirs end with a hash of the changed fields."""
  fewer_steps = workdir_name(run, "--steps=2")
  fewer_rows = workdir_name(run, "--steps=2", "--set=eval.rows=8")

  assert re.fullmatch(r"experiments_[0-9a-f]{8}", fewer_steps)
  assert re.fullmatch(r"experiments_[0-9a-f]{8}", fewer_rows)
  assert fewer_steps != fewer_rows


def grids_that_train():
  """Returns the experiment and the name of each grid that uses diffjax.train.

  noisy_lookup has a training of its own, and throughput trains nothing.
  """
  names = []
  for name in grid.names():
    if name in ("noisy_lookup", "throughput"):
      continue
    for experiment in grid.experiments_of(name):
      for grid_name in experiment.grids:
        names.append((name, grid_name))
  return names


def configs_to_train(name, grid_name, seed, changes, root):
  """Returns the config of every training of a seed, by workdir.

  Args:
    name: The experiment.
    grid_name: Its grid.
    seed: The seed.
    changes: Config fields that are set in all runs.
    root: The directory of all workdirs.
  """
  experiment = grid.load(name, grid_name)
  configs = {}
  for run in grid.expand(name, experiment.grids[grid_name], changes):
    if run.seed != seed:
      continue
    runs_dir = root / name / grid_name
    fields = {}
    if experiment.prepare:
      fields.update(experiment.prepare(runs_dir, run.config))
    # A run may start from the parameters of a run of ablations.
    if run.pretrained:
      pretrained_dir = str(root / "ablations" / grid_name / run.name)
      configs[pretrained_dir] = run.pretrained.config
      fields["train.init_from"] = pretrained_dir
    if experiment.trains:
      configs[str(runs_dir / run.name)] = grid.with_fields(run, fields).config
  return configs


@pytest.mark.parametrize("name, grid_name", grids_that_train())
def test_printed_commands_have_the_configs_of_the_grid(
  run, tmp_path, name, grid_name
):
  """The flag --print prints the commands that train the runs of a grid."""
  changes = {"train.steps": 6, "optimizer.warmup_steps": 1, "eval.interval": 2}
  # One seed is enough: runs of other seeds differ only in the fields train.seed
  # and data.seed.
  *_, seed = grid.load(name, grid_name).grids[grid_name].seeds
  flags = [
    f"--grid={grid_name}",
    f"--workdir={tmp_path}",
    f"--only=*/seed_{seed}",
  ]
  for field, value in changes.items():
    flags.append(f"--set={field}={value}")

  out, _ = run(name, "--print", *flags)

  expected = configs_to_train(name, grid_name, seed, changes, root=tmp_path)
  assert configs_by_workdir(out) == expected


@pytest.mark.parametrize("name", ["noisy_lookup", "throughput"])
def test_print_is_an_error_without_commands_that_train(run, name):
  _, errors = run(name, "--print", code=1)

  assert errors == (
    f"error: {name} has no commands that train; run it without --print\n"
  )


@pytest.mark.full
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="the TPU compiler, libtpu, is not installed",
)
def test_aot_compiles_each_variant_once(run):
  """The five seeds of a variant have the same program, and one row."""
  out, _ = run(
    "ablations",
    "--aot=v5e:1x1",
    *SMALL_MODEL,
    "--set=model.max_length=64",
    "--set=data.length=64",
    "--only=diff",
  )

  row = table_row(out, "diff")
  # The small model takes less than 1 GiB. A v5e chip has 15.75 GiB.
  assert re.fullmatch(r"0\.\d\d of 15\.75", row["GiB a chip"])
  assert row["fits"] == "yes"
  assert re.fullmatch(r"\d+ s", row["compiled in"])


def test_aot_names_the_variants_that_are_too_large(run, monkeypatch):
  """The flag --aot compiles ahead of time, for a machine that is not here."""
  gib = 2**30
  compiled = []
  too_large = plan.Plan(
    chips=1,
    device_kind="TPU v5 lite",
    mesh={},
    parameters=9 * gib,
    optimizer=9 * gib,
    batch=0,
    temporaries=0,
    program=0,
    available=15 * gib,
    received={},
    unread="",
    kernels=(),
    seconds=1.0,
  )

  def compile_plan(config, topology):
    """Stands for the compiler. Every program needs 9 + 9 of 15 GiB."""
    compiled.append((config.model.attention, topology))
    return too_large

  monkeypatch.setattr(plan, "compile_plan", compile_plan)

  out, errors = run("ablations", "--aot=v5e:1x1", "--only=transformer", code=1)

  assert compiled == [("softmax", "v5e:1x1")]
  assert "| transformer | 18.00 of 15.00 | no |" in out
  assert errors == (
    "error: transformer: too large for v5e:1x1; python -m diffjax.aot says how"
    " to reduce memory\n"
  )


@pytest.mark.full
def test_retrieval_is_trained_measured_and_drawn(run, flags, tmp_path):
  """The models of the experiment learn to find numbers in generated text."""
  run(
    "retrieval",
    *flags,
    "--set=eval.rows=4",
    "--set=train.batch_size=2",
    "--only=diff_without_norm/seed_0",
  )

  stored = json.loads((tmp_path / "out/results.json").read_text())
  # The experiment makes its text, so the source of the data is no setting.
  assert "data.source" not in stored["config"]
  (entry,) = stored["runs"]
  measured = entry["results"]
  # The only evaluation is after the last of two steps.
  (evaluation,) = measured["curve"]
  assert evaluation["step"] == 2
  assert 0 <= measured["accuracy"] <= 1
  # The cells are the lengths and numbers of distractors of the task.
  assert len(measured["grid"]) == len(stored["task"]["cells"])
  check_is_a_plot(tmp_path / "out/plot.png")


@pytest.mark.full
@pytest.mark.parametrize(
  "name, variants, settings",
  [
    ("ablations", ["transformer_norm", "diff_v2_linear"], []),
    ("eight_heads", ["diff"], []),
    ("fairness", ["gated"], []),
    # Four layers would take minutes with the long rows of this experiment.
    ("long_context", ["diff_v2"], ["--set=model.num_layers=1"]),
    ("noisy_lookup", ["diff_lambda_zero"], []),
    ("order_robustness", ["transformer_norm"], []),
    ("outliers", ["diff"], []),
    ("scaling", ["diff,size=0.1m,times=0.5", "diff_v2,size=0.2m"], []),
    ("throughput", ["tiny,length=256"], []),
    ("tokens", ["diff_v2,times=4"], []),
  ],
)
def test_an_experiment_runs_from_its_data_to_its_table(
  run, tmp_path, name, variants, settings
):
  """Two steps of the first seed of each variant are trained and measured.

  Retrieval has a test of its own, and one_gpu has no grid for this machine.
  """
  flags = [
    *settings,
    "--steps=2",
    "--set=eval.rows=4",
    "--set=train.batch_size=2",
    f"--workdir={tmp_path}",
  ]
  first_seed = grid.load(name).grids["cpu"].seeds[0]
  for variant in variants:
    flags.append(f"--only={variant}/seed_{first_seed}")

  out, _ = run(name, *flags)

  # Changed settings have results in the directory of the runs.
  assert f"{tmp_path}/{name}/cpu: results.json, table.md" in out
  assert f"({len(variants)} of " in out
  for variant in variants:
    assert f"| {variant} |" in out
