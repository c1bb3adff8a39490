"""Kills training again and again, and compares what comes out with a run that was left alone: python -m benchmarks.kill --times=100

Every life of the run is ended by SIGKILL at a random moment: while it starts, takes steps, evaluates or saves (it does so every few steps).
Every life must begin at the newest complete checkpoint. Once a run has reached its last step, its losses and validation losses
(metrics.jsonl), its batches (a sha256 each, by step, of all lives) and its final parameters must equal those of the uninterrupted run bit
for bit. Prints a line a kill and a table; exits with 1 if anything differs. `--json=FILE` writes the table.

With `--processes=N` a run is N processes, of which one is killed, any one, or all at once. Those left must end by themselves within a
minute, with 1 and an error in one line.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from diffjax.config import (
  Config,
  DataConfig,
  EvalConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from diffjax.data import prepared
from diffjax.training import manifest

CONFIG = Config(
  model=ModelConfig(
    num_layers=2,
    embed_dim=64,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_dim=128,
  ),
  optimizer=OptimizerConfig(warmup_steps=10),
  train=TrainConfig(
    steps=300,
    batch_size=8,
    log_interval=1,
    checkpoint_interval=5,
    keep_checkpoints=2,
    sample_tokens=0,
  ),
  eval=EvalConfig(interval=50, rows=16),
)
# Seconds that a life lasts, at most, from its second step on; and the share of lives that end before that, while starting or compiling.
_LIFE, _STARTING = 4.0, 0.15
# Of several processes: the share of kills that take all, and the seconds in which those that are left must end.
_ALL, _ENDING = 0.2, 60.0


def make_config(steps: int) -> Config:
  return dataclasses.replace(
    CONFIG, train=dataclasses.replace(CONFIG.train, steps=steps)
  )


def data_config(directory: pathlib.Path, mode: str) -> DataConfig:
  text, rows = f"text:{directory}/text/*.txt", str(directory / "rows")
  return DataConfig(
    source=text,
    validation_fraction=0.1,
    length=64,
    prepared_dir=rows,
    mode=mode,
  )


def run_child(
  flags: argparse.Namespace,
  directory: pathlib.Path,
  workdir: str,
  coordinator: str,
  index: int,
) -> None:
  """Trains as the command does, and appends every batch that it takes to WORKDIR.batches."""
  from diffjax.host import runtime
  from diffjax.parallel.processes import connected
  from diffjax.training import loop, run_log, session

  runtime.keep_compiled_programs()
  runtime.keep_freed_memory()
  log = os.open(f"{workdir}.batches", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
  step, put_batch, make_writer = 0, session.put_batch, run_log.MetricWriter

  def metrics(*args, start_step, **options):
    nonlocal step
    step = start_step
    return make_writer(*args, start_step=start_step, **options)

  def record(batch, mesh):
    nonlocal step
    step += 1
    digest = hashlib.sha256(
      b"".join(
        np.ascontiguousarray(batch[name]).tobytes() for name in sorted(batch)
      )
    ).hexdigest()
    os.write(log, f"{step} {index} {digest}\n".encode())
    return put_batch(batch, mesh)

  session.put_batch, run_log.MetricWriter = record, metrics
  with connected(
    coordinator if flags.processes > 1 else "",
    flags.processes,
    index,
    timeout=20,
  ):
    loop.train(
      dataclasses.replace(
        make_config(flags.steps), data=data_config(directory, flags.mode)
      ),
      workdir,
    )


def losses(workdir: pathlib.Path) -> list[tuple]:
  """The log of every step without its times."""
  names = ("step", "train/loss", "train/grad_norm", "validation/loss")
  lines = [
    json.loads(line)
    for line in (workdir / "metrics.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
  ]
  return [tuple(line.get(name) for name in names) for line in lines]


def taken(workdir: pathlib.Path) -> list[tuple[int, int, str]]:
  """Step, process and digest of every batch, in the order they were taken."""
  log = pathlib.Path(f"{workdir}.batches")
  lines = (
    [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    if log.exists()
    else []
  )
  return [(int(step), int(process), digest) for step, process, digest in lines]


def batches(workdir: pathlib.Path) -> dict[tuple[int, int], set[str]]:
  """Digests of the batches that any life took for each step, in each process."""
  seen = collections.defaultdict(set)
  for step, process, digest in taken(workdir):
    seen[step, process].add(digest)
  return dict(seen)


def parameters(workdir: pathlib.Path) -> str:
  """sha256 of the newest complete checkpoint's parameters."""
  from diffjax.parallel.mesh import make_mesh
  from diffjax.training.checkpoint import open_checkpoint
  from diffjax.training.program import build

  abstract = build(CONFIG, make_mesh(CONFIG.mesh)).abstract_state.params
  bare = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract
  )
  leaves = jax.tree.leaves(open_checkpoint(workdir).params(bare))
  return hashlib.sha256(
    b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
  ).hexdigest()


