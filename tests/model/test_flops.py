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

  # A gradient has two products for each one of the forward pass.
  assert counted.forward == pytest.approx(
    expected_forward_flops(name), rel=1e-6
  )
  assert counted.training == 3 * counted.forward


def test_frozen_matrices_need_no_gradients():
  """A training step omits the product for the gradient of a frozen matrix."""
  num_layers = 3
  embed_dim = 32
  num_heads = 4
  head_dim = 6
  vocab_size = 96
  model = ModelConfig(
    attention="dex",
    plain_layers=1,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=2,
    head_dim=head_dim,
    ffn_dim=40,
    vocab_size=vocab_size,
  )
  trained = flops.step_flops(model, length=16, tokens=32)

  matrices = {"query", "embedding", "dex_matrix"}
  # Vectors and names that the model lacks change nothing.
  without_products = {"dex_lambda", "final_norm", "lambda_hat"}
  frozen = flops.step_flops(
    model, length=16, tokens=32, frozen=matrices | without_products
  )

  query = num_layers * embed_dim * num_heads * head_dim
  # A tied embedding is also the matrix of the logits.
  embedding = vocab_size * embed_dim
  # All layers but the plain one multiply each head with the matrix of DEX.
  dex_matrix = (num_layers - 1) * num_heads * head_dim * head_dim
  # A multiply-add is two FLOPs, and there are 32 tokens.
  omitted = 2 * 32 * (query + embedding + dex_matrix)
  assert frozen.forward == trained.forward
  assert frozen.training == trained.training - omitted


def test_the_sigmoid_of_lambda_costs_nothing():
  """λ of DIFF V2 is the sigmoid of λ of its linear variant.

  Only products of matrices count as FLOPs.
  """
  v2 = ModelConfig(attention="diff_v2", **SMALL)
  linear = ModelConfig(attention="diff_v2_linear", **SMALL)

  assert forward_flops(v2, length=16) == forward_flops(linear, length=16)
  assert flops.parameter_count(v2) == flops.parameter_count(linear)


# Masks.


@pytest.mark.parametrize(
  ("causal", "window"),
  [(True, 5), (True, 16), (True, 99), (False, None), (False, 5), (False, 99)],
)
def test_only_visible_pairs_of_queries_and_keys_count(causal, window):
  """Models with other masks differ by the FLOPs of the pairs that they see."""
  length = 16
  num_layers = 3
  num_heads = 4
  head_dim = 6
  causal_model = ModelConfig(
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_heads,
    head_dim=head_dim,
  )
  model = dataclasses.replace(causal_model, causal=causal, window=window)
  query, key = np.indices((length, length))
  visible = np.ones((length, length), bool)
  if causal:
    visible &= key <= query
  if window is not None:
    visible &= abs(query - key) < window

  difference = forward_flops(model, length) - forward_flops(
    causal_model, length
  )

  # The two maps of a DIFF head multiply keys, and values of twice their width.
  multiply_adds = 2 * (head_dim + 2 * head_dim)
  flops_of_pair = 2 * num_layers * num_heads * multiply_adds
  num_causal_pairs = length * (length + 1) // 2
  assert difference == flops_of_pair * (visible.sum() - num_causal_pairs)


def test_each_layer_has_its_own_pairs_and_maps():
  """The layers are a plain one, one with a window, and one without.

  "fw" repeats: full attention, then a window of 4 tokens.
  """
  length = 16
  head_dim = 6
  model = ModelConfig(
    num_layers=3,
    plain_layers=1,
    num_heads=4,
    num_noise_heads=2,
    num_kv_heads=2,
    head_dim=head_dim,
    window=4,
    window_pattern="fw",
  )
  # Here each token sees only itself in every layer.
  smallest = dataclasses.replace(model, window=1, window_pattern="")

  difference = forward_flops(model, length) - forward_flops(smallest, length)

  full_pairs = length * (length + 1) // 2 - length
  # The first three tokens see 1, 2 and 3 tokens, and all others see 4.
  windowed_pairs = (1 + 2 + 3 + 4 * (length - 3)) - length
  # A plain layer has 8 maps, and values as wide as its keys.
  plain_layer = 8 * (head_dim + head_dim) * full_pairs
  # A DIFF layer has 4 signal and 2 noise maps. Its values are twice as wide.
  windowed_layer = (4 + 2) * (head_dim + 2 * head_dim) * windowed_pairs
  full_layer = (4 + 2) * (head_dim + 2 * head_dim) * full_pairs
  assert difference == 2 * (plain_layer + windowed_layer + full_layer)


# The papers.


def test_attention_of_diff_has_six_to_four_of_its_transformers_products():
  """Section 1 of the paper: a DIFF head has 6 N²d, its Transformer 4 N²d.

  The models are those with 1.4 billion parameters.
  """
  length = 2048
  num_layers = 24
  num_heads = 8
  head_dim = 128
  embed_dim = 2048
  ffn_dim = 5440
  vocab_size = 100_288

  diff = forward_flops(PAPER_1B, length)
  transformer = forward_flops(PAPER_1B_SOFTMAX, length)

  num_pairs = length * (length + 1) // 2
  # Two FLOPs for each pair of tokens and each number of a head.
  unit = 2 * num_pairs * num_layers * num_heads * head_dim
  assert diff - transformer == (6 - 4) * unit
  # Query, key, value and out, and the three matrices of the SwiGLU.
  layer = 4 * embed_dim**2 + 3 * embed_dim * ffn_dim
  matrices = 2 * length * (num_layers * layer + vocab_size * embed_dim)
  assert transformer - matrices == 4 * unit


# Sizes that differ from those of the model with 1.4 billion parameters, and the
# billions of parameters of each model.
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
  model = paper_model(sizes)

  count = flops.parameter_count(model)

  # The expected billions are rounded.
  assert count == pytest.approx(billions * 1e9, rel=5e-4)


@pytest.mark.parametrize("sizes", [sizes for sizes, _ in PAPER_SIZES])
def test_diff_has_only_lambdas_and_gains_more_than_its_transformer(sizes):
  diff = paper_model(sizes)
  # Each DIFF head has two maps, so the Transformer has twice as many heads.
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
  """The post says 1.515 billion. That is 0.2% more than diffjax counts."""
  count = flops.parameter_count(PAPER_1B_V2)

  assert count == pytest.approx(1.515e9, rel=3e-3)


def test_v2_has_two_matrices_more_than_its_transformer_in_each_layer():
  """These are the queries of the second maps, E × E, and W_λ, E × H."""
  num_layers = 24
  embed_dim = 2048
  num_heads = 16

  v2 = flops.parameter_count(PAPER_1B_V2)
  transformer = flops.parameter_count(PAPER_1B_SOFTMAX)

  per_layer = embed_dim * embed_dim + embed_dim * num_heads
  assert v2 - transformer == num_layers * per_layer


def test_an_untied_model_has_one_more_matrix_of_the_vocabulary():
  vocab_size = 100_288
  embed_dim = 2048
  tied = dataclasses.replace(PAPER_1B_V2, tie_embeddings=True)
  untied = dataclasses.replace(PAPER_1B_V2, tie_embeddings=False)

  tied_count = flops.parameter_count(tied)
  untied_count = flops.parameter_count(untied)

  assert untied_count - tied_count == vocab_size * embed_dim


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
  """They are those of products in bfloat16. None means unknown."""
  assert flops.peak_flops(device_kind) == expected
