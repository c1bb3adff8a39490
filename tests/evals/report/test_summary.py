"""The first screen names the main figures that differ."""

from typing import Any

import pytest

from diffjax.evals.report import summary


def interval(
  value: float | None, low: float | None, high: float | None
) -> dict[str, Any]:
  """Returns an interval as in the results of a suite."""
  return {"value": value, "low": low, "high": high, "units": 20}


def figure(name: str, difference: float, **settings: Any) -> dict[str, Any]:
  """Returns a figure of two models, with a difference ± 1."""
  return {
    "name": name,
    "at": settings,
    **interval(difference, difference, difference),
    "against": interval(0.0, 0.0, 0.0),
    "difference": interval(difference, difference - 1, difference + 1),
  }


def results_of(suite: str, *figures: dict[str, Any]) -> dict[str, Any]:
  """Returns the results of one suite, by its name."""
  return {suite: {"suite": suite, "figures": list(figures)}}


@pytest.mark.parametrize(
  "suite, name, settings, difference, verdict",
  [
    ("validation", "loss", {}, -2.0, "better"),
    ("validation", "loss", {}, 2.0, "worse"),
    ("validation", "loss", {}, 0.5, ""),
    ("needle", "accuracy", {"depth": "mean"}, 2.0, "better"),
    ("difference_map", "Hoyer sparsity", {"layer": "all"}, 2.0, "higher"),
    ("difference_map", "Hoyer sparsity", {"layer": "all"}, -2.0, "lower"),
  ],
)
def test_a_verdict_needs_an_interval_without_0(
  suite, name, settings, difference, verdict
):
  """A difference is clear if its interval, here ± 1, does not contain 0.

  A lower loss is better. A sparsity is neither better nor worse.
  """
  results = results_of(suite, figure(name, difference, **settings))

  (headline,) = summary.headlines(results)

  assert headline.verdict == verdict


def test_the_last_mean_over_depths_is_the_main_figure():
  """The suite "needle" has accuracies of several lengths and depths."""
  results = results_of(
    "needle",
    figure("accuracy", 1.0, depth="mean", length=1),
    figure("accuracy", 2.0, depth="mean", length=2),
    figure("accuracy", 3.0, depth=0.5, length=2),
  )

  (headline,) = summary.headlines(results)

  # The second figure, with the value 2. The third one is of a single depth.
  assert headline.number.value == "2"


def test_the_sentence_names_two_figures_for_each_verdict():
  """Three figures are better. The sentence names two of them and counts one.

  A lower loss is better, and a higher accuracy. All figures of the second model
  are 0.
  """
  loss = figure("loss", difference=-2.0)
  loss_on_ngrams = figure("AR-Hit", difference=-3.0)
  needle_accuracy = figure("accuracy", difference=4.0, depth="mean")
  many_shot_accuracy = figure("accuracy", difference=-5.0)
  # The interval 0.5 ± 1 contains 0.
  unclear_accuracy = figure("mean accuracy", difference=0.5)
  results = {
    **results_of("validation", loss, loss_on_ngrams),
    **results_of("needle", needle_accuracy),
    **results_of("many_shot", many_shot_accuracy),
    **results_of("harness", unclear_accuracy),
  }

  screen = summary.first_screen(results, num_models=2)

  assert screen.sentence == (
    "is better in loss (-2 against 0), loss on repeated n-grams (AR-Hit) (-3"
    " against 0) and 1 more; worse in many-shot accuracy (-5 against 0). 1 of 5"
    " main figures shows no clear difference."
  )


def test_the_note_counts_the_differences_that_exclude_0():
  """Intervals are differences ± 1, so the interval of 0.5 contains 0."""
  clear_figure = figure("loss", difference=-2.0)
  unclear_figure = figure("AR-Hit", difference=0.5)
  results = results_of("validation", clear_figure, clear_figure, unclear_figure)

  screen = summary.first_screen(results, num_models=2)

  assert "Of all 3 differences on this page 2 exclude 0." in screen.note


def test_the_sentence_without_clear_differences():
  """The interval of the difference, 0.5 ± 1, contains 0."""
  results = results_of("validation", figure("loss", 0.5))

  screen = summary.first_screen(results, num_models=2)

  assert screen.sentence == "does not differ clearly."


def test_one_model_has_headlines_and_no_sentence():
  results = results_of("validation", figure("loss", 2.0))

  screen = summary.first_screen(results, num_models=1)

  assert len(screen.headlines) == 1
  assert not screen.sentence
  assert not screen.note


@pytest.mark.parametrize(
  "difference, low, value, high",
  [
    # Shares of the largest number, 2.
    pytest.param(interval(1.0, -1.0, 2.0), -0.5, 0.5, 1.0, id="interval"),
    pytest.param(interval(-1.0, None, None), -1.0, -1.0, -1.0, id="no bounds"),
    pytest.param(interval(0.0, 0.0, 0.0), 0.0, 0.0, 0.0, id="zeros"),
  ],
)
def test_the_largest_bound_ends_the_bar(difference, low, value, high):
  """The bar of a difference ends at the largest of its value and bounds.

  `low`, `value` and `high` are parts of the way from 0 to that end.
  """
  row = {**figure("loss", 1.0), "difference": difference}

  (headline,) = summary.headlines(results_of("validation", row))

  x_of_zero = 100
  x_of_end = 192
  length = x_of_end - x_of_zero
  assert float(headline.bar.low) == x_of_zero + low * length
  assert float(headline.bar.value) == x_of_zero + value * length
  assert float(headline.bar.high) == x_of_zero + high * length


def test_a_difference_without_a_value_has_no_bar():
  row = {**figure("loss", 1.0), "difference": interval(None, None, None)}

  (headline,) = summary.headlines(results_of("validation", row))

  assert headline.bar is None
