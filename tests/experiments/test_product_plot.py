"""The default figure of `Grid.product`."""

import math

import chex
import numpy as np
import pytest

from experiments import draw, product_plot
from experiments.grid import Experiment, Grid
from tests.harness.tolerances import FLOAT64

LOSS = "validation/loss"
FACTORS = {
  "model.lambda_init": [0.8, 0.2, 0.5],
  "model.head_norm": [True, False],
}


def make_results(factors, loss_of):
  """Returns a results.json of a product with two seeds.

  Args:
    factors: The values of each config field.
    loss_of: loss_of({"model.lambda_init": 0.2, …}, seed) is a run's loss.
  """
  made = Grid.product("tiny", factors, seeds=(0, 1))
  runs = []
  for seed in made.seeds:
    for variant, values in made.crossed.rows().items():
      run = {
        "name": f"{variant}/seed_{seed}",
        "variant": variant,
        "seed": seed,
        "factors": values,
        "parameters": 1000,
        "results": {LOSS: loss_of(values, seed)},
      }
      runs.append(run)
  return {"grid": "cpu", "baseline": made.baseline, "runs": runs}


def sum_of_factors(values, seed):
  """Returns λ_init + 0.1 * seed, plus 1 with the head norm."""
  loss = values["model.lambda_init"] + 0.1 * seed
  if values["model.head_norm"]:
    loss += 1
  return loss


def constant(values, seed):
  """Returns the same loss for all runs."""
  return 1.0


def draw_axes(factors, results):
  """Returns the axes of the figure."""
  figure = product_plot.plot(results, tuple(factors), LOSS, "the loss")
  (axes,) = figure.axes
  return axes


def points_of_lines(axes):
  """Returns the points [lines, x, 2] of the lines through the means."""
  points = []
  for line in axes.lines:
    if line.get_linestyle() != "None" and len(line.get_xdata()):
      points.append(line.get_xydata())
  return np.array(points)


def points_of_dots(axes):
  """Returns the points [runs, 2] of single runs, in order."""
  points = []
  for line in axes.lines:
    if line.get_linestyle() == "None":
      points += line.get_xydata().tolist()
  return np.array(sorted(points))


