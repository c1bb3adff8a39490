"""The READMEs of the experiments agree with their results."""

import json

import pytest

from experiments import grid

# The folders with results, relative to experiments/.
FOLDERS = [
  path.parent.relative_to(grid.FOLDER)
  for path in sorted(grid.FOLDER.rglob("results.json"))
]


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_readme_counts_missing_runs(folder):
  """Runs are missing that have failed, or that were not trained."""
  stored = json.loads((grid.FOLDER / folder / "results.json").read_text())
  experiment = grid.load(stored["experiment"], stored["grid"])
  runs = grid.expand(folder.parts[0], experiment.grids[stored["grid"]], {})
  finished = [run for run in stored["runs"] if "failed" not in run]
  num_missing = len(runs) - len(finished)
  if num_missing == 0:
    return

  readme = (grid.FOLDER / folder / "README.md").read_text()

  # Line breaks may be anywhere in the sentence.
  text = " ".join(readme.split())
  assert f"{num_missing} of {len(runs)} runs are missing" in text
