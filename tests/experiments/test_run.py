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
from tests.experiments.printed import parsed

# Models so small that the start of a command takes most of its time.
SMALL = [
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
def fake_training(run, monkeypatch):
  """Makes trainings take no time. Returns a list of the trained workdirs."""
  trained = []

  def call(launcher, command, env=None, log=None, *, tail=False):
    for argument in command:
      if argument.startswith("--workdir="):
        trained.append(argument.removeprefix("--workdir="))

  def logged(workdir, config, places):
    if str(workdir) in trained:
      return {"validation/loss": 2.0}
    return None

  monkeypatch.setattr(launch.Launcher, "call", call)
  monkeypatch.setattr(training_log, "final_metrics", logged)
  return trained


@pytest.fixture
def finished_run(tmp_path):
  """Writes results of diff/seed_0 in ablations, and returns them."""
  options = study.Options(
    steps=2, only=("diff/seed_0",), workdir=f"{tmp_path}/runs"
  )
  ablations = study.plan("ablations", options)
  (run,) = ablations.chosen
  workdir = ablations.workdir(run)
  losses = {"validation/loss": 1.0}
  results.write_run(workdir, run, {}, losses, 100.0, "a machine")
  return results.read_run(workdir, run, {}, ())


@pytest.fixture
def flags(tmp_path):
  """Flags with the workdir of `finished_run` and a directory of results."""
  return [f"--workdir={tmp_path}/runs", f"--out={tmp_path}/out", "--steps=2"]


def test_a_slice_does_not_collect(run, fake_training, flags, tmp_path):
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


def test_finished_runs_are_not_repeated(
  run, fake_training, finished_run, flags, tmp_path
):
  out, errors = run("ablations", *flags, "--only=diff/seed_[01]")

  assert "1 of 2 runs to do" in errors
  assert "(2 of 65 runs)" in out
  assert fake_training == [f"{tmp_path}/runs/ablations/cpu/diff/seed_1"]


def test_all_output_of_a_run_beside_others_is_in_its_workdir(
  run, fake_training, monkeypatch, flags, tmp_path
):
  """A run of long_context starts from a run of ablations."""
  logs = {}

  def call(launcher, command, env=None, log=None, *, tail=False):
    fake_call(launcher, command, env, log, tail=tail)
    if "experiments.measure" in command:
      workdir = pathlib.Path(command[-2])
      (workdir / "measured.json").write_text("{}")
    # Rows are prepared before the runs, without a log.
    if log is not None:
      logs.setdefault(log, []).append(command[2])

  fake_call = launch.Launcher.call
  monkeypatch.setattr(launch.Launcher, "call", call)

  run(
    "long_context",
    *flags,
    "--only=diff/seed_[012]",
    "--slice=0/2",
    "--side_by_side=2",
  )

  runs_dir = tmp_path / "runs/long_context/cpu/diff"
  commands = ["diffjax.train", "diffjax.train", "experiments.measure"]
  assert logs == {
    runs_dir / "seed_0/output.txt": commands,
    runs_dir / "seed_2/output.txt": commands,
  }


def write_results_json(path, entry):
  """Writes a results.json of ablations with the results of one run."""
  results.write_folder(path, "ablations", "cpu", "transformer", [entry])


def test_a_run_in_results_json_is_finished(
  run, fake_training, finished_run, flags, tmp_path
):
  write_results_json(tmp_path / "out/results.json", finished_run)
  (tmp_path / "runs/ablations/cpu/diff/seed_0/result.json").unlink()

  _, errors = run("ablations", *flags, "--only=diff/seed_0", "--slice=0/2")

  assert "0 of 1 runs to do" in errors
  assert not fake_training


def test_runs_left_are_counted(run, fake_training, flags):
  _, errors = run(
    "ablations",
    *flags,
    "--only=diff/seed_[0123]",
    "--slice=0/2",
    "--side_by_side=2",
  )

  assert "1 run left, about " in errors


def test_a_results_json_of_another_config_is_refused(
  run, fake_training, finished_run, flags, tmp_path
):
  write_results_json(tmp_path / "out/results.json", finished_run)

  _, errors = run("ablations", *flags, "--set=train.batch_size=4", code=1)

  assert len(errors.splitlines()) == 1
  assert "results.json holds results of another config" in errors
  assert "train.batch_size is 16 there and 4 now" in errors


def test_results_that_cannot_be_collected_are_refused_before_training(
  run, fake_training, finished_run, flags
):
  _, errors = run(
    "ablations",
    *flags,
    "--set=train.batch_size=4",
    "--only=transformer/seed_0",
    code=1,
  )

  assert "result.json holds results of another config (diff/seed_0)" in errors
  assert not fake_training


def test_a_workdir_of_another_config_is_refused(run, flags, make_workdir):
  (diff,) = grid.expand("ablations", grid.Grid(("diff",), "diff"), {})
  make_workdir("runs/ablations/cpu/diff/seed_0", diff.config)

  _, errors = run("ablations", *flags, "--only=diff/seed_0", code=1)

  assert "diff/seed_0 holds a run of another config" in errors
  assert "model.num_layers is 2 there and 4 now" in errors


def test_a_notebook_runs_and_collects_a_study(fake_training, tmp_path):
  """These are the calls in the docstring of experiments/study.py."""
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
  assert "| diff | 0.838 M | 1 | 2.0000 |" in text
  assert "(1 of 65 runs)" in text


def test_a_notebook_trains_a_single_run(fake_training, tmp_path):
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


def test_times_of_several_commands_of_a_run_are_added(fake_training, tmp_path):
  results.write(tmp_path / "spent.json", {"seconds": 1e6, "machine": "old"})
  slot = execute.Slot(launch.Launcher(), environment={}, machine="new")

  slot.call(["command"], tmp_path)

  seconds, machine_name = execute.time_spent(tmp_path)
  assert seconds >= 1e6
  assert machine_name == "new"


@pytest.mark.full
def test_variants_and_seeds_train_side_by_side(run, flags, tmp_path):
  run(
    "ablations",
    *flags,
    *text_flags(tmp_path),
    *SMALL,
    "--only=diff/seed_[01]",
    "--only=transformer/seed_0",
    "--side_by_side=2",
  )

  stored = json.loads((tmp_path / "out/results.json").read_text())
  names = [entry["name"] for entry in stored["runs"]]
  assert names == ["transformer/seed_0", "diff/seed_0", "diff/seed_1"]
  assert stored["config"]["train.steps"] == 2
  losses = {entry["results"]["validation/loss"] for entry in stored["runs"]}
  assert len(losses) == 3, "seeds and variants have different losses"
  assert min(losses) > 0
  assert "| diff | " in (tmp_path / "out/table.md").read_text()
  assert (tmp_path / "out/plot.png").stat().st_size > 5000


def start(*args):
  """Starts the command as a user does, in a process of its own."""
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


@pytest.mark.full
def test_a_stopped_run_is_saved_and_resumed(run, tmp_path):
  """SIGTERM saves a checkpoint, and the same command continues the run."""
  flags = [
    *text_flags(tmp_path),
    *SMALL,
    "--set=train.log_interval=1",
    "--set=data.length=64",
    "--steps=600",
    "--only=diff/seed_0",
    f"--workdir={tmp_path}/runs",
    f"--out={tmp_path}/out",
  ]
  workdir = tmp_path / "runs/ablations/cpu/diff/seed_0"

  process = start("ablations", *flags)
  deadline = time.monotonic() + 300
  while len(logged_steps(workdir)) < 5:
    assert time.monotonic() < deadline
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=120)

  assert process.returncode == 130, errors
  assert "SIGTERM: saving" in errors
  assert "0 of 1 runs are done; the same command goes on\n" in errors
  assert "error: interrupted" in errors
  last_step = logged_steps(workdir)[-1]
  assert 5 <= last_step < 600
  assert not (workdir / "result.json").exists()
  assert not list((tmp_path / "out").glob("*"))
  seconds, machine_name = execute.time_spent(workdir)
  assert seconds > 0

  # As if the first start had taken long.
  results.write(
    workdir / "spent.json", {"seconds": 1e6, "machine": machine_name}
  )
  out, errors = run("ablations", *flags)

  assert f"resuming from step {last_step}" in errors
  assert "(1 of 65 runs)" in out
  result = json.loads((workdir / "result.json").read_text())
  assert result["config"]["train"]["steps"] == 600
  assert result["seconds"] > 1e6


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
  _, errors = run(*args, f"--out={tmp_path}", code=code)

  assert errors.startswith(message)
  assert len(errors.splitlines()) == 1


