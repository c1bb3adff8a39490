"""The committed results agree with the code: settings, tables and figures."""

import json
import pathlib

import matplotlib.category
import pytest

from experiments import compatibility, grid, results, series, table

# The folders with results, relative to experiments/: NAME for the grid "cpu" of
# an experiment, and NAME/GRID for another grid.
FOLDERS = [
  path.parent.relative_to(grid.FOLDER)
  for path in sorted(grid.FOLDER.rglob("results.json"))
]


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
  stored = read_results(folder)
  experiment = load_experiment(folder)
  runs = grid.expand(
    stored["experiment"], experiment.grids[stored["grid"]], changes={}
  )

  # The data that an experiment prepares has another path on each machine.
  location_fields = ()
  if experiment.prepare:
    location_fields = (
      "data.source",
      "data.validation_source",
      "data.tokenizer",
    )

  # This raises an error if a run has other settings.
  entries = results.read_folder(
    grid.FOLDER / folder / "results.json",
    stored["experiment"],
    stored["grid"],
    runs,
    experiment.task,
    location_fields,
  )

  compatibility.check_python_versions(entries.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_is_named_by_its_experiment_and_grid(folder):
  """The grid "cpu" is in the experiment's folder, and others are below it."""
  stored = read_results(folder)

  expected = pathlib.Path(stored["experiment"])
  if stored["grid"] != "cpu":
    expected = expected / stored["grid"]
  assert folder == expected


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_results_have_the_order_of_the_grid(folder):
  """Runs may be missing, for example those of the last seeds."""
  stored = read_results(folder)
  chosen_grid = load_experiment(folder).grids[stored["grid"]]
  stored_names = series.column(stored["runs"], "name")

  expected_names = []
  for run in grid.expand(stored["experiment"], chosen_grid, changes={}):
    if run.name in stored_names:
      expected_names.append(run.name)

  assert stored_names == expected_names


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
def test_all_x_axes_have_labels(figures, folder):
  for axes in figures[folder].axes:
    # Empty panels of a figure have no axes.
    assert axes.get_xlabel() or not axes.axison


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_all_y_axes_have_labels(figures, folder):
  """A y-axis needs no label if its ticks are words, or if it is shared."""
  for axes in figures[folder].axes:
    panels_with_this_axis = axes.get_shared_y_axes().get_siblings(axes)
    needs_label = (
      axes.axison
      and not has_words(axes.get_yticklabels())
      and len(panels_with_this_axis) == 1
    )
    assert axes.get_ylabel() or not needs_label


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
