"""Activation outliers: large attention logits and hidden states, and medians.

Logits are |q·k/√D| of every map, layer and head, for every pair of a query and
a key that it sees (`Attention.logits`). Masked logits are left out, because the
kernels of training never compute them. Hidden states are the entries of each
layer's output, after both residuals. Padding does not count.

Top-k is the k-th largest value of all tokens. It is exact: the 100 largest
values of each row are stored.

The median is computed from a histogram of each row. The histogram counts the
logits of every 16th query and the states of every 16th token. Each query and
each token has thousands of values. There are 16 bins per octave, and values are
assumed to be spread evenly within a bin.

So memory does not grow with the number of tokens, and rows can be resampled. A
bootstrap interval of a maximum never lies above the observed one. It says how
much the largest values depend on few rows. It is not a bound for other text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from jaxtyping import Array, Float, Int

from diffjax.config import at_least, field
from diffjax.data.pipeline import ValidationBatches
from diffjax.evals.measurement import Measurement
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.plots import WIDTH, by_model, draw_points
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# The values of k of the top-k that are measured.
RANKS = (1, 2, 3, 10, 100)

# The names of the measurements.
LOGITS = "attention logits"
HIDDEN = "hidden states"

# The number of values of each row that are stored.
_NUM_TOP = max(RANKS)

# Stands for a value that does not count. Magnitudes are never negative.
_NO_VALUE = -1.0

# The format of float32: a sign bit, the exponent plus the bias, the mantissa.
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23

# The bins of a histogram, from 2⁻²⁴ to 2²⁰. The exponent of a value determines
# its octave. The first bits of the mantissa determine its bin in the octave, so
# the bins of an octave have equal widths. The first bin also counts smaller
# values, and the last bin also counts larger ones.
_LOWEST_EXPONENT = -24
_HIGHEST_EXPONENT = 20
_MANTISSA_BITS_OF_BIN = 4
_BINS_PER_OCTAVE = 2**_MANTISSA_BITS_OF_BIN
_NUM_BINS = (_HIGHEST_EXPONENT - _LOWEST_EXPONENT) * _BINS_PER_OCTAVE


class Summary(NamedTuple):
  """A summary of the magnitudes in each row.

  Attributes:
    top: The largest values in descending order. If there are fewer, `_NO_VALUE`
      fills up the row.
    counts: The number of values in each bin of a histogram, of every n-th
      query or token.
  """

  top: Float[Array, "B 100"]
  counts: Float[Array, "B bins"]


@dataclasses.dataclass(frozen=True)
class Outliers(Suite[ValidationBatches]):
  """Largest and median magnitudes of attention logits and hidden states.

  The measurements are named "attention logits" and "hidden states". They are
  absolute values, which have no unit: the largest, second, third, 10th and
  100th largest value, and the median. The units are rows.
  """

  name: ClassVar[str] = "outliers"
  table: ClassVar[TableSpec] = TableSpec(
    unit="rows",
    notes=("top-k: the k-th largest absolute value",),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure(
      "largest attention logit", "attention logits", "lower", {"value": "top-1"}
    ),
    MainFigure(
      "largest hidden state", "hidden states", "lower", {"value": "top-1"}
    ),
  )

  tokens: int = field(
    400_000,
    "Tokens to measure, rounded up to whole rows. Fewer if the validation set"
    " has fewer.",
    bound=at_least(1),
  )
  length: int = field(
    0,
    "Tokens of a row. 0 for the config.data.length of the model's training.",
    bound=at_least(0),
  )
  batch_size: int = field(
    4,
    "Rows in a batch. This affects memory, but not the result.",
    bound=at_least(1),
  )
  median_every: int = field(
    16,
    "Medians are of every n-th query and token. 1 for all.",
    bound=at_least(1),
  )
  source: str = field(
    "",
    'Text, as in config.data.source. "" for the run\'s validation text.',
  )

  def load(self, trained: Trained) -> ValidationBatches:
    """Returns the validation rows.

    Raises:
      UserError: if rows are longer than the model takes, or there are none.
    """
    length = self.length or trained.config.data.length
    return validation_rows(
      "outliers",
      trained,
      math.ceil(self.tokens / length),
      length=self.length,
      batch_size=self.batch_size,
      source=self.source,
    )

  def measure(
    self, trained: Trained, batches: ValidationBatches
  ) -> Iterator[Measurement]:
    """Yields top-k and median, first of the logits, then of hidden states."""
    summarize = jax.jit(
      functools.partial(row_summaries, trained.model, every=self.median_every)
    )
    summaries: dict[str, list[Summary]] = {LOGITS: [], HIDDEN: []}
    label = f"outliers of {trained.short_name}"
    with Progress(label, len(batches)) as progress:
      for num_done, batch in enumerate(batches, start=1):
        batch_summaries = jax.device_get(summarize(trained.params, batch))
        for name, summary in batch_summaries.items():
          summaries[name].append(summary)
        progress.update(num_done, num_done * batch["tokens"].size)
    for name, summaries_of_batches in summaries.items():
      yield from _measurements(name, summaries_of_batches, batches.rows)

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws the values of each model with their intervals, on a log scale."""
    figure = matplotlib.figure.Figure((WIDTH, 4), layout="constrained")
    # The points of two models are drawn next to each other.
    shifts = (-0.1, 0.1)
    for axes, name in zip(figure.subplots(1, 2), (LOGITS, HIDDEN), strict=True):
      models = by_model(suite_results, name)
      for shift, (style, rows) in zip(shifts, models, strict=False):
        categories = [row["at"]["value"] for row in rows]
        draw_points(axes, categories, rows, style, shift)
      axes.set(
        title=f"absolute {name}",
        yscale="log",
        xlabel="place among all values",
        ylabel="magnitude",
      )
      axes.yaxis.set(
        major_locator=matplotlib.ticker.LogLocator(subs=(1, 2, 5)),
        major_formatter=matplotlib.ticker.StrMethodFormatter("{x:g}"),
      )
      axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
      axes.legend(fontsize=9)
    return figure


