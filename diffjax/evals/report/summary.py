"""The report's first screen: what was compared and what differs, in a sentence and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diffjax.evals.report import results
from diffjax.evals.report.elements import Html, element, escape, number, table
from diffjax.plots.styles import Style


class _Kind(NamedTuple):
  """A number that stands for its suite: the last of these figures whose place has these values.

  Attributes:
    words: what the first screen calls it.
    figure: the figures' name, or its beginning.
    better: "lower" or "higher"; empty if neither is better.
    at: values of the figures' places.
  """

  words: str
  figure: str
  better: str
  at: Mapping[str, Any] = {}


_KINDS = {
  "validation": (
    _Kind("loss", "loss", "lower"),
    _Kind("loss on repeated n-grams (AR-Hit)", "AR-Hit", "lower"),
  ),
  "position_nll": (
    _Kind("loss over the longest context", "cumulative NLL", "lower"),
  ),
  "needle": (_Kind("needles found", "accuracy", "higher", {"depth": "mean"}),),
  "attention": (
    _Kind(
      "signed attention to the answer",
      "answer",
      "higher",
      {"weights": "signed", "depth": "mean"},
    ),
    _Kind(
      "signed attention noise",
      "noise",
      "lower",
      {"weights": "signed", "depth": "mean"},
    ),
    _Kind(
      "absolute attention noise",
      "noise",
      "lower",
      {"weights": "absolute", "depth": "mean"},
    ),
  ),
  "many_shot": (
    _Kind("many-shot accuracy", "accuracy", "higher"),
    _Kind("dependence on the order of examples", "best minus worst", "lower"),
  ),
  "hallucination": (
    _Kind("answers free of hallucination", "free of hallucination", "higher"),
  ),
  "outliers": (
    _Kind(
      "largest attention logit", "attention logits", "lower", {"value": "top-1"}
    ),
    _Kind("largest hidden state", "hidden states", "lower", {"value": "top-1"}),
  ),
  "quantised": (
    _Kind(
      "loss with the coarsest logits",
      "validation: loss",
      "lower",
      {"per": "tensor"},
    ),
  ),
  "mathematics": (_Kind("mathematics solved", "accuracy", "higher"),),
  "harness": (
    _Kind("mean accuracy of the harness", "mean accuracy", "higher"),
  ),
  "difference_map": (
    _Kind(
      "sparsity of attention (Hoyer)", "Hoyer sparsity", "", {"layer": "all"}
    ),
  ),
}


class Headline(NamedTuple):
  """A main figure of a suite.

  Attributes:
    suite: its suite.
    words: what it is, in words.
    better: "lower", "higher" or "".
    row: the figure, of one model or of two.
  """

  suite: str
  words: str
  better: str
  row: Mapping[str, Any]

  @property
  def verdict(self) -> str:
    """Of the first model: better, worse, lower or higher; or "" if the difference's interval holds 0."""
    difference = self.row.get("difference")
    if difference is None or not results.excludes_zero(difference):
      return ""
    side = "lower" if difference["value"] < 0 else "higher"
    return (
      side if not self.better else "better" if side == self.better else "worse"
    )


def headlines(measured: Mapping[str, Mapping[str, Any]]) -> list[Headline]:
  """The main figures of the suites that were measured, in the suites' order."""
  found = []
  for suite, result in measured.items():
    for kind in _KINDS.get(suite, ()):
      rows = [
        row
        for row in result["figures"]
        if row["name"].startswith(kind.figure)
        and kind.at.items() <= row["at"].items()
      ]
      if rows:
        found.append(Headline(suite, kind.words, kind.better, rows[-1]))
  return found


def first_screen(
  measured: Mapping[str, Mapping[str, Any]], styles: Sequence[Style]
) -> Html:
  """The sentence and the figure; of one model, which differs from none, the figure alone."""
  found = headlines(measured)
  if not found:
    return element(
      "p",
      "No suite has been measured here: this page shows how the models were trained and where they look.",
      class_="lead",
    )
  if len(styles) == 1:
    return table(
      [
        ["main figures", styles[0].name],
        *((_label(line), number(line.row)) for line in found),
      ]
    )
  return Html(
    _sentence(found, styles) + _figure(found, styles) + _note(measured)
  )


