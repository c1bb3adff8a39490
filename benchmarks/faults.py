"""Does the suite see faults? Puts one after the other into a copy of the repository, and runs the tests until one fails.

    python -m benchmarks.faults                               # all that benchmarks/faults.json does not hold yet; hours
    python -m benchmarks.faults --only 'ops/*' --again        # some of them, once more
    python -m benchmarks.faults --revision=0b4565c            # against the tests and the package of another commit

The faults stand in benchmarks/faults.toml, of the kind that real changes make. A fault meets first the tests in the files that it names,
those of the default tier and then those of the full one; and, where none of them sees it, all others in the same order, but not those of
another commit, which may have no tiers and take hours.
It ends at the first test that fails. At the end all tests that saw a fault are run without any: a test that fails then has seen nothing.
One fault, in decode/gpu.py, shows under Python 3.12 or later alone: the JAX before runs none of its tests.
The results go to benchmarks/faults.json, and as a table to benchmarks/faults.md; seconds are of one core, from the start of pytest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import json
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

ROOT = pathlib.Path(__file__).parents[1]
FAULTS, RESULTS, TABLE = (
  pathlib.Path(__file__).with_suffix(suffix)
  for suffix in (".toml", ".json", ".md")
)
# What chooses a tier's tests. Before there were tiers, the tests of the full one were marked slow.
_TIERS = {"default": [], "full": ["-m", "full or slow"]}
# Seconds after which tests are stopped: tests that hang have seen the fault.
_LIMIT = 3600.0


@dataclasses.dataclass(frozen=True)
class Fault:
  """An edit of one file, and where it should be seen.

  Attributes:
    name: ROOM/WORDS.
    file: The file, from the repository's root.
    old: What stands there, once.
    new: What stands there then.
    why: Who is harmed, and how.
    tests: Files or folders of tests that should see it; others are asked afterwards.
  """

  name: str
  file: str
  old: str
  new: str
  why: str
  tests: list[str]


@dataclasses.dataclass(frozen=True)
class Seen:
  """The result for a fault: the tier and the test that saw it ("" if none), and the seconds from the start of the tests until then."""

  tier: str
  test: str
  seconds: float


def load() -> list[Fault]:
  """The faults of benchmarks/faults.toml."""
  rooms = tomllib.loads(FAULTS.read_text(encoding="utf-8"))
  return [
    Fault(**{**fault, "name": f"{room}/{fault['name']}"})
    for room, faults in rooms.items()
    for fault in faults
  ]


def copy_to(directory: pathlib.Path, revision: str) -> None:
  """The repository as it stands, or a commit of it, without what git ignores."""
  if revision:
    archive = subprocess.run(
      ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
    ).stdout
    directory.mkdir()
    subprocess.run(["tar", "-x"], cwd=directory, input=archive, check=True)
    return
  listed = subprocess.run(
    ["git", "ls-files", "-z", "-co", "--exclude-standard"],
    cwd=ROOT,
    check=True,
    capture_output=True,
  )
  for name in filter(None, listed.stdout.decode().split("\0")):
    if (ROOT / name).exists():
      (directory / name).parent.mkdir(parents=True, exist_ok=True)
      # diffjax/configs is a link to a folder, which copy2 would open.
      shutil.copy2(ROOT / name, directory / name, follow_symlinks=False)


def pytest(
  directory: pathlib.Path, arguments: list[str], cache: pathlib.Path
) -> tuple[str, str]:
  """Runs tests up to the first that fails.

  Returns:
    The name of that test, or "" if all passed, or how pytest itself ended where it could name none; and what it printed.
  """
  command = [
    sys.executable,
    "-m",
    "pytest",
    "-x",
    "-n0",
    "--tb=line",
    "-rfE",
    *arguments,
  ]
  environment = {
    **os.environ,
    "PYTHONPATH": str(directory),
    "DIFFJAX_TESTS_COMPILED": str(cache),
    "XDG_CACHE_HOME": str(cache / "cache"),
  }
  with (
    tempfile.TemporaryFile("w+", encoding="utf-8") as out,
    tempfile.TemporaryDirectory() as scratch,
  ):
    process = subprocess.Popen(
      [*command, f"--basetemp={scratch}/pytest"],
      cwd=directory,
      env=environment,
      stdout=out,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      code = process.wait(_LIMIT)
    except subprocess.TimeoutExpired:
      code = -1
    for number in (
      signal.SIGTERM,
      signal.SIGKILL,
    ):  # and what the tests have left running
      try:
        os.killpg(process.pid, number)
      except ProcessLookupError:
        break
      time.sleep(0.1)
    process.wait()
    out.seek(0)
    text = out.read()
  if code in (0, 5):  # all passed; nothing to run
    return "", text
  if code == -1:
    return f"a test that does not end within {_LIMIT:.0f} s", text
  if -code in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
    raise RuntimeError(
      f"pytest was killed by {signal.Signals(-code).name}, which says nothing of the fault:\n{text[-3000:]}"
    )
  found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
  ended = code == 1 and text.startswith(
    "."
  )  # tests passed and none failed: a library has ended the process
  if code > 0 and not found and not ended:
    raise RuntimeError(
      f"pytest ends with {code} and names no test:\n{text[-3000:]}"
    )
  return found[1] if found else f"pytest ends with {code}", text


def look(
  fault: Fault, directory: pathlib.Path, cache: pathlib.Path, named_alone: bool
) -> Seen:
  """Puts a fault into a copy, runs the tests, and takes it out again."""
  path = directory / fault.file
  sound = path.read_text(encoding="utf-8")
  if sound.count(fault.old) != 1:
    raise ValueError(
      f"{fault.name}: {fault.file} holds its old text {sound.count(fault.old)} times"
    )
  path.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
  started = time.monotonic()
  try:
    named = [test for test in fault.tests if (directory / test).exists()]
    others = ["tests", *(f"--ignore={test}" for test in named)]
    for chosen in [named] if named_alone else [named, others]:
      for tier, options in _TIERS.items():
        test, _ = pytest(directory, [*options, *chosen], cache)
        if test:
          return Seen(tier, test, round(time.monotonic() - started, 1))
    return Seen("", "", round(time.monotonic() - started, 1))
  finally:
    path.write_text(sound, encoding="utf-8")


def table(faults: list[Fault], found: dict[str, dict[str, dict]]) -> str:
  """The results in Markdown: a row a fault, the suite as it is first and those of other commits after it."""
  revisions = list(found)
  heads = [
    f"suite of {revision}" if revision != "now" else "default | full | by | s"
    for revision in revisions
  ]
  lines = [f"| fault | file | {' | '.join(heads)} |"]
  lines.append("|---" * lines[0].count(" | ") + "|---|")
  for fault in faults:
    cells = []
    for revision in revisions:
      seen = found[revision].get(fault.name)
      if revision != "now":
        cells.append(
          ""
          if seen is None
          else {"default": "default", "full": "slow", "": "by no named test"}[
            seen["tier"]
          ]
        )
      elif seen is None:
        cells += [""] * 4
      else:
        cells += [
          "yes" if seen["tier"] == "default" else "no",
          "yes" if seen["tier"] else "**no**",
        ]
        cells += [
          f"`{seen['test'].removeprefix('tests/')}`".replace("|", "\\|"),
          f"{seen['seconds']:.0f}",
        ]
    lines.append(
      f"| {fault.name} | `{fault.file.removeprefix('diffjax/')}` | {' | '.join(cells)} |"
    )
  return "\n".join(lines)


def summary(found: dict[str, dict]) -> str:
  """The number of faults that each tier saw, in a line."""
  default, full = (
    sum(seen["tier"] in tiers for seen in found.values())
    for tiers in (("default",), ("default", "full"))
  )
  return f"{len(found)} faults: the default tier sees {default} ({default / len(found):.0%}), the full one {full} ({full / len(found):.0%})"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--only", default="*", help="faults by name; * stands for anything"
  )
  parser.add_argument(
    "--again",
    action="store_true",
    help="also those that benchmarks/faults.json holds already",
  )
  parser.add_argument(
    "--revision",
    default="",
    help="of the package and of the tests that a fault names; as they stand by default",
  )
  parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
  flags = parser.parse_args()
  faults, revision = load(), flags.revision or "now"
  results = (
    json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
  )
  found = results.setdefault(revision, {})
  chosen = [
    fault
    for fault in faults
    if fnmatch.fnmatch(fault.name, flags.only)
    and (flags.again or fault.name not in found)
  ]

  def save() -> None:
    ordered = {
      fault.name: found[fault.name] for fault in faults if fault.name in found
    }
    results[revision] = ordered
    RESULTS.write_text(
      json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    suites = {
      name: f"The suite of {name}, asked for no more tests than a fault names"
      for name in results
    } | {"now": "The suite as it is"}
    lines = [
      f"- {suites[name]}: {summary(seen)}." for name, seen in results.items()
    ]
    TABLE.write_text(
      "\n".join(
        [
          "What `python -m benchmarks.faults` found last.",
          "",
          *lines,
          "",
          table(faults, results),
          "",
        ]
      ),
      encoding="utf-8",
    )

  with (
    tempfile.TemporaryDirectory() as scratch,
    concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool,
  ):
    copies: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
    for job in range(flags.jobs):
      copy_to(pathlib.Path(scratch, f"copy{job}"), flags.revision)
      copies.put(pathlib.Path(scratch, f"copy{job}"))

    def do(fault: Fault) -> tuple[Fault, Seen]:
      directory = copies.get()
      try:
        return fault, look(
          fault,
          directory,
          pathlib.Path(scratch, f"compiled{directory.name[-1]}"),
          bool(flags.revision),
        )
      finally:
        copies.put(directory)

    for future in concurrent.futures.as_completed(
      [pool.submit(do, fault) for fault in chosen]
    ):
      fault, seen = future.result()
      found[fault.name] = dataclasses.asdict(seen)
      print(
        f"{fault.name}: {seen.tier or 'MISSED'}, {seen.test}, {seen.seconds:.0f} s",
        flush=True,
      )
      save()

    tests = sorted(
      {
        found[fault.name]["test"]
        for fault in chosen
        if "::" in found[fault.name]["test"]
      }
    )
    directory, wrong = copies.get(), True
    while tests and wrong:  # one after the other: pytest stops at the first
      wrong, text = pytest(
        directory, ["-m", "", *tests], pathlib.Path(scratch, "compiled")
      )
      if wrong:
        print(f"{wrong} fails without a fault:\n{text[-3000:]}")
        tests = [test for test in tests if test != wrong]
        for name in [
          name for name, seen in found.items() if seen["test"] == wrong
        ]:
          del found[name]
    save()
  print(summary(found))
  sys.exit(0 if all(seen["tier"] for seen in found.values()) else 1)


if __name__ == "__main__":
  main()
