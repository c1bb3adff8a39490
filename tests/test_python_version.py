"""An old Python is rejected with a message that names the version."""

import re
import subprocess
import sys
import tomllib

from tests.harness import ROOT

# Runs setup.py as if the interpreter had the version of the arguments. It has a
# process of its own, since setuptools must be imported before distutils is.
SETUP = """
import runpy, sys
sys.version_info = (int(sys.argv[1]), int(sys.argv[2]), 9, "final", 0)
runpy.run_path("setup.py")
"""


def test_setup_rejects_an_older_python_than_the_metadata_allows():
  metadata = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  required = metadata["project"]["requires-python"]
  major, minor = map(int, re.fullmatch(r">=(\d+)\.(\d+)", required).groups())
  result = subprocess.run(
    [sys.executable, "-c", SETUP, str(major), str(minor - 1)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 1
  message = f"diffjax needs Python {major}.{minor} or newer; this is Python"
  assert result.stderr.startswith(message), result.stderr
