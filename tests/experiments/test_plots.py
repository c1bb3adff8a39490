"""What figures share: styles of variants, means with intervals, and rates."""

import chex
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import comparison, grid, plots
from tests.harness.tolerances import FLOAT64

# The variants that stand in one legend.
TOGETHER = (
  "transformer",
  "transformer_wide",
  "transformer_norm",
  "diff",
  "diff_without_norm",
  "diff_lambda_zero",
  "diff_v2",
  "gated",
)
# The variants of throughput are shapes, which no legend shows.
EXPERIMENTS = [name for name in grid.names() if name != "throughput"]


def variants_of(name):
  """Returns the variants of all grids of an experiment."""
  variants = []
  for experiment in grid.experiments_of(name):
    for chosen_grid in experiment.grids.values():
      variants += chosen_grid.variants
  return list(dict.fromkeys(variants))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_has_a_name_of_its_own(name):
  variants = variants_of(name)

  names = [plots.style(variant).name for variant in variants]

  assert len(set(names)) == len(variants)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_names_are_words(name):
  for variant in variants_of(name):
    style_name = plots.style(variant).name

    assert "_" not in style_name.replace("λ_init", "")


@pytest.mark.parametrize("attribute", ["name", "color"])
def test_variants_of_one_legend_can_be_told_apart(attribute):
  values = {getattr(plots.ROWS[row], attribute) for row in TOGETHER}

  assert len(values) == len(TOGETHER)


def test_architectures_differ_in_their_markers():
  """The markers distinguish them in print without colours."""
  architectures = ("transformer", "diff", "diff_v2")

  markers = {plots.ROWS[row].marker for row in architectures}

  assert len(markers) == len(architectures)


def test_options_do_not_change_the_colour():
  assert plots.style("diff,heads=4").color == plots.style("diff").color


@pytest.mark.parametrize(
  "variant, name",
  [
    ("diff,size=1b,heads=4", "DIFF, size 1b, 4 heads"),
    ("lambda_init=0.2,head_norm=True", "lambda_init=0.2, head norm True"),
    ("mine", "mine"),
    ("diff,wide", "DIFF, wide"),
    ("mine,heads=4", "mine, 4 heads"),
    ("a$b$", r"a\$b\$"),
    ("_a", " _a"),
  ],
)
def test_the_options_of_a_variant_are_words_of_its_name(variant, name):
  """In a legend, Matplotlib reads $ and a leading _ as markup."""
  assert plots.style(variant).name == name


UNKNOWN_VARIANTS = [f"row {index}" for index in range(40)]


def test_unknown_variants_get_unused_looks():
  """A look is a color and a marker."""
  variants = ["diff", *UNKNOWN_VARIANTS, "transformer"]

  styles = plots.styles_of(variants)

  assert list(styles) == variants
  # Known variants keep their look.
  assert styles["diff"] == plots.ROWS["diff"]
  looks = {(style.color, style.marker) for style in styles.values()}
  assert len(looks) == len(variants)


def test_unknown_variants_get_unused_colours_first():
  """Nine variants get nine colours. Seven of the variants are unknown."""
  variants = ["diff", "transformer", *UNKNOWN_VARIANTS[:7]]

  styles = plots.styles_of(variants)

  colors = {style.color for style in styles.values()}
  assert len(colors) == 2 + 7


def test_another_variant_does_not_change_the_looks():
  variants = ["diff", *UNKNOWN_VARIANTS, "transformer"]

  styles = plots.styles_of([*variants, "another"])

  del styles["another"]
  assert styles == plots.styles_of(variants)


def draw_over_seeds(rows, suffix=""):
  """Draws the values [seeds, 4] of some variants at four steps.

  Returns:
    The axes, and the drawn error bars by the name in the legend.
  """
  axes = Figure().subplots()
  plots.over_seeds(axes, [1, 2, 4, 8], rows, suffix=suffix)
  handles, labels = axes.get_legend_handles_labels()
  return axes, dict(zip(labels, handles, strict=True))


