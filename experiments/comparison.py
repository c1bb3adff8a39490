"""Means, differences and tests of an experiment's variants over seeds.

All functions take the content of a results.json. It has one entry per run,
with the run's variant, its seed, and its results by metric.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from diffjax.evals.report.proportions import CONFIDENCE, Estimate

# A difference is significant if the p-value of Dunnett's test is below this.
SIGNIFICANCE_LEVEL = 0.05


def variant_names(results: Mapping[str, Any]) -> list[str]:
  """Returns the variants in the order of results.json."""
  return list(dict.fromkeys(run["variant"] for run in results["runs"]))


def runs_of(results: Mapping[str, Any], variant: str) -> list[dict[str, Any]]:
  """Returns the runs of a variant, in the order of results.json."""
  return [run for run in results["runs"] if run["variant"] == variant]


def values_by_seed(
  results: Mapping[str, Any], variant: str, metric: str
) -> dict[int, float]:
  """Returns a metric of a variant's runs. Runs without it are left out."""
  values = {}
  for run in runs_of(results, variant):
    value = run["results"].get(metric)
    if value is not None:
      values[run["seed"]] = value
  return values


def sample(
  results: Mapping[str, Any], variant: str, metric: str
) -> list[float] | None:
  """Returns a metric of all runs of a variant, or None if it is incomplete.

  The sample is incomplete if there are fewer than two runs, or if a run lacks
  the metric. Such a run may have diverged, so the other runs alone would be a
  biased sample.
  """
  runs = runs_of(results, variant)
  values = [run["results"].get(metric) for run in runs]
  if len(values) < 2 or None in values:
    return None
  return values


def baseline_of(results: Mapping[str, Any], variant: str) -> str:
  """Returns the variant that a variant is compared with.

  The baseline "NAME,*" is NAME with the options of the compared variant. For
  example, "transformer,*" is "transformer,size=1b" for "diff,size=1b".
  """
  baseline = results["baseline"]
  if not baseline.endswith(",*"):
    return baseline
  _, _, options = variant.partition(",")
  return baseline.removesuffix("*") + options


def mean_interval(values: Sequence[float]) -> Estimate:
  """Returns the mean with its 95% interval (Student's t).

  The bounds are NaN for a single value.
  """
  mean = float(np.mean(values))
  if len(values) < 2:
    return Estimate(mean, math.nan, math.nan)
  with _equal_values_allowed():
    test = scipy.stats.ttest_1samp(values, popmean=0)
    interval = test.confidence_interval(CONFIDENCE)
  return Estimate(mean, float(interval.low), float(interval.high))


def difference(
  results: Mapping[str, Any],
  variant: str,
  metric: str,
  against: str | None = None,
) -> Estimate | None:
  """Returns a variant's mean minus another's, with Welch's 95% interval.

  Runs with the same seed are not paired. They have the same order of data, but
  that does not make their results similar.

  Args:
    results: The content of a results.json.
    variant: The variant.
    metric: The name of a number in the runs' results.
    against: The variant that is subtracted. None for the baseline.

  Returns:
    The difference. None if both variants are the same, or if one of them has
    no complete sample.
  """
  if against is None:
    against = baseline_of(results, variant)
  if variant == against:
    return None
  values = sample(results, variant, metric)
  other_values = sample(results, against, metric)
  if values is None or other_values is None:
    return None

  with _equal_values_allowed():
    test = scipy.stats.ttest_ind(values, other_values, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
  mean = statistics.mean(values) - statistics.mean(other_values)
  return Estimate(mean, float(interval.low), float(interval.high))


def contrasts(
  results: Mapping[str, Any],
  title: str,
  metric: str,
  pairs: Iterable[tuple[str, str]],
) -> list[dict[str, Any]]:
  """Returns rows of a summary with the differences of pairs of variants.

  Args:
    results: The content of a results.json.
    title: The metric's name in the table.
    metric: The name of a number in the runs' results.
    pairs: For each row, the variant and the variant that is subtracted.

  Returns:
    The rows of the pairs that both have a complete sample.
  """
  rows = []
  for variant, against in pairs:
    estimate = difference(results, variant, metric, against)
    if estimate is not None:
      row = {
        "": f"{variant} − {against}",
        f"{title}, difference": estimate,
      }
      rows.append(row)
  return rows


def dunnett_p_values(
  results: Mapping[str, Any], metric: str
) -> dict[str, float]:
  """Returns the p-values of Dunnett's test for equal means, by variant.

  The test compares several variants with their baseline. It pools their
  variances, and corrects for the number of variants. Variants without a
  `difference` are left out, and so are variants that have no variance.
  """
  variants_by_baseline: dict[str, list[str]] = {}
  for variant in variant_names(results):
    if difference(results, variant, metric) is not None:
      baseline = baseline_of(results, variant)
      variants_by_baseline.setdefault(baseline, []).append(variant)

  p_values: dict[str, float] = {}
  for baseline, variants in variants_by_baseline.items():
    control = sample(results, baseline, metric)
    samples = [sample(results, variant, metric) for variant in variants]
    if not _has_variance([control, *samples]):
      continue
    with _equal_values_allowed():
      # SciPy estimates an integral with random numbers.
      test = scipy.stats.dunnett(*samples, control=control, random_state=0)
    for variant, p_value in zip(variants, test.pvalue, strict=True):
      p_values[variant] = float(p_value)
  return p_values


def significant_variants(results: Mapping[str, Any], metric: str) -> set[str]:
  """Returns the variants that differ significantly from their baseline.

  Two conditions must hold: Welch's interval excludes 0, and the p-value of
  Dunnett's test is below `SIGNIFICANCE_LEVEL`. The test alone would
  underestimate the error of a variant with a much larger variance than the
  others, because it pools the variances.
  """
  significant = set()
  for variant, p_value in dunnett_p_values(results, metric).items():
    estimate = difference(results, variant, metric)
    assert estimate is not None
    excludes_zero = estimate.low > 0 or estimate.high < 0
    if p_value < SIGNIFICANCE_LEVEL and excludes_zero:
      significant.add(variant)
  return significant


def _has_variance(samples: Iterable[Sequence[float] | None]) -> bool:
  """Returns True if the values of at least one sample differ."""
  for values in samples:
    if values is not None and len(set(values)) > 1:
      return True
  return False


@contextlib.contextmanager
def _equal_values_allowed() -> Iterator[None]:
  """Suppresses SciPy's warning about a sample of equal values.

  Its variance is exactly 0, so no precision is lost.
  """
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
    yield
