"""Several real processes over loopback: they train as one, stop as one, and none outlives another."""

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

import numpy as np
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import prepared
from diffjax.host.lock import lock
from diffjax.parallel import processes
from diffjax.parallel.processes import connected

ROOT = pathlib.Path(__file__).parents[2]
# Fields that tell the time, not the run.
CLOCK = {
  "time",
  "train/tokens_per_second",
  "train/step_seconds",
  "train/wait_fraction",
}
# The line of docs/devices.md for two processes on one machine, and the command in it.
PAGE = (ROOT / "docs/devices.md").read_text()
LINE, COMMAND = re.search(
  r"^(for i in 0 1; do (python -m diffjax\.train .*) & done; wait)$",
  PAGE,
  re.MULTILINE,
).groups()
STEPS = 60
SAMPLED = "--config.train.sample_tokens=5"


# The command, in which a process kills itself while the checkpoint of step 30 is written.
KILLED_IN_A_SAVE = """
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


# A program of which one process fails, once it is told to by a file, while the others wait for it in a collective.
ONE_FAILS = """
import pathlib, sys, time
from diffjax.config import UserError
from diffjax.parallel.processes import connected, gather_objects
flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
me = int(flags["process_id"])
with connected(flags["coordinator"], int(flags["num_processes"]), me):
  gather_objects(me)
  print("together", flush=True)
  while me == FAILING and not pathlib.Path(flags["workdir"]).exists():
    time.sleep(0.05)
  if me == FAILING:
    raise UserError("nothing left to do")
  gather_objects(me)
"""


def free_port():
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
  """Flags that make the documented run a tiny one, on rows that are prepared."""
  path = tmp_path_factory.mktemp("data")
  for index in range(60):
    (path / f"{index}.txt").write_text(
      "".join(
        f"document {index}, line {line}: {line * index % 97}\n"
        for line in range(20)
      )
    )
  data = dict(
    source=f"text:{path}/*.txt",
    validation_fraction=0.2,
    length=32,
    prepared_dir=str(path / "rows"),
  )
  prepared.prepare(DataConfig(**data))
  fields = {f"data.{name}": value for name, value in data.items()}
  fields |= {
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 8,
  }
  fields |= {
    "model.ffn_dim": 32,
    "optimizer.warmup_steps": 2,
    "eval.interval": 20,
    "eval.rows": 16,
    "train.steps": STEPS,
  }
  fields |= {
    "train.batch_size": 8,
    "train.log_interval": 1,
    "train.checkpoint_interval": 10,
    "train.sample_tokens": 0,
  }
  return [f"--config.{name}={value}" for name, value in fields.items()]


def environment():
  # One device a process, not the eight that the tests have.
  return os.environ | {
    "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  }


def broken_pipe():
  """What is left to write to when a pipe's reader has ended."""
  reading, writing = os.pipe()
  os.close(reading)
  return open(writing, "w")


class Processes:
  """The documented command, once a process."""

  def __init__(
    self, workdir, overrides, *, count=2, own=None, code=None, unread=False
  ):
    self.workdir, port, self.all, self._files = (
      pathlib.Path(workdir),
      free_port(),
      [],
      [],
    )
    for index in range(count):
      command = (
        COMMAND.replace("runs/two", str(workdir))
        .replace("9476", str(port))
        .replace("=2 ", f"={count} ")
        .replace("$i", str(index))
      )
      file = open(f"{workdir}.{index}.log", "w+")
      program = (
        ["-c", code[index]] if index in (code or {}) else command.split()[1:3]
      )
      arguments = [
        sys.executable,
        *program,
        *command.split()[3:],
        *overrides,
        *(own or {}).get(index, []),
      ]
      output = broken_pipe() if unread else file
      self.all.append(
        subprocess.Popen(
          arguments,
          cwd=ROOT,
          env=environment(),
          stdout=output,
          stderr=subprocess.STDOUT,
        )
      )
      self._files.append(file)

  def text(self, index):
    return pathlib.Path(self._files[index].name).read_text()

  def reach(self, text, index=0, timeout=150):
    """Waits until a process has printed something."""
    deadline = time.monotonic() + timeout
    while text not in self.text(index):
      assert time.monotonic() < deadline and self.all[index].poll() is None, (
        self.text(index)
      )
      time.sleep(0.02)

  def end(self, timeout=150):
    """Exit codes, and each one's error, or last line."""
    deadline = time.monotonic() + timeout
    codes = [
      process.wait(timeout=max(1.0, deadline - time.monotonic()))
      for process in self.all
    ]
    texts = [
      self.text(index).splitlines() or [""] for index in range(len(codes))
    ]
    return codes, [
      ([line for line in text if line.startswith("error: ")] or text)[-1]
      for text in texts
    ]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process, file in zip(self.all, self._files, strict=True):
      process.kill()
      process.wait()
      file.close()


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


