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
  """A copy of an experiment's folder with results.json alone."""
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
  before = read_files(folder)

  draw.main(["eight_heads"])

  assert read_files(folder) == before
  assert b"<dc:date>" not in (folder / "plot.svg").read_bytes()


def test_the_results_of_a_grid_in_a_subfolder_are_drawn(folder):
  """Results of larger grids are in subfolders named by the grid."""
  (folder / "gpu").mkdir()
  (folder / "results.json").rename(folder / "gpu/results.json")

  draw.main([])

  for file in FILES:
    assert (folder / "gpu" / file).exists()


def test_a_missing_summary_is_computed(folder):
  path = folder / "results.json"
  stored = json.loads(path.read_text())
  path.write_text(json.dumps({**stored, "summary": []}))

  draw.main([])

  expected = json.loads((SOURCE / "results.json").read_text())["summary"]
  assert len(json.loads(path.read_text())["summary"]) == len(expected)
  assert (folder / "table.md").read_text() == (SOURCE / "table.md").read_text()


def test_results_are_unchanged_if_the_summary_differs_in_its_last_digits(
  folder,
):
  """The last digits of a fit differ between machines."""
  path = folder / "results.json"
  stored = json.loads(path.read_text())
  for row in stored["summary"]:
    value, low, high = row["loss, difference"]
    row["loss, difference"] = [value * (1 + 1e-9), low, high]
  path.write_text(json.dumps(stored))
  before = path.read_bytes()

  draw.main([])

  assert path.read_bytes() == before


def test_an_unknown_experiment_is_an_error(folder):
  with pytest.raises(
    UserError, match="there is no experiment 'nothing'; there are eight_heads,"
  ):
    draw.main(["nothing"])
