"""Several processes train as one, stop together, and end if one of them fails.

The processes are real. They communicate over the loopback interface.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import prepared
from diffjax.host.lock import lock
from diffjax.parallel import processes
from diffjax.parallel.processes import connected
from tests.harness import ROOT
from tests.harness.commands import Commands, StartedCommand

# Fields of the log that depend on the time.
TIME_FIELDS = {
  "time",
  "train/tokens_per_second",
  "train/step_seconds",
  "train/wait_fraction",
}
# The line of docs/devices.md that starts two processes, and the command in it.
PAGE = (ROOT / "docs/devices.md").read_text()
LINE, COMMAND = re.search(
  r"^(for i in 0 1; do (python -m diffjax\.train .*) & done; wait)$",
  PAGE,
  re.MULTILINE,
).groups()
NUM_STEPS = 60
# Training writes a text of 5 generated tokens.
SAMPLED = "--config.train.sample_tokens=5"

# The training command. The process kills itself while it writes the checkpoint
# of step 30.
TRAIN_AND_DIE_IN_THE_SAVE_OF_STEP_30 = """
import os, signal
from diffjax.cli import command
from diffjax.train import main
from diffjax.training import checkpoint

save = checkpoint.ocp.save_checkpointables_async

def save_and_die(path, *args, **options):
  response = save(path, *args, **options)
  if path.name == "30":
    os.kill(os.getpid(), signal.SIGKILL)
  return response

checkpoint.ocp.save_checkpointables_async = save_and_die
command.run(main)
"""


def training_in_directory(directory: pathlib.Path) -> str:
  """Returns the training command in a directory, for relative paths of data."""
  return f"""
import os
from diffjax.cli import command
from diffjax.train import main

def main_in_directory(config):
  os.chdir({str(directory)!r})
  main(config)

command.run(main_in_directory)
"""


def program_that_fails_in(process: int) -> str:
  """Returns a program for several processes, of which one fails.

  It fails when the directory --workdir exists. The other processes wait for it
  in a collective.
  """
  return PROGRAM_THAT_FAILS.replace("FAILING", str(process))


PROGRAM_THAT_FAILS = """
import pathlib, sys, time
from diffjax.config import UserError
from diffjax.parallel.processes import connected, gather_objects

flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
process_id = int(flags["process_id"])
num_processes = int(flags["num_processes"])
with connected(flags["coordinator"], num_processes, process_id):
  gather_objects(process_id)
  print("connected", flush=True)
  if process_id == FAILING:
    while not pathlib.Path(flags["workdir"]).exists():
      time.sleep(0.05)
    raise UserError("nothing left to do")
  gather_objects(process_id)
"""


def free_port() -> int:
  """Returns a port at which nothing listens."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


def write_documents(path: pathlib.Path, index: int) -> None:
  """Writes a text file of 20 lines."""
  lines = []
  for line in range(20):
    number = line * index % 97
    lines.append(f"document {index}, line {line}: {number}\n")
  path.write_text("".join(lines))


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
  """Flags that make the documented run small. Its rows are prepared."""
  directory = tmp_path_factory.mktemp("data")
  for index in range(60):
    write_documents(directory / f"{index}.txt", index)
  data = dict(
    source=f"text:{directory}/*.txt",
    validation_fraction=0.2,
    length=32,
    prepared_dir=str(directory / "rows"),
  )
  prepared.prepare(DataConfig(**data), workers=1)
  fields: dict[str, Any] = {
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
    "model.ffn_dim": 32,
    "optimizer.warmup_steps": 2,
    "eval.interval": 20,
    "eval.rows": 16,
    "train.steps": NUM_STEPS,
    "train.batch_size": 8,
    "train.log_interval": 1,
    "train.checkpoint_interval": 10,
    "train.sample_tokens": 0,
  }
  for name, value in data.items():
    fields[f"data.{name}"] = value
  return [f"--config.{name}={value}" for name, value in fields.items()]


def process_environment() -> dict[str, str]:
  """Returns an environment in which `python` is the tests' interpreter."""
  interpreters = pathlib.Path(sys.executable).parent
  return os.environ | {"PATH": f"{interpreters}:{os.environ['PATH']}"}


class Result(NamedTuple):
  """How processes ended.

  Attributes:
    codes: the exit code of each process.
    messages: the last error of each process, or its last line.
  """

  codes: list[int]
  messages: list[str]


