"""python -m experiments.run: what it trains, collects, prints and refuses."""

import importlib.util
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from diffjax.compiled import plan
from experiments import (
  collect,
  cost,
  execute,
  grid,
  launch,
  machine,
  results,
  study,
  training_log,
)
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
  """Makes trainings take no time. Returns the workdirs that were trained."""
  trained = []

  def call(launcher, command, env=None, log=None, *, tail=False):
    for argument in command:
      if argument.startswith("--workdir="):
        trained.append(argument.removeprefix("--workdir="))

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


# Here, trainings take no time.
@pytest.mark.usefixtures("trained_workdirs")
def test_runs_side_by_side_write_their_output_to_their_workdirs(
  run, monkeypatch, flags, tmp_path
):
  """A run of long_context trains a run of ablations and its extension."""
  modules_by_log = {}
  call_without_program = launch.Launcher.call

  def call(launcher, command, env=None, log=None, *, tail=False):
    """Records a command, which takes no time."""
    call_without_program(launcher, command, env, log, tail=tail)
    python, dash_m, module, *_ = command
    if module == "experiments.measure":
      workdir = pathlib.Path(command[-2])
      (workdir / "measured.json").write_text("{}")
    # Rows are prepared before the runs, without a log.
    if log is not None:
      modules_by_log.setdefault(log, []).append(module)

  monkeypatch.setattr(launch.Launcher, "call", call)

  # The first and the third of three runs. A slice collects no results.
  run(
    "long_context",
    *flags,
    "--only=diff/seed_[012]",
    "--slice=0/2",
    "--side_by_side=2",
  )

  runs_dir = tmp_path / "runs/long_context/cpu/diff"
  # A run is trained, then its extension, which is measured at the end.
  modules = ["diffjax.train", "diffjax.train", "experiments.measure"]
  assert modules_by_log == {
    runs_dir / "seed_0/output.txt": modules,
    runs_dir / "seed_2/output.txt": modules,
  }


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
  (diff,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  # The checkpoint has two layers, and the models of the grid have four.
  make_workdir("runs/ablations/cpu/diff/seed_0", diff.config)

  _, errors = run("ablations", *flags, "--only=diff/seed_0", code=1)

  assert "diff/seed_0 holds a run of another config" in errors
  assert "model.num_layers is 2 there and 4 now" in errors


# Here, trainings take no time, and end with a loss of 2.
@pytest.mark.usefixtures("trained_workdirs")
def test_a_notebook_runs_and_collects_a_study(tmp_path):
  """The test makes the calls in the docstring of experiments/study.py."""
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
  # The cells are the variant, the parameters, the seeds and the loss.
  assert "| diff | 0.838 M | 1 | 2.0000 |" in text
  assert "(1 of 65 runs)" in text


# Here, trainings take no time, and end with a loss of 2.
@pytest.mark.usefixtures("trained_workdirs")
def test_a_notebook_trains_a_single_run(tmp_path):
  """A slot is a share of this machine's devices for one run at a time."""
  options = study.Options(
    steps=20, only=("diff/seed_0",), workdir=f"{tmp_path}/runs"
  )
  ablations = study.plan("ablations", options)
  (training,) = study.trainings(ablations, ablations.chosen[0])

  with launch.Launcher() as launcher:
    (slot,) = execute.make_slots(ablations, launcher)
    logged = execute.train(training, ablations.places, slot)

  assert logged == {"validation/loss": 2.0}
  seconds, machine_name = execute.time_spent(training.workdir)
  assert seconds >= 0
  assert machine_name == slot.machine


# The launcher is replaced: it starts no program.
@pytest.mark.usefixtures("trained_workdirs")
def test_the_time_of_a_command_is_added_to_that_of_earlier_commands(tmp_path):
  """A run that was stopped continues in the same workdir."""
  # spent.json has the time of the commands that the run has had so far.
  earlier = {"seconds": 1e6, "machine": "old"}
  results.write(tmp_path / "spent.json", earlier)
  slot = execute.Slot(launch.Launcher(), environment={}, machine="new")

  slot.call(["a command"], workdir=tmp_path)

  seconds, machine_name = execute.time_spent(tmp_path)
  # The new command has taken less than a second.
  assert seconds >= 1e6
  assert machine_name == "new"


@pytest.mark.full
def test_variants_and_seeds_train_side_by_side(run, flags, tmp_path):
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
  names = [entry["name"] for entry in stored["runs"]]
  assert names == ["transformer/seed_0", "diff/seed_0", "diff/seed_1"]
  assert stored["config"]["train.steps"] == 2
  losses = {entry["results"]["validation/loss"] for entry in stored["runs"]}
  # All three losses are different.
  assert len(losses) == 3
  assert min(losses) > 0
  assert "| diff | " in (tmp_path / "out/table.md").read_text()
  assert (tmp_path / "out/plot.png").stat().st_size > 5000


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


def stop_at_step_5(workdir, flags):
  """Sends SIGTERM to experiments.run at step 5 of a run of ablations.

  Args:
    workdir: The workdir of the run.
    flags: The flags of experiments.run.

  Returns:
    The exit status, and the text of the standard error.
  """
  process = start("ablations", *flags)
  wait_for_step(workdir, 5, process)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=120)
  return process.returncode, errors


