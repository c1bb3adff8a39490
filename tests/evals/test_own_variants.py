"""The suites measure attention variants from outside the package."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.evals import attention, difference_map
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.needle import Needle
from diffjax.evals.outliers import Outliers
from diffjax.evals.position_nll import PositionNLL
from diffjax.evals.quantised import Quantised, quantise
from diffjax.evals.report import maps
from diffjax.evals.report.intervals import interval
from diffjax.evals.report.suite import Report
from diffjax.evals.suite import Model
from diffjax.evals.validation import Validation
from diffjax.inference.trained import Trained
from diffjax.model.attention import (
  CACHED_DECODING,
  QUANTIZED_LOGITS,
  WINDOWS,
  Attention,
  DiffAttention,
)
from diffjax.model.registry import ATTENTION, register
from diffjax.ops.diff_attention.reference import masked_softmax
from diffjax.parameters import Parameter
from tests.harness.own_variants import restore_registry

# The layers of the models: a full one, and one with a window.
NUM_LAYERS = 2
WINDOW = 9


class SigmoidNoiseAttention(Attention):
  """weights = A₁ − λA₂ − μS, with S = sigmoid(logits + bias).

  λ and μ depend on token and head, and rows have no fixed sum.
  """

  extra_parameters = {
    "noise_factors": Parameter("LEHZ", inputs="E"),
    "noise_bias": Parameter("LH"),
  }
  extra_axes = {"Z": 2}
  supports = frozenset({CACHED_DECODING, QUANTIZED_LOGITS, WINDOWS})
  weights_formula = "A₁ − λA₂ − μS"

  def head_sizes(self):
    return super().head_sizes()._replace(G=3, M=3)

  def compute_lambda(self, x, lambda_init):
    factors = self.parameter("noise_factors")
    lam = jax.nn.sigmoid(jnp.einsum("BTE,EHZ->BTHZ", x, factors))
    self.sow("intermediates", "lam", lam)
    return lam

  def maps(self, q, k, lam, mask):
    bias = self.parameter("noise_bias", nn.initializers.normal(1.0))
    logits = self.logits(q, k, mask)  # [B, H, 3, T, S]
    softmax_maps = masked_softmax(logits[:, :, :2], mask)
    sigmoid_map = jax.nn.sigmoid(logits[:, :, 2] + bias[:, None, None])
    sigmoid_map = jnp.where(mask[:, None], sigmoid_map, 0)
    factors = jnp.einsum("BTHZ->BHTZ", lam)
    return {
      "A₁": softmax_maps[:, :, 0],
      "λA₂": factors[..., :1] * softmax_maps[:, :, 1],
      "μS": factors[..., 1:] * sigmoid_map,
    }

  def weights(self, q, k, lam, mask):
    first, second, third = self.maps(q, k, lam, mask).values()
    return first - second - third


class MeanNoiseAttention(DiffAttention):
  """weights = A₁ − λM. M is the mean of A₁ over the queries up to a query.

  So the weights of a query depend on other queries, as in DINT.
  """

  supports = frozenset({QUANTIZED_LOGITS, WINDOWS})
  weights_formula = "A₁ − λM"

  def compute_lambda(self, x, lambda_init):
    lam = super().compute_lambda(x, lambda_init)
    self.sow("intermediates", "lam", lam)
    return lam

  def maps(self, q, k, lam, mask):
    signal_map = super().maps(q, k, lam, mask)["A₁"]
    visible = mask[:, None].astype(jnp.float32)
    count = jnp.maximum(visible.sum(axis=-1, keepdims=True), 1)
    mean = (visible / count) @ signal_map
    return {
      "A₁": signal_map,
      "λM": jnp.einsum("BTH->BHT", lam)[..., None] * mean,
    }

  def weights(self, q, k, lam, mask):
    signal_map, mean = self.maps(q, k, lam, mask).values()
    return signal_map - mean


def softmax(logits: np.ndarray) -> np.ndarray:
  """Returns the softmax of one query."""
  exponentials = np.exp(logits - logits.max())
  return exponentials / exponentials.sum()


def sigmoid(logits: np.ndarray) -> np.ndarray:
  """Returns the sigmoid of each logit."""
  return 1 / (1 + np.exp(-logits))


class LayerInputs(NamedTuple):
  """What the attention weights of a layer are computed from, in float64.

  Attributes:
    q: The queries [B, T, H, G, D]. Two heads share the keys of a key head.
    k: The keys [B, S, K, M, D].
    lam: What `compute_lambda` returns.
    mask: Whether a query sees a key, [B, T, S].
    params: The parameters of the attention layer.
  """

  q: np.ndarray
  k: np.ndarray
  lam: np.ndarray
  mask: np.ndarray
  params: dict[str, np.ndarray]

  def logits(self, b: int, t: int, h: int, g: int) -> np.ndarray:
    """Returns the logits of the keys that a query sees, in a map."""
    visible_keys = self.k[b, self.mask[b, t], h // 2, g]
    query = self.q[b, t, h, g]
    return visible_keys @ query / np.sqrt(len(query))


class HandWeights(NamedTuple):
  """The maps [maps, B, H, T, S] and the weights [B, H, T, S] of a layer."""

  maps: np.ndarray
  weights: np.ndarray


def sigmoid_noise_weights(inputs: LayerInputs) -> HandWeights:
  """Returns the weights of SigmoidNoiseAttention, query by query."""
  batch, length, heads = inputs.q.shape[:3]
  layer_maps = np.zeros((3, batch, heads, length, length))
  for b, t, h in np.ndindex(batch, length, heads):
    visible = np.flatnonzero(inputs.mask[b, t])
    if len(visible) == 0:
      continue
    lam, mu = inputs.lam[b, t, h]
    bias = inputs.params["noise_bias"][h]
    layer_maps[0, b, h, t, visible] = softmax(inputs.logits(b, t, h, 0))
    layer_maps[1, b, h, t, visible] = lam * softmax(inputs.logits(b, t, h, 1))
    noise = sigmoid(inputs.logits(b, t, h, 2) + bias)
    layer_maps[2, b, h, t, visible] = mu * noise
  return HandWeights(layer_maps, layer_maps[0] - layer_maps[1] - layer_maps[2])


def mean_noise_weights(inputs: LayerInputs) -> HandWeights:
  """Returns the weights of MeanNoiseAttention, query by query."""
  batch, length, heads = inputs.q.shape[:3]
  layer_maps = np.zeros((2, batch, heads, length, length))
  for b, t, h in np.ndindex(batch, length, heads):
    visible = np.flatnonzero(inputs.mask[b, t])
    if len(visible) == 0:
      continue
    layer_maps[0, b, h, t, visible] = softmax(inputs.logits(b, t, h, 0))
    # The queries that query t sees as keys are before it, so they are done.
    mean = layer_maps[0, b, h, visible].mean(axis=0)
    layer_maps[1, b, h, t] = inputs.lam * mean
  return HandWeights(layer_maps, layer_maps[0] - layer_maps[1])


class OwnVariant(NamedTuple):
  """A variant, its definition in NumPy, and the titles of its maps."""

  layer_class: type[Attention]
  weights_by_hand: Callable[[LayerInputs], HandWeights]
  titles: tuple[str, ...]


OWN_VARIANTS = {
  "sigmoid_noise": OwnVariant(
    SigmoidNoiseAttention,
    sigmoid_noise_weights,
    ("A₁", "λA₂", "μS", "A₁ − λA₂ − μS"),
  ),
  "mean_noise": OwnVariant(
    MeanNoiseAttention, mean_noise_weights, ("A₁", "λM", "A₁ − λM")
  ),
}


@pytest.fixture(scope="module", params=OWN_VARIANTS)
def trained(
  request: pytest.FixtureRequest, make_trained: Callable[..., Trained]
) -> Iterator[Trained]:
  """A model of a variant that is registered for the tests of this file."""
  name = request.param
  with restore_registry():
    register(name)(OWN_VARIANTS[name].layer_class)
    model = make_trained(
      "softmax",
      attention=name,
      num_layers=NUM_LAYERS,
      window=WINDOW,
      window_pattern="fw",
      max_length=640,
    )
    yield with_random_biases(model)


def with_random_biases(trained: Trained) -> Trained:
  """Returns the model with random values for `noise_bias`, which is zero."""
  layers = trained.params["layers"]
  if "noise_bias" not in layers["attention"]:
    return trained
  shape = layers["attention"]["noise_bias"].shape
  biases = np.random.default_rng(0).normal(size=shape)
  attention_params = {
    **layers["attention"],
    "noise_bias": jnp.asarray(biases, jnp.float32),
  }
  layers = {**layers, "attention": attention_params}
  return dataclasses.replace(
    trained, params={**trained.params, "layers": layers}
  )


@functools.partial(jax.jit, static_argnums=0)
def capture_attention(
  model: nn.Module, params: Any, batch: dict[str, Any]
) -> dict[str, Any]:
  """Returns the queries, keys and λ of all layers."""
  _, variables = model.apply(
    {"params": params},
    batch["tokens"],
    batch["segment_ids"],
    batch["positions"],
    mutable=["intermediates"],
  )
  return variables["intermediates"]["layers"]["attention"]


def layer_masks(segment_ids: np.ndarray) -> list[np.ndarray]:
  """Returns whether a query sees a key [B, T, S], for each layer."""
  length = segment_ids.shape[1]
  distance = np.arange(length)[:, None] - np.arange(length)
  is_same_document = segment_ids[:, :, None] == segment_ids[:, None]
  is_token = segment_ids[:, :, None] > 0
  is_visible = (distance >= 0) & is_same_document & is_token
  return [is_visible, is_visible & (distance < WINDOW)]


def compute_weights_by_hand(
  trained: Trained, batch: dict[str, Any]
) -> list[HandWeights]:
  """Returns the maps and the weights of each layer, by their definition."""
  variant = OWN_VARIANTS[trained.config.model.attention]
  captured = capture_attention(trained.model, trained.params, batch)
  (queries,) = captured["query"]
  (keys,) = captured["key"]
  (lam,) = captured["lam"]
  attention_params = trained.params["layers"]["attention"]
  weights = []
  for layer, mask in enumerate(layer_masks(batch["segment_ids"])):
    params = {}
    for name, leaf in attention_params.items():
      params[name] = np.asarray(leaf[layer])
    inputs = LayerInputs(
      np.asarray(queries[layer], np.float64),
      np.asarray(keys[layer], np.float64),
      np.asarray(lam[layer], np.float64),
      mask,
      params,
    )
    weights.append(variant.weights_by_hand(inputs))
  return weights


def test_difference_map_measures_the_variants_weights(trained):
  """The sums equal those of weights that NumPy computes by their definition.

  A row of 150 tokens has two blocks of queries.
  """
  rows = validation_rows(
    "difference_map", trained, count=2, length=150, batch_size=2
  )
  batch = next(iter(rows))
  segment_ids = batch["segment_ids"].copy()
  # The first row has two documents, and the second one has padding.
  segment_ids[0, 60:] = 2
  segment_ids[1, 140:] = 0
  batch = {**batch, "segment_ids": segment_ids}

  sums = jax.jit(difference_map.layer_sums, static_argnums=0)(
    trained.model, trained.params, batch
  )

  weights = compute_weights_by_hand(trained, batch)
  masks = layer_masks(segment_ids)
  for layer in range(NUM_LAYERS):
    expected = difference_map.row_sums(
      jnp.asarray(weights[layer].weights, jnp.float32),
      jnp.asarray(masks[layer]),
    )
    # A weight near the bound of small ones may be rounded across it.
    chex.assert_trees_all_close(sums[layer], expected, rtol=2e-4)


class ShortText(NamedTuple):
  """Two rows of 20 tokens, and the weights of each layer by hand."""

  tokens: np.ndarray
  layers: list[HandWeights]


@pytest.fixture(scope="module")
def short_text(trained: Trained) -> ShortText:
  """Rows that are one document each."""
  tokens = np.arange(40, 80).reshape(2, 20)
  batch = {
    "tokens": tokens,
    "segment_ids": np.ones_like(tokens),
    "positions": np.broadcast_to(np.arange(20), tokens.shape),
  }
  return ShortText(tokens, compute_weights_by_hand(trained, batch))


def test_attention_measures_the_variants_weights(trained, short_text):
  """The suite "attention" measures the weights of the last query of a row.

  `short_text` has the weights that NumPy computes by their definition.
  """
  last_query = jax.jit(attention.last_query, static_argnums=0)

  weights = last_query(trained.model, trained.params, short_text.tokens)

  last_weights = [layer.weights[:, :, -1] for layer in short_text.layers]
  # The mean over layers and heads.
  expected = np.mean(last_weights, axis=(0, 2))
  chex.assert_trees_all_close(
    weights, jnp.asarray(expected, jnp.float32), atol=1e-5, rtol=0
  )


def test_the_maps_of_the_report_are_the_variants(trained, short_text):
  """The report shows the maps and weights of each head, and their mean.

  `short_text` has those that NumPy computes by their definition.
  """
  variant = OWN_VARIANTS[trained.config.model.attention]
  maps_of = jax.jit(maps.maps_of, static_argnums=0)
  first_row = short_text.tokens[:1]

  report_maps = maps_of(trained.model, trained.params, first_row)

  assert report_maps.titles == variant.titles
  for layer, hand in enumerate(short_text.layers):
    maps_and_weights = np.stack([*hand.maps, hand.weights])
    # From [maps, B, H, T, S] to [H, maps, T, S] of the first row.
    by_head = np.moveaxis(maps_and_weights[:, 0], 0, 1)
    mean = by_head.mean(axis=0, keepdims=True)
    # The first head of the report is the mean over heads.
    expected = np.concatenate([mean, by_head])
    chex.assert_trees_all_close(
      report_maps.weights[layer],
      jnp.asarray(expected, jnp.float32),
      atol=1e-5,
      rtol=0,
    )


def test_the_page_shows_a_picture_of_variants_with_a_noise_map(
  trained, tmp_path
):
  """The picture is of a head whose noise map, "λA₂", takes away most of A₁.

  Of the two variants here, only "sigmoid_noise" has a map with this title.
  """
  name = trained.config.model.attention
  description = {
    "name": "a model",
    "workdir": str(tmp_path),
    "attention": name,
    "parameters": 1,
  }
  suite = Report(tokens=30)
  models = [Model(trained, description)]

  suite.run(models, [suite.load(trained)], epath.Path(tmp_path))

  text = (tmp_path / "report.html").read_text()
  titles = OWN_VARIANTS[name].titles
  for title in titles:
    assert f"<figcaption>{title}</figcaption>" in text
  has_noise_map = "λA₂" in titles
  assert (tmp_path / "maps.png").exists() == has_noise_map
  assert ("takes away most of" in text) == has_noise_map


@pytest.mark.parametrize(
  "suite",
  [
    pytest.param(Validation(rows=3), id="validation"),
    pytest.param(PositionNLL(rows=2, length=100), id="position_nll"),
    pytest.param(Outliers(tokens=150), id="outliers"),
  ],
)
def test_the_suite_gives_finite_values(trained, suite):
  measurements = list(suite.evaluate(trained))

  assert measurements
  for measurement in measurements:
    assert np.isfinite(interval(measurement).value), measurement


def test_needles_are_asked_with_and_without_quantisation(trained):
  """The suite "needle" is measured with exact logits ("all"), and with 8 bits."""
  needles = Needle(
    pairs=("1/1",),
    lengths=(330,),
    depths=(0.5,),
    samples=2,
    haystack="synthetic",
    new_tokens=6,
    batch_tokens=2 * 330,
  )
  suite = Quantised(
    measurements=("needle",), bits=(8,), per=("row",), needle=needles
  )

  measurements = list(suite.evaluate(trained))

  bits = [measurement.at["bits"] for measurement in measurements]
  assert bits == ["all", 8]
  for measurement in measurements:
    assert 0 <= interval(measurement).value <= 1


def test_logits_of_24_bits_change_nothing_and_of_2_bits_much(trained):
  """The suite "quantised" rounds the logits of attention to a number of bits."""
  tokens = np.arange(40, 80).reshape(2, 20)
  many_bits = quantise(trained, bits=24, per="row")
  few_bits = quantise(trained, bits=2, per="tensor")

  @functools.partial(jax.jit, static_argnums=0)
  def apply(model, params):
    return model.apply({"params": params}, tokens)

  exact = apply(trained.model, trained.params)
  fine = apply(many_bits.model, trained.params)
  coarse = apply(few_bits.model, trained.params)

  # The mantissa of float32 has 24 bits too.
  chex.assert_trees_all_close(fine, exact, atol=1e-5, rtol=0)
  assert np.abs(coarse - exact).max() > 0.01


def test_a_variant_without_quantised_logits_raises(trained, monkeypatch):
  """A variant lists its optional features in `supports`.

  Here that is only WINDOWS. The suite "quantised" needs QUANTIZED_LOGITS.
  """
  layer_class = ATTENTION[trained.config.model.attention]
  monkeypatch.setattr(layer_class, "supports", frozenset({WINDOWS}))
  suite = Quantised()

  with pytest.raises(UserError, match="does not declare that it supports"):
    suite.evaluate(trained)
