"""The loop: what a run leaves behind, and that stopping and starting again changes nothing."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import chex
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath

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
from diffjax.ops.diff_attention import choice
from diffjax.parallel.mesh import make_mesh
from diffjax.training import loop, manifest, memory, session
from diffjax.training.checkpoint import open_checkpoint
from diffjax.training.program import build
from tests.harness.hub_server import HubServer
from tests.harness.tiers import full

# Fields that tell the time, not the run.
CLOCK = {
  "time",
  "train/tokens_per_second",
  "train/step_seconds",
  "train/wait_fraction",
  "train/mfu",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """A model of one layer on generated text, with an evaluation and a checkpoint within a few steps."""
  path = tmp_path_factory.mktemp("text")
  for index in range(60):
    (path / f"{index}.txt").write_text(
      "".join(
        f"document {index}, line {line}: {line * index % 97}\n"
        for line in range(20)
      )
    )
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
      source=f"text:{path}/*.txt",
      validation_fraction=0.2,
      length=32,
      prepared_dir=str(path / "rows"),
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


def change(config, **fields):
  """change(config, train__steps=3)"""
  for field, value in fields.items():
    section, name = field.split("__")
    config = dataclasses.replace(
      config,
      **{
        section: dataclasses.replace(getattr(config, section), **{name: value})
      },
    )
  return config


def log(workdir):
  lines = [
    json.loads(line)
    for line in (pathlib.Path(workdir) / "metrics.jsonl")
    .read_text()
    .splitlines()
  ]
  return [
    {name: value for name, value in line.items() if name not in CLOCK}
    for line in lines
  ]


@pytest.fixture(scope="module")
def timed_steps():
  """The beginning and the end of each step of the uninterrupted run."""
  return []


@pytest.fixture(scope="module")
def printed_run(config, tmp_path_factory, timed_steps):
  """Returns the workdir of an uninterrupted run and its standard output.

  The dispatch of a step waits for it, as in the command on CPU.
  """
  workdir = tmp_path_factory.mktemp("whole")
  train_step = session.Session.train_step

  def timed(self, state, host_batch):
    begin = time.perf_counter()
    time.sleep(0.02)
    result = jax.block_until_ready(train_step(self, state, host_batch))
    timed_steps.append((begin, time.perf_counter()))
    return result

  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(io.StringIO()) as printed,
  ):
    patch.setattr(session.Session, "train_step", timed)
    train_and_finish(change(config, train__sample_tokens=5), workdir)
  return workdir, printed.getvalue()


@pytest.fixture(scope="module")
def whole(printed_run):
  """An uninterrupted run."""
  workdir, _ = printed_run
  return workdir


def train_and_finish(config, workdir):
  """What the command does."""
  finish.finish(loop.train(config, str(workdir)))


def config_of(workdir):
  """The run's config in its workdir, as --config reads it."""
  return configuration.from_config_dict(
    config_file.read(f"{workdir}/config.toml")
  )


def test_what_a_run_leaves_behind(config, whole):
  lines = log(whole)
  steps = [line["step"] for line in lines if "train/loss" in line]
  assert steps == [1, 2, 3, 4, 5, 6]
  evaluations = [line for line in lines if "validation/loss" in line]
  assert [line["step"] for line in evaluations] == [3, 6]
  assert {
    "validation/perplexity",
    "validation/bits_per_byte",
    "validation/ar_hit",
    "validation/others",
  } <= set(evaluations[0])
  assert (
    evaluations[1]["validation/loss"] < evaluations[0]["validation/loss"] < 6
  )
  assert {
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens",
    "lambda/layer_00",
  } <= set(lines[0])
  assert config_of(whole) == change(config, train__sample_tokens=5)
  assert (whole / "loss.png").stat().st_size > 1000
  assert (whole / "sample.txt").read_text().startswith("def ")
  assert list((whole / "tensorboard").iterdir())
  saved = manifest.read(epath.Path(whole) / "checkpoints" / "6", 6)[
    "metrics"
  ]  # by which the best step is kept
  assert saved == {
    name: value
    for name, value in evaluations[1].items()
    if name.startswith("validation/")
  }


def test_each_evaluation_is_printed_once_and_the_last_is_explained(
  printed_run,
):
  workdir, printed = printed_run
  lines = printed.splitlines()
  first, last = (line for line in log(workdir) if "validation/loss" in line)
  assert [line for line in lines if "validation" in line] == [
    f"step 3/6  validation on 8 rows: loss {first['validation/loss']:.4f},"
    f" {first['validation/bits_per_byte']:.4f} bits per byte",
    "step 6/6  validation on 8 rows:",
  ]
  for name, value in last.items():
    if not name.startswith("validation/"):
      continue
    name = name.removeprefix("validation/")
    (shown,) = [line for line in lines if line.startswith(f"  {name} ")]
    assert re.fullmatch(rf"  {name} +{value:.4f}  \w.+", shown)
    assert len(shown) <= 80