@pytest.mark.full
def test_a_run_that_sigterm_stopped_is_resumed(run, tmp_path):
  """A run of 600 steps is stopped at step 5, and the command is repeated."""
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
  workdir = tmp_path / "runs/ablations/cpu/diff/seed_0"

  exit_status, errors = stop_at_step_5(workdir, flags)

  # The status of a command that was interrupted.
  assert exit_status == 130, errors
  assert "SIGTERM: saving" in errors
  assert "0 of 1 runs are done; the same command goes on\n" in errors
  assert "error: interrupted" in errors
  last_step = logged_steps(workdir)[-1]
  assert 5 <= last_step < 600
  # There are no results yet.
  assert not (workdir / "result.json").exists()
  assert not list((tmp_path / "out").glob("*"))
  seconds, machine_name = execute.time_spent(workdir)
  assert seconds > 0

  # The time of the stopped process counts. Here it is made longer than that of
  # any other process.
  stopped_seconds = 1e6
  results.write(
    workdir / "spent.json",
    {"seconds": stopped_seconds, "machine": machine_name},
  )
  out, errors = run("ablations", *flags)

  assert f"resuming from step {last_step}" in errors
  assert "(1 of 65 runs)" in out
  result = json.loads((workdir / "result.json").read_text())
  assert result["config"]["train"]["steps"] == 600
  assert result["seconds"] > stopped_seconds


NAMES = ", ".join(grid.names())


@pytest.mark.parametrize(
  "args, code, message",
  [
    pytest.param(
      [],
      2,
      "error: name an experiment: python -m experiments.run NAME; there are"
      f" {NAMES}",
      id="no experiment",
    ),
    pytest.param(
      ["nothing"],
      1,
      f"error: there is no experiment 'nothing'; there are {NAMES}",
      id="unknown experiment",
    ),
    pytest.param(
      ["--only=diff", "banana"],
      1,
      "error: there is no experiment 'banana'",
      id="unknown experiment after a flag",
    ),
    pytest.param(
      ["ablations", "banana"],
      2,
      "error: unexpected argument 'banana'",
      id="two experiments",
    ),
    pytest.param(
      ["ablations", "--grid=moon"],
      1,
      "error: --grid=moon: ablations has no such grid; there are cpu, gpu, tpu",
      id="unknown grid",
    ),
    pytest.param(
      ["ablations", "--only=banana"],
      1,
      "error: --only=banana matches no run",
      id="unknown run",
    ),
    pytest.param(
      ["ablations", "--slice=2/2"],
      1,
      "error: --slice=2/2: must be INDEX/COUNT",
      id="malformed slice",
    ),
    pytest.param(
      ["ablations", "--steps=0"], 2, "error: flag --steps=0", id="no steps"
    ),
    pytest.param(
      ["ablations", "--set=train.step=3"],
      1,
      "error: config.train.step is not a config field: did you mean"
      " train.steps?",
      id="unknown field",
    ),
    pytest.param(
      ["ablations", "--set=dif:eval.rows=4"],
      1,
      "error: --set=dif:eval.rows: the grid has no variant 'dif'; there are"
      " transformer",
      id="unknown variant",
    ),
    pytest.param(
      ["ablations", "--set=train"],
      1,
      "error: --set=train: must be FIELD=VALUE",
      id="malformed setting",
    ),
    pytest.param(
      ["ablations", "--set=data.seed=7"],
      1,
      "error: --set=data.seed: seeds are the grid's, 0, 1, 2, 3, 4;"
      " --only='*/seed_0' chooses one",
      id="seed",
    ),
    pytest.param(
      ["ablations", "--workdir=gs://bucket/runs"],
      1,
      "error: --workdir=gs://bucket/runs: must be a local directory",
      id="remote directory",
    ),
    pytest.param(
      ["ablations", "--grid=gpu", "--workdir=/proc/nowhere"],
      1,
      "error: cannot write in /proc/nowhere/ablations/gpu: No such",
      id="directory that cannot be written",
    ),
    pytest.param(
      ["throughput", "--grid=gpu", "--cost"],
      1,
      "error: throughput trains nothing",
      id="cost of large runs that train nothing",
    ),
    pytest.param(
      ["noisy_lookup", "--aot=v5e:1x1"],
      1,
      "error: noisy_lookup takes no step of diffjax.train, so there is nothing"
      " to compile",
      id="nothing to compile",
    ),
    pytest.param(
      ["ablations", "--aot=v5e:3x3"],
      1,
      "error: transformer: --topology=v5e:3x3: there is no such slice",
      id="unknown topology",
    ),
  ],
)
def test_a_mistake_is_reported_in_one_line(run, tmp_path, args, code, message):
  """The exit status is 2 for wrong usage, and 1 for other errors."""
  _, errors = run(*args, f"--out={tmp_path}", code=code)

  assert errors.startswith(message)
  assert len(errors.splitlines()) == 1