def _first_difference(found, expected) -> str:
  """In words; of logs and batches, the first entry that only one side has."""
  if isinstance(found, str):
    return f"{found} instead of {expected}"
  pairs = (
    itertools.zip_longest(sorted(found.items()), sorted(expected.items()))
    if isinstance(found, dict)
    else itertools.zip_longest(found, expected)
  )
  return next(
    f"{mine} instead of {theirs}" for mine, theirs in pairs if mine != theirs
  )


def moment(workdir: pathlib.Path, taken: int) -> str:
  """The occupation of a killed life, by the files that it left."""
  checkpoints = workdir / "checkpoints"
  steps = list(checkpoints.iterdir()) if checkpoints.exists() else []
  if any("tmp" in path.name for path in steps):
    return "writing a checkpoint"
  if any(
    path.name.isdecimal() and not (path / "manifest.json").exists()
    for path in steps
  ):
    return "writing a manifest or pruning"
  return "taking steps" if taken else "starting"


def complete(workdir: pathlib.Path) -> int:
  """The newest complete checkpoint's step, by its files; 0 if there is none."""
  directory = manifest.checkpoint_directory(workdir)
  for step in reversed(manifest.steps(directory)):
    with contextlib.suppress(manifest.Damage):
      return manifest.verify(directory / str(step), step)["step"]
  return 0


