"""Cumulative NLL by position: how much a model gains from more context.

At position p, it is the mean loss of the first p targets of a row. It falls as
long as context helps. The paper measures books, up to 64K tokens (paper.md,
§5). Here, the text is the run's validation text or another one (`source`).

There are two kinds of rows:

- "concatenated": consecutive documents. This is the default, because any text
  has enough of it. Other documents in the context help no model.
- "long": the beginnings of documents that are longer than a row.

A row that is not full is left out, so that all positions are measured on the
same rows.

For the 64K curve:

    --set.position_nll.length=65536 --set.position_nll.rows=64
    --set.position_nll.source=jsonl:books/*.jsonl
    --set.position_nll.rows_of=long
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from jaxtyping import Float
from numpy import ndarray

from diffjax.config import UserError, at_least, field, one_of
from diffjax.data.document import Document
from diffjax.data.packing import Tokenize
from diffjax.data.row import Row, make_batch
from diffjax.evals.measurement import Measurement
from diffjax.evals.methods.validation_documents import validation_documents
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.plots import WIDTH, by_model, draw_line
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.training.validation import token_losses

# The length of the paper's curve. It is the default if the model allows it.
_DEFAULT_LENGTH = 65_536

# A batch of one row, as `make_batch` returns it.
Batch = dict[str, ndarray]


@dataclasses.dataclass(frozen=True)
class PositionNLL(Suite[Iterator[Batch]]):
  """Loss of a text's first tokens: how much a model gains from more context.

  The measurements are named "cumulative NLL (nats/token)": the mean loss of the
  first p tokens of a row. The positions p are spaced evenly on a log scale. The
  units are rows.
  """

  name: ClassVar[str] = "position_nll"
  table: ClassVar[TableSpec] = TableSpec(
    unit="rows",
    notes=("cumulative NLL: mean loss of a row's tokens up to the position",),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure("loss over the longest context", "cumulative NLL", "lower"),
  )

  length: int = field(
    0,
    "Tokens of a row. 0 for 64K, or for the model's config.model.max_length if"
    " that is less.",
    bound=at_least(0),
  )
  rows: int = field(
    32, "Rows to measure. Fewer if the text has fewer.", bound=at_least(1)
  )
  rows_of: str = field(
    "concatenated",
    'Rows of "concatenated" documents, or the beginnings of "long" ones, which'
    " have at least a row each.",
    bound=one_of("concatenated", "long"),
  )
  source: str = field(
    "",
    'Text, as in config.data.source, such as "jsonl:books/*.jsonl". "" for the'
    " run's validation text.",
  )
  first: int = field(64, "First position, in tokens.", bound=at_least(1))
  per_octave: int = field(
    2, "Positions between p and 2p, including 2p.", bound=at_least(1)
  )
  beyond_limit: bool = field(
    False, "Whether rows may be longer than config.model.max_length."
  )

  def load(self, trained: Trained) -> Iterator[Batch]:
    """Returns batches of one full row each, which can be read once.

    Raises:
      UserError: if rows are longer than the model takes, or the text cannot be
        read.
    """
    length = self._row_length(trained)
    max_length = trained.config.model.max_length
    if length > max_length and not self.beyond_limit:
      raise UserError(
        f"set.position_nll.length = {length}: {trained.name} takes 1 to"
        f" {max_length} tokens (config.model.max_length); pass"
        " --set.position_nll.beyond_limit=true to measure longer rows"
      )
    if self.rows_of == "long":
      documents = validation_documents(trained, self.source)
      return _beginnings(documents, trained.tokenizer.spec, length)
    batches = validation_rows(
      "position_nll",
      trained,
      self.rows,
      length=length,
      source=self.source,
      packing="concat",
      beyond_limit=self.beyond_limit,
    )
    return _full_rows(batches)

  def measure(
    self, trained: Trained, batches: Iterator[Batch]
  ) -> Iterator[Measurement]:
    """Yields the cumulative NLL at each position.

    Raises:
      UserError: if there is no batch.
    """
    length = self._row_length(trained)
    positions = spaced(self.first, length, self.per_octave)
    sums = self._cumulative_losses(trained, batches, positions)
    for index, position in enumerate(positions):
      # The mean over all rows is the sum of losses / the number of tokens.
      row_sums = sums[:, index]
      num_tokens = np.full_like(row_sums, position)
      yield Measurement(
        "cumulative NLL (nats/token)",
        np.stack([row_sums, num_tokens], axis=1),
        {"position": position},
      )

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws a curve for each model over positions, on a log scale."""
    figure = matplotlib.figure.Figure((WIDTH, 4.5), layout="constrained")
    axes = figure.add_subplot(
      xlabel="position (tokens)", ylabel="cumulative NLL (nats per token)"
    )
    axes.set_xscale("log", base=2)
    for style, results in by_model(suite_results):
      positions = [result["at"]["position"] for result in results]
      draw_line(axes, positions, results, style)
    axes.xaxis.set_major_formatter(
      matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
    )
    axes.legend(fontsize=9)
    return figure

  def _row_length(self, trained: Trained) -> int:
    """Returns the number of tokens of a row."""
    return self.length or min(_DEFAULT_LENGTH, trained.config.model.max_length)

  def _cumulative_losses(
    self, trained: Trained, batches: Iterable[Batch], positions: Sequence[int]
  ) -> Float[ndarray, "rows positions"]:
    """Returns the summed loss of each row's first p tokens, per position p.

    Args:
      trained: The model.
      batches: Full rows. Only the first `self.rows` are read.
      positions: The positions. The last one is the length of a row.

    Raises:
      UserError: if there is no row.
    """
    length = positions[-1]
    compute_losses = _compile_losses(trained, length)
    last_indices = np.asarray(positions) - 1
    sums_of_rows = []
    label = f"position_nll of {trained.short_name}"
    with Progress(label, self.rows) as progress:
      for batch in itertools.islice(batches, self.rows):
        losses = compute_losses(trained.params, batch)  # [1, T]
        cumulative = np.cumsum(np.asarray(losses, np.float64)[0])
        sums_of_rows.append(cumulative[last_indices])
        num_done = len(sums_of_rows)
        progress.update(num_done, num_done * length)
    if not sums_of_rows:
      raise self._no_rows(length)
    return np.stack(sums_of_rows)

  def _no_rows(self, length: int) -> UserError:
    """Returns the error for text without a full row."""
    # A row of T tokens also needs the token after them, as the last target.
    missing = f"less than {length + 1} tokens"
    if self.rows_of == "long":
      missing = f"no document of {length + 1} tokens"
    return UserError(
      f"set.position_nll.length = {length}: the text holds {missing}; use a"
      " shorter length or another source"
    )


