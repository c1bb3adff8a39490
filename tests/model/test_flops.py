"""FLOPs equal XLA's count. Parameter counts equal the papers' counts."""

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


def xla_flops_of_all_products(name: str, num_rows: int, length: int) -> float:
  """Returns XLA's count for the matrix products of a model with SMALL sizes."""
  G, M, value_factor = VARIANTS[name].sizes
  V = value_factor * 6
  sizes = dict(b=num_rows, t=length, s=length, n=96)
  sizes |= dict(e=32, h=4, k=2, g=G, m=M, d=6, v=V, u=V, f=40)
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
  visible_share = (length + 1) / (2 * length)
  layer += visible_share * attention

  vocabulary = einsum_flops("bte,ne->btn", sizes)
  return SMALL["num_layers"] * layer + vocabulary


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_equal_xlas_count_of_the_matrix_products(name):
  """The backward pass has two products for each one of the forward pass.

  These are the gradients of the two matrices.
  """
  num_rows = 2
  length = 16
  model = ModelConfig(attention=name, **SMALL)

  counted = flops.step_flops(model, length=length, tokens=num_rows * length)

  expected = xla_flops_of_all_products(name, num_rows, length)
  assert counted.forward == pytest.approx(expected, rel=1e-6)
  assert counted.training == 3 * counted.forward


def test_frozen_matrices_need_no_gradients():
  """A training step omits one product for each matrix that is not trained."""
  num_layers = 3
  num_plain_layers = 1
  embed_dim = 32
  num_heads = 4
  head_dim = 6
  vocab_size = 96
  model = ModelConfig(
    attention="dex",
    plain_layers=num_plain_layers,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=2,
    head_dim=head_dim,
    ffn_dim=40,
    vocab_size=vocab_size,
  )
  frozen_names = {"query", "embedding", "dex_matrix"}

  trained = flops.step_flops(model, length=16, tokens=32)
  frozen = flops.step_flops(model, length=16, tokens=32, frozen=frozen_names)

  query = num_layers * embed_dim * num_heads * head_dim
  # A tied embedding is also the matrix of the logits.
  embedding = vocab_size * embed_dim
  # In layers that are not plain, the matrix of DEX multiplies each head.
  num_dex_layers = num_layers - num_plain_layers
  dex_matrix = num_dex_layers * num_heads * head_dim * head_dim
  multiply_adds = 32 * (query + embedding + dex_matrix)
  flops_per_multiply_add = 2
  omitted = trained.training - frozen.training
  assert omitted == flops_per_multiply_add * multiply_adds
  assert frozen.forward == trained.forward


@pytest.mark.parametrize("name", ["dex_lambda", "final_norm", "lambda_hat"])
def test_frozen_vectors_and_parameters_of_other_variants_change_nothing(name):
  """DEX has no lambda_hat. The other two are vectors, without a product."""
  model = ModelConfig(attention="dex", **SMALL)

  frozen = flops.step_flops(model, length=16, tokens=32, frozen={name})

  assert frozen == flops.step_flops(model, length=16, tokens=32)


# Masks.


@pytest.mark.parametrize(
  ("causal", "window"),
  [(True, 5), (True, 16), (True, 99), (False, None), (False, 5), (False, 99)],
)
def test_only_visible_pairs_of_queries_and_keys_count(causal, window):
  """The model is compared with one in which a token sees only itself.

  The row has 16 tokens. A window may be as long as the row, or longer.
  """
  length = 16
  head_dim = 6
  model = ModelConfig(
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=head_dim,
    causal=causal,
    window=window,
  )
  smallest_model = dataclasses.replace(model, window=1)
  query, key = np.indices((length, length))
  visible = np.ones((length, length), bool)
  if causal:
    visible &= key <= query
  if window is not None:
    visible &= abs(query - key) < window

  model_flops = forward_flops(model, length)
  smallest_flops = forward_flops(smallest_model, length)

  num_additional_pairs = visible.sum() - length
  # A head has two maps, and values that are twice as wide as its keys.
  multiply_adds_of_pair = 2 * (head_dim + 2 * head_dim)
  flops_of_pair = 2 * multiply_adds_of_pair
  assert model_flops - smallest_flops == num_additional_pairs * flops_of_pair


def test_each_layer_has_its_own_pairs_and_maps():
  """The layers are a plain one, one with a window, and one without.

  "fw" repeats: full attention, then a window of 4 tokens.
  """
  length = 16
  num_heads = 4
  num_noise_heads = 2
  head_dim = 6
  model = ModelConfig(
    num_layers=3,
    plain_layers=1,
    num_heads=num_heads,
    num_noise_heads=num_noise_heads,
    num_kv_heads=2,
    head_dim=head_dim,
    window=4,
    window_pattern="fw",
  )
  # Here each token sees only itself in every layer.
  smallest = dataclasses.replace(model, window=1, window_pattern="")

  difference = forward_flops(model, length) - forward_flops(smallest, length)

  # Pairs of different tokens. A window of 4 shows up to 3 earlier tokens.
  full_pairs = length * (length - 1) // 2
  windowed_pairs = 0 + 1 + 2 + 3 * (length - 3)
  # A plain layer has twice as many heads as DIFF, with values of head_dim.
  plain_maps = 2 * num_heads
  plain_layer = plain_maps * (head_dim + head_dim) * full_pairs
  # A DIFF layer has values of twice that width.
  diff_maps = num_heads + num_noise_heads
  windowed_layer = diff_maps * (head_dim + 2 * head_dim) * windowed_pairs
  full_layer = diff_maps * (head_dim + 2 * head_dim) * full_pairs
  flops_per_multiply_add = 2
  multiply_adds = plain_layer + windowed_layer + full_layer
  assert difference == flops_per_multiply_add * multiply_adds


# The papers.


@pytest.mark.parametrize(
  ("model", "expected"),
  [
    pytest.param(PAPER_1B, 6, id="DIFF"),
    pytest.param(PAPER_1B_SOFTMAX, 4, id="Transformer"),
  ],
)
def test_attention_has_the_flops_of_the_paper(model, expected):
  """Section 1 of the paper: a DIFF head has 6 N²d, its Transformer 4 N²d.

  The models are those with 1.4 billion parameters. Both are compared with
  models in which a token sees only itself, so that other products cancel.
  """
  length = 2048
  num_layers = 24
  num_diff_heads = 8
  head_dim = 128
  smallest_model = dataclasses.replace(model, window=1)

  attention_flops = forward_flops(model, length) - forward_flops(
    smallest_model, length
  )

  # A multiply-add is two FLOPs, and half of the N² pairs are causal.
  num_pairs_of_different_tokens = length * (length - 1) // 2
  n_squared = 2 * num_pairs_of_different_tokens
  assert attention_flops == (
    num_layers * num_diff_heads * expected * n_squared * head_dim
  )


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
  """The peak is for products in bfloat16. None means unknown."""
  assert flops.peak_flops(device_kind) == expected