def test_a_logged_step_takes_as_long_as_its_program(whole, timed_steps):
  """Beside evaluations and saves too, where a dispatch waits for its step."""
  logged = {
    line["step"]: line["train/step_seconds"]
    for line in map(json.loads, (whole / "metrics.jsonl").open())
    if "train/step_seconds" in line
  }
  assert list(logged) == [2, 3, 4, 5, 6]  # The first one compiles.
  for step, seconds in logged.items():
    begin, end = timed_steps[step - 1]
    assert seconds >= end - begin
  (_, first_end), *_, (_, last_end) = timed_steps
  assert sum(logged.values()) <= last_end - first_end + 0.01


def test_the_log_begins_with_the_first_step(config, whole, tmp_path):
  """However seldom steps are logged: a plot of the loss begins where training does."""
  loop.train(
    change(config, train__log_interval=4, eval__interval=0), str(tmp_path)
  )
  steps = [line for line in log(tmp_path) if "train/loss" in line]
  assert [line["step"] for line in steps] == [1, 4, 6] and steps[0][
    "train/loss"
  ] == log(whole)[0]["train/loss"]


def test_resume_repeats_and_skips_nothing(config, whole, tmp_path):
  """Stopped at step 3 or later by SIGTERM, then run again: the log is the uninterrupted run's, number for number. Lines past the
  checkpoint, as a kill leaves them, are dropped."""
  resumed = interrupt_after(config, tmp_path, steps=3)
  assert 3 <= resumed < 6
  path = tmp_path / "metrics.jsonl"
  path.write_text(
    path.read_text()
    + json.dumps({"step": 99, "train/loss": 0.0})
    + '\n{"step": 1'
  )
  assert config_of(tmp_path) == config
  changed = change(config, train__keep_checkpoints=2)
  loop.train(changed, str(tmp_path))
  assert log(tmp_path) == log(whole)
  assert config_of(tmp_path) == changed


@pytest.fixture(scope="module")
def two_heads(config):
  return change(config, model__num_heads=2, model__num_kv_heads=2)


@pytest.fixture(scope="module")
def on_eight_devices(two_heads, tmp_path_factory):
  """A run whose batches are split over all of the tests' devices."""
  workdir = tmp_path_factory.mktemp("eight")
  loop.train(two_heads, str(workdir))
  return workdir


@pytest.mark.full
@pytest.mark.parametrize(
  "devices, mesh",
  [
    (1, {}),
    (2, {"context": 2}),
    (4, {"data": 2, "fsdp": 2}),
    (4, {"fsdp": 2, "tensor": 2}),
  ],
  ids=str,
)
def test_resume_on_another_mesh(
  two_heads, on_eight_devices, tmp_path, monkeypatch, devices, mesh
):
  """Begun on eight devices, ended on fewer that split other things: the same batches, and the same losses but for rounding."""
  workdir = tmp_path / "run"
  shutil.copytree(on_eight_devices, workdir)
  for step in (4, 6):
    shutil.rmtree(workdir / "checkpoints" / str(step))
  monkeypatch.setattr(
    session,
    "make_mesh",
    lambda config: make_mesh(config, jax.devices()[:devices]),
  )
  loop.train(
    dataclasses.replace(two_heads, mesh=MeshConfig(**mesh)), str(workdir)
  )
  for expected, line in zip(log(on_eight_devices), log(workdir), strict=True):
    assert line["step"] == expected["step"] and line.keys() == expected.keys()
    for name, value in expected.items():
      assert line[name] == (
        value
        if value is None or name == "train/tokens"
        else pytest.approx(value, rel=2e-4)
      ), name


def interrupt_after(config, workdir, steps):
  """Runs until some steps are logged, sends SIGTERM, and returns the step at which the run stopped."""

  def watch():
    path = pathlib.Path(workdir) / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"train/loss"') < steps:
      time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

  slow = threading.Thread(target=watch)
  slow.start()
  original = session.put_batch

  def slower(batch, mesh):
    time.sleep(0.2)
    return original(batch, mesh)

  session.put_batch = slower
  try:
    loop.train(config, str(workdir))
  finally:
    session.put_batch = original
  slow.join()
  return max(
    int(path.name)
    for path in (pathlib.Path(workdir) / "checkpoints").iterdir()
    if path.name.isdecimal()
  )


