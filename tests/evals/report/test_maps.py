"""The attention maps of the report equal the weights of the model."""

import jax
import numpy as np
import pytest

from diffjax.evals.report import map_pictures, maps
from diffjax.ops.diff_attention.reference import attention_maps
from tests.harness.tiers import full


@pytest.mark.parametrize("kind", ["diff", *full(["softmax", "diff_v2"])])
def test_maps_are_those_of_the_model(make_trained, kind):
  """The reference computes them from the queries and keys of a layer."""
  trained = make_trained(kind)
  num_tokens = 20
  num_heads = trained.config.model.num_heads
  tokens = np.arange(num_tokens)[None]
  layers = maps.maps_of(trained.model, trained.params, tokens)
  weights = np.asarray(layers.weights)
  if kind == "softmax":
    assert layers.titles == ("A",)
  else:
    assert layers.titles == ("A₁", "λA₂", "A₁ − λA₂")
  num_maps = len(layers.titles)
  assert weights.shape == (2, 1 + num_heads, num_maps, num_tokens, num_tokens)

  mean = weights[:, 0]
  heads = weights[:, 1:]
  np.testing.assert_allclose(mean, heads.mean(axis=1), atol=1e-6)

  queries, keys = queries_and_keys(trained, tokens)
  for layer in range(2):
    reference = jax.jit(attention_maps)(queries[layer], keys[layer])
    reference = np.asarray(reference[0])  # [H, maps, T, T]
    np.testing.assert_allclose(heads[layer, :, 0], reference[:, 0], atol=1e-6)
    if kind == "softmax":
      continue
    signal, noise, difference = np.moveaxis(heads[layer], 1, 0)
    # The weights of a query sum to 1 − λ.
    lam = 1 - difference.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(noise, lam * reference[:, 1], atol=1e-6)
    np.testing.assert_allclose(difference, signal - noise, atol=1e-6)


def queries_and_keys(trained, tokens):
  """Returns the queries and keys of all layers, after RoPE."""

  @jax.jit
  def run(params):
    return trained.model.apply(
      {"params": params}, tokens, mutable=["intermediates"]
    )

  _, variables = run(trained.params)
  captured = variables["intermediates"]["layers"]["attention"]
  return captured["query"][0], captured["key"][0]


def test_the_picture_is_of_the_head_that_cancels_most(make_trained):
  """The noise map of one head is half its signal map.

  The maps of the other heads share no key.
  """
  shape = (2, 3, 6, 6)
  signal = np.zeros(shape)
  noise = np.zeros(shape)
  signal[..., 0] = 1
  noise[..., 1] = 0.9
  # Index 0 is the mean over heads, so this is head 1.
  noise[1, 2] = signal[1, 2] / 2
  weights = np.stack([signal, noise, signal - noise], axis=2)
  tokens = ["(start)", "a", "b", " ", "+", "="]
  titles = ("A₁", "λA₂", "A₁ − λA₂")
  model_maps = maps.Maps(make_trained(), tokens, titles, weights)
  assert maps.most_cancelled(model_maps) == (1, 1, 0.5)

  figure, caption = map_pictures.head_picture(model_maps)
  assert caption.startswith("Layer 1 of 2, head 1 of 2,")
  assert "50%" in caption
  drawn = [axes for axes in figure.axes if axes.get_title()]
  assert tuple(axes.get_title() for axes in drawn) == titles
  for axes, expected in zip(drawn, weights[1, 2], strict=True):
    values = axes.images[0].get_array().filled(9)
    np.testing.assert_array_equal(values, np.where(np.tri(6), expected, 9))
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["(start)", "ab", "+="]
    assert axes.images[0].norm is drawn[0].images[0].norm, "one scale"
