"""Compiles the TPU kernels for real chips, on a machine without a TPU.

`compile_cases` starts this module as a process: the compiler, libtpu, may abort
its process, and the environment must be set before JAX starts. Starting takes
long, so one process compiles many cases. It reads cases and prints results as
JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from diffjax.compiled.plan import ENVIRONMENT
from diffjax.config import ModelConfig
from diffjax.inference.cache import Cache, empty_cache, extend, unstack
from diffjax.inference.pages import PAGE
from diffjax.model.decoder import Decoder
from diffjax.ops.diff_attention import (
  RESIDUAL_NAMES,
  decode_attention,
  diff_attention,
)
from tests.harness import ROOT

REPLICATED = P()
TOPOLOGIES = {
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "v7x": "tpu7x:2x2x1",
}


@dataclasses.dataclass(frozen=True)
class GradientCase:
  """A gradient through `diff_attention`. Axes: see diffjax/parameters.py.

  Attributes:
    topology: a generation of TPU, or a topology such as "v5e:4x4".
    T: tokens of a sequence.
    D: width of queries and keys.
    V: width of the values. None for twice the width of the keys.
    H: heads.
    K: key heads.
    G: maps of a group of queries.
    M: maps of the keys.
    B: sequences.
    dtype: of queries, keys and values.
    has_segments: whether there are segment ids.
    has_offsets: whether each sequence has an offset.
    window: argument of `diff_attention`.
    causal: argument of `diff_attention`.
    has_remat: whether the layer is rematerialized, except what it saves by
      name.
    chips: chips that share sequences and heads, inside `shard_map`.
  """

  topology: str
  T: int
  D: int
  V: int | None = None
  H: int = 1
  K: int = 1
  G: int = 2
  M: int = 2
  B: int = 1
  dtype: str = "bfloat16"
  has_segments: bool = False
  has_offsets: bool = False
  window: int | None = None
  causal: bool = True
  has_remat: bool = False
  chips: int = 1


@dataclasses.dataclass(frozen=True)
class DecodeCase:
  """A call of `decode_attention` with 8 sequences, 16 heads and 8 key heads.

  Attributes:
    topology: a generation of TPU.
    S: tokens of a sequence's cache.
    D: width of queries and keys.
    V: width of the values. None for twice the width of the keys.
    M: maps of the keys.
    tokens: new tokens of a sequence.
    has_pages: whether the cache is divided into pages.
    is_int8: whether the cache is int8.
    window: argument of `decode_attention`.
  """

  topology: str
  S: int
  D: int
  V: int | None = None
  M: int = 2
  tokens: int = 1
  has_pages: bool = False
  is_int8: bool = False
  window: int | None = None

  G = 2
  chips = 1


@dataclasses.dataclass(frozen=True)
class ModelCase:
  """A model of two layers that reads tokens into the cache of 8 sequences.

  Attributes:
    topology: a generation of TPU.
    S: tokens of a sequence's cache.
    D: width of queries and keys.
    M: maps of the keys.
    tokens: new tokens of a sequence.
    has_pages: whether the cache is divided into pages.
    is_int8: whether the cache is int8.
    chips: chips that share the heads.
  """

  topology: str
  S: int
  D: int
  M: int = 2
  tokens: int = 1
  has_pages: bool = False
  is_int8: bool = False
  chips: int = 1

  G = 2


Case = GradientCase | DecodeCase | ModelCase
CASE_TYPES = {
  "GradientCase": GradientCase,
  "DecodeCase": DecodeCase,
  "ModelCase": ModelCase,
}


@dataclasses.dataclass(frozen=True)
class Program:
  """The result of a compilation.

  Attributes:
    error: the compiler's message. None if the case compiles.
    kernels: the names of the kernels that are called, sorted.
    temporary_bytes: the memory of temporaries.
    cache_bytes: the size of the smaller one of the caches of keys and values.
      0 if the case has no cache.
  """

  error: str | None
  kernels: list[str] = dataclasses.field(default_factory=list)
  temporary_bytes: int = 0
  cache_bytes: int = 0


def compile_cases(cases: Sequence[Case]) -> list[Program]:
  """Compiles cases in a process of their own.

  Returns:
    A program for each case. If the process aborts, the last program has its
    error, and the programs of later cases are missing.
  """
  encoded = []
  for case in cases:
    encoded.append([type(case).__name__, dataclasses.asdict(case)])
  process = subprocess.run(
    [sys.executable, "-m", "tests.ops.tpu_compiler", json.dumps(encoded)],
    cwd=ROOT,
    env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  programs = []
  for line in process.stdout.splitlines():
    if line.startswith("{"):
      programs.append(Program(**json.loads(line)))
  if len(programs) < len(cases):
    message = (
      f"the compiler's process ended with {process.returncode}:"
      f" {process.stderr[-2000:]}"
    )
    programs.append(Program(message))
  return programs


def compile_case(case: Case) -> Program:
  """Compiles a case, in the process that has libtpu's environment."""
  # A square mesh: 1, 4 or 16 chips.
  side = math.isqrt(case.chips)
  devices = find_devices(TOPOLOGIES.get(case.topology, case.topology))
  mesh = Mesh(
    np.array(devices[: case.chips]).reshape(side, side), ("data", "tensor")
  )
  try:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      if isinstance(case, GradientCase):
        function, arguments = make_gradient(case, mesh)
      elif isinstance(case, DecodeCase):
        function, arguments = make_decoding(case, mesh)
      else:
        function, arguments = make_reading(case, mesh)
      compiled = function.lower(*arguments).compile()
  except Exception as error:
    return Program(f"{type(error).__name__}: {error}"[:2000])

  cache_bytes = 0
  if not isinstance(case, GradientCase):
    cache_bytes = min(find_cache_sizes(arguments))
  return Program(
    error=None,
    kernels=sorted(find_kernels(compiled.as_text())),
    temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    cache_bytes=cache_bytes,
  )


