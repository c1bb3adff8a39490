"""The TPU kernels over several blocks, in Pallas's TPU interpreter; test_diff_attention.py holds the properties of all implementations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from diffjax.ops.diff_attention import diff_attention, vjp
from diffjax.ops.diff_attention.mask import Mask
from diffjax.ops.diff_attention.tiles import LOG2E
from diffjax.ops.diff_attention.tpu import (
  attention,
  block_sizes,
  chip,
  forward,
)
from diffjax.ops.diff_attention.tpu.block_sizes import Blocks
from tests.harness.tiers import full

SQUARE, WIDE, FINE = (
  Blocks(128, 128, 128, 128, 1024, 2),
  Blocks(256, 128, 128, 128, 1024, 3),
  Blocks(256, 256, 128, 128, 1024, 2, (128, 256)),
)
SPANS, SHORT_SPANS = (
  Blocks(128, 128, 128, 128, 256),
  Blocks(128, 128, 128, 128, 128),
)  # dQ of 256 or 128 rows a call

CASES = {
  "ragged_grouped": (FINE, dict(T=300, H=2, K=1), {}),
  "v2_grouped_window": (
    WIDE,
    dict(T=300, H=2, K=1, M=1, V=8),
    dict(window=100),
  ),
  "window_not_causal": (
    SQUARE,
    dict(B=1, T=400, H=1),
    dict(window=150, causal=False),
  ),
  "shared_noise": (FINE, dict(B=1, T=300, H=8, K=2, G=3), {}),
  "offset_per_row": (SHORT_SPANS, dict(T=130, S=300), dict(q_offset=(5, 170))),
}
COMBINED = {
  # Tiles that are mostly seen, below the diagonal too, mostly hidden, and hidden.
  "packed_long": (FINE, dict(T=600, H=1, starts=(40, 560)), {}),
  "shared_noise_v2_spans_packed": (
    SPANS,
    dict(B=1, T=300, H=6, K=1, G=4, M=1, D=24, V=8, starts=(70, 180)),
    {},
  ),
  "spans_of_a_group": (SPANS, dict(B=1, T=300, H=2, K=1), {}),
  "v2": (WIDE, dict(T=300, H=4, K=2, M=1, V=8), {}),
  "plain": (FINE, dict(T=300, G=1, M=1, V=8), {}),
  "packed": (FINE, dict(T=300, starts=(70, 110, 180, 250)), {}),
  "packed_short": (
    FINE,
    dict(T=600, H=1, starts=(128, 256, 384, 512)),
    {},
  ),  # tiles that are mostly hidden
  "packed_not_causal": (
    FINE,
    dict(T=300, starts=(70, 110, 180, 250)),
    dict(causal=False),
  ),
  "packed_offset_per_row": (
    FINE,
    dict(T=300, starts=(70, 110)),
    dict(q_offset=(5, 0)),
  ),
  "window": (FINE, dict(T=600), dict(window=100)),
  "offset_per_row_window_not_causal": (
    SQUARE,
    dict(T=130, S=640),
    dict(q_offset=(5, 255), window=150, causal=False),
  ),
  "offset_window": (SQUARE, dict(T=130, S=300), dict(q_offset=170, window=40)),
  "before_keys": (SQUARE, dict(T=300), dict(q_offset=-100)),
  "several_spans_of_a_group": (SPANS, dict(T=600, H=2, K=1), {}),
}


def _arguments(
  T, S=None, B=2, H=2, K=None, G=2, M=2, D=8, V=16, starts=None, seed=0
):
  rng = np.random.default_rng(seed)
  S, K = S or T, K or H
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  lam = (
    None if G == 1 else jnp.asarray(rng.uniform(0, 1, (B, T, H)), jnp.float32)
  )
  segment_ids = None
  if starts is not None:  # the second row's segments begin later
    segment_ids = jnp.stack(
      [
        jnp.searchsorted(
          jnp.asarray(starts) + later, jnp.arange(T), side="right"
        )
        for later in (0, T // 2)
      ][:B]
    )
  return (
    (
      normal(B, T, H // max(G - 1, 1), G, D),
      normal(B, S, K, M, D),
      normal(B, S, K, V),
      lam,
    ),
    normal(B, T, H, V),
    segment_ids,
  )


def _run(implementation, arguments, d_out, segment_ids, options):
  options = {
    name: jnp.asarray(x, jnp.int32) if isinstance(x, tuple) else x
    for name, x in options.items()
  }

  @jax.jit
  def run(arguments):
    f = lambda arguments: diff_attention(
      *arguments,
      q_segment_ids=segment_ids,
      implementation=implementation,
      **options,
    )
    out, pull = jax.vjp(f, arguments)
    return out, pull(d_out)[0]

  return run(arguments)


def _errors(actual, expected):
  return jax.tree.map(
    lambda a, e: float(
      jnp.linalg.norm(a - e) / jnp.maximum(jnp.linalg.norm(e), 1e-3)
    ),
    actual,
    expected,
  )


@pytest.fixture
def races(monkeypatch):
  """What the interpreter finds, kernel after kernel, while it looks for races."""
  kernels, state = [], interpret_pallas_call.RaceDetectionState
  monkeypatch.setattr(
    interpret_pallas_call,
    "RaceDetectionState",
    lambda **options: kernels.append(state(**options)) or kernels[-1],
  )
  return kernels


@pytest.mark.parametrize("name", [*CASES, *full(COMBINED)])
def test_agrees_with_reference_over_several_blocks(name, races):
  blocks, shapes, options = (CASES | COMBINED)[name]
  arguments = _arguments(**shapes)
  expected = _run("reference", *arguments, options)
  params = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
  with (
    chip.interpreted(params),
    block_sizes.use(forward=blocks, backward=blocks),
  ):
    actual = jax.block_until_ready(_run("pallas_tpu", *arguments, options))
  assert (
    np.max(jax.tree.leaves(_errors(actual, expected))) < 3e-6
  )  # NumPy's max is NaN where an error is
  assert len(races) >= 2 and not any(kernel.races_found for kernel in races)


@pytest.mark.parametrize("name", [*full(CASES)])
def test_the_online_kernel_agrees_with_reference(name):
  """Values so large that weights above 1 might overflow their sums: the running maximum is subtracted."""
  blocks, shapes, options = CASES[name]
  (q, k, v, lam), d_out, segment_ids = _arguments(**shapes)
  arguments = (q, k, v * 2.0**50, lam), d_out, segment_ids
  expected = _run("reference", *arguments, options)
  with chip.interpreted(), block_sizes.use(forward=blocks, backward=blocks):
    actual = jax.block_until_ready(_run("pallas_tpu", *arguments, options))
  assert np.max(jax.tree.leaves(_errors(actual, expected))) < 3e-6


SHARED = {  # neither rows nor key heads divide by two; blocks of keys that do, and others
  "plain_grouped_window": (
    Blocks(128, 128, 128, 128, 2048),
    dict(B=1, T=400, H=4, K=1, G=1, M=1, V=8),
    dict(window=150),
  ),
  "packed": (SPANS, dict(B=1, T=300, H=1, starts=(70, 180)), {}),
}
SHARED_COMBINED = {
  "grouped": (Blocks(128, 128, 128, 128, 2048), dict(B=1, T=600, H=4, K=1), {}),
  "packed_window_grouped": (
    SPANS,
    dict(B=1, T=400, H=4, K=1, starts=(70, 110, 180, 250)),
    dict(window=200),
  ),
  "three_heads": (FINE, dict(B=1, T=600, H=3), dict(causal=False)),
  "three_rows_v2": (
    SQUARE,
    dict(B=3, T=300, H=4, K=1, M=1, V=8),
    dict(q_offset=(5, 0, 40)),
  ),
}


@pytest.mark.parametrize("name", [*SHARED, *full(SHARED_COMBINED)])
def test_two_cores_share_the_keys_of_one_head(name, races, monkeypatch):
  """Where a device has two: on v4 and v5p."""
  blocks, shapes, options = (SHARED | SHARED_COMBINED)[name]
  monkeypatch.setattr(chip, "cores", lambda: 2)
  arguments = *_, segment_ids = _arguments(**shapes)
  expected = _run("reference", *arguments, options)
  cores = (
    1 if segment_ids is not None or blocks.span > 1 else 2
  )  # JAX's interpreter cannot lower a kernel's loops for two
  params = pltpu.InterpretParams(
    uninitialized_memory="nan", detect_races=True, num_cores_or_threads=cores
  )
  with (
    chip.interpreted(params),
    block_sizes.use(forward=blocks, backward=blocks),
  ):
    shared = _shared_out(*arguments, options)
    actual = jax.block_until_ready(_run("pallas_tpu", *arguments, options))
  assert np.max(jax.tree.leaves(_errors(actual, expected))) < 3e-6
  assert len(races) >= 2 and not any(kernel.races_found for kernel in races)
  assert shared and all(
    any(size % 2 == 0 for size in sizes) for sizes in shared
  ), shared


def _shared_out(arguments, d_out, segment_ids, options):
  """The sizes of the parallel axes of each backward kernel's grid, which has five axes."""
  run = lambda arguments: _run(
    "pallas_tpu", arguments, d_out, segment_ids, options
  )
  kernels = [
    eqn.params
    for eqn in _equations(jax.make_jaxpr(run)(arguments).jaxpr)
    if eqn.primitive.name == "pallas_call"
  ]
  axes = [
    zip(
      x["grid_mapping"].grid,
      x["compiler_params"].dimension_semantics,
      strict=True,
    )
    for x in kernels
  ]
  return [
    [size for size, kind in pairs if kind == pltpu.PARALLEL]
    for pairs in map(list, axes)
    if len(pairs) == 5
  ]


