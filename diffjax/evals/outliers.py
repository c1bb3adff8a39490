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
from collections.abc import Iterator, Mapping
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
from diffjax.evals.methods.row_results import compute_for_rows
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.plots import WIDTH, by_model, draw_points
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# The values of k of the top-k that are measured.
RANKS = (1, 2, 3, 10, 100)

# The names of the measurements.
LOGITS = "attention logits"
HIDDEN = "hidden states"

# The number of values of each row that are stored.
_NUM_TOP = max(RANKS)

# Replaces a value that does not count. Real values are never negative.
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
    num_rows = math.ceil(self.tokens / length)
    return validation_rows(
      "outliers",
      trained,
      num_rows,
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

    def summarize_batch(batch: dict[str, np.ndarray]) -> dict[str, Summary]:
      return summarize(trained.params, batch)

    summaries = compute_for_rows(
      summarize_batch, batches, f"outliers of {trained.short_name}"
    )
    for name in (LOGITS, HIDDEN):
      summary = summaries[name]
      yield from _top_measurements(name, summary.top)
      yield _median_measurement(name, summary.counts)

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws the values of each model with their intervals, on a log scale.

    The left panel shows the logits, and the right one the hidden states.
    """
    figure = matplotlib.figure.Figure((WIDTH, 4), layout="constrained")
    # The points of the second model are drawn to the right of the first one's.
    shifts = (-0.1, 0.1)
    for axes, name in zip(figure.subplots(1, 2), (LOGITS, HIDDEN), strict=True):
      models = by_model(suite_results, name)
      # There may be only one model.
      for shift, (style, results) in zip(shifts, models, strict=False):
        categories = [result["at"]["value"] for result in results]
        draw_points(axes, categories, results, style, shift)
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


def _top_measurements(
  name: str, top: Float[np.ndarray, "U 100"]
) -> Iterator[Measurement]:
  """Yields the k-th largest value for each k in `RANKS`.

  Args:
    name: `LOGITS` or `HIDDEN`.
    top: The largest values of each row, in descending order.
  """
  for rank in RANKS:
    # The k-th largest value of all rows is among the k largest of some row.
    yield Measurement(
      name,
      top[:, :rank],
      {"value": f"top-{rank}"},
      functools.partial(largest, rank),
    )


def _median_measurement(
  name: str, counts: Float[np.ndarray, "U bins"]
) -> Measurement:
  """Returns the measurement of the median.

  Args:
    name: `LOGITS` or `HIDDEN`.
    counts: The histogram of each row.
  """
  # Empty bins at both ends are cut off, because resampling takes time for each.
  first_bin = 0
  last_bin = 0
  used_bins = np.flatnonzero(counts.any(axis=0))
  if used_bins.size > 0:
    first_bin = used_bins[0]
    last_bin = used_bins[-1]
  # Each bin has two edges.
  used_edges = edges()[first_bin : last_bin + 2]
  return Measurement(
    name,
    counts[:, first_bin : last_bin + 1],
    {"value": "median"},
    functools.partial(median, used_edges),
  )


def row_summaries(
  model: Decoder, params: Any, batch: dict[str, Any], every: int
) -> dict[str, Summary]:
  """Returns summaries of the logits and hidden states of each row of a batch.

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

  def add_block(summary: Summary, queries: inside.Queries) -> Summary:
    return _add_values(summary, _logit_magnitudes(queries), every)

  def summarize_logits(inputs: inside.AttentionInputs) -> Summary:
    # The logits of all queries of a layer would take too much memory.
    return inside.fold_query_blocks(add_block, empty, inputs)

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
  """Returns the absolute logits, and `_NO_VALUE` for masked ones.

  Q and G are the query groups and their maps. The axis of the queries, t, is
  the second one, as `_add_values` expects it.
  """
  is_visible = queries.mask[:, None, None]  # [B, 1, 1, t, S]
  magnitudes = jnp.abs(queries.logits())  # [B, Q, G, t, S]
  magnitudes = jnp.where(is_visible, magnitudes, _NO_VALUE)
  return jnp.moveaxis(magnitudes, 3, 1)


def _combine_layers(layers: Summary) -> Summary:
  """Returns one summary of the values of all layers.

  Args:
    layers: The summaries of the layers, with a leading axis L.
  """
  num_rows = layers.top.shape[1]
  top_of_layers = jnp.swapaxes(layers.top, 0, 1)  # [B, L, 100]
  return Summary(
    top=top_values(top_of_layers.reshape(num_rows, -1)),
    counts=jnp.sum(layers.counts, axis=0),
  )


def _add_values(
  summary: Summary, values: Float[Array, "B t *rest"], every: int
) -> Summary:
  """Returns the summary of the values so far and the values of more tokens.

  Args:
    summary: The summary of the values so far.
    values: The values of t tokens or queries. `_NO_VALUE` does not count.
    every: The histogram counts every n-th token. If there are fewer than n
      tokens, it counts the last one.
  """
  num_rows, num_tokens = values.shape[:2]
  candidates = jnp.concatenate([summary.top, top_values(values)], axis=1)
  top = top_values(candidates)

  first_sampled = min(every, num_tokens) - 1
  sample = values[:, first_sampled::every].reshape(num_rows, -1)
  counts = summary.counts + jax.vmap(_histogram)(sample)
  return Summary(top, counts)


def _histogram(values: Float[Array, "n"]) -> Int[Array, "bins"]:
  """Returns the number of values in each bin."""
  is_value = values >= 0
  counts = jnp.zeros(_NUM_BINS, jnp.int32)
  return counts.at[bin_indices(values)].add(is_value.astype(jnp.int32))


def bin_indices(values: Float[Array, "n"]) -> Int[Array, "n"]:
  """Returns the bin of each float32 that is not negative.

  The bits of such a float32 are 0, the biased exponent, and 23 bits of the
  mantissa. A bin is determined by the exponent and the first 4 bits of the
  mantissa. These bits, read as one integer, are the bin's number in an endless
  histogram.

  Example: 1.5 = 2⁰ · 1.1000…₂ has the biased exponent 127, and its mantissa
  begins with 1000 (8). Its number is 127 · 16 + 8 = 2040. The first bin of our
  histogram begins at 2⁻²⁴, so it has the number 103 · 16 = 1648. So 1.5 is in
  bin 2040 − 1648 = 392.
  """
  bits = jax.lax.bitcast_convert_type(values, jnp.int32)
  num_dropped_bits = _MANTISSA_BITS - _MANTISSA_BITS_OF_BIN
  bin_numbers = bits >> num_dropped_bits
  first_number = (_LOWEST_EXPONENT + _EXPONENT_BIAS) * _BINS_PER_OCTAVE
  return jnp.clip(bin_numbers - first_number, 0, _NUM_BINS - 1)


def top_values(values: Float[Array, "B *groups n"]) -> Float[Array, "B 100"]:
  """Returns the 100 largest values of each row, in descending order.

  Sorting all values would take long. The 100 largest values are in the 100
  groups with the largest maxima, so only these groups are sorted.

  Args:
    values: The last axis is a group. `_NO_VALUE` fills up the result if there
      are fewer than 100 values.
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
  """Returns the k-th largest value of all rows. NaN if there are fewer values.

  Args:
    rank: k. 1 for the largest value.
    top: The k largest values of each row.
  """
  if top.size < rank:
    return math.nan
  # A partition is faster than sorting all values.
  value = float(np.partition(top, -rank, axis=None)[-rank])
  if value == _NO_VALUE:
    return math.nan
  return value


def edges() -> Float[np.ndarray, "bins_and_1"]:
  """Returns the lower edges of the bins, and the upper edge of the last bin.

  The edges are 2⁻²⁴, 2⁻²⁴ · 17/16, 2⁻²⁴ · 18/16, …, 2²⁰. But the first bin
  begins at 0, because it also counts smaller values.
  """
  bins = np.arange(_NUM_BINS + 1)
  octaves, bins_in_octave = np.divmod(bins, _BINS_PER_OCTAVE)
  mantissas = 1 + bins_in_octave / _BINS_PER_OCTAVE
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
  counts_below_edges = np.concatenate([[0.0], np.cumsum(counts_of_bins)])
  num_values = counts_below_edges[-1]
  if num_values == 0:
    return math.nan
  # The median is where half of the values are below.
  return float(np.interp(num_values / 2, counts_below_edges, bin_edges))
