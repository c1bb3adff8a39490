"""benchmarks/tpu/packed.py: a row of documents costs as much as its runs.

The runs that the kernel's conditions select are compared with the runs that the
mask itself needs, pair by pair.
"""

import argparse

import numpy as np
import pytest

from benchmarks.tpu import packed, runs
from benchmarks.tpu.case import DIRECTIONS, Case
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

LENGTH = 4096
TILE = 1024
SUBTILE = 512
FOUR_DOCUMENTS = (1100, 900, 1300, 796)


def expected_runs(
  documents: tuple[int, ...], is_forward: bool
) -> dict[str, int]:
  """Returns how often each run is needed, from the mask itself.

  A run is a group of sub-tiles that a kernel computes at once. A tile has 2 × 2
  of them. A letter of a run's name says what is compared in a sub-tile:
  positions ("p"), documents ("d"), or nothing ("-").
  """
  ids = runs.segment_ids(documents)[0]
  is_causal = np.tri(LENGTH, dtype=bool)
  is_visible = (ids[:, None] == ids[None]) & is_causal
  counts = dict.fromkeys(("----", "p-p", "dd", "d"), 0)
  for row in range(0, LENGTH, TILE):
    for column in range(0, LENGTH, TILE):
      tile = is_visible[row : row + TILE, column : column + TILE]
      if not tile.any():
        continue
      query_ids = ids[row : row + TILE]
      key_ids = ids[column : column + TILE]
      tile_ids = np.concatenate([query_ids, key_ids])
      has_one_document = tile_ids.min() == tile_ids.max()
      if has_one_document and tile.all():
        counts["----"] += 1
        continue
      # The diagonal cuts this tile: the sub-tile above it is left out.
      if has_one_document:
        counts["p-p"] += 1
        continue
      # Documents meet. Only strips whose sub-tiles are all needed are one run.
      subtiles = tile.reshape(2, SUBTILE, 2, SUBTILE).any(axis=(1, 3))
      strips = subtiles if is_forward else subtiles.T
      for strip in strips:
        if strip.all():
          counts["dd"] += 1
        else:
          counts["d"] += int(strip.sum())
  return {run: count for run, count in counts.items() if count}


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize(
  "is_forward", [True, False], ids=["forward", "backward"]
)
@pytest.mark.parametrize(
  "documents",
  [
    pytest.param((LENGTH,), id="one_document"),
    pytest.param((1024,) * 4, id="documents_end_with_tiles"),
    pytest.param(FOUR_DOCUMENTS, id="documents_end_within_tiles"),
    pytest.param((512, 1024, 2560), id="documents_end_with_sub_tiles"),
    pytest.param((7, 2, 4080, 7), id="short_documents"),
  ],
)
def test_a_kernel_takes_the_runs_that_the_mask_needs(
  documents, is_forward, span
):
  """A kernel skips the parts of a tile that no query attends to.

  What it computes at once is a run. `count_runs` counts them by what they
  compare, and so does `expected_runs`, from the mask.
  """
  blocks = Blocks(TILE, TILE, SUBTILE, SUBTILE, span=span)
  schedule = runs.causal_schedule(
    blocks, LENGTH, G=2, M=2, keys_move=is_forward, segments=True
  )

  counts = runs.count_runs(schedule, runs.segment_ids(documents))

  assert counts == expected_runs(documents, is_forward)


def test_a_row_without_ids_compares_no_documents():
  """No run has a "d", which is a comparison of documents in a sub-tile."""
  blocks = Blocks(TILE, TILE, 256, 256, span=4, full_subtile=(256, 512))
  schedule = runs.causal_schedule(
    blocks, LENGTH, G=2, M=2, keys_move=True, segments=False
  )

  counts = runs.count_runs(schedule, ids=None)

  # Below the diagonal, 6 tiles have 4 × 2 whole sub-tiles of 256 × 512. On it,
  # 4 tiles have rows of 1 to 4 sub-tiles of 256 × 256. In each row, the last
  # one compares positions ("p").
  assert counts == {"-" * 8: 6, "p-p--p---p": 4}


def cost_of_run(run: str) -> int:
  """100 for each sub-tile, and 7 more if it compares documents."""
  return 100 * len(run) + 7 * run.count("d")


def measure_repeated_run(case: Case) -> dict[str, float]:
  """Returns the cost of a kernel of one tile: 50, and its repeated run."""
  assert case.length == TILE
  assert case.documents == (TILE,)
  run, times = case.run
  return dict.fromkeys(DIRECTIONS, 50 + times * cost_of_run(run))


@pytest.fixture
def row():
  """A row of four documents, with tiles of 2 × 2 sub-tiles."""
  return Case(
    generation="v6e",
    D=128,
    V=256,
    G=2,
    M=2,
    length=LENGTH,
    causal=True,
    blocks=(TILE, SUBTILE, SUBTILE, SUBTILE, SUBTILE),
    documents=FOUR_DOCUMENTS,
  )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_row_costs_as_much_as_its_runs(row, direction):
  costs = packed.row_costs(row, measure_repeated_run)

  # In `measure_repeated_run`, a row of tiles costs 50 and its runs. There are
  # 4096 / 1024 rows of tiles.
  expected = 4 * 50
  counts = expected_runs(row.documents, direction == "forward")
  for run, count in counts.items():
    expected += count * cost_of_run(run)
  assert costs[direction] == expected


def test_a_row_with_a_run_without_estimate_has_no_cost(row):
  """A run is a group of sub-tiles that a kernel computes at once.

  The row needs the run "dd", which compares documents in two sub-tiles.
  """

  def measure(case: Case) -> dict[str, float]:
    run, _ = case.run
    if run == "dd":
      return {}
    return measure_repeated_run(case)

  assert packed.row_costs(row, measure) == {}


def test_random_documents_fill_their_rows():
  """Each row consists of four documents of random lengths."""
  rows = packed.draw_rows(4, LENGTH)

  assert len(set(rows)) == packed.NUM_DRAWS
  for documents in rows:
    assert len(documents) == 4
    assert sum(documents) == LENGTH
    assert min(documents) > 0


def test_a_flag_is_a_row_of_documents_or_random():
  assert packed.parse_row("1100,900") == (1100, 900)
  assert packed.parse_row("random:4") == packed.RandomDocuments(4)


@pytest.mark.parametrize(
  "text", ["", "0,5", "random:", "random:2,3", "other:4", "a"]
)
def test_other_flags_are_refused(text):
  with pytest.raises(
    argparse.ArgumentTypeError, match="pass lengths of documents"
  ):
    packed.parse_row(text)
