"""An old Python is rejected with a message that names the version."""

import subprocess
import sys
import tomllib

from tests.harness import ROOT

# This needs its own process, since setuptools must be imported before distutils
# is.
RUN_SETUP_AS_IF_PYTHON_HAD_VERSION = """
import runpy, sys
sys.version_info = (int(sys.argv[1]), int(sys.argv[2]), 9, "final", 0)
runpy.run_path("setup.py")
"""


def test_setup_rejects_an_older_python_than_the_metadata_allows():
  metadata = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  # For example ">=3.11".
  required = metadata["project"]["requires-python"]
  minor = int(required.removeprefix(">=3."))
  # The major and the minor version.
  older = ["3", str(minor - 1)]

  result = subprocess.run(
    [sys.executable, "-c", RUN_SETUP_AS_IF_PYTHON_HAD_VERSION, *older],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )

  assert result.returncode == 1
  message = f"diffjax needs Python 3.{minor} or newer; this is Python"
  assert result.stderr.startswith(message), result.stderr