def means_of(errorbar):
  """Returns the drawn means."""
  data_line, _, _ = errorbar.lines
  return np.asarray(data_line.get_ydata())


def bounds_of(errorbar):
  """Returns the bounds [n, 2] of the n intervals that are drawn."""
  _, _, (bars,) = errorbar.lines
  bounds = []
  for segment in bars.get_segments():
    if len(segment):
      bounds.append(segment[:, 1])
  return bounds


def test_means_and_their_intervals_are_drawn():
  num_seeds = 5
  num_steps = 4
  rng = np.random.default_rng(0)
  losses = rng.normal(loc=3, scale=1, size=(num_seeds, num_steps))

  _, errorbars = draw_over_seeds({"diff": losses})

  means = means_of(errorbars["DIFF"])
  bounds = bounds_of(errorbars["DIFF"])
  for step in range(num_steps):
    mean, low, high = comparison.mean_interval(losses[:, step])
    assert means[step] == pytest.approx(mean, rel=FLOAT64["rtol"])
    assert bounds[step] == pytest.approx([low, high], rel=FLOAT64["rtol"])


def test_the_frame_contains_all_intervals():
  losses_of_seeds = [[1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 7.0, 4.5]]

  axes, errorbars = draw_over_seeds({"diff": losses_of_seeds})

  bounds = np.array(bounds_of(errorbars["DIFF"]))
  bottom, top = axes.get_ylim()
  assert bottom < bounds.min()
  assert bounds.max() < top


def test_a_single_seed_has_no_interval():
  values_of_one_seed = [1.0, 2.0, 3.0, 4.0]

  _, errorbars = draw_over_seeds({"diff_v2": [values_of_one_seed]})

  assert bounds_of(errorbars["DIFF V2"]) == []


def test_there_is_no_mean_where_a_run_lacks_the_number():
  """A mean of the other runs alone would be biased."""
  first_seed = [1.0, None, 2.0, 3.0]
  second_seed = [1.0, 5.0, 2.0, 3.0]

  _, errorbars = draw_over_seeds({"gated": [first_seed, second_seed]})

  means = means_of(errorbars["Gated attention"])
  chex.assert_trees_all_equal(means, np.array([1.0, np.nan, 2.0, 3.0]))


def test_a_suffix_follows_the_names():
  values = [[1.0, 2.0, 3.0, 4.0]]

  _, errorbars = draw_over_seeds(
    {"diff": values, "gated": values}, suffix=", after"
  )

  assert list(errorbars) == ["DIFF, after", "Gated attention, after"]


def run_with_rate(variant, learning_rate, loss):
  """Returns a run of a results.json, with the learning rate of its config."""
  return {
    "variant": variant,
    "config": {"optimizer.learning_rate": learning_rate},
    "results": {"loss": loss},
  }


def drawn_means(runs):
  """Returns the points [learning rate, mean loss] of all lines."""
  figure = plots.over_rates(
    {"config": {}, "runs": runs}, metric="loss", title="loss"
  )
  figure.draw_without_rendering()
  points = []
  # Each line of means is followed by the dots of its runs.
  for line in figure.axes[0].lines[::2]:
    points += line.get_xydata().tolist()
  return points


def test_learning_rates_are_those_of_the_name_or_the_config():
  """A variant such as "diff,rate=0.5" names the rate. Others do not."""
  runs = [
    run_with_rate("diff,rate=0.5", learning_rate=0.25, loss=7.0),
    run_with_rate("gated", learning_rate=0.25, loss=6.0),
  ]

  points = drawn_means(runs)

  assert points == [[0.5, 7.0], [0.25, 6.0]]


def test_more_variants_than_line_styles_are_drawn():
  """Variants of an architecture with different options have line styles.

  Matplotlib has four line styles. Then they repeat.
  """
  runs = []
  for layers in (1, 2, 3, 4, 5, 6):
    variant = f"diff,layers={layers}"
    runs.append(run_with_rate(variant, learning_rate=0.25, loss=6.0))

  points = drawn_means(runs)

  # Each variant has one point, (learning rate, mean loss).
  assert points == [[0.25, 6.0]] * 6
