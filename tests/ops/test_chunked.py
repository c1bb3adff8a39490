"""What `chunked` promises besides the properties of all implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from diffjax.ops.diff_attention import chunked, diff_attention
from diffjax.ops.diff_attention.mask import Mask


@pytest.mark.parametrize(
  ("causal", "window", "max_share"),
  [
    # Half of the pairs are visible. Queries read up to 1/16 of the keys more.
    pytest.param(True, None, (1 + 1 / 16) / 2, id="causal"),
    # A query sees 1/8 of the keys, and with both sides of a window 1/4.
    pytest.param(True, 512, 1 / 8 + 1 / 16, id="causal_window"),
    pytest.param(False, 512, 1 / 4 + 1 / 16, id="window"),
    pytest.param(False, None, 1, id="no_mask"),
  ],
)
def test_bands_skip_hidden_keys(causal, window, max_share):
  """The queries of a band read all keys that one of them sees.

  The share is that of all pairs of a query and a key. Each of 16 bands has 1/16
  of the queries.
  """
  length = 4096
  mask = Mask(length, length, causal, window)

  bands = chunked.make_bands(mask, block_queries=128)

  num_pairs = 0
  for band in bands:
    num_queries = len(band.first_queries) * band.num_queries
    num_pairs += num_queries * band.num_keys
  assert num_pairs <= max_share * length**2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 512])
def test_bands_contain_each_block_once(causal, window):
  """A band lists the first queries of its blocks."""
  length = 4096
  block = 128
  mask = Mask(length, length, causal, window)

  bands = chunked.make_bands(mask, block_queries=block)

  blocks = []
  for band in bands:
    blocks.extend(band.first_queries)
  assert sorted(blocks) == list(range(0, length, block))
  assert len(bands) <= chunked.MAX_BANDS


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
