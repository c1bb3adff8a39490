"""FLOPs equal XLA's count, and parameter counts equal those of the papers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import ModelConfig
from diffjax.model import flops
from diffjax.model.attention import ATTENTION
from tests.harness.variants import VARIANTS

B, T = 2, 16
SMALL = dict(
  vocab_size=96,
  num_layers=3,
  embed_dim=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  ffn_dim=40,
)
# The model of the paper with 1.4 billion parameters.
PAPER_1B = ModelConfig(
  vocab_size=100_288,
  num_layers=24,
  embed_dim=2048,
  num_heads=8,
  num_kv_heads=8,
  head_dim=128,
  ffn_dim=5440,
)
PAPER_1B_SOFTMAX = dataclasses.replace(
  PAPER_1B,
  attention="softmax",
  num_heads=16,
  num_kv_heads=16,
  head_norm=False,
)
PAPER_1B_V2 = dataclasses.replace(PAPER_1B_SOFTMAX, attention="diff_v2")


def forward_flops(model: ModelConfig, length: int) -> float:
  """Returns the FLOPs of the forward pass for one row."""
  return flops.step_flops(model, length, length).forward


# FLOPs of the variants.


@functools.cache
def xla_flops(equation: str, *shapes: tuple[int, ...]) -> float:
  """Returns XLA's count of the FLOPs of an einsum of two arrays."""
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  product = jax.jit(functools.partial(jnp.einsum, equation))
  analysis = product.lower(*arrays).compile().cost_analysis()
  # Older versions of JAX return a list.
  if isinstance(analysis, list):
    (analysis,) = analysis
  return analysis["flops"]


def einsum_flops(equation: str, sizes: dict[str, int]) -> float:
  """Returns XLA's count of the FLOPs of an einsum.

  Args:
    equation: such as "bte,ef->btf".
    sizes: the size of each letter.
  """
  inputs, _ = equation.split("->")
  shapes = []
  for letters in inputs.split(","):
    shapes.append(tuple(sizes[letter] for letter in letters))
  return xla_flops(equation, *shapes)


def expected_forward_flops(name: str) -> float:
  """Returns XLA's count of all products of a small model."""
  G, M, value_factor = VARIANTS[name].sizes
  V = value_factor * 6
  sizes = dict(b=B, t=T, s=T, e=32, h=4, k=2, g=G, m=M, d=6, v=V, u=V, f=40)
  sizes["n"] = 96
  for axis, size in ATTENTION[name].extra_axes.items():
    sizes[axis.lower()] = size

  products = [
    # Query, key, value and out.
    "bte,ehgd->bthgd",
    "bte,ekmd->btkmd",
    "bte,ekv->btkv",
    "bthv,hve->bte",
    # Gate, up and down.
    "bte,ef->btf",
    "bte,ef->btf",
    "btf,fe->bte",
  ]
  for axes in VARIANTS[name].extra.values():
    letters = axes.lower()
    if "E" in axes:
      outputs = letters.replace("e", "")
      products.append(f"bte,{letters}->bt{outputs}")
    elif axes == "VU":
      # Each head's output is multiplied with this matrix.
      products.append("bthv,vu->bthu")
  layer = 0.0
  for equation in products:
    layer += einsum_flops(equation, sizes)

  attention = einsum_flops("bthgd,bshgd->bhgts", sizes)
  if ATTENTION[name].fused:
    attention += einsum_flops("bhgts,bshv->bthgv", sizes)
  else:
    # The values are multiplied with the sum of the maps.
    attention += einsum_flops("bhts,bshv->bthv", sizes)
  # A causal mask shows T(T + 1)/2 of T² pairs.
  visible_share = (T + 1) / (2 * T)
  layer += visible_share * attention

  vocabulary = einsum_flops("bte,ne->btn", sizes)
  return SMALL["num_layers"] * layer + vocabulary


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_equal_xlas_count_of_the_matrix_products(name):
  model = ModelConfig(attention=name, **SMALL)

  counted = flops.step_flops(model, length=T, tokens=B * T)

  assert counted.forward == pytest.approx(
    expected_forward_flops(name), rel=1e-6
  )
  assert counted.training == 3 * counted.forward


def test_frozen_matrices_need_no_gradients():
  """One of the three products of each matrix is omitted.

  This includes the product of a tied embedding with the hidden states. Vectors
  and names that the model lacks change nothing.
  """
  model = ModelConfig(attention="dex", plain_layers=1, **SMALL)
  trained = flops.step_flops(model, T, 32)

  frozen = flops.step_flops(
    model,
    T,
    32,
    frozen={
      "query",
      "embedding",
      "dex_matrix",
      "dex_lambda",
      "final_norm",
      "lambda_hat",
    },
  )

  query = 3 * 32 * 4 * 6
  embedding = 96 * 32
  # Two layers have DEX, and each of four heads is multiplied with its matrix.
  dex_matrix = 2 * 4 * 6 * 6
  omitted = 2 * 32 * (query + embedding + dex_matrix)
  assert frozen == (trained.forward, trained.training - omitted)


def test_the_sigmoid_of_lambda_costs_nothing():
  v2 = ModelConfig(attention="diff_v2", **SMALL)
  linear = ModelConfig(attention="diff_v2_linear", **SMALL)

  assert flops.step_flops(v2, T, 32) == flops.step_flops(linear, T, 32)
  assert flops.parameter_count(v2) == flops.parameter_count(linear)


# Masks.


