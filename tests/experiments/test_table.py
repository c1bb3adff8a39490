"""The markdown tables of results."""

import numpy as np
import pytest

from experiments import comparison, table
from experiments.grid import Experiment

LOSS = "validation/loss"
EXPERIMENT = Experiment("?", {}, {"loss": LOSS, "other": "x"})
NOISE = np.array([-0.01, 0.0, 0.01])


def make_results(losses, baseline="transformer"):
  """Returns results with one run per loss, by variant."""
  runs = []
  for variant, variant_losses in losses.items():
    for seed, loss in enumerate(variant_losses):
      run = {
        "name": f"{variant}/seed_{seed}",
        "variant": variant,
        "seed": seed,
        "parameters": 1_000_000,
        "results": {LOSS: loss},
      }
      runs.append(run)
  return {"baseline": baseline, "runs": runs}


def cells_of(line):
  """Returns the cells of a table's line."""
  return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_first_table_has_means_and_the_difference_of_the_first_metric():
  results = make_results({"transformer": 2.0 + NOISE, "diff": 1.9 + NOISE})

  lines = table.markdown(EXPERIMENT, results).splitlines()

  assert cells_of(lines[0]) == [
    "",
    "parameters",
    "seeds",
    "loss",
    "other",
    "loss − transformer's",
  ]
  mean = "2.0000 ± 0.0100"
  assert cells_of(lines[2]) == ["transformer", "1 M", "3", mean, "–", ""]
  low, high = comparison.difference(results, "diff", LOSS)[1:]
  difference = f"**-0.1000 [{low:+.4f}, {high:+.4f}]**"
  mean = "1.9000 ± 0.0100"
  assert cells_of(lines[3]) == ["diff", "1 M", "3", mean, "–", difference]


def test_the_second_table_has_the_differences_of_the_other_metrics():
  results = make_results({"transformer": 2.0 + NOISE, "diff": 1.9 + NOISE})
  for run in results["runs"]:
    run["results"]["x"] = run["seed"] + 0.0
    if run["variant"] == "diff":
      run["results"]["x"] += 2.0

  lines = table.markdown(EXPERIMENT, results).splitlines()

  value, low, high = comparison.difference(results, "diff", "x")
  assert lines[-5:-2] == [
    "| − transformer's | other |",
    "|---|---|",
    f"| diff | {value:+.4f} [{low:+.4f}, {high:+.4f}] |",
  ]


def test_a_single_seed_has_neither_deviations_nor_differences():
  results = make_results({"transformer": [2.0], "diff": [1.9]})

  text = table.markdown(EXPERIMENT, results)

  assert "±" not in text
  assert "−" not in text


def test_a_mean_of_some_runs_says_of_how_many():
  """A variant would look better than it is if its diverged run disappeared."""
  results = make_results({"transformer": [2.0, 2.1], "diff": [1.9, None]})

  lines = table.markdown(EXPERIMENT, results).splitlines()

  assert cells_of(lines[3]) == ["diff", "1 M", "2", "1.9000 (1 of 2)", "–"]


def test_vertical_bars_in_names_are_escaped():
  results = make_results({"a|b": [1.0, 1.1], "wide*": [2.0, 2.1]}, "a|b")

  lines = table.markdown(EXPERIMENT, results).splitlines()

  assert lines[2].startswith(r"| a\|b | 1 M |")
  assert lines[3].startswith("| wide* | 1 M |")


def test_the_summary_is_a_table():
  results = make_results({"transformer": [2.0, 2.1]})
  results["summary"] = [
    {"what": "a", "share": [0.6234, 0.5, 0.75], "speed": 51234.5},
    {"what": "b", "share": None, "speed": 0.01234},
  ]

  lines = table.markdown(EXPERIMENT, results).splitlines()

  assert lines[-5:] == [
    "",
    "| what | share | speed |",
    "|---|---|---|",
    "| a | 0.623 [0.5, 0.75] | 51,234 |",
    "| b | – | 0.0123 |",
  ]


def test_significant_differences_are_bold():
  losses = {"transformer": 1.0 + NOISE, "diff": 1.02 + NOISE}
  losses["diff_v2"] = 1.3 + NOISE

  lines = table.markdown(EXPERIMENT, make_results(losses)).splitlines()

  assert cells_of(lines[3])[-1].startswith("+0.0200 [")
  assert cells_of(lines[4])[-1].startswith("**+0.3000 [")


@pytest.mark.parametrize(
  "losses, baseline, compared",
  [
    pytest.param(
      {"transformer": NOISE, "diff": NOISE},
      "transformer",
      "the one row compared with transformer",
      id="one_row",
    ),
    pytest.param(
      {"transformer": NOISE, "diff": NOISE, "gated": NOISE},
      "transformer",
      "the 2 rows compared with transformer",
      id="two_rows",
    ),
    pytest.param(
      {
        "transformer,size=1": NOISE,
        "transformer,size=2": NOISE,
        "diff,size=1": NOISE,
        "diff,size=2": NOISE,
        "gated,size=2": NOISE,
      },
      "transformer,*",
      "the 2 rows compared with the transformer of the same options",
      id="two_rows_of_one_size",
    ),
  ],
)
def test_the_legend_says_among_how_many_rows_a_test_compares(
  losses, baseline, compared
):
  text = table.markdown(EXPERIMENT, make_results(losses, baseline))

  assert text.endswith(
    "Bold: the interval excludes 0, and Dunnett's p < 0.05 among"
    f" {compared}, each column by itself.\n"
  )
