"""benchmarks/tpu: what it reads from a profile, what it holds the fused kernels against, and a search that a budget of minutes ends."""

import json
import math
import types

import pytest

from benchmarks import tpu, tpu_baselines, tpu_cost
from benchmarks.tpu_baselines import Splash
from diffjax.ops.diff_attention.tpu import block_sizes

PROFILE = """
hlo_op_estimate {
  hlo_op_name: "%s"
  estimated_cycles: %d
}"""
SPLASH = Splash("jax", "v6e", 128, 256, 1024, "full", (512, 512, 512))
FLAGS = types.SimpleNamespace(
  timeout=1, simulate=2048, search_length=2048, minutes=60
)


@pytest.fixture
def results(tmp_path, monkeypatch):
  monkeypatch.setattr(tpu_cost, "RESULTS", tmp_path / "cycles.json")
  return tmp_path / "cycles.json"


def profile(**cycles):
  return "".join(PROFILE % item for item in cycles.items())


@pytest.mark.parametrize(
  "written, kernels, expected",
  [
    (
      {
        "diff_attention_forward_v1.1": 5,
        "diff_attention_backward_v1.1": 7,
        "reduce.3": 9,
      },
      tpu_cost.KERNELS,
      {"forward": 5, "backward": 7},
    ),
    (
      {"diff_attention_backward_v1.1": 7, "diff_attention_backward_v1.2": 8},
      tpu_cost.KERNELS,
      {"backward": 15},
    ),  # in two calls
    (
      {
        "diff_attention_forward_v1.1": 5,
        "diff_attention_forward_v1_online.1": 9,
      },
      tpu_cost.KERNELS,
      {"forward": 5},
    ),  # seldom runs
    (
      {"diff_attention_forward_v1.1": 0, "diff_attention_backward_v1.1": 7},
      tpu_cost.KERNELS,
      {"backward": 7},
    ),  # 0 is no estimate
    (
      {"splash_mha_fwd_residuals.1": 5, "splash_mha_dkv_no_residuals.1": 7},
      tpu_baselines.KERNELS,
      {"forward": 5, "backward": 7},
    ),
    (
      {"splash_mha_fwd_residuals.1": 5, "splash_mha_dkv_no_residuals.1": 7},
      tpu_baselines.TWO_KERNELS,
      {"forward": 5},
    ),  # dQ is missing
    (
      {"splash_mha_dq_no_residuals.1": 3, "splash_mha_dkv_no_residuals.1": 7},
      tpu_baselines.TWO_KERNELS,
      {"backward": 10},
    ),
    ({}, tpu_cost.KERNELS, {}),
  ],
)
def test_read_profile(written, kernels, expected):
  assert tpu_cost.read_profile(profile(**written), kernels) == expected


def test_an_estimate_below_the_peak_is_none():
  # JAX's splash with its blocks as data, T 1024: the compiler says 3719 where the products alone take 3584 at the peak of a matrix unit
  # that D 128 cannot reach, and 1000 below it.
  least = {
    "forward": 2 * 1024**2 * 384 / 524_288,
    "backward": 2 * 1024**2 * 896 / 524_288,
  }
  assert tpu_baselines.plausible(
    {
      "forward": int(least["forward"]) - 1,
      "backward": int(least["backward"]) + 1,
    },
    SPLASH,
  ) == {"backward": int(least["backward"]) + 1}


@pytest.mark.parametrize(
  "library, tile, expected",
  [
    ("tokamax", (1024, 1024, 512), (6 * 1 + 4 * 3) / 16),
    (
      "jax",
      (1024, 1024, 512),
      10 * 3 / 16,
    ),  # compares positions in all that is seen
    ("tokamax", (1024, 2048, 512), (2 * 1 + 4 * 3) / 8),
    ("tokamax", (4096, 4096, 512), 3),
  ],
)
def test_a_causal_mask_is_composed_of_whole_and_cut_tiles(
  library, tile, expected
):
  assert tpu_baselines.composed(
    library, tile, 4096, full=1, cut=3
  ) == pytest.approx(expected)


