"""What `chunked` promises besides the properties of all implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from diffjax.ops.diff_attention import chunked, diff_attention
from diffjax.ops.diff_attention.mask import Mask

# The last number is the largest allowed share of the logits of all pairs. With
# a causal mask, half of the pairs are visible.
MASKS = [
  pytest.param(True, None, 0.56, id="causal"),
  pytest.param(True, 512, 0.2, id="causal_window"),
  pytest.param(False, 512, 0.35, id="window"),
  pytest.param(False, None, 1.0, id="no_mask"),
]


@pytest.mark.parametrize(("causal", "window", "max_share"), MASKS)
def test_bands_skip_hidden_keys(causal, window, max_share):
  """A band is a series of blocks of queries that read equally many keys.

  Without bands, each query would read all keys.
  """
  length = 4096
  mask = Mask(length, length, causal, window)

  bands = chunked.make_bands(mask, block_queries=128)

  num_logits = 0
  for band in bands:
    num_blocks = len(band.first_queries)
    num_logits += num_blocks * band.num_queries * band.num_keys

  assert num_logits <= max_share * length**2


@pytest.mark.parametrize(("causal", "window", "max_share"), MASKS)
def test_bands_contain_each_block_once(causal, window, max_share):
  """A band is a series of blocks of queries that read equally many keys.

  Here 4096 queries are in 32 blocks of 128.
  """
  length = 4096
  block = 128
  mask = Mask(length, length, causal, window)

  bands = chunked.make_bands(mask, block_queries=block)

  first_queries = []
  for band in bands:
    first_queries += band.first_queries

  # A shorter block at the end may need a band of its own.
  assert len(bands) <= chunked.MAX_BANDS + 1
  assert sorted(first_queries) == list(range(0, length, block))


def test_memory_is_linear_in_length(monkeypatch):
  """With all logits in memory, it would grow with the square of the length."""
  # Fewer bands compile faster.
  monkeypatch.setattr(chunked, "MAX_BANDS", 2)

  def loss(q, k, v):
    out = diff_attention(q, k, v, 0.5, implementation="chunked")
    return jnp.sum(out**2)

  def temporary_bytes(length):
    q = jax.ShapeDtypeStruct((1, length, 2, 2, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((1, length, 2, 2, 16), jnp.float32)
    v = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
    return program.memory_analysis().temp_size_in_bytes

  short_bytes = temporary_bytes(4096)
  long_bytes = temporary_bytes(16384)

  # Four times as many tokens need about four times as many bytes.
  assert long_bytes < 5 * short_bytes
  # The logits of one head alone would take four bytes per pair of tokens.
  assert long_bytes < 16384**2
