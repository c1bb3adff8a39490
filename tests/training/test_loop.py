"""The files of a run, and that a stop and a restart do not change them.

Most tests train the model of the fixture `config` for six steps. The fixture
`finished_run` is such a run without a stop, with which other runs are compared.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffjax import config as configuration
from diffjax.cli import config_file
from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  UserError,
)
from diffjax.data import (
  prepared_batches,
  reader,
  streamed_batches,
  tokenizer,
  tokenizer_json,
)
from diffjax.host.lock import LostWorkdir
from diffjax.inference import finish
from diffjax.parallel.mesh import make_mesh
from diffjax.training import loop, manifest, memory, session
from diffjax.training.checkpoint import open_checkpoint
from diffjax.training.program import build
from tests.harness.hub_server import HubServer
from tests.harness.tiers import full

# Logged fields that differ between equal runs, because they measure time.
TIMES = {
  "time",
  "train/tokens_per_second",
  "train/step_seconds",
  "train/wait_fraction",
  "train/mfu",
}


def write_documents(directory: pathlib.Path) -> None:
  """Writes the 60 documents on which the tests train."""
  for index in range(60):
    lines = []
    for line in range(20):
      lines.append(f"document {index}, line {line}: {line * index % 97}\n")
    (directory / f"{index}.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """Six steps of a model of one layer, with evaluations and checkpoints."""
  directory = tmp_path_factory.mktemp("text")
  write_documents(directory)
  return Config(
    model=ModelConfig(
      num_layers=1,
      embed_dim=16,
      num_heads=1,
      num_kv_heads=1,
      head_dim=8,
      ffn_dim=32,
      max_length=64,
    ),
    data=DataConfig(
      source=f"text:{directory}/*.txt",
      validation_fraction=0.2,
      length=32,
      prepared_dir=str(directory / "rows"),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    train=TrainConfig(
      steps=6,
      batch_size=8,
      log_interval=1,
      checkpoint_interval=2,
      sample_tokens=0,
    ),
    eval=EvalConfig(interval=3, rows=8),
    mesh=MeshConfig(),
  )


def change(config: Config, **fields: Any) -> Config:
  """Returns a config with other values: change(config, train__steps=3)."""
  for field, value in fields.items():
    section_name, name = field.split("__")
    section = getattr(config, section_name)
    section = dataclasses.replace(section, **{name: value})
    config = dataclasses.replace(config, **{section_name: section})
  return config


def make_mesh_of_two(mesh_config: MeshConfig) -> jax.sharding.Mesh:
  """Returns a mesh of two of the tests' eight devices."""
  return make_mesh(mesh_config, jax.devices()[:2])


@pytest.fixture(autouse=True, scope="module")
def shared_programs():
  """Runs of equal models share a program, so that it is traced only once.

  Runs use two devices, because programs for eight take longer to compile.
  Returns the programs. A test that clears them makes the next run trace.
  """
  programs = {}

  def build_once(config, mesh):
    train = config.train
    key = (
      config.model,
      config.optimizer,
      config.data.length,
      train.steps,
      train.batch_size,
      mesh,
    )
    if key not in programs:
      programs[key] = build(config, mesh)
    return programs[key]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(session, "build", build_once)
    patch.setattr(session, "make_mesh", make_mesh_of_two)
    yield programs


def train_and_finish(config: Config, workdir: pathlib.Path) -> None:
  """Trains and writes the plot and the sample, as the command does."""
  finish.finish(loop.train(config, str(workdir)))