def _all_logits(value: float):
  """Queries and keys all of whose logits, base 2, are the value."""

  def change(q, k, v):
    length = np.sqrt(abs(value) / LOG2E * q.shape[-1] ** 0.5 / q.shape[-1])
    return np.full_like(q, np.sign(value) * length), np.full_like(k, length), v

  return change


ADVERSE = {  # what becomes of q, k and v, and whether the quick kernel's result is taken
  "as_drawn": (lambda q, k, v: (q, k, v), True),
  "one_huge_key": (
    lambda q, k, v: (
      q,
      np.where(np.arange(k.shape[1])[:, None, None, None] == 7, 1000 * k, k),
      v,
    ),
    False,
  ),
  "equal_keys": (
    lambda q, k, v: (q, np.broadcast_to(k[:, :1], k.shape), v),
    True,
  ),
  "far_down": (_all_logits(-59.0), True),
  "too_far_down": (_all_logits(-62.0), False),
  "underflow": (_all_logits(-1000.0), False),
  "far_up": (_all_logits(71.0), True),
  "too_far_up": (_all_logits(82.0), False),
  "overflow": (_all_logits(1000.0), False),
  "large_queries": (lambda q, k, v: (np.sign(q) * 1e4, k, v), False),
  "smallest_queries": (
    lambda q, k, v: (np.sign(q) * 2e-38, np.sign(k) * 2e-38, v),
    True,
  ),
  "largest_values": (lambda q, k, v: (q, k, np.sign(v) * 1e37), False),
  "smallest_values": (lambda q, k, v: (q, k, np.sign(v) * 1e-30), False),
  "no_values": (lambda q, k, v: (q, k, 0 * v), True),
  "rows_without_keys": (lambda q, k, v: (q, k, v), False),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ADVERSE)
