"""benchmarks/tpu: costs of kernels, the comparison with libraries, the search.

No test compiles a kernel. Costs are functions of the case, or are in a file.
"""

import contextlib
import itertools
import json
import pathlib
from typing import NamedTuple

import pytest

from benchmarks.tpu import compare, cost, search, splash
from benchmarks.tpu.case import DIRECTIONS, KERNELS, Case
from benchmarks.tpu.compare import CallCosts, Cost
from benchmarks.tpu.estimate import read_profile
from benchmarks.tpu.splash import Splash
from diffjax.ops.diff_attention.tpu import block_sizes

PROFILE_ENTRY = """
hlo_op_estimate {
  hlo_op_name: "%s"
  estimated_cycles: %d
}"""


def make_profile(cycles: dict[str, int]) -> str:
  """Returns a profile as libtpu writes it, from cycles by operation."""
  return "".join(PROFILE_ENTRY % entry for entry in cycles.items())


@pytest.mark.parametrize(
  "cycles, kernels, expected",
  [
    pytest.param(
      {
        "diff_attention_forward_v1.1": 5,
        "diff_attention_backward_v1.1": 7,
        "reduce.3": 9,
      },
      KERNELS,
      {"forward": 5, "backward": 7},
      id="other_operations_do_not_count",
    ),
    pytest.param(
      {"diff_attention_backward_v1.1": 7, "diff_attention_backward_v1.2": 8},
      KERNELS,
      {"backward": 15},
      id="several_calls_are_added",
    ),
    pytest.param(
      {
        "diff_attention_forward_v1.1": 5,
        "diff_attention_forward_v1_online.1": 9,
      },
      KERNELS,
      {"forward": 5},
      id="the_kernel_that_rarely_runs_does_not_count",
    ),
    pytest.param(
      {"diff_attention_forward_v1.1": 0, "diff_attention_backward_v1.1": 7},
      KERNELS,
      {"backward": 7},
      id="zero_is_no_estimate",
    ),
    pytest.param(
      {"splash_mha_fwd_residuals.1": 5, "splash_mha_dkv_no_residuals.1": 7},
      splash.KERNELS,
      {"forward": 5, "backward": 7},
      id="splash",
    ),
    pytest.param(
      {"splash_mha_fwd_residuals.1": 5, "splash_mha_dkv_no_residuals.1": 7},
      splash.TWO_KERNELS,
      {"forward": 5},
      id="a_direction_without_all_its_kernels_is_missing",
    ),
    pytest.param(
      {"splash_mha_dq_no_residuals.1": 3, "splash_mha_dkv_no_residuals.1": 7},
      splash.TWO_KERNELS,
      {"backward": 10},
      id="two_kernels_are_added",
    ),
    pytest.param({}, KERNELS, {}, id="empty"),
  ],
)
def test_the_cycles_of_kernels_are_read_from_a_profile(
  cycles, kernels, expected
):
  """A profile has the cycles of each operation of a program.

  `kernels` has parts of the names of the operations that count, by direction.
  """
  profile = make_profile(cycles)

  assert read_profile(profile, kernels) == expected


def test_an_estimate_that_is_faster_than_the_chip_is_dropped():
  """A kernel cannot compute more FLOPs per cycle than the chip's peak."""
  D = 128
  V = 256
  length = 1024
  case = Splash(
    library="jax",
    generation="v6e",
    D=D,
    V=V,
    length=length,
    mask="full",
    tile=(512, 512, 512),
  )
  # The forward kernel computes a product of width D, and one of width V. The
  # backward kernel computes three of width D, and two of width V.
  forward_widths = D + V
  backward_widths = 3 * D + 2 * V
  # Each pair of positions multiplies and adds each element.
  flops_per_element = 2 * length**2
  flops_per_cycle = splash.PEAK_FLOPS["v6e"]
  forward_cycles_at_peak = flops_per_element * forward_widths / flops_per_cycle
  backward_cycles_at_peak = (
    flops_per_element * backward_widths / flops_per_cycle
  )
  too_fast = forward_cycles_at_peak - 1
  slower_than_peak = backward_cycles_at_peak + 1

  plausible = case.plausible(
    {"forward": too_fast, "backward": slower_than_peak}
  )

  assert plausible == {"backward": slower_than_peak}


