"""The suites measure attention variants from outside the package."""

import dataclasses
import functools
import pathlib
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
from tests.harness.tolerances import FLOAT32_LAYER

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
  """A variant and its definition in NumPy."""

  layer_class: type[Attention]
  weights_by_hand: Callable[[LayerInputs], HandWeights]


OWN_VARIANTS = {
  "sigmoid_noise": OwnVariant(SigmoidNoiseAttention, sigmoid_noise_weights),
  "mean_noise": OwnVariant(MeanNoiseAttention, mean_noise_weights),
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
    "noise_bias": biases.astype(np.float32),
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
  captured = jax.device_get(
    capture_attention(trained.model, trained.params, batch)
  )
  (queries,) = captured["query"]
  (keys,) = captured["key"]
  (lam,) = captured["lam"]
  attention_params = trained.params["layers"]["attention"]
  weights = []
  for layer, mask in enumerate(layer_masks(batch["segment_ids"])):
    params = {}
    for name, leaf in attention_params.items():
      params[name] = np.asarray(leaf)[layer]
    inputs = LayerInputs(
      queries[layer].astype(np.float64),
      keys[layer].astype(np.float64),
      lam[layer].astype(np.float64),
      mask,
      params,
    )
    weights.append(variant.weights_by_hand(inputs))
  return weights


def test_difference_map_measures_the_weights_of_a_variant(trained):
  """NumPy computes the weights by their definition, query by query.

  The suite computes blocks of 128 queries, so rows of 150 have two blocks.
  """
  rows = validation_rows(
    "difference_map", trained, count=2, length=150, batch_size=2
  )
  batch = next(iter(rows))
  segment_ids = batch["segment_ids"].copy()
  # The first row has a second document from token 60 on.
  segment_ids[0, 60:] = 2
  # The second row ends with ten tokens of padding, whose id is 0.
  segment_ids[1, 140:] = 0
  batch = {**batch, "segment_ids": segment_ids}
  layer_sums = jax.jit(difference_map.layer_sums, static_argnums=0)

  sums_of_layers = layer_sums(trained.model, trained.params, batch)

  layers = compute_weights_by_hand(trained, batch)
  masks = layer_masks(segment_ids)
  row_sums = jax.jit(difference_map.row_sums)
  for sums, layer, mask in zip(sums_of_layers, layers, masks, strict=True):
    # test_difference_map.py tests `row_sums` by hand.
    expected = row_sums(layer.weights.astype(np.float32), mask)
    # A weight near the bound of small ones may be rounded across it.
    chex.assert_trees_all_close(sums, expected, rtol=2e-4)


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


def test_attention_measures_the_weights_of_a_variant(trained, short_text):
  """The suite "attention" measures the weights of the last query of a row.

  They are averaged over layers and heads. `short_text` has the weights that
  NumPy computes by their definition.
  """
  last_query = jax.jit(attention.last_query, static_argnums=0)

  weights = last_query(trained.model, trained.params, short_text.tokens)

  # [layers, rows, heads, queries, keys]
  weights_of_layers = np.stack([layer.weights for layer in short_text.layers])
  mean_over_heads = weights_of_layers.mean(axis=2)
  mean_over_layers = mean_over_heads.mean(axis=0)  # [rows, queries, keys]
  expected = mean_over_layers[:, -1].astype(np.float32)
  chex.assert_trees_all_close(
    weights, expected, atol=FLOAT32_LAYER["atol"], rtol=0
  )


@pytest.fixture(scope="module")
def report_maps(trained: Trained, short_text: ShortText) -> maps.LayerMaps:
  """The maps of the first row of `short_text`, as the report computes them."""
  maps_of = jax.jit(maps.maps_of, static_argnums=0)
  return maps_of(trained.model, trained.params, short_text.tokens[:1])


def test_the_report_shows_the_maps_and_weights_of_each_head(
  report_maps, short_text
):
  """`short_text` has the maps that NumPy computes by their definition.

  The report shows their mean over heads first, and the weights after the maps.
  """
  for layer, definition in enumerate(short_text.layers):
    # [maps and weights, rows, heads, queries, keys]
    maps_and_weights = np.stack([*definition.maps, definition.weights])
    maps_of_first_row = maps_and_weights[:, 0].astype(np.float32)
    mean_over_heads = maps_of_first_row.mean(axis=1, keepdims=True)
    expected = np.concatenate([mean_over_heads, maps_of_first_row], axis=1)
    # The report's axes are [mean and heads, maps and weights, queries, keys].
    chex.assert_trees_all_close(
      report_maps.weights[layer],
      np.swapaxes(expected, 0, 1),
      atol=FLOAT32_LAYER["atol"],
      rtol=0,
    )


@pytest.fixture(scope="module")
def report_dir(
  trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
  """The directory with the report on the model, for a text of 30 tokens."""
  directory = tmp_path_factory.mktemp("report")
  description = {
    "name": "a model",
    "workdir": str(directory),
    "attention": trained.config.model.attention,
    "parameters": 1,
  }
  suite = Report(tokens=30)
  model = Model(trained, description)
  suite.run([model], [suite.load(trained)], epath.Path(directory))
  return directory


def test_the_report_names_the_maps_of_a_variant(
  trained, report_maps, report_dir
):
  """The last title is the formula of the weights, as a sum of the maps."""
  titles_of_variants = {
    "sigmoid_noise": ("A₁", "λA₂", "μS", "A₁ − λA₂ − μS"),
    "mean_noise": ("A₁", "λM", "A₁ − λM"),
  }

  titles = titles_of_variants[trained.config.model.attention]

  assert report_maps.titles == titles
  report = (report_dir / "report.html").read_text()
  for title in titles:
    assert f"<figcaption>{title}</figcaption>" in report


def test_a_report_with_a_noise_map_has_a_picture(trained, report_dir):
  """The picture shows a head in which the map "λA₂" takes away most of A₁."""
  has_picture = {"sigmoid_noise": True, "mean_noise": False}

  report = (report_dir / "report.html").read_text()

  variant = trained.config.model.attention
  assert (report_dir / "maps.png").exists() == has_picture[variant]
  assert ("takes away most of" in report) == has_picture[variant]


ONE_NEEDLE = Needle(
  pairs=("1/1",),
  lengths=(330,),
  depths=(0.5,),
  samples=2,
  haystack="synthetic",
  new_tokens=6,
  batch_tokens=2 * 330,
)


@pytest.mark.parametrize(
  "suite",
  [
    pytest.param(Validation(rows=3), id="validation"),
    pytest.param(PositionNLL(rows=2, length=100), id="position_nll"),
    pytest.param(Outliers(tokens=150), id="outliers"),
    pytest.param(ONE_NEEDLE, id="needle", marks=pytest.mark.full),
    pytest.param(
      Quantised(
        measurements=("needle",), bits=(8,), per=("row",), needle=ONE_NEEDLE
      ),
      id="needle with exact logits and with 8 bits",
      marks=pytest.mark.full,
    ),
  ],
)
def test_the_suite_gives_finite_values(trained, suite):
  measurements = list(suite.evaluate(trained))

  assert measurements
  for measurement in measurements:
    assert np.isfinite(interval(measurement).value), measurement


def test_logits_of_24_bits_change_nothing_and_of_2_bits_much(trained):
  """Numbers in float32 have 24 significant bits, so 24 bits are exact."""
  tokens = np.arange(40, 80).reshape(2, 20)
  model_of_24_bits = quantise(trained, bits=24, per="row").model
  model_of_2_bits = quantise(trained, bits=2, per="row").model

  @functools.partial(jax.jit, static_argnums=0)
  def apply_to_tokens(model, params):
    return model.apply({"params": params}, tokens)

  exact = apply_to_tokens(trained.model, trained.params)
  with_24_bits = apply_to_tokens(model_of_24_bits, trained.params)
  with_2_bits = apply_to_tokens(model_of_2_bits, trained.params)

  chex.assert_trees_all_close(
    with_24_bits, exact, atol=FLOAT32_LAYER["atol"], rtol=0
  )
  change = np.abs(with_2_bits - exact)
  # A thousand times the rounding errors of the exact output.
  assert change.max() > 1000 * FLOAT32_LAYER["atol"]


def test_a_variant_without_quantised_logits_raises(trained, monkeypatch):
  """A variant lists its optional features in `supports`.

  Here that is only WINDOWS. The suite "quantised" needs QUANTIZED_LOGITS.
  """
  layer_class = ATTENTION[trained.config.model.attention]
  monkeypatch.setattr(layer_class, "supports", frozenset({WINDOWS}))
  suite = Quantised()

  with pytest.raises(UserError, match="does not declare that it supports"):
    suite.evaluate(trained)
