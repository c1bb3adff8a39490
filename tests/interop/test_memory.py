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
  """The module writes a model of 770 MB to "source", and converts it twice.

  It converts "source" to the workdir "run", and then "run" to "out". It prints
  the most memory that each conversion has taken, in MB.
  """
  command = [sys.executable, "-m", "tests.interop.conversion_memory", tmp_path]
  result = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, check=False
  )

  assert result.returncode == 0, result.stderr
  mb_to_run, mb_to_out = result.stdout.split()
  assert int(mb_to_run) < 770 / 3
  assert int(mb_to_out) < 770 / 3
  # The files of "out" equal the files of the source.
  for source in (tmp_path / "source").glob("*.safetensors"):
    assert filecmp.cmp(source, tmp_path / "out" / source.name, shallow=False)