class Life:
  """The processes of a run from one start to their end."""

  def __init__(
    self,
    directory: pathlib.Path,
    workdir: pathlib.Path,
    flags: argparse.Namespace,
  ):
    self._workdir, self._before, self._flags = (
      workdir,
      len(taken(workdir)),
      flags,
    )
    self.newest, self.started = complete(workdir), time.time()
    with socket.socket() as listener:
      listener.bind(("localhost", 0))
      coordinator = f"localhost:{listener.getsockname()[1]}"
    self.processes, self._errors = [], []
    for index in range(flags.processes):
      command = [
        sys.executable,
        "-m",
        "benchmarks.kill",
        f"--mode={flags.mode}",
        f"--processes={flags.processes}",
        f"--steps={flags.steps}",
      ]
      environment = os.environ | (
        {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if flags.processes > 1 else {}
      )  # all but process 0 always compile
      self._errors.append(tempfile.TemporaryFile("w+", encoding="utf-8"))
      self.processes.append(
        subprocess.Popen(
          [
            *command,
            "--child",
            str(directory),
            str(workdir),
            coordinator,
            str(index),
          ],
          env=environment,
          stdout=subprocess.DEVNULL,
          stderr=self._errors[-1],
        )
      )

  def steps(self) -> list[int]:
    """Those that its batches were taken for, by all processes."""
    return [step for step, _, _ in taken(self._workdir)[self._before :]]

  def runs(self) -> bool:
    return all(process.poll() is None for process in self.processes)

  def wait(self, expected: int, timeout: float | None = None) -> None:
    """Ends this program if any but the killed processes end with another code, or without a line that says why, or not in time."""
    deadline = time.time() + (timeout or 3600.0)
    for process, errors in zip(self.processes, self._errors, strict=True):
      try:
        code: int | str = process.wait(max(0.0, deadline - time.time()))
      except subprocess.TimeoutExpired:
        code = "nothing: it hangs"
      errors.seek(0)
      text = errors.read()
      through = (
        code == 0 and complete(self._workdir) == self._flags.steps
      )  # killed when the rest was done
      if (
        code != -signal.SIGKILL
        and not through
        and (code != expected or (expected and "\nerror: " not in f"\n{text}"))
      ):
        for other in self.processes:
          other.kill()
        sys.exit(f"a process ended by itself with {code}:\n{text}")


@dataclasses.dataclass
class Tally:
  """The counts of a whole session of kills."""

  kills: int = 0
  runs: int = 0
  # Steps taken in killed lives
  lost: int = 0
  # Lives that took steps, and those of them that did not begin at the newest complete checkpoint
  starts: int = 0
  wrong: int = 0
  # Seconds until the processes that were not killed had ended, at most
  slowest: float = 0.0
  # Kills by what the life was doing, and by the processes that were killed
  moments: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  victims: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  # Differences from the uninterrupted run
  differing: list[str] = dataclasses.field(default_factory=list)

  def table(self, flags: argparse.Namespace, seconds: float) -> dict:
    """The counts under the names that the results have."""
    several = {
      "killed": dict(self.victims),
      "seconds until the others had ended, at most": round(self.slowest, 1),
    }
    return {
      "processes": flags.processes,
      "kills": self.kills,
      "moments": dict(self.moments),
      **(several if flags.processes > 1 else {}),
      "runs finished": self.runs,
      "steps of a run": flags.steps,
      "steps taken in killed lives": self.lost,
      "starts that took steps": self.starts,
      "starts not from the newest complete checkpoint": self.wrong,
      "differences from the uninterrupted run": self.differing,
      "mode": flags.mode,
      "seed": flags.seed,
      "seconds": round(seconds),
      "date": time.strftime("%Y-%m-%d"),
      "jax": jax.__version__,
      "python": platform.python_version(),
    }


def make_data(directory: pathlib.Path, mode: str) -> None:
  """Writes the text that the runs train on, and prepares its rows if they are to be."""
  (directory / "text").mkdir()
  for index in range(200):
    text = "".join(
      f"document {index}, line {line}: {line * index % 97}\n"
      for line in range(60)
    )
    (directory / "text" / f"{index}.txt").write_text(text, encoding="utf-8")
  if mode == "prepared":
    prepared.prepare(data_config(directory, mode))


def live(
  directory: pathlib.Path,
  workdir: pathlib.Path,
  flags: argparse.Namespace,
  rng: random.Random,
  tally: Tally,
) -> bool:
  """Starts a life of a run, and kills it unless there have been enough kills.

  Returns:
    Whether the run has come to its end.
  """
  life = Life(directory, workdir, flags)
  starting, delay = rng.random() < _STARTING, rng.uniform(0, _LIFE)
  if tally.kills < flags.times:
    while not starting and life.runs() and len(life.steps()) <= flags.processes:
      time.sleep(0.01)
    deadline = time.time() + delay
    while life.runs() and time.time() < deadline:
      time.sleep(0.001)
  everyone = list(range(flags.processes))
  finished = tally.kills >= flags.times or not life.runs()
  killed = (
    []
    if finished
    else everyone
    if rng.random() < _ALL
    else [rng.choice(everyone)]
  )
  for index in killed:
    life.processes[index].kill()
  moment_of_kill = time.time()
  life.wait(*(0,) if finished else (1, _ENDING))
  ending, steps = time.time() - moment_of_kill, life.steps()
  tally.starts += bool(steps)
  tally.wrong += bool(steps) and steps[0] != life.newest + 1
  if finished:
    return True
  tally.kills += 1
  what = moment(workdir, len(steps))
  tally.moments[what] += 1
  tally.lost += len(steps) // flags.processes
  line = f"kill {tally.kills}: {moment_of_kill - life.started:.1f} s after its start, {len(steps)} batches into it, {what}"
  if flags.processes > 1:
    tally.victims[
      "all"
      if len(killed) > 1
      else "process 0"
      if killed == [0]
      else "another one"
    ] += 1
    if len(killed) < flags.processes:
      tally.slowest = max(tally.slowest, ending)
      line += f"; process {killed[0]}, the others ended {ending:.1f} s later"
    else:
      line += "; all"
  print(line, flush=True)
  return False


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--times", type=int, default=20, help="kills")
  parser.add_argument("--seed", type=int, default=0, help="of the moments")
  parser.add_argument(
    "--mode",
    choices=("prepared", "streamed"),
    default="prepared",
    help="config.data.mode",
  )
  parser.add_argument(
    "--steps", type=int, default=CONFIG.train.steps, help="of a run"
  )
  parser.add_argument("--processes", type=int, default=1, help="of a run")
  parser.add_argument("--json", help="file for the table")
  parser.add_argument(
    "--child",
    nargs=4,
    metavar=("DIRECTORY", "WORKDIR", "COORDINATOR", "PROCESS"),
    help=argparse.SUPPRESS,
  )
  flags = parser.parse_args()
  if flags.child:
    directory, workdir, coordinator, index = flags.child
    run_child(flags, pathlib.Path(directory), workdir, coordinator, int(index))
    return

  rng, began, tally = random.Random(flags.seed), time.time(), Tally()
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    make_data(directory, flags.mode)
    whole = directory / "whole"
    Life(directory, whole, flags).wait(0)
    while tally.kills < flags.times or tally.runs == 0:
      workdir = directory / f"run{tally.runs}"
      tally.runs += 1
      while not live(directory, workdir, flags, rng, tally):
        pass
      for name, read in (
        ("losses", losses),
        ("batches", batches),
        ("final parameters", parameters),
      ):
        found, expected = read(workdir), read(whole)
        if found != expected:
          tally.differing.append(
            f"run {tally.runs}: its {name} differ, first {_first_difference(found, expected)}"
          )
  table = tally.table(flags, time.time() - began)
  print(json.dumps(table, indent=1))
  if flags.json:
    pathlib.Path(flags.json).write_text(
      json.dumps(table, indent=1) + "\n", encoding="utf-8"
    )
  sys.exit(1 if tally.differing or tally.wrong else 0)


if __name__ == "__main__":
  main()