def test_an_interruption_while_waiting_for_data_saves_and_exits(
  config, whole, tmp_path, monkeypatch
):
  """The fifth batch does not come. What is logged and saved is what the uninterrupted run has."""
  come = threading.Event()
  read = prepared_batches.GlobalBatches.__getitem__

  def interrupt():
    path = tmp_path / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"train/loss"') < 3:
      time.sleep(0.01)
    time.sleep(0.5)  # the fourth step
    os.kill(os.getpid(), signal.SIGTERM)
    sent.append(time.monotonic())

  sent: list[float] = []
  with monkeypatch.context() as patch:
    patch.setattr(reader, "GRACE_SECONDS", 0.2)
    patch.setattr(
      prepared_batches.GlobalBatches,
      "__getitem__",
      lambda self, index: (index < 4 or come.wait()) and read(self, index),
    )
    threading.Thread(target=interrupt).start()
    loop.train(change(config, train__checkpoint_interval=100), str(tmp_path))
  assert time.monotonic() - sent[0] < 4
  come.set()
  assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
  loop.train(config, str(tmp_path))
  assert log(tmp_path) == log(whole)


@pytest.mark.parametrize("mode", ["prepared", *full(["streamed"])])
def test_a_damaged_row_loses_no_steps(
  config, whole, tmp_path, monkeypatch, capsys, mode
):
  """The fifth batch cannot be read. Once it can, the run goes on from the fourth step."""
  config = change(config, data__mode=mode)
  if mode == "streamed":
    whole = tmp_path / "whole"
    loop.train(config, str(whole))
  module = prepared_batches if mode == "prepared" else streamed_batches
  make, made = module.make_batch, []

  def damaged(rows, length):
    made.append(rows)
    if len(made) == 5:
      raise UserError("row 7 is damaged")
    return make(rows, length)

  with monkeypatch.context() as patch:
    patch.setattr(module, "make_batch", damaged)
    with pytest.raises(UserError, match="row 7 is damaged"):
      loop.train(
        change(config, train__checkpoint_interval=100, eval__interval=0),
        str(tmp_path / "run"),
      )
  assert (
    "saving step 4, before the run ends with an error"
    in capsys.readouterr().err
  )
  assert manifest.steps(manifest.checkpoint_directory(tmp_path / "run")) == [4]
  loop.train(config, str(tmp_path / "run"))
  trained = [
    [line for line in log(workdir) if "train/loss" in line]
    for workdir in (tmp_path / "run", whole)
  ]
  assert trained[0] == trained[1]


def test_a_batch_that_does_not_reach_the_devices_is_not_lost(
  config, whole, tmp_path, monkeypatch
):
  """The fifth batch has been read, and nothing has been saved since step 3. A run that goes on repeats and skips no batch."""
  original, numbers = session.put_batch, itertools.count(1)

  def put_batch(batch, mesh):
    if next(numbers) == 5:
      raise RuntimeError("no memory on the device")
    return original(batch, mesh)

  config = change(config, train__checkpoint_interval=3)
  with monkeypatch.context() as patch:
    patch.setattr(session, "put_batch", put_batch)
    with pytest.raises(RuntimeError, match="no memory on the device"):
      loop.train(config, str(tmp_path))
  loop.train(config, str(tmp_path))
  assert log(tmp_path) == log(whole)


def test_an_error_is_not_hidden_by_skipped_steps(config, tmp_path, monkeypatch):
  """The fifth batch cannot be read, and the fourth step is one too many that is skipped."""
  spoil(monkeypatch, {4: np.nan})
  next_batch, numbers = session.Session.next_batch, itertools.count(1)

  def damaged(self):
    if next(numbers) == 5:
      raise UserError("row 7 is damaged")
    return next_batch(self)

  monkeypatch.setattr(session.Session, "next_batch", damaged)
  config = change(
    config,
    train__checkpoint_interval=100,
    train__max_skipped_in_a_row=1,
    eval__interval=0,
  )
  with pytest.raises(UserError, match="row 7 is damaged"):
    loop.train(config, str(tmp_path))
  assert manifest.steps(manifest.checkpoint_directory(tmp_path)) == [4]