def test_a_library_has_its_best_tiles_for_each_direction(monkeypatch):
  """Tiles of 1024 are best backward, of 2048 forward where all is whole; the second of JAX's ways to dQ has no estimate."""

  def cost(case, timeout):
    if case.two_kernels:
      return {}
    tile = case.tile[0] + case.tile[1]
    return {
      "forward": (1e6 - tile) * (1 + (case.mask == "cut")),
      "backward": 1e6 + tile,
    }

  monkeypatch.setattr(tpu, "cost_of_library", cost)
  assert tpu.library_cost("jax", "v6e", 256, 2048, "full", FLAGS) == {
    "forward": (1e6 - 4096, ""),
    "backward": (1e6 + 2048, ""),
  }
  # A quarter of the pairs in tiles of 1024 at T 2048 is not computed; T 1024 is no multiple of the other tiles.
  assert tpu.library_cost("jax", "v6e", 256, 2048, "causal", FLAGS)[
    "backward"
  ] == (0.75 * (1e6 + 2048), "~")
  assert tpu.library_cost("jax", "v6e", 256, 1024, "full", FLAGS) == {
    "forward": (1e6 - 2048, ""),
    "backward": (1e6 + 2048, ""),
  }
  # Beyond what is estimated: four times the pairs.
  assert tpu.library_cost("tokamax", "v6e", 256, 4096, "full", FLAGS)[
    "forward"
  ] == (4 * (1e6 - 4096), "~")
  monkeypatch.setattr(tpu, "cost_of_library", lambda case, timeout: None)
  assert tpu.library_cost("tokamax", "v6e", 256, 4096, "causal", FLAGS) == {}