def assert_close(found, expected):
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    found_value, value = np.array(
      [found[name], value], float
    )  # null, for what is not finite, becomes NaN
    np.testing.assert_allclose(
      found_value, value, rtol=1e-4, err_msg=f"{name} of step {found['step']}"
    )


def saved(workdir):
  return sorted(
    int(path.parent.name)
    for path in pathlib.Path(workdir).glob("checkpoints/*/manifest.json")
  )


def documented_line(workdir, overrides):
  """The documented line for two processes, run as it stands there but for the workdir and the port."""
  line = (
    LINE.replace("runs/two", str(workdir))
    .replace("9476", str(free_port()))
    .replace(" & done", f" {' '.join(overrides)} & done")
  )
  result = subprocess.run(
    ["bash", "-c", line],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0 and saved(workdir)[-1] == STEPS, (
    result.stdout + result.stderr
  )
  return result


@pytest.fixture(scope="module")
def whole(overrides, tmp_path_factory):
  """The workdir of an uninterrupted run of the documented line."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  documented_line(workdir, overrides)
  return workdir


@pytest.fixture(scope="module")
def stopped(overrides, tmp_path_factory):
  """A run of two processes of which the second got a SIGTERM: its workdir, exit codes, last lines, and the step that both stopped at."""
  workdir = tmp_path_factory.mktemp("stopped") / "run"
  with Processes(workdir, [*overrides, SAMPLED]) as processes:
    processes.reach("step 15/")
    processes.all[1].send_signal(signal.SIGTERM)
    codes, lines = processes.end()
  found = re.search(rf"stopped at step (\d+) of {STEPS}, saved", lines[0])
  return workdir, codes, lines, int(found[1]) if found else None


@pytest.fixture(scope="module")
def alone(command, overrides, tmp_path_factory):
  """The log of the documented command by one process."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  result = command(
    *COMMAND.split(" --workdir")[0].split()[2:],
    f"--workdir={workdir}",
    *overrides,
  )
  assert result.returncode == 0, result.stderr
  return log(workdir)


def assert_logs_close(found, expected):
  """The same batches and, but for the order in which two devices add up, the same numbers."""
  assert [line["step"] for line in found] == [line["step"] for line in expected]
  for mine, theirs in zip(found, expected, strict=True):
    assert mine.get("train/tokens") == theirs.get("train/tokens")
    assert_close(mine, theirs)


def test_two_processes_train_as_one_and_stop_together(stopped, alone):
  workdir, codes, lines, step = stopped
  assert codes == [0, 0] and "SIGTERM: saving" in lines[1], lines
  assert (
    step is not None and 15 <= step < STEPS and saved(workdir)[-1] == step
  ), lines
  assert_logs_close(
    log(workdir), [line for line in alone if line["step"] <= step]
  )


@pytest.mark.full
def test_the_documented_line_goes_on_from_there(
  stopped, alone, overrides, tmp_path
):
  workdir = shutil.copytree(stopped[0], tmp_path / "run")
  result = documented_line(workdir, [*overrides, SAMPLED])
  assert f"resuming from step {stopped[-1]}" in result.stderr
  assert_logs_close(log(workdir), alone)
  assert result.stdout.count(f"step {STEPS}/{STEPS}  loss") == 1, (
    "two wrote the log"
  )
  assert (workdir / "loss.png").exists() and (workdir / "sample.txt").exists()


def kill(processes, killed):
  """SIGKILL to one: the others end within a minute, with 1 and a message."""
  processes.all[killed].kill()
  began = time.monotonic()
  codes, lines = processes.end(timeout=60)
  assert time.monotonic() - began < 60
  for index in {*range(len(codes))} - {killed}:
    assert codes[index] == 1
    assert re.match(
      rf"error: process {index} has lost the connection with the others: .*; start all processes again with the same command to",
      lines[index],
    )