def test_an_evaluation_that_fails_loses_no_steps(config, tmp_path, monkeypatch):
  """It keeps its own error, whatever that is."""

  def fail(*_, **__):
    raise RuntimeError("a bug")

  monkeypatch.setattr(session.validation, "measure_losses", fail)
  with pytest.raises(RuntimeError, match="^a bug$"):
    loop.train(change(config, train__checkpoint_interval=100), str(tmp_path))
  assert manifest.steps(manifest.checkpoint_directory(tmp_path)) == [3]
  assert [line["step"] for line in log(tmp_path)] == [1, 2, 3]


def metrics_of(workdir, step):
  path = manifest.checkpoint_directory(workdir) / str(step)
  return manifest.read(path, step)["metrics"]


def test_an_evaluation_that_failed_is_repeated(
  config, whole, tmp_path, monkeypatch
):
  """The run is then as if it had not failed, at the last step too."""
  evaluate = session.Session.evaluate
  to_fail = [3, 6]

  def fail_once(self, step, state):
    if step in to_fail:
      to_fail.remove(step)
      raise RuntimeError("out of memory")
    return evaluate(self, step, state)

  monkeypatch.setattr(session.Session, "evaluate", fail_once)
  for step in (3, 6):
    with pytest.raises(RuntimeError, match="out of memory"):
      loop.train(config, str(tmp_path))
    assert metrics_of(tmp_path, step) == {}
  loop.train(config, str(tmp_path))
  assert log(tmp_path) == log(whole)
  assert metrics_of(tmp_path, 6) == metrics_of(whole, 6)
  # The file of the metrics is in order, as are all others.
  checkpoint = open_checkpoint(tmp_path, 3)
  assert checkpoint.scores["validation/loss"] > 0


def test_an_evaluation_that_is_switched_on_measures_the_restored_step(
  config, tmp_path, monkeypatch
):
  """Once, also if the losses are not finite."""
  config = change(config, train__steps=2, eval__interval=0)
  loop.train(config, str(tmp_path))
  config = change(config, eval__interval=5)
  measured = session.validation.measure_losses

  def not_finite(*arguments, **options):
    return dict.fromkeys(measured(*arguments, **options), float("nan"))

  monkeypatch.setattr(session.validation, "measure_losses", not_finite)
  for _ in range(2):
    loop.train(config, str(tmp_path))
    lines = [line for line in log(tmp_path) if "validation/loss" in line]
    assert [line["step"] for line in lines] == [2]
  metrics = metrics_of(tmp_path, 2)
  assert metrics["validation/loss"] is None
  assert manifest.best({2: {"metrics": metrics}}) is None


def test_what_does_not_fit_the_memory_names_what_takes_less(
  command, config, tmp_path
):
  """A feed-forward layer of 4 PiB."""
  fields = {
    f"data.{name}": getattr(config.data, name)
    for name in ("source", "validation_fraction", "length", "prepared_dir")
  }
  fields |= {
    "model.num_layers": 1,
    "model.embed_dim": 2**22,
    "model.ffn_dim": 2**30,
  }
  result = command(
    "diffjax.train",
    "--config=configs/tiny.py",
    f"--workdir={tmp_path}",
    *(f"--config.{n}={v}" for n, v in fields.items()),
  )
  last = result.stderr.splitlines()[-1]
  assert result.returncode == 1 and last.startswith(
    "error: out of memory (RESOURCE_EXHAUSTED: "
  ), result.stderr
  assert (
    "--config.model.remat=full" in last
    and "--config.train.accumulation=" in last
    and "Traceback" not in result.stderr
  )
  with (
    pytest.raises(UserError, match=r"--config\.mesh\.fsdp=8"),
    memory.explain_out_of_memory(config, make_mesh(config.mesh).shape),
  ):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL$"),
    memory.explain_out_of_memory(config, make_mesh(config.mesh).shape),
  ):
    raise jax.errors.JaxRuntimeError("INTERNAL")


