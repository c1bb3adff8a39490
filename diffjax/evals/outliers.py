"""Activation outliers: the largest attention logits and hidden states, and their medians.

Logits are |q·k/√D| of every map, layer, head and pair of a query and a key that it sees (`Attention.logits`). Hidden logits are left out, since the kernels that
train never compute them. Hidden states are the entries of each layer's output, after both residuals. Padding does not count.

Top-k is the k-th largest value of all tokens, which is exact: 100 values of each row are kept. The median comes from a histogram of each
row, 16 bins to an octave and linear within a bin, of every 16th query's logits and every 16th token's states, each of which has thousands.
So memory does not grow with the number of tokens, and rows can be resampled. A bootstrap interval of a maximum never lies above the
observed one: it says how much the largest values depend on few rows, and is no bound for other text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from etils import epath
from jaxtyping import Array, Float

from diffjax.config import UserError
from diffjax.data.pipeline import ValidationBatches
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.figures import Figure
from diffjax.evals.report.plots import WIDTH, by_model, draw_points, save
from diffjax.evals.report.results import TableSpec
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

RANKS = (1, 2, 3, 10, 100)
LOGITS, HIDDEN = "attention logits", "hidden states"
_KEPT = max(RANKS)
# A bin is a value's exponent and the first four bits of its mantissa, from 2⁻²⁴ to 2²⁰.
_SHIFT, _LOWEST, _BINS = 19, (127 - 24) << 4, (24 + 20) << 4


TABLE = TableSpec(
  unit="rows",
  notes=("top-k: the k-th largest absolute value",),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the suite."""

  # Tokens measured, rounded up to whole rows (fewer if the validation set has fewer)
  tokens: int = 400_000
  # Tokens a row; 0 for the config.data.length that the model was trained with
  length: int = 0
  # Rows of a batch, which does not change the result
  batch_size: int = 4
  # Medians are of every n-th query and token; 1 for all
  median_every: int = 16
  # Text, as config.data.source has it; "" for the run's validation text
  source: str = ""


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """The top 1, 2, 3, 10 and 100 and the median of |logits| and of |hidden states|. The units are rows."""
  for name in ("tokens", "median_every"):
    if (value := getattr(settings, name)) < 1:
      raise UserError(f"set.outliers.{name} = {value}: must be at least 1")
  count = -(-settings.tokens // (settings.length or trained.config.data.length))
  batches = validation_rows(
    "outliers",
    trained,
    count,
    length=settings.length,
    batch_size=settings.batch_size,
    source=settings.source,
  )
  return _measure(trained, batches, settings.median_every)


def _measure(
  trained: Trained, batches: ValidationBatches, every: int
) -> Iterator[Figure]:
  summaries = jax.jit(
    functools.partial(row_summaries, trained.model, every=every)
  )
  found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
    LOGITS: [],
    HIDDEN: [],
  }
  with Progress(f"outliers of {trained.short_name}", len(batches)) as progress:
    for index, batch in enumerate(batches):
      for name, summary in jax.device_get(
        summaries(trained.params, batch)
      ).items():
        found[name].append(summary)
      progress.update(index + 1, (index + 1) * batch["tokens"].size)
  for name, parts in found.items():
    top, counts = (
      np.concatenate(arrays)[: batches.rows]
      for arrays in zip(*parts, strict=True)
    )  # the last batch is padded
    for rank in RANKS:
      yield Figure(
        name,
        top[:, :rank],
        {"value": f"top-{rank}"},
        functools.partial(largest, rank),
      )
    used = np.flatnonzero(counts.any(axis=0))
    low, high = (used[0], used[-1] + 1) if used.size else (0, 1)
    yield Figure(
      name,
      counts[:, low:high],
      {"value": "median"},
      functools.partial(median, edges()[low : high + 1]),
    )