@pytest.mark.parametrize(
  "library, tile, expected",
  [
    # The mask of 4 × 4 tiles has 6 whole tiles, and cuts 4 on the diagonal.
    pytest.param(
      "tokamax",
      (1024, 1024, 512),
      (6 * 1 + 4 * 3) / 16,
      id="positions_are_compared_in_cut_tiles",
    ),
    pytest.param(
      "jax",
      (1024, 1024, 512),
      10 * 3 / 16,
      id="jax_compares_positions_in_all_visible_tiles",
    ),
    # The mask of 4 × 2 tiles has 2 whole tiles, and cuts 4.
    pytest.param(
      "tokamax", (1024, 2048, 512), (2 * 1 + 4 * 3) / 8, id="wide_tiles"
    ),
    pytest.param("tokamax", (4096, 4096, 512), 3, id="one_tile"),
  ],
)
def test_a_causal_mask_is_composed_of_whole_and_cut_tiles(
  library, tile, expected
):
  """All tiles together cost 1 if they are whole, and 3 if the mask cuts them.

  The sizes of a tile are its queries, its keys, and the keys computed at once.
  """
  composed = splash.composed(library, tile, length=4096, full=1, cut=3)

  assert composed == pytest.approx(expected)


def fake_library_cost(case: Splash) -> dict[str, float]:
  """Large tiles are best forward, small ones backward; cut tiles cost double.

  JAX's way with two backward kernels has no estimate.
  """
  if case.two_kernels:
    return {}
  q, kv, _ = case.tile
  factor = 2 if case.mask == "cut" else 1
  return {"forward": (1e6 - q - kv) * factor, "backward": 1e6 + q + kv}


@pytest.mark.parametrize(
  "length, largest_tile",
  [
    pytest.param(2048, 2048, id="all_tiles"),
    # Tiles of 2048 do not divide a row of 1024.
    pytest.param(1024, 1024, id="tiles_that_divide_the_length"),
  ],
)
def test_a_library_has_its_best_tiles_in_each_direction(length, largest_tile):
  """Tiles have 1024 or 2048 queries, and as many keys or twice as many.

  In fake_library_cost, a forward call costs 1e6 - queries - keys, and a
  backward call 1e6 + queries + keys.
  """
  costs = compare.library_cost(
    library="jax",
    generation="v6e",
    V=256,
    length=length,
    mask="full",
    measure=fake_library_cost,
  )

  smallest_tile = 1024
  assert costs == {
    "forward": Cost(1e6 - largest_tile - largest_tile),
    "backward": Cost(1e6 + smallest_tile + smallest_tile),
  }


def test_a_library_skips_hidden_tiles_under_a_causal_mask():
  costs = compare.library_cost(
    library="jax",
    generation="v6e",
    V=256,
    length=2048,
    mask="causal",
    measure=fake_library_cost,
  )

  # One of four tiles of 1024 × 1024 is hidden. A backward kernel with these
  # tiles costs 1e6 + 1024 + 1024 in fake_library_cost.
  expected = Cost(0.75 * (1e6 + 2048), is_computed=True)
  assert costs["backward"] == expected


def test_the_cost_of_a_long_row_is_proportional_to_its_pairs():
  """The compiler estimates rows of at most 2048 positions.

  This row of 4096 has four times as many pairs of a query and a key.
  """
  costs = compare.library_cost(
    library="tokamax",
    generation="v6e",
    V=256,
    length=4096,
    mask="full",
    measure=fake_library_cost,
  )

  # A forward kernel with tiles of 2048 × 2048 in fake_library_cost.
  cost_of_2048_positions = 1e6 - 2048 - 2048
  expected = Cost(4 * cost_of_2048_positions, is_computed=True)
  assert costs["forward"] == expected


def test_a_library_without_estimates_has_no_costs():
  costs = compare.library_cost(
    library="tokamax",
    generation="v6e",
    V=256,
    length=4096,
    mask="causal",
    measure=lambda case: None,
  )

  assert costs == {}


