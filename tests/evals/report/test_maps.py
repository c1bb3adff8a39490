"""The attention maps of the report equal the weights of the model."""

from collections.abc import Callable

import chex
import jax
import matplotlib.axes
import numpy as np
import pytest

from diffjax.evals.report import map_pictures, maps
from diffjax.inference.trained import Trained
from diffjax.ops.diff_attention.reference import attention_maps
from tests.harness.tiers import full


@pytest.mark.parametrize("variant", ["diff", *full(["softmax", "diff_v2"])])
def test_maps_are_those_of_the_model(make_trained, variant):
  """`attention_maps` computes the expected maps from the queries and keys.

  In the report, the mean over heads comes before the first head.
  """
  trained = make_trained(variant)
  num_layers = 2
  num_tokens = 20
  num_heads = trained.config.model.num_heads
  tokens = np.arange(num_tokens)[None]

  maps_of = jax.jit(maps.maps_of, static_argnums=0)
  report_maps = maps_of(trained.model, trained.params, tokens)

  weights = np.asarray(report_maps.weights)
  if variant == "softmax":
    assert report_maps.titles == ("A",)
  else:
    assert report_maps.titles == ("A₁", "λA₂", "A₁ − λA₂")
  num_maps = len(report_maps.titles)
  chex.assert_shape(
    weights, (num_layers, 1 + num_heads, num_maps, num_tokens, num_tokens)
  )

  mean = weights[:, 0]
  heads = weights[:, 1:]
  chex.assert_trees_all_close(mean, heads.mean(axis=1), atol=1e-6, rtol=0)

  queries, keys = queries_and_keys(trained, tokens)
  compute_reference = jax.jit(attention_maps)
  for layer in range(num_layers):
    reference = compute_reference(queries[layer], keys[layer])
    reference = np.asarray(reference[0])  # [H, maps, T, T]
    chex.assert_trees_all_close(
      heads[layer, :, 0], reference[:, 0], atol=1e-6, rtol=0
    )
    if variant == "softmax":
      # The map A is the only one.
      continue
    signal, noise, difference = np.moveaxis(heads[layer], 1, 0)
    # The weights of a query sum to 1 − λ.
    lam = 1 - difference.sum(axis=-1, keepdims=True)
    chex.assert_trees_all_close(noise, lam * reference[:, 1], atol=1e-6, rtol=0)
    chex.assert_trees_all_close(difference, signal - noise, atol=1e-6, rtol=0)


def queries_and_keys(
  trained: Trained, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the queries and keys of all layers, after RoPE."""

  @jax.jit
  def run(params):
    return trained.model.apply(
      {"params": params}, tokens, mutable=["intermediates"]
    )

  _, variables = jax.device_get(run(trained.params))
  captured = variables["intermediates"]["layers"]["attention"]
  return captured["query"][0], captured["key"][0]


@pytest.fixture
def maps_with_noise(make_trained: Callable[..., Trained]) -> maps.Maps:
  """Maps of two layers with two heads each. One head cancels noise.

  The noise map of head 1 in layer 1 is half its signal map. The maps of the
  other heads share no key.
  """
  # The first head is the mean over heads.
  shape = (2, 1 + 2, 6, 6)
  signal = np.zeros(shape)
  noise = np.zeros(shape)
  signal[..., 0] = 1
  noise[..., 1] = 0.9
  noise[1, 2] = signal[1, 2] / 2
  weights = np.stack([signal, noise, signal - noise], axis=2)
  tokens = ["(start)", "a", "b", " ", "+", "="]
  titles = ("A₁", "λA₂", "A₁ − λA₂")
  return maps.Maps(make_trained(), tokens, titles, weights)


def test_the_head_that_cancels_most_is_found(maps_with_noise):
  """In head 1 of layer 1, the noise map takes away half of the signal map.

  In the other heads, the two maps share no key.
  """
  layer, head, share = maps.most_cancelled(maps_with_noise)

  assert layer == 1
  assert head == 1
  assert share == 0.5


def test_the_caption_names_the_head_that_cancels_most(maps_with_noise):
  """Half of the signal is cancelled in head 1 of layer 1 and none elsewhere."""
  _, caption = map_pictures.head_picture(maps_with_noise)

  assert caption.startswith("Layer 1 of 2, head 1 of 2,")
  assert "50%" in caption


@pytest.fixture
def panels(maps_with_noise: maps.Maps) -> list[matplotlib.axes.Axes]:
  """The parts of the picture that have a title: one for each map."""
  figure, _ = map_pictures.head_picture(maps_with_noise)
  return [axes for axes in figure.axes if axes.get_title()]


def test_the_picture_shows_the_maps_of_the_head_that_cancels_most(
  maps_with_noise, panels
):
  """Weights above the diagonal, of keys after the query, are not drawn."""
  # The noise map of this head takes away half of its signal map.
  layer = 1
  head = 1
  # The mean over heads comes before the first head.
  head_weights = maps_with_noise.weights[layer, 1 + head]
  titles = tuple(axes.get_title() for axes in panels)
  assert titles == maps_with_noise.titles
  is_drawn = np.tri(6, dtype=bool)
  for axes, weights in zip(panels, head_weights, strict=True):
    (image,) = axes.images
    drawn = image.get_array()
    chex.assert_trees_all_equal(~drawn.mask, is_drawn)
    chex.assert_trees_all_equal(drawn.data[is_drawn], weights[is_drawn])


def test_the_axes_of_the_picture_have_words_as_labels(panels):
  """The tokens are "(start)", "a", "b", " ", "+" and "="."""
  for axes in panels:
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["(start)", "ab", "+="]


def test_all_maps_of_the_picture_have_one_color_scale(panels):
  scales = {axes.images[0].norm for axes in panels}

  assert len(scales) == 1