def table_row(text, name):
  """Returns the cells of the row of a table that begins with a name."""
  for line in text.splitlines():
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    if cells and cells[0] == name:
      return cells
  raise AssertionError(f"no row {name}")


def test_cost_of_a_large_grid_is_in_chip_hours(run):
  out, _ = run("ablations", "--grid=tpu", "--cost")

  assert out.startswith("chip-hours at 40% of the peak\n")
  _, seeds, parameters, tokens, flops, *_ = table_row(out, "diff,size=1b")
  assert seeds == "1"
  assert parameters == "1,410 M"
  # 40,000 steps of 128 rows of 2,048 tokens.
  assert tokens == "10.5 B"
  # Each token takes about 6 FLOPs per parameter, and those of attention.
  assert flops == "9.82e+19"


def test_print_prints_the_commands_that_train(run):
  out, _ = run("ablations", "--print", "--only=diff/seed_3", "--workdir=/runs")

  assert out.endswith(
    "-m diffjax.train --config=experiments/ablations/config.py:diff"
    " --workdir=/runs/ablations/cpu/diff/seed_3"
    " --config.train.seed=3 --config.data.seed=3\n"
  )


@pytest.fixture
def finished_ablations(tmp_path):
  """Flags for a grid in which four runs of DIFF have finished.

  Two finished on this machine, in 100 and 200 seconds. One finished on another
  machine, and the time of the last one is not known.
  """
  this_machine = machine.describe(
    launch.Devices(backend="cpu", kind="cpu", number=1), num_slots=1
  )
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

  finish(runs[0], 100.0, this_machine)
  finish(runs[1], 200.0, this_machine)
  finish(runs[2], 900.0, another_machine)
  finish(runs[3], None, this_machine)
  return [
    "--set=data.source=text:x",
    f"--workdir={tmp_path}",
    f"--out={tmp_path}/out",
    "--only=diff",
  ]


def test_cost_uses_the_runs_that_finished_on_this_machine(
  run, finished_ablations
):
  out, _ = run("ablations", *finished_ablations, "--cost")

  this_machine = machine.describe(
    launch.Devices(backend="cpu", kind="cpu", number=1), num_slots=1
  )
  assert out.startswith(f"hours of {this_machine}, 1 at a time\n")
  seconds, hours, basis = table_row(out, "diff")[-3:]
  # The median of 100 and 200 seconds, for each of five seeds.
  assert seconds == "150"
  assert hours == f"{5 * 150 / 3600:.3g}"
  assert basis == "2 finished runs"


def test_cost_ignores_runs_of_another_config(
  run, finished_ablations, monkeypatch
):
  """The finished runs have another number of steps."""

  def time_steps(config_by_shape, env):
    """Stands for a measurement: a step of every model takes 0.25 seconds."""
    return dict.fromkeys(config_by_shape, 0.25)

  monkeypatch.setattr(cost, "time_steps", time_steps)

  out, _ = run(
    "ablations", *finished_ablations, "--cost", "--set=train.steps=400"
  )

  seconds, hours, basis = table_row(out, "diff")[-3:]
  # 400 steps of 0.25 seconds, for each of five seeds.
  assert seconds == "100"
  assert hours == f"{5 * 100 / 3600:.3g}"
  assert basis == "steps of 0.25 s"


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
  # One seed is enough, since seeds differ in two fields only.
  seed = grid.load(name, grid_name).grids[grid_name].seeds[-1]
  changes = {"train.steps": 6, "optimizer.warmup_steps": 1, "eval.interval": 2}
  expected = configs_to_train(name, grid_name, seed, changes, root=tmp_path)

  out, _ = run(
    name,
    f"--grid={grid_name}",
    "--print",
    f"--workdir={tmp_path}",
    f"--only=*/seed_{seed}",
    "--set=train.steps=6",
    "--set=optimizer.warmup_steps=1",
    "--set=eval.interval=2",
  )

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
  """The seeds of a variant have the same program."""
  out, _ = run(
    "ablations",
    "--aot=v5e:1x1",
    *SMALL_MODEL,
    "--set=model.max_length=64",
    "--set=data.length=64",
    "--only=diff",
  )

  # Three lines come before the rows of the table.
  _, _, _, *rows = out.splitlines()
  assert len(rows) == 1
  _, memory, fits, _, seconds = table_row(out, "diff")
  # A v5e chip has 15.75 GiB.
  assert re.fullmatch(r"0\.\d\d of 15\.75", memory)
  assert fits == "yes"
  assert re.fullmatch(r"\d+ s", seconds)


