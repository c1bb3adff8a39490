"""`python -m experiments.draw` draws committed results again."""

import json
import pathlib
import shutil

import pytest

from diffjax.config import UserError
from experiments import draw, grid

# The committed results, whose summary takes little time.
SOURCE = pathlib.Path(draw.__file__).parent / "eight_heads"
FILES = ("table.md", "plot.png", "plot.svg")


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A copy of the folder of eight_heads with results.json alone.

  `draw.main` finds no other folder.
  """
  folder = tmp_path / "eight_heads"
  folder.mkdir()
  shutil.copy(SOURCE / "results.json", folder)
  monkeypatch.setattr(grid, "FOLDER", tmp_path)
  monkeypatch.setattr(grid, "names", lambda: ["eight_heads"])
  return folder


def read_files(folder):
  """Returns the contents of the files that are drawn."""
  return [(folder / file).read_bytes() for file in FILES]


def test_drawing_twice_gives_the_same_files(folder):
  draw.main(["eight_heads"])
  first_files = read_files(folder)

  draw.main(["eight_heads"])

  assert read_files(folder) == first_files
  # Matplotlib would write the date, which differs each time.
  assert b"<dc:date>" not in (folder / "plot.svg").read_bytes()


def test_the_results_of_a_grid_in_a_subfolder_are_drawn(folder):
  """Results of larger grids are in subfolders named by the grid."""
  (folder / "gpu").mkdir()
  (folder / "results.json").rename(folder / "gpu/results.json")

  # Without a name, all experiments are drawn: here only that of the fixture.
  draw.main([])

  for file in FILES:
    assert (folder / "gpu" / file).exists()


def test_a_missing_summary_is_computed(folder):
  path = folder / "results.json"
  committed = json.loads(path.read_text())
  path.write_text(json.dumps({**committed, "summary": []}))

  draw.main(["eight_heads"])

  summary = json.loads(path.read_text())["summary"]
  assert len(summary) == len(committed["summary"])
  # The table shows the numbers of the summary.
  assert (folder / "table.md").read_text() == (SOURCE / "table.md").read_text()


def test_results_json_is_kept_if_only_last_digits_of_its_summary_differ(folder):
  """The last digits of a summary that is computed again differ by machine."""
  path = folder / "results.json"
  stored = json.loads(path.read_text())
  for row in stored["summary"]:
    # A difference of losses, and the bounds of its interval.
    value, low, high = row["loss, difference"]
    row["loss, difference"] = [value * (1 + 1e-9), low, high]
  path.write_text(json.dumps(stored))
  stored_bytes = path.read_bytes()

  draw.main(["eight_heads"])

  assert path.read_bytes() == stored_bytes


# The folder is the only experiment that the error can list.
@pytest.mark.usefixtures("folder")
def test_an_unknown_experiment_is_an_error():
  with pytest.raises(
    UserError, match="there is no experiment 'nothing'; there are eight_heads,"
  ):
    draw.main(["nothing"])
