"""Styles of attention variants in figures."""

import pytest

from diffjax.model import variant_styles
from diffjax.model.attention import ATTENTION, Attention, register
from diffjax.plots.styles import (
  BLACK,
  BLUE,
  GREEN,
  GREY,
  PURPLE,
  RED,
  Style,
)

# The styles of published figures.
PUBLISHED = {
  "softmax": Style("Transformer", BLACK, "o"),
  "diff": Style("DIFF", RED, "s"),
  "diff_v2": Style("DIFF V2", BLUE, "^"),
  "diff_v2_linear": Style("DIFF V2 with linear λ", BLUE, "^"),
  "diff_v2_gated": Style("DIFF V2 with gates", BLUE, "X"),
  "diff_per_token": Style("DIFF with λ per token", RED, "P"),
  "gated": Style("Gated attention", GREEN, "D"),
  "dex": Style("DEX", PURPLE, "*"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_variants_keep_their_styles(name):
  assert variant_styles.style(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", ATTENTION)
def test_every_variant_has_a_named_style(name):
  assert variant_styles.style(name).name


@pytest.fixture
def own_names(restored_registry):
  """Two registered variants, and 30 that only checkpoints name.

  None of them has a style of its own.
  """
  registered = ["own_one", "own_two"]
  for name in registered:
    register(name)(type(name, (Attention,), {}))
  stored = [f"stored_{number}" for number in range(30)]
  return registered + stored


def test_variants_without_a_style_look_different(own_names):
  styles = [variant_styles.style(name) for name in own_names]

  looks = [(style.color, style.marker) for style in styles]
  published_looks = {
    (style.color, style.marker) for style in PUBLISHED.values()
  }
  assert [style.name for style in styles] == own_names
  assert len(set(looks)) == len(looks)
  assert published_looks.isdisjoint(looks)
  # Colours are not repeated before markers change.
  assert len({style.color for style in styles[:7]}) == 7


def test_a_style_does_not_change_when_it_is_requested_again(own_names):
  stored = own_names[2:]
  first_styles = [variant_styles.style(name) for name in reversed(stored)]

  styles = [variant_styles.style(name) for name in reversed(stored)]

  assert styles == first_styles


def test_registered_variants_get_their_styles_first(own_names):
  """So every figure of a process has the same style for them."""
  stored_styles = [variant_styles.style(name) for name in own_names[2:]]
  registered_styles = [variant_styles.style(name) for name in own_names[:2]]

  # Seven styles have different colours if they were assigned one after another.
  first_seven = registered_styles + stored_styles[:5]
  assert len({style.color for style in first_seven}) == 7


def test_more_variants_than_looks_still_have_styles(restored_registry):
  styles = [variant_styles.style(f"stored_{number}") for number in range(99)]

  assert len({style.name for style in styles}) == 99


def test_a_class_can_have_a_style_of_its_own(restored_registry):
  own_style = Style("Mine", "#123456", "x")
  register("own")(type("Own", (Attention,), {"style": own_style}))

  assert variant_styles.style("own") == own_style


def test_a_subclass_does_not_inherit_the_style(restored_registry):
  own_style = Style("Mine", "#123456", "x")
  parent = register("own")(type("Own", (Attention,), {"style": own_style}))
  register("own_child")(type("Child", (parent,), {}))

  assert variant_styles.style("own_child").name == "own_child"


@pytest.mark.parametrize(
  ("variants", "expected"),
  [
    pytest.param(
      ["softmax", "diff"],
      [PUBLISHED["softmax"], PUBLISHED["diff"]],
      id="two variants",
    ),
    pytest.param(
      ["diff", "diff"],
      [Style("a", RED, "s"), Style("b", GREY, "o")],
      id="the same variant",
    ),
    pytest.param(
      ["diff", "diff_per_token"],
      [PUBLISHED["diff"], Style("DIFF with λ per token", GREY, "o")],
      id="the same colour",
    ),
  ],
)
def test_two_models_of_a_figure_have_different_colours(variants, expected):
  styles = variant_styles.distinct_styles(variants, ["a", "b"])

  assert list(styles) == expected