def test_a_second_signal_ends_the_process_at_once():
  """Even inside a long call that runs no Python, as a compilation does: there Python alone sees two signals as one, and late."""
  code = """
import hashlib
from diffjax.host.interruption import Interruption
with Interruption():
  print("ready", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
  process = subprocess.Popen(
    [sys.executable, "-c", code],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGINT)
  assert "SIGINT: saving after this step" in process.stderr.readline()
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=5) == 128 + signal.SIGTERM
  assert process.stderr.read() == "error: ended by SIGTERM\n"


@pytest.mark.full
def test_a_finished_run_can_be_prolonged(config, whole, tmp_path):
  short = change(config, train__steps=3)
  loop.train(short, str(tmp_path))
  loop.train(short, str(tmp_path))  # nothing left to do
  assert [line["step"] for line in log(tmp_path) if "train/loss" in line] == [
    1,
    2,
    3,
  ]
  loop.train(config, str(tmp_path))
  assert [line["step"] for line in log(tmp_path) if "train/loss" in line] == [
    1,
    2,
    3,
    4,
    5,
    6,
  ]


def test_a_profile_names_its_steps(config, tmp_path):
  """By the numbers that the log has for them."""
  loop.train(
    change(
      config,
      train__steps=4,
      train__profile_step=1,
      train__profile_steps=2,
      eval__interval=0,
    ),
    str(tmp_path),
  )
  (path,) = (tmp_path / "profile").rglob("*.xplane.pb")
  events = [
    event
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes
    for line in plane.lines
    for event in line.events
  ]
  assert sorted(
    dict(event.stats)["step_num"] for event in events if event.name == "train"
  ) == [2, 3]


def test_a_warmup_longer_than_the_run_is_cut_aloud(config, tmp_path, capsys):
  """The checkpoint keeps what the user gave, so that a longer run goes on with the whole warmup."""
  config = change(
    config,
    optimizer__warmup_steps=8,
    optimizer__learning_rate=1.0,
    eval__interval=0,
  )
  loop.train(change(config, train__steps=4), str(tmp_path))
  assert (
    "config.optimizer.warmup_steps = 8 is cut to config.train.steps = 4\n"
    in capsys.readouterr().err
  )
  assert open_checkpoint(tmp_path).config["optimizer"]["warmup_steps"] == 8
  loop.train(change(config, train__steps=10), str(tmp_path))
  printed = capsys.readouterr().err
  assert "is cut" not in printed
  assert (
    "config.train.steps was 4 and is 10: the learning rate's schedule now ends there, and goes on at 0.5, not at 1\n"
    in printed
  )
  rates = [line["train/learning_rate"] for line in log(tmp_path)]
  assert rates == pytest.approx(
    [0, 1 / 4, 2 / 4, 3 / 4, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1, 1 / 2]
  )


def test_init_from_takes_parameters_alone(config, whole, tmp_path):
  start = change(
    config,
    train__init_from=str(whole),
    train__steps=2,
    optimizer__learning_rate=0.0,
  )
  loop.train(start, str(tmp_path))
  (last,) = [line for line in log(whole) if "validation/loss" in line][1:]
  (mine,) = [line for line in log(tmp_path) if "validation/loss" in line]
  assert (
    mine["validation/loss"] == last["validation/loss"]
  )  # unchanged at learning rate 0
  assert mine["step"] == 2


def test_init_from_says_what_the_model_computes_otherwise(
  config, whole, tmp_path, capsys
):
  loop.train(
    change(
      config, train__init_from=str(whole), train__steps=0, model__remat="full"
    ),
    str(tmp_path / "same"),
  )
  assert (
    f"starting from the parameters of {whole}\n"
    in (printed := capsys.readouterr().err)
    and "there\n" not in printed
  )
  other = change(
    config,
    train__init_from=str(whole),
    train__steps=0,
    model__rope_base=500.0,
    model__norm_eps=1e-6,
  )
  loop.train(other, str(tmp_path / "other"))
  said = "config.model.rope_base is 500.0, and was 10000.0 there; config.model.norm_eps is 1e-06, and was 1e-05 there\n"
  assert said in capsys.readouterr().err


@pytest.mark.parametrize(
  "field, value",
  [
    ("model__ffn_dim", 48),
    ("data__length", 16),
    ("data__seed", 1),
    ("optimizer__learning_rate", 0.5),
    ("train__batch_size", 16),
  ],
)
def test_a_workdir_of_another_run_is_refused(config, whole, field, value):
  name = field.replace("__", ".")
  with pytest.raises(UserError, match=f"{name} was .* and is {value}"):
    loop.train(change(config, **{field: value}), str(whole))


def write_tokenizer(path, shift):
  """A tokenizer of bytes. Each shift gives the bytes other ids."""
  ranks = {bytes([(byte + shift) % 255]): byte for byte in range(255)}
  separator = {tokenizer.SEPARATOR: 255}
  text = tokenizer_json.tokenizer_json(ranks, tokenizer.PATTERN, separator)
  path.write_text(text)


def test_init_from_with_another_tokenizer_is_refused(config, whole, tmp_path):
  """Of as many tokens. The same tokenizer may be in another file."""
  first, other = tmp_path / "first.json", tmp_path / "other.json"
  write_tokenizer(first, shift=0)
  write_tokenizer(other, shift=1)
  streamed = change(config, data__mode="streamed", eval__interval=0)
  start = tmp_path / "start"
  loop.train(
    change(streamed, data__tokenizer=str(first), train__steps=1), str(start)
  )
  first.unlink()

  def start_from(workdir, spec, name):
    changed = change(
      streamed,
      train__init_from=str(workdir),
      data__tokenizer=str(spec),
      train__steps=0,
    )
    loop.train(changed, str(tmp_path / name))

  with pytest.raises(UserError) as refusal:
    start_from(start, other, "refused")
  message = str(refusal.value)
  assert f"init_from = '{start}'" in message
  assert f"tokenizer = '{other}' is another one" in message
  assert f"set config.data.tokenizer to '{start}/tokenizer.json'" in message
  assert contents(tmp_path / "refused") == {}
  # A built-in tokenizer has no copy beside the checkpoint.
  with pytest.raises(UserError, match="trained with the tokenizer 'bytes'"):
    start_from(whole, other, "refused too")
  # The first tokenizer has the ids of "bytes".
  start_from(start, "bytes", "accepted")


def contents(workdir):
  """The bytes of every file of a workdir, except the lock's."""
  files = {}
  for path in sorted(pathlib.Path(workdir).rglob("*")):
    if path.is_file() and path.name != "lock":
      files[str(path.relative_to(workdir))] = path.read_bytes()
  return files


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_refused_resume_changes_nothing(config, tmp_path, monkeypatch, mode):
  text = tmp_path / "text"
  shutil.copytree(pathlib.Path(config.data.source[5:]).parent, text)
  spec = tmp_path / "tokenizer.json"
  write_tokenizer(spec, shift=0)
  config = change(
    config,
    data__source=f"text:{text}/*.txt",
    data__prepared_dir="",
    data__tokenizer=str(spec),
    data__mode=mode,
    train__steps=2,
    eval__interval=0,
  )
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  workdir = tmp_path / "run"
  loop.train(config, str(workdir))
  # What a resume that is not refused would clean up.
  stale = workdir / "checkpoints" / "9.orbax-checkpoint-tmp"
  stale.mkdir()
  (stale / "file").write_text("a save that was interrupted")
  with (workdir / "metrics.jsonl").open("a") as file:
    file.write('{"step": 9, "train/loss": 1.0}\n{"step": 10, "tra')
  whole = contents(workdir)
  longer = change(config, train__steps=4)

  def assert_refused(message, config=longer):
    before = contents(workdir)
    with pytest.raises(UserError, match=message):
      loop.train(config, str(workdir))
    assert contents(workdir) == before

  write_tokenizer(spec, shift=1)
  assert_refused("cannot continue in the data from this checkpoint")
  write_tokenizer(spec, shift=0)

  document = text / "0.txt"
  original = document.read_text()
  document.write_text(f"{original}another line\n")
  assert_refused("cannot continue in the data from this checkpoint")
  document.write_text(original)

  wandb = change(longer, train__wandb_project="project")
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, "wandb", None)
    assert_refused("needs wandb", wandb)

  gpu = change(longer, model__attention_implementation="pallas_gpu")
  assert_refused("attention_implementation = 'pallas_gpu'", gpu)

  # Written after the check in the constructor.
  with monkeypatch.context() as patch:
    patch.setattr(session, "find_checkpoint", lambda *_, **__: None)
    other = session.Session(change(longer, data__seed=1), str(workdir))
  with pytest.raises(UserError, match="data.seed was 0 and is 1"), other:
    pass
  assert contents(workdir) == whole

  arrays = max(
    (workdir / "checkpoints/2/state/d").iterdir(),
    key=lambda file: file.stat().st_size,
  )
  intact = arrays.read_bytes()
  arrays.write_bytes(intact[:-1])
  assert_refused("every checkpoint in")
  arrays.write_bytes(intact)

  assert contents(workdir) == whole
  loop.train(longer, str(workdir))
  assert not stale.exists()
  assert [line["step"] for line in log(workdir)] == [1, 2, 3, 4]


