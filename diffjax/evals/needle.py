"""Multi-needle retrieval: finds numbers that are hidden in a long text.

A needle is a sentence that assigns a magic number to a city. The haystack is
the text around the needles. The model is asked for some of the numbers.

The protocol of the paper (paper.md, §5): The text contains N needles, and the
question asks for R of them. The first needle in the question is placed at a
given depth, the others at random. There are 50 samples for each depth and
length. The model writes 20 tokens by greedy decoding. A number counts as
retrieved if it occurs in the text that the model wrote.

The paper does not specify these choices:

- One question asks for all R numbers. The prompt ends with the first words of
  the answer, which list the R cities in order. The score of a sample is the
  fraction of the R numbers that the model wrote. With R = 2, one generation
  must contain both numbers, as the paper's "query cities" implies.
- Numbers are between 10,000 and 49,999. (Public versions of this test also stay
  below 50,000.) All have five digits, so none contains another. A random number
  from the range is correct once in 40,000 times.
- A length includes the answer. The prompt has `length - new_tokens` tokens, so
  a model can be measured at its maximum length.
- `methods/needle_prompts.py` describes prompts and haystacks.

The defaults measure the paper's table at 4K. For the heat map at 64K:

    --set.needle.pairs=8/1
    --set.needle.lengths=8192,16384,24576,32768,40960,49152,57344,65536
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import matplotlib.figure
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes

from diffjax.config import FRACTION, UserError, at_least, field
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.measurement import Measurement, proportion
from diffjax.evals.methods.needle_prompts import (
  NeedlePrompt,
  find_haystack,
  make_prompts,
)
from diffjax.evals.report.plots import WIDTH, styles_of
from diffjax.evals.report.results import MainFigure, TableSpec, excludes_zero
from diffjax.evals.suite import Suite
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

# The length in tokens, if the settings have none and the model allows it.
_DEFAULT_LENGTH = 4096

# The size of the haystack relative to the longest length. Samples begin at
# random positions, so a large haystack makes them different.
_HAYSTACK_SIZE_FACTOR = 16

# Used to count the tokens of an answer.
_EXAMPLE_NUMBER = "40404"


class _NeedleCounts(NamedTuple):
  """The setting N/R: how many needles a text has, and how many are asked for.

  Attributes:
    num_needles: N, the number of needles in the text.
    num_asked: R, the number of needles that the question asks for.
  """

  num_needles: int
  num_asked: int


class _PromptGroup(NamedTuple):
  """A combination of settings that is measured with its own prompts.

  Attributes:
    pair: The number of needles in the text, and of needles asked for.
    length: The number of tokens of a prompt and its answer.
    depth: The position of the first needle asked for, from 0 to 1.
  """

  pair: _NeedleCounts
  length: int
  depth: float


class _Column(NamedTuple):
  """A column of heat maps in the plot.

  Attributes:
    title: The name of the model, or "difference".
    key: The field of a result that is shown: "value" is the first model,
      "against" the second model, "difference" the first minus the second.
    min_value: The lower end of the color scale. The upper end is 1.
    colormap: The name of a matplotlib colormap.
  """

  title: str
  key: str
  min_value: float
  colormap: str


@dataclasses.dataclass(frozen=True)
class Needle(Suite[list[list[int]]]):
  """Accuracy of retrieving numbers, by length and depth.

  The measurements are named "accuracy", the fraction of numbers asked for that
  the model wrote. For each pair and length, the mean over depths follows the
  measurements of the depths. The units are prompts: numbers in one answer are
  not independent, so the interval counts a prompt with R numbers as one trial.
  """

  name: ClassVar[str] = "needle"
  table: ClassVar[TableSpec] = TableSpec(
    unit="prompts",
    summary={"depth": "mean"},
    notes=("accuracy: share of the numbers asked for that the model wrote",),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure("needles found", "accuracy", "higher", {"depth": "mean"}),
  )

  pairs: tuple[str, ...] = field(
    ("1/1", "2/2", "4/2", "6/2"),
    "N/R: number of needles in the text / number of needles asked for.",
  )
  lengths: tuple[int, ...] = field(
    (),
    "Tokens of a prompt and its answer. Empty for 4096, or for the model's"
    " config.model.max_length if that is less.",
  )
  depths: tuple[float, ...] = field(
    (0.0, 0.25, 0.5, 0.75, 1.0),
    "Positions of the first needle asked for: 0 is the beginning of the"
    " haystack, 1 is its end.",
    bound=FRACTION,
  )
  samples: int = field(
    50, "Prompts for each pair, length and depth.", bound=at_least(1)
  )
  new_tokens: int = field(
    20, "Tokens that the model writes, at most.", bound=at_least(1)
  )
  haystack: str = field(
    "validation",
    '"validation" (validation text of the model\'s training data) or'
    ' "synthetic" (generated sentences).',
  )
  seed: int = field(0, "Seed of cities, numbers and positions.")
  batch_tokens: int = field(
    32_768, "Tokens of a batch, which has at least one prompt."
  )

  def load(self, trained: Trained) -> list[list[int]]:
    """Returns the haystack: the token ids of pieces of text.

    Raises:
      UserError: if a prompt is impossible, or there is no validation text.
    """
    lengths = self._lengths(trained)
    self._check_lengths(trained, lengths)
    for pair in self._parsed_pairs():
      self._check_answer_length(trained, pair)
    haystack = find_haystack(
      trained, self.haystack, tokens=_HAYSTACK_SIZE_FACTOR * max(lengths)
    )
    self._check_prompts(trained, haystack)
    return haystack

  def measure(
    self, trained: Trained, haystack: list[list[int]]
  ) -> Iterator[Measurement]:
    """Yields the accuracy for each length, pair and depth, and over depths."""
    for length in self._lengths(trained):
      batch_size = min(self.samples, self.batch_tokens // length)
      sampler = Sampler(
        trained.model,
        trained.params,
        batch_size=max(1, batch_size),
        capacity=length,
      )
      for pair in self._parsed_pairs():
        yield from self._measure_depths(
          trained, sampler, haystack, pair, length
        )

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws heat maps of the accuracy over length and depth.

    The plot has a row for each pair of N and R. It has a column for each model.
    With two models, a third column shows the difference. A difference is bold
    if its interval excludes 0.
    """
    results = []
    for result in suite_results["figures"]:
      if result["at"]["depth"] != "mean":
        results.append(result)
    lengths = sorted({result["at"]["length"] for result in results})
    depths = sorted({result["at"]["depth"] for result in results})
    results_by_pair = _group_by_pair(results)
    columns = _make_columns(suite_results["models"])

    # In inches: space for labels, plus 0.7 for a cell and 2.4 for a heat map.
    width = max(WIDTH, 1.5 + len(columns) * 0.7 * len(lengths))
    height = 0.6 + 2.4 * len(results_by_pair)
    figure = matplotlib.figure.Figure((width, height), layout="constrained")
    grid = figure.subplots(len(results_by_pair), len(columns), squeeze=False)
    for pair, row in zip(results_by_pair, grid, strict=True):
      for column, axes in zip(columns, row, strict=True):
        _draw_heat_map(axes, column, results_by_pair[pair], lengths, depths)
        axes.set_title(
          f"{column.title}: {pair.num_asked} of {pair.num_needles} needles",
          fontsize=10,
        )
      row[0].set_ylabel("depth of the answer")
    for axes in grid[-1]:
      axes.set_xlabel("length (tokens)")
    return figure

  def _lengths(self, trained: Trained) -> tuple[int, ...]:
    """Returns the lengths to measure, in tokens."""
    if self.lengths:
      return self.lengths
    return (min(_DEFAULT_LENGTH, trained.config.model.max_length),)

  def _parsed_pairs(self) -> list[_NeedleCounts]:
    """Returns the setting `pairs` as numbers."""
    return [_parse_pair(text) for text in self.pairs]

  def _measure_depths(
    self,
    trained: Trained,
    sampler: Sampler,
    haystack: Sequence[Sequence[int]],
    pair: _NeedleCounts,
    length: int,
  ) -> Iterator[Measurement]:
    """Yields the accuracy at each depth, and then over all depths."""
    coordinates: dict[str, Any] = {
      "needles": pair.num_needles,
      "asked": pair.num_asked,
      "length": length,
    }
    all_scores: list[float] = []
    for depth in self.depths:
      group = _PromptGroup(pair, length, depth)
      prompts = self._make_prompts(trained, haystack, group, self.samples)
      scores = _score(trained.tokenizer, sampler, prompts, self.new_tokens)
      yield proportion("accuracy", scores, **coordinates, depth=depth)
      all_scores += scores
    yield proportion("accuracy", all_scores, **coordinates, depth="mean")

  def _make_prompts(
    self,
    trained: Trained,
    haystack: Sequence[Sequence[int]],
    group: _PromptGroup,
    samples: int,
  ) -> list[NeedlePrompt]:
    """Returns prompts that leave `new_tokens` tokens of the length free.

    Raises:
      UserError: if no such prompt exists.
    """
    return make_prompts(
      trained.tokenizer,
      length=group.length - self.new_tokens,
      num_needles=group.pair.num_needles,
      num_asked=group.pair.num_asked,
      depth=group.depth,
      samples=samples,
      seed=self.seed,
      haystack=haystack,
    )

  def _check_prompts(
    self, trained: Trained, haystack: Sequence[Sequence[int]]
  ) -> None:
    """Raises UserError if a combination of the settings allows no prompt.

    It makes one prompt of each combination, because `make_prompts` finds the
    mistakes.
    """
    for length, pair, depth in itertools.product(
      self._lengths(trained), self._parsed_pairs(), self.depths
    ):
      group = _PromptGroup(pair, length, depth)
      self._make_prompts(trained, haystack, group, samples=1)

  def _check_lengths(self, trained: Trained, lengths: Sequence[int]) -> None:
    """Raises UserError if a length does not fit the model or the answer."""
    max_length = trained.config.model.max_length
    longest = max(lengths)
    if longest > max_length:
      raise UserError(
        f"set.needle.lengths = {longest}: the model takes at most {max_length}"
        " tokens (its config.model.max_length)"
      )
    shortest = min(lengths)
    if shortest <= self.new_tokens:
      raise UserError(
        f"set.needle.lengths = {shortest}: must be more than the"
        f" {self.new_tokens} tokens of the answer (set.needle.new_tokens)"
      )

  def _check_answer_length(self, trained: Trained, pair: _NeedleCounts) -> None:
    """Raises UserError if the numbers do not fit into `new_tokens` tokens."""
    example_answer = " " + " and ".join([_EXAMPLE_NUMBER] * pair.num_asked)
    num_tokens = len(trained.tokenizer.encode(example_answer))
    if num_tokens > self.new_tokens:
      raise UserError(
        f"set.needle.new_tokens = {self.new_tokens}: {pair.num_asked} numbers"
        f" take {num_tokens} tokens of {trained.tokenizer.spec!r}; raise it, or"
        " ask for fewer"
      )