class ProcessGroup:
  """A context in which several processes run the documented command."""

  def __init__(
    self,
    commands: Commands,
    workdir: pathlib.Path,
    overrides: Sequence[str],
    *,
    count: int = 2,
    own_flags: Mapping[int, Sequence[str]] | None = None,
    programs: Mapping[int, str] | None = None,
    is_read: bool = True,
  ):
    """Starts the processes.

    Args:
      commands: starts the processes.
      workdir: the directory of the run. Output goes to files beside it.
      overrides: flags of all processes.
      count: the number of processes.
      own_flags: further flags of some processes.
      programs: code that some processes run in place of the command.
      is_read: whether anything reads the output.
    """
    own_flags = own_flags or {}
    programs = programs or {}
    port = free_port()
    self.processes: list[StartedCommand] = []
    self._outputs: list[pathlib.Path] = []
    for index in range(count):
      command = COMMAND.replace("runs/two", str(workdir))
      command = command.replace("9476", str(port))
      command = command.replace("=2 ", f"={count} ")
      command = command.replace("$i", str(index))
      # The command begins with python -m diffjax.train.
      _, _, module, *flags = command.split()
      output = pathlib.Path(f"{workdir}.{index}.log")
      output.write_text("")
      process = commands.start(
        module,
        *flags,
        *overrides,
        *own_flags.get(index, []),
        output=output if is_read else None,
        code=programs.get(index),
      )
      self.processes.append(process)
      self._outputs.append(output)

  def output(self, index: int) -> str:
    """Returns what a process has printed."""
    return self._outputs[index].read_text()

  def wait_for_output(self, text: str, index: int = 0) -> None:
    """Waits until a process has printed a text."""
    deadline = time.monotonic() + 150
    while text not in self.output(index):
      assert time.monotonic() < deadline, self.output(index)
      assert self.processes[index].poll() is None, self.output(index)
      time.sleep(0.02)

  def wait(self, timeout: float = 150) -> Result:
    """Waits until all processes have ended."""
    deadline = time.monotonic() + timeout
    codes = []
    messages = []
    for index, process in enumerate(self.processes):
      remaining = max(1.0, deadline - time.monotonic())
      codes.append(process.wait(timeout=remaining))
      messages.append(last_message(self.output(index)))
    return Result(codes, messages)

  def __enter__(self) -> "ProcessGroup":
    return self

  def __exit__(self, *_: Any) -> None:
    for process in self.processes:
      process.kill()
      process.wait(timeout=60)


def last_message(output: str) -> str:
  """Returns the last error of a process, or its last line."""
  lines = output.splitlines() or [""]
  for line in reversed(lines):
    if line.startswith("error: "):
      return line
  return lines[-1]


