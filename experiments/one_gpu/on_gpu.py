"""Makes the pilots and the runs on a GPU that is there for minutes and has no network.

    python -m experiments.one_gpu.on_gpu runs/one_gpu     # within --limit=540 seconds; again for more

The machine needs Python 3.12, JAX for CUDA, SciPy, matplotlib, pip, tensorstore, tokenizers and uvloop. Other packages that it
lacks come from DIR/pack, which pack.py makes. Everything that is made here lies in DIR/work, and the results in DIR/out: after each round
also in $OUT, if that is set, as one archive. No run starts that would not end in time. The same command goes on with what is missing, also
on another machine with this DIR/pack and DIR/out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import wheels

# Until packages are installed, those other than the standard library may be missing: what needs them is imported where it is used.

ROOT = pathlib.Path(__file__).resolve().parents[2]
_RESERVE = (
  45  # seconds to save a run that is stopped, and to collect the results
)
_START = 15  # seconds that a round's command takes itself
_ROUND = 3  # runs of a command: one of each architecture
# Seconds of a run, until one has been timed (README.md)
_GUESS = {"pilot": 75.0, "gpu": 150.0}
# A round that takes this many times as long as expected hangs.
_HANGS = 3


class Failed(Exception):
  """A command that failed or took too long, in one line."""


@dataclasses.dataclass(frozen=True)
class Session:
  """A call of this command.

  Attributes:
    directory: DIR, relative to the repository if it is inside.
    deadline: when the last run must have ended, by `time.monotonic`.
    steps: of a run, instead of the config's; None for those.
    settings: FIELD=VALUE for all runs.
  """

  directory: pathlib.Path
  deadline: float
  steps: int | None
  settings: Sequence[str]

  @property
  def left(self) -> float:
    """Seconds until the deadline."""
    return self.deadline - time.monotonic()

  def path(self, *parts: str) -> pathlib.Path:
    return self.directory.joinpath(*parts)

  def places(self) -> list[str]:
    """The fields that say where the data are."""
    data = {
      "source": f"text:{self.path('work/text')}/*.py",
      "tokenizer": self.path("pack/tokenizer/tokenizer.json"),
    }
    return [
      f"data.{name}={value}"
      for name, value in {
        **data,
        "prepared_dir": self.path("work/rows"),
      }.items()
    ]

  def changes(self, grid: str, rates: Sequence[str] = ()) -> list[str]:
    """All settings of a grid's runs, FIELD=VALUE, with those of the learning rates. A pilot takes a quarter of a run's steps."""
    steps = (
      self.steps
      if grid == "gpu" or self.steps is None
      else max(1, self.steps // 4)
    )
    fewer = (
      []
      if steps is None
      else [f"train.steps={steps}", f"eval.interval={steps}"]
    )
    return [*self.settings, *self.places(), *fewer, *rates]

  def runs(self, grid: str, rates: Sequence[str] = ()) -> list[Any]:
    """The runs of a grid, in their order."""
    from experiments import grid as grids

    pairs = (change.split("=", 1) for change in self.changes(grid, rates))
    return grids.expand(
      "one_gpu",
      grids.load("one_gpu", grid).grids[grid],
      {field: grids.read_value(value) for field, value in pairs},
    )

  def results(self, grid: str) -> list[dict[str, Any]]:
    """The finished runs of a grid, as in its results.json."""
    path = self.path("out", grid, "results.json")
    if not path.exists():
      return []
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [run for run in runs if "failed" not in run]


def main(arguments: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(
    description="Makes pilots and runs on a GPU without a network."
  )
  parser.add_argument(
    "dir", type=pathlib.Path, help="the directory that pack.py was given"
  )
  parser.add_argument(
    "--limit",
    type=float,
    default=540,
    help="seconds for this call, 540 by default",
  )
  parser.add_argument(
    "--skip_pilots",
    action="store_true",
    help="make no more pilots; choose among the rates that all have tried",
  )
  parser.add_argument(
    "--steps", type=int, help="steps of a run; a pilot takes a quarter"
  )
  parser.add_argument(
    "--set",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="a field of all runs; the same ones each time",
  )
  parser.add_argument(
    "--on_cpu",
    action="store_true",
    help="go on if JAX finds no GPU: for a rehearsal",
  )
  parsed = parser.parse_args(arguments)
  directory = parsed.dir.resolve()
  directory = (
    directory.relative_to(ROOT) if directory.is_relative_to(ROOT) else directory
  )
  session = Session(
    directory, time.monotonic() + parsed.limit, parsed.steps, parsed.set
  )
  os.chdir(ROOT)
  try:
    _set_up(session, parsed.on_cpu)
    if (
      parsed.skip_pilots
      or session.path("out/rates.json").exists()
      or _make(session, "pilot")
    ):
      _make(session, "gpu", _rates(session))
  except Failed as error:
    sys.exit(f"error: {error}")
  print(f"the results are in {session.path('out')}")


def _set_up(session: Session, on_cpu: bool) -> None:
  """Installs packages, and makes the rows.

  Raises:
    Failed: if the pack is not there, there is no GPU, or there are too few rows.
  """
  packed, text = session.path("pack/text.jsonl.xz"), session.path("work/text")
  if not packed.exists():
    raise Failed(
      f"{packed} is missing; python -m experiments.one_gpu.pack {session.directory} makes it"
    )
  site = session.path("work/site").absolute()
  os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH")])
  )
  os.environ |= {
    "XDG_CACHE_HOME": str(session.path("work/cache").absolute()),
    "PYTHONUNBUFFERED": "1",
  }
  try:
    wheels.install(session.path("pack/wheels"), site)
  except RuntimeError as error:
    raise Failed(str(error)) from error
  code = "import diffjax.training.loop, experiments.run, jax; print(jax.default_backend(), *jax.devices())"  # missing packages fail here
  backend = _call([sys.executable, "-c", code]).stdout
  print(f"devices: {backend.strip()}", flush=True)
  if backend.startswith("cpu") and not on_cpu:
    raise Failed("JAX finds no GPU here; --on_cpu goes on without")
  if not text.exists():
    temporary = text.with_suffix(".tmp")
    temporary.mkdir(exist_ok=True)
    with lzma.open(
      packed
    ) as lines:  # a file a document, which many processes can tokenise
      for number, line in enumerate(lines):
        (temporary / f"{number:06d}.py").write_bytes(
          json.loads(line)["text"].encode()
        )
    temporary.rename(text)
  config = next(iter(session.runs("gpu"))).config
  fields = [
    f"--config.{setting}" for setting in (*session.settings, *session.places())
  ]
  _call(
    [
      sys.executable,
      "-m",
      "diffjax.prepare",
      "--config=experiments/one_gpu/config.py",
      *fields,
    ],
    capture=False,
  )
  rows = json.loads(
    session.path("work/rows/meta.json").read_text(encoding="utf-8")
  )["splits"]["train"]["rows"]
  if rows < config.train.steps * config.train.batch_size:
    raise Failed(
      f"{config.train.steps} steps of {config.train.batch_size} rows would see some of the {rows} rows twice"
    )


def _call(
  command: Sequence[str], capture: bool = True
) -> subprocess.CompletedProcess[str]:
  result = subprocess.run(command, capture_output=capture, text=True)
  if result.returncode:
    raise Failed(
      f"{' '.join(command[1:4])} failed: {(result.stderr or 'as said above').strip().splitlines()[-1]}"
    )
  return result


def _make(session: Session, grid: str, rates: Sequence[str] = ()) -> bool:
  """Makes the missing runs of a grid, round after round, while there is time.

  Returns:
    Whether all runs are made.
  """
  names = [run.name for run in session.runs(grid)]
  further = (
    session.runs("gpu")[0].config.train.steps
    - session.runs("pilot")[0].config.train.steps
  )
  while True:
    done = session.results(grid)
    missing = [
      name for name in names if name not in {run["name"] for run in done}
    ]
    seconds = expected_seconds(grid, done, session.results("pilot"), further)
    print(
      f"{grid}: {len(done)} of {len(names)} are made; the others take about {seconds * len(missing) / 60:.0f} minutes; "
      f"{session.left:.0f} s left in this call",
      flush=True,
    )
    fit = int((session.left - _START - _RESERVE) / seconds)
    # The first run of all is made alone, so that a hang or a slow step shows early
    size = _ROUND - len(done) % _ROUND if done or grid == "gpu" else 1
    if not (chosen := missing[: max(0, min(size, fit))]):
      return not missing
    _make_round(session, grid, rates, chosen, _START + seconds * len(chosen))


def expected_seconds(
  grid: str,
  done: Sequence[dict[str, Any]],
  pilots: Sequence[dict[str, Any]],
  further: int,
) -> float:
  """Seconds that a run is expected to take: somewhat more than the longest so far, or than a pilot with further steps.

  Args:
    grid: "pilot" or "gpu".
    done: the finished runs of this grid.
    pilots: the finished pilots.
    further: steps that a run has and a pilot has not.
  """
  seconds = [run["seconds"] for run in done if run["seconds"]]
  if not seconds and grid == "gpu":
    seconds = [
      run["seconds"] + further * (run["results"]["train/step_seconds"] or 0.0)
      for run in pilots
      if run["seconds"]
    ]
  return 1.15 * max(seconds) if seconds else _GUESS[grid]


def _make_round(
  session: Session,
  grid: str,
  rates: Sequence[str],
  names: Sequence[str],
  expected: float,
) -> None:
  """Makes some runs with one command, and collects them.

  Raises:
    Failed: if the command fails or hangs. Runs of it that have ended are collected before.
  """
  command = [
    sys.executable,
    "-m",
    "experiments.run",
    "one_gpu",
    f"--grid={grid}",
    f"--workdir={session.path('work/runs')}",
  ]
  command += [
    f"--out={session.path('out', grid)}",
    *(f"--set={change}" for change in session.changes(grid, rates)),
  ]
  print(f"{', '.join(names)}: about {expected:.0f} s", flush=True)
  patience = min(session.left - _RESERVE, _HANGS * expected + 60)
  code = _wait(
    subprocess.Popen([*command, *(f"--only={name}" for name in names)]),
    patience,
  )
  if code != 0:
    directory = session.path("work/runs/one_gpu", grid)
    if ended := [
      str(path.parent.relative_to(directory))
      for path in directory.glob("*/*/result.json")
    ]:
      _call([*command, *(f"--only={name}" for name in ended)])
  _save(session, grid)
  if code is None and session.left > 2 * _RESERVE:
    raise Failed(
      f"{', '.join(names)} took {patience:.0f} s, which looks like a hang; experiments/one_gpu/README.md says what to do"
    )
  if code:
    raise Failed("a run failed, as said above")


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
  """The exit code of a command; None if it was stopped after so many seconds. Training saves a checkpoint then, unless it hangs."""
  try:
    return process.wait(seconds)
  except subprocess.TimeoutExpired:
    import psutil

    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
      process.wait(_RESERVE / 2)
    except subprocess.TimeoutExpired:
      process.kill()
    for (
      child
    ) in started:  # a process that hangs on the GPU would keep its memory
      if child.is_running():
        child.kill()
    return None


def _rates(session: Session) -> list[str]:
  """The setting of each architecture's learning rate: the best one of its pilots, chosen before the first run and then kept."""
  from experiments.one_gpu.experiment import best_rates

  path = session.path("out/rates.json")
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
      json.dumps(best_rates({"runs": session.results("pilot")})) + "\n",
      encoding="utf-8",
    )
  print(
    f"learning rates: {path.read_text(encoding='utf-8').strip()}", flush=True
  )
  return [
    f"{architecture}:optimizer.learning_rate={rate}"
    for architecture, rate in json.loads(
      path.read_text(encoding="utf-8")
    ).items()
  ]


def _save(session: Session, grid: str) -> None:
  """Joins the logs of all runs into one file, with those of other machines, and packs the results for $OUT."""
  runs, curves = (
    session.path("work/runs/one_gpu", grid),
    session.path("out", grid, "curves.jsonl"),
  )
  lines = [*_read(curves)] if curves.exists() else []
  there = {line["run"] for line in lines}
  for result in sorted(runs.glob("*/*/result.json")):
    if (name := str(result.parent.relative_to(runs))) not in there:
      lines += [
        {"run": name, **line} for line in _read(result.parent / "metrics.jsonl")
      ]
  curves.parent.mkdir(parents=True, exist_ok=True)
  temporary = curves.with_suffix(".tmp")
  temporary.write_text(
    "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
  )
  temporary.replace(curves)
  if os.environ.get("OUT"):
    shutil.make_archive(
      os.path.join(os.environ["OUT"], "one_gpu"), "gztar", session.path("out")
    )


def _read(log: pathlib.Path) -> Iterator[dict[str, Any]]:
  for line in log.read_text(encoding="utf-8").splitlines():
    try:
      yield json.loads(line)
    except ValueError:  # a line that was being written when the run was killed
      continue


if __name__ == "__main__":
  main(sys.argv[1:])
