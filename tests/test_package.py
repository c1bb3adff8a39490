"""The wheel holds the package alone, and works without a clone."""

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

from benchmarks.faults import copy_to
from tests.harness import ROOT

# Builds a wheel of the current directory into dist/.
BUILD_WHEEL = """
from setuptools import build_meta
build_meta.build_wheel("dist")
"""
# The folders with code that uses the configs.
FOLDERS = (
  "benchmarks",
  "configs",
  "diffjax",
  "experiments",
  "recipes",
  "tests",
)


def run(*command, cwd, environment=None):
  """Returns what a command prints, which must succeed."""
  result = subprocess.run(
    [str(argument) for argument in command],
    cwd=cwd,
    env=environment,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """The wheel, built in a copy of the repository. Needs setuptools 77."""
  directory = tmp_path_factory.mktemp("wheel") / "diffjax"
  directory.mkdir()
  copy_to(directory)

  run(sys.executable, "-c", BUILD_WHEEL, cwd=directory)

  (path,) = (directory / "dist").glob("*.whl")
  return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
  """`wheel` was built from a copy of this repository."""
  # diffjax/configs is a symbolic link, which rglob does not follow. The wheel
  # has its files.
  expected = set()
  for folder in (ROOT / "diffjax", ROOT / "diffjax/configs"):
    for path in folder.rglob("*"):
      if path.is_file() and "__pycache__" not in path.parts:
        expected.add(str(path.relative_to(ROOT)))

  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()

  # The folder NAME.dist-info has the wheel's own metadata.
  packaged = {name for name in names if ".dist-info/" not in name}
  assert packaged == expected
  # A file of the linked folder, and two templates.
  assert "diffjax/configs/tiny.py" in packaged
  assert "diffjax/evals/report/page.html.j2" in packaged
  assert "diffjax/interop/card.md.j2" in packaged


def test_code_imports_configs_as_diffjax_configs():
  """The wheel has no package `configs`, so `import configs` would fail."""
  statement = re.compile(r"^ *(import|from) configs\b", re.MULTILINE)

  for folder in FOLDERS:
    for path in (ROOT / folder).rglob("*.py"):
      assert not statement.search(path.read_text()), path


@pytest.mark.longest
@pytest.mark.full
def test_an_installed_wheel_trains_and_generates(wheel, tmp_path):
  """The commands work in an environment without a clone of the repository."""
  venv = tmp_path / "venv"
  run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
  python = venv / "bin/python"
  # The pip of the tests installs the wheel and what it requires.
  pip = [sys.executable, "-m", "pip", "--python", python]
  run(*pip, "install", "-q", "--no-compile", wheel, cwd=tmp_path)
  directory = tmp_path / "empty"
  directory.mkdir()
  environment = dict(os.environ)
  environment.pop("PYTHONPATH", None)

  def run_diffjax(*arguments):
    diffjax = venv / "bin/diffjax"
    return run(diffjax, *arguments, cwd=directory, environment=environment)

  run_diffjax(
    "train",
    "--config=tiny",
    "--config.model.num_layers=1",
    "--config.train.steps=2",
    "--config.train.sample_tokens=0",
    "--config.train.batch_size=1",
    "--config.eval.interval=0",
  )
  text = run_diffjax(
    "generate", "--workdir=runs/tiny", "--prompt=def ", "--max_new_tokens=4"
  )

  assert (directory / "runs/tiny/checkpoints/2").exists()
  assert text.startswith("def ")
  # Only the wheel can be imported. A clone also has a folder "configs".
  location, configs = run(
    python,
    "-c",
    "import importlib.util, diffjax;"
    "print(diffjax.__file__, importlib.util.find_spec('configs'))",
    cwd=directory,
    environment=environment,
  ).split()
  assert pathlib.Path(location).is_relative_to(venv)
  assert configs == "None"