def legend_texts(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


def test_lines_connect_the_means_over_seeds():
  """Here loss = λ_init + 0.1 * seed, plus 1 with the head norm."""
  axes = draw_axes(FACTORS, make_results(FACTORS, sum_of_factors))

  # Points (λ_init, loss). The mean over the seeds 0 and 1 adds 0.1 / 2.
  with_norm = [(0.2, 1.25), (0.5, 1.55), (0.8, 1.85)]
  without_norm = [(0.2, 0.25), (0.5, 0.55), (0.8, 0.85)]
  expected = np.array([with_norm, without_norm])
  chex.assert_trees_all_close(points_of_lines(axes), expected, **FLOAT64)


def test_every_run_has_a_dot():
  """A dot is at the value of the first factor and at the run's loss."""
  results = make_results(FACTORS, sum_of_factors)

  axes = draw_axes(FACTORS, results)

  expected = []
  for run in results["runs"]:
    lambda_init = run["factors"]["model.lambda_init"]
    expected.append((lambda_init, run["results"][LOSS]))
  chex.assert_trees_all_close(
    points_of_dots(axes), np.array(sorted(expected)), **FLOAT64
  )


def test_axes_and_lines_are_named():
  """The factors are λ_init (the x-axis) and the head norm (the lines)."""
  axes = draw_axes(FACTORS, make_results(FACTORS, sum_of_factors))

  assert legend_texts(axes) == ["head_norm = True", "head_norm = False"]
  assert axes.get_xlabel() == "model.lambda_init"
  assert axes.get_ylabel() == "the loss"
  assert not axes.get_title()


def test_runs_without_a_number_are_left_out_and_counted():
  """A run that has failed has no loss, and one that has diverged has NaN."""
  factors = {"model.lambda_init": [0.2, 0.5, 0.8]}
  losses_of_seeds = {
    0.2: [2.0, 4.0],
    0.5: [3.0, None],
    0.8: [math.nan, 5.0],
  }

  def loss_of(values, seed):
    lambda_init = values["model.lambda_init"]
    return losses_of_seeds[lambda_init][seed]

  axes = draw_axes(factors, make_results(factors, loss_of))

  # Points (λ_init, mean loss).
  line = [(0.2, (2.0 + 4.0) / 2), (0.5, 3.0), (0.8, 5.0)]
  chex.assert_trees_all_close(
    points_of_lines(axes), np.array([line]), **FLOAT64
  )
  dots = [(0.2, 2.0), (0.2, 4.0), (0.5, 3.0), (0.8, 5.0)]
  chex.assert_trees_all_close(points_of_dots(axes), np.array(dots), **FLOAT64)
  assert axes.get_title() == "2 of 6 runs failed or have no number"


def test_values_that_are_no_numbers_are_evenly_spaced():
  factors = {"model.head_norm": [True, False]}
  losses = {True: 3.0, False: 2.0}

  def loss_of(values, seed):
    return losses[values["model.head_norm"]]

  axes = draw_axes(factors, make_results(factors, loss_of))

  # Points (position, loss): True is at 0, and False at 1.
  line = [(0, 3.0), (1, 2.0)]
  chex.assert_trees_all_close(
    points_of_lines(axes), np.array([line]), **FLOAT64
  )
  ticks = [text.get_text() for text in axes.get_xticklabels()]
  assert ticks == ["True", "False"]


def test_special_characters_are_shown_in_the_legend():
  """Matplotlib reads $ as mathematics, and hides labels that begin with _."""
  factors = {
    "model.head_norm": [True],
    "model.lambda_init": [0.2],
    "data.source": ["$a$", "_b"],
  }

  axes = draw_axes(factors, make_results(factors, constant))

  assert [text.strip() for text in legend_texts(axes)] == [
    r"lambda_init = 0.2, source = \$a\$",
    "lambda_init = 0.2, source = _b",
  ]


def test_lines_of_three_factors_have_different_looks():
  factors = {**FACTORS, "model.num_layers": [2, 4, 8]}

  axes = draw_axes(factors, make_results(factors, constant))

  # The color shows one of two values of the second factor, and the style of the
  # line shows one of three values of the third.
  lines = axes.get_legend().get_lines()
  colors = {line.get_color() for line in lines}
  looks = {(line.get_color(), line.get_linestyle()) for line in lines}
  assert len(colors) == 2
  assert len(looks) == 2 * 3


@pytest.mark.parametrize(
  "field, values, scale",
  [
    pytest.param(
      "optimizer.learning_rate", [1e-2, 1e-4, 1e-3], "log", id="learning_rates"
    ),
    pytest.param("model.lambda_init", [0.8, 0.2, 0.5], "linear", id="lambdas"),
  ],
)
def test_values_of_different_magnitudes_have_a_logarithmic_axis(
  field, values, scale
):
  factors = {field: values}

  axes = draw_axes(factors, make_results(factors, constant))

  assert axes.get_xscale() == scale


def test_the_line_of_a_single_factor_is_named():
  """The factor is on the x-axis, so there is one line."""
  rates = {"optimizer.learning_rate": [1e-2, 1e-4]}

  axes = draw_axes(rates, make_results(rates, constant))

  assert legend_texts(axes) == ["mean over seeds"]


def test_a_product_is_drawn_if_the_experiment_has_no_plot(tmp_path):
  """plot.png and plot.svg are the default figure of a product."""
  made = Grid.product("tiny", FACTORS, seeds=(0, 1))
  experiment = Experiment(
    question="?", grids={"cpu": made}, metrics={"loss": LOSS}
  )
  results = make_results(FACTORS, sum_of_factors)

  files = draw.draw(experiment, results, tmp_path)

  assert files == ["table.md", "plot.png", "plot.svg"]


def test_other_grids_have_no_default_plot(tmp_path):
  """A grid without factors has nothing for an x-axis."""
  made = Grid.product("tiny", FACTORS, seeds=(0, 1))
  plain = Grid(variants=made.variants, baseline=made.baseline, seeds=made.seeds)
  experiment = Experiment(
    question="?", grids={"cpu": plain}, metrics={"loss": LOSS}
  )

  files = draw.draw(experiment, make_results(FACTORS, constant), tmp_path)

  assert files == ["table.md"]