def read_log(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the entries of a run's log, without times."""
  entries = []
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    entry = json.loads(line)
    for name in TIMES & entry.keys():
      del entry[name]
    entries.append(entry)
  return entries


def training_entries(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the log entries of training steps."""
  return [entry for entry in read_log(workdir) if "train/loss" in entry]


def evaluation_entries(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the log entries of evaluations."""
  return [entry for entry in read_log(workdir) if "validation/loss" in entry]


def logged_lines(workdir: pathlib.Path) -> list[str]:
  """Returns the lines of the log of a run, which may still be starting."""
  log = workdir / "metrics.jsonl"
  if not log.exists():
    return []
  return log.read_text().splitlines()


def logged_step_seconds(workdir: pathlib.Path) -> dict[int, float]:
  """Returns the logged seconds of each step."""
  seconds_by_step = {}
  for line in logged_lines(workdir):
    entry = json.loads(line)
    if "train/step_seconds" in entry:
      seconds_by_step[entry["step"]] = entry["train/step_seconds"]
  return seconds_by_step


def steps_of(entries: list[dict[str, Any]]) -> list[int]:
  """Returns the steps of log entries."""
  return [entry["step"] for entry in entries]


def saved_steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints."""
  return manifest.steps(manifest.checkpoint_directory(workdir))


def saved_scores(workdir: pathlib.Path, step: int) -> dict[str, float | None]:
  """Returns the validation losses in a checkpoint's manifest."""
  checkpoint = manifest.checkpoint_directory(workdir) / str(step)
  return manifest.read(checkpoint, step)["metrics"]


def file_contents(workdir: pathlib.Path) -> dict[str, bytes]:
  """Returns the bytes of every file of a workdir, except for its lock."""
  contents = {}
  for path in sorted(workdir.rglob("*")):
    if path.is_file() and path.name != "lock":
      contents[str(path.relative_to(workdir))] = path.read_bytes()
  return contents


def send_sigterm() -> None:
  """Sends SIGTERM to this process."""
  os.kill(os.getpid(), signal.SIGTERM)


def raise_damaged_row() -> None:
  raise UserError("row 7 is damaged")


def call_before_batch(
  patch: pytest.MonkeyPatch, number: int, action: Callable[[], None]
) -> None:
  """Calls a function before the loop gets its batch of that number.

  Args:
    patch: patches the session.
    number: the number of the batch. The first one is 1.
    action: the function. The loop gets its errors.
  """
  original = session.Session.next_batch
  numbers = itertools.count(1)

  def next_batch(self):
    if next(numbers) == number:
      action()
    return original(self)

  patch.setattr(session.Session, "next_batch", next_batch)


class FinishedRun(NamedTuple):
  """A run of six steps without a stop.

  Attributes:
    workdir: its workdir.
    output: its standard output.
    errors: its standard error, with the progress.
    step_times: when each step began and ended, in seconds, by its number.
  """

  workdir: pathlib.Path
  output: str
  errors: str
  step_times: dict[int, tuple[float, float]]


@pytest.fixture(scope="module")
def finished_run(config, shared_programs, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("finished")
  original = session.Session.train_step
  step_times = {}
  step_numbers = itertools.count(1)

  def train_step(self, state, host_batch):
    # Waits for the step, as the command does on CPU.
    begin = time.perf_counter()
    time.sleep(0.02)
    result = jax.block_until_ready(original(self, state, host_batch))
    step_times[next(step_numbers)] = (begin, time.perf_counter())
    return result

  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(io.StringIO()) as output,
    contextlib.redirect_stderr(io.StringIO()) as errors,
  ):
    patch.setattr(session.Session, "train_step", train_step)
    # The attention is chosen and printed while a program is traced.
    shared_programs.clear()
    train_and_finish(change(config, train__sample_tokens=5), workdir)
  return FinishedRun(workdir, output.getvalue(), errors.getvalue(), step_times)


@pytest.fixture(scope="module")
def finished(finished_run):
  """The workdir of a run without a stop."""
  return finished_run.workdir


# The files and lines of a finished run.


def test_each_step_is_logged(finished):
  """The run takes six steps, and its log_interval is 1."""
  entries = training_entries(finished)

  assert steps_of(entries) == [1, 2, 3, 4, 5, 6]
  expected_fields = {
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "lambda/layer_00",
  }
  assert expected_fields <= entries[0].keys()


def test_the_validation_losses_are_logged_and_fall(finished):
  """The run takes six steps, with an evaluation after each third one."""
  first, last = evaluation_entries(finished)

  assert (first["step"], last["step"]) == (3, 6)
  expected_fields = {
    "validation/perplexity",
    "validation/bits_per_byte",
    "validation/ar_hit",
    "validation/others",
  }
  assert expected_fields <= first.keys()
  # An untrained model of bytes has a loss of about ln(256) = 5.5.
  assert last["validation/loss"] < first["validation/loss"] < 6


def test_the_last_checkpoint_has_the_validation_losses(finished):
  """The best checkpoint of a run is chosen by these losses."""
  last_evaluation = evaluation_entries(finished)[-1]
  losses = {}
  for name, value in last_evaluation.items():
    if name.startswith("validation/"):
      losses[name] = value

  assert last_evaluation["step"] == 6
  assert saved_scores(finished, step=6) == losses


def test_the_workdir_has_the_config(config, finished):
  fields = config_file.read(f"{finished}/config.toml")

  stored_config = configuration.from_config_dict(fields)
  assert stored_config == change(config, train__sample_tokens=5)


def test_the_workdir_has_a_plot_a_sample_and_a_tensorboard_log(finished):
  assert (finished / "loss.png").stat().st_size > 1000
  assert (finished / "sample.txt").read_text().startswith("def ")
  assert list((finished / "tensorboard").iterdir())


def test_each_evaluation_is_printed_once(finished_run):
  """The first one in a line, and the last one as a table."""
  first, _ = evaluation_entries(finished_run.workdir)

  output = finished_run.output.splitlines()
  first_line, last_line = [line for line in output if "validation" in line]
  loss = first["validation/loss"]
  bits = first["validation/bits_per_byte"]
  assert first_line == (
    f"step 3/6  validation on 8 rows: loss {loss:.4f}, {bits:.4f} bits per byte"
  )
  assert last_line == "step 6/6  validation on 8 rows:"


def test_the_last_evaluation_is_printed_with_explanations(finished_run):
  """A line for each metric has its name, its value and a few words."""
  last = evaluation_entries(finished_run.workdir)[-1]
  lines = finished_run.output.splitlines()

  for name in ("loss", "perplexity", "bits_per_byte", "ar_hit", "others"):
    [line] = [line for line in lines if line.startswith(f"  {name} ")]
    _, printed_value, explanation = line.split(maxsplit=2)
    value = last[f"validation/{name}"]
    assert printed_value == f"{value:.4f}"
    assert explanation
    assert len(line) <= 80


def test_the_logged_seconds_of_a_step_include_its_program(finished_run):
  """The fixture has measured when the program of each step began and ended."""
  logged_seconds = logged_step_seconds(finished_run.workdir)

  # The first step compiles, so its time is not logged.
  assert list(logged_seconds) == [2, 3, 4, 5, 6]
  for step, seconds in logged_seconds.items():
    begin, end = finished_run.step_times[step]
    assert seconds >= end - begin


def test_the_logged_seconds_of_steps_do_not_overlap(finished_run):
  """Their sum is at most the time between the ends of steps 1 and 6."""
  logged_seconds = logged_step_seconds(finished_run.workdir)

  _, end_of_step_1 = finished_run.step_times[1]
  _, end_of_step_6 = finished_run.step_times[6]
  seconds_of_steps_2_to_6 = end_of_step_6 - end_of_step_1
  # The run reads the clock a little later than the fixture.
  assert sum(logged_seconds.values()) <= seconds_of_steps_2_to_6 + 0.01


def test_the_log_begins_with_the_first_step(config, finished, tmp_path):
  """A plot of the loss then begins where training begins.

  Only each fourth of the six steps is logged, besides the first and the last.
  """
  seldom_logged = change(config, train__log_interval=4, eval__interval=0)

  loop.train(seldom_logged, str(tmp_path))

  entries = training_entries(tmp_path)
  assert steps_of(entries) == [1, 4, 6]
  first_entry = training_entries(finished)[0]
  assert entries[0]["train/loss"] == first_entry["train/loss"]


def steps_in_profile(workdir: pathlib.Path) -> list[int]:
  """Returns the numbers of the training steps in the profile of a run."""
  [path] = (workdir / "profile").rglob("*.xplane.pb")
  steps = []
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        if event.name == "train":
          steps.append(dict(event.stats)["step_num"])
  return sorted(steps)


@pytest.mark.full
def test_a_profile_names_its_steps_by_their_numbers_in_the_log(
  config, tmp_path
):
  """The profile begins after step 1, and has two steps."""
  profiled = change(
    config,
    train__profile_step=1,
    train__profile_steps=2,
    eval__interval=0,
  )

  loop.train(profiled, str(tmp_path))

  assert steps_in_profile(tmp_path) == [2, 3]


# A stop, and a restart.


def test_a_resumed_run_has_the_log_of_an_uninterrupted_one(
  config, finished, tmp_path, monkeypatch
):
  """SIGTERM saves and ends the run, and the same call then resumes it."""
  with monkeypatch.context() as patch:
    call_before_batch(patch, number=4, action=send_sigterm)
    loop.train(config, str(tmp_path))
  # The signal arrives before step 4, and the run saves its last step.
  assert 3 <= max(saved_steps(tmp_path)) < 6

  loop.train(config, str(tmp_path))

  assert read_log(tmp_path) == read_log(finished)


def test_a_resume_writes_the_changed_config(config, finished, tmp_path):
  """The file config.toml in the workdir has the config of the last session."""
  workdir = shutil.copytree(finished, tmp_path / "run")
  changed = change(config, train__keep_checkpoints=2)

  loop.train(changed, str(workdir))

  fields = config_file.read(f"{workdir}/config.toml")
  assert configuration.from_config_dict(fields) == changed


@pytest.mark.full
def test_a_finished_run_can_be_prolonged(config, tmp_path):
  short = change(config, train__steps=3)
  loop.train(short, str(tmp_path))
  # This run has nothing left to do.
  loop.train(short, str(tmp_path))
  assert steps_of(training_entries(tmp_path)) == [1, 2, 3]

  loop.train(config, str(tmp_path))

  assert steps_of(training_entries(tmp_path)) == [1, 2, 3, 4, 5, 6]


def null_to_nan(entry: dict[str, Any]) -> dict[str, Any]:
  """Returns a log entry with its NaN, which JSON stores as null."""
  return {key: np.nan if x is None else x for key, x in entry.items()}


@pytest.fixture(scope="module")
def two_heads(config):
  return change(config, model__num_heads=2, model__num_kv_heads=2)


@pytest.fixture(scope="module")
def run_on_eight_devices(two_heads, tmp_path_factory):
  """The workdir of a run whose batches all of the tests' devices share."""
  workdir = tmp_path_factory.mktemp("eight")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(session, "make_mesh", make_mesh)
    loop.train(two_heads, str(workdir))
  return workdir


@pytest.mark.full
@pytest.mark.parametrize(
  ("num_devices", "axes"),
  [
    pytest.param(1, {}, id="one device"),
    pytest.param(2, {"context": 2}, id="context"),
    pytest.param(4, {"data": 2, "fsdp": 2}, id="data and fsdp"),
    pytest.param(4, {"fsdp": 2, "tensor": 2}, id="fsdp and tensor"),
  ],
)
def test_a_resume_on_another_mesh_has_the_same_batches_and_losses(
  two_heads, run_on_eight_devices, tmp_path, monkeypatch, num_devices, axes
):
  """Eight devices take six steps. Fewer devices then repeat the last four."""
  workdir = shutil.copytree(run_on_eight_devices, tmp_path / "run")
  # Without these checkpoints, the run is resumed from step 2.
  shutil.rmtree(workdir / "checkpoints/4")
  shutil.rmtree(workdir / "checkpoints/6")
  config = dataclasses.replace(two_heads, mesh=MeshConfig(**axes))

  def make_small_mesh(mesh_config):
    return make_mesh(mesh_config, jax.devices()[:num_devices])

  monkeypatch.setattr(session, "make_mesh", make_small_mesh)
  loop.train(config, str(workdir))

  entries = read_log(workdir)
  expected_entries = read_log(run_on_eight_devices)
  # Other batches would have other numbers of tokens.
  tokens = [entry.get("train/tokens") for entry in entries]
  expected_tokens = [entry.get("train/tokens") for entry in expected_entries]
  assert tokens == expected_tokens
  for entry, expected in zip(entries, expected_entries, strict=True):
    # Sums in float32 have another order on other devices.
    assert null_to_nan(entry) == pytest.approx(
      null_to_nan(expected), rel=2e-4, nan_ok=True
    )


# Signals.


def test_a_signal_while_waiting_for_data_saves_and_ends_the_run(
  config, finished, tmp_path, monkeypatch
):
  """SIGTERM arrives when the run has taken four steps and waits for a batch.

  A resume then takes the other steps, as if there had been no signal.
  """
  config = change(config, train__checkpoint_interval=100, eval__interval=0)
  signal_times = []
  may_read_batch_5 = threading.Event()
  read_batch = prepared_batches.GlobalBatches.__getitem__

  # A thread reads the batches before the loop needs them.
  def send_sigterm_and_block_at_batch_5(self, index):
    if index == 4:
      while len(logged_lines(tmp_path)) < 3:
        time.sleep(0.01)
      # The loop takes the fourth step and then waits for the fifth batch.
      time.sleep(0.5)
      signal_times.append(time.monotonic())
      send_sigterm()
      may_read_batch_5.wait()
    return read_batch(self, index)

  with monkeypatch.context() as patch:
    patch.setattr(
      prepared_batches.GlobalBatches,
      "__getitem__",
      send_sigterm_and_block_at_batch_5,
    )
    # After a signal, the loop waits for the batch for this long.
    patch.setattr(reader, "GRACE_SECONDS", 0.2)
    loop.train(config, str(tmp_path))
    seconds_after_signal = time.monotonic() - signal_times[0]
    may_read_batch_5.set()
  assert saved_steps(tmp_path) == [4]
  # These are the 0.2 seconds, and the time of a save.
  assert seconds_after_signal < 4

  loop.train(config, str(tmp_path))

  assert training_entries(tmp_path) == training_entries(finished)


# A process in a call of C code that takes minutes, as a compilation does.
# Python runs no signal handlers during such a call.
LONG_CALL = """
import hashlib

from diffjax.host.interruption import Interruption

with Interruption():
  print("ready", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_a_second_signal_ends_the_process_at_once():
  """This holds also during a call of C code, such as a compilation.

  During such a call Python itself would treat two signals as one.
  """
  process = subprocess.Popen(
    [sys.executable, "-c", LONG_CALL],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "ready\n"

  # The call would go on for minutes after the first signal.
  process.send_signal(signal.SIGINT)
  assert "SIGINT: saving after this step" in process.stderr.readline()
  process.send_signal(signal.SIGTERM)

  assert process.wait(timeout=5) == 128 + signal.SIGTERM
  assert process.stderr.read() == "error: ended by SIGTERM\n"


# Errors during a run.


@pytest.mark.parametrize(
  ("mode", "data_module"),
  [("prepared", prepared_batches), *full([("streamed", streamed_batches)])],
)
def test_an_error_of_the_data_loses_no_steps(
  config, tmp_path, monkeypatch, capsys, mode, data_module
):
  """The fifth batch cannot be read, so the run saves step 4 and ends.

  A resume then continues as if there had been no error.
  """
  config = change(
    config, data__mode=mode, train__checkpoint_interval=100, eval__interval=0
  )
  workdir = tmp_path / "run"
  workdir_without_error = tmp_path / "without_error"
  loop.train(config, str(workdir_without_error))
  original = data_module.make_batch
  batch_numbers = itertools.count(1)

  def fail_at_batch_5(rows, length):
    if next(batch_numbers) == 5:
      raise UserError("row 7 is damaged")
    return original(rows, length)

  with monkeypatch.context() as patch:
    patch.setattr(data_module, "make_batch", fail_at_batch_5)
    with pytest.raises(UserError, match="row 7 is damaged"):
      loop.train(config, str(workdir))
  message = "saving step 4, before the run ends with an error"
  assert message in capsys.readouterr().err
  assert saved_steps(workdir) == [4]
  # Now the row can be read.
  loop.train(config, str(workdir))

  assert read_log(workdir) == read_log(workdir_without_error)


def test_a_batch_that_does_not_reach_the_devices_is_not_skipped(
  config, finished, tmp_path, monkeypatch
):
  """The copy of the fifth batch to the devices fails, and the run ends.

  It saved step 3 before, so the second run repeats the batches from there.
  """
  config = change(config, train__checkpoint_interval=3, eval__interval=0)
  original = session.put_batch
  batch_numbers = itertools.count(1)

  def put_batch(batch, mesh):
    if next(batch_numbers) == 5:
      raise RuntimeError("no memory on the device")
    return original(batch, mesh)

  with monkeypatch.context() as patch:
    patch.setattr(session, "put_batch", put_batch)
    with pytest.raises(RuntimeError, match="no memory on the device"):
      loop.train(config, str(tmp_path))
  loop.train(config, str(tmp_path))

  assert training_entries(tmp_path) == training_entries(finished)


def test_an_evaluation_that_fails_loses_no_steps(config, tmp_path, monkeypatch):
  """The step is saved before its evaluation, which is due after step 3."""
  config = change(config, train__checkpoint_interval=100)

  def fail(*_, **__):
    raise RuntimeError("a bug")

  monkeypatch.setattr(session.validation, "measure_losses", fail)
  with pytest.raises(RuntimeError, match="^a bug$"):
    loop.train(config, str(tmp_path))

  assert saved_steps(tmp_path) == [3]
  assert steps_of(read_log(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("failing_step", [3, 6])
def test_a_resume_repeats_an_evaluation_that_failed(
  config, finished, tmp_path, monkeypatch, failing_step
):
  """The run takes six steps, and is evaluated after the third and the last."""
  original = session.Session.evaluate

  def evaluate_or_fail(self, step, state):
    if step == failing_step:
      raise RuntimeError("out of memory")
    return original(self, step, state)

  with monkeypatch.context() as patch:
    patch.setattr(session.Session, "evaluate", evaluate_or_fail)
    with pytest.raises(RuntimeError, match="out of memory"):
      loop.train(config, str(tmp_path))
  # The step is saved without validation losses.
  assert saved_scores(tmp_path, failing_step) == {}
  loop.train(config, str(tmp_path))

  assert read_log(tmp_path) == read_log(finished)
  # The losses are added to the checkpoint. Opening it verifies its files.
  scores = open_checkpoint(tmp_path, failing_step).scores
  evaluations = {entry["step"]: entry for entry in evaluation_entries(tmp_path)}
  assert "validation/loss" in scores
  assert scores.items() <= evaluations[failing_step].items()


def test_a_restored_step_without_losses_is_evaluated_once(
  config, tmp_path, monkeypatch
):
  """Losses of NaN count as measured, so the step is not evaluated again.

  JSON has no NaN, so the checkpoint stores them as null.
  """
  one_step = change(config, train__steps=1, eval__interval=0)
  loop.train(one_step, str(tmp_path))
  assert evaluation_entries(tmp_path) == []

  def measure_nan(*arguments, **options):
    return {"loss": float("nan")}

  # No steps are left, so the runs could only evaluate step 1.
  with_evaluations = change(one_step, eval__interval=5)
  monkeypatch.setattr(session.validation, "measure_losses", measure_nan)
  loop.train(with_evaluations, str(tmp_path))
  assert steps_of(evaluation_entries(tmp_path)) == [1]
  assert saved_scores(tmp_path, 1)["validation/loss"] is None

  loop.train(with_evaluations, str(tmp_path))

  assert steps_of(evaluation_entries(tmp_path)) == [1]


# Lack of memory.


def test_a_run_that_does_not_fit_the_memory_says_how_to_reduce_it(
  config, command, tmp_path
):
  """Each matrix of its feed-forward layer has 2**22 * 2**30 elements."""
  result = command(
    "diffjax.train",
    "--config=configs/tiny.py",
    f"--workdir={tmp_path}",
    f"--config.data.source={config.data.source}",
    f"--config.data.prepared_dir={tmp_path / 'rows'}",
    "--config.data.validation_fraction=0.2",
    "--config.model.num_layers=1",
    f"--config.model.embed_dim={2**22}",
    f"--config.model.ffn_dim={2**30}",
  )

  assert result.returncode == 1, result.stderr
  assert "Traceback" not in result.stderr
  last_line = result.stderr.splitlines()[-1]
  assert last_line.startswith("error: out of memory (RESOURCE_EXHAUSTED: ")
  assert "--config.model.remat=full" in last_line
  assert "--config.train.accumulation=" in last_line


def test_lack_of_memory_is_explained_with_the_mesh_to_use(config):
  """There are eight devices, over which the parameters can be sharded."""
  mesh_shape = make_mesh(config.mesh).shape

  with pytest.raises(UserError, match=r"--config\.mesh\.fsdp=8"):
    with memory.explain_out_of_memory(config, mesh_shape):
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_other_errors_of_the_runtime_are_not_explained(config):
  mesh_shape = make_mesh(config.mesh).shape

  with pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL$"):
    with memory.explain_out_of_memory(config, mesh_shape):
      raise jax.errors.JaxRuntimeError("INTERNAL")


# The learning rate's schedule.


class ProlongedRun(NamedTuple):
  """A run of 4 steps that is then prolonged to 10 steps.

  Its warmup has 8 steps, and the peak of its learning rate is 1.

  Attributes:
    learning_rates: the logged learning rates of all 10 steps.
    errors_of_4_steps: the standard error of the run of 4 steps.
    errors_of_10_steps: the standard error of its continuation.
  """

  learning_rates: list[float]
  errors_of_4_steps: str
  errors_of_10_steps: str


@pytest.fixture(scope="module")
def prolonged_run(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("prolonged")
  run_of_4_steps = change(
    config,
    train__steps=4,
    optimizer__warmup_steps=8,
    optimizer__learning_rate=1.0,
    eval__interval=0,
  )
  run_of_10_steps = change(run_of_4_steps, train__steps=10)
  with contextlib.redirect_stderr(io.StringIO()) as errors_of_4_steps:
    loop.train(run_of_4_steps, str(workdir))
  with contextlib.redirect_stderr(io.StringIO()) as errors_of_10_steps:
    loop.train(run_of_10_steps, str(workdir))
  return ProlongedRun(
    [entry["train/learning_rate"] for entry in read_log(workdir)],
    errors_of_4_steps.getvalue(),
    errors_of_10_steps.getvalue(),
  )


def test_a_warmup_longer_than_the_run_is_shortened(prolonged_run):
  """The rate rises in quarters to its peak of 1, instead of in eighths."""
  message = (
    "config.optimizer.warmup_steps = 8 is cut to config.train.steps = 4\n"
  )
  assert message in prolonged_run.errors_of_4_steps
  rates_of_steps_1_to_4 = prolonged_run.learning_rates[:4]
  assert rates_of_steps_1_to_4 == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4])


def test_a_shortened_warmup_has_all_of_its_steps_in_a_longer_run(
  prolonged_run,
):
  """The run of 4 steps is continued to step 10. Its warmup has 8 steps."""
  rates_of_steps_5_to_10 = prolonged_run.learning_rates[4:]

  # The rate rises in eighths to its peak of 1, and then falls to 0 in 2 steps.
  assert rates_of_steps_5_to_10 == pytest.approx(
    [4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 1 / 2]
  )


def test_a_longer_run_says_how_the_learning_rate_changes(prolonged_run):
  """A warmup of 4 steps would be at its end. A warmup of 8 is at 4 / 8."""
  errors = prolonged_run.errors_of_10_steps

  assert (
    "config.train.steps was 4 and is 10: the learning rate's schedule now ends"
    " there, and goes on at 0.5, not at 1\n"
  ) in errors
  # The first run said this of its warmup_steps.
  assert "is cut to config.train.steps" not in errors


# Starting from the parameters of another run.


def test_init_from_takes_the_parameters(config, finished, tmp_path):
  """A run from another run's parameters has that run's validation loss."""
  # The learning rate is zero in the first step of the warmup, so this step does
  # not change the parameters.
  config = change(config, train__init_from=str(finished), train__steps=1)

  loop.train(config, str(tmp_path))

  [evaluation] = evaluation_entries(tmp_path)
  last_evaluation = evaluation_entries(finished)[-1]
  assert evaluation["step"] == 1
  assert evaluation["validation/loss"] == last_evaluation["validation/loss"]


def test_init_from_names_fields_that_change_what_the_model_computes(
  config, finished, tmp_path, capsys
):
  """The parameters fit the model, but were trained with other values."""
  config = change(
    config,
    train__init_from=str(finished),
    train__steps=0,
    model__rope_base=500.0,
    model__norm_eps=1e-6,
    eval__interval=0,
  )

  loop.train(config, str(tmp_path))

  message = (
    "config.model.rope_base is 500.0, and was 10000.0 there;"
    " config.model.norm_eps is 1e-06, and was 1e-05 there\n"
  )
  assert message in capsys.readouterr().err


def test_init_from_does_not_name_fields_that_change_no_values(
  config, finished, tmp_path, capsys
):
  """Rematerialization changes memory and time, but not the model.

  A message about a changed field would end with "there".
  """
  config = change(
    config,
    train__init_from=str(finished),
    train__steps=0,
    model__remat="full",
    eval__interval=0,
  )

  loop.train(config, str(tmp_path))

  errors = capsys.readouterr().err
  assert f"starting from the parameters of {finished}\n" in errors
  assert "there\n" not in errors


def test_init_from_another_model_is_refused_before_files_are_written(
  config, finished, tmp_path
):
  """The model of the finished run has ffn_dim=32."""
  config = change(
    config, train__init_from=str(finished), model__ffn_dim=48, eval__interval=0
  )

  with pytest.raises(UserError, match="of another model"):
    loop.train(config, str(tmp_path / "run"))

  assert file_contents(tmp_path / "run") == {}


def write_tokenizer(path: pathlib.Path, shift: int) -> None:
  """Writes a tokenizer of bytes, in which byte b has the id b - shift."""
  ranks = {bytes([(byte + shift) % 255]): byte for byte in range(255)}
  separator = {tokenizer.SEPARATOR: 255}
  text = tokenizer_json.tokenizer_json(ranks, tokenizer.PATTERN, separator)
  path.write_text(text)


@pytest.fixture(scope="module")
def run_with_tokenizer(config, tmp_path_factory):
  """A run of one step whose tokenizer file was deleted afterwards.

  Its tokenizer has the ids of the built-in tokenizer "bytes".
  """
  directory = tmp_path_factory.mktemp("run_with_tokenizer")
  path = directory / "tokenizer.json"
  write_tokenizer(path, shift=0)
  config = change(
    config,
    data__mode="streamed",
    data__tokenizer=str(path),
    eval__interval=0,
    train__steps=1,
  )
  loop.train(config, str(directory / "run"))
  path.unlink()
  return directory / "run"


def test_init_from_another_tokenizer_of_the_same_size_is_refused(
  config, run_with_tokenizer, tmp_path
):
  """The embedding has the right shape, but its rows are of other tokens.

  In the other tokenizer, byte b has the id b - 1 instead of b.
  """
  other_tokenizer = tmp_path / "other.json"
  write_tokenizer(other_tokenizer, shift=1)
  config = change(
    config,
    data__mode="streamed",
    data__tokenizer=str(other_tokenizer),
    eval__interval=0,
    train__init_from=str(run_with_tokenizer),
    train__steps=0,
  )

  with pytest.raises(UserError) as error:
    loop.train(config, str(tmp_path / "run"))

  message = str(error.value)
  right_tokenizer = run_with_tokenizer / "tokenizer.json"
  assert f"init_from = '{run_with_tokenizer}'" in message
  assert f"tokenizer = '{other_tokenizer}' is another one" in message
  assert f"set config.data.tokenizer to '{right_tokenizer}'" in message
  assert file_contents(tmp_path / "run") == {}


def test_init_from_another_built_in_tokenizer_is_refused_by_its_name(
  config, finished, tmp_path
):
  """A built-in tokenizer has no file in the workdir."""
  other_tokenizer = tmp_path / "other.json"
  # Byte 1 has the id 0, so this is another tokenizer than "bytes".
  write_tokenizer(other_tokenizer, shift=1)
  config = change(
    config,
    data__mode="streamed",
    data__tokenizer=str(other_tokenizer),
    eval__interval=0,
    train__init_from=str(finished),
    train__steps=0,
  )

  with pytest.raises(UserError, match="trained with the tokenizer 'bytes'"):
    loop.train(config, str(tmp_path / "run"))


def test_init_from_a_run_with_an_equal_tokenizer_is_accepted(
  config, run_with_tokenizer, tmp_path
):
  """The run has a tokenizer file with the ids of the built-in "bytes"."""
  config = change(
    config,
    data__mode="streamed",
    data__tokenizer="bytes",
    eval__interval=0,
    train__init_from=str(run_with_tokenizer),
    train__steps=0,
  )

  loop.train(config, str(tmp_path / "run"))

  assert (tmp_path / "run" / "config.toml").exists()


# Refused runs.


def test_a_workdir_of_another_run_is_refused(config, finished):
  """test_checkpoint.py tests each field of the config."""
  other_config = change(config, optimizer__learning_rate=0.5)

  with pytest.raises(
    UserError, match="optimizer.learning_rate was .* and is 0.5"
  ):
    loop.train(other_config, str(finished))


def test_a_vocabulary_of_another_size_than_the_tokenizer_is_refused(
  config, tmp_path
):
  message = "config.model.vocab_size = 100: .* 'bytes' has 256"
  with pytest.raises(UserError, match=message):
    loop.train(change(config, model__vocab_size=100), str(tmp_path))


def test_a_path_in_which_orbax_would_save_no_arrays_is_refused(
  config, tmp_path
):
  workdir = tmp_path / "lr[1]" / "run"

  with pytest.raises(UserError, match=r"below the directory 'lr\[1\]'"):
    loop.train(config, str(workdir))

  assert not workdir.exists()


class StoppedRun(NamedTuple):
  """A run of two steps, with the remains of a later kill in its workdir.

  A resume that is not refused removes these remains.

  Attributes:
    config: its config, with two more steps to do.
    workdir: its workdir.
    document: one of its documents.
    tokenizer: the file of its tokenizer.
    interrupted_save: the directory of an interrupted save.
  """

  config: Config
  workdir: pathlib.Path
  document: pathlib.Path
  tokenizer: pathlib.Path
  interrupted_save: pathlib.Path


@pytest.fixture(scope="module")
def stopped_runs(config, tmp_path_factory):
  """Returns a function from a mode of reading data to a StoppedRun."""
  runs: dict[str, StoppedRun] = {}

  def run_with_mode(mode: str) -> StoppedRun:
    if mode not in runs:
      runs[mode] = make_stopped_run(config, mode, tmp_path_factory.mktemp(mode))
    return runs[mode]

  return run_with_mode


def make_stopped_run(
  config: Config, mode: str, directory: pathlib.Path
) -> StoppedRun:
  """Trains for two steps and returns the run."""
  texts = directory / "text"
  texts.mkdir()
  write_documents(texts)
  tokenizer_path = directory / "tokenizer.json"
  write_tokenizer(tokenizer_path, shift=0)
  config = change(
    config,
    data__source=f"text:{texts}/*.txt",
    data__prepared_dir="",
    data__tokenizer=str(tokenizer_path),
    data__mode=mode,
    train__steps=2,
    eval__interval=0,
  )
  workdir = directory / "run"
  loop.train(config, str(workdir))

  interrupted_save = workdir / "checkpoints" / "9.orbax-checkpoint-tmp"
  interrupted_save.mkdir()
  (interrupted_save / "file").write_text("part of a checkpoint")
  with (workdir / "metrics.jsonl").open("a") as file:
    file.write('{"step": 9, "train/loss": 1.0}\n{"step": 10, "tra')
  return StoppedRun(
    config=change(config, train__steps=4),
    workdir=workdir,
    document=texts / "0.txt",
    tokenizer=tokenizer_path,
    interrupted_save=interrupted_save,
  )


@contextlib.contextmanager
def restored_file(path: pathlib.Path) -> Iterator[None]:
  """Restores a file at the end of the context."""
  content = path.read_bytes()
  try:
    yield
  finally:
    path.write_bytes(content)


def assert_refused(message: str, config: Config, workdir: pathlib.Path) -> None:
  """Checks that a resume fails with a message and changes no file."""
  contents_before = file_contents(workdir)
  with pytest.raises(UserError, match=message):
    loop.train(config, str(workdir))
  assert file_contents(workdir) == contents_before


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_resume_with_another_tokenizer_is_refused(stopped_runs, mode):
  """The file of the tokenizer gets other ids after step 2 of 4."""
  run = stopped_runs(mode)

  with restored_file(run.tokenizer):
    write_tokenizer(run.tokenizer, shift=1)
    message = "cannot continue in the data from this checkpoint"
    assert_refused(message, run.config, run.workdir)


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_resume_with_a_changed_document_is_refused(stopped_runs, mode):
  """A document gets another line after step 2 of 4."""
  run = stopped_runs(mode)

  with restored_file(run.document):
    run.document.write_text(f"{run.document.read_text()}another line\n")
    message = "cannot continue in the data from this checkpoint"
    assert_refused(message, run.config, run.workdir)


def test_a_resume_without_the_package_of_its_log_is_refused(
  stopped_runs, monkeypatch
):
  run = stopped_runs("prepared")
  config = change(run.config, train__wandb_project="project")
  # Importing the module then raises ImportError.
  monkeypatch.setitem(sys.modules, "wandb", None)

  assert_refused("needs wandb", config, run.workdir)


def test_a_resume_with_kernels_of_another_platform_is_refused(stopped_runs):
  """The kernels are for GPUs, and the tests run on CPUs."""
  run = stopped_runs("prepared")
  config = change(run.config, model__attention_implementation="pallas_gpu")

  message = "attention_implementation = 'pallas_gpu'"
  assert_refused(message, config, run.workdir)


def test_a_resume_from_damaged_checkpoints_is_refused(stopped_runs):
  """The only checkpoint, of step 2, lacks the last byte of a file."""
  run = stopped_runs("prepared")
  array_files = (run.workdir / "checkpoints/2/state/d").iterdir()
  largest_file = max(array_files, key=lambda file: file.stat().st_size)

  with restored_file(largest_file):
    largest_file.write_bytes(largest_file.read_bytes()[:-1])
    assert_refused("every checkpoint in", run.config, run.workdir)


def test_a_session_checks_a_checkpoint_that_is_saved_before_it_starts(
  stopped_runs, monkeypatch
):
  """The constructor finds no checkpoint. Then another run saves one.

  The start of the session must refuse it, as it has another data.seed.
  """
  run = stopped_runs("prepared")
  config = change(run.config, data__seed=1)
  contents_before = file_contents(run.workdir)

  def find_no_checkpoint(*_, **__):
    return None

  with monkeypatch.context() as patch:
    patch.setattr(session, "find_checkpoint", find_no_checkpoint)
    new_session = session.Session(config, str(run.workdir))

  with pytest.raises(UserError, match="data.seed was 0 and is 1"):
    with new_session:
      pytest.fail("the session has started")

  assert file_contents(run.workdir) == contents_before


def test_a_resume_removes_an_interrupted_save_and_later_log_lines(
  stopped_runs, tmp_path
):
  """A killed run left an unfinished save, and lines of the steps 9 and 10."""
  run = stopped_runs("prepared")
  workdir = shutil.copytree(run.workdir, tmp_path / "run")

  loop.train(run.config, str(workdir))

  assert not (workdir / "checkpoints" / run.interrupted_save.name).exists()
  assert steps_of(read_log(workdir)) == [1, 2, 3, 4]


# Other users of the workdir.


def test_a_second_run_in_the_same_process_is_refused(
  config, finished, tmp_path, monkeypatch
):
  """For example from another thread of a notebook. The first run continues."""
  config = change(config, eval__interval=0)
  other_config = change(config, data__seed=7)
  refusals = []

  def start_second_run():
    with pytest.raises(UserError, match="another run of this process") as error:
      loop.train(other_config, str(tmp_path))
    refusals.append(error)

  call_before_batch(monkeypatch, number=2, action=start_second_run)
  loop.train(config, str(tmp_path))

  assert len(refusals) == 1
  assert training_entries(tmp_path) == training_entries(finished)


def test_a_run_whose_workdir_is_replaced_ends_without_writing_there(
  config, finished, tmp_path, monkeypatch, capsys
):
  """Another run takes the place of the workdir before the last step."""
  workdir = tmp_path / "run"
  old_workdir = tmp_path / "old"
  config = change(config, train__checkpoint_interval=100, eval__interval=0)

  def replace_workdir():
    workdir.rename(old_workdir)
    shutil.copytree(finished, workdir)

  call_before_batch(monkeypatch, number=6, action=replace_workdir)
  with pytest.raises(LostWorkdir, match=f"{workdir} is no longer"):
    train_and_finish(config, workdir)

  assert file_contents(workdir) == file_contents(finished)
  assert saved_steps(old_workdir) == []
  # A command prints this at its end, before the files that it has written.
  assert "written to" not in capsys.readouterr().out


def test_a_workdir_that_is_replaced_after_training_gets_no_sample(
  config, finished, tmp_path, monkeypatch, capsys
):
  """While the sample is generated, another run takes the place of the workdir.

  The sample is a text by the trained model, which is written to the workdir.
  """
  workdir = tmp_path / "run"
  moved_workdir = tmp_path / "moved"
  config = change(
    config,
    train__steps=1,
    train__checkpoint_interval=100,
    train__sample_tokens=2,
    eval__interval=0,
  )
  original = finish.Sampler.generate

  def replace_workdir_and_generate(self, *arguments, **options):
    workdir.rename(moved_workdir)
    shutil.copytree(finished, workdir)
    return original(self, *arguments, **options)

  monkeypatch.setattr(finish.Sampler, "generate", replace_workdir_and_generate)
  with pytest.raises(LostWorkdir, match=f"{workdir} is no longer"):
    train_and_finish(config, workdir)

  assert file_contents(workdir) == file_contents(finished)
  assert saved_steps(moved_workdir) == [1]
  # A finished run prints "written to" and its files.
  assert "written to" not in capsys.readouterr().out


def test_a_workdir_that_is_deleted_ends_the_run(config, tmp_path, monkeypatch):
  """The run does not make its workdir again."""
  workdir = tmp_path / "run"
  config = change(config, train__checkpoint_interval=100, eval__interval=0)

  def delete_workdir():
    shutil.rmtree(workdir)

  call_before_batch(monkeypatch, number=4, action=delete_workdir)
  with pytest.raises(LostWorkdir, match="is no longer"):
    loop.train(config, str(workdir))

  assert not workdir.exists()


def test_a_deleted_workdir_does_not_hide_the_error_of_the_run(
  config, tmp_path, monkeypatch
):
  """The error is raised instead of LostWorkdir."""
  workdir = tmp_path / "run"
  config = change(config, train__checkpoint_interval=100, eval__interval=0)

  def delete_workdir_and_fail():
    shutil.rmtree(workdir)
    raise RuntimeError("a bug")

  call_before_batch(monkeypatch, number=4, action=delete_workdir_and_fail)
  with pytest.raises(RuntimeError, match="a bug"):
    loop.train(config, str(workdir))

  assert not workdir.exists()


# Skipped steps.


def spoil_batches(
  patch: pytest.MonkeyPatch, weights: dict[int, float], *, first_step: int = 1
) -> None:
  """Gives one token of some batches a weight that makes the loss NaN.

  Args:
    patch: patches the session.
    weights: for each step to spoil, the weight of the token.
    first_step: the first step of the run.
  """
  original = session.put_batch
  steps = itertools.count(first_step)

  def put_batch(batch, mesh):
    step = next(steps)
    if step in weights:
      batch = {**batch, "weights": batch["weights"].copy()}
      batch["weights"][0, 0] = weights[step]
    return original(batch, mesh)

  patch.setattr(session, "put_batch", put_batch)


@pytest.fixture(scope="module")
def skipping_run(config, tmp_path_factory):
  """Returns the workdir of a run that skips steps 3 and 4, and its messages."""
  workdir = tmp_path_factory.mktemp("skipping")
  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stderr(io.StringIO()) as errors,
  ):
    spoil_batches(patch, weights={3: np.inf, 4: np.nan})
    loop.train(change(config, eval__interval=0), str(workdir))
  return workdir, errors.getvalue()


def test_skipped_steps_are_counted(skipping_run):
  """Steps 3 and 4 of the six have a loss of NaN."""
  workdir, _ = skipping_run

  entries = read_log(workdir)
  in_a_row = [entry["train/skipped_in_a_row"] for entry in entries]
  in_total = [entry["train/skipped_steps"] for entry in entries]
  assert in_a_row == [0, 0, 1, 2, 0, 0]
  assert in_total == [0, 0, 1, 2, 2, 2]


def test_skipped_steps_are_reported(skipping_run):
  """Steps 3 and 4 of the six have a loss of NaN."""
  _, errors = skipping_run

  assert errors.count("update skipped") == 2
  assert (
    "step 3: update skipped (loss nan); 1 so far, training continues\n"
  ) in errors
  assert (
    "step 4: update skipped (loss nan); 2 so far, 2 in a row, training"
    " continues\n"
  ) in errors


def test_skipped_steps_change_no_parameters(config, skipping_run):
  """Steps 3 and 4 are skipped, and steps 5 and 6 are not."""
  workdir, _ = skipping_run
  abstract_state = build(config, make_mesh(config.mesh)).abstract_state

  before_skips = open_checkpoint(workdir, 2).params(abstract_state.params)
  after_skips = open_checkpoint(workdir, 4).params(abstract_state.params)
  after_steps = open_checkpoint(workdir, 6).params(abstract_state.params)

  chex.assert_trees_all_equal(after_skips, before_skips)
  assert np.any(after_steps["embedding"] != before_skips["embedding"])


def test_a_resume_between_skipped_steps_is_exact(
  config, skipping_run, tmp_path, monkeypatch, capsys
):
  """The run skips steps 3 and 4, and ends with an error between them.

  The log includes the counts of skipped steps, and the averages of the loss
  that detect bad steps.
  """
  config = change(config, eval__interval=0)

  with monkeypatch.context() as patch:
    spoil_batches(patch, weights={3: np.inf})
    call_before_batch(patch, number=4, action=raise_damaged_row)
    with pytest.raises(UserError, match="row 7 is damaged"):
      loop.train(config, str(tmp_path))

  # The second session begins with the batch of step 4.
  spoil_batches(monkeypatch, weights={4: np.nan}, first_step=4)
  loop.train(config, str(tmp_path))

  assert "resuming from step 3" in capsys.readouterr().err
  workdir_without_stop, _ = skipping_run
  assert read_log(tmp_path) == read_log(workdir_without_stop)


def train_until_too_many_steps_are_skipped(
  config: Config, workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> str:
  """Skips step 2 and all steps from 4 on, and returns the run's error.

  The run ends at step 6, the third skipped step in a row.
  """
  config = change(
    config,
    train__max_skipped_in_a_row=3,
    train__log_interval=100,
    eval__interval=0,
  )
  weights = dict.fromkeys([2, 4, 5, 6], np.nan)
  spoil_batches(monkeypatch, weights=weights)

  with pytest.raises(UserError) as error:
    loop.train(config, str(workdir))

  # Besides the first step, only skipped steps are logged.
  assert steps_of(read_log(workdir)) == [1, 2, 4, 5, 6]
  return str(error.value)


@pytest.mark.parametrize(
  ("num_steps", "checkpoint_interval", "keep_checkpoints", "named_step"),
  [
    # Step 6 is also the last step of the run.
    (6, 3, 1, 3),
    # Each step is saved, and step 3 is the last good one.
    *full([(20, 1, 9, 3)]),
    # Step 2 is saved before the last good step, and step 4 after it.
    *full([(20, 2, 3, 2)]),
    # Only step 4 is kept. It has the parameters of step 3.
    *full([(20, 2, 1, 4)]),
  ],
)
def test_too_many_skipped_steps_in_a_row_end_the_run(
  config,
  tmp_path,
  monkeypatch,
  num_steps,
  checkpoint_interval,
  keep_checkpoints,
  named_step,
):
  """The message names a checkpoint with the parameters before the bad steps.

  The run ends at step 6, since the steps 4, 5 and 6 are skipped.
  """
  config = change(
    config,
    train__steps=num_steps,
    train__checkpoint_interval=checkpoint_interval,
    train__keep_checkpoints=keep_checkpoints,
  )

  error = train_until_too_many_steps_are_skipped(config, tmp_path, monkeypatch)

  assert error.startswith("stopped at step 6: 3 steps in a row ")
  assert "the last one has loss nan;" in error
  assert f"is {tmp_path}/checkpoints/{named_step}. " in error


@pytest.mark.full
def test_too_many_skipped_steps_may_leave_no_good_checkpoint(
  config, tmp_path, monkeypatch
):
  config = change(config, train__steps=20, train__checkpoint_interval=100)

  error = train_until_too_many_steps_are_skipped(config, tmp_path, monkeypatch)

  assert error.startswith("stopped at step 6: 3 steps in a row ")
  assert "there is no checkpoint" in error


def test_skipped_steps_do_not_hide_the_error_of_the_data(
  config, tmp_path, monkeypatch
):
  """Step 4 is one skipped step too many, and the next batch is damaged."""
  config = change(
    config,
    train__checkpoint_interval=100,
    train__max_skipped_in_a_row=1,
    eval__interval=0,
  )

  # A token with a weight of NaN makes the loss of step 4 NaN.
  spoil_batches(monkeypatch, weights={4: np.nan})
  call_before_batch(monkeypatch, number=5, action=raise_damaged_row)
  with pytest.raises(UserError, match="row 7 is damaged"):
    loop.train(config, str(tmp_path))

  assert saved_steps(tmp_path) == [4]


# The files of a source on the Hub.


@pytest.fixture
def hub_source(tmp_path, monkeypatch):
  """Four Parquet files on a Hub, each with 80 x 60 = 4,800 tokens of bytes."""
  folder = tmp_path / "hub" / "datasets" / "org" / "name"
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for number in range(4):
    texts = [rng.bytes(30).hex() for _ in range(80)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / f"{number}.parquet")
  with HubServer(tmp_path / "hub") as server:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield "parquet:hf://datasets/org/name/*.parquet"


def test_a_run_keeps_its_number_of_files(config, tmp_path, hub_source):
  """A run reads as many files as its steps need, so a longer run needs more.

  It is refused, because other files would be other data.
  """
  workdir = tmp_path / "run"
  config = change(
    config,
    data__source=hub_source,
    data__prepared_dir=str(tmp_path / "rows"),
    data__mode="auto",
    eval__interval=0,
    train__steps=2,
    train__checkpoint_interval=100,
  )
  loop.train(config, str(workdir))
  stored_data = config_file.read(f"{workdir}/{config_file.NAME}").data
  assert stored_data.mode == "prepared"
  assert stored_data.files == 1

  tokens_per_step = 8 * 32
  tokens_per_file = 80 * 60
  files_of_40_steps = math.ceil(40 * tokens_per_step / tokens_per_file)
  longer = change(config, train__steps=40)
  message = f"config.data.files was 1 .* is {files_of_40_steps}"
  with pytest.raises(UserError, match=message):
    loop.train(longer, str(workdir))

  # With the one file of the first run, the longer run can be resumed.
  longer_with_one_file = change(longer, data__files=1)
  with session.Session(longer_with_one_file, str(workdir)) as resumed:
    assert resumed.start_step == 2


# The message about the attention implementation.


def attention_lines(errors: str) -> list[str]:
  """Returns the lines that say which attention is used."""
  return [line for line in errors.splitlines() if "attention:" in line]


def test_one_line_says_which_attention_is_used(finished_run):
  """The evaluations and the sample do not repeat it."""
  assert attention_lines(finished_run.errors) == [
    "diffjax: attention: chunked (XLA), because this is a CPU"
  ]


def test_the_attention_is_reported_before_the_first_step_ends(
  config, tmp_path, capsys, monkeypatch
):
  """The step starts after its compilation, which may take minutes.

  The loop then calls `record_dispatched_step`, and does not wait for its end.
  """
  lines = []
  original = session.Session.record_dispatched_step

  def read_lines_and_record_step(self, step, metrics):
    lines.extend(attention_lines(capsys.readouterr().err))
    original(self, step, metrics)

  monkeypatch.setattr(
    session.Session, "record_dispatched_step", read_lines_and_record_step
  )
  # Tracing prints the line. The fixture shared_programs would not trace again.
  monkeypatch.setattr(session, "build", build)
  loop.train(change(config, train__steps=1, eval__interval=0), str(tmp_path))

  assert len(lines) == 1


def test_an_attention_that_the_config_names_is_reported_as_such(
  config, tmp_path, capsys
):
  """Otherwise, the line would say that the machine is the reason."""
  config = change(
    config,
    train__steps=1,
    eval__interval=0,
    model__attention_implementation="two_call",
  )

  loop.train(config, str(tmp_path))

  assert attention_lines(capsys.readouterr().err) == [
    "diffjax: attention: two_call (stock attention), because"
    " config.model.attention_implementation names it"
  ]