@pytest.mark.full
def test_a_killed_one_ends_all(overrides, whole, tmp_path):
  """SIGKILL to process 0, which serves the coordination: process 1 ends. The same command goes on, and in the end the log is the
  uninterrupted run's, number for number."""
  with Processes(tmp_path / "run", overrides) as processes:
    processes.reach(
      "step 25/"
    )  # the checkpoint of step 20 is written once that of step 10 is
    kill(processes, 0)
  with Processes(tmp_path / "run", overrides) as processes:
    assert processes.end()[0] == [0, 0]
  assert "resuming from step" in processes.text(0)
  assert log(tmp_path / "run") == log(whole)


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
def test_what_goes_wrong_in_a_process_that_is_alone_keeps_its_own_error(
  monkeypatch, error
):
  """It does not read as a failure to join others."""
  monkeypatch.setattr(processes, "_initialize", lambda *_: False)
  monkeypatch.setattr(
    processes.signals, "end", lambda message, code: pytest.fail(message)
  )
  with pytest.raises(type(error)) as caught, connected():
    raise error
  assert caught.value is error


@pytest.mark.full
def test_no_terminal_is_needed(overrides, whole, tmp_path):
  with Processes(tmp_path / "run", overrides, unread=True) as run:
    assert run.end()[0] == [0, 0]
  assert log(tmp_path / "run") == log(whole)


@pytest.mark.full
def test_ctrl_c_in_one_ends_all(tmp_path):
  """While process 1 waits in a collective."""
  code = dict.fromkeys(range(2), ONE_FAILS.replace("FAILING", "0"))
  with Processes(tmp_path / "never", [], code=code) as run:
    for index in code:
      run.reach("together", index)
    run.all[0].send_signal(signal.SIGINT)
    codes, lines = run.end(timeout=60)
  assert codes == [130, 1]
  assert lines == [
    "error: interrupted",
    "error: process 0 stopped: interrupted",
  ]


def test_what_differs_is_named_with_its_process(monkeypatch):
  mine = {"config": {"train": {"batch_size": 8, "seed": 0}}, "--workdir": "a"}
  monkeypatch.setattr(
    processes,
    "gather_objects",
    lambda value: [
      value,
      value,
      {"config": {"train": {"batch_size": 8, "seed": 3}}},
    ],
  )
  with pytest.raises(UserError) as caught:
    processes.check_same(mine)
  assert "config.train.seed is 0 in process 0 and 3 in process 2" in str(
    caught.value
  ) and "batch_size" not in str(caught.value)
  assert "--workdir is 'a' in process 0 and None in process 2" in str(
    caught.value
  )
  monkeypatch.setattr(processes, "gather_objects", lambda value: [value, value])
  processes.check_same(mine)


def exchange(monkeypatch, *identities):
  """Lets check_same_data gather, in its order, what several processes send."""
  digests = [json.dumps(identity) for identity in identities]
  places = [f"/{process} on host" for process in range(len(identities))]
  gathered = iter([digests, list(identities), places])
  monkeypatch.setattr(processes, "gather_objects", lambda value: next(gathered))


def test_other_data_are_named_with_their_process(monkeypatch):
  mine = {"the number of files": 9} | {f"size of {i}": i for i in range(9)}
  exchange(monkeypatch, mine, mine, mine)
  processes.check_same_data(mine)
  others = {"the number of files": 1, "size of 0": 0, "size of 1": 7}
  exchange(monkeypatch, mine, mine, others)
  with pytest.raises(UserError) as caught:
    processes.check_same_data(mine)
  message = str(caught.value)
  assert "the number of files is 9 in process 0 and 1 in process 2" in message
  assert "size of 1 is 1 in process 0 and 7 in process 2" in message
  assert "size of 0" not in message and "size of 8" not in message
  assert "and 5 more" in message
  assert "process 2 runs in /2 on host" in message


# The command in another directory, which only relative paths tell.
ELSEWHERE = """
import os
from diffjax.cli import command
from diffjax.train import main

def main_elsewhere(config):
  os.chdir(DIRECTORY)
  main(config)

command.run(main_elsewhere)
"""