def test_a_refused_start_leaves_no_files(config, whole, tmp_path):
  other = change(
    config, train__init_from=str(whole), model__ffn_dim=48, eval__interval=0
  )
  with pytest.raises(UserError, match="of another model"):
    loop.train(other, str(tmp_path / "run"))
  assert contents(tmp_path / "run") == {}


def at_batch(monkeypatch, number, act):
  """Calls `act` before the loop gets a batch."""
  next_batch, numbers = session.Session.next_batch, itertools.count(1)

  def act_and_get(self):
    if next(numbers) == number:
      act()
    return next_batch(self)

  monkeypatch.setattr(session.Session, "next_batch", act_and_get)


def test_a_second_run_of_the_process_is_refused(
  config, whole, tmp_path, monkeypatch
):
  """As from two threads of a notebook. The first one goes on."""
  refused = []

  def start_second():
    with pytest.raises(UserError, match="another run of this process") as error:
      loop.train(change(config, data__seed=7), str(tmp_path))
    refused.append(error)

  with monkeypatch.context() as patch:
    at_batch(patch, 2, start_second)
    loop.train(config, str(tmp_path))
  assert len(refused) == 1
  assert log(tmp_path) == log(whole)


@pytest.mark.parametrize("moment", ["last step", "sample"])
def test_a_workdir_that_is_replaced_ends_the_run(
  config, whole, tmp_path, monkeypatch, capsys, moment
):
  """Nothing changes in the directory that now has its path."""
  workdir, old = tmp_path / "run", tmp_path / "old"
  config = change(
    config, train__checkpoint_interval=100, train__sample_tokens=2
  )

  def replace():
    workdir.rename(old)
    shutil.copytree(whole, workdir)

  if moment == "sample":
    generate = finish._generate_sample

    def sample(*arguments):
      replace()
      return generate(*arguments)

    monkeypatch.setattr(finish, "_generate_sample", sample)
  else:
    at_batch(monkeypatch, 6, replace)
  with pytest.raises(LostWorkdir, match=f"{workdir} is no longer"):
    train_and_finish(config, workdir)
  assert contents(workdir) == contents(whole)
  steps = manifest.steps(manifest.checkpoint_directory(old))
  assert steps == ([6] if moment == "sample" else [])
  assert "written to" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [None, RuntimeError("a bug")])