@functools.cache
def find_devices(topology: str) -> Sequence[Any]:
  """Returns the devices of a topology."""
  description = topologies.get_topology_desc(
    platform="tpu", topology_name=topology
  )
  return description.devices


def find_kernels(text: str) -> list[str]:
  """Returns the names of the kernels that a compiled program calls."""
  names = []
  for line in text.splitlines():
    if 'custom_call_target="tpu_custom_call"' in line:
      # For example diff_attention_forward_v1_online.
      name = re.search(r"diff_attention_[a-z]+_[a-z0-9]+(_online)?", line)
      names.append(name[0])
  return names


def find_cache_sizes(arguments: Any) -> list[int]:
  """Returns the bytes of the arguments that are caches of keys or values.

  They are the arrays [B, K, S, X], or [pages, K, 128, X] with pages.
  """
  sizes = []
  for x in jax.tree.leaves(arguments):
    if x.ndim == 4 and x.shape[2] >= 128:
      sizes.append(x.size * x.dtype.itemsize)
  return sizes


def make_struct(
  mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: P = REPLICATED
) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding of an argument."""
  sharding = NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def make_gradient(case: GradientCase, mesh: Mesh) -> tuple[Any, tuple]:
  """Returns a jitted gradient and its arguments."""
  # The sequences are divided over "data", and the heads over "tensor".
  heads = P("data", None, "tensor")
  num_groups = case.H // max(case.G - 1, 1)
  q_shape = (case.B, case.T, num_groups, case.G, case.D)
  k_shape = (case.B, case.T, case.K, case.M, case.D)
  v_shape = (case.B, case.T, case.K, case.V or 2 * case.D)
  arrays = [
    make_struct(mesh, q_shape, case.dtype, heads),
    make_struct(mesh, k_shape, case.dtype, heads),
    make_struct(mesh, v_shape, case.dtype, heads),
  ]
  if case.G > 1:
    lam = make_struct(mesh, (), jnp.float32)
    arrays.append(lam)
  options = {}
  if case.has_segments:
    options["q_segment_ids"] = make_struct(
      mesh, (case.B, case.T), jnp.int32, P("data")
    )
  if case.has_offsets:
    options["q_offset"] = make_struct(mesh, (case.B,), jnp.int32, P("data"))

  def attend(arrays, options):
    return diff_attention(
      *arrays,
      **options,
      window=case.window,
      causal=case.causal,
      implementation="pallas_tpu",
    )

  if case.chips > 1:
    specs = jax.tree.map(lambda x: x.sharding.spec, (tuple(arrays), options))
    attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads)

  def loss(arrays, options):
    return jnp.sum(jnp.sin(attend(arrays, options).astype(jnp.float32)))

  if case.has_remat:
    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
    loss = jax.checkpoint(loss, policy=policy)
  return jax.jit(jax.grad(loss)), (tuple(arrays), options)


def make_decoding(case: DecodeCase, mesh: Mesh) -> tuple[Any, tuple]:
  """Returns jitted decoding and its arguments."""
  cache_shape = (8, 8, case.S)
  if case.has_pages:
    cache_shape = (8 * case.S // 128, 8, 128)
  cache_dtype = jnp.int8 if case.is_int8 else jnp.bfloat16
  value_width = case.V or 2 * case.D
  arguments = {
    "q": make_struct(mesh, (8, case.tokens, 16, 2, case.D), jnp.bfloat16),
    "k": make_struct(mesh, (*cache_shape, case.M * case.D), cache_dtype),
    "v": make_struct(mesh, (*cache_shape, value_width), cache_dtype),
    "lam": make_struct(mesh, (16,), jnp.float32),
    "lengths": make_struct(mesh, (8,), jnp.int32),
  }
  if case.has_pages:
    arguments["block_tables"] = make_struct(mesh, (8, case.S // 128), jnp.int32)
  if case.is_int8:
    arguments["k_scale"] = make_struct(mesh, cache_shape[:2], jnp.float32)
    arguments["v_scale"] = make_struct(mesh, cache_shape[:2], jnp.float32)

  def decode(arguments):
    return decode_attention(
      **arguments, window=case.window, implementation="pallas_tpu"
    )

  return jax.jit(decode), (arguments,)


def make_reading(case: ModelCase, mesh: Mesh) -> tuple[Any, tuple]:
  """Returns the jitted `extend` of a model, and its arguments."""
  config = ModelConfig(
    vocab_size=512,
    num_layers=2,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=case.D,
    ffn_dim=512,
    max_length=case.S,
  )
  if case.M == 1:
    config = dataclasses.replace(config, attention="diff_v2", head_norm=False)
  model = Decoder(config, dtype=jnp.bfloat16)
  cache_options = {}
  if case.has_pages:
    cache_options["num_pages"] = 8 * case.S // PAGE
    cache_options["dtype"] = "int8" if case.is_int8 else None

  def make_weights():
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    return unstack(model, params)

  def make_cache():
    return empty_cache(model, 8, case.S, **cache_options)

  def place(tree, spec):
    return jax.tree.map(
      lambda x: make_struct(mesh, x.shape, x.dtype, spec), tree
    )

  sharding = None
  heads = REPLICATED
  if case.chips > 1:
    heads = P(None, "tensor")
    sharding = NamedSharding(mesh, heads)
  weights = place(jax.eval_shape(make_weights), REPLICATED)
  tokens = make_struct(mesh, (8, case.tokens), jnp.int32)
  cache = jax.eval_shape(make_cache)
  cache = Cache(
    keys=place(cache.keys, heads),
    values=place(cache.values, heads),
    tables=place(cache.tables, REPLICATED),
    lengths=place(cache.lengths, REPLICATED),
  )
  read = functools.partial(extend, model, sharding=sharding)
  return jax.jit(read, donate_argnums=2), (weights, tokens, cache)


def main() -> None:
  """Prints a line of JSON for each case of the first argument."""
  for type_name, fields in json.loads(sys.argv[1]):
    program = compile_case(CASE_TYPES[type_name](**fields))
    print(json.dumps(dataclasses.asdict(program)), flush=True)


if __name__ == "__main__":
  main()