def read_log(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the lines of a run's log, without `TIME_FIELDS`."""
  lines = []
  for text in (workdir / "metrics.jsonl").read_text().splitlines():
    line = json.loads(text)
    for name in TIME_FIELDS & line.keys():
      del line[name]
    lines.append(line)
  return lines


def assert_logs_close(
  actual: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
  """Checks that two runs read the same batches and have the same metrics.

  Several devices add numbers in another order than one.
  """
  for line, expected_line in zip(actual, expected, strict=True):
    assert line.keys() == expected_line.keys()
    assert line["step"] == expected_line["step"]
    assert line.get("train/tokens") == expected_line.get("train/tokens")
    for name, value in expected_line.items():
      # The log has null for numbers that are not finite. They become NaN.
      np.testing.assert_allclose(
        np.array(line[name], float),
        np.array(value, float),
        rtol=1e-4,
        err_msg=f"{name} of step {line['step']}",
      )


def saved_steps(workdir: pathlib.Path) -> list[int]:
  """Returns the steps of the complete checkpoints of a run."""
  steps = []
  for manifest in workdir.glob("checkpoints/*/manifest.json"):
    steps.append(int(manifest.parent.name))
  return sorted(steps)


def run_documented_line(
  workdir: pathlib.Path, overrides: Sequence[str]
) -> subprocess.CompletedProcess:
  """Runs the documented line for two processes, in a shell.

  Only the directory and the port differ from the documentation.
  """
  line = LINE.replace("runs/two", str(workdir))
  line = line.replace("9476", str(free_port()))
  line = line.replace(" & done", f" {' '.join(overrides)} & done")
  result = subprocess.run(
    ["bash", "-c", line],
    cwd=ROOT,
    env=process_environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  output = result.stdout + result.stderr
  assert result.returncode == 0, output
  assert saved_steps(workdir)[-1] == NUM_STEPS, output
  return result


@pytest.fixture(scope="module")
def whole_run(command, overrides, tmp_path_factory):
  """The directory of an uninterrupted run of two processes."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  with ProcessGroup(command, workdir, overrides) as group:
    result = group.wait()
  assert result.codes == [0, 0], result.messages
  return workdir


class StoppedRun(NamedTuple):
  """A run of two processes. The second process got SIGTERM."""

  workdir: pathlib.Path
  result: Result
  # The step after which both processes stopped.
  step: int


@pytest.fixture(scope="module")
def stopped_run(command, overrides, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("stopped") / "run"
  with ProcessGroup(command, workdir, [*overrides, SAMPLED]) as group:
    group.wait_for_output("step 15/")
    group.processes[1].send_signal(signal.SIGTERM)
    result = group.wait()
  match = re.search(
    rf"stopped at step (\d+) of {NUM_STEPS}, saved", result.messages[0]
  )
  assert match is not None, result.messages
  return StoppedRun(workdir, result, int(match[1]))


@pytest.fixture(scope="module")
def log_of_one_process(command, overrides, tmp_path_factory):
  """The log of the documented command without other processes."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  documented_flags, _, _ = COMMAND.partition(" --workdir")
  _, _, *module_and_flags = documented_flags.split()
  result = command(
    *module_and_flags,
    f"--workdir={workdir}",
    *overrides,
    # Checkpoints do not change the log.
    f"--config.train.checkpoint_interval={NUM_STEPS}",
  )
  assert result.returncode == 0, result.stderr
  return read_log(workdir)


# Training, stopping and resuming.


@pytest.mark.full
def test_two_processes_train_as_one(stopped_run, log_of_one_process):
  """The log of two processes has the numbers that one process logs alone.

  The run of two processes was stopped earlier, so only its steps are compared.
  """
  expected = []
  for line in log_of_one_process:
    if line["step"] <= stopped_run.step:
      expected.append(line)

  assert_logs_close(read_log(stopped_run.workdir), expected)


def test_sigterm_in_one_process_stops_both_after_a_checkpoint(stopped_run):
  """The fixture sends SIGTERM to process 1 after step 15."""
  result = stopped_run.result

  # A run that was stopped is no failure: both exit with status 0.
  assert result.codes == [0, 0]
  assert "SIGTERM: saving" in result.messages[1]
  assert 15 <= stopped_run.step < NUM_STEPS
  assert saved_steps(stopped_run.workdir)[-1] == stopped_run.step


@pytest.mark.full
def test_the_documented_line_resumes_a_stopped_run(
  stopped_run, log_of_one_process, overrides, tmp_path
):
  """The line of docs/devices.md starts two processes again."""
  workdir = shutil.copytree(stopped_run.workdir, tmp_path / "run")

  result = run_documented_line(workdir, [*overrides, SAMPLED])

  assert f"resuming from step {stopped_run.step}" in result.stderr
  assert_logs_close(read_log(workdir), log_of_one_process)
  # Only one process prints the last step and writes files.
  assert result.stdout.count("step 60/60  loss") == 1
  assert (workdir / "loss.png").exists()
  assert (workdir / "sample.txt").exists()


@pytest.mark.full
def test_training_needs_no_terminal(command, overrides, whole_run, tmp_path):
  """A run goes on if nothing reads its output any more."""
  workdir = tmp_path / "run"
  with ProcessGroup(command, workdir, overrides, is_read=False) as group:
    result = group.wait()

  assert result.codes == [0, 0]
  assert read_log(workdir) == read_log(whole_run)


def hangup_signal() -> signal.Signals:
  """Returns SIGHUP, or SIGTERM under nohup, where processes ignore SIGHUP."""
  if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
    return signal.SIGHUP
  return signal.SIGTERM


def write_jsonl_documents(path: pathlib.Path, index: int) -> None:
  """Writes 100 documents, which are longer in files of a larger index.

  So processes read their files at different speeds.
  """
  lines = []
  for line in range(100):
    text = f"document {line} of {index}: {line * index % 97}\n"
    document = {"text": text * (1 + 3 * index)}
    lines.append(json.dumps(document) + "\n")
  path.write_text("".join(lines))


@pytest.mark.full
def test_each_process_resumes_its_own_part_of_a_stream(
  command, overrides, tmp_path
):
  """A resumed run continues at different places in the files of its processes.

  Then it reads what an uninterrupted run reads, so it has the same log.
  """
  for index in range(4):
    write_jsonl_documents(tmp_path / f"{index}.jsonl", index)
  streamed = [
    *overrides,
    "--config.data.mode=streamed",
    f"--config.data.source=jsonl:{tmp_path}/*.jsonl",
  ]
  uninterrupted_workdir = tmp_path / "uninterrupted"
  with ProcessGroup(command, uninterrupted_workdir, streamed) as group:
    assert group.wait().codes == [0, 0]

  workdir = tmp_path / "run"
  with ProcessGroup(command, workdir, streamed) as group:
    # Late in the run of 60 steps. Files of different lengths were read by then.
    group.wait_for_output("step 42/")
    group.processes[0].send_signal(hangup_signal())
    assert group.wait().codes == [0, 0]
  with ProcessGroup(command, workdir, streamed) as group:
    assert group.wait().codes == [0, 0]
    assert "resuming from step" in group.output(0)

  assert read_log(workdir) == read_log(uninterrupted_workdir)


# One process ends, and all others end too.


def kill_and_check_others(group: ProcessGroup, killed: int) -> None:
  """Kills a process, and checks that the others end within a minute."""
  group.processes[killed].kill()
  start = time.monotonic()
  codes, messages = group.wait(timeout=60)
  assert time.monotonic() - start < 60
  for index in range(len(codes)):
    if index == killed:
      continue
    assert codes[index] == 1
    assert re.match(
      rf"error: process {index} has lost the connection with the others: .*;"
      " start all processes again with the same command to",
      messages[index],
    )


@pytest.mark.full
def test_a_run_continues_after_the_coordinator_was_killed(
  command, overrides, whole_run, tmp_path
):
  """The coordinator is process 0. The same command starts the run again."""
  workdir = tmp_path / "run"
  with ProcessGroup(command, workdir, overrides) as group:
    # The checkpoint of step 20 has started, so step 10 is complete.
    group.wait_for_output("step 25/")
    kill_and_check_others(group, killed=0)

  with ProcessGroup(command, workdir, overrides) as group:
    assert group.wait().codes == [0, 0]
    assert "resuming from step" in group.output(0)

  assert read_log(workdir) == read_log(whole_run)


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_an_incomplete_checkpoint_is_not_used(
  command, overrides, whole_run, tmp_path, killed
):
  """A process is killed while it writes the checkpoint of step 30."""
  workdir = tmp_path / "run"
  programs = {killed: TRAIN_AND_DIE_IN_THE_SAVE_OF_STEP_30}
  with ProcessGroup(command, workdir, overrides, programs=programs) as group:
    codes, _ = group.wait()
  assert codes[killed] == -signal.SIGKILL
  assert codes[1 - killed] == 1
  assert saved_steps(workdir) == [10, 20]

  with ProcessGroup(command, workdir, overrides) as group:
    assert group.wait().codes == [0, 0]
    assert "resuming from step 20" in group.output(0)

  assert read_log(workdir) == read_log(whole_run)


@pytest.mark.full
def test_four_processes_share_parameters(
  command, overrides, whole_run, tmp_path
):
  """Four processes, interrupted twice, log what two uninterrupted ones log."""
  log_of_two_processes = read_log(whole_run)
  workdir = tmp_path / "run"
  shared = [
    *overrides,
    # The sample also uses the shared parameters.
    SAMPLED,
    "--config.mesh.data=2",
    "--config.mesh.fsdp=2",
  ]

  with ProcessGroup(command, workdir, shared, count=4) as group:
    # The checkpoint of step 10 has started.
    group.wait_for_output("step 15/")
    kill_and_check_others(group, killed=2)
  with ProcessGroup(command, workdir, shared, count=4) as group:
    # The first line about a step contains its loss.
    group.wait_for_output("  loss ")
    group.processes[3].send_signal(signal.SIGTERM)
    assert group.wait().codes == [0, 0, 0, 0]
  with ProcessGroup(command, workdir, shared, count=4) as group:
    assert group.wait().codes == [0, 0, 0, 0]
    assert group.output(0).count("resuming from step") == 1

  assert_logs_close(read_log(workdir), log_of_two_processes)


@pytest.mark.full
def test_ctrl_c_in_one_process_ends_a_process_in_a_collective(
  command, tmp_path
):
  """Process 1 waits for process 0, which gets the signal of Ctrl-C, SIGINT."""
  program = program_that_fails_in(process=0)
  programs = {0: program, 1: program}
  # Process 0 waits for this directory.
  missing_workdir = tmp_path / "missing"
  with ProcessGroup(command, missing_workdir, [], programs=programs) as group:
    group.wait_for_output("connected", index=0)
    group.wait_for_output("connected", index=1)
    group.processes[0].send_signal(signal.SIGINT)
    result = group.wait(timeout=60)

  assert result.codes == [128 + signal.SIGINT, 1]
  assert result.messages == [
    "error: interrupted",
    "error: process 0 stopped: interrupted",
  ]


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_a_paused_process_learns_the_reason_of_the_end(
  command, tmp_path, failing
):
  """Process 2 pauses while another process fails."""
  program = program_that_fails_in(failing)
  programs = {0: program, 1: program, 2: program}
  workdir = tmp_path / "fail"
  with ProcessGroup(command, workdir, [], count=3, programs=programs) as group:
    for index in range(3):
      group.wait_for_output("connected", index)
    group.processes[2].send_signal(signal.SIGSTOP)
    # Now the program fails.
    workdir.mkdir()
    # By then, the other processes have ended.
    time.sleep(processes._GRACE_SECONDS + 3)
    group.processes[2].send_signal(signal.SIGCONT)
    result = group.wait(timeout=60)

  expected = [f"error: process {failing} stopped: nothing left to do"] * 3
  expected[failing] = "error: nothing left to do"
  assert result.codes == [1, 1, 1]
  assert result.messages == expected


@pytest.mark.full
def test_all_processes_end_with_the_reason_of_one(command, overrides, tmp_path):
  """Only process 0 locks the directory. Here the test has the lock already."""
  workdir = tmp_path / "run"
  with lock(workdir), ProcessGroup(command, workdir, overrides) as group:
    codes, messages = group.wait()

  reason = rf".*/run is in use by process {os.getpid()} on "
  assert codes == [1, 1]
  assert re.match(f"error: {reason}", messages[0])
  assert re.match(f"error: process 0 stopped: {reason}", messages[1])


def data_worker_of(process: StartedCommand) -> int:
  """Returns the id of the only data worker of a process."""
  workers = []
  for children in pathlib.Path(f"/proc/{process.pid}/task").glob("*/children"):
    for child in children.read_text().split():
      command_line = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
      if b"spawn_main" in command_line:
        workers.append(int(child))
  (worker,) = workers
  return worker


@pytest.mark.full
def test_all_processes_end_if_a_data_worker_dies(command, overrides, tmp_path):
  """Process 1 loses its worker, and process 0 prints the reason too."""
  flags = [
    *overrides,
    "--config.data.num_workers=1",
    # The run lasts longer than this test.
    "--config.train.steps=100000",
  ]
  with ProcessGroup(command, tmp_path / "run", flags) as group:
    group.wait_for_output("step 5/")
    worker = data_worker_of(group.processes[1])
    os.kill(worker, signal.SIGKILL)
    codes, messages = group.wait(timeout=60)

  # The beginning of "data worker 123 (SIGKILL …".
  reason = rf"data worker {worker} \(SIGKILL"
  assert codes == [1, 1]
  assert re.match(f"error: {reason}", messages[1])
  assert re.match(f"error: process 1 stopped: {reason}", messages[0])


@pytest.mark.full
def test_all_processes_end_after_too_many_skipped_steps(
  command, overrides, tmp_path
):
  """Training skips steps whose loss is not finite."""
  diverging = [
    *overrides,
    # With this rate, the loss is soon not finite.
    "--config.optimizer.learning_rate=1e30",
    "--config.train.max_skipped_in_a_row=3",
  ]
  with ProcessGroup(command, tmp_path / "run", diverging) as group:
    codes, messages = group.wait()

  assert codes == [1, 1]
  for message in messages:
    assert re.match(
      "error: (process . stopped: )?stopped at step .*:"
      " 3 steps in a row were skipped",
      message,
    )


@pytest.mark.parametrize(
  "error",
  [
    OSError(28, "No space left on device"),
    RuntimeError("a bug"),
    ValueError(),
    MemoryError(),
  ],
  ids=repr,
)
def test_an_error_of_a_single_process_is_not_changed(monkeypatch, error):
  """`connected` ends only processes that have others to inform.

  Without others, an error passes through it.
  """
  # JAX raises this error on a machine without a cluster.
  no_cluster = ValueError("coordinator_address should be defined.")
  initialize = mock.Mock(side_effect=no_cluster)
  end_process = mock.Mock()
  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  monkeypatch.setattr(processes.signals, "end", end_process)

  with pytest.raises(type(error)) as caught, connected():
    raise error

  assert caught.value is error
  end_process.assert_not_called()


def test_a_reason_is_requested_with_a_timeout_in_milliseconds():
  """A process asks JAX's coordination service why another one ended the run.

  The client of the service expects milliseconds.
  """

  class Client:
    def blocking_key_value_get(self, key, timeout_in_ms):
      return f"reason after {timeout_in_ms} ms"

  shared_reason = processes._SharedReason(Client())

  assert shared_reason.wait(seconds=2.5) == "reason after 2500 ms"


# Different settings and data.


def test_different_settings_are_named_with_their_processes(monkeypatch):
  settings = {
    "config": {"train": {"batch_size": 8, "seed": 0}},
    "--workdir": "a",
  }
  # The third process has another seed, and no workdir.
  third_settings = {"config": {"train": {"batch_size": 8, "seed": 3}}}
  # The settings of processes 0, 1 and 2.
  gathered = [settings, settings, third_settings]
  gather_objects = mock.Mock(return_value=gathered)
  monkeypatch.setattr(processes, "gather_objects", gather_objects)

  with pytest.raises(UserError) as caught:
    processes.check_same(settings)

  message = str(caught.value)
  assert "config.train.seed is 0 in process 0 and 3 in process 2" in message
  assert "--workdir is 'a' in process 0 and None in process 2" in message
  assert "batch_size" not in message


def test_equal_settings_are_accepted(monkeypatch):
  """`check_same` gathers the settings of all processes, here of two."""
  settings = {"config": {"train": {"seed": 0}}}
  gather_objects = mock.Mock(return_value=[settings, settings])
  monkeypatch.setattr(processes, "gather_objects", gather_objects)

  processes.check_same(settings)


def test_equal_data_are_accepted(monkeypatch):
  """If all processes have the same digest of their files, only it is sent."""
  files = {"the number of files": 1, "size of a.txt": 10}
  gather_objects = mock.Mock(return_value=["digest", "digest"])
  monkeypatch.setattr(processes, "gather_objects", gather_objects)

  processes.check_same_data(files)

  gather_objects.assert_called_once()


def test_different_data_are_named_with_their_processes(monkeypatch):
  files = {"the number of files": 2, "size of a.txt": 10, "size of b.txt": 20}
  other_files = {"the number of files": 1, "size of a.txt": 10}
  # `check_same_data` gathers digests, the files and the directories.
  gather_objects = mock.Mock(
    side_effect=[
      ["digest", "digest", "other digest"],
      [files, files, other_files],
      ["/0 on host", "/1 on host", "/2 on host"],
    ]
  )
  monkeypatch.setattr(processes, "gather_objects", gather_objects)

  with pytest.raises(UserError) as caught:
    processes.check_same_data(files)

  message = str(caught.value)
  assert "the number of files is 2 in process 0 and 1 in process 2" in message
  assert "size of b.txt is 20 in process 0 and None in process 2" in message
  assert "process 2 runs in /2 on host" in message
  assert "size of a.txt" not in message


def test_only_the_first_differences_of_data_are_named(monkeypatch):
  """The message names four of nine different files."""
  files = {f"size of {index}.txt": 10 for index in range(9)}
  other_files = {f"size of {index}.txt": 20 for index in range(9)}
  digests_of_processes = ["digest", "other digest"]
  files_of_processes = [files, other_files]
  directories_of_processes = ["/0 on host", "/1 on host"]
  # `check_same_data` gathers these from all processes, in this order.
  gather_objects = mock.Mock(
    side_effect=[
      digests_of_processes,
      files_of_processes,
      directories_of_processes,
    ]
  )
  monkeypatch.setattr(processes, "gather_objects", gather_objects)

  with pytest.raises(UserError) as caught:
    processes.check_same_data(files)

  message = str(caught.value)
  assert message.count("size of ") == 4
  assert "size of 0.txt is 10 in process 0 and 20 in process 1" in message
  assert "and 5 more" in message


@pytest.mark.full
def test_all_processes_reject_different_data(command, overrides, tmp_path):
  """Both processes read *.jsonl, each in its own directory."""
  directory_0 = tmp_path / "0"
  directory_0.mkdir()
  for index in range(4):
    write_jsonl_documents(directory_0 / f"{index}.jsonl", index)
  directory_1 = shutil.copytree(directory_0, tmp_path / "1")
  (directory_1 / "3.jsonl").unlink()
  programs = {
    0: training_in_directory(directory_0),
    1: training_in_directory(directory_1),
  }
  streamed = [
    *overrides,
    "--config.data.mode=streamed",
    "--config.data.source=jsonl:*.jsonl",
    # Evaluates all rows.
    "--config.eval.rows=-1",
  ]

  with ProcessGroup(
    command, tmp_path / "run", streamed, programs=programs
  ) as group:
    codes, messages = group.wait(timeout=100)

  assert codes == [1, 1], messages
  for message in messages:
    assert (
      "the number of files of 'jsonl:*.jsonl' is 4 in process 0 and 3 in"
      " process 1; the size of 3.jsonl is "
    ) in message
    assert f"process 1 runs in {directory_1} on " in message
  assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_all_processes_reject_different_configs(command, overrides, tmp_path):
  own_flags = {1: ["--config.train.batch_size=16", "--config.data.seed=3"]}

  with ProcessGroup(
    command, tmp_path / "run", overrides, own_flags=own_flags
  ) as group:
    codes, messages = group.wait()

  assert codes == [1, 1]
  for message in messages:
    assert message.startswith("error: ")
    assert (
      "config.train.batch_size is 8 in process 0 and 16 in process 1"
    ) in message
    assert "config.data.seed is 0 in process 0 and 3 in process 1" in message
  assert not (tmp_path / "run").exists()


# Connecting.


@pytest.mark.full
@pytest.mark.parametrize(("killed", "remaining"), [(1, 0), (0, 1)])
def test_a_process_without_the_other_ends_after_the_timeout(
  command, overrides, tmp_path, killed, remaining
):
  """One of two processes is killed right after its start."""
  flags = [*overrides, "--connect_timeout=1"]
  with ProcessGroup(command, tmp_path / "run", flags) as group:
    group.processes[killed].kill()
    codes, messages = group.wait(timeout=60)

  assert codes[remaining] == 1
  assert re.match(
    r"error: could not connect with the other processes \(2 in all; process 0"
    r" listens at localhost:\d+\) within 1 s: .*--connect_timeout",
    messages[remaining],
  )


def connect(**arguments: Any) -> None:
  """Connects with the other processes, and ends at once."""
  with connected(**arguments):
    pass


def test_a_coordinator_without_processes_is_rejected():
  """The three settings of several processes belong together."""
  message = "--num_processes=N and --process_id=I: missing"
  with pytest.raises(UserError, match=message):
    connect(coordinator="localhost:9476")


def test_processes_without_a_coordinator_are_rejected():
  """The three settings of several processes belong together."""
  message = "--coordinator=HOST:PORT: missing"
  with pytest.raises(UserError, match=message):
    connect(num_processes=2, process_id=0)


def test_a_process_id_must_be_less_than_the_number_of_processes():
  """The ids of two processes are 0 and 1."""
  message = "--process_id=2: must be less than --num_processes=2"
  with pytest.raises(UserError, match=message):
    connect(coordinator="localhost:9476", num_processes=2, process_id=2)


def test_a_coordinator_without_a_port_is_rejected():
  message = "--coordinator=localhost: must be HOST:PORT"
  with pytest.raises(UserError, match=message):
    connect(coordinator="localhost", num_processes=2, process_id=0)


def test_a_port_in_use_is_rejected():
  with socket.socket() as listener:
    # Port 0 stands for any free port.
    listener.bind(("localhost", 0))
    listener.listen()
    address = f"localhost:{listener.getsockname()[1]}"

    message = f"--coordinator={address}: process 0 cannot listen"
    with pytest.raises(UserError, match=message):
      connect(coordinator=address, num_processes=2, process_id=0)