def test_nothing_is_lost_without_the_running_maximum(name, dtype, monkeypatch):
  """Against float64; the log-sum-exps, which the backward pass reads, are right too."""
  (q, k, v, lam), _, _ = _arguments(B=1, T=256, H=1)
  change, quick = ADVERSE[name]
  q, k, v = (
    jnp.asarray(x, dtype)
    for x in change(*(np.asarray(x, np.float64) for x in (q, k, v)))
  )
  scale = q.shape[-1] ** -0.5
  hidden, taken, in_range = (
    20 if name == "rows_without_keys" else 0,
    [],
    forward.in_range,
  )
  monkeypatch.setattr(
    forward,
    "in_range",
    lambda *arrays: taken.append(in_range(*arrays)) or taken[-1],
  )
  exact = [np.asarray(x, np.float64) for x in (q, k, v, lam)]
  logits = (
    np.einsum("btgd,bsgd->bgts", exact[0][:, :, 0], exact[1][:, :, 0])
    * scale
    * LOG2E
  )
  visible = np.arange(256)[:, None] - hidden >= np.arange(256)
  peak = np.max(
    np.where(visible, logits, -np.inf), axis=-1, keepdims=True, initial=-1e300
  )
  weights = np.where(visible, np.exp2(np.minimum(logits - peak, 0)), 0)
  sums = np.sum(weights, axis=-1, keepdims=True)
  maps = np.einsum(
    "bgts,bsv->bgtv", weights / np.maximum(sums, 1e-300), exact[2][:, :, 0]
  )
  expected = maps[:, 0] - exact[3] * maps[:, 1]
  mask = Mask(256, 256, True, None, -hidden)
  arrays = vjp.Arrays(q, k, v, lam, None, None, None)
  with chip.interpreted(True), block_sizes.use(forward=SQUARE, backward=SQUARE):
    options = vjp.Options(
      scale, save=True, chosen=attention.IMPLEMENTATION.prepare(arrays, mask)
    )
    out, _, lse = attention.IMPLEMENTATION.forward(arrays, mask, options)
  out, lse = (
    np.asarray(out[:, 0], np.float64),
    np.asarray(lse[:, 0], np.float64),
  )
  largest = max(np.max(np.abs(exact[2])), 1e-300)
  assert [bool(x) for x in taken] == [quick]
  assert np.all(out[:, :hidden] == 0) and np.all(lse[..., :hidden] >= 1e29)
  rounded = np.clip(
    np.max(np.abs(logits)) / 80, 1, 100
  )  # float32 holds a logit of thousands to 1e-4
  assert (
    np.max(np.abs(out - expected))
    <= (2e-6 * rounded if dtype == jnp.float32 else 2e-2) * largest
  )
  terms = (
    np.einsum("btgd,bsgd->bgts", *(np.abs(x[:, :, 0]) for x in exact[:2]))
    * scale
    * LOG2E
  )  # what a logit's rounding is relative to
  difference = np.abs(lse - (peak + np.log2(np.maximum(sums, 1e-300)))[..., 0])
  # The quick kernel adds up weights as V meets them, rounded to bfloat16: the backward pass rounds them likewise.
  tolerance = (
    2e-6 if dtype == jnp.float32 else 2.0**-8 * LOG2E
  )  # half a unit in bfloat16's last place
  assert (
    np.max((difference / np.maximum(1, np.max(terms, axis=-1)))[..., hidden:])
    <= tolerance
  )


