"""Negative share and sparsity of attention weights, by layer.

Weights are the factors on the values (`Attention.weights`): A₁ − λA₂ for DIFF.
The paper shows that DIFF's attention is sparse, but does not measure it. Each
measure is of the weights w of one query over the n keys that it sees, with
n ≥ 2. It is averaged over queries and heads, so that each layer has one number.

- negative share: Σ max(−w, 0) / Σ|w|. This is the weight of negative entries
  and not their number, so that tiny entries do not count. It is 0 for the
  Transformer.
- small share: the share of keys whose |w| is below a tenth of the mean |w|. For
  a softmax, this is a tenth of the uniform weight. This measure counts keys, so
  it does not depend on the scale of w, which is 1 − λ.
- effective keys: (Σ|w|)² / (n Σw²), the participation ratio as a share of n. It
  is 1 for uniform weights and 1/n for a single key. It depends on the large
  entries, and not on the many small ones.
- Hoyer sparsity: (√n − Σ|w| / √Σw²) / (√n − 1) (Hoyer 2004). It is 0 for
  uniform weights and 1 for a single key. It compares rows of different n better
  than effective keys.

If all weights of a query are 0, they count as uniform.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jaxtyping import Array, Bool, Float

from diffjax.config import at_least, field
from diffjax.data.pipeline import ValidationBatches
from diffjax.evals.measurement import Measurement
from diffjax.evals.methods import inside
from diffjax.evals.methods.row_results import compute_for_rows
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report.plots import WIDTH, by_model, draw_line
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

# The names of the measurements, in the order of `row_sums`.
MEASURES = ("negative share", "small share", "effective keys", "Hoyer sparsity")

# A weight is small if its absolute value is below this share of the mean.
_SMALL = 0.1


@dataclasses.dataclass(frozen=True)
class DifferenceMap(Suite[ValidationBatches]):
  """Negative share and sparsity of attention weights, by layer.

  The measurements are named "negative share", "small share", "effective keys"
  and "Hoyer sparsity". They lie between 0 and 1 and have no unit. Each is
  measured for each layer, from 0, and over all layers. The units are rows.
  """

  name: ClassVar[str] = "difference_map"
  table: ClassVar[TableSpec] = TableSpec(
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
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure(
      "sparsity of attention (Hoyer)", "Hoyer sparsity", "", {"layer": "all"}
    ),
  )

  rows: int = field(
    64, "Validation rows to measure. Fewer if there are fewer. -1 for all."
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
  source: str = field(
    "",
    'Text, as in config.data.source. "" for the run\'s validation text.',
  )

  def load(self, trained: Trained) -> ValidationBatches:
    """Returns the validation rows.

    Raises:
      UserError: if rows are longer than the model takes, or there are none.
    """
    return validation_rows(
      "difference_map",
      trained,
      self.rows,
      length=self.length,
      batch_size=self.batch_size,
      source=self.source,
    )

  def measure(
    self, trained: Trained, batches: ValidationBatches
  ) -> Iterator[Measurement]:
    """Yields each measure for each layer, and then over all layers."""
    compute_sums = jax.jit(functools.partial(layer_sums, trained.model))

    def sums_of_batch(batch: dict[str, np.ndarray]) -> Float[Array, "B L sums"]:
      return jnp.swapaxes(compute_sums(trained.params, batch), 0, 1)

    label = f"difference_map of {trained.short_name}"
    float32_sums = compute_for_rows(sums_of_batch, batches, label)
    sums: Float[np.ndarray, "rows L sums"] = float32_sums.astype(np.float64)

    num_layers = sums.shape[1]
    sums_of_all_layers = sums.sum(axis=1)
    for index, measure in enumerate(MEASURES):
      # A mean is a sum, divided by the number of terms in the last column.
      columns = [index, -1]
      for layer in range(num_layers):
        sums_of_layer = sums[:, layer]
        units = sums_of_layer[:, columns]
        yield Measurement(measure, units, {"layer": layer})
      units = sums_of_all_layers[:, columns]
      yield Measurement(measure, units, {"layer": "all"})

  def plot(self, suite_results: Mapping[str, Any]) -> matplotlib.figure.Figure:
    """Draws a panel for each measure, with a line per model over layers."""
    figure = matplotlib.figure.Figure((WIDTH, 6), layout="constrained")
    all_axes = figure.subplots(2, 2).flat
    for axes, measure in zip(all_axes, MEASURES, strict=True):
      for style, results in by_model(suite_results, measure):
        results_of_layers = [
          result for result in results if result["at"]["layer"] != "all"
        ]
        layers = [result["at"]["layer"] for result in results_of_layers]
        draw_line(axes, layers, results_of_layers, style)
      axes.set(title=measure, xlabel="layer", ylabel=f"{measure} (0 to 1)")
      axes.set_ylim(bottom=0)
      axes.xaxis.get_major_locator().set_params(integer=True)
    # The lines are the same in all plots, so only the last one has a legend.
    axes.legend(fontsize=9)
    return figure


def layer_sums(
  model: Decoder, params: Any, batch: dict[str, Any]
) -> Float[Array, "L B sums"]:
  """Returns the sums of the measures for each layer and row of a batch.

  A layer adds up the sums of blocks of queries, so that the weights of all
  queries need not be in memory at once.

  Args:
    model: The decoder.
    params: Its parameters.
    batch: A batch of rows, as `inside.measure` takes it.

  Returns:
    The sums of each measure over queries and heads, and their number
    (`row_sums`).
  """
  batch_size = batch["tokens"].shape[0]
  zeros = jnp.zeros((batch_size, len(MEASURES) + 1))

  def add_block(
    sums: Float[Array, "B sums"], queries: inside.Queries
  ) -> Float[Array, "B sums"]:
    return sums + row_sums(queries.weights(), queries.mask)

  def sums_of_layer(inputs: inside.AttentionInputs) -> Float[Array, "B sums"]:
    return inside.fold_query_blocks(add_block, zeros, inputs)

  results = inside.measure(model, params, batch, attention=sums_of_layer)
  return results["attention"]


def row_sums(
  weights: Float[Array, "B H t S"], mask: Bool[Array, "B t S"]
) -> Float[Array, "B sums"]:
  """Returns the sum of each measure over queries and heads, and their number.

  The module docstring defines the measures. Queries that see fewer than two
  keys do not count.

  Args:
    weights: The attention weights w of each query and head.
    mask: Whether a query sees a key.

  Returns:
    For each row, the sums in the order of `MEASURES`, and then the number of
    pairs of a query and a head that count.
  """
  is_visible = mask[:, None]  # [B, 1, t, S]
  measures = _measure_queries(weights, is_visible)  # [B, H, t, measures]
  # Each query and head adds its measures to the sums, and 1 to their number.
  ones = jnp.ones_like(measures[..., :1])
  terms = jnp.concatenate([measures, ones], axis=-1)
  has_two_keys = jnp.sum(is_visible, axis=-1) >= 2  # [B, 1, t]
  counted_terms = jnp.where(has_two_keys[..., None], terms, 0.0)
  return jnp.sum(counted_terms, axis=(1, 2))


def _measure_queries(
  weights: Float[Array, "B H t S"], is_visible: Bool[Array, "B 1 t S"]
) -> Float[Array, "B H t measures"]:
  """Returns the measures of each query and head, in the order of `MEASURES`.

  The module docstring defines the measures. They have no meaning for queries
  that see fewer than two keys.

  Args:
    weights: The attention weights w of each query and head.
    is_visible: Whether a query sees a key.
  """
  # The number n of keys. At least 2, to avoid divisions by zero for queries
  # with fewer keys.
  num_keys = jnp.sum(is_visible, axis=-1).astype(jnp.float32)  # [B, 1, t]
  num_keys = jnp.maximum(num_keys, 2)
  magnitudes = jnp.where(is_visible, jnp.abs(weights), 0.0)
  l1_norm = jnp.sum(magnitudes, axis=-1)  # Σ|w|, [B, H, t]
  # Whether all weights of a query are 0.
  is_zero = l1_norm == 0

  # Σ max(−w, 0) / Σ|w|
  is_negative = is_visible & (weights < 0)
  negative_sum = jnp.sum(jnp.where(is_negative, magnitudes, 0.0), axis=-1)
  negative_share = negative_sum / jnp.where(is_zero, 1, l1_norm)

  # The share of keys whose |w| is below a tenth of the mean.
  mean_magnitude = l1_norm / num_keys
  is_small = is_visible & (magnitudes < _SMALL * mean_magnitude[..., None])
  small_share = jnp.sum(is_small, axis=-1) / num_keys

  # Both kinds of sparsity depend on Σ|w| / √Σw². This ratio is 1 for a single
  # key and √n for uniform weights. Zero weights count as uniform.
  sum_of_squares = jnp.sum(jnp.square(magnitudes), axis=-1)  # Σw², [B, H, t]
  l2_norm = jnp.sqrt(jnp.where(is_zero, 1, sum_of_squares))
  max_ratio = jnp.sqrt(num_keys)
  norm_ratio = jnp.where(is_zero, max_ratio, l1_norm / l2_norm)
  effective_keys = jnp.square(norm_ratio) / num_keys
  hoyer_sparsity = (max_ratio - norm_ratio) / (max_ratio - 1)

  return jnp.stack(
    [negative_share, small_share, effective_keys, hoyer_sparsity], axis=-1
  )