def test_a_workdir_that_is_deleted_ends_the_run(
  config, tmp_path, monkeypatch, error
):
  """It is not made again, and an error of the run's own is not hidden."""
  workdir = tmp_path / "run"

  def delete():
    shutil.rmtree(workdir)
    if error is not None:
      raise error

  config = change(config, train__checkpoint_interval=100)
  at_batch(monkeypatch, 4, delete)
  expected = LostWorkdir if error is None else RuntimeError
  with pytest.raises(expected, match="is no longer|a bug"):
    loop.train(config, str(workdir))
  assert not workdir.exists()


def test_a_path_in_which_orbax_would_save_no_arrays_is_refused(
  config, tmp_path
):
  path = tmp_path / "lr[1]" / "run"
  with pytest.raises(UserError, match=r"below the directory 'lr\[1\]'"):
    loop.train(config, str(path))
  assert not path.exists()


def test_vocabularies_that_differ(config, tmp_path):
  with pytest.raises(
    UserError, match="config.model.vocab_size = 100: .* 'bytes' has 256"
  ):
    loop.train(change(config, model__vocab_size=100), str(tmp_path))


def spoil(monkeypatch, bad, *, first=0, interrupt_at=None):
  """Gives the steps in `bad` one weight that makes their loss NaN or infinite, and sends SIGTERM before one step if asked."""
  original, steps = session.put_batch, iter(range(first + 1, 1000))

  def put_batch(batch, mesh):
    step = next(steps)
    if step == interrupt_at:
      os.kill(os.getpid(), signal.SIGTERM)
    if step in bad:
      batch = {**batch, "weights": batch["weights"].copy()}
      batch["weights"][0, 0] = bad[step]
    return original(batch, mesh)

  monkeypatch.setattr(session, "put_batch", put_batch)


def test_bad_batches_are_skipped_and_a_resume_among_them_is_exact(
  config, tmp_path, monkeypatch, capsys
):
  config, bad = change(config, eval__interval=0), {3: np.inf, 4: np.nan}
  with monkeypatch.context() as patch:
    spoil(patch, bad)
    loop.train(config, str(tmp_path / "whole"))
  lines = [line for line in log(tmp_path / "whole") if "train/loss" in line]
  assert [
    (line["train/skipped_in_a_row"], line["train/skipped_steps"])
    for line in lines
  ] == [(0, 0), (0, 0), (1, 1), (2, 2), (0, 2), (0, 2)]
  printed = capsys.readouterr().err
  assert (
    "step 3: update skipped (loss nan); 1 so far, training continues\n"
    in printed
  )
  assert (
    "step 4: update skipped (loss nan); 2 so far, 2 in a row, training"
    " continues\n"
  ) in printed
  assert printed.count("update skipped") == 2
  abstract = build(config, make_mesh(config.mesh)).abstract_state.params
  before, skipped, after = (
    open_checkpoint(tmp_path / "whole", step).params(abstract)
    for step in (2, 4, 6)
  )
  chex.assert_trees_all_equal(before, skipped)
  assert np.any(
    np.asarray(before["embedding"]) != np.asarray(after["embedding"])
  )

  with monkeypatch.context() as patch:
    spoil(patch, bad, interrupt_at=3)
    loop.train(config, str(tmp_path / "resumed"))
  with monkeypatch.context() as patch:
    spoil(patch, bad, first=3)
    loop.train(config, str(tmp_path / "resumed"))
  assert "resuming from step 3" in capsys.readouterr().err
  assert log(tmp_path / "resumed") == log(
    tmp_path / "whole"
  )  # the averages among it


