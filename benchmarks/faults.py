"""Checks that the tests find faults.

    python -m benchmarks.faults
    python -m benchmarks.faults --only 'ops/*' --again

benchmarks/faults.toml lists faults of the kind that real changes make. Each is
put into a copy of the repository, and tests run until the first failure: the
files that the fault names, first their default tier and then their full tier,
and after them all other tests in the same order. All faults together take
hours.

The results are the table in benchmarks/faults.md. Faults that it has are not
tried again without `--again`. Seconds are of one core, from the start of
pytest. At the end, all tests that found a fault run without one. If such a test
fails, its results are dropped.

One fault, in decode/gpu.py, is found only under Python 3.12 or later, because
the JAX of earlier versions runs none of its tests.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
FAULTS = pathlib.Path(__file__).with_suffix(".toml")
TABLE = pathlib.Path(__file__).with_suffix(".md")

# The options that select the tests of a tier.
TIERS: dict[str, list[str]] = {"default": [], "full": ["-m", "full"]}
# Tests are stopped after this time. Tests that hang have found the fault.
MAX_SECONDS = 3600.0
# Length of the output of pytest that is shown in messages.
SHOWN_CHARACTERS = 3000

# Exit codes of pytest.
PASSED = 0
FAILED = 1
NO_TESTS = 5

HEADER = """The last results of `python -m benchmarks.faults`: {summary}.

For comparison, in commit 0b4565c the tests that a fault names found 86 of 120
faults (72%), 85 of them in the default tier (71%).

