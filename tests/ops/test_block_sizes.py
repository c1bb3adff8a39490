"""The block sizes of the TPU kernels are usable for each shape."""

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

LENGTHS = st.one_of(
  st.integers(1, 5000), st.sampled_from([8192, 65536, 100_001])
)
# D, V and G of the kernels.
WIDTHS = st.sampled_from(
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


def round_up(number: int, multiple: int) -> int:
  """Returns the smallest multiple that is at least the number."""
  return -(-number // multiple) * multiple


@settings(max_examples=200, deadline=None)
@given(
  generation=st.sampled_from(GENERATIONS),
  direction=st.sampled_from(["forward", "backward"]),
  q_length=LENGTHS,
  kv_length=LENGTHS,
  widths=WIDTHS,
  dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_chosen_blocks_are_usable(
  generation, direction, q_length, kv_length, widths, dtype
):
  """Blocks have whole registers and little padding. They fit in vector memory.

  A block has q queries and kv keys. The lengths are those of a sequence.
  """
  key_width, value_width, num_maps = widths

  blocks = choose(
    generation,
    direction,
    q_length,
    kv_length,
    D=key_width,
    V=value_width,
    G=num_maps,
    dtype=dtype,
  )

  # Blocks consist of inner blocks, and these of registers with 128 numbers.
  assert blocks.q % blocks.q_inner == 0
  assert blocks.kv % blocks.kv_inner == 0
  assert blocks.q_inner % 128 == 0
  assert blocks.kv_inner % 128 == 0
  # Blocks need at most a quarter more rows than registers do.
  for block, length in ((blocks.q, q_length), (blocks.kv, kv_length)):
    assert round_up(length, block) <= 1.25 * round_up(length, 128)
  bytes_per_number = {"bfloat16": 2, "float32": 4}[dtype]
  num_bytes = footprint(
    direction, blocks, key_width, value_width, num_maps, bytes_per_number
  )
  assert num_bytes <= vmem_bytes(generation)


@settings(max_examples=200, deadline=None)
@given(
  generation=st.sampled_from(GENERATIONS),
  q_length=LENGTHS,
  kv_length=LENGTHS,
  widths=WIDTHS,
  dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_backward_kernel_keeps_four_blocks_of_gradients_in_vector_memory(
  generation, q_length, kv_length, widths, dtype
):
  """`resident` is the number of queries whose gradients stay in that memory."""
  blocks = choose(generation, "backward", q_length, kv_length, *widths, dtype)

  assert blocks.resident % blocks.q == 0
  # A short sequence has fewer than four blocks.
  whole_sequence = round_up(q_length, blocks.q)
  assert blocks.resident >= min(4 * blocks.q, whole_sequence)


@pytest.mark.parametrize(
  ("generation", "known"),
  [
    pytest.param("v4i", "v4", id="v4i"),
    pytest.param("v6p", "v6e", id="v6p"),
    pytest.param("7", "7x", id="7"),
    pytest.param("8i", "7x", id="8i"),
    pytest.param("v10e", "7x", id="v10e"),
    pytest.param("v3", "v4", id="v3"),
    pytest.param("nonsense", "v4", id="nonsense"),
  ],
)
def test_unknown_chip_has_the_blocks_of_the_nearest_older_one(
  generation, known
):
  arguments = {
    "direction": "backward",
    "q_length": 4096,
    "kv_length": 4096,
    "D": 128,
    "V": 256,
    "G": 2,
    "dtype": "bfloat16",
  }

  assert choose(generation, **arguments) == choose(known, **arguments)
  assert vmem_bytes(generation) == vmem_bytes(known)


def test_shape_of_the_table_has_the_blocks_of_its_entry():
  """The table lists the fastest blocks of measured shapes.

  An entry has the queries and keys of a block, and of its sub-tiles. "whole" is
  the size of a sub-tile if the mask hides no pair of the block.
  """
  for entry in block_sizes.table():
    # A sequence must not be shorter than its blocks.
    length = max(entry["length"], *entry["blocks"])

    blocks = choose(
      generation=entry["generation"],
      direction=entry["direction"],
      q_length=length,
      kv_length=length,
      D=entry["D"],
      V=entry["V"],
      G=entry["G"],
      dtype="bfloat16",
    )

    sizes = [blocks.q, blocks.kv, blocks.q_inner, blocks.kv_inner]
    assert sizes == entry["blocks"], entry
    assert list(blocks.subtile(is_full=True)) == entry["whole"], entry


def test_table_has_each_shape_once():
  """Otherwise only one of two entries would have an effect."""
  names = ("generation", "direction", "D", "V", "G", "length")
  entries = json.loads(block_sizes.TABLE.read_text())

  shapes = set()
  for entry in entries:
    shapes.add(tuple(entry[name] for name in names))

  assert len(shapes) == len(entries)


def choose_for_v5e(direction: str) -> Blocks:
  """Returns the blocks of the forward or the backward kernel for one shape."""
  return choose(
    "v5e",
    direction,
    q_length=300,
    kv_length=300,
    D=128,
    V=256,
    G=2,
    dtype="bfloat16",
  )


def test_use_replaces_the_blocks_of_one_direction():
  """`choose` returns the blocks of `use` while its context is open."""
  forced = Blocks(q=128, kv=256, q_inner=128, kv_inner=128, resident=128)
  chosen_forward = choose_for_v5e("forward")
  chosen_backward = choose_for_v5e("backward")

  with block_sizes.use(backward=forced):
    assert choose_for_v5e("backward") == forced
    assert choose_for_v5e("forward") == chosen_forward

  assert choose_for_v5e("backward") == chosen_backward


def test_inner_use_keeps_the_blocks_of_the_outer_one():
  """Each `use` replaces the blocks only of the direction that it names."""
  backward = Blocks(q=128, kv=256, q_inner=128, kv_inner=128, resident=128)
  forward = Blocks(q=256, kv=256, q_inner=128, kv_inner=128)
  chosen_forward = choose_for_v5e("forward")

  with block_sizes.use(backward=backward):
    with block_sizes.use(forward=forward):
      assert choose_for_v5e("backward") == backward
      assert choose_for_v5e("forward") == forward
    assert choose_for_v5e("forward") == chosen_forward


def test_use_refuses_other_directions():
  """The directions are the forward and the backward kernel."""
  blocks = Blocks(q=128, kv=256, q_inner=128, kv_inner=128)

  with (
    pytest.raises(ValueError, match="forward or backward; got both"),
    block_sizes.use(both=blocks),
  ):
    pass


@pytest.mark.parametrize(
  ("name", "sizes"),
  [
    pytest.param("q_inner", {"q_inner": 64}, id="q_inner"),
    pytest.param("kv_inner", {"kv_inner": 0}, id="kv_inner"),
    pytest.param("q", {"q": 384, "q_inner": 256}, id="q"),
    pytest.param("kv", {"kv": 128, "kv_inner": 256}, id="kv"),
  ],
)
def test_error_names_the_unusable_size(name, sizes):
  """A block consists of inner blocks, and these have multiples of 128 rows."""
  usable = {"q": 256, "kv": 256, "q_inner": 128, "kv_inner": 128}

  with pytest.raises(ValueError, match=f"^{name} must be a multiple of"):
    Blocks(**(usable | sizes))


@pytest.mark.parametrize(
  ("full_subtile", "message"),
  [
    pytest.param(
      (256, 64),
      r"^full_subtile\[1\] must be a multiple of 128; got 64",
      id="keys",
    ),
    pytest.param(
      (384, 256),
      r"^q must be a multiple of full_subtile\[0\] = 384; got 256",
      id="queries",
    ),
  ],
)
def test_error_names_the_unusable_subtile(full_subtile, message):
  """A sub-tile is a part of a block: numbers of queries and of keys."""
  with pytest.raises(ValueError, match=message):
    Blocks(q=256, kv=256, q_inner=128, kv_inner=128, full_subtile=full_subtile)


def test_blocks_of_another_chip_are_logged_once(caplog):
  """Nothing was measured on v4, so it uses blocks that were found for v5e."""
  arguments = {
    "direction": "forward",
    "q_length": 2048,
    "kv_length": 2048,
    "D": 128,
    "V": 256,
    "G": 2,
    "dtype": "bfloat16",
  }
  # Other tests may have logged the same message.
  block_sizes.log_borrowed_sizes.cache_clear()

  with caplog.at_level("INFO"):
    choose("v4", **arguments)
    choose("v4", **arguments)
    choose("v6e", **arguments)

  (record,) = caplog.records
  message = record.getMessage()
  assert message.startswith("block sizes for v4 are those found for v5e;")
