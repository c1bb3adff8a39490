"""The TPU kernels go through the real compiler, for every generation of TPU, on a machine without one.

What is compiled is a gradient through `diff_attention(implementation="pallas_tpu")`, with the block sizes of that chip: the forward
kernel that saves, and the backward kernel; and the kernel that decodes. What fails here would fail on the TPU: layouts that the chip
does not have, vector memory that runs out. The full tier covers v4, v5e, v5p, v6e and v7x: each with every kind of kernel, and with V1
at the length at which vector memory is fullest; every mask with every kind, at a short length; and 16 chips of v5e and v5p inside
`shard_map`, batch on one mesh axis and heads on the other. The default tier is v5e and v6e at a short length, with remat, which must not
run the forward kernel again, and a model that decodes on four chips, which share its heads. That the numbers are right is checked
elsewhere, in the interpreter.

One process compiles many cases, because it starts slowly; it is not the test's own, because the compiler may abort it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

import pytest

from diffjax.compiled.plan import ENVIRONMENT
from diffjax.ops.diff_attention.tpu import block_sizes

ROOT = pathlib.Path(__file__).parents[2]
TOPOLOGIES = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "v7x": "tpu7x:2x2x1",
}

V1 = {
  "D": 128,
  "H": 2,
  "K": 2,
}  # what fills vector memory most, and dQ of two heads in turn
V2 = {"D": 128, "V": 128, "H": 2, "M": 1}
PLAIN = {"D": 256, "V": 256, "G": 1, "M": 1}
SHARED_NOISE = {"D": 128, "V": 256, "H": 8, "G": 5}
SHARED_NOISE_V2 = {"D": 192, "V": 128, "H": 4, "G": 5, "M": 1}
QUICK = [
  ("v5e", {"T": 512, "D": 128, "remat": True}),
  ("v6e", {"T": 256, "segments": True, **V2}),
  ("v6e", {"S": 8192, "D": 96, "pages": True, "int8": True}),
  ("v5e", {"S": 8192, "D": 64, "pages": True, "reads": 128}),
  ("v5e:2x2", {"S": 8192, "D": 64, "reads": 1, "chips": 4}),
]
DECODING = [
  {"S": 65536, "D": 64},
  {"S": 8192, "D": 96},
  {"S": 8192, "D": 128},
  {"S": 8192, "D": 128, "V": 128, "M": 1},
  {"S": 8192, "D": 128, "pages": True},
  {"S": 8192, "D": 128, "pages": True, "int8": True, "tokens": 128},
  {
    "S": 8192,
    "D": 64,
    "V": 64,
    "M": 1,
    "pages": True,
    "int8": True,
    "window": 1000,
  },
  *(
    {"S": 8192, "D": 64, "reads": tokens, **kind}
    for tokens in (1, 128)
    for kind in ({}, {"pages": True}, {"pages": True, "int8": True})
  ),
  {"S": 8192, "D": 64, "M": 1, "reads": 1, "pages": True},
]
GRADIENTS = {
  "v4": [
    {"T": 2048, "D": 64, "dtype": "float32"},
    {"T": 500, "D": 96},
    {"T": 8192, **V2},
    {"T": 3000, **PLAIN},
    {"T": 500, "segments": True, **PLAIN},
    {"T": 500, "window": 200, **V2},
    {"T": 500, "offsets": True, **V1},
    {"T": 500, "causal": False, **V2},
    {"T": 3000, **SHARED_NOISE},
  ],
  "v5e": [
    {"T": 2048, "D": 64},
    {"T": 500, "D": 96},
    {"T": 500, **V2},
    {"T": 3000, **PLAIN},
    {"T": 500, **SHARED_NOISE_V2},
  ],
  "v5p": [
    {"T": 500, "D": 64},
    {"T": 500, "D": 96},
    {"T": 3000, **PLAIN},
    {"T": 500, "segments": True, **V2},
    {"T": 500, "window": 200, **PLAIN},
    {"T": 500, "causal": False, **V1},
    {"T": 500, "segments": True, **SHARED_NOISE},
  ],
  "v6e": [
    {"T": 2048, "D": 96},
    {"T": 3000, **PLAIN},
    {"T": 500, "D": 64},
    {"T": 500, "window": 200, **V1},
    {"T": 500, "offsets": True, **V2},
    {"T": 500, "causal": False, "dtype": "float32", **PLAIN},
    {"T": 500, "segments": True, "dtype": "float32", **SHARED_NOISE},
    {"T": 500, "window": 129, **SHARED_NOISE_V2},
  ],
  "v7x": [
    {"T": 500, "D": 64},
    {"T": 500, "D": 96},
    {"T": 3000, **PLAIN},
    {"T": 500, "offsets": True, **PLAIN},
    {"T": 500, "dtype": "float32", **V2},
    {"T": 500, "offsets": True, **SHARED_NOISE_V2},
  ],
}
OVER_CHIPS = [
  (
    "v5e:2x2",
    {"S": 8192, "D": 64, "reads": 1, "pages": True, "int8": True, "chips": 4},
  ),
  ("v5e:4x4", {"T": 512, "D": 128, "B": 8, "H": 8, "K": 4, "chips": 16}),
  (
    "v5p:2x2x4",
    {
      "T": 512,
      "D": 128,
      "V": 128,
      "B": 8,
      "H": 8,
      "K": 4,
      "M": 1,
      "segments": True,
      "chips": 16,
    },
  ),
]

pytestmark = pytest.mark.skipif(
  sys.platform != "linux" or platform.machine() != "x86_64",
  reason="the TPU compiler, libtpu, is for Linux on x86-64 only",
)


def _check(cases: list[tuple[str, dict]]) -> list[str]:
  """Compiles (generation or topology, case) in another process; what is wrong, one line each."""
  command = [sys.executable, __file__, json.dumps(cases)]
  process = subprocess.run(
    command,
    env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  results = [
    json.loads(line)
    for line in process.stdout.splitlines()
    if line.startswith("{")
  ]
  wrong = []
  for result in results:
    print(json.dumps(result))
    topology, case = result["case"]
    kind = (
      "plain" if case.get("G") == 1 else "v2" if case.get("M") == 1 else "v1"
    )
    if "error" in result:
      wrong.append(f"{topology}: {case}: {result['error']}")
    elif "S" in case:
      # A cache in another layout would be copied, when it is read or, by the model, when it is written.
      if (
        set(result["kernels"]) != {f"diff_attention_decode_{kind}"}
        or result["temporaries"] > result["cache"] / 2
      ):
        wrong.append(
          f"{topology}: {case}: kernels {result['kernels']}, {result['temporaries']} bytes of temporaries"
        )
    elif _counts(result["kernels"], kind) != [True, 1, 1]:
      wrong.append(
        f"{topology}: {case}: kernels {result['kernels']}, forward each once"
      )
  if len(results) < len(cases):
    wrong.append(
      f"{cases[len(results)]}: the compiler ended with {process.returncode}\n{process.stderr[-2000:]}"
    )
  return wrong


def _counts(kernels: list[str], kind: str) -> list[int]:
  """Whether there are backward kernels and no others, and how many forward ones: quick and online."""
  backward = kernels.count(f"diff_attention_backward_{kind}")
  forward = [
    kernels.count(f"diff_attention_forward_{kind}{suffix}")
    for suffix in ("", "_online")
  ]
  return [backward > 0 and backward + sum(forward) == len(kernels), *forward]


def test_forward_and_backward_compile():
  wrong = _check(QUICK)
  assert not wrong, "\n".join(wrong)


def _longest(name: str) -> dict:
  """Packed rows, as training has them, of the length for which dQ has room in vector memory; on v4, which has the least, in two calls."""
  rows = block_sizes.choose(
    name, "backward", 65536, 65536, 128, 256, 2, "bfloat16"
  ).resident
  return {"T": 2 * rows if name == "v4" else rows, "segments": True, **V1}


@pytest.mark.longest
@pytest.mark.full
def test_every_generation_compiles_every_shape():
  cases = [
    (name, case)
    for name, gradients in GRADIENTS.items()
    for case in [*gradients, _longest(name), *DECODING]
  ]
  cases += OVER_CHIPS
  # Every process compiles for every generation, so that all take equally long.
  num_processes = 6
  jobs = [cases[start::num_processes] for start in range(num_processes)]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    wrong = sum(pool.map(_check, jobs), [])
  assert not wrong, "\n".join(wrong)


def _compile(cases: list[tuple[str, dict]]) -> None:
  """The other process: prints one line of JSON a case."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding
  from jax.sharding import PartitionSpec as P

  from diffjax.config import ModelConfig
  from diffjax.inference.cache import Cache, empty_cache, extend, unstack
  from diffjax.inference.pages import PAGE
  from diffjax.model.decoder import Decoder
  from diffjax.ops.diff_attention import (
    RESIDUAL_NAMES,
    decode_attention,
    diff_attention,
  )

  @functools.cache
  def devices(topology: str):
    return topologies.get_topology_desc(
      platform="tpu", topology_name=TOPOLOGIES.get(topology, topology)
    ).devices

  def struct(shape, spec, dtype):
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, spec)
    )

  def decoding(
    S,
    D,
    V=None,
    M=2,
    tokens=1,
    pages=False,
    int8=False,
    window=None,
    reads=None,
    chips=1,
  ):
    if reads:
      return reading(
        S,
        D,
        M,
        reads,
        chips,
        dict(num_pages=8 * S // PAGE, dtype="int8" if int8 else None)
        if pages
        else {},
      )
    pool = (8 * S // 128, 8, 128) if pages else (8, 8, S)
    cache = [
      struct((*pool, width), P(), jnp.int8 if int8 else jnp.bfloat16)
      for width in (M * D, V or 2 * D)
    ]
    options = (
      {"block_tables": struct((8, S // 128), P(), jnp.int32)} if pages else {}
    )
    if int8:
      options |= {
        name: struct(pool[:2], P(), jnp.float32)
        for name in ("k_scale", "v_scale")
      }
    decode = lambda arrays, options: decode_attention(
      *arrays, **options, window=window, implementation="pallas_tpu"
    )
    arrays = [
      struct((8, tokens, 16, 2, D), P(), jnp.bfloat16),
      *cache,
      struct((16,), P(), jnp.float32),
      struct((8,), P(), jnp.int32),
    ]
    return jax.jit(decode), (arrays, options)

  def reading(S, D, M, count, chips, options):
    """A model that reads `count` tokens a row into its cache, whose heads several chips share."""
    shape = dict(
      vocab_size=512,
      num_layers=2,
      embed_dim=256,
      num_heads=4,
      num_kv_heads=4,
      head_dim=D,
      ffn_dim=512,
      max_length=S,
    )
    shape |= dict(attention="diff_v2", head_norm=False) if M == 1 else {}
    model = Decoder(ModelConfig(**shape), dtype=jnp.bfloat16)
    cache = jax.eval_shape(lambda: empty_cache(model, 8, S, **options))
    init = lambda: unstack(
      model,
      model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"],
    )
    heads = NamedSharding(mesh, P(None, "tensor")) if chips > 1 else None
    at = lambda tree, spec: jax.tree.map(
      lambda x: struct(x.shape, spec, x.dtype), tree
    )
    weights, tokens = at(
      (jax.eval_shape(init), jax.ShapeDtypeStruct((8, count), jnp.int32)), P()
    )
    pools = at((cache.keys, cache.values), P() if heads is None else heads.spec)
    cache = Cache(*pools, *at((cache.tables, cache.lengths), P()))
    return jax.jit(
      functools.partial(extend, model, sharding=heads), donate_argnums=2
    ), (weights, tokens, cache)

  def gradient(
    T,
    D,
    V=None,
    H=1,
    K=1,
    G=2,
    M=2,
    B=1,
    dtype="bfloat16",
    segments=False,
    offsets=False,
    window=None,
    causal=True,
    remat=False,
    chips=1,
  ):
    heads = P("data", None, "tensor")
    queries = (B, T, H // max(G - 1, 1), G, D)
    arrays = [
      struct(queries, heads, dtype),
      struct((B, T, K, M, D), heads, dtype),
      struct((B, T, K, V or 2 * D), heads, dtype),
    ]
    arrays += [struct((), P(), jnp.float32)] if G > 1 else []
    extra = {}
    if segments:
      extra["q_segment_ids"] = struct((B, T), P("data"), jnp.int32)
    if offsets:
      extra["q_offset"] = struct((B,), P("data"), jnp.int32)

    def attend(arrays, extra):
      return diff_attention(
        *arrays,
        **extra,
        window=window,
        causal=causal,
        implementation="pallas_tpu",
      )

    if chips > 1:
      specs = (
        tuple([x.sharding.spec for x in arrays]),
        {name: x.sharding.spec for name, x in extra.items()},
      )
      attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads)
    loss = lambda arrays, extra: jnp.sum(
      jnp.sin(attend(arrays, extra).astype(jnp.float32))
    )
    if remat:
      loss = jax.checkpoint(
        loss,
        policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
      )
    return jax.jit(jax.grad(loss)), (tuple(arrays), extra)

  for topology, case in cases:
    start, result = time.process_time(), {"case": (topology, case)}
    side = math.isqrt(case.get("chips", 1))
    mesh = Mesh(
      np.array(devices(topology)[: side**2]).reshape(side, side),
      ("data", "tensor"),
    )
    try:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function, arguments = (
          decoding(**case) if "S" in case else gradient(**case)
        )
        result["cache"] = min(
          (
            x.size * x.dtype.itemsize
            for x in jax.tree.leaves(arguments)
            if x.ndim == 4 and x.shape[2] >= 128
          ),
          default=0,
        )
        compiled = function.lower(*arguments).compile()
      calls = [
        line
        for line in compiled.as_text().splitlines()
        if 'custom_call_target="tpu_custom_call"' in line
      ]
      result["kernels"] = sorted(
        re.search(r"diff_attention_[a-z]+_[a-z0-9]+(_online)?", line)[0]
        for line in calls
      )
      result["temporaries"] = compiled.memory_analysis().temp_size_in_bytes
    except (
      Exception
    ) as error:  # told by the test, with the case that it belongs to
      result["error"] = f"{type(error).__name__}: {error}"[:2000]
    print(
      json.dumps(result | {"seconds": round(time.process_time() - start, 1)}),
      flush=True,
    )


if __name__ == "__main__":
  _compile(json.loads(sys.argv[1]))