@pytest.mark.full
def test_different_data_are_refused_by_all(overrides, tmp_path):
  code = {}
  for process in range(2):
    directory = tmp_path / str(process)
    directory.mkdir()
    code[process] = ELSEWHERE.replace("DIRECTORY", repr(str(directory)))
    for index in range(4 - process):
      lines = [json.dumps({"text": f"{index}-{line}"}) for line in range(99)]
      (directory / f"{index}.jsonl").write_text("\n".join(lines))
  streamed = [
    *overrides,
    "--config.data.mode=streamed",
    "--config.data.source=jsonl:*.jsonl",
    "--config.eval.rows=-1",
  ]
  with Processes(tmp_path / "run", streamed, code=code) as run:
    codes, lines = run.end(timeout=100)
  assert codes == [1, 1], lines
  for line in lines:
    assert (
      "the number of files of 'jsonl:*.jsonl' is 4 in process 0 and 3 in"
      " process 1; the size of 3.jsonl is " in line
    )
    assert f"process 1 runs in {tmp_path}/1 on " in line
  assert not (tmp_path / "run").exists()


def test_a_reason_is_waited_for_in_milliseconds():
  """As JAX's client wants it."""

  class Client:
    def blocking_key_value_get(self, key, timeout_in_ms):
      return f"{key}: {timeout_in_ms}"

  reason = processes._SharedReason(Client())
  assert reason.wait(seconds=2.5) == f"{processes._REASON_KEY}: 2500"


@pytest.mark.full
def test_different_configs_are_refused_by_all(overrides, tmp_path):
  with Processes(
    tmp_path / "run",
    overrides,
    own={1: ["--config.train.batch_size=16", "--config.data.seed=3"]},
  ) as processes:
    codes, lines = processes.end()
  assert codes == [1, 1]
  for line in lines:
    assert (
      line.startswith("error: ")
      and "config.train.batch_size is 8 in process 0 and 16 in process 1"
      in line
    )
    assert "config.data.seed is 0 in process 0 and 3 in process 1" in line
  assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_what_stops_one_stops_all_with_its_reason(overrides, tmp_path):
  """Process 0 alone takes the workdir's lock."""
  with (
    lock(tmp_path / "run"),
    Processes(tmp_path / "run", overrides) as processes,
  ):
    codes, lines = processes.end()
  assert codes == [1, 1]
  assert re.match(
    rf"error: .*/run is in use by process {os.getpid()} on ", lines[0]
  )
  assert re.match(
    rf"error: process 0 stopped: .*/run is in use by process {os.getpid()} on ",
    lines[1],
  )


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_who_is_late_hears_the_reason_too(tmp_path, failing):
  """Process 2 does not run while another one fails, for longer than the others have to finish what they write."""
  code = dict.fromkeys(range(3), ONE_FAILS.replace("FAILING", str(failing)))
  with Processes(tmp_path / "fail", [], count=3, code=code) as processes:
    for index in code:
      processes.reach("together", index)
    processes.all[2].send_signal(signal.SIGSTOP)
    (tmp_path / "fail").touch()
    time.sleep(8)
    processes.all[2].send_signal(signal.SIGCONT)
    codes, lines = processes.end(timeout=60)
  assert codes == [1] * 3
  others = f"error: process {failing} stopped: nothing left to do"
  assert lines == [
    "error: nothing left to do" if index == failing else others
    for index in code
  ]


