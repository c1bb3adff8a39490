"""benchmarks/tpu/packed.py: a row of documents costs as much as its runs.

The runs that the kernel's conditions select are compared with the runs that the
mask itself needs, pair by pair.
"""

import argparse
import collections

import numpy as np
import pytest

from benchmarks.tpu import packed, runs
from benchmarks.tpu.case import Case
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

LENGTH = 4096
TILE = 1024
SUBTILE = 512


def runs_needed_by_the_mask(
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
  counts = collections.Counter()
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
        elif strip.any():
          counts["d"] += 1
  return dict(counts)


@pytest.mark.parametrize("tiles_loaded_at_once", [1, 4])
@pytest.mark.parametrize(
  "is_forward", [True, False], ids=["forward", "backward"]
)
@pytest.mark.parametrize(
  "documents",
  [
    pytest.param((4096,), id="one_document"),
    pytest.param((1024, 1024, 1024, 1024), id="documents_end_with_tiles"),
    pytest.param((1100, 900, 1300, 796), id="documents_end_within_tiles"),
    pytest.param((512, 1024, 2560), id="documents_end_with_sub_tiles"),
    pytest.param((7, 2, 4080, 7), id="short_documents"),
  ],
)
def test_a_kernel_computes_the_runs_that_the_mask_needs(
  documents, is_forward, tiles_loaded_at_once
):
  """A run is a group of sub-tiles that a kernel computes under one condition.

  `documents` has the lengths of the documents in a row. The mask hides other
  documents and later tokens. A kernel skips sub-tiles that are hidden.
  """
  blocks = Blocks(
    q=1024, kv=1024, q_inner=512, kv_inner=512, span=tiles_loaded_at_once
  )
  # A forward kernel loads tiles of keys, a backward kernel tiles of queries.
  schedule = runs.causal_schedule(
    blocks, length=4096, G=2, M=2, keys_move=is_forward, segments=True
  )

  counts = runs.count_runs(schedule, runs.segment_ids(documents))

  assert counts == runs_needed_by_the_mask(documents, is_forward)


def test_a_row_without_ids_compares_no_documents():
  """The name of a run has a letter for each of its sub-tiles.

  "-" is a sub-tile without a mask, and in "p" positions are compared. There is
  no "d", which would be a comparison of documents.
  """
  num_tiles = 4
  blocks = Blocks(
    q=1024,
    kv=1024,
    q_inner=256,
    kv_inner=256,
    full_subtile=(256, 512),
    span=num_tiles,
  )
  schedule = runs.causal_schedule(
    blocks, num_tiles * 1024, G=2, M=2, keys_move=True, segments=False
  )

  counts = runs.count_runs(schedule, ids=None)

  # A tile below the diagonal has 4 × 2 sub-tiles of 256 × 512.
  whole_tile = "--" * 4
  # A tile on the diagonal has four rows of sub-tiles of 256 × 256. The last one
  # of each is on the diagonal.
  tile_on_diagonal = "p" + "-p" + "--p" + "---p"
  assert counts == {
    whole_tile: num_tiles * (num_tiles - 1) // 2,
    tile_on_diagonal: num_tiles,
  }


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
    documents=(1100, 900, 1300, 796),
  )


@pytest.mark.parametrize(
  ("direction", "num_runs"),
  [
    ("forward", {"p-p": 2, "dd": 4, "d": 5}),
    ("backward", {"p-p": 2, "dd": 3, "d": 7}),
  ],
)
def test_a_row_costs_as_much_as_its_runs(row, direction, num_runs):
  """A run is a group of sub-tiles that a kernel computes under one condition.

  Its name has a letter for each sub-tile: "p" if positions are compared, "d" if
  documents are, too, and "-" for no comparison. `num_runs` says how often this
  row needs each run.
  """
  cost_of_starting_a_row_of_tiles = 50
  cost_of_subtile = 100
  cost_of_comparing_documents = 7

  def cost_of_run(name):
    num_comparisons = name.count("d")
    cost_of_subtiles = len(name) * cost_of_subtile
    return cost_of_subtiles + num_comparisons * cost_of_comparing_documents

  def measure(kernel):
    # The kernel consists of one run, which is repeated.
    name, repetitions = kernel.run
    cost_of_runs = repetitions * cost_of_run(name)
    cost = cost_of_starting_a_row_of_tiles + cost_of_runs
    return {"forward": cost, "backward": cost}

  costs = packed.row_costs(row, measure)

  num_rows_of_tiles = row.length // 1024
  expected = num_rows_of_tiles * cost_of_starting_a_row_of_tiles
  for name, count in num_runs.items():
    expected += count * cost_of_run(name)
  assert costs[direction] == expected


def test_a_row_with_a_run_without_estimate_has_no_cost(row):
  """A run is a group of sub-tiles that a kernel computes under one condition.

  The row needs the run "dd", which compares documents in two sub-tiles.
  """

  def measure(case: Case) -> dict[str, float]:
    run, _ = case.run
    if run == "dd":
      return {}
    return {"forward": 100, "backward": 100}

  assert packed.row_costs(row, measure) == {}


def test_the_runs_of_a_row_are_measured_in_kernels_of_one_tile(row):
  measured = []

  def measure(case: Case) -> dict[str, float]:
    measured.append((case.length, case.documents))
    return {"forward": 100, "backward": 100}

  packed.row_costs(row, measure)

  # A tile has 1024 queries and keys. They are one document, with an id.
  assert set(measured) == {(1024, (1024,))}


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