def test_cost_of_a_large_grid_is_in_chip_hours(run):
  out, _ = run("ablations", "--grid=tpu", "--cost")

  assert out.startswith("chip-hours at 40% of the peak\n")
  assert "\n| diff,size=1b | 1 | 1,410 M | 10.5 B | 9.82e+19 |" in out


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
  this_machine = machine.describe(launch.Devices("cpu", "cpu", 1), 1)
  another_machine = machine.describe(launch.Devices("cpu", "other", 1), 1)
  times = [
    (100.0, this_machine),
    (200.0, this_machine),
    (900.0, another_machine),
    (None, this_machine),
  ]
  runs = grid.expand(
    "ablations",
    grid.Grid(("diff",), "diff", range(4)),
    {"data.source": "text:x"},
  )
  for run, (seconds, machine_name) in zip(runs, times, strict=True):
    workdir = tmp_path / "ablations/cpu" / run.name
    losses = {"validation/loss": 1.0}
    results.write_run(workdir, run, {}, losses, seconds, machine_name)
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

  this_machine = machine.describe(launch.Devices("cpu", "cpu", 1), 1)
  assert out.startswith(f"hours of {this_machine}, 1 at a time\n")
  # Five runs of 150 seconds.
  assert "| 150 | 0.208 | 2 finished runs |" in out