@pytest.mark.full
def test_a_data_worker_that_dies_stops_all(overrides, tmp_path):
  with Processes(
    tmp_path / "run",
    [*overrides, "--config.data.num_workers=1", "--config.train.steps=100000"],
  ) as processes:
    processes.reach("step 5/")
    tasks = pathlib.Path(f"/proc/{processes.all[1].pid}/task").glob(
      "*/children"
    )
    children = [int(pid) for task in tasks for pid in task.read_text().split()]
    (worker,) = [
      pid
      for pid in children
      if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(worker, signal.SIGKILL)
    codes, lines = processes.end(timeout=60)
  assert codes == [1, 1]
  assert re.match(rf"error: data worker {worker} \(SIGKILL", lines[1])
  assert re.match(
    rf"error: process 1 stopped: data worker {worker} \(SIGKILL", lines[0]
  )


@pytest.mark.full
def test_too_many_skipped_steps_stop_all(overrides, tmp_path):
  diverging = [
    "--config.optimizer.learning_rate=1e30",
    "--config.train.max_skipped_in_a_row=3",
  ]
  with Processes(tmp_path / "run", [*overrides, *diverging]) as processes:
    codes, lines = processes.end()
  assert codes == [1, 1]
  assert all(
    re.match(
      "error: (process . stopped: )?stopped at step .*: 3 steps in a row were skipped",
      line,
    )
    for line in lines
  ), lines


@pytest.mark.full
@pytest.mark.parametrize("index", [0, 1])
def test_nobody_there(overrides, tmp_path, index):
  """The others do not come, or the coordinator cannot be reached."""
  with Processes(
    tmp_path / "run", [*overrides, "--connect_timeout=1"], count=2
  ) as processes:
    processes.all[1 - index].kill()
    codes, lines = processes.end(timeout=60)
  assert codes[index] == 1
  assert re.match(
    r"error: could not connect with the other processes \(2 in all; process 0 listens at localhost:\d+\) within 1 s: .*--connect_timeout",
    lines[index],
  )


@pytest.mark.parametrize(
  "arguments, message",
  [
    (
      ("localhost:9476", 0, -1),
      "--num_processes=N and --process_id=I: missing",
    ),
    (("", 2, 0), "--coordinator=HOST:PORT: missing"),
    (
      ("localhost:9476", 2, 2),
      "--process_id=2: must be less than --num_processes=2",
    ),
    (("localhost", 2, 0), "--coordinator=localhost: must be HOST:PORT"),
  ],
)
def test_flags_that_do_not_fit(arguments, message):
  with pytest.raises(UserError, match=message), connected(*arguments):
    pass


def test_a_port_in_use():
  with socket.socket() as other:
    other.bind(("localhost", 0))
    other.listen()
    port = other.getsockname()[1]
    with (
      pytest.raises(
        UserError,
        match=f"--coordinator=localhost:{port}: process 0 cannot listen",
      ),
      connected(f"localhost:{port}", 2, 0),
    ):
      pass


@pytest.mark.full
@pytest.mark.parametrize("killed", [0, 1])
def test_what_a_dead_process_half_wrote_is_never_whole(
  overrides, whole, tmp_path, killed
):
  with Processes(
    tmp_path / "run", overrides, code={killed: KILLED_IN_A_SAVE}
  ) as processes:
    codes, _ = processes.end(timeout=150)
  assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1
  assert saved(tmp_path / "run") == [10, 20]
  with Processes(tmp_path / "run", overrides) as processes:
    assert processes.end()[0] == [0, 0]
  assert "resuming from step 20" in processes.text(0)
  assert log(tmp_path / "run") == log(whole)


@pytest.mark.full
def test_streams_resume_exactly(overrides, tmp_path):
  """Every process has read another part of a stream: each takes its own place in it up again."""
  for index in range(4):
    documents = [
      {
        "text": f"document {line} of {index}: {line * index % 97}\n"
        * (1 + 3 * index)
      }
      for line in range(100)
    ]
    (tmp_path / f"{index}.jsonl").write_text(
      "".join(json.dumps(document) + "\n" for document in documents)
    )
  streamed = [
    *overrides,
    "--config.data.mode=streamed",
    f"--config.data.source=jsonl:{tmp_path}/*.jsonl",
  ]
  with Processes(tmp_path / "whole", streamed) as processes:
    codes, lines = processes.end()
  assert codes == [0, 0], lines
  with Processes(tmp_path / "run", streamed) as processes:
    processes.reach(
      "step 42/"
    )  # by then the parts have been read to other places
    hangup = (
      signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    )  # not under nohup
    processes.all[0].send_signal(signal.SIGHUP if hangup else signal.SIGTERM)
    assert processes.end()[0] == [0, 0]
  with Processes(tmp_path / "run", streamed) as processes:
    assert processes.end()[0] == [0, 0]
  assert "resuming from step" in processes.text(0)
  assert log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.full
def test_four_processes_with_shared_parameters(overrides, whole, tmp_path):
  """Parameters lie in shares on four processes, for the sample and the validation too. SIGKILL to one, and SIGTERM to another."""
  shared = [*overrides, SAMPLED, "--config.mesh.data=2", "--config.mesh.fsdp=2"]
  with Processes(tmp_path / "run", shared, count=4) as processes:
    processes.reach("step 15/")
    kill(processes, 2)
  with Processes(tmp_path / "run", shared, count=4) as processes:
    processes.reach("  loss ")
    processes.all[3].send_signal(signal.SIGTERM)
    codes, lines = processes.end()
  assert codes == [0] * 4, lines
  with Processes(tmp_path / "run", shared, count=4) as processes:
    assert processes.end()[0] == [0] * 4
  assert processes.text(0).count("resuming from step") == 1
  for mine, theirs in zip(log(tmp_path / "run"), log(whole), strict=True):
    assert_close(mine, theirs)