"""
HEADINGS = "| fault | file | tier | found by | s |"
# How the table marks a fault that no test has found.
NOT_FOUND = "**none**"


@dataclasses.dataclass(frozen=True)
class Fault:
  """An edit of one file, which tests should find.

  Attributes:
    name: The folder and what is wrong, as FOLDER/WORDS.
    file: The file, relative to the repository.
    old: The text that is replaced. The file has it once.
    new: The text in its place.
    why: Who is harmed, and how.
    tests: Files or folders of tests that should find it. They run first.
  """

  name: str
  file: str
  old: str
  new: str
  why: str
  tests: list[str]


@dataclasses.dataclass(frozen=True)
class Detection:
  """How the tests found a fault.

  Attributes:
    tier: "default" or "full". Empty if no test found it.
    test: The first test that failed. Empty if no test found it.
    seconds: Seconds from the start of the tests.
  """

  tier: str
  test: str
  seconds: float


class PytestResult(NamedTuple):
  """The result of a run of pytest.

  Attributes:
    failure: The first test that failed, or how pytest ended if it named none.
      Empty if all tests passed.
    output: What pytest has printed.
  """

  failure: str
  output: str


class Copy(NamedTuple):
  """A copy of the repository, into which faults are put.

  Attributes:
    directory: The copy.
    cache: The directory of compiled programs, which tests of a copy share.
  """

  directory: pathlib.Path
  cache: pathlib.Path


def load_faults() -> list[Fault]:
  """Returns the faults of benchmarks/faults.toml."""
  tables = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
  faults = []
  for folder, entries in tables.items():
    for entry in entries:
      name = f"{folder}/{entry['name']}"
      faults.append(Fault(**(entry | {"name": name})))
  return faults


def copy_to(directory: pathlib.Path) -> None:
  """Copies the repository with its changes, without files that git ignores."""
  listed = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  for name in listed.stdout.split("\0"):
    source = ROOT / name
    # The last name is empty, and git also lists deleted files.
    if not name or not source.exists():
      continue
    target = directory / name
    target.parent.mkdir(parents=True, exist_ok=True)
    # diffjax/configs is a link to a folder, and must stay one.
    shutil.copy2(source, target, follow_symlinks=False)


def run_pytest(copy: Copy, arguments: Sequence[str]) -> PytestResult:
  """Runs tests of a copy until the first one fails.

  Args:
    copy: The copy of the repository.
    arguments: Files of tests, and options.

  Raises:
    RuntimeError: if pytest ended without a result.
  """
  environment = os.environ | {
    "PYTHONPATH": str(copy.directory),
    "DIFFJAX_TESTS_COMPILED": str(copy.cache),
    "XDG_CACHE_HOME": str(copy.cache / "cache"),
  }
  command = [sys.executable, "-m", "pytest", "-x", "-n0", "--tb=line", "-rfE"]
  with (
    tempfile.TemporaryFile("w+", encoding="utf-8") as output_file,
    tempfile.TemporaryDirectory() as scratch,
  ):
    process = subprocess.Popen(
      [*command, *arguments, f"--basetemp={scratch}/pytest"],
      cwd=copy.directory,
      env=environment,
      stdout=output_file,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      exit_code = process.wait(MAX_SECONDS)
    except subprocess.TimeoutExpired:
      exit_code = None
    _end_process_group(process)
    output_file.seek(0)
    output = output_file.read()
  return PytestResult(_first_failure(exit_code, output), output)


def _end_process_group(process: subprocess.Popen) -> None:
  """Ends pytest, and processes that its tests have left running."""
  for number in (signal.SIGTERM, signal.SIGKILL):
    try:
      os.killpg(process.pid, number)
    except ProcessLookupError:
      break
    time.sleep(0.1)
  process.wait()


def _first_failure(exit_code: int | None, output: str) -> str:
  """Returns the first test that failed, or "" if all passed.

  If pytest named no test, returns a description of how it ended.

  Args:
    exit_code: The exit code of pytest. Negative if a signal ended it, None if
      it was stopped after MAX_SECONDS.
    output: What it has printed.

  Raises:
    RuntimeError: if pytest ended without a result.
  """
  if exit_code in (PASSED, NO_TESTS):
    return ""
  if exit_code is None:
    return f"a test that does not end within {MAX_SECONDS:.0f} s"
  tail = output[-SHOWN_CHARACTERS:]
  if -exit_code in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
    name = signal.Signals(-exit_code).name
    raise RuntimeError(
      f"pytest was killed by {name}, so the fault has no result; run the"
      f" command again:\n{tail}"
    )
  match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
  if match is not None:
    return match[1]
  # pytest prints a dot for each test that passes. If it ends after a dot and
  # names no failed test, a library has ended the process.
  is_ended_by_library = exit_code == FAILED and output.startswith(".")
  if exit_code > 0 and not is_ended_by_library:
    raise RuntimeError(
      f"pytest ended with {exit_code} and names no test; correct this"
      f" error:\n{tail}"
    )
  # A crash, such as SIGSEGV, has found the fault.
  return f"pytest ends with {exit_code}"


def detect(fault: Fault, copy: Copy) -> Detection:
  """Puts a fault into a copy, runs the tests, and removes the fault again.

  Raises:
    ValueError: if the file does not have the fault's old text exactly once.
  """
  path = copy.directory / fault.file
  original = path.read_text(encoding="utf-8")
  num_places = original.count(fault.old)
  if num_places != 1:
    raise ValueError(
      f"{fault.name}: {fault.file} has the old text {num_places} times;"
      " correct benchmarks/faults.toml"
    )

  # The tests that the fault names run first, then all others.
  named = [test for test in fault.tests if (copy.directory / test).exists()]
  others = ["tests"]
  for test in named:
    others.append(f"--ignore={test}")

  start = time.monotonic()
  path.write_text(original.replace(fault.old, fault.new), encoding="utf-8")
  try:
    for tests in (named, others):
      for tier, options in TIERS.items():
        failure = run_pytest(copy, [*options, *tests]).failure
        if failure:
          return Detection(tier, failure, time.monotonic() - start)
  finally:
    path.write_text(original, encoding="utf-8")
  return Detection("", "", time.monotonic() - start)


def failing_without_fault(copy: Copy, tests: Sequence[str]) -> list[str]:
  """Returns the tests that fail in a copy without a fault.

  A run of pytest ends at its first failure, so the tests that remain run again
  without the test that failed.
  """
  remaining = list(tests)
  failing = []
  while remaining:
    result = run_pytest(copy, ["-m", "", *remaining])
    if not result.failure:
      break
    tail = result.output[-SHOWN_CHARACTERS:]
    print(f"{result.failure} fails without a fault:\n{tail}")
    failing.append(result.failure)
    if result.failure not in remaining:
      break
    remaining.remove(result.failure)
  return failing


def read_table(text: str) -> dict[str, Detection]:
  """Reads the Markdown table of benchmarks/faults.md.

  A row has the fault, its file, the tier, the test and the seconds:

  | ops/wrong mask | `diffjax/ops/mask.py` | full | `tests/test_mask.py` | 3 |

  Args:
    text: The content of the file, as `write_results` wrote it.

  Returns:
    The detections by the names of the faults.
  """
  _, _, below_headings = text.partition(f"{HEADINGS}\n")
  # The first line below the headings is |---|---|---|---|---|.
  rows = below_headings.splitlines()[1:]
  detections = {}
  for row in rows:
    cells = row.strip("| ").split(" | ")
    name, _file, tier, test, seconds = cells
    if tier == NOT_FOUND:
      tier = ""
    # `format_table` has escaped vertical bars.
    test = test.strip("`").replace("\\|", "|")
    detections[name] = Detection(tier, test, float(seconds))
  return detections


def format_table(
  faults: Sequence[Fault], detections: Mapping[str, Detection]
) -> str:
  """Returns the results as a table in Markdown, in the order of the faults."""
  lines = [HEADINGS, "|---|---|---|---|---|"]
  for fault in faults:
    if fault.name not in detections:
      continue
    detection = detections[fault.name]
    tier = detection.tier or NOT_FOUND
    test = detection.test.replace("|", "\\|")
    cells = [fault.name, f"`{fault.file}`", tier, f"`{test}`"]
    cells.append(f"{detection.seconds:.0f}")
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def summary(detections: Mapping[str, Detection]) -> str:
  """Returns how many faults each tier found."""
  tiers = [detection.tier for detection in detections.values()]
  num_default = tiers.count("default")
  num_found = num_default + tiers.count("full")
  num_faults = len(tiers)
  return (
    f"{num_faults} faults; the default tier finds {num_default}"
    f" ({num_default / num_faults:.0%}) and the full tier {num_found}"
    f" ({num_found / num_faults:.0%})"
  )


def write_results(
  faults: Sequence[Fault], detections: Mapping[str, Detection]
) -> None:
  """Writes benchmarks/faults.md."""
  header = HEADER.format(summary=summary(detections))
  TABLE.write_text(header + format_table(faults, detections), encoding="utf-8")


def detect_all(
  faults: Sequence[Fault],
  selected: Sequence[Fault],
  detections: dict[str, Detection],
  jobs: int,
) -> None:
  """Tries faults, and writes benchmarks/faults.md after each.

  Args:
    faults: All faults.
    selected: The faults to try.
    detections: The results by the names of the faults. They are updated.
    jobs: Number of faults that are tried at the same time.
  """
  with tempfile.TemporaryDirectory() as scratch:
    copies = make_copies(pathlib.Path(scratch), jobs)
    for fault, detection in detect_in_copies(selected, copies):
      detections[fault.name] = detection
      write_results(faults, detections)
      print(
        f"{fault.name}: {detection.tier or 'MISSED'}, {detection.test},"
        f" {detection.seconds:.0f} s",
        flush=True,
      )

    # A test that also fails without a fault has not found one.
    tests = set()
    for fault in selected:
      test = detections[fault.name].test
      # A failure of pytest itself has no "::".
      if "::" in test:
        tests.add(test)
    failing = failing_without_fault(copies[0], sorted(tests))
  for name, detection in list(detections.items()):
    if detection.test in failing:
      del detections[name]
  write_results(faults, detections)


def make_copies(directory: pathlib.Path, count: int) -> list[Copy]:
  """Makes copies of the repository in a directory."""
  copies = []
  for index in range(count):
    copy = Copy(
      directory=directory / f"copy{index}",
      cache=directory / f"compiled{index}",
    )
    copy_to(copy.directory)
    copies.append(copy)
  return copies


def detect_in_copies(
  faults: Sequence[Fault], copies: Sequence[Copy]
) -> Iterator[tuple[Fault, Detection]]:
  """Tries faults in parallel, one at a time in each copy.

  Args:
    faults: The faults to try.
    copies: Copies of the repository.

  Yields:
    Each fault with its result, in the order in which the results come.
  """
  free_copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
  for copy in copies:
    free_copies.put(copy)

  def detect_in_free_copy(fault: Fault) -> Detection:
    copy = free_copies.get()
    try:
      return detect(fault, copy)
    finally:
      free_copies.put(copy)

  with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
    faults_by_future = {}
    for fault in faults:
      future = pool.submit(detect_in_free_copy, fault)
      faults_by_future[future] = fault
    for future in concurrent.futures.as_completed(faults_by_future):
      yield faults_by_future[future], future.result()


def main() -> None:
  """Tries the chosen faults. Exits with 1 if the tests miss a fault."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--only", default="*", help="names of faults; * matches any text"
  )
  parser.add_argument(
    "--again",
    action="store_true",
    help="also try faults that benchmarks/faults.md has",
  )
  parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
  flags = parser.parse_args()

  faults = load_faults()
  detections = read_table(TABLE.read_text(encoding="utf-8"))
  selected = []
  for fault in faults:
    is_named = fnmatch.fnmatch(fault.name, flags.only)
    if is_named and (flags.again or fault.name not in detections):
      selected.append(fault)
  detect_all(faults, selected, detections, flags.jobs)
  print(summary(detections))
  is_any_missed = any(not found.tier for found in detections.values())
  sys.exit(1 if is_any_missed else 0)


if __name__ == "__main__":
  main()
