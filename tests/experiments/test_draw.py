"""`python -m experiments.draw` draws committed results again."""

import json
import pathlib
import shutil

import pytest

from diffjax.config import UserError
from experiments import draw, grid, series

# The committed results, whose summary takes little time.
COMMITTED_FOLDER = pathlib.Path(draw.__file__).parent / "eight_heads"
FILES = ("table.md", "plot.png", "plot.svg")


@pytest.fixture
def eight_heads_dir(tmp_path, monkeypatch):
  """The directory of the only experiment that `draw.main` finds, eight_heads.

  It is a copy with the committed results.json alone.
  """
  folder = tmp_path / "eight_heads"
  folder.mkdir()
  shutil.copy(COMMITTED_FOLDER / "results.json", folder)
  monkeypatch.setattr(grid, "FOLDER", tmp_path)
  monkeypatch.setattr(grid, "names", lambda: ["eight_heads"])
  return folder


def read_files(folder):
  """Returns the contents of the files that are drawn."""
  return [(folder / file).read_bytes() for file in FILES]


def test_drawing_twice_gives_the_same_files(eight_heads_dir):
  draw.main(["eight_heads"])
  first_files = read_files(eight_heads_dir)

  draw.main(["eight_heads"])

  assert read_files(eight_heads_dir) == first_files
  # Matplotlib would write the date, which differs each time.
  assert b"<dc:date>" not in (eight_heads_dir / "plot.svg").read_bytes()


def test_the_results_of_a_grid_in_a_subfolder_are_drawn(eight_heads_dir):
  """Results of larger grids are in subfolders named by the grid."""
  (eight_heads_dir / "gpu").mkdir()
  (eight_heads_dir / "results.json").rename(
    eight_heads_dir / "gpu/results.json"
  )

  # Without a name, all experiments are drawn. Here the fixture has only one.
  draw.main([])

  for file in FILES:
    assert (eight_heads_dir / "gpu" / file).exists()


def test_a_missing_summary_is_computed(eight_heads_dir):
  """The table of the experiment shows the numbers of the summary."""
  path = eight_heads_dir / "results.json"
  committed = json.loads(path.read_text())
  path.write_text(json.dumps({**committed, "summary": []}))

  draw.main(["eight_heads"])

  summary = json.loads(path.read_text())["summary"]
  assert series.column(summary, "") == series.column(committed["summary"], "")
  committed_table = (COMMITTED_FOLDER / "table.md").read_text()
  assert (eight_heads_dir / "table.md").read_text() == committed_table


def test_results_json_is_kept_if_the_rounded_summary_is_the_same(
  eight_heads_dir,
):
  """The last digits of a summary that is computed again differ by machine."""
  path = eight_heads_dir / "results.json"
  stored = json.loads(path.read_text())
  for row in stored["summary"]:
    # A difference of losses, and the bounds of its interval. The table rounds
    # them to three digits.
    numbers = row["loss, difference"]
    row["loss, difference"] = [number * (1 + 1e-9) for number in numbers]
  path.write_text(json.dumps(stored))
  stored_bytes = path.read_bytes()

  draw.main(["eight_heads"])

  assert path.read_bytes() == stored_bytes


# The folder is the only experiment that the error can list.
@pytest.mark.usefixtures("eight_heads_dir")
def test_an_unknown_experiment_is_an_error():
  with pytest.raises(
    UserError, match="there is no experiment 'nothing'; there are eight_heads,"
  ):
    draw.main(["nothing"])
