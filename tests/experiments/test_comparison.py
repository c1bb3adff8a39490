"""Statistics over seeds: Student's and Welch's intervals, Dunnett's test."""

import chex
import numpy as np
import pytest
import scipy.stats

from experiments import comparison
from tests.harness.tolerances import FLOAT64

LOSS = "validation/loss"


def make_results(losses, baseline="transformer"):
  """Returns a results.json with one run for each loss.

  Args:
    losses: The losses of the seeds 0, 1 and so on, by variant.
    baseline: The variant with which the others are compared.
  """
  runs = []
  for variant, variant_losses in losses.items():
    for seed, loss in enumerate(variant_losses):
      run = {"variant": variant, "seed": seed, "results": {LOSS: loss}}
      runs.append(run)
  return {"baseline": baseline, "runs": runs}


def test_the_interval_of_a_mean_is_students_t_interval():
  values = np.array([2.1, 1.9, 2.4, 2.0, 2.3])

  actual = comparison.mean_interval(values)

  mean = values.mean()
  standard_error = values.std(ddof=1) / 5**0.5
  margin = scipy.stats.t.ppf(0.975, df=5 - 1) * standard_error
  chex.assert_trees_all_close(
    tuple(actual), (mean, mean - margin, mean + margin), **FLOAT64
  )


def test_a_single_value_has_no_interval():
  mean, low, high = comparison.mean_interval([2.0])

  assert mean == 2.0
  assert np.isnan(low)
  assert np.isnan(high)


def test_equal_values_have_an_interval_of_no_width():
  assert comparison.mean_interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
  "variant, against",
  [
    pytest.param("diff", "transformer", id="five_and_seven_runs"),
    pytest.param("diff_v2", "transformer", id="five_and_four_runs"),
    pytest.param("diff", "diff_v2", id="not_the_baseline"),
    pytest.param("transformer", "diff", id="baseline_minus_variant"),
  ],
)
def test_the_interval_of_a_difference_is_that_of_welchs_t_test(
  variant, against
):
  """Welch's test does not assume that both samples have one variance."""
  rng = np.random.default_rng(0)
  losses = {
    "transformer": rng.normal(loc=1, scale=0.3, size=5),
    "diff": rng.normal(loc=2, scale=0.1, size=7),
    "diff_v2": rng.normal(loc=3, scale=0.2, size=4),
  }
  results = make_results(losses)

  estimate = comparison.difference(results, variant, LOSS, against=against)

  welch = scipy.stats.ttest_ind(
    losses[variant], losses[against], equal_var=False
  )
  low, high = welch.confidence_interval(0.95)
  mean_difference = losses[variant].mean() - losses[against].mean()
  assert estimate.value == pytest.approx(mean_difference, rel=FLOAT64["rtol"])
  assert estimate.low == pytest.approx(low, rel=FLOAT64["rtol"])
  assert estimate.high == pytest.approx(high, rel=FLOAT64["rtol"])


def test_a_difference_is_from_the_baseline_by_default():
  """The baseline of these results is the Transformer."""
  results = make_results(
    {"transformer": [1.0, 1.2], "diff": [2.0, 2.1], "gated": [3.0, 3.1]}
  )

  actual = comparison.difference(results, "diff", LOSS)

  assert actual == comparison.difference(
    results, "diff", LOSS, against="transformer"
  )


def test_the_order_of_the_seeds_does_not_change_a_difference():
  """Runs with the same seed are not paired."""
  transformer = [1.0, 1.1, 1.3]
  diff = [2.0, 2.3, 2.4]
  results = make_results({"transformer": transformer, "diff": diff})
  reversed_results = make_results(
    {"transformer": transformer, "diff": diff[::-1]}
  )

  actual = comparison.difference(reversed_results, "diff", LOSS)

  expected = comparison.difference(results, "diff", LOSS)
  chex.assert_trees_all_close(actual, expected, **FLOAT64)


@pytest.mark.parametrize(
  "variant, against",
  [
    pytest.param("transformer", None, id="baseline_with_itself"),
    pytest.param("diff", "diff", id="variant_with_itself"),
    pytest.param("diff_v2", None, id="single_run"),
    pytest.param("gated", "diff_v2", id="against_a_single_run"),
    pytest.param("gated_wide", None, id="run_without_the_metric"),
  ],
)
def test_incomplete_samples_have_no_difference(variant, against):
  """A sample needs two runs or more, and a number from each of them."""
  results = make_results(
    {
      "transformer": [1.0, 1.0],
      "diff": [2.0, 2.0],
      "diff_v2": [3.0],
      "gated": [1.0, 2.0],
      "gated_wide": [1.0, None],
    }
  )

  assert comparison.difference(results, variant, LOSS, against) is None


def test_two_samples_of_equal_values_have_an_interval_of_no_width():
  results = make_results({"transformer": [1.0, 1.0], "diff": [2.0, 2.0]})

  assert comparison.difference(results, "diff", LOSS) == (1.0, 1.0, 1.0)