def test_our_causal_cost_is_composed_of_the_costs_of_its_tiles():
  """The compiler's estimate of a causal row is too large.

  So the costs of the row's tiles are added. The cost of a tile follows from the
  costs of three smaller kernels.
  """
  start = 3
  whole_tile = 10
  cut_tile = 8
  # The costs of these kernels, by length and by whether the mask is causal.
  costs_of_kernels = {
    (1024, False): start + whole_tile,
    (1024, True): start + cut_tile,
    # 2 × 2 tiles.
    (2048, False): start + 4 * whole_tile,
  }

  def measure(case: Case) -> dict[str, float]:
    cost_of_kernel = costs_of_kernels[case.length, case.causal]
    return dict.fromkeys(DIRECTIONS, cost_of_kernel)

  case = Case(
    generation="v6e",
    D=128,
    V=256,
    G=2,
    M=2,
    length=4096,
    causal=True,
    blocks=(1024, 256, 256, 512, 512),
  )

  costs = compare.composed_cost(case, measure)

  # A causal mask of 4 × 4 tiles has 6 whole tiles, and cuts 4 on the diagonal.
  expected = start + 6 * whole_tile + 4 * cut_tile
  for direction in DIRECTIONS:
    assert costs[direction].value == pytest.approx(expected)
    assert costs[direction].is_computed


def test_a_row_of_the_comparison_names_the_best_calls():
  """A library without a fused kernel calls a kernel with one attention map.

  A head of differential attention needs two calls with the whole width V of the
  values ("wide"), or four with half of it ("plain"). Cells are in thousands of
  cycles. "~" marks a cost that is computed.
  """
  fused = Cost(200e3)
  costs_by_library = {
    "ours": CallCosts(wide=Cost(100e3), plain=Cost(40e3)),
    "jax": CallCosts(wide=None, plain=None),
    "tokamax": CallCosts(wide=Cost(70e3, is_computed=True), plain=None),
  }

  cells = compare.row_cells(fused, costs_by_library)

  expected = {
    "fused kernel": "200.0",
    # Four plain calls, 4 · 40, cost less than two wide calls, 2 · 100.
    "our calls": "160.0",
    "calls of jax": "no estimate",
    # Two wide calls: 2 · 70.
    "calls of tokamax": "~140.0",
    # 140 / 200.
    "cheapest calls, relative to the fused kernel": "~0.70",
    "name of the cheapest calls": "tokamax, V whole",
    # A Transformer's head is one plain call, so two heads cost 2 · 40.
    "two heads of a Transformer": "80.0",
    # 80 / 200.
    "two heads, relative to the fused kernel": "0.40 ours",
  }
  assert cells == list(expected.values())


def test_a_row_without_costs_says_so():
  # None is an unknown cost. "wide" and "plain" are two kinds of calls.
  costs = {"ours": CallCosts(wide=None, plain=None)}

  cells = compare.row_cells(fused=None, costs_by_library=costs)

  assert cells == ["no estimate", "no estimate", "", "", "no estimate", ""]


TOKAMAX_CASE = Splash(
  library="tokamax",
  generation="v6e",
  D=128,
  V=256,
  length=2048,
  mask="full",
  tile=(1024, 1024, 512),
)


@pytest.fixture
def costs_file(tmp_path):
  """A file with costs of TOKAMAX_CASE under several headings."""
  costs_by_kind = {
    "kernels 00000000": {"forward": 1},
    "splash of tokamax 9.9": {"forward": 5},
    "constant-maximum splash of tokamax 9.9": {"forward": 3},
  }
  results = {}
  for kind, costs in costs_by_kind.items():
    heading = f"{cost.measurement_name()}, {kind}"
    results[heading] = {TOKAMAX_CASE.key: costs}
  path = tmp_path / "cycles.json"
  path.write_text(json.dumps(results), encoding="utf-8")
  return path


def test_a_library_that_is_not_installed_has_costs_from_the_file(
  costs_file, monkeypatch
):
  # The library has no version, as if it were not installed.
  monkeypatch.setattr(splash, "version", lambda library: None)

  costs = cost.cost_of_library(TOKAMAX_CASE, timeout=1, path=costs_file)

  # The file has these costs for version 9.9 of tokamax.
  assert costs == {"forward": 5}


def test_a_library_that_is_not_installed_may_have_no_costs(
  tmp_path, monkeypatch
):
  # The library has no version, as if it were not installed.
  monkeypatch.setattr(splash, "version", lambda library: None)

  costs = cost.cost_of_library(
    TOKAMAX_CASE, timeout=1, path=tmp_path / "missing.json"
  )

  assert costs is None


def test_costs_of_a_version_are_not_estimated_again(costs_file, monkeypatch):
  def fail(case, timeout):
    raise AssertionError("estimated again")

  monkeypatch.setattr(
    splash, "version", lambda library: "splash of tokamax 9.9"
  )
  monkeypatch.setattr(cost, "estimate", fail)

  costs = cost.cost_of_library(TOKAMAX_CASE, timeout=1, path=costs_file)

  # The file has these costs for version 9.9 of tokamax.
  assert costs == {"forward": 5}


