"""A conversion holds a few tensors in memory, for models of any size."""

import filecmp
import subprocess
import sys

import pytest

from tests.harness import ROOT


@pytest.mark.full
@pytest.mark.usefixtures("system_allocator")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_conversion_holds_at_most_a_third_of_the_model(tmp_path):
  """A model of 770 MB is converted to a workdir, and the workdir back.

  The program converts "source" to "run", and "run" to "out".
  """
  command = [sys.executable, "-m", "tests.interop.conversion_memory", tmp_path]
  result = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, check=False
  )

  assert result.returncode == 0, result.stderr
  # The command prints the peak of each conversion, in MB.
  peak_to_run, peak_to_out = result.stdout.split()
  assert int(peak_to_run) < 770 / 3
  assert int(peak_to_out) < 770 / 3
  # The files that come back are those of the source.
  for source in (tmp_path / "source").glob("*.safetensors"):
    assert filecmp.cmp(source, tmp_path / "out" / source.name, shallow=False)
