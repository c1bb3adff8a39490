"""Cumulative NLL by position: how much a model gains from more context, up to 64K tokens.

At position p it is the mean loss of a row's first p targets, so it falls as long as context helps. The paper measures books. Here the text
is the run's validation text or another one (`source`). Rows are concatenated documents (the default: any text has enough of it, and another
document is of equally little use to every model) or the beginnings of documents that are longer than a row. A row that is not full
is left out, so that all positions are measured on the same rows.

The 64K curve:

    --set.position_nll.length=65536 --set.position_nll.rows=64 --set.position_nll.source=jsonl:books/*.jsonl --set.position_nll.rows_of=long
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from etils import epath

from diffjax.config import UserError
from diffjax.data import sources
from diffjax.data.packing import Tokenize
from diffjax.data.row import Row, make_batch
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.figures import Figure
from diffjax.evals.report.plots import WIDTH, by_model, draw_line, save
from diffjax.evals.report.results import TableSpec
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.training.validation import token_losses

LONGEST = 65_536


TABLE = TableSpec(
  unit="rows",
  notes=("cumulative NLL: mean loss of a row's tokens up to the position",),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the suite."""

  # Tokens a row; 0 for 64K, or the model's config.model.max_length if that is less
  length: int = 0
  # Rows measured (fewer if the text has fewer)
  rows: int = 32
  # "concatenated" documents, or "long" ones, at least a row each
  rows_of: str = "concatenated"
  # Text, as config.data.source has it ("jsonl:books/*.jsonl"); "" for the run's validation text
  source: str = ""
  # First position, tokens
  first: int = 64
  # Positions to an octave
  per_octave: int = 2
  # Whether rows may be longer than config.model.max_length
  beyond_limit: bool = False


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """Mean loss of the first p targets, at p spaced evenly on a log scale. The units are rows.

  Raises:
    UserError: if rows are longer than the model takes or the text holds.
  """
  if settings.rows_of not in ("concatenated", "long"):
    raise UserError(
      f"set.position_nll.rows_of = {settings.rows_of!r}: must be 'concatenated' or 'long'"
    )
  for name in ("rows", "first", "per_octave"):
    if (value := getattr(settings, name)) < 1:
      raise UserError(f"set.position_nll.{name} = {value}: must be at least 1")
  limit = trained.config.model.max_length
  length = settings.length or min(LONGEST, limit)
  if not 1 <= length <= (length if settings.beyond_limit else limit):
    raise UserError(
      f"set.position_nll.length = {length}: {trained.name} takes 1 to {limit} tokens (config.model.max_length); "
      "set.position_nll.beyond_limit=true measures longer rows all the same"
    )
  rows = (
    _long_documents(trained, settings, length)
    if settings.rows_of == "long"
    else _concatenated(trained, settings, length)
  )
  return _measure(trained, settings, rows, length)


def _measure(
  trained: Trained,
  settings: Settings,
  rows: Iterator[dict[str, Any]],
  length: int,
) -> Iterator[Figure]:
  limit = trained.config.model.max_length
  model = trained.model.clone(
    config=dataclasses.replace(
      trained.model.config, max_length=max(length, limit)
    )
  )
  losses = jax.jit(functools.partial(token_losses, model))
  positions = spaced(settings.first, length, settings.per_octave)
  sums = []
  with Progress(
    f"position_nll of {trained.short_name}", settings.rows
  ) as progress:
    for batch in itertools.islice(rows, settings.rows):
      nll = np.asarray(losses(trained.params, batch), np.float64)[0]
      sums.append(np.cumsum(nll)[np.asarray(positions) - 1])
      progress.update(len(sums), len(sums) * length)
  if not sums:
    kind = "no document of" if settings.rows_of == "long" else "less than"
    raise UserError(
      f"set.position_nll.length = {length}: the text holds {kind} {length + 1} tokens; use a shorter length or another source"
    )
  for index, position in enumerate(positions):
    total = np.array([row[index] for row in sums])
    yield Figure(
      "cumulative NLL (nats/token)",
      np.stack([total, np.full_like(total, position)], axis=1),
      {"position": position},
    )


def spaced(first: int, last: int, per_octave: int) -> list[int]:
  """Positions from the first to the last, both included, `per_octave` to an octave; the last alone if it is before the first."""
  count = int(np.floor(np.log2(max(last / first, 1)) * per_octave + 1e-9))
  return sorted(
    {
      round(first * 2 ** (index / per_octave))
      for index in range(count + 1)
      if first <= last
    }
    | {last}
  )


def _concatenated(
  trained: Trained, settings: Settings, length: int
) -> Iterator[dict[str, Any]]:
  rows = validation_rows(
    "position_nll",
    trained,
    settings.rows,
    length=length,
    source=settings.source,
    packing="concat",
    beyond_limit=settings.beyond_limit,
  )
  return (batch for batch in rows if batch["weights"].all())


def _long_documents(
  trained: Trained, settings: Settings, length: int
) -> Iterator[dict[str, Any]]:
  """The beginnings of validation documents that are longer than a row."""
  data = dataclasses.replace(
    trained.config.data,
    tokenizer=trained.tokenizer.spec,
    validation_source=settings.source or trained.config.data.validation_source,
  )
  field, spec = (
    ("data.validation_source", data.validation_source)
    if data.validation_source
    else ("data.source", data.source)
  )
  texts = [
    sources.documents(component.spec, "validation", data)
    for component in sources.parse_mixture(spec, field)
  ]
  tokenize = Tokenize(data.tokenizer)
  documents = (
    document
    for source in texts
    for part in source.parts
    for document in source.read(part)
  )
  beginnings = (
    tokenize(document._replace(prompt=None)).tokens[: length + 1]
    for document in documents
  )
  whole = np.array([length + 1])
  return (
    make_batch([Row(tokens, whole, np.array([0]))], length)
    for tokens in beginnings
    if len(tokens) == length + 1
  )


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Plots the curves with their intervals, position on a log scale."""
  figure = matplotlib.figure.Figure((WIDTH, 4.5), layout="constrained")
  axes = figure.add_subplot(
    xlabel="position (tokens)", ylabel="cumulative NLL (nats per token)"
  )
  axes.set_xscale("log", base=2)
  for style, rows in by_model(results):
    draw_line(axes, [row["at"]["position"] for row in rows], rows, style)
  axes.xaxis.set_major_formatter(
    matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
  )
  axes.legend(fontsize=9)
  save(figure, path)
