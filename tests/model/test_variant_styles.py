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
from tests.harness.own_variants import restore_registry

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


# Checkpoints may name variants that are not registered in this process. The
# fixture `restored_registry` forgets the styles that a test assigns to them.
UNREGISTERED = [f"unregistered_{number}" for number in range(30)]


def styles_of(names: list[str]) -> list[Style]:
  """Returns the styles of variants, requested in this order."""
  return [variant_styles.style(name) for name in names]


def test_variants_without_a_style_look_different(restored_registry):
  """A look is a colour and a marker. Those of published variants are taken."""
  names = [f"unregistered_{number}" for number in range(30)]

  styles = [variant_styles.style(name) for name in names]

  looks = {(style.color, style.marker) for style in styles}
  published_looks = {
    (style.color, style.marker) for style in PUBLISHED.values()
  }
  assert len(looks) == len(names)
  assert looks.isdisjoint(published_looks)


def test_colours_are_repeated_only_after_all_seven(restored_registry):
  """Each variant without a style gets the next colour when it is requested."""
  first_styles = styles_of(UNREGISTERED[:7])

  assert len({style.color for style in first_styles}) == 7


def test_a_style_does_not_change_when_it_is_requested_again(restored_registry):
  first_styles = styles_of(UNREGISTERED)

  styles = styles_of(UNREGISTERED[::-1])

  assert styles == first_styles[::-1]


def style_of_new_variant(*, requested_before: list[str]) -> Style:
  """Returns the style of a new variant, after requests for other styles."""
  with restore_registry():

    @register("own")
    class Own(Attention):
      pass

    for name in requested_before:
      variant_styles.style(name)
    return variant_styles.style("own")


def test_the_style_of_a_registered_variant_does_not_depend_on_requests():
  """Otherwise figures with other variants would show it in other colours."""
  first_request = style_of_new_variant(requested_before=[])
  later_request = style_of_new_variant(
    requested_before=["unregistered", "stored"]
  )

  assert later_request == first_request


def test_more_variants_than_looks_still_have_styles(restored_registry):
  """A look is a colour and a marker. With 99 variants, looks are repeated."""
  names = [f"stored_{number}" for number in range(99)]

  styles = styles_of(names)

  assert [style.name for style in styles] == names


def test_a_class_can_have_a_style_of_its_own(restored_registry):
  own_style = Style("Mine", "#123456", "x")
  register("own")(type("Own", (Attention,), {"style": own_style}))

  assert variant_styles.style("own") == own_style


def test_a_subclass_does_not_inherit_the_style(restored_registry):
  own_style = Style("Mine", "#123456", "x")
  parent = register("own")(type("Own", (Attention,), {"style": own_style}))
  register("own_child")(type("Child", (parent,), {}))

  assert variant_styles.style("own_child").name == "own_child"


def test_variants_with_different_colours_keep_their_styles_in_a_figure():
  styles = variant_styles.distinct_styles(["softmax", "diff"], names=["a", "b"])

  assert list(styles) == [
    Style("Transformer", BLACK, "o"),
    Style("DIFF", RED, "s"),
  ]


def test_two_models_of_a_variant_have_their_own_names_and_colours():
  styles = variant_styles.distinct_styles(["diff", "diff"], names=["a", "b"])

  assert list(styles) == [Style("a", RED, "s"), Style("b", GREY, "o")]


def test_the_second_of_two_variants_with_the_same_colour_is_grey():
  styles = variant_styles.distinct_styles(
    ["diff", "diff_per_token"], names=["a", "b"]
  )

  assert list(styles) == [
    Style("DIFF", RED, "s"),
    Style("DIFF with λ per token", GREY, "o"),
  ]