def test_the_file_keeps_costs_of_libraries_and_drops_those_of_older_kernels(
  tmp_path, monkeypatch
):
  """The costs of our kernels count only for one version of their code."""
  measurement = cost.measurement_name()
  # The number stands for a version of the code, here an older one.
  older_kernels = f"{measurement}, kernels 00000000"
  library = f"{measurement}, splash of tokamax 9.9"
  variant = f"{measurement}, constant-maximum splash of tokamax 9.9"
  old_costs = {"a case": {"forward": 1}}
  path = tmp_path / "cycles.json"
  path.write_text(
    json.dumps(dict.fromkeys([older_kernels, library, variant], old_costs))
  )
  new_costs = {"forward": 7, "backward": 8}
  monkeypatch.setattr(cost, "estimate", lambda case, timeout: new_costs)
  case = Case(
    generation="v6e", D=128, V=256, G=2, M=2, length=2048, causal=True
  )

  cost.cost(case, timeout=1, path=path)

  present_kernels = f"{measurement}, {cost.kernels_name()}"
  assert json.loads(path.read_text(encoding="utf-8")) == {
    library: old_costs,
    variant: old_costs,
    present_kernels: {case.key: new_costs},
  }


class FakeChip:
  """Kernels whose cost is a simple function of the sizes of their blocks.

  Forward, large tiles are best, and backward, small ones. In whole tiles, large
  sub-tiles are best, and in tiles that the mask cuts, small ones. A kernel
  takes 20 seconds.
  """

  def __init__(self):
    self.seconds = 0.0
    self.measured: list[Case] = []

  def clock(self) -> float:
    return self.seconds

  def measure(self, case: Case) -> dict[str, float]:
    self.seconds += 20
    self.measured.append(case)
    tile, q, kv, *full_subtile = case.blocks
    assert full_subtile == [q, kv]
    area = q * kv
    if case.causal:
      return dict.fromkeys(DIRECTIONS, area)
    # The area is at most 1024². It changes the costs less than the tile does.
    return {
      "forward": 4096 / tile - area / 1e7,
      "backward": tile / 512 - area / 1e7,
    }


def shape_of(case: Case) -> compare.Widths:
  """Returns the widths and the numbers of maps of a case."""
  return compare.Widths(case.D, case.V, case.G, case.M)


@contextlib.contextmanager
def small_table(directory: pathlib.Path):
  """A table of block sizes with one shape of v5e, which a search may write."""
  entry = {
    "generation": "v5e",
    "D": 128,
    "V": 256,
    "G": 2,
    "length": 2048,
    "blocks": [1024, 1024, 256, 256],
    "whole": [256, 256],
  }
  entries = [entry | {"direction": direction} for direction in DIRECTIONS]
  path = directory / "block_sizes.json"
  path.write_text(json.dumps(entries), encoding="utf-8")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(block_sizes, "TABLE", path)
    block_sizes.table.cache_clear()
    yield
  block_sizes.table.cache_clear()


@pytest.fixture
def table_with_tiles_of_1024_and_sub_tiles_of_256(tmp_path):
  with small_table(tmp_path):
    yield


def run_search(generation: str, minutes: float = 1000) -> list[Case]:
  """Searches on a fake chip, and returns the cases that were measured."""
  chip = FakeChip()
  settings = search.Settings([generation], minutes, length=2048)
  search.BlockSearch(settings, chip.measure, chip.clock).run()
  return chip.measured


class SearchResult(NamedTuple):
  """The cases that a search measured, and the table that it wrote."""

  cases: list[Case]
  entries: tuple[dict, ...]


@pytest.fixture(scope="module")
def search_on_tpu(tmp_path_factory):
  """The result of a search on a TPU."""
  directory = tmp_path_factory.mktemp("search")
  with small_table(directory), pytest.MonkeyPatch.context() as patch:
    patch.setattr(search, "on_tpu", lambda: True)
    cases = run_search("7x")
    return SearchResult(cases, block_sizes.table())


def test_a_search_on_a_tpu_tries_all_tiles_of_all_shapes(search_on_tpu):
  """A shape has the widths of queries and values, and the numbers of maps."""
  tried = set()
  for case in search_on_tpu.cases:
    tile, *_ = case.blocks
    tried.add((tile, shape_of(case)))

  all_tiles = (512, 1024, 2048)
  assert tried == set(itertools.product(all_tiles, search.SHAPES))