def test_our_causal_cost_is_composed_of_builds_without_conditions(monkeypatch):
  """A tile takes 10 whole and 8 cut, the kernel's start 3; a causal grid of several tiles has no estimate that counts."""
  asked = []

  def cost(case, timeout):
    asked.append((case.length, case.causal))
    count = (case.length // 1024) ** 2
    return dict.fromkeys(
      tpu.DIRECTIONS,
      1e9
      if case.causal and count > 1
      else 3 + (8 if case.causal else 10) * count,
    )

  monkeypatch.setattr(tpu, "cost", cost)
  found = tpu.composed_cost(
    tpu.Case("v6e", *tpu.FUSED, 4096, True, (1024, 256, 256, 512, 512)), FLAGS
  )
  assert found == dict.fromkeys(
    tpu.DIRECTIONS, (pytest.approx(3 + 6 * 10 + 4 * 8), "~")
  )
  assert set(asked) == {(1024, False), (1024, True), (2048, False)}


def test_the_table_names_the_strongest_and_what_is_missing():
  ours, splash = (((100.0, ""), (40.0, "")), ((70.0, "~"), None))
  columns = tpu._columns(
    (200.0, ""), {"ours": ours, "jax": (None, None), "tokamax": splash}, 1.0
  )
  # Ours: four calls with half of V each are less than two with all of it. tokamax's two are less again.
  assert columns == [
    "200.0",
    "160.0",
    "no estimate",
    "~140.0",
    "~0.70",
    "tokamax, V whole",
    "80.0",
    "0.40 ours",
  ]
  assert tpu._columns(None, {"ours": (None, None)}, 1.0) == [
    "no estimate",
    "no estimate",
    "",
    "",
    "no estimate",
    "",
  ]


def test_a_library_that_is_not_installed_has_its_figures_still(
  results, monkeypatch
):
  monkeypatch.setattr(tpu_baselines, "version", lambda library: None)
  case = Splash("tokamax", "v6e", 128, 256, 2048, "full", (1024, 1024, 512))
  assert tpu_cost.cost_of_library(case, 1) is None
  entries = {"tokamax": 5, "constant-maximum": 3}
  results.write_text(
    json.dumps(
      {
        f"{tpu_cost._what()}, kernels 00000000": {case.key: {"forward": 1}},
        f"{tpu_cost._what()}, splash of tokamax 9.9": {
          case.key: {"forward": entries["tokamax"]}
        },
        f"{tpu_cost._what()}, constant-maximum splash of tokamax 9.9": {
          case.key: {"forward": entries["constant-maximum"]}
        },
      }
    ),
    encoding="utf-8",
  )
  assert tpu_cost.cost_of_library(case, 1) == {"forward": 5}
  monkeypatch.setattr(
    tpu_baselines, "version", lambda library: "splash of tokamax 9.9"
  )
  monkeypatch.setattr(
    tpu_cost, "estimate", lambda case, timeout: {"forward": 7, "backward": 8}
  )
  assert tpu_cost.cost_of_library(case, 1) == {"forward": 5}  # known already
  tpu_cost.cost(tpu.Case("v6e", *tpu.FUSED, 2048, True), 1)
  kinds = list(json.loads(results.read_text(encoding="utf-8")))
  assert len(kinds) == 3 and not any(
    "00000000" in kind for kind in kinds
  )  # other kernels' are dropped, other libraries' are kept


@pytest.fixture
def search(tmp_path, monkeypatch):
  """Runs a search on a fake chip, whose kernels take a third of a minute and least time with tiles of 2048 forward, 512 backward; a cut
  tile takes least with the smallest sub-tiles, a whole one with few queries forward, few keys backward."""
  monkeypatch.setattr(block_sizes, "TABLE", tmp_path / "block_sizes.json")
  entry = {
    "generation": "v5e",
    "D": 128,
    "V": 256,
    "G": 2,
    "length": 2048,
    "blocks": [1024, 1024, 256, 256],
    "whole": [256, 256],
  }
  (tmp_path / "block_sizes.json").write_text(
    json.dumps([entry | {"direction": way} for way in tpu.DIRECTIONS])
  )
  block_sizes.table.cache_clear()
  tried, minutes = [], [0.0]

  def cost(case, timeout):
    tried.append(case)
    minutes[0] += 1 / 3
    tile, q, kv, *whole = case.blocks
    assert whole == [q, kv]
    if case.causal:
      return dict.fromkeys(tpu.DIRECTIONS, q * kv)
    return {
      "forward": 4096 / tile + q / 1000,
      "backward": tile / 512 + kv / 1000,
    }

  def run(chip, budget):
    flags = types.SimpleNamespace(**{**vars(FLAGS), "minutes": budget})
    tpu.search([chip], flags, clock=lambda: 60 * minutes[0])
    return tried

  monkeypatch.setattr(tpu, "cost", cost)
  yield run
  block_sizes.table.cache_clear()


@pytest.mark.parametrize("chip", ["v5p", "7x"])
def test_search_fills_the_table_of_the_chip_that_it_finds(
  search, chip, monkeypatch
):
  monkeypatch.setattr(tpu, "on_tpu", lambda: True)
  tried = search(chip, 1000)
  assert len(tried) == len(set(tried)) and {
    case.blocks[0] for case in tried
  } == {512, 1024, 2048}
  assert {(case.D, case.V, case.G, case.M) for case in tried} == set(
    tpu.SEARCHED
  )
  for D, V, G, _ in tpu.SEARCHED:
    of_shape = [case for case in tried if (case.D, case.V, case.G) == (D, V, G)]
    for way, of in (
      ("forward", lambda b: 4096 / b[0] + b[1] / 1000),
      ("backward", lambda b: b[0] / 512 + b[2] / 1000),
    ):
      tile, *whole = min(
        (case.blocks[:3] for case in of_shape if not case.causal),
        key=lambda blocks: (of(blocks), blocks),
      )
      cut = min(
        (
          case.blocks[1:3]
          for case in of_shape
          if case.causal and case.blocks[0] == tile
        ),
        key=lambda part: (math.prod(part), part),
      )
      entries = [
        x
        for x in block_sizes.table()
        if (x["generation"], x["direction"], x["D"], x["V"], x["G"])
        == (chip, way, D, V, G)
      ]
      assert [(x["blocks"], x["whole"]) for x in entries] == [
        ([tile, tile, *cut], whole)
      ]


def test_search_trusts_one_step_alone_where_the_estimate_is_whole_for_no_more(
  search,
):
  tried = search("v5p", 1000)
  assert {(case.blocks[0], case.length) for case in tried} == {(1024, 1024)}
  sizes = {(q, kv) for q in (128, 256, 512, 1024) for kv in (256, 512, 1024)}
  assert {case.blocks[1:3] for case in tried if not case.causal} == sizes
  assert {case.blocks[1:3] for case in tried if case.causal} == {
    part for part in sizes if max(part) < 1024
  }


def test_a_budget_ends_the_search(search, capsys):
  tried = search("v6e", 3)  # minutes, and a third of one for each
  assert len(tried) == 10
  # All shapes' nearest to the table come first.
  assert [case.blocks for case in tried] == [(1024, 256, 256, 256, 256)] * 10
  written = capsys.readouterr()
  assert (
    "3 minutes are over: 5 of" in written.out
    and "1 of" in written.err
    and "2.3 minutes left" in written.err
  )