def _measurements(
  name: str, summaries: Sequence[Summary], num_rows: int
) -> Iterator[Measurement]:
  """Yields top-k and median of the logits or of the hidden states.

  Args:
    name: `LOGITS` or `HIDDEN`.
    summaries: The summary of each batch.
    num_rows: The number of rows. Other rows only fill up the last batch.
  """
  top = np.concatenate([summary.top for summary in summaries])[:num_rows]
  counts = np.concatenate([summary.counts for summary in summaries])[:num_rows]
  for rank in RANKS:
    yield Measurement(
      name,
      top[:, :rank],
      {"value": f"top-{rank}"},
      functools.partial(largest, rank),
    )

  # Empty bins at both ends are cut off, because resampling takes time for each.
  first_bin = 0
  last_bin = 0
  used_bins = np.flatnonzero(counts.any(axis=0))
  if used_bins.size > 0:
    first_bin = used_bins[0]
    last_bin = used_bins[-1]
  used_edges = edges()[first_bin : last_bin + 2]
  yield Measurement(
    name,
    counts[:, first_bin : last_bin + 1],
    {"value": "median"},
    functools.partial(median, used_edges),
  )


def row_summaries(
  model: Decoder, params: Any, batch: dict[str, Any], every: int
) -> dict[str, Summary]:
  """Returns summaries of logits and of hidden states.

  Args:
    model: The decoder.
    params: Its parameters.
    batch: A batch of `make_batch`.
    every: The histograms are of every n-th query and token.

  Returns:
    The summaries over all layers, by `LOGITS` and `HIDDEN`.
  """
  num_rows = batch["tokens"].shape[0]
  empty = Summary(
    top=jnp.full((num_rows, _NUM_TOP), _NO_VALUE),
    counts=jnp.zeros((num_rows, _NUM_BINS)),
  )

  def add_queries(summary: Summary, queries: inside.Queries) -> Summary:
    return _add_values(summary, _logit_magnitudes(queries), every)

  def summarize_logits(attended: inside.AttentionInputs) -> Summary:
    return inside.fold_query_blocks(add_queries, empty, attended)

  def summarize_hidden(hidden: Float[Array, "B T E"]) -> Summary:
    is_token = (batch["segment_ids"] > 0)[:, :, None]  # [B, T, 1]
    magnitudes = jnp.abs(hidden.astype(jnp.float32))
    magnitudes = jnp.where(is_token, magnitudes, _NO_VALUE)
    return _add_values(empty, magnitudes, every)

  layers = inside.measure(
    model, params, batch, attention=summarize_logits, hidden=summarize_hidden
  )
  return {
    LOGITS: _combine_layers(layers["attention"]),
    HIDDEN: _combine_layers(layers["hidden"]),
  }


def _logit_magnitudes(
  queries: inside.Queries,
) -> Float[Array, "B t Q G S"]:
  """Returns the absolute logits, and `_NO_VALUE` for masked ones."""
  is_visible = queries.mask[:, None, None]  # [B, 1, 1, t, S]
  magnitudes = jnp.abs(queries.logits())  # [B, Q, G, t, S]
  magnitudes = jnp.where(is_visible, magnitudes, _NO_VALUE)
  return jnp.moveaxis(magnitudes, 3, 1)


def _combine_layers(layers: Summary) -> Summary:
  """Returns the summary of all layers.

  Args:
    layers: The summaries of the layers, with a leading axis L.
  """
  num_rows = layers.top.shape[1]
  top_of_layers = jnp.swapaxes(layers.top, 0, 1)  # [B, L, 100]
  return Summary(
    top=_top_values(top_of_layers.reshape(num_rows, -1)),
    counts=jnp.sum(layers.counts, axis=0),
  )