def test_aot_names_the_variants_that_are_too_large(run, monkeypatch):
  compiled = []

  def compile_plan(config, topology):
    """Stands for the compiler: every program needs 18 GiB of 15.75 GiB."""
    compiled.append((config.model.attention, topology))
    gib = 2**30
    return plan.Plan(
      chips=1,
      device_kind="TPU v5 lite",
      mesh={},
      parameters=9 * gib,
      optimizer=9 * gib,
      batch=0,
      temporaries=0,
      program=0,
      available=round(15.75 * gib),
      received={},
      unread="",
      kernels=(),
      seconds=1.0,
    )

  monkeypatch.setattr(plan, "compile_plan", compile_plan)

  out, errors = run("ablations", "--aot=v5e:1x1", "--only=transformer", code=1)

  assert compiled == [("softmax", "v5e:1x1")]
  # The parameters and the state of the optimizer take 9 GiB each.
  assert "| transformer | 18.00 of 15.75 | no |" in out
  assert errors == (
    "error: transformer: too large for v5e:1x1; python -m diffjax.aot says how"
    " to reduce memory\n"
  )


@pytest.mark.full
def test_retrieval_is_trained_measured_and_drawn(run, tmp_path):
  flags = [
    "--steps=2",
    "--set=eval.rows=4",
    "--set=train.batch_size=2",
    "--only=diff_without_norm/seed_0",
    f"--workdir={tmp_path}/runs",
    f"--out={tmp_path}/out",
  ]
  out, _ = run("retrieval", *flags)

  assert "(1 of 30 runs)" in out
  stored = json.loads((tmp_path / "out/results.json").read_text())
  assert stored["task"]["samples"] == 200
  assert "data.source" not in stored["config"]
  (entry,) = stored["runs"]
  # The accuracy is measured for every length and number of distractors.
  assert len(entry["results"]["grid"]) == len(stored["task"]["cells"])
  (last_evaluation,) = entry["results"]["curve"]
  assert last_evaluation["step"] == 2
  assert 0 <= entry["results"]["accuracy"] <= 1
  assert (tmp_path / "out/plot.png").stat().st_size > 5000


@pytest.mark.full
@pytest.mark.parametrize(
  "name, variants, settings",
  [
    pytest.param(
      "ablations",
      ["transformer_norm", "diff_v2_linear"],
      ["--set=data.validation_fraction=0.3"],
      id="ablations",
    ),
    pytest.param("eight_heads", ["diff"], [], id="eight_heads"),
    pytest.param("fairness", ["gated"], [], id="fairness"),
    pytest.param(
      "long_context",
      ["diff_v2"],
      ["--set=model.num_layers=1"],
      id="long_context",
    ),
    pytest.param("noisy_lookup", ["diff_lambda_zero"], [], id="noisy_lookup"),
    pytest.param(
      "order_robustness", ["transformer_norm"], [], id="order_robustness"
    ),
    pytest.param("outliers", ["diff"], [], id="outliers"),
    pytest.param(
      "scaling",
      ["diff,size=0.1m,times=0.5", "diff_v2,size=0.2m"],
      [],
      id="scaling",
    ),
    pytest.param("throughput", ["tiny,length=256"], [], id="throughput"),
    pytest.param("tokens", ["diff_v2,times=4"], [], id="tokens"),
  ],
)
def test_an_experiment_runs_from_its_data_to_its_table(
  run, tmp_path, name, variants, settings
):
  """The models have the sizes of the grid, except for one with long rows.

  Retrieval has a test of its own, and one_gpu has no grid for this machine.
  """
  flags = [
    *settings,
    "--steps=2",
    "--set=eval.rows=4",
    "--set=train.batch_size=2",
    f"--workdir={tmp_path}",
  ]
  if name == "ablations":
    flags += text_flags(tmp_path)
  first_seed = grid.load(name).grids["cpu"].seeds[0]
  for variant in variants:
    flags.append(f"--only={variant}/seed_{first_seed}")

  out, _ = run(name, *flags)

  # Changed settings have results in the directory of the runs.
  assert f"{tmp_path}/{name}/cpu: results.json, table.md" in out
  assert f"({len(variants)} of " in out
  for variant in variants:
    assert f"| {variant} |" in out
