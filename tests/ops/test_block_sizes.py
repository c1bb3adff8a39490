"""Block sizes of the TPU kernels: for every shape usable ones, with little padding, within the chip's memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffjax.ops.diff_attention.tpu import block_sizes
from diffjax.ops.diff_attention.tpu.block_sizes import (
  GENERATIONS,
  Blocks,
  choose,
  footprint,
  vmem_bytes,
)

_lengths = st.one_of(
  st.integers(1, 5000), st.sampled_from([8192, 65536, 100_001])
)
_widths = st.sampled_from(
  [
    (64, 128, 2),
    (96, 192, 2),
    (128, 256, 2),
    (128, 128, 2),
    (128, 128, 1),
    (256, 256, 1),
    (32, 64, 2),
    (256, 512, 2),
  ]
)
_shapes = {
  "generation": st.sampled_from(GENERATIONS),
  "direction": st.sampled_from(["forward", "backward"]),
  "q_length": _lengths,
  "kv_length": _lengths,
  "widths": _widths,
  "dtype": st.sampled_from(["bfloat16", "float32"]),
}


@settings(max_examples=300, deadline=None)
@given(**_shapes)
def test_blocks_are_usable(
  generation, direction, q_length, kv_length, widths, dtype
):
  D, V, G = widths
  blocks = choose(generation, direction, q_length, kv_length, D, V, G, dtype)
  for block, inner, length in (
    (blocks.q, blocks.q_inner, q_length),
    (blocks.kv, blocks.kv_inner, kv_length),
  ):
    assert block % inner == 0 and inner % 128 == 0
    tight, padded = -(-length // 128) * 128, -(-length // block) * block
    assert padded - tight <= tight / 4, (
      "more padding than a quarter of the rows"
    )
  assert footprint(
    direction, blocks, D, V, G, 2 if dtype == "bfloat16" else 4
  ) <= vmem_bytes(generation)
  if direction == "backward":
    assert blocks.resident % blocks.q == 0 and blocks.resident >= min(
      4 * blocks.q, -(-q_length // blocks.q) * blocks.q
    )


@pytest.mark.parametrize(
  "name, known",
  [
    ("v4i", "v4"),
    ("v6p", "v6e"),
    ("7", "7x"),
    ("8i", "7x"),
    ("v10e", "7x"),
    ("v3", "v4"),
    ("nonsense", "v4"),
  ],
)
def test_unknown_chip_is_taken_for_the_nearest_older_one(name, known):
  shape = "backward", 4096, 4096, 128, 256, 2, "bfloat16"
  assert choose(name, *shape) == choose(known, *shape)
  assert vmem_bytes(name) == vmem_bytes(known)


def test_an_entry_of_the_table_is_what_its_shape_gets():
  for entry in block_sizes.table():
    length = max(entry["length"], *entry["blocks"])
    blocks = choose(
      entry["generation"],
      entry["direction"],
      length,
      length,
      entry["D"],
      entry["V"],
      entry["G"],
      "bfloat16",
    )
    assert [blocks.q, blocks.kv, blocks.q_inner, blocks.kv_inner] == entry[
      "blocks"
    ], entry
    assert list(blocks.subtile(is_full=True)) == entry["whole"], entry


def test_the_table_names_every_shape_once():
  entries = json.loads(block_sizes.TABLE.read_text())
  shapes = [
    tuple(
      entry[name]
      for name in ("generation", "direction", "D", "V", "G", "length")
    )
    for entry in entries
  ]
  assert len(set(shapes)) == len(shapes)


def test_blocks_can_be_forced():
  shape = 300, 300, 128, 256, 2, "bfloat16"
  chosen = {
    direction: choose("v5e", direction, *shape)
    for direction in ("forward", "backward")
  }
  forced = Blocks(128, 256, 128, 128, 128)
  with block_sizes.use(backward=forced):
    assert (
      choose("v5e", "backward", *shape) == forced
      and choose("v5e", "forward", *shape) == chosen["forward"]
    )
    with block_sizes.use(forward=forced):
      assert (
        choose("v5e", "backward", *shape)
        == choose("v5e", "forward", *shape)
        == forced
      )
  assert {
    direction: choose("v5e", direction, *shape) for direction in chosen
  } == chosen
  with (
    pytest.raises(ValueError, match="forward or backward; got both"),
    block_sizes.use(both=forced),
  ):
    pass


@pytest.mark.parametrize(
  ("named", "sizes"),
  [
    ("q_inner", (128, 128, 64, 128)),
    ("kv_inner", (256, 256, 128, 0)),
    ("q", (384, 256, 256, 128)),
    ("kv", (256, 128, 128, 256)),
  ],
)
def test_blocks_that_cannot_work_are_named(named, sizes):
  with pytest.raises(ValueError, match=f"^{named} must be a multiple of"):
    Blocks(*sizes)


def test_a_whole_tiles_subtiles_that_cannot_work_are_named():
  with pytest.raises(
    ValueError, match=r"^full_subtile\[1\] must be a multiple of 128; got 64"
  ):
    Blocks(256, 256, 128, 128, full_subtile=(256, 64))
  with pytest.raises(
    ValueError,
    match=r"^q must be a multiple of full_subtile\[0\] = 384; got 256",
  ):
    Blocks(256, 256, 128, 128, full_subtile=(384, 256))


def test_a_chip_without_an_entry_says_whose_it_takes(caplog):
  block_sizes._log_borrowed_sizes.cache_clear()
  with caplog.at_level("INFO"):
    for _ in range(2):
      choose("v4", "forward", 2048, 2048, 128, 256, 2, "bfloat16")
    choose("v6e", "forward", 2048, 2048, 128, 256, 2, "bfloat16")
  assert [
    record.getMessage().partition(";")[0] for record in caplog.records
  ] == ["block sizes for v4 are those found for v5e"]