def _sentence(found: Sequence[Headline], styles: Sequence[Style]) -> Html:
  first, second = (element("strong", style.name) for style in styles)
  parts = []
  for verdict, words in (
    ("better", "better in"),
    ("worse", "worse in"),
    ("lower", "lower in"),
    ("higher", "higher in"),
  ):
    chosen = [
      f"{line.words} ({_short(line.row)} against {_short(line.row['against'])})"
      for line in found
      if line.verdict == verdict
    ]
    if chosen:
      parts.append(f"{words} {_listed(chosen)}")
  same = sum(not line.verdict for line in found)
  said = f" is {'; '.join(parts)}." if parts else " does not differ clearly."
  shows = "shows" if same == 1 else "show"
  rest = (
    f" {same} of {len(found)} main figures {shows} no clear difference."
    if parts and same
    else ""
  )
  return element(
    "p",
    Html(f"{first} against {second}: {first}{escape(said)}{escape(rest)}"),
    class_="lead",
  )


def _figure(found: Sequence[Headline], styles: Sequence[Style]) -> Html:
  """A line for each main figure: both models' numbers, and the difference with its interval as a bar beside 0."""
  names = [
    element("span", f"{style.name}", class_="key", style=f"--key:{style.color}")
    for style in styles
  ]
  rows: list[list[str | tuple[str, str]]] = [
    [
      "main figures",
      *names,
      ("← lower · higher →", "bar"),
      f"{styles[0].name} is",
    ]
  ]
  for line in found:
    numbers = [_short(line.row), _short(line.row.get("against"))]
    difference = (_bar(line.row.get("difference")), "bar")
    rows.append(
      [
        _label(line),
        *numbers,
        difference,
        (line.verdict or "unclear", line.verdict or "hint"),
      ]
    )
  return element("div", table(rows), class_="headlines")


def _bar(difference: Mapping[str, Any] | None) -> Html:
  """A difference and its interval on a scale of its own, whose middle is 0."""
  value, low, high = (
    (difference or {}).get(key) for key in ("value", "low", "high")
  )
  if difference is None or value is None:
    return Html("–")
  if low is None or high is None:
    low = high = value
  scale = max(abs(low), abs(high), abs(value)) or 1.0
  at = lambda number: f"{100 + 92 * number / scale:.1f}"
  return element(
    "svg",
    element("line", x1="100", x2="100", y1="0", y2="24", class_="zero"),
    element(
      "line", x1=at(low), x2=at(high), y1="12", y2="12", class_="interval"
    ),
    element(
      "circle",
      cx=at(value),
      cy="12",
      r="5",
      class_="clear" if results.excludes_zero(difference) else "unclear",
    ),
    element("title", f"difference {results.number(difference)}"),
    viewBox="0 0 200 24",
    role="img",
  )


def _note(measured: Mapping[str, Mapping[str, Any]]) -> Html:
  compared = [
    row["difference"]
    for result in measured.values()
    for row in result["figures"]
    if "difference" in row
  ]
  clear, chance = (
    sum(map(results.excludes_zero, compared)),
    round(len(compared) / 20),
  )
  return element(
    "p",
    "Each line has its own scale, and its bar is the 95% interval of the paired difference; a filled point excludes 0. Of all "
    f"{len(compared)} differences on this page {clear} exclude 0. If the models were equal, about {chance} would by chance. "
    "The intervals say how far other rows, prompts or questions would move a number, and nothing of another training run.",
    class_="hint",
  )


def _label(line: Headline) -> Html:
  better = f" {line.better} is better" if line.better else ""
  return Html(
    element("a", line.words, href=f"#{line.suite}")
    + element("span", better, class_="hint")
  )


def _short(interval: Mapping[str, Any] | None) -> str:
  return results.number(interval).partition(" ")[0]


def _listed(words: Sequence[str]) -> str:
  """The first two, and how many more there are: the figure below shows all."""
  first = [*words[:2], *[f"{len(words) - 2} more"] * (len(words) > 2)]
  return " and ".join(filter(None, [", ".join(first[:-1]), first[-1]]))