@pytest.mark.parametrize(
  ("blocks", "options", "starts", "rows", "hidden"),
  [
    (SQUARE, dict(window=64), None, slice(256, 384), np.r_[:128, 384:512]),
    (FINE, dict(causal=False), (128,), slice(0, 128), np.r_[128:512]),
    *full(
      [
        (SQUARE, {}, None, slice(0, 128), np.r_[128:512]),
        (SQUARE, dict(causal=False), (128,), slice(0, 128), np.r_[128:512]),
      ]
    ),
  ],
  ids=["window", "segments_within_a_tile", "causal", "segments"],
)
def test_hidden_tiles_are_not_computed(blocks, options, starts, rows, hidden):
  """NaN in keys and values spreads to every row that meets them in a product, masked or not."""
  (q, k, v, lam), d_out, segment_ids = _arguments(
    B=1, T=512, H=1, starts=starts
  )
  k, v = k.at[:, hidden].set(jnp.nan), v.at[:, hidden].set(jnp.nan)
  d_out = jnp.zeros_like(d_out).at[:, rows].set(d_out[:, rows])
  with (
    chip.interpreted(pltpu.InterpretParams()),
    block_sizes.use(forward=blocks, backward=blocks),
  ):
    out, (d_q, _, _, d_lam) = _run(
      "pallas_tpu", (q, k, v, lam), d_out, segment_ids, options
    )
  assert (
    np.isfinite(out[:, rows]).all()
    and np.isfinite(d_q[:, rows]).all()
    and np.isfinite(d_lam[:, rows]).all()
  )
  assert np.isnan(out[:, hidden]).any()  # the poison works


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 11])
@pytest.mark.parametrize("offset", [-9, 0, 3, 8])
def test_tiles_against_the_mask_itself(causal, window, offset):
  """Tiles said to be hidden, whole or within reach are so; every difference of a partly visible tile is listed."""
  q_block, kv_block, q_length, kv_length = 8, 4, 21, 18
  tiles = Mask(q_length, kv_length, causal, window, offset)
  p, k = offset + np.arange(24)[:, None], np.arange(20)
  distance = p - k
  mask = (
    (k < kv_length)
    & ((distance >= 0) | (not causal))
    & (window is None or abs(distance) < window if not causal else True)
  )
  if causal and window is not None:
    mask = mask & (distance < window)
  differences = tiles.partial_differences(q_block, kv_block, 99)
  for i in range(3):
    p0, p1 = offset + i * q_block, offset + (i + 1) * q_block - 1
    first, last = tiles.keys_of(p0, p1)
    seen = np.flatnonzero(mask[i * q_block : (i + 1) * q_block].any(0))
    assert seen.size == 0 or (first <= seen.min() and seen.max() <= last)
    for j in range(5):
      k0, k1 = j * kv_block, (j + 1) * kv_block - 1
      tile = mask[i * q_block : (i + 1) * q_block, k0 : k1 + 1]
      some = tiles.any_visible(p0, p1, k0, k1)
      every = tiles.all_visible(p0, p1, k0, k1)
      assert some or not tile.any()
      real = tile[
        : max(0, q_length - i * q_block)
      ]  # rows beyond the last query may see padding where causality hides it from real ones
      assert not every or real.all()
      if differences is not None and some and not every:
        assert p0 - k0 in differences
      if tile.any():
        low, high = tiles.rows_of(k0, k1)
        rows = np.flatnonzero(mask[:q_length, k0 : k1 + 1].any(1))
        assert rows.size == 0 or (low <= rows.min() and rows.max() <= high)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(dtype=jnp.float16), "float16.*bfloat16"),
    (dict(D=264), "D = 264.*up to 256"),
    (dict(V=520), "V = 520.*up to 512"),
  ],
)
def test_refusals_name_what_works(changes, message):
  dtype, D, V = (
    changes.get("dtype", jnp.float32),
    changes.get("D", 8),
    changes.get("V", 16),
  )
  zeros = functools.partial(jnp.zeros, dtype=dtype)
  with (
    chip.interpreted(True),
    pytest.raises(
      ValueError, match=f"^q .*{message}.*implementation='chunked'"
    ),
  ):
    diff_attention(
      zeros((1, 8, 2, 2, D)),
      zeros((1, 8, 2, 2, D)),
      zeros((1, 8, 2, V)),
      0.5,
      implementation="pallas_tpu",
    )


