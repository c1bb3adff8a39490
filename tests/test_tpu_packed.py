"""benchmarks/tpu_packed: a packed row's runs of instructions hold the pairs that its mask leaves, and its cost is theirs."""

import argparse
import itertools

import numpy as np
import pytest

from benchmarks import tpu_packed, tpu_runs
from benchmarks.tpu_cost import Case
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks

T, TILE, PART = 4096, 1024, 512
ROWS = [
  (T,),
  (1024,) * 4,
  (1100, 900, 1300, 796),
  (512, 1024, 2560),
  (7, 2, 4080, 7),
  (3000, 1096),
]


def by_hand(ids, keys_pass):
  """Runs counted from the mask itself, pair by pair, in tiles of 2 × 2 sub-tiles."""
  seen = (ids[:, None] == ids[None]) & np.tri(T, dtype=bool)
  near = np.tri(T // PART, dtype=bool)  # sub-tiles that positions leave
  counts = dict.fromkeys(("----", "p-p", "dd", "d"), 0)
  for i, j in itertools.product(range(T // TILE), range(T // TILE)):
    tile = seen[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
    ends = ids[[i * TILE, (i + 1) * TILE - 1, j * TILE, (j + 1) * TILE - 1]]
    if tile.any() and ends.min() == ends.max():
      counts["----" if tile.all() else "p-p"] += 1
    elif tile.any():
      parts = tile.reshape(2, PART, 2, PART).any((1, 3))
      assert not (parts & ~near[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]).any()
      for strip in parts if keys_pass else parts.T:
        counts["dd" if strip.all() else "d"] += (
          1 if strip.all() else strip.sum()
        )
  return {run: count for run, count in counts.items() if count}


@pytest.mark.parametrize(
  "keys_pass", [True, False], ids=["forward", "backward"]
)
@pytest.mark.parametrize("documents", ROWS, ids=str)
@pytest.mark.parametrize("span", [1, 4])
def test_runs_are_those_that_the_mask_leaves(documents, keys_pass, span):
  blocks = Blocks(TILE, TILE, PART, PART, span=span)
  schedule = tpu_runs.schedule_of(
    blocks, T, 2, 2, keys_pass=keys_pass, segments=True
  )
  ids = tpu_runs.ids_of(documents)
  assert dict(tpu_runs.runs_of(schedule, ids)) == by_hand(ids[0], keys_pass)


def test_a_row_without_ids_compares_no_documents():
  schedule = tpu_runs.schedule_of(
    Blocks(TILE, TILE, 256, 256, span=4, full_subtile=(256, 512)),
    T,
    2,
    2,
    keys_pass=True,
    segments=False,
  )
  assert dict(tpu_runs.runs_of(schedule, None)) == {"-" * 8: 6, "p-p--p---p": 4}


def test_a_row_costs_what_its_runs_do(monkeypatch):
  """A kernel begins and ends a row of tiles with 50; a run takes 100 a sub-tile, and 7 more for documents that are compared."""
  asked = []

  def cost(case, timeout):
    asked.append(case)
    run, times = case.run
    return dict.fromkeys(
      ("forward", "backward"),
      50 + times * (100 * len(run) + 7 * run.count("d")),
    )

  monkeypatch.setattr(tpu_packed, "cost", cost)
  row = Case(
    "v6e",
    128,
    256,
    2,
    2,
    T,
    True,
    (TILE, PART, PART, PART, PART),
    (1100, 900, 1300, 796),
  )
  found = tpu_packed.row_cost(row, 1)
  for way in ("forward", "backward"):
    counts = by_hand(tpu_runs.ids_of(row.documents)[0], way == "forward")
    assert found[way] == 4 * 50 + sum(
      n * (100 * len(run) + 7 * run.count("d")) for run, n in counts.items()
    )
  assert {case.length for case in asked} == {TILE} and all(
    case.documents == (TILE,) for case in asked
  )
  # A run that has no estimate leaves the row without one.
  monkeypatch.setattr(
    tpu_packed,
    "cost",
    lambda case, timeout: {} if case.run[0] == "dd" else cost(case, timeout),
  )
  assert tpu_packed.row_cost(row, 1) == {}


def test_rows_at_random_are_whole_rows():
  rows = tpu_packed.drawn(4, T)
  assert len(set(rows)) == tpu_packed.DRAWS and all(
    len(row) == 4 and sum(row) == T and min(row) > 0 for row in rows
  )


def test_what_a_row_may_be():
  assert (
    tpu_packed.packing("1100,900") == (1100, 900)
    and tpu_packed.packing("random:4") == 4
  )
  for wrong in ("", "0,5", "random:", "random:2,3", "other:4", "a"):
    with pytest.raises(
      argparse.ArgumentTypeError, match="must be lengths of documents"
    ):
      tpu_packed.packing(wrong)