def _add_values(
  summary: Summary, values: Float[Array, "B t *rest"], every: int
) -> Summary:
  """Returns a summary with the values of more tokens.

  Args:
    summary: The summary before.
    values: The magnitudes. `_NO_VALUE` does not count.
    every: The histogram gets every n-th token. If there are fewer than n
      tokens, it gets the last one.
  """
  num_rows, num_tokens = values.shape[:2]
  candidates = jnp.concatenate([summary.top, _top_values(values)], axis=1)

  first_sampled = min(every, num_tokens) - 1
  sample = values[:, first_sampled::every].reshape(num_rows, -1)
  counts = jax.vmap(_histogram)(sample)
  return Summary(_top_values(candidates), summary.counts + counts)


def _histogram(values: Float[Array, "n"]) -> Int[Array, "bins"]:
  """Returns the number of values in each bin."""
  is_value = values >= 0
  counts = jnp.zeros(_NUM_BINS, jnp.int32)
  return counts.at[_bin_indices(values)].add(is_value.astype(jnp.int32))


def _bin_indices(values: Float[Array, "n"]) -> Int[Array, "n"]:
  """Returns the bin of each float32 that is not negative.

  A positive float32, read as an integer, is the biased exponent followed by the
  mantissa. Without the last bits of the mantissa, this integer grows by 1 from
  each bin to the next one.
  """
  integers = jax.lax.bitcast_convert_type(values, jnp.int32)
  bin_numbers = integers >> (_MANTISSA_BITS - _MANTISSA_BITS_OF_BIN)
  lowest_biased_exponent = _LOWEST_EXPONENT + _EXPONENT_BIAS
  lowest_number = lowest_biased_exponent * _BINS_PER_OCTAVE
  return jnp.clip(bin_numbers - lowest_number, 0, _NUM_BINS - 1)


def _top_values(values: Float[Array, "B *groups n"]) -> Float[Array, "B 100"]:
  """Returns the largest values of each row, in descending order.

  Sorting all values would take long. The 100 largest values are in the 100
  groups with the largest maxima, so only these groups are sorted. If there are
  fewer than 100 values, `_NO_VALUE` fills up the result.

  Args:
    values: The last axis is a group.
  """
  num_rows = values.shape[0]
  group_size = values.shape[-1]
  groups = values.reshape(num_rows, -1, group_size)
  if groups.shape[1] > _NUM_TOP:
    maxima = jnp.max(groups, axis=-1)
    _, best_groups = jax.lax.top_k(maxima, _NUM_TOP)
    groups = jnp.take_along_axis(groups, best_groups[:, :, None], axis=1)
  candidates = groups.reshape(num_rows, -1)
  num_missing = max(_NUM_TOP - candidates.shape[1], 0)
  candidates = jnp.pad(
    candidates, [(0, 0), (0, num_missing)], constant_values=_NO_VALUE
  )
  top, _ = jax.lax.top_k(candidates, _NUM_TOP)
  return top


def largest(rank: int, top: Float[np.ndarray, "U rank"]) -> float:
  """Returns the rank-th largest value of all rows. NaN if there are fewer.

  Args:
    rank: 1 for the largest value.
    top: The `rank` largest values of each row.
  """
  if top.size < rank:
    return math.nan
  value = float(np.partition(top, -rank, axis=None)[-rank])
  if value < 0:
    # It is `_NO_VALUE`.
    return math.nan
  return value


def edges() -> Float[np.ndarray, "bins_and_1"]:
  """Returns the lower edges of the bins, and the upper edge of the last bin.

  The first bin begins at 0.
  """
  bins = np.arange(_NUM_BINS + 1)
  octaves, bins_of_octave = np.divmod(bins, _BINS_PER_OCTAVE)
  mantissas = 1 + bins_of_octave / _BINS_PER_OCTAVE
  bin_edges = np.ldexp(mantissas, _LOWEST_EXPONENT + octaves)
  bin_edges[0] = 0.0
  return bin_edges


def median(
  bin_edges: Float[np.ndarray, "bins_and_1"],
  counts: Float[np.ndarray, "U bins"],
) -> float:
  """Returns the median of the values in the histograms. NaN without values.

  Args:
    bin_edges: The edges of the bins. Values are assumed to be spread evenly
      within a bin.
    counts: The histogram of each row.
  """
  counts_of_bins = counts.sum(axis=0, dtype=np.float64)
  # The number of values below each edge.
  cumulative = np.concatenate([[0.0], np.cumsum(counts_of_bins)])
  num_values = cumulative[-1]
  if num_values == 0:
    return math.nan
  return float(np.interp(num_values / 2, cumulative, bin_edges))