def row_summaries(
  model: Decoder, params: Any, batch: dict[str, Any], every: int
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Returns summaries of logits and of hidden states.

  Args:
    model: the decoder.
    params: its parameters.
    batch: a batch of `make_batch`.
    every: the histograms are of every n-th query and token.

  Returns:
    The summary of LOGITS and of HIDDEN. A summary has the 100 largest values of
    each row [B, 100], where −1 stands for no value, and the histogram of each
    row [B, bins].
  """
  rows = batch["tokens"].shape[0]
  empty = jnp.full((rows, _KEPT), -1.0), jnp.zeros((rows, _BINS))

  def add_queries(
    summary: tuple[jax.Array, jax.Array], queries: inside.Queries
  ) -> tuple[jax.Array, jax.Array]:
    is_visible = queries.mask[:, None, None]  # [B, 1, 1, t, S]
    sizes = jnp.abs(queries.logits())  # [B, Q, G, t, S]
    sizes = jnp.where(is_visible, sizes, -1.0)
    return _add(summary, jnp.moveaxis(sizes, 3, 1), every)

  def summarize_logits(
    attended: inside.Attended,
  ) -> tuple[jax.Array, jax.Array]:
    return inside.over_queries(add_queries, empty, attended)

  def summarize_hidden(
    x: Float[Array, "B T E"],
  ) -> tuple[jax.Array, jax.Array]:
    kept = (batch["segment_ids"] > 0)[..., None]
    sizes = jnp.where(kept, jnp.abs(x.astype(jnp.float32)), -1.0)
    return _add(empty, sizes, every)

  layers = inside.measure(
    model, params, batch, attention=summarize_logits, hidden=summarize_hidden
  )
  return {
    LOGITS: _sum_layers(layers["attention"]),
    HIDDEN: _sum_layers(layers["hidden"]),
  }


def _sum_layers(
  summaries: tuple[Float[Array, "L B 100"], Float[Array, "L B bins"]],
) -> tuple[Float[Array, "B 100"], Float[Array, "B bins"]]:
  """Returns the summary of all layers from the summary of each layer."""
  top, counts = summaries
  rows = top.shape[1]
  top = jnp.swapaxes(top, 0, 1).reshape(rows, -1)  # [B, L · 100]
  return _top(top), jnp.sum(counts, axis=0)


def _add(
  summary: tuple[jax.Array, jax.Array],
  values: Float[Array, "B t ..."],
  every: int,
) -> tuple[jax.Array, jax.Array]:
  """Adds the values of some tokens to a summary. −1 stands for no value."""
  top, counts = summary
  top = _top(jnp.concatenate([top, _top(values)], axis=1))
  sample = values[:, min(every, values.shape[1]) - 1 :: every].reshape(
    len(values), -1
  )
  bins = jnp.clip(
    (jax.lax.bitcast_convert_type(sample, jnp.int32) >> _SHIFT) - _LOWEST,
    0,
    _BINS - 1,
  )
  count = jax.vmap(
    lambda bins, kept: jnp.zeros(_BINS, jnp.int32).at[bins].add(kept)
  )(bins, (sample >= 0).astype(jnp.int32))
  return top, counts + count


def _top(values: Float[Array, "B ..."]) -> Float[Array, "B 100"]:
  """The largest values of each row, in order. They are in the groups with the largest maxima, so only those groups are sorted."""
  rows, group = values.shape[0], values.shape[-1]
  grouped = values.reshape(rows, -1, group)
  if grouped.shape[1] > _KEPT:
    _, best = jax.lax.top_k(jnp.max(grouped, axis=-1), _KEPT)
    grouped = jnp.take_along_axis(grouped, best[..., None], axis=1)
  flat = grouped.reshape(rows, -1)
  flat = jnp.pad(
    flat, [(0, 0), (0, max(_KEPT - flat.shape[1], 0))], constant_values=-1.0
  )
  return jax.lax.top_k(flat, _KEPT)[0]


def largest(rank: int, top: Float[np.ndarray, "U rank"]) -> float:
  """The rank-th largest value of all rows, from the `rank` largest of each. NaN if there are fewer."""
  value = (
    float(np.partition(top, -rank, axis=None)[-rank])
    if top.size >= rank
    else -1.0
  )
  return value if value >= 0 else float("nan")


def edges() -> Float[np.ndarray, "bins_and_1"]:
  """The lower edges of the histograms' bins, and the upper edge of the last. The first bin begins at 0."""
  starts = (
    ((np.arange(_BINS + 1) + _LOWEST) << _SHIFT)
    .astype(np.int32)
    .view(np.float32)
    .astype(np.float64)
  )
  return np.concatenate([[0.0], starts[1:]])


def median(
  edges: Float[np.ndarray, "bins_and_1"], counts: Float[np.ndarray, "U bins"]
) -> float:
  """The median of the rows' histograms, whose values count as evenly spread within a bin. NaN for empty ones."""
  cumulative = np.concatenate(
    [[0.0], np.cumsum(counts.sum(axis=0, dtype=np.float64))]
  )
  return (
    float(np.interp(cumulative[-1] / 2, cumulative, edges))
    if cumulative[-1]
    else float("nan")
  )


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Plots the values of each model with their intervals, on a log scale."""
  figure = matplotlib.figure.Figure((WIDTH, 4), layout="constrained")
  for axes, name in zip(figure.subplots(1, 2), (LOGITS, HIDDEN), strict=True):
    for shift, (style, rows) in zip(
      (-0.1, 0.1), by_model(results, name), strict=False
    ):
      draw_points(
        axes, [row["at"]["value"] for row in rows], rows, style, shift
      )
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
  save(figure, path)
