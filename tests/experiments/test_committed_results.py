"""The committed results agree with the code: settings, tables and figures."""

import json

import matplotlib.category
import pytest

from experiments import compatibility, grid, results, table

# The folders with results, relative to experiments/.
FOLDERS = [
  path.parent.relative_to(grid.FOLDER)
  for path in sorted(grid.FOLDER.rglob("results.json"))
]
# The fields that `Experiment.prepare` sets.
LOCATION_FIELDS = ("data.source", "data.validation_source", "data.tokenizer")


def read_results(folder):
  """Returns the content of a folder's results.json."""
  return json.loads((grid.FOLDER / folder / "results.json").read_text())


def load_experiment(folder):
  """Returns the experiment of a folder's results."""
  stored = read_results(folder)
  return grid.load(stored["experiment"], stored["grid"])


def numbers_of(summary):
  """Returns the numbers of a summary and of its intervals, in order."""
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
  """The command that adds runs to results refuses those with other settings.

  The folder NAME has the results of the grid "cpu". The results of other grids
  are in NAME/GRID.
  """
  experiment = load_experiment(folder)
  name, *subfolders = folder.parts
  grid_name = "cpu"
  if subfolders:
    (grid_name,) = subfolders
  runs = grid.expand(name, experiment.grids[grid_name], {})
  location_fields = LOCATION_FIELDS if experiment.prepare else ()

  entries = results.read_folder(
    grid.FOLDER / folder / "results.json",
    name,
    grid_name,
    runs,
    experiment.task,
    location_fields,
  )

  # Runs may be missing. The others have the order of the grid.
  run_names = [run.name for run in runs]
  assert list(entries) == [name for name in run_names if name in entries]
  compatibility.check_python_versions(entries.values())


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_committed_table_shows_the_results(folder):
  text = table.markdown(load_experiment(folder), read_results(folder))

  assert text == (grid.FOLDER / folder / "table.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_summary_is_computed_from_the_results(folder):
  """The last digits of fits differ between machines."""
  stored = read_results(folder)
  experiment = load_experiment(folder)
  if experiment.summarise is None:
    pytest.skip("has no summary")

  summary = experiment.summarise(stored)

  expected = numbers_of(stored.get("summary", []))
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


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_all_axes_have_labels(figures, folder):
  """A y-axis needs none if its ticks are words, or if panels share the axis."""
  for axes in figures[folder].axes:
    if not axes.axison:
      continue
    assert axes.get_xlabel()
    has_words = False
    for tick in axes.get_yticklabels():
      if tick.get_text()[:1].isalpha():
        has_words = True
    is_shared = len(axes.get_shared_y_axes().get_siblings(axes)) > 1
    if not has_words and not is_shared:
      assert axes.get_ylabel()


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_no_line_connects_categories(figures, folder):
  """A line would suggest values between two categories.

  Numbers of bits are categories with an order, so lines may connect them.
  """
  for axes in figures[folder].axes:
    locator = axes.xaxis.get_major_locator()
    has_categories = isinstance(locator, matplotlib.category.StrCategoryLocator)
    if not has_categories or axes.get_xlabel().startswith("bits"):
      continue
    for line in axes.lines:
      if len(line.get_xdata()) > 1:
        assert line.get_linestyle() == "None"
