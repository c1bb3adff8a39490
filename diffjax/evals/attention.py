"""Attention of a prompt's last token: to the answer, and to noise.

Attention weights multiply the values (`Attention.weights`). They are A₁ for the
Transformer and A₁ − λA₂ for DIFF. This suite measures the weights of a prompt's
last query, after which the model writes the answer. They are averaged over
heads and layers, divided by their sum, and summed over each part of the prompt:

- BOS, the start of the document.
- The context before the answer.
- The answer: the whole sentence of its needle.
- The context after the answer.
- The query.

Noise is the context before and after the answer.

A row of A₁ − λA₂ sums to 1 − λ and has negative entries. The paper does not say
how it normalizes such rows. So there are two versions:

- "signed": the weights divided by their sum. The shares sum to 1, as the
  paper's do. No absolute values are taken, so weights of opposite sign cancel.
  If both terms, A₁ and λA₂, give a part equal weight, its share is 0. This is
  the noise that differential attention cancels in its output, where weights of
  both signs meet similar values. A share can be negative or above 1. If λ is
  near 1, the sum is near 0, and shares grow without bound.
- "absolute": the absolute values of the averaged weights, divided by their sum.
  Weights within a part do not cancel. So this measure is harder for DIFF, and
  it is bounded.

For the Transformer, both versions are the same. The average comes before the
normalization, so that layers with a λ near 1, whose output is small, have
little influence.

The prompts are made as in the needle suite, with several needles. One of them
is asked for. The other needles are context.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.axes import Axes

from diffjax.config import FRACTION, UserError, at_least, field
from diffjax.evals.measurement import Measurement, mean_of
from diffjax.evals.methods import inside
from diffjax.evals.methods.needle_prompts import (
  NeedlePrompt,
  find_haystack,
  make_prompts,
)
from diffjax.evals.report.plots import WIDTH, by_model, draw_line
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

PARTS = ("BOS", "context before", "answer", "context after", "query")
_OTHER_PARTS = tuple(part for part in PARTS if part != "answer")

_VERSIONS = ("signed", "absolute")

# The length in tokens, if the settings have none and the model allows it.
_DEFAULT_LENGTH = 4096

# The size of the haystack relative to the length of a prompt. Prompts begin at
# random positions, so a large haystack makes them different.
_HAYSTACK_SIZE_FACTOR = 16


class ShareKey(NamedTuple):
  """Identifies a share of the attention.

  Attributes:
    part: One of `PARTS`, or "noise".
    version: "signed" or "absolute".
  """

  part: str
  version: str


# The shares of one prompt.
Shares = dict[ShareKey, float]


@dataclasses.dataclass(frozen=True)
class AttentionShares(Suite[list[list[int]]]):
  """Shares of a prompt's attention on the answer, and on the noise around it.

  The measurements are shares, which have no unit. They are named "answer" and
  "noise", for each depth of the answer and over all depths, both signed and
  absolute. The other parts of the prompt have only a signed share over all
  depths. The units are prompts.
  """

  name: ClassVar[str] = "attention"
  table: ClassVar[TableSpec] = TableSpec(
    unit="prompts",
    summary={"depth": "mean"},
    notes=(
      "Shares of the attention of a prompt's last token, over all depths.",
      "answer: the sentence with the answer; noise: the context around it",
      "signed: of the weights, A1 - λA2 for DIFF; absolute: of their absolute"
      " values",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure(
      "signed attention to the answer",
      "answer",
      "higher",
      {"weights": "signed", "depth": "mean"},
    ),
    MainFigure(
      "signed attention noise",
      "noise",
      "lower",
      {"weights": "signed", "depth": "mean"},
    ),
    MainFigure(
      "absolute attention noise",
      "noise",
      "lower",
      {"weights": "absolute", "depth": "mean"},
    ),
  )

  length: int = field(
    0,
    "Tokens of a prompt. 0 for 4096, or for the model's config.model.max_length"
    " if that is less.",
    bound=at_least(0),
  )
  needles: int = field(
    6, "Needles in a prompt. One of them is asked for.", bound=at_least(1)
  )
  depths: tuple[float, ...] = field(
    (0.0, 0.25, 0.5, 0.75, 1.0),
    "Positions of the answer's needle: 0 is the beginning of the haystack, 1 is"
    " its end.",
    bound=FRACTION,
  )
  samples: int = field(50, "Prompts for each depth.", bound=at_least(1))
  haystack: str = field(
    "validation",
    '"validation" (validation text of the model\'s training data) or'
    ' "synthetic" (generated sentences).',
  )
  seed: int = field(0, "Seed of cities, numbers and positions.")
  batch_tokens: int = field(
    16_384,
    "Tokens of a batch, which has at least one prompt.",
    bound=at_least(1),
  )

  def load(self, trained: Trained) -> list[list[int]]:
    """Returns the haystack: the token ids of pieces of text.

    Raises:
      UserError: if a prompt is impossible, or there is no validation text.
    """
    length = self._length(trained)
    max_length = trained.config.model.max_length
    if length > max_length:
      raise UserError(
        f"set.attention.length = {length}: {trained.name} takes 1 to"
        f" {max_length} tokens (config.model.max_length)"
      )
    if not self.depths:
      raise UserError(
        "set.attention.depths = (): pass at least one depth between 0 and 1"
      )
    haystack = find_haystack(
      trained, self.haystack, tokens=_HAYSTACK_SIZE_FACTOR * length
    )
    # Makes a prompt for each depth and drops it, because `make_prompts` raises
    # the errors about impossible prompts.
    for depth in self.depths:
      self._make_prompts(trained, haystack, depth, samples=1)
    return haystack

  def measure(
    self, trained: Trained, haystack: list[list[int]]
  ) -> Iterator[Measurement]:
    """Yields the shares of the answer, of noise and of the other parts."""
    shares_of_depths = self._compute_shares(trained, haystack)
    for version in _VERSIONS:
      for part in ("answer", "noise"):
        key = ShareKey(part, version)
        yield from _measurements_by_depth(key, self.depths, shares_of_depths)
    for part in _OTHER_PARTS:
      yield _mean_over_depths(ShareKey(part, "signed"), shares_of_depths)

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws the shares over the depth of the answer, in both versions.

    The left panel shows the share of the answer, and the right one of noise.
    """
    figure = matplotlib.figure.Figure((WIDTH, 4), layout="constrained")
    answer_axes, noise_axes = figure.subplots(1, 2)
    _draw_part(answer_axes, suite_results, "answer")
    _draw_part(noise_axes, suite_results, "noise")
    handles, labels = noise_axes.get_legend_handles_labels()
    figure.legend(
      handles, labels, loc="outside lower center", ncols=4, fontsize=9
    )
    return figure

  def _length(self, trained: Trained) -> int:
    """Returns the number of tokens of a prompt."""
    return self.length or min(_DEFAULT_LENGTH, trained.config.model.max_length)

  def _compute_shares(
    self, trained: Trained, haystack: Sequence[Sequence[int]]
  ) -> list[list[Shares]]:
    """Returns the shares of every prompt, in one list for each depth."""
    length = self._length(trained)
    batch_size = max(1, min(self.samples, self.batch_tokens // length))
    compute_weights = jax.jit(functools.partial(last_query, trained.model))
    shares_of_depths = []
    num_done = 0
    label = f"attention of {trained.short_name}"
    with Progress(label, self.samples * len(self.depths)) as progress:
      for depth in self.depths:
        prompts = self._make_prompts(trained, haystack, depth, self.samples)
        shares_of_prompts: list[Shares] = []
        for first in range(0, len(prompts), batch_size):
          batch = prompts[first : first + batch_size]
          tokens = _stack_tokens(batch, batch_size)
          weights = compute_weights(trained.params, tokens)
          shares_of_prompts += _shares_of_batch(weights, batch)
          num_done += len(batch)
          progress.update(num_done, num_done * length)
        shares_of_depths.append(shares_of_prompts)
    return shares_of_depths

  def _make_prompts(
    self,
    trained: Trained,
    haystack: Sequence[Sequence[int]],
    depth: float,
    samples: int,
  ) -> list[NeedlePrompt]:
    """Returns prompts with the answer at a depth.

    Raises:
      UserError: if no such prompt exists.
    """
    return make_prompts(
      trained.tokenizer,
      length=self._length(trained),
      num_needles=self.needles,
      num_asked=1,
      depth=depth,
      samples=samples,
      seed=self.seed,
      haystack=haystack,
    )


def last_query(
  model: Decoder, params: Any, tokens: Int[Array, "B T"]
) -> Float[Array, "B S"]:
  """Returns the attention weights of each prompt's last token.

  They are its weights on all tokens, averaged over heads and layers.

  Args:
    model: The decoder.
    params: Its parameters.
    tokens: The prompts, which have the same length.
  """

  def weights_of_layer(inputs: inside.AttentionInputs) -> Float[Array, "B S"]:
    length = inputs.q.shape[1]
    # Some attention variants need all queries to compute the weights of one.
    num_queries = length
    if inputs.has_independent_queries:
      num_queries = 1
    queries = inputs.queries(length - num_queries, num_queries)
    last_weights = queries.weights()[:, :, -1]  # [B, H, S]
    return jnp.mean(last_weights, axis=1)

  results = inside.measure(
    model, params, {"tokens": tokens}, attention=weights_of_layer
  )
  weights_of_layers = results["attention"]  # [L, B, S]
  return jnp.mean(weights_of_layers, axis=0)


def shares_of(weights: Float[np.ndarray, "S"], prompt: NeedlePrompt) -> Shares:
  """Returns the share of the attention that each part of a prompt receives.

  Noise has a share too. All shares have two versions: of the signed weights,
  and of their absolute values. A share is NaN if the weights sum to 0.

  Args:
    weights: The weights of the prompt's last query.
    prompt: The prompt.
  """
  shares = {}
  for version in _VERSIONS:
    version_weights = weights
    if version == "absolute":
      version_weights = np.abs(weights)
    part_shares = _part_shares(version_weights, prompt)
    for part, share in part_shares.items():
      shares[ShareKey(part, version)] = share
  return shares


def _shares_of_batch(
  weights: Float[Array, "B S"], prompts: Sequence[NeedlePrompt]
) -> list[Shares]:
  """Returns the shares of each prompt.

  Args:
    weights: The weights of the last queries. Rows after the last prompt only
      fill up the batch.
    prompts: The prompts.
  """
  rows = np.asarray(weights, np.float64)[: len(prompts)]
  shares = []
  for row, prompt in zip(rows, prompts, strict=True):
    shares.append(shares_of(row, prompt))
  return shares


def _part_shares(
  weights: Float[np.ndarray, "S"], prompt: NeedlePrompt
) -> dict[str, float]:
  """Returns the shares of the weights on each part of a prompt and on noise."""
  # The spans of BOS, the answer and the query. The spaces between them are the
  # context before and after the answer. So the boundaries of the spans divide
  # the prompt into the five parts.
  boundaries = [
    *prompt.bos_span,
    *prompt.answer_spans[0],
    *prompt.query_span,
  ]
  spans = itertools.pairwise(boundaries)
  total = float(weights.sum())
  shares = {}
  for part, (start, end) in zip(PARTS, spans, strict=True):
    share = float("nan")
    if total != 0:
      share = float(weights[start:end].sum()) / total
    shares[part] = share
  shares["noise"] = shares["context before"] + shares["context after"]
  return shares


def _stack_tokens(
  prompts: Sequence[NeedlePrompt], batch_size: int
) -> Int[np.ndarray, "B T"]:
  """Returns the tokens of a batch of prompts.

  The first prompt is repeated if there are fewer than `batch_size`. So all
  batches have the same shape, and run the same compiled program.
  """
  rows = [prompt.ids for prompt in prompts]
  while len(rows) < batch_size:
    rows.append(rows[0])
  return np.asarray(rows, np.int32)


def _measurements_by_depth(
  key: ShareKey,
  depths: Sequence[float],
  shares_of_depths: Sequence[Sequence[Shares]],
) -> Iterator[Measurement]:
  """Yields the measurements of a share at each depth, and over all depths."""
  for depth, shares_of_prompts in zip(depths, shares_of_depths, strict=True):
    values = [shares[key] for shares in shares_of_prompts]
    yield mean_of(key.part, values, weights=key.version, depth=depth)
  yield _mean_over_depths(key, shares_of_depths)


def _mean_over_depths(
  key: ShareKey, shares_of_depths: Sequence[Sequence[Shares]]
) -> Measurement:
  """Returns the measurement of a share over the prompts of all depths."""
  all_prompts = itertools.chain.from_iterable(shares_of_depths)
  values = [shares[key] for shares in all_prompts]
  return mean_of(key.part, values, weights=key.version, depth="mean")


def _draw_part(axes: Axes, suite_results: Mapping[str, Any], part: str) -> None:
  """Draws the shares of a part over depths, for each model and version.

  Args:
    axes: Where to draw.
    suite_results: The content of the suite's JSON file.
    part: "answer" or "noise".
  """
  for model_style, part_results in by_model(suite_results, part):
    for version, linestyle in (("signed", "-"), ("absolute", ":")):
      results = _results_by_depth(part_results, version)
      depths = [result["at"]["depth"] for result in results]
      suffix = f", {version}"
      draw_line(axes, depths, results, model_style, suffix, linestyle)
  axes.set(
    title=f"attention: {part}",
    xlabel="depth of the answer (share of the text before it)",
    ylabel="share of attention",
  )


def _results_by_depth(
  results: Iterable[Mapping[str, Any]], version: str
) -> list[Mapping[str, Any]]:
  """Returns the results of one version, without the means over depths."""
  selected = []
  for result in results:
    coordinates = result["at"]
    if coordinates["weights"] == version and coordinates["depth"] != "mean":
      selected.append(result)
  return selected
