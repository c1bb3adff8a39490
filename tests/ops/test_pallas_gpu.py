"""The Hopper kernels in Pallas's interpreter of Mosaic GPU: test_diff_attention.py's properties, at the precision that the kernels take.

They take no float32, so numbers are compared in float16 with `reference` in float32 on the same numbers: ten bits of mantissa in weights
and outputs are 5e-4 at most, and a mask that is wrong by one key shows at 1e-1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from diffjax.ops.diff_attention import diff_attention
from diffjax.ops.diff_attention.gpu import chip
from tests.harness.tiers import full

pytestmark = pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="Pallas has no public interpreter of Mosaic GPU kernels before JAX 0.11.2",
)

CASES = {
  "v1_ragged_grouped": (dict(T=130, H=2, K=1), {}),
  "v1_wide_packed_window": (
    dict(T=140, H=1, D=96, V=192, ids=True),
    dict(window=30),
  ),
  "v2_grouped": (dict(T=70, H=4, K=2, M=1, V=8), {}),
  "plain_wide": (dict(T=70, H=1, G=1, M=1, D=128, V=128), dict(causal=False)),
  "window_not_causal_v2": (
    dict(B=1, T=200, M=1, V=8),
    dict(window=20, causal=False),
  ),
  "offset_per_row": (dict(T=70, S=300), dict(q_offset=(5, 170))),
}
COMBINED = {
  "v1_not_causal": (dict(T=100), dict(causal=False)),
  "v1_several_tiles": (dict(B=1, T=300, H=1), {}),
  "v1_wide": (dict(T=140, H=1, D=100, V=200), {}),
  "v2_wide_not_causal": (
    dict(T=70, H=1, M=1, D=128, V=128),
    dict(causal=False),
  ),
  "plain_grouped": (dict(T=130, H=2, K=1, G=1, M=1, V=8), {}),
  "one_query": (dict(T=1, S=130), dict(q_offset=(4, 129))),
  "packed": (dict(T=200, ids=True), {}),
  "packed_not_causal": (dict(T=200, ids=True), dict(causal=False)),
  "window": (dict(B=1, T=300, H=1), dict(window=40)),
  "window_not_causal": (dict(B=1, T=300, H=1), dict(window=90, causal=False)),
  "cross": (dict(T=70, S=150), dict(causal=False)),
  "fewer_keys": (dict(T=150, S=70), {}),
  "offset_window": (dict(T=70, S=300), dict(q_offset=170, window=40)),
  "offset_per_row_packed_window": (
    dict(T=150, ids=True),
    dict(q_offset=(5, 20), window=40),
  ),
  "before_keys": (dict(T=150), dict(q_offset=-70)),
  "beyond_window": (dict(T=80, S=70), dict(q_offset=100, window=20)),
  "negative_scale": (dict(T=70, H=1), dict(scale=-0.3)),
  "no_scale": (dict(T=70, H=1, ids=True), dict(scale=0.0)),
}


def _arguments(
  B=2,
  T=130,
  S=None,
  H=2,
  K=None,
  G=2,
  M=2,
  D=8,
  V=16,
  ids=False,
  lam="BTH",
  dtype=jnp.float16,
  seed=0,
):
  rng = np.random.default_rng(seed)
  S, K = S or T, K or H
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  lam_shape = {"scalar": (), "H": (H,), "BTH": (B, T, H)}[lam]
  lam = (
    None
    if G == 1
    else jnp.asarray(rng.uniform(-0.5, 1.2, lam_shape), jnp.float32)
  )
  segment_ids = (
    jnp.asarray(np.sort(rng.integers(0, 5, (B, T)), axis=1)) if ids else None
  )
  return (
    (normal(B, T, H, G, D), normal(B, S, K, M, D), normal(B, S, K, V), lam),
    normal(B, T, H, V),
    segment_ids,
  )


@functools.cache
def _program(implementation, params, options):
  """Output and gradients, in a program that calls share as long as only numbers differ."""

  @jax.jit
  def run(arguments, d_out, arrays):
    attend = lambda arguments: diff_attention(
      *arguments, implementation=implementation, **dict(options), **arrays
    )
    out, pull = jax.vjp(attend, arguments)
    return out, pull(d_out)[0]

  return run


def _run(implementation, arguments, d_out, options, params=None):
  """Output and gradients; `reference` in float32."""
  options = {
    name: jnp.asarray(x, jnp.int32) if isinstance(x, tuple) else x
    for name, x in options.items()
  }
  arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
  if implementation == "reference":
    arguments, d_out = jax.tree.map(
      lambda x: x.astype(jnp.float32), (arguments, d_out)
    )
  run = _program(
    implementation,
    params,
    tuple((name, x) for name, x in options.items() if name not in arrays),
  )
  with chip.interpreted(params):
    return jax.tree.map(
      lambda x: np.asarray(x, np.float32),
      jax.block_until_ready(run(arguments, d_out, arrays)),
    )


def _assert_close(actual, expected, tolerance):
  def check(path, a, e):
    assert np.isfinite(a).all(), f"{jax.tree_util.keystr(path)} is not finite"
    # A gradient that is zero but for rounding (one visible key) is compared with 1.
    error = np.linalg.norm(a - e) / max(np.linalg.norm(e), 1.0)
    assert error <= tolerance, (
      f"{jax.tree_util.keystr(path)}: relative error {error:.2e}"
    )

  jax.tree_util.tree_map_with_path(check, actual, expected)


@pytest.mark.parametrize("name", [*CASES, *full(COMBINED)])
def test_agrees_with_reference(name):
  shapes, options = (CASES | COMBINED)[name]
  arguments, d_out, ids = _arguments(**shapes)
  options = options | ({} if ids is None else {"q_segment_ids": ids})
  _assert_close(
    _run("pallas_gpu", arguments, d_out, options),
    _run("reference", arguments, d_out, options),
    1e-3,
  )


@pytest.mark.parametrize(
  "shapes",
  [dict(B=1, T=140, H=1), *full([dict(B=1, T=140, H=2, K=1, D=128, V=256)])],
  ids=str,
)
def test_the_same_numbers_at_every_call(shapes):
  """Bit by bit: each sum has one order. The interpreter's threads, as the chip's warpgroups, run at another pace every time."""
  arguments, d_out, ids = _arguments(**shapes, ids=True)
  first, again = (
    _run("pallas_gpu", arguments, d_out, {"q_segment_ids": ids})
    for _ in range(2)
  )
  jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize("lam", ["H", *full(["scalar"])])
def test_bfloat16_and_lambda_of_fewer_axes(lam):
  arguments, d_out, _ = _arguments(T=100, lam=lam, dtype=jnp.bfloat16)
  _assert_close(
    _run("pallas_gpu", arguments, d_out, {}),
    _run("reference", arguments, d_out, {}),
    6e-3,
  )


def test_the_output_alone_is_the_output_with_a_gradient():
  arguments, d_out, _ = _arguments(T=100)
  with chip.interpreted():
    out = jax.jit(lambda *x: diff_attention(*x, implementation="pallas_gpu"))(
      *arguments
    )
  assert out.dtype == jnp.float16
  np.testing.assert_array_equal(
    np.asarray(out, np.float32), _run("pallas_gpu", arguments, d_out, {})[0]
  )


@pytest.mark.parametrize(
  "shapes",
  [
    dict(B=1, T=140, H=1),
    *full([dict(B=1, T=70, H=1, D=128, V=256), dict(B=1, T=140, K=1, M=1)]),
  ],
  ids=str,
)
def test_no_races(shapes):
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

  arguments, d_out, _ = _arguments(**shapes)
  _run(
    "pallas_gpu",
    arguments,
    d_out,
    {},
    plgpu.InterpretGPUParams(detect_races=True),
  )
  assert not interpret_pallas_call.get_races().races_found


def test_in_shard_map():
  """Arrays vary over a mesh there, if of one device only: the interpreter takes no more. One λ, which all devices would share."""
  mesh = jax.make_mesh(
    (1,),
    ("data",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:1],
  )
  (q, k, v, _), d_out, ids = _arguments(T=100, ids=True)
  rows, shared = (
    jax.sharding.PartitionSpec("data"),
    jax.sharding.PartitionSpec(),
  )
  local = lambda q, k, v, lam, ids: diff_attention(
    q, k, v, lam, q_segment_ids=ids, implementation="pallas_gpu"
  )
  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=(rows, rows, rows, shared, rows), out_specs=rows
  )

  @jax.jit
  def run(arguments, d_out):
    out, pull = jax.vjp(lambda *a: mapped(*a, ids), *arguments)
    return out, pull(d_out)

  with chip.interpreted():
    actual = jax.tree.map(
      lambda x: np.asarray(x, np.float32),
      run((q, k, v, jnp.float32(0.4)), d_out),
    )
  _assert_close(
    actual,
    _run(
      "reference", (q, k, v, jnp.float32(0.4)), d_out, {"q_segment_ids": ids}
    ),
    2e-3,
  )


@pytest.mark.parametrize(
  ("options", "ids", "rows", "hidden"),
  [
    (dict(window=64), False, slice(128, 192), np.r_[:64, 192:256]),
    (dict(causal=False), True, slice(0, 64), np.r_[64:256]),
    *full([({}, False, slice(0, 64), np.r_[64:256])]),
  ],
  ids=["window", "segments", "causal"],
)
def test_hidden_blocks_are_not_computed(options, ids, rows, hidden):
  """NaN in keys and values spreads to every row that meets them in a product, masked or not."""
  (q, k, v, lam), d_out, _ = _arguments(B=1, T=256, H=1)
  if ids:
    options = options | {
      "q_segment_ids": (jnp.arange(256) >= 64).astype(jnp.int32)[None]
    }
  k, v = k.at[:, hidden].set(jnp.nan), v.at[:, hidden].set(jnp.nan)
  d_out = jnp.zeros_like(d_out).at[:, rows].set(d_out[:, rows])
  out, (d_q, _, _, d_lam) = _run("pallas_gpu", (q, k, v, lam), d_out, options)
  assert (
    np.isfinite(out[:, rows]).all()
    and np.isfinite(d_q[:, rows]).all()
    and np.isfinite(d_lam[:, rows]).all()
  )
  assert np.isnan(out[:, hidden]).any()  # the poison works


def test_row_without_keys_gives_zero_and_no_gradient():
  arguments, d_out, _ = _arguments(T=70)
  ids = dict(
    q_segment_ids=jnp.full((2, 70), 9).at[:, 40:].set(1),
    kv_segment_ids=jnp.ones((2, 70), jnp.int32),
  )
  out, (d_q, d_k, _, d_lam) = _run(
    "pallas_gpu", arguments, d_out, ids | dict(causal=False)
  )
  assert (
    (out[:, :40] == 0).all()
    and (d_q[:, :40] == 0).all()
    and (d_lam[:, :40] == 0).all()
  )
  assert (out[:, 40:] != 0).all() and (d_k != 0).all()
  for leaf in jax.tree.leaves(
    _run(
      "pallas_gpu",
      arguments,
      d_out,
      ids | dict(q_segment_ids=jnp.full((2, 70), 9)),
    )
  ):
    assert (leaf == 0).all()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(dtype=jnp.float32), "float32.*bfloat16 or float16"),
    (dict(D=136), "D = 136.*up to 128"),
    (dict(V=264), "V = 264.*up to 256"),
  ],
)
def test_refusals_name_what_works(changes, message):
  dtype, D, V = (
    changes.get("dtype", jnp.float16),
    changes.get("D", 8),
    changes.get("V", 16),
  )
  zeros = functools.partial(jnp.zeros, dtype=dtype)
  with (
    chip.interpreted(),
    pytest.raises(
      ValueError, match=f"^q .*{message}.*implementation='chunked'"
    ),
  ):
    diff_attention(
      zeros((1, 8, 2, 2, D)),
      zeros((1, 8, 2, 2, D)),
      zeros((1, 8, 2, V)),
      0.5,
      implementation="pallas_gpu",
    )


def test_another_backend_is_refused():
  x = jnp.zeros((1, 8, 2, 2, 8), jnp.float16)
  with pytest.raises(
    ValueError,
    match="^implementation = 'pallas_gpu' needs a Hopper GPU.*backend is 'cpu'; use implementation=",
  ):
    diff_attention(
      x,
      x,
      jnp.zeros((1, 8, 2, 16), jnp.float16),
      0.5,
      implementation="pallas_gpu",
    )


def test_blackwell_is_refused(monkeypatch):
  class Device:
    platform, device_kind, compute_capability = "gpu", "NVIDIA B200", "10.0"

  x = jnp.zeros((1, 8, 2, 2, 8), jnp.float16)
  monkeypatch.setattr(jax, "devices", lambda *_: [Device])
  with pytest.raises(
    ValueError,
    match="needs a Hopper GPU.*this is NVIDIA B200, 10.0; use implementation='chunked' or 'auto'",
  ):
    diff_attention(
      x,
      x,
      jnp.zeros((1, 8, 2, 16), jnp.float16),
      0.5,
      implementation="pallas_gpu",
    )


def test_an_assembler_that_corrupts_products_is_named(monkeypatch):
  monkeypatch.setattr(
    chip.assembler, "refusal", lambda: "ptxas 13.0.88 can corrupt products"
  )
  with pytest.warns(UserWarning, match=r"ptxas 13\.0\.88"):
    chip.make_kernel(
      lambda: None,
      "nothing",
      interpret=None,
      grid=(1,),
      grid_names=("tiles",),
      warpgroups=1,
      outputs=(),
      scratch={},
    )