def spaced(first: int, last: int, per_octave: int) -> list[int]:
  """Returns whole positions, in ascending order, spaced evenly on a log scale.

  Example: `spaced(64, 300, per_octave=2)` is [64, 91, 128, 181, 256, 300].

  Args:
    first: The first position.
    last: The last position, which is always included. It is the only one if it
      is before the first.
    per_octave: The number of positions between p and 2p, including 2p.
  """
  if last < first:
    return [last]
  num_octaves = math.log2(last / first)
  # The product may be slightly less than a whole number due to rounding.
  num_steps = math.floor(num_octaves * per_octave + 1e-9)
  positions = {last}
  for step in range(num_steps + 1):
    positions.add(round(first * 2 ** (step / per_octave)))
  return sorted(positions)


def _compile_losses(
  trained: Trained, length: int
) -> Callable[..., Float[jax.Array, "B T"]]:
  """Returns the compiled `token_losses` of a model, for rows of this length.

  The result takes the parameters and a batch.
  """
  # The decoder rejects rows that are longer than config.model.max_length. A
  # copy of the model allows them, with the same parameters.
  max_length = max(length, trained.config.model.max_length)
  config = dataclasses.replace(trained.model.config, max_length=max_length)
  model = trained.model.clone(config=config)
  return jax.jit(functools.partial(token_losses, model))


def _full_rows(batches: Iterable[Batch]) -> Iterator[Batch]:
  """Yields the batches without padding. Padding has weight 0."""
  for batch in batches:
    if batch["weights"].all():
      yield batch


def _beginnings(
  documents: Iterable[Document], tokenizer_spec: str, length: int
) -> Iterator[Batch]:
  """Yields the first tokens of each document that is longer than a row.

  Args:
    documents: The documents. Their prompts are left out.
    tokenizer_spec: The tokenizer, as in config.data.tokenizer.
    length: The number of tokens of a row.

  Yields:
    A batch of one row.
  """
  tokenize = Tokenize(tokenizer_spec)
  # A row of T tokens also needs the token after them, as the last target.
  num_tokens = length + 1
  for document in documents:
    example = tokenize(document._replace(prompt=None))
    if len(example.tokens) < num_tokens:
      continue
    row = Row(
      example.tokens[:num_tokens],
      segment_lengths=np.array([num_tokens]),
      prompt_lengths=np.array([0]),
    )
    yield make_batch([row], length)
