"""The report's first screen: the main figures of the suites, and which differ.

For two models, a sentence says in which main figures they differ, and a table
shows each difference with its interval as a bar. For one model, a table shows
the main figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diffjax.evals.report import results
from diffjax.evals.suite import suite_class

# x coordinates in the SVG of a difference (summary.html.j2), which is 200 wide.
# A difference of 0 is in the middle, and bars reach from 8 to 192.
_BAR_ZERO = 100
_BAR_HALF_WIDTH = 92

# If the models are equal, one in 20 intervals of 95% excludes 0.
_INTERVALS_PER_FALSE_ALARM = 20

# How many main figures the sentence names for each verdict.
_NAMED_FIGURES = 2


class Number(NamedTuple):
  """A number of a table.

  Attributes:
    value: The value. A dash stands for a missing value.
    bounds: Its interval, such as "[0.1, 0.2]", or "".
    is_clear: Whether it is a difference whose interval excludes 0.
  """

  value: str
  bounds: str
  is_clear: bool = False


def number(interval: Mapping[str, Any] | None) -> Number:
  """Returns the value and the bounds of an interval as text."""
  value, _, bounds = results.number(interval).partition(" ")
  return Number(value, bounds)


def difference_number(interval: Mapping[str, Any] | None) -> Number:
  """Returns a difference as text. It is clear if its interval excludes 0."""
  is_clear = results.excludes_zero(interval)
  return number(interval)._replace(is_clear=is_clear)


class Bar(NamedTuple):
  """A difference and its interval, drawn on a scale of its own.

  Attributes:
    low: The x coordinate of the lower bound.
    high: The x coordinate of the upper bound.
    value: The x coordinate of the difference.
    is_clear: Whether the interval excludes 0.
    text: The difference and its interval as text.
  """

  low: str
  high: str
  value: str
  is_clear: bool
  text: str


@dataclasses.dataclass(frozen=True)
class Headline:
  """A main figure of a suite, of one model or of two.

  Attributes:
    suite: The name of the suite.
    title: The name of the figure on the first screen.
    better: "lower" or "higher". "" if neither is better.
    figure: The figure in the suite's results.
  """

  suite: str
  title: str
  better: str
  figure: Mapping[str, Any]

  @property
  def number(self) -> Number:
    """The figure of the first model."""
    return number(self.figure)

  @property
  def against(self) -> Number:
    """The figure of the second model."""
    return number(self.figure.get("against"))

  @property
  def bar(self) -> Bar | None:
    """The difference as a bar. None if there is no difference."""
    return _bar(self.figure.get("difference"))

  @property
  def verdict(self) -> str:
    """How the first model differs: "better", "worse", "lower" or "higher".

    "" if the interval of the difference includes 0.
    """
    difference = self.figure.get("difference")
    if difference is None or not results.excludes_zero(difference):
      return ""
    direction = "lower" if difference["value"] < 0 else "higher"
    if not self.better:
      return direction
    return "better" if direction == self.better else "worse"


@dataclasses.dataclass(frozen=True)
class FirstScreen:
  """The content of the first screen.

  Attributes:
    headlines: The main figures. Empty if no suite was measured.
    sentence: How the first model differs from the second, as the rest of a
      sentence that begins with its name. "" for one model.
    note: How to read the differences. "" for one model.
  """

  headlines: list[Headline]
  sentence: str = ""
  note: str = ""


def first_screen(
  results_by_suite: Mapping[str, Mapping[str, Any]], num_models: int
) -> FirstScreen:
  """Returns the content of the first screen.

  Args:
    results_by_suite: The results of the page's models.
    num_models: 1 or 2.
  """
  main_figures = headlines(results_by_suite)
  if num_models == 1 or not main_figures:
    return FirstScreen(main_figures)
  return FirstScreen(
    main_figures,
    sentence=_sentence(main_figures),
    note=_note(results_by_suite),
  )


def headlines(
  results_by_suite: Mapping[str, Mapping[str, Any]],
) -> list[Headline]:
  """Returns the main figures of the suites that were measured.

  Each suite declares its main figures (`Suite.main_figures`), such as the share
  of needles found. Those without a measurement are left out.

  Args:
    results_by_suite: The results of suites. Their order is kept.
  """
  measured = []
  for suite, suite_results in results_by_suite.items():
    figures = suite_results["figures"]
    for main_figure in suite_class(suite).main_figures:
      matching = [figure for figure in figures if main_figure.matches(figure)]
      if not matching:
        continue
      headline = Headline(
        suite=suite,
        title=main_figure.title,
        better=main_figure.better,
        # If several figures match, the last one stands for the suite.
        figure=matching[-1],
      )
      measured.append(headline)
  return measured


def _sentence(main_figures: Sequence[Headline]) -> str:
  """Returns the sentence that says how the first model differs.

  For example, "is better in needles found (0.9 against 0.7). 1 of 2 main
  figures shows no clear difference."
  """
  parts = []
  for verdict in ("better", "worse", "lower", "higher"):
    texts = []
    for headline in main_figures:
      if headline.verdict == verdict:
        texts.append(_title_and_values(headline))
    if texts:
      parts.append(f"{verdict} in {_shortened_list(texts)}")
  if not parts:
    return "does not differ clearly."

  sentence = f"is {'; '.join(parts)}."
  num_unclear = sum(headline.verdict == "" for headline in main_figures)
  if num_unclear > 0:
    verb = "shows" if num_unclear == 1 else "show"
    sentence += (
      f" {num_unclear} of {len(main_figures)} main figures {verb} no clear"
      " difference."
    )
  return sentence


def _title_and_values(headline: Headline) -> str:
  """Returns the title of a main figure with the values of both models."""
  value = headline.number.value
  return f"{headline.title} ({value} against {headline.against.value})"


def _shortened_list(texts: Sequence[str]) -> str:
  """Returns texts as a list in words, such as "a, b and 3 more"."""
  items = list(texts[:_NAMED_FIGURES])
  num_others = len(texts) - len(items)
  if num_others > 0:
    items.append(f"{num_others} more")
  if len(items) == 1:
    return items[0]
  return f"{', '.join(items[:-1])} and {items[-1]}"


def _bar(difference: Mapping[str, Any] | None) -> Bar | None:
  """Returns a difference and its interval as a bar, or None without a value.

  A difference without bounds is drawn as a point.
  """
  if difference is None or difference.get("value") is None:
    return None
  value = difference["value"]
  low = difference.get("low")
  high = difference.get("high")
  if low is None or high is None:
    low = value
    high = value
  # The bar's longer side reaches the edge of the picture.
  scale = max(abs(low), abs(high), abs(value))
  if scale == 0:
    scale = 1.0
  return Bar(
    low=_bar_coordinate(low, scale),
    high=_bar_coordinate(high, scale),
    value=_bar_coordinate(value, scale),
    is_clear=results.excludes_zero(difference),
    text=results.number(difference),
  )


def _bar_coordinate(number: float, scale: float) -> str:
  """Returns the x coordinate of a number from −scale to scale."""
  return f"{_BAR_ZERO + _BAR_HALF_WIDTH * number / scale:.1f}"


def _note(results_by_suite: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the text below the bars: how to read them, and the clear ones."""
  num_differences = 0
  num_clear = 0
  for suite_results in results_by_suite.values():
    for figure in suite_results["figures"]:
      if "difference" not in figure:
        continue
      num_differences += 1
      if results.excludes_zero(figure["difference"]):
        num_clear += 1
  num_by_chance = round(num_differences / _INTERVALS_PER_FALSE_ALARM)
  return (
    "Each line has its own scale, and its bar is the 95% interval of the paired"
    " difference; a filled point excludes 0. Of all"
    f" {num_differences} differences on this page {num_clear} exclude 0. If the"
    f" models were equal, about {num_by_chance} would by chance. The intervals"
    " say how far other rows, prompts or questions would move a number, and"
    " nothing of another training run."
  )
