"""Styles of attention variants."""

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

# Figures that are published have these.
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
def test_published_styles(name):
  assert variant_styles.style(name) == PUBLISHED[name]


def test_variants_without_a_style_can_be_told_apart(restored_registry):
  """Registered ones come first, so every figure of a process is the same."""
  for name in ("own_one", "own_two"):
    register(name)(type(name, (Attention,), {}))
  stored = [f"stored_{number}" for number in range(30)]
  last_first = [variant_styles.style(name) for name in reversed(stored)]
  names = ["own_one", "own_two", *reversed(stored)]
  styles = [variant_styles.style(name) for name in names]
  assert styles[2:] == last_first
  assert [style.name for style in styles] == names
  looks = [(style.color, style.marker) for style in styles]
  built_in = {(style.color, style.marker) for style in PUBLISHED.values()}
  assert len(set(looks)) == len(looks) and built_in.isdisjoint(looks)
  assert len({style.color for style in styles[:7]}) == 7


def test_more_variants_than_colours_and_markers(restored_registry):
  styles = [variant_styles.style(f"stored_{number}") for number in range(99)]
  assert len({style.name for style in styles}) == 99


def test_a_style_of_its_own(restored_registry):
  """Only the class has it: a subclass gets another one."""
  own_style = Style("Mine", "#123456", "x")
  parent = register("own")(type("Own", (Attention,), {"style": own_style}))
  register("own_child")(type("Child", (parent,), {}))
  assert variant_styles.style("own") == own_style
  assert variant_styles.style("own_child").name == "own_child"


def test_two_models_of_one_figure():
  softmax, diff = variant_styles.distinct_styles(
    ["softmax", "diff"], ["a", "b"]
  )
  assert (softmax, diff) == (PUBLISHED["softmax"], PUBLISHED["diff"])
  first, second = variant_styles.distinct_styles(["diff", "diff"], ["a", "b"])
  assert first == Style("a", RED, "s") and second == Style("b", GREY, "o")
  first, second = variant_styles.distinct_styles(
    ["diff", "diff_per_token"], ["a", "b"]
  )
  assert first == PUBLISHED["diff"]
  assert second == Style("DIFF with λ per token", GREY, "o")


def test_every_variant_has_a_style():
  for name in ATTENTION:
    assert variant_styles.style(name).name
