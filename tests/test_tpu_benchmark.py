"""benchmarks/tpu: costs of kernels, the comparison with libraries, the search.

No test compiles a kernel. Costs are functions of the case, or are in a file.
"""

import contextlib
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
def test_a_profile_is_read(cycles, kernels, expected):
  """`kernels` has the names of the operations that count, by direction."""
  profile = make_profile(cycles)

  assert read_profile(profile, kernels) == expected


def test_an_estimate_below_the_peak_is_dropped():
  """The compiler's estimate must not be faster than the chip's peak."""
  case = Splash(
    library="jax",
    generation="v6e",
    D=128,
    V=256,
    length=1024,
    mask="full",
    tile=(512, 512, 512),
  )
  # The FLOPs of all pairs of positions, for each element of a vector.
  flops_per_element = 2 * 1024**2
  # The forward pass has one product of width D and one of width V, and the
  # backward pass three and two.
  forward_flops = flops_per_element * (128 + 256)
  backward_flops = flops_per_element * (3 * 128 + 2 * 256)
  # The peak of v6e.
  flops_per_cycle = 524_288
  forward_at_peak = forward_flops // flops_per_cycle
  backward_at_peak = backward_flops // flops_per_cycle

  plausible = case.plausible(
    {"forward": forward_at_peak - 1, "backward": backward_at_peak + 1}
  )

  assert plausible == {"backward": backward_at_peak + 1}


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
  "length, tiles_forward",
  [
    pytest.param(2048, 4096, id="all_tiles"),
    # Tiles of 2048 do not divide a row of 1024.
    pytest.param(1024, 2048, id="tiles_that_divide_the_length"),
  ],
)
def test_a_library_has_its_best_tiles_in_each_direction(length, tiles_forward):
  """In the fake cost, forward calls are best with large tiles.

  Backward calls are best with small ones.
  """
  costs = compare.library_cost(
    library="jax",
    generation="v6e",
    V=256,
    length=length,
    mask="full",
    measure=fake_library_cost,
  )

  # The fake cost changes by the queries and keys of a tile: 2048 + 2048 or
  # 1024 + 1024 for the largest one, and 1024 + 1024 for the smallest one.
  assert costs == {
    "forward": Cost(1e6 - tiles_forward),
    "backward": Cost(1e6 + 2048),
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

  # A forward kernel with tiles of 2048 × 2048 costs 1e6 - 2048 - 2048 in
  # fake_library_cost.
  assert costs["forward"] == Cost(4 * (1e6 - 4096), is_computed=True)


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


def test_our_causal_cost_is_composed_of_kernels_without_conditions():
  """The cost of a causal row is computed from the costs of smaller kernels.

  They have one whole tile, one tile that the mask cuts, and four whole tiles.
  """
  # The lengths of the measured kernels, and whether these are causal.
  measured = set()

  def measure(case: Case) -> dict[str, float]:
    """The start costs 3, a whole tile 10 and a cut one 8."""
    measured.add((case.length, case.causal))
    num_tiles = (case.length // 1024) ** 2
    if case.causal and num_tiles > 1:
      raise AssertionError("the estimate of a causal grid has no meaning")
    cost_of_tile = 8 if case.causal else 10
    return dict.fromkeys(DIRECTIONS, 3 + cost_of_tile * num_tiles)

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
  for direction in DIRECTIONS:
    assert costs[direction].value == pytest.approx(3 + 6 * 10 + 4 * 8)
    assert costs[direction].is_computed
  assert measured == {(1024, False), (1024, True), (2048, False)}


def test_a_row_of_the_comparison_names_the_best_calls():
  """Cells are in thousands of cycles. "~" marks a cost that is computed."""
  # A call computes one attention map, with V whole ("wide") or with half of it
  # ("plain").
  ours = CallCosts(wide=Cost(100e3), plain=Cost(40e3))
  tokamax = CallCosts(wide=Cost(70e3, is_computed=True), plain=None)
  costs = {"ours": ours, "jax": CallCosts(None, None), "tokamax": tokamax}

  cells = compare.row_cells(fused=Cost(200e3), costs_by_library=costs)

  assert cells == [
    # The fused kernel.
    "200.0",
    # Ours: 4 · 40 with V halved is less than 2 · 100 with V whole.
    "160.0",
    # JAX's library, whose costs are unknown.
    "no estimate",
    # tokamax: 2 · 70 with V whole.
    "~140.0",
    # The cheapest of these, relative to the fused kernel: 140 / 200.
    "~0.70",
    "tokamax, V whole",
    # Two heads of a Transformer, 2 · 40, and relative to the fused kernel.
    "80.0",
    "0.40 ours",
  ]


def test_a_row_without_costs_says_so():
  # None is an unknown cost.
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


def test_the_file_keeps_libraries_and_drops_kernels_that_have_changed(
  costs_file, monkeypatch
):
  """The costs of our kernels count only for one version of their code."""
  estimated = {"forward": 7, "backward": 8}
  monkeypatch.setattr(cost, "estimate", lambda case, timeout: estimated)
  case = Case(
    generation="v6e",
    D=128,
    V=256,
    G=2,
    M=2,
    length=2048,
    causal=True,
  )

  costs = cost.cost(case, timeout=1, path=costs_file)

  assert costs == estimated
  # The file has costs of older kernels, under "kernels 00000000".
  kept = [
    "splash of tokamax 9.9",
    "constant-maximum splash of tokamax 9.9",
    cost.kernels_name(),
  ]
  kinds = list(json.loads(costs_file.read_text(encoding="utf-8")))
  assert kinds == [f"{cost.measurement_name()}, {name}" for name in kept]


class FakeChip:
  """Kernels whose cost is a simple function of the sizes of their blocks.

  Forward, large tiles and few queries per sub-tile are best. Backward, small
  tiles and few keys are. Small sub-tiles are best in tiles that the mask cuts.
  A kernel takes 20 seconds.
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
    if case.causal:
      return dict.fromkeys(DIRECTIONS, q * kv)
    return {
      "forward": forward_cost(tile, q),
      "backward": tile / 512 + kv / 1000,
    }


def forward_cost(tile: int, q: int) -> float:
  return 4096 / tile + q / 1000


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
def table(tmp_path):
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
  cases = search_on_tpu.cases

  tiles = {case.blocks[0] for case in cases}
  shapes = {(case.D, case.V, case.G, case.M) for case in cases}
  assert tiles == {512, 1024, 2048}
  assert shapes == set(search.SHAPES)


def test_a_search_tries_nothing_twice(search_on_tpu):
  assert len(search_on_tpu.cases) == len(set(search_on_tpu.cases))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", search.SHAPES, ids=str)
def test_a_search_writes_the_best_sizes_of_each_shape(
  search_on_tpu, shape, direction
):
  """The table has an entry for each chip, direction and shape."""
  entries = []
  for entry in search_on_tpu.entries:
    is_for_chip = entry["generation"] == "7x"
    is_for_direction = entry["direction"] == direction
    widths = (entry["D"], entry["V"], entry["G"])
    is_for_shape = widths == (shape.D, shape.V, shape.G)
    if is_for_chip and is_for_direction and is_for_shape:
      entries.append(entry)
  cases = []
  for case in search_on_tpu.cases:
    if (case.D, case.V, case.G, case.M) == shape:
      cases.append(case)

  # An entry has sub-tiles of whole tiles ("whole") and of cut ones ("blocks").
  (entry,) = entries
  tile, full_q, full_kv = best_full_blocks(cases, direction)
  assert entry["whole"] == [full_q, full_kv]
  assert entry["blocks"] == [tile, tile, *best_cut_subtile(cases, tile)]


def best_full_blocks(cases: list[Case], direction: str) -> tuple[int, ...]:
  """Returns the tile and sub-tile that FakeChip prefers under a full mask."""

  def cost_and_blocks(blocks):
    tile, q, kv = blocks
    if direction == "forward":
      return forward_cost(tile, q), blocks
    return tile / 512 + kv / 1000, blocks

  full = [case.blocks[:3] for case in cases if not case.causal]
  return min(full, key=cost_and_blocks)


def best_cut_subtile(cases: list[Case], tile: int) -> tuple[int, int]:
  """Returns the sub-tile that FakeChip prefers under a causal mask."""

  def area(subtile):
    q, kv = subtile
    return q * kv, subtile

  subtiles = []
  for case in cases:
    if case.causal and case.blocks[0] == tile:
      subtiles.append(case.blocks[1:3])
  return min(subtiles, key=area)


@pytest.mark.usefixtures("table")
def test_a_search_for_v5p_without_a_tpu_estimates_a_single_tile():
  """The compiler's estimates of more tiles are incomplete for v5p."""
  cases = run_search("v5p")

  tiles = {case.blocks[0] for case in cases}
  lengths = {case.length for case in cases}
  assert tiles == {1024}
  assert lengths == {1024}


@pytest.mark.usefixtures("table")
def test_a_search_tries_no_sub_tile_that_skips_nothing():
  """Under a causal mask, a sub-tile as long as the tile of 1024 skips nothing.

  A full mask allows these sub-tiles, too.
  """
  cases = run_search("v5p")

  full = {case.blocks[1:3] for case in cases if not case.causal}
  cut = {case.blocks[1:3] for case in cases if case.causal}
  expected = {(q, kv) for q in (128, 256, 512, 1024) for kv in (256, 512, 1024)}
  assert full == expected
  assert cut == {subtile for subtile in expected if max(subtile) < 1024}


@pytest.mark.usefixtures("table")
def test_a_search_ends_when_its_time_is_over(capsys):
  cases = run_search("v6e", minutes=3)

  # A candidate takes 40 seconds, for two kernels. In 180 seconds, five begin.
  assert len(cases) == 5 * 2
  printed = capsys.readouterr()
  assert "3 minutes are over: 5 of" in printed.out
  # When the first candidate ends, 180 − 40 seconds are left.
  assert "1 of" in printed.err
  assert "2.3 minutes left" in printed.err


@pytest.mark.usefixtures("table")
def test_a_search_starts_with_the_sizes_of_the_table():
  """The fixture `table` has tiles of 1024 and sub-tiles of 256 × 256."""
  cases = run_search("v6e", minutes=3)

  # In 3 minutes, the search tries one candidate for each of five shapes.
  blocks = {case.blocks for case in cases}
  shapes = {(case.D, case.V, case.G, case.M) for case in cases}
  # The tile, and the sub-tiles of cut tiles and of whole ones.
  assert blocks == {(1024, 256, 256, 256, 256)}
  assert len(shapes) == 5
