"""The attention weights that multiply the values, by layer: their negative share and their sparsity.

These are the weights of the variant (`Attention.weights`), A₁ − λA₂ for DIFF. The paper shows that DIFF's attention is sparse and does not measure it. All measures are of the weights w of one query over the n ≥ 2 keys
that it sees, and are averaged over queries and heads, so that each layer has one number.

- negative share: Σ max(−w, 0) / Σ |w|, the weight of negative entries, not their number, so that tiny entries do not count. 0 for the
  Transformer.
- small share: the share of keys with |w| below a tenth of the mean |w| (a tenth of uniform, for a softmax). A count, which does not depend
  on the scale of w, 1 − λ.
- effective keys: (Σ|w|)² / (n Σ w²), the participation ratio as a share of n: 1 for uniform weights, 1/n for a single key. It depends on
  the large entries, not on the many small ones.
- Hoyer sparsity: (√n − Σ|w| / √Σw²) / (√n − 1) (Hoyer 2004), from 0 for uniform weights to 1 for a single key. It compares rows of
  different n better than effective keys.

A row of weights that are all 0 counts as uniform.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from etils import epath
from jaxtyping import Array, Bool, Float

from diffjax.data.pipeline import ValidationBatches
from diffjax.evals.methods import inside
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.figures import Figure
from diffjax.evals.report.plots import WIDTH, by_model, draw_line, save
from diffjax.evals.report.results import TableSpec
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

MEASURES = ("negative share", "small share", "effective keys", "Hoyer sparsity")


TABLE = TableSpec(
  unit="rows",
  summary={"layer": "all"},
  notes=(
    "Means over layers, heads and queries, of the weights on the values.",
    "negative share: share of the weight that is negative",
    "small share: share of the keys with less than a tenth of the mean",
    "effective keys: 1 if all keys have the same weight",
    "Hoyer sparsity: 0 if all keys have the same weight, 1 for a single key",
  ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the suite."""

  # Validation rows measured (fewer if there are fewer); -1 for all
  rows: int = 64
  # Tokens a row; 0 for the config.data.length that the model was trained with
  length: int = 0
  # Rows of a batch, which does not change the result
  batch_size: int = 4
  # Text, as config.data.source has it; "" for the run's validation text
  source: str = ""


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """Each measure for each layer, from 0, and over all of them. The units are rows."""
  batches = validation_rows(
    "difference_map",
    trained,
    settings.rows,
    length=settings.length,
    batch_size=settings.batch_size,
    source=settings.source,
  )
  return _measure(trained, batches)


def _measure(trained: Trained, batches: ValidationBatches) -> Iterator[Figure]:
  sums = jax.jit(functools.partial(layer_sums, trained.model))
  found = []
  with Progress(
    f"difference_map of {trained.short_name}", len(batches)
  ) as progress:
    for index, batch in enumerate(batches):
      found.append(
        np.moveaxis(np.asarray(sums(trained.params, batch), np.float64), 1, 0)
      )
      progress.update(index + 1, (index + 1) * batch["tokens"].size)
  whole = np.concatenate(found)[
    : batches.rows
  ]  # [U, L, measures and count]; the last batch is padded
  for index, measure in enumerate(MEASURES):
    for layer in range(whole.shape[1]):
      yield Figure(measure, whole[:, layer][:, [index, -1]], {"layer": layer})
    yield Figure(measure, whole.sum(axis=1)[:, [index, -1]], {"layer": "all"})


def layer_sums(
  model: Decoder, params: Any, batch: dict[str, Any]
) -> Float[Array, "L B measures"]:
  """Returns the sums of `row_sums` of each layer and row of the batch.

  Args:
    model: the decoder.
    params: its parameters.
    batch: as `inside.measure` takes it.
  """
  batch_size = batch["tokens"].shape[0]
  zeros = jnp.zeros((batch_size, len(MEASURES) + 1))

  def add_block(sums: jax.Array, queries: inside.Queries) -> jax.Array:
    return sums + row_sums(queries.weights(), queries.mask)

  def layer_result(attended: inside.Attended) -> Float[Array, "B measures"]:
    return inside.over_queries(add_block, zeros, attended)

  results = inside.measure(model, params, batch, attention=layer_result)
  return results["attention"]


def row_sums(
  weights: Float[Array, "B H t S"], seen: Bool[Array, "B t S"]
) -> Float[Array, "B measures"]:
  """The sums of MEASURES over queries and heads, and the number of terms. Queries that see fewer than two keys do not count."""
  seen = seen[:, None]
  n = jnp.sum(seen, axis=-1).astype(jnp.float32)
  size = jnp.where(seen, jnp.abs(weights), 0.0)
  total, squares = jnp.sum(size, axis=-1), jnp.sum(jnp.square(size), axis=-1)
  flat = total == 0
  negative = jnp.sum(
    jnp.where(seen & (weights < 0), size, 0.0), axis=-1
  ) / jnp.where(flat, 1, total)
  small = jnp.sum(
    seen & (size < 0.1 * (total / jnp.maximum(n, 1))[..., None]), axis=-1
  ) / jnp.maximum(n, 1)
  ratio = jnp.where(
    flat, jnp.sqrt(n), total / jnp.sqrt(jnp.where(flat, 1, squares))
  )  # Σ|w| / √Σw², from 1 to √n
  effective = jnp.square(ratio) / jnp.maximum(n, 1)
  hoyer = (jnp.sqrt(n) - ratio) / (jnp.sqrt(jnp.maximum(n, 2)) - 1)
  counted = jnp.broadcast_to(n >= 2, total.shape)
  measures = jnp.stack(
    [negative, small, effective, hoyer, jnp.ones_like(total)], axis=-1
  )
  return jnp.sum(jnp.where(counted[..., None], measures, 0.0), axis=(1, 2))


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Plots each measure over layers."""
  figure = matplotlib.figure.Figure((WIDTH, 6), layout="constrained")
  for axes, measure in zip(figure.subplots(2, 2).flat, MEASURES, strict=True):
    for style, rows in by_model(results, measure):
      chosen = [row for row in rows if row["at"]["layer"] != "all"]
      draw_line(axes, [row["at"]["layer"] for row in chosen], chosen, style)
    axes.set(title=measure, xlabel="layer", ylabel=f"{measure} (0 to 1)")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
  axes.legend(fontsize=9)
  save(figure, path)