def test_another_backend_is_refused():
  x = jnp.zeros((1, 8, 2, 2, 8))
  with pytest.raises(
    ValueError,
    match="^implementation = 'pallas_tpu' needs a TPU, and the backend is 'cpu'; use implementation=",
  ):
    diff_attention(
      x, x, jnp.zeros((1, 8, 2, 16)), 0.5, implementation="pallas_tpu"
    )


def test_without_a_gradient_nothing_is_saved_for_one():
  """The forward kernel then writes no O₂, but its output and the log-sum-exps, which show whether it is right."""
  arguments, _, _ = _arguments(T=130)
  attend = lambda *a: diff_attention(*a, implementation="pallas_tpu")

  def written(function):
    kernels = [
      eqn
      for eqn in _equations(jax.make_jaxpr(function)(*arguments).jaxpr)
      if eqn.primitive.name == "pallas_call"
    ]
    return len(kernels[0].outvars)

  with chip.interpreted():
    assert (
      written(attend) == 2 and written(lambda *a: jax.vjp(attend, *a)[0]) == 3
    )


def _equations(jaxpr):
  """Equations, those inside other equations included."""
  for eqn in jaxpr.eqns:
    yield eqn
    for value in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      if hasattr(value := getattr(value, "jaxpr", value), "eqns"):
        yield from _equations(value)
