"""The markdown tables of results."""

import pytest

from experiments import comparison, table
from experiments.grid import Experiment

# Tables have the columns "loss" and "hits", which are results of the runs.
EXPERIMENT = Experiment(
  question="?", grids={}, metrics={"loss": "validation/loss", "hits": "hits"}
)


def make_results(losses, baseline="transformer"):
  """Returns a results.json with one run for each loss.

  Args:
    losses: The losses of the seeds 0, 1 and so on, by variant.
    baseline: The variant with which the others are compared.
  """
  runs = []
  for variant, variant_losses in losses.items():
    for seed, loss in enumerate(variant_losses):
      run = {
        "name": f"{variant}/seed_{seed}",
        "variant": variant,
        "seed": seed,
        "parameters": 1_000_000,
        "results": {"validation/loss": loss},
      }
      runs.append(run)
  return {"baseline": baseline, "runs": runs}


def cells_of(line):
  """Returns the cells of a table's line."""
  return [cell.strip() for cell in line.split("|")[1:-1]]


def first_table(results):
  """Returns the rows of the first table: rows["diff"]["loss"] is a cell."""
  header, _, *lines = table.markdown(EXPERIMENT, results).splitlines()
  rows = {}
  for line in lines:
    # The table ends with an empty line.
    if not line:
      break
    cells = cells_of(line)
    rows[cells[0]] = dict(zip(cells_of(header), cells, strict=True))
  return rows


def test_the_first_table_has_the_means_and_deviations_of_all_metrics():
  results = make_results(
    {"transformer": [1.99, 2.0, 2.01], "diff": [1.89, 1.9, 1.91]}
  )

  rows = first_table(results)

  assert rows["transformer"] == {
    "": "transformer",
    "parameters": "1 M",
    "seeds": "3",
    "loss": "2.0000 ± 0.0100",
    # The runs have no result "hits".
    "hits": "–",
    "loss − transformer's": "",
  }
  assert rows["diff"]["loss"] == "1.9000 ± 0.0100"


def test_the_first_table_has_the_difference_of_the_first_metric():
  results = make_results(
    {"transformer": [1.99, 2.0, 2.01], "diff": [1.89, 1.9, 1.91]}
  )

  rows = first_table(results)

  _, low, high = comparison.difference(results, "diff", "validation/loss")
  # It is bold, since it is significant.
  difference = f"**-0.1000 [{low:+.4f}, {high:+.4f}]**"
  assert rows["diff"]["loss − transformer's"] == difference


def test_the_second_table_has_the_differences_of_the_other_metrics():
  """The loss, whose difference is in the first table, is not repeated."""
  results = make_results({"transformer": [2.0, 2.0], "diff": [2.0, 2.0]})
  hits_of_runs = {
    "transformer/seed_0": 0.1,
    "transformer/seed_1": 0.2,
    "diff/seed_0": 0.5,
    "diff/seed_1": 0.7,
  }
  for run in results["runs"]:
    run["results"]["hits"] = hits_of_runs[run["name"]]

  text = table.markdown(EXPERIMENT, results)

  difference = (0.5 + 0.7) / 2 - (0.1 + 0.2) / 2
  _, low, high = comparison.difference(results, "diff", "hits")
  assert (
    "| − transformer's | hits |\n"
    "|---|---|\n"
    f"| diff | {difference:+.4f} [{low:+.4f}, {high:+.4f}] |\n"
  ) in text


def test_a_table_of_one_seed_has_neither_deviations_nor_differences():
  # A deviation follows "±", and the header of a difference has a minus sign.
  results = make_results({"transformer": [2.0], "diff": [1.9]})

  text = table.markdown(EXPERIMENT, results)

  assert "±" not in text
  assert "−" not in text


def test_a_mean_without_the_diverged_runs_says_how_many_runs_it_has():
  """A variant would look better than it is if its diverged run disappeared."""
  diverged = None
  results = make_results({"transformer": [2.0, 2.1], "diff": [1.9, diverged]})

  lines = table.markdown(EXPERIMENT, results).splitlines()

  # A header, a line of dashes, and the Transformer come first.
  diff_row = cells_of(lines[3])
  assert diff_row == ["diff", "1 M", "2", "1.9000 (1 of 2)", "–"]


def test_vertical_bars_in_names_are_escaped():
  """In Markdown, a vertical bar would end the cell."""
  results = make_results(
    {"a|b": [1.0, 1.1], "wide*": [2.0, 2.1]}, baseline="a|b"
  )

  lines = table.markdown(EXPERIMENT, results).splitlines()

  assert lines[2].startswith(r"| a\|b | 1 M |")
  assert lines[3].startswith("| wide* | 1 M |")


def test_the_summary_of_an_experiment_is_the_last_table():
  results = make_results({"transformer": [2.0, 2.1]})
  results["summary"] = [
    # The share is a value with the bounds of its interval.
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
  # DIFF differs from the Transformer by 0.02, which is as much as its seeds
  # differ. DIFF V2 differs by 0.3.
  results = make_results(
    {
      "transformer": [0.99, 1.0, 1.01],
      "diff": [1.01, 1.02, 1.03],
      "diff_v2": [1.29, 1.3, 1.31],
    }
  )

  lines = table.markdown(EXPERIMENT, results).splitlines()

  # The last column of the rows of DIFF and DIFF V2.
  small_difference = cells_of(lines[3])[-1]
  large_difference = cells_of(lines[4])[-1]
  assert small_difference.startswith("+0.0200 [")
  assert large_difference.startswith("**+0.3000 [")


@pytest.mark.parametrize(
  "variants, baseline, compared",
  [
    pytest.param(
      ["transformer", "diff"],
      "transformer",
      "the one row compared with transformer",
      id="one_row",
    ),
    pytest.param(
      ["transformer", "diff", "gated"],
      "transformer",
      "the 2 rows compared with transformer",
      id="two_rows",
    ),
    pytest.param(
      [
        "transformer,size=1",
        "transformer,size=2",
        "diff,size=1",
        "diff,size=2",
        "gated,size=2",
      ],
      "transformer,*",
      "the 2 rows compared with the transformer of the same options",
      id="two_rows_of_one_size",
    ),
  ],
)
def test_the_legend_says_among_how_many_rows_a_test_compares(
  variants, baseline, compared
):
  """Dunnett's test corrects for the number of compared variants."""
  losses = dict.fromkeys(variants, [1.9, 2.0, 2.1])

  text = table.markdown(EXPERIMENT, make_results(losses, baseline))

  assert text.endswith(
    "Bold: the interval excludes 0, and Dunnett's p < 0.05 among"
    f" {compared}, each column by itself.\n"
  )