@pytest.mark.parametrize(
  ("causal", "window"),
  [(True, 5), (True, 16), (True, 99), (False, None), (False, 5), (False, 99)],
)
def test_only_visible_pairs_of_queries_and_keys_count(causal, window):
  query, key = np.indices((T, T))
  visible = abs(query - key) < (window or T)
  if causal:
    visible &= key <= query
  causal_model = ModelConfig(**SMALL)
  model = ModelConfig(causal=causal, window=window, **SMALL)

  actual = forward_flops(model, T)

  # A pair has two maps, each with 6 products for its score and 12 for values.
  flops_of_pair = 2 * SMALL["num_layers"] * SMALL["num_heads"] * 2 * (6 + 12)
  num_causal_pairs = T * (T + 1) // 2
  without_pairs = (
    forward_flops(causal_model, T) - flops_of_pair * num_causal_pairs
  )
  assert actual == without_pairs + flops_of_pair * visible.sum()


def test_each_layer_has_its_own_pairs_and_maps():
  """A plain layer has 8 maps. With shared noise, a layer has 6 instead of 8.

  The values of a plain layer have half the width. With 16 tokens, a full layer
  has 136 pairs, and a layer with a window of 4 has 58.
  """
  model = ModelConfig(
    num_noise_heads=2, plain_layers=1, window=4, window_pattern="fw", **SMALL
  )
  # Each token sees only itself, which are 16 pairs.
  smallest = dataclasses.replace(model, window=1, window_pattern="")

  difference = forward_flops(model, T) - forward_flops(smallest, T)

  plain_layer = 8 * (6 + 6) * (136 - 16)
  windowed_layer = 6 * (6 + 12) * (58 - 16)
  full_layer = 6 * (6 + 12) * (136 - 16)
  assert difference == 2 * (plain_layer + windowed_layer + full_layer)


# The papers.


def test_attention_of_diff_has_six_to_four_of_its_transformers_products():
  """Section 1 of the paper: a DIFF head has 6 N²d, its Transformer 4 N²d."""
  length = 2048
  num_pairs = length * (length + 1) // 2
  num_heads = 8
  head_dim = 128
  num_layers = 24
  # Two FLOPs for each pair of tokens and each number of a head.
  unit = 2 * num_pairs * num_layers * num_heads * head_dim

  diff = forward_flops(PAPER_1B, length)
  softmax = forward_flops(PAPER_1B_SOFTMAX, length)

  assert diff - softmax == (6 - 4) * unit
  layer = 4 * 2048**2 + 3 * 2048 * 5440
  vocabulary = 100_288 * 2048
  matrices = 2 * length * (num_layers * layer + vocabulary)
  assert softmax - matrices == 4 * unit


PAPER_SIZES = [
  (dict(embed_dim=1536, num_heads=8, head_dim=96, ffn_dim=4096), 0.8335),
  (dict(), 1.410),
  (dict(embed_dim=2560, num_layers=32, num_heads=10, ffn_dim=6912), 2.794),
  (dict(embed_dim=4096, num_layers=32, num_heads=16, ffn_dim=10880), 6.837),
  (dict(embed_dim=5120, num_layers=40, num_heads=20, ffn_dim=13696), 13.123),
  (dict(embed_dim=3072, num_layers=28, num_heads=12, ffn_dim=8192), 3.479),
]


def paper_model(sizes: dict[str, Any]) -> ModelConfig:
  """Returns a DIFF model of the paper, in which each head has its own keys."""
  model = dataclasses.replace(PAPER_1B, **sizes)
  return dataclasses.replace(model, num_kv_heads=model.num_heads)


@pytest.mark.parametrize(("sizes", "billions"), PAPER_SIZES)
def test_parameter_counts_are_those_of_the_paper(sizes, billions):
  count = flops.parameter_count(paper_model(sizes))

  assert count == pytest.approx(billions * 1e9, rel=5e-4)


@pytest.mark.parametrize("sizes", [sizes for sizes, _ in PAPER_SIZES])
def test_diff_has_only_lambdas_and_gains_more_than_its_transformer(sizes):
  diff = paper_model(sizes)
  transformer = dataclasses.replace(
    diff,
    attention="softmax",
    num_heads=2 * diff.num_heads,
    num_kv_heads=2 * diff.num_heads,
    head_norm=False,
  )

  difference = flops.parameter_count(diff) - flops.parameter_count(transformer)

  lambda_vectors = 4 * diff.head_dim
  gain = 2 * diff.head_dim
  assert difference == diff.num_layers * (lambda_vectors + gain)


def test_the_parameter_count_of_v2_is_that_of_the_post():
  """The post says 1.515 billion, which is rounded."""
  count = flops.parameter_count(PAPER_1B_V2)

  assert count == pytest.approx(1.511e9, rel=5e-3)


def test_v2_has_two_matrices_more_than_its_transformer_in_each_layer():
  """These are the queries of the second maps, E × E, and W_λ, E × H."""
  v2 = flops.parameter_count(PAPER_1B_V2)
  transformer = flops.parameter_count(PAPER_1B_SOFTMAX)

  assert v2 - transformer == 24 * (2048 * 2048 + 2048 * 16)


def test_an_untied_model_has_one_more_matrix_of_the_vocabulary():
  untied = dataclasses.replace(PAPER_1B_V2, tie_embeddings=False)

  tied_count = flops.parameter_count(PAPER_1B_V2)
  assert flops.parameter_count(untied) - tied_count == 100_288 * 2048


# Chips.


@pytest.mark.parametrize(
  ("device_kind", "expected"),
  [
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU7x", 1153.5e12),
    ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA H100 80GB HBM3", 989.4e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H200", 989.4e12),
    ("NVIDIA B200", 2250e12),
    ("cpu", None),
    ("NVIDIA GeForce RTX 4090", None),
    ("TPU v4 lite", None),
  ],
)
def test_peak_flops_are_those_of_the_data_sheets(device_kind, expected):
  assert flops.peak_flops(device_kind) == expected