def test_one_sample_of_equal_values_can_be_compared():
  results = make_results({"transformer": [1.0, 1.0], "gated": [1.0, 2.0]})

  estimate = comparison.difference(results, "gated", LOSS)

  assert estimate.value == 1.5 - 1.0
  # The interval is wider than the range of the values.
  assert estimate.low < 0
  assert estimate.high > 1


def test_a_baseline_may_have_a_star_in_its_name():
  """Only a star after a comma, as in "NAME,*", stands for options."""
  results = make_results(
    {"wide*": [2.0, 2.1], "$x,y": [3.0, 3.1]}, baseline="wide*"
  )

  estimate = comparison.difference(results, "$x,y", LOSS)

  assert estimate.value == pytest.approx(3.05 - 2.05)


def test_variants_are_compared_with_the_baseline_of_the_same_size():
  results = make_results(
    {
      "transformer,size=1": [1.0, 1.1],
      "transformer,size=2": [2.0, 2.1],
      "diff,size=2": [2.3, 2.4],
    },
    baseline="transformer,*",
  )

  estimate = comparison.difference(results, "diff,size=2", LOSS)

  assert estimate.value == pytest.approx(2.35 - 2.05)
  # A baseline is not compared with itself.
  baseline = comparison.difference(results, "transformer,size=2", LOSS)
  assert baseline is None


def test_dunnetts_test_corrects_for_the_variants_of_the_same_size():
  """The p-values of one size do not depend on the runs of the other."""
  size_1 = {
    "transformer,size=1": [1.0, 1.1, 1.2],
    "diff,size=1": [1.1, 1.2, 1.3],
    "diff_v2,size=1": [1.2, 1.3, 1.4],
  }
  size_2 = {
    "transformer,size=2": [2.0, 2.1, 2.2],
    "diff,size=2": [2.1, 2.2, 2.3],
    "diff_v2,size=2": [2.2, 2.3, 2.4],
  }
  results = make_results({**size_1, **size_2}, baseline="transformer,*")
  results_of_size_1 = make_results(size_1, baseline="transformer,*")

  p_values = comparison.dunnett_p_values(results, LOSS)

  expected = comparison.dunnett_p_values(results_of_size_1, LOSS)
  assert p_values["diff,size=1"] == expected["diff,size=1"]
  assert p_values["diff_v2,size=1"] == expected["diff_v2,size=1"]


def test_samples_of_equal_values_have_no_p_values():
  results = make_results({"transformer": [1.0, 1.0], "diff": [2.0, 2.0]})

  assert comparison.dunnett_p_values(results, LOSS) == {}


def test_a_small_difference_is_not_significant_among_many_variants():
  """Among many variants, one may be 2.8 standard errors away by chance."""
  noise_of_seeds = np.array([-0.01, -0.005, 0.0, 0.005, 0.01])
  standard_error = noise_of_seeds.std(ddof=1) * np.sqrt(1 / 5 + 1 / 5)
  same_loss = 1.0 + noise_of_seeds
  small_difference = same_loss + 2.8 * standard_error
  large_difference = same_loss + 20 * standard_error
  losses = {"transformer": same_loss, "diff": small_difference}
  two_variants = make_results(losses)
  losses["diff_v2"] = large_difference
  for number in range(10):
    losses[f"row_{number}"] = same_loss
  many_variants = make_results(losses)

  assert comparison.significant_variants(two_variants, LOSS) == {"diff"}
  assert comparison.significant_variants(many_variants, LOSS) == {"diff_v2"}
  # Not even though the interval of DIFF, which is not corrected, excludes 0.
  assert comparison.difference(many_variants, "diff", LOSS).low > 0


def test_a_variant_whose_own_interval_includes_0_is_not_significant():
  """Dunnett's test alone would call DIFF significant.

  The test assumes that all variants have the same variance. Here, the losses of
  DIFF vary six times as much as other losses.
  """
  noise_of_seeds = np.array([-0.01, -0.005, 0.0, 0.005, 0.01])
  same_loss = 1.0 + noise_of_seeds
  losses = {"transformer": same_loss, "diff": 1.05 + 6 * noise_of_seeds}
  for number in range(4):
    losses[f"row_{number}"] = same_loss
  results = make_results(losses)

  significant = comparison.significant_variants(results, LOSS)

  assert significant == set()
  assert comparison.dunnett_p_values(results, LOSS)["diff"] < 0.05
  assert comparison.difference(results, "diff", LOSS).low < 0


def test_contrasts_leave_out_pairs_with_a_single_run():
  """A contrast is the difference of two variants, with an interval."""
  results = make_results(
    {"transformer": [1.0, 1.1], "diff": [2.0, 2.1], "gated": [3.0]}
  )
  pairs = [("diff", "transformer"), ("gated", "diff")]

  rows = comparison.contrasts(results, "loss", LOSS, pairs)

  # "gated" has a single run.
  difference = comparison.difference(results, "diff", LOSS)
  assert rows == [{"": "diff − transformer", "loss, difference": difference}]
