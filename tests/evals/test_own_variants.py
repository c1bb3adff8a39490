"""The suites measure attention variants that are not the package's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from diffjax.config import UserError
from diffjax.evals import attention, difference_map
from diffjax.evals.attention import AttentionShares
from diffjax.evals.difference_map import DifferenceMap
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


def softmax(logits):
  exponentials = np.exp(logits - logits.max())
  return exponentials / exponentials.sum()


def sigmoid(logits):
  return 1 / (1 + np.exp(-logits))


def sigmoid_noise_terms(q, k, lam, mask, params):
  """The maps of SigmoidNoiseAttention, query by query in float64."""
  batch, length, heads, _, width = q.shape
  terms = np.zeros((3, batch, heads, length, length))
  for b, t, h in np.ndindex(batch, length, heads):
    seen = np.flatnonzero(mask[b, t])
    if len(seen) == 0:
      continue
    logits = []
    for g in range(3):
      logits.append(k[b, seen, h // 2, g] @ q[b, t, h, g] / np.sqrt(width))
    lam_of_head, mu_of_head = lam[b, t, h]
    terms[0, b, h, t, seen] = softmax(logits[0])
    terms[1, b, h, t, seen] = lam_of_head * softmax(logits[1])
    noise = sigmoid(logits[2] + params["noise_bias"][h])
    terms[2, b, h, t, seen] = mu_of_head * noise
  return terms, terms[0] - terms[1] - terms[2]


def mean_noise_terms(q, k, lam, mask, params):
  """The maps of MeanNoiseAttention, query by query in float64."""
  batch, length, heads, _, width = q.shape
  terms = np.zeros((2, batch, heads, length, length))
  for b, t, h in np.ndindex(batch, length, heads):
    seen = np.flatnonzero(mask[b, t])
    if len(seen) == 0:
      continue
    logits = k[b, seen, h // 2, 0] @ q[b, t, h, 0] / np.sqrt(width)
    terms[0, b, h, t, seen] = softmax(logits)
    # The queries that query t sees as keys are before it, so they are done.
    terms[1, b, h, t] = lam * terms[0, b, h, seen].mean(axis=0)
  return terms, terms[0] - terms[1]


# By name: the class, its maps in NumPy, and the titles of its maps.
OWN_VARIANTS = {
  "sigmoid_noise": (
    SigmoidNoiseAttention,
    sigmoid_noise_terms,
    ("A₁", "λA₂", "μS", "A₁ − λA₂ − μS"),
  ),
  "mean_noise": (MeanNoiseAttention, mean_noise_terms, ("A₁", "λM", "A₁ − λM")),
}


@pytest.fixture(params=OWN_VARIANTS)
def own(request, make_trained):
  """A model of a variant that is registered during the test only.

  Its first layer is a full one and its second one has a window of 9.
  """
  name = request.param
  with restore_registry():
    register(name)(OWN_VARIANTS[name][0])
    yield make_trained(
      "softmax", attention=name, window=9, window_pattern="fw", max_length=640
    )


def weights_by_hand(trained, batch):
  """The maps and the weights of each layer, by the NumPy definition."""
  config = trained.config.model
  _, terms_fn, _ = OWN_VARIANTS[config.attention]
  _, variables = jax.jit(
    lambda params: trained.model.apply(
      {"params": params},
      batch["tokens"],
      batch["segment_ids"],
      batch["positions"],
      mutable=["intermediates"],
    )
  )(trained.params)
  captured = variables["intermediates"]["layers"]["attention"]
  ids = batch["segment_ids"]
  length = ids.shape[1]
  distance = np.arange(length)[:, None] - np.arange(length)
  terms = []
  weights = []
  for layer, window in enumerate((length, 9)):
    mask = (distance >= 0) & (distance < window)
    mask = mask & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None]
    params = trained.params["layers"]["attention"]
    layer_terms, layer_weights = terms_fn(
      np.asarray(captured["query"][0][layer], np.float64),
      np.asarray(captured["key"][0][layer], np.float64),
      np.asarray(captured["lam"][0][layer], np.float64),
      mask,
      {name: np.asarray(leaf[layer]) for name, leaf in params.items()},
    )
    terms.append(layer_terms)
    weights.append(layer_weights)
  return terms, weights


def whole_text(tokens):
  """A batch of rows that are one document each."""
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return {
    "tokens": tokens,
    "segment_ids": np.ones_like(tokens),
    "positions": positions,
  }


def test_difference_map_measures_the_variants_weights(own):
  """Rows of two documents and of two blocks of queries, with padding."""
  rows = validation_rows("difference_map", own, 2, length=150, batch_size=2)
  batch = next(iter(rows))
  ids = batch["segment_ids"].copy()
  ids[0, 60:] = 2
  ids[1, 140:] = 0
  batch = {**batch, "segment_ids": ids}
  found = jax.jit(difference_map.layer_sums, static_argnums=0)(
    own.model, own.params, batch
  )
  _, weights = weights_by_hand(own, batch)
  distance = np.arange(150)[:, None] - np.arange(150)
  for layer, window in enumerate((150, 9)):
    mask = (distance >= 0) & (distance < window)
    mask = mask & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None]
    want = difference_map.row_sums(
      jnp.asarray(weights[layer], jnp.float32), jnp.asarray(mask)
    )
    # Rounding decides whether a weight at the bound of small ones is small.
    np.testing.assert_allclose(found[layer], want, rtol=2e-4)


def test_attention_measures_the_variants_weights(own):
  tokens = np.arange(40, 80).reshape(2, 20)
  found = jax.jit(attention.last_query, static_argnums=0)(
    own.model, own.params, tokens
  )
  _, weights = weights_by_hand(own, whole_text(tokens))
  last_rows = np.stack(weights)[:, :, :, -1]  # [L, B, H, S]
  np.testing.assert_allclose(found, last_rows.mean(axis=(0, 2)), atol=1e-5)


def test_the_reports_maps_are_the_variants(own):
  tokens = np.arange(40, 60)[None]
  found = jax.jit(maps.maps_of, static_argnums=0)(own.model, own.params, tokens)
  terms, weights = weights_by_hand(own, whole_text(tokens))
  assert found.titles == OWN_VARIANTS[own.config.model.attention][2]
  for layer in range(2):
    want = np.stack([*terms[layer], weights[layer]])[:, 0]  # [maps, H, T, T]
    want = np.moveaxis(want, 0, 1)
    np.testing.assert_allclose(found.weights[layer, 1:], want, atol=1e-5)
    np.testing.assert_allclose(
      found.weights[layer, 0], want.mean(axis=0), atol=1e-5
    )


def test_the_page_shows_a_picture_of_variants_with_a_noise_map(own, tmp_path):
  description = {
    "name": "a model",
    "workdir": str(tmp_path),
    "attention": own.config.model.attention,
    "parameters": 1,
  }
  suite = Report(tokens=30)
  prompt_ids = suite.load(own)
  suite.run([Model(own, description)], [prompt_ids], epath.Path(tmp_path))
  text = (tmp_path / "report.html").read_text()
  titles = OWN_VARIANTS[own.config.model.attention][2]
  for title in titles:
    assert f"<figcaption>{title}</figcaption>" in text
  has_noise_map = "λA₂" in titles
  assert (tmp_path / "maps.png").exists() == has_noise_map
  assert ("takes away most of" in text) == has_noise_map


# Suites that neither generate nor download, with little to measure.
SUITES = [
  Validation(rows=3),
  PositionNLL(rows=2, length=100),
  DifferenceMap(rows=3),
  AttentionShares(
    length=400, needles=1, depths=(0.5,), samples=2, haystack="synthetic"
  ),
  Outliers(tokens=150),
  Quantised(
    measurements=("validation",),
    bits=(4,),
    per=("row",),
    validation=Validation(rows=3),
  ),
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_the_suite_runs(own, suite):
  found = list(suite.evaluate(own))
  assert found
  for figure in found:
    assert np.isfinite(interval(figure).value), figure


NEEDLES = Needle(
  pairs=("1/1",),
  lengths=(450,),
  depths=(0.5,),
  samples=2,
  haystack="synthetic",
  new_tokens=6,
  batch_tokens=900,  # two rows
)


def test_needles_are_asked_with_and_without_quantisation(own):
  suite = Quantised(
    measurements=("needle",), bits=(8,), per=("row",), needle=NEEDLES
  )
  for figure in suite.evaluate(own):
    assert 0 <= interval(figure).value <= 1


def test_quantised_logits_are_the_variants(own):
  """Many bits change nothing. Few change the hidden states."""
  tokens = np.arange(40, 80).reshape(2, 20)
  apply = jax.jit(
    lambda model, params: model.apply({"params": params}, tokens),
    static_argnums=0,
  )
  want = apply(own.model, own.params)
  fine = quantise(own, 24, "row").model
  coarse = quantise(own, 2, "tensor").model
  np.testing.assert_allclose(apply(fine, own.params), want, atol=2e-5)
  assert np.abs(apply(coarse, own.params) - want).max() > 0.01


def test_a_variant_without_quantised_logits_is_refused(own, monkeypatch):
  layer_class = ATTENTION[own.config.model.attention]
  monkeypatch.setattr(layer_class, "supports", frozenset({WINDOWS}))
  with pytest.raises(UserError, match="does not declare that it supports"):
    Quantised().evaluate(own)
