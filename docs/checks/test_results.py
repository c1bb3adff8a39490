"""The committed results agree with the code: settings, tables and figures."""

import json

import matplotlib.category
import pytest

from experiments import compatibility, grid, results, table

# The folders with results, relative to experiments/: NAME for the grid "cpu" of
# an experiment, and NAME/GRID for another grid.
FOLDERS = [
  path.parent.relative_to(grid.FOLDER)
  for path in sorted(grid.FOLDER.rglob("results.json"))
]
PATHS_OF_DATA = ("data.source", "data.validation_source", "data.tokenizer")


def read_results(folder):
  """Returns the content of a folder's results.json."""
  return json.loads((grid.FOLDER / folder / "results.json").read_text())


def load_experiment(folder):
  """Returns the experiment of a folder's results."""
  stored = read_results(folder)
  return grid.load(stored["experiment"], stored["grid"])


def numbers_of(summary):
  """Returns the numbers of a summary and of its intervals, in order.

  A cell is a text, a number, or a number with the bounds of its interval.
  """
  numbers = []
  for row in summary:
    for cell in row.values():
      parts = cell if isinstance(cell, list | tuple) else [cell]
      for value in parts:
        if isinstance(value, int | float):
          numbers.append(value)
  return numbers


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_results_have_the_settings_of_the_grid(folder):
  """Further runs can be added only to results with the same settings."""
  experiment = load_experiment(folder)
  # A folder is NAME/GRID, or NAME for the grid "cpu".
  name = folder.parts[0]
  grid_name = "cpu" if len(folder.parts) == 1 else folder.parts[1]
  runs = grid.expand(name, experiment.grids[grid_name], changes={})
  # The data that an experiment prepares has another path on each machine.
  location_fields = PATHS_OF_DATA if experiment.prepare else ()
  path = grid.FOLDER / folder / "results.json"

  # This raises an error if the results have other settings.
  entries = results.read_folder(
    path, name, grid_name, runs, experiment.task, location_fields
  )

  # Runs may be missing. The others have the order of the grid.
  names_in_order = [run.name for run in runs if run.name in entries]
  assert list(entries) == names_in_order
  compatibility.check_python_versions(entries.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_committed_table_shows_the_results(folder):
  text = table.markdown(load_experiment(folder), read_results(folder))

  assert text == (grid.FOLDER / folder / "table.md").read_text()


@pytest.mark.parametrize(
  "folder",
  [folder for folder in FOLDERS if load_experiment(folder).summarise],
  ids=str,
)
def test_the_summary_is_computed_from_the_results(folder):
  stored = read_results(folder)

  summary = load_experiment(folder).summarise(stored)

  # The grids that tune learning rates have no summary.
  stored_summary = stored.get("summary", [])
  assert len(summary) == len(stored_summary)
  # The last digits of fits differ between machines.
  expected = numbers_of(stored_summary)
  assert numbers_of(summary) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("file", ["plot.png", "plot.svg"])
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_results_have_figures(folder, file):
  # A file of an empty figure is smaller.
  assert (grid.FOLDER / folder / file).stat().st_size > 20_000


@pytest.fixture(scope="module")
def figures():
  """The figures of all results, by folder."""
  figures = {}
  for folder in FOLDERS:
    figures[folder] = load_experiment(folder).plot(read_results(folder))
  return figures


def has_words(tick_labels):
  """Returns whether labels of ticks are words instead of numbers."""
  for tick in tick_labels:
    text = tick.get_text()
    if text and text[0].isalpha():
      return True
  return False


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_all_axes_have_labels(figures, folder):
  """A y-axis needs none if its ticks are words, or if panels share the axis."""
  visible_axes = [axes for axes in figures[folder].axes if axes.axison]
  for axes in visible_axes:
    panels_with_this_y_axis = axes.get_shared_y_axes().get_siblings(axes)
    is_shared = len(panels_with_this_y_axis) > 1
    assert axes.get_xlabel()
    assert axes.get_ylabel() or is_shared or has_words(axes.get_yticklabels())


def axes_of_categories(figure):
  """Returns the axes of a figure that have categories without an order.

  Numbers of bits are categories too, but they have an order.
  """
  chosen = []
  for axes in figure.axes:
    locator = axes.xaxis.get_major_locator()
    has_categories = isinstance(locator, matplotlib.category.StrCategoryLocator)
    if has_categories and not axes.get_xlabel().startswith("bits"):
      chosen.append(axes)
  return chosen


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_no_line_connects_categories(figures, folder):
  """A line would suggest values between two categories."""
  for axes in axes_of_categories(figures[folder]):
    for line in axes.lines:
      num_points = len(line.get_xdata())
      assert num_points < 2 or line.get_linestyle() == "None"


def test_some_figures_have_categories(figures):
  """Otherwise the test above would check nothing."""
  assert any(axes_of_categories(figure) for figure in figures.values())