@pytest.mark.parametrize(
  "steps, interval, keep, named",
  [
    (20, 1, 9, r"is .*/checkpoints/3\. "),
    (6, 3, 1, r"is .*/checkpoints/3\. "),
    *full(
      [
        (20, 2, 3, r"is .*/checkpoints/2\. "),
        (20, 2, 1, r"is .*/checkpoints/4\. "),
        (20, 100, 3, "there is no checkpoint"),
      ]
    ),
  ],
)
def test_too_many_bad_steps_in_a_row_stop_the_run(
  config, tmp_path, monkeypatch, steps, interval, keep, named
):
  """Step 2 was skipped alone; from step 4 on all are. What is saved among them holds the parameters of step 3; step 6 may be the last."""
  fields = dict(
    train__max_skipped_in_a_row=3,
    train__log_interval=100,
    train__steps=steps,
    eval__interval=0,
  )
  config = change(
    config,
    train__checkpoint_interval=interval,
    train__keep_checkpoints=keep,
    **fields,
  )
  spoil(monkeypatch, {step: np.nan for step in (2, *range(4, 21))})
  with pytest.raises(
    UserError,
    match=f"stopped at step 6: 3 steps in a row .* the last one has loss nan; .*{named}",
  ):
    loop.train(config, str(tmp_path))
  assert [line["step"] for line in log(tmp_path)] == [1, 2, 4, 5, 6]


@pytest.fixture
def hub_source(tmp_path, monkeypatch):
  """Four Parquet files on a Hub, of 4,800 tokens each, as bytes."""
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


def test_a_run_keeps_the_number_of_its_files(config, tmp_path, hub_source):
  """The workdir has the mode and the files that the run used."""
  workdir = str(tmp_path / "run")
  config = change(
    config,
    data__source=hub_source,
    data__prepared_dir=str(tmp_path / "rows"),
    data__mode="auto",
    eval__interval=0,
    train__checkpoint_interval=100,
  )
  loop.train(config, workdir)
  kept = config_file.read(f"{workdir}/{config_file.NAME}").data
  assert kept.mode == "prepared"
  assert kept.files == 1
  # More steps need more files.
  longer = change(config, train__steps=40)
  with pytest.raises(UserError, match="config.data.files was 1 .* is 3"):
    loop.train(longer, workdir)
  loop.train(change(longer, data__files=1), workdir)
  assert log(workdir)[-1]["step"] == 40


def attention_lines(printed):
  return [line for line in printed.splitlines() if "attention:" in line]


def test_one_line_says_which_attention_is_used(
  config, tmp_path, capsys, caplog
):
  """Neither the evaluation nor the sample adds another one."""
  choice._reported.clear()
  with caplog.at_level("INFO", logger=choice.__name__):
    train_and_finish(change(config, train__sample_tokens=5), tmp_path)
  assert attention_lines(capsys.readouterr().err) == [
    "diffjax: attention: chunked (XLA), because this is a CPU"
  ]
  warnings = [record for record in caplog.records if record.levelno > 20]
  assert warnings == []


def test_the_line_comes_before_the_first_step(
  config, tmp_path, capsys, monkeypatch
):
  """Compiling it may take minutes."""
  seen = []
  record_dispatched_step = session.Session.record_dispatched_step

  def logged(self, step, measured):
    if step == 1:
      seen.extend(attention_lines(capsys.readouterr().err))
    record_dispatched_step(self, step, measured)

  monkeypatch.setattr(session.Session, "record_dispatched_step", logged)
  loop.train(change(config, train__steps=2), str(tmp_path))
  assert len(seen) == 1


def test_a_named_attention_is_said(config, tmp_path, capsys):
  named = change(
    config, train__steps=2, model__attention_implementation="two_call"
  )
  loop.train(named, str(tmp_path))
  assert attention_lines(capsys.readouterr().err) == [
    "diffjax: attention: two_call (stock attention), because"
    " config.model.attention_implementation names it"
  ]