def _parse_pair(text: str) -> _NeedleCounts:
  """Returns the numbers N and R of the text "N/R".

  Raises:
    UserError: if the text has another form.
  """
  try:
    num_needles, num_asked = map(int, text.split("/"))
  except ValueError:
    raise UserError(
      f"set.needle.pairs = {text!r}: must be N/R, needles in the text and"
      " needles asked for, such as 4/2"
    ) from None
  return _NeedleCounts(num_needles, num_asked)


def _score(
  tokenizer: Tokenizer,
  sampler: Sampler,
  prompts: Sequence[NeedlePrompt],
  new_tokens: int,
) -> list[float]:
  """Returns, for each prompt, the fraction of its numbers that are retrieved.

  A number is retrieved if it occurs in the text that the model writes.

  Args:
    tokenizer: The tokenizer of the model.
    sampler: Generates with the model.
    prompts: The prompts.
    new_tokens: The maximum number of tokens to write.
  """
  generated = sampler.generate(
    [prompt.ids for prompt in prompts],
    new_tokens,
    stop_ids=tokenizer.document_tokens.stop,
  )
  scores = []
  for ids, prompt in zip(generated, prompts, strict=True):
    text = tokenizer.decode(ids)
    retrieved = [answer for answer in prompt.answers if answer in text]
    scores.append(len(retrieved) / len(prompt.answers))
  return scores