def test_a_search_tries_nothing_twice(search_on_tpu):
  assert len(search_on_tpu.cases) == len(set(search_on_tpu.cases))


@pytest.mark.parametrize(
  ("direction", "tile", "largest_subtile"),
  [("forward", 2048, [1024, 1024]), ("backward", 512, [512, 512])],
)
@pytest.mark.parametrize("shape", search.SHAPES, ids=str)
def test_a_search_writes_the_best_sizes_of_each_shape(
  search_on_tpu, shape, direction, tile, largest_subtile
):
  """The costs come from a fake chip, on which the best sizes are known.

  Its best tiles are large forward, and small backward. Its best sub-tiles are
  large in whole tiles, and small in tiles that the mask cuts.
  """
  chip_and_shape = {
    "generation": "7x",
    "direction": direction,
    "D": shape.D,
    "V": shape.V,
    "G": shape.G,
  }

  # The table has one entry with these fields. Its other fields are sizes.
  entries = []
  for entry in search_on_tpu.entries:
    if chip_and_shape.items() <= entry.items():
      entries.append(entry)
  [entry] = entries

  smallest_subtile = [128, 256]
  # The queries and keys of a tile, and of a sub-tile in tiles that are cut.
  assert entry["blocks"] == [tile, tile, *smallest_subtile]
  # The queries and keys of a sub-tile in whole tiles.
  assert entry["whole"] == largest_subtile


@pytest.mark.usefixtures("table_with_tiles_of_1024_and_sub_tiles_of_256")
def test_a_search_for_v5p_without_a_tpu_estimates_a_single_tile():
  """For v5p, the compiler's estimates of several tiles are incomplete."""
  cases = run_search("v5p")

  tiles = {case.blocks[0] for case in cases}
  lengths = {case.length for case in cases}
  assert tiles == {1024}
  assert lengths == {1024}


@pytest.mark.usefixtures("table_with_tiles_of_1024_and_sub_tiles_of_256")
def test_a_search_tries_only_short_sub_tiles_under_a_causal_mask():
  """A kernel skips the sub-tiles of a tile that a causal mask hides.

  A sub-tile as long as its tile, of 1024, is never hidden. Under a full mask,
  which hides no sub-tile, these sub-tiles are tried, too.
  """
  subtiles = {"full": set(), "causal": set()}
  for case in run_search("v5p"):
    _, num_queries, num_keys, _, _ = case.blocks
    mask = "causal" if case.causal else "full"
    subtiles[mask].add((num_queries, num_keys))

  all_sizes = itertools.product((128, 256, 512, 1024), (256, 512, 1024))
  shorter_than_tile = itertools.product((128, 256, 512), (256, 512))
  assert subtiles["full"] == set(all_sizes)
  assert subtiles["causal"] == set(shorter_than_tile)


@pytest.mark.usefixtures("table_with_tiles_of_1024_and_sub_tiles_of_256")
def test_a_search_ends_when_its_time_is_over(capsys):
  cases = run_search("v6e", minutes=3)

  # A candidate takes 40 seconds, for two kernels. In 180 seconds, five begin.
  assert len(cases) == 5 * 2
  printed = capsys.readouterr()
  assert "3 minutes are over: 5 of" in printed.out
  # When the first candidate ends, 180 − 40 seconds are left.
  assert "1 of" in printed.err
  assert "2.3 minutes left" in printed.err


@pytest.mark.usefixtures("table_with_tiles_of_1024_and_sub_tiles_of_256")
def test_a_search_starts_with_the_sizes_of_the_table():
  first_case, *_ = run_search("v6e")

  tile = 1024
  subtile_of_cut_tiles = (256, 256)
  subtile_of_whole_tiles = (256, 256)
  assert first_case.blocks == (
    tile,
    *subtile_of_cut_tiles,
    *subtile_of_whole_tiles,
  )


@pytest.mark.usefixtures("table_with_tiles_of_1024_and_sub_tiles_of_256")
def test_a_search_first_tries_one_candidate_of_each_shape():
  """A candidate has sizes of tiles and sub-tiles for a kernel of one shape."""
  cases = run_search("v6e")

  # A candidate is measured under a full mask, and under a causal one.
  first_cases = cases[: 2 * len(search.SHAPES)]
  assert {shape_of(case) for case in first_cases} == set(search.SHAPES)
  # Each first candidate has the sizes of the table.
  assert len({case.blocks for case in first_cases}) == 1