def test_cost_ignores_runs_of_another_config(
  run, finished_ablations, monkeypatch
):
  def time_steps(config_by_shape, env):
    return dict.fromkeys(config_by_shape, 0.25)

  monkeypatch.setattr(cost, "time_steps", time_steps)

  out, _ = run(
    "ablations", *finished_ablations, "--cost", "--set=train.steps=400"
  )

  assert "| 100 | 0.139 | steps of 0.25 s |" in out


def workdir_name(run, *flags):
  """Returns the directory below runs/ in which a run is trained."""
  out, _ = run("ablations", "--print", "--only=diff/seed_0", *flags)
  match = re.search(r"--workdir=\S+/runs/(\S+)/ablations/cpu/diff/seed_0", out)
  return match[1]


def test_a_field_that_does_not_affect_results_keeps_the_workdir(run):
  assert workdir_name(run) == "experiments"
  assert workdir_name(run, "--set=mesh.fsdp=1") == "experiments"


def test_changed_grids_have_workdirs_of_their_own(run):
  fewer_steps = workdir_name(run, "--steps=2")
  fewer_rows = workdir_name(run, "--steps=2", "--set=eval.rows=8")

  assert re.fullmatch(r"experiments_[0-9a-f]{8}", fewer_steps)
  assert re.fullmatch(r"experiments_[0-9a-f]{8}", fewer_rows)
  assert fewer_steps != fewer_rows


def every_grid():
  """Returns the experiment and the name of every grid."""
  names = []
  for name in grid.names():
    for experiment in grid.experiments_of(name):
      names += [(name, grid_name) for grid_name in experiment.grids]
  return names


@pytest.mark.parametrize("name, grid_name", every_grid())
def test_printed_commands_have_the_configs_of_the_grid(
  run, tmp_path, name, grid_name
):
  """A run that starts from another one is printed after it."""
  experiment = grid.load(name, grid_name)
  last_seed = experiment.grids[grid_name].seeds[-1]
  changes = {"train.steps": 6, "optimizer.warmup_steps": 1, "eval.interval": 2}
  expected = {}
  for candidate in grid.expand(name, experiment.grids[grid_name], changes):
    if candidate.seed != last_seed:
      continue
    runs_dir = tmp_path / name / grid_name
    fields = {}
    if experiment.prepare:
      fields |= experiment.prepare(runs_dir, candidate.config)
    if candidate.pretrained:
      pretrained_dir = str(tmp_path / "ablations" / grid_name / candidate.name)
      expected[pretrained_dir] = candidate.pretrained.config
      fields["train.init_from"] = pretrained_dir
    if experiment.trains:
      config = grid.with_fields(candidate, fields).config
      expected[str(runs_dir / candidate.name)] = config

  settings = [f"--set={field}={value}" for field, value in changes.items()]
  out, errors = run(
    name,
    f"--grid={grid_name}",
    "--print",
    f"--workdir={tmp_path}",
    f"--only=*/seed_{last_seed}",
    *settings,
    code=0 if expected else 1,
  )

  printed = {}
  for line in out.splitlines():
    workdir, config = parsed(line)
    printed[workdir] = config
  assert printed == expected
  if not expected:
    assert errors.endswith(
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
    *SMALL,
    "--set=model.max_length=64",
    "--set=data.length=64",
    "--only=diff",
  )

  title, head, separator, row = out.splitlines()
  assert re.fullmatch(
    r"\| diff \| 0\.\d\d of 15\.75 \| yes \| \d[\d.e+]+ \| \d+ s \|", row
  )


def test_aot_names_the_variants_that_are_too_large(run, monkeypatch):
  compiled = []

  def compile_plan(config, topology):
    compiled.append((config.model.attention, topology))
    return plan.Plan(
      1,
      "TPU v5 lite",
      {},
      9 << 30,
      9 << 30,
      0,
      0,
      0,
      round(15.75 * 2**30),
      {},
      "",
      (),
      1.0,
    )

  monkeypatch.setattr(plan, "compile_plan", compile_plan)

  out, errors = run("ablations", "--aot=v5e:1x1", "--only=transformer", code=1)

  assert compiled == [("softmax", "v5e:1x1")]
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
  assert len(entry["results"]["grid"]) == len(stored["task"]["cells"])
  assert [row["step"] for row in entry["results"]["curve"]] == [2]
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

  The tests of retrieval and of the printed commands check the experiments that
  are missing here.
  """
  flags = [*settings]
  if name == "ablations":
    flags += text_flags(tmp_path)
  seed = grid.load(name).grids["cpu"].seeds[0]
  for variant in variants:
    flags.append(f"--only={variant}/seed_{seed}")

  out, _ = run(
    name,
    *flags,
    "--steps=2",
    "--set=eval.rows=4",
    "--set=train.batch_size=2",
    f"--workdir={tmp_path}",
  )

  assert f"{tmp_path}/{name}/cpu: results.json, table.md" in out
  assert f"({len(variants)} of " in out
  for variant in variants:
    assert f"| {variant} |" in out