def _group_by_pair(
  results: Sequence[Mapping[str, Any]],
) -> dict[_NeedleCounts, list[Mapping[str, Any]]]:
  """Groups results by the numbers of needles in the text and asked for."""
  results_by_pair: dict[_NeedleCounts, list[Mapping[str, Any]]] = {}
  for result in results:
    coordinates = result["at"]
    pair = _NeedleCounts(coordinates["needles"], coordinates["asked"])
    results_by_pair.setdefault(pair, []).append(result)
  return results_by_pair


def _make_columns(models: Sequence[Mapping[str, Any]]) -> list[_Column]:
  """Returns a column for each model and, with two models, the difference."""
  styles = styles_of(models)
  columns = [_Column(styles[0].name, "value", 0, "YlGn")]
  if len(styles) > 1:
    columns.append(_Column(styles[1].name, "against", 0, "YlGn"))
    columns.append(_Column("difference", "difference", -1, "RdBu"))
  return columns


def _draw_heat_map(
  axes: Axes,
  column: _Column,
  results: Sequence[Mapping[str, Any]],
  lengths: Sequence[int],
  depths: Sequence[float],
) -> None:
  """Draws a heat map of the results over length and depth.

  Args:
    axes: Where to draw.
    column: What is shown of a result, and in which colors.
    results: The results of one pair of N and R.
    lengths: All lengths, in the order of the x axis.
    depths: All depths, in the order of the y axis.
  """
  shape = (len(depths), len(lengths))
  values: Float[np.ndarray, "depths lengths"] = np.full(shape, np.nan)
  is_bold: Bool[np.ndarray, "depths lengths"] = np.zeros(shape, bool)
  for result in results:
    y = depths.index(result["at"]["depth"])
    x = lengths.index(result["at"]["length"])
    values[y, x] = _shown_value(result, column.key)
    if column.key == "difference":
      is_bold[y, x] = excludes_zero(result["difference"])

  axes.imshow(
    values, vmin=column.min_value, vmax=1, cmap=column.colormap, aspect="auto"
  )
  _write_values(axes, values, is_bold)
  axes.set_xticks(
    range(len(lengths)), [f"{length / 1024:.4g}K" for length in lengths]
  )
  axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])


def _write_values(
  axes: Axes,
  values: Float[np.ndarray, "depths lengths"],
  is_bold: Bool[np.ndarray, "depths lengths"],
) -> None:
  """Writes the value of each cell of a heat map into the cell."""
  for (y, x), value in np.ndenumerate(values):
    # Both ends of the color scale are dark.
    is_dark = abs(value) > 0.6
    axes.text(
      x,
      y,
      f"{value:.2f}",
      ha="center",
      va="center",
      fontsize=9,
      color="white" if is_dark else "black",
      fontweight="bold" if is_bold[y, x] else "normal",
    )


def _shown_value(result: Mapping[str, Any], key: str) -> float:
  """Returns the value of a result for a column with this key (`_Column`)."""
  if key == "value":
    return result["value"]
  # The second model and the difference have an object with their own value.
  return result[key]["value"]
