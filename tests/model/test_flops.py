"""FLOPs equal what XLA counts, parameter counts are the paper's."""

import dataclasses

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
PAPER_1B = ModelConfig(
  vocab_size=100_288,
  num_layers=24,
  embed_dim=2048,
  num_heads=8,
  num_kv_heads=8,
  head_dim=128,
  ffn_dim=5440,
)


def by_hand(attention):
  """Matrix products of a layer and of the vocabulary, as einsum over shapes; FLOPs by XLA's own count, attention uncut by the mask."""
  G, M, wide = VARIANTS[attention].sizes
  E, H, K, D, F, N, B, T = 32, 4, 2, 6, 40, 96, 2, 16
  V = wide * D
  products = [
    ("bte,ehgd->bthgd", (B, T, E), (E, H, G, D)),
    ("bte,ekmd->btkmd", (B, T, E), (E, K, M, D)),
    ("bte,ekv->btkv", (B, T, E), (E, K, V)),
    ("bthv,hve->bte", (B, T, H, V), (H, V, E)),
    ("bte,ef->btf", (B, T, E), (E, F)),
    ("bte,ef->btf", (B, T, E), (E, F)),
    ("btf,fe->bte", (B, T, F), (F, E)),
  ]
  size = dict(E=E, H=H, K=K, G=G, M=M, D=D, V=V)
  size |= ATTENTION[attention].extra_axes
  for axes in VARIANTS[attention].extra.values():
    if "E" in axes:  # a matrix
      outputs = axes.replace("E", "").lower()
      products.append(
        (
          f"bte,{axes.lower()}->bt{outputs}",
          (B, T, E),
          tuple(size[axis] for axis in axes),
        )
      )
    elif axes == "VU":  # one that every head's output goes through
      products.append(("bthv,vu->bthu", (B, T, H, V), (V, V)))
  pairs = [
    ("bthgd,bshgd->bhgts", (B, T, H, G, D), (B, T, H, G, D)),
    ("bhgts,bshv->bthgv", (B, H, G, T, T), (B, T, H, V)),
  ]
  if not ATTENTION[attention].fused:  # The values times the sum of the maps.
    pairs[1] = ("bhts,bshv->bthv", (B, H, T, T), (B, T, H, V))

  def xla(product):
    equation, left, right = product
    shapes = [
      jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (left, right)
    ]
    analysis = (
      jax.jit(lambda a, b: jnp.einsum(equation, a, b))
      .lower(*shapes)
      .compile()
      .cost_analysis()
    )
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]

  layer = sum(map(xla, products)) + sum(map(xla, pairs)) * (T + 1) / (
    2 * T
  )  # causal: T(T+1)/2 of T² pairs
  return 3 * layer + xla(("bte,ne->btn", (B, T, E), (N, E)))


@pytest.mark.parametrize("attention", VARIANTS)
def test_flops_equal_xlas_count_of_the_matrix_products(attention):
  model = ModelConfig(attention=attention, **SMALL)
  counted = flops.step_flops(model, length=16, tokens=32)
  assert counted.forward == pytest.approx(by_hand(attention), rel=1e-6)
  assert counted.training == 3 * counted.forward


def test_a_frozen_matrix_has_no_gradient_to_compute():
  """One of its three products; a tied embedding's, of the vocabulary, too. Names that the model lacks, gains and vectors count nothing."""
  model = ModelConfig(attention="dex", plain_layers=1, **SMALL)
  whole = flops.step_flops(model, 16, 32)
  frozen = flops.step_flops(
    model,
    16,
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
  left_out = 3 * 32 * 4 * 6 + 96 * 32 + 2 * 4 * 6 * 6
  assert frozen == (whole.forward, whole.training - 2 * 32 * left_out)


@pytest.mark.parametrize(
  "causal, window",
  [(True, 5), (True, 16), (True, 99), (False, None), (False, 5), (False, 99)],
)
def test_only_visible_pairs_count(causal, window):
  distance = np.subtract.outer(np.arange(16), np.arange(16))
  visible = ((distance >= 0) | (not causal)) & (abs(distance) < (window or 16))
  plain, masked = (
    ModelConfig(**SMALL),
    ModelConfig(causal=causal, window=window, **SMALL),
  )
  pair = 2 * SMALL["num_layers"] * SMALL["num_heads"] * 2 * (6 + 12)
  without = flops.step_flops(plain, 16, 16).forward - pair * 16 * 17 // 2
  assert (
    flops.step_flops(masked, 16, 16).forward == without + pair * visible.sum()
  )


def test_each_layer_counts_its_own_pairs_and_maps():
  """Grouped noise has 6 maps instead of 8 in a layer, a plain layer 8 of half the value width; a full layer of 16 tokens 136 pairs."""
  model = ModelConfig(
    num_noise_heads=2, plain_layers=1, window=4, window_pattern="fw", **SMALL
  )
  without = dataclasses.replace(model, window=1, window_pattern="")
  first, second, third = 8 * (6 + 6), 6 * (6 + 12), 6 * (6 + 12)
  extra = (
    flops.step_flops(model, 16, 16).forward
    - flops.step_flops(without, 16, 16).forward
  )
  assert extra == 2 * (
    first * (136 - 16) + second * (58 - 16) + third * (136 - 16)
  )


def test_the_sigmoid_costs_nothing():
  v2, linear = (
    ModelConfig(attention=attention, **SMALL)
    for attention in ("diff_v2", "diff_v2_linear")
  )
  assert flops.step_flops(v2, 16, 32) == flops.step_flops(
    linear, 16, 32
  ) and flops.parameter_count(v2) == flops.parameter_count(linear)


def test_attention_costs_what_the_paper_says():
  # paper.md §1: 6 N²d multiply-adds a DIFF head against 4 of its Transformer twin, before the causal half; same projections.
  model = dataclasses.replace(PAPER_1B, lambda_init=None)
  twin = dataclasses.replace(
    model, attention="softmax", num_heads=16, num_kv_heads=16, head_norm=False
  )
  T, pairs = 2048, 2048 * 2049 // 2
  core = 24 * 8 * 128 * 2 * pairs
  diff, softmax = (
    flops.step_flops(model, T, T).forward,
    flops.step_flops(twin, T, T).forward,
  )
  assert diff - softmax == (6 - 4) * core
  without = 2 * T * (24 * (4 * 2048**2 + 3 * 2048 * 5440) + 100_288 * 2048)
  assert softmax - without == 4 * core


@pytest.mark.parametrize(
  "size, billions",
  [
    (dict(embed_dim=1536, num_heads=8, head_dim=96, ffn_dim=4096), 0.8335),
    (dict(), 1.410),
    (dict(embed_dim=2560, num_layers=32, num_heads=10, ffn_dim=6912), 2.794),
    (dict(embed_dim=4096, num_layers=32, num_heads=16, ffn_dim=10880), 6.837),
    (dict(embed_dim=5120, num_layers=40, num_heads=20, ffn_dim=13696), 13.123),
    (dict(embed_dim=3072, num_layers=28, num_heads=12, ffn_dim=8192), 3.479),
  ],
)
def test_parameter_counts_are_the_papers(size, billions):
  model = dataclasses.replace(PAPER_1B, **size)
  model = dataclasses.replace(model, num_kv_heads=model.num_heads)
  assert flops.parameter_count(model) == pytest.approx(billions * 1e9, rel=5e-4)
  twin = dataclasses.replace(
    model,
    attention="softmax",
    num_heads=2 * model.num_heads,
    num_kv_heads=2 * model.num_heads,
    head_norm=False,
  )
  extra = model.num_layers * (4 * model.head_dim + 2 * model.head_dim)
  assert flops.parameter_count(model) - flops.parameter_count(twin) == extra


def test_parameter_count_of_v2_and_untied():
  # paper.md §3: V2 has one more E × E and E × h a layer, 1.515B at 1.4B's widths.
  v2 = dataclasses.replace(
    PAPER_1B,
    attention="diff_v2",
    num_heads=16,
    num_kv_heads=16,
    head_norm=False,
  )
  assert flops.parameter_count(v2) == pytest.approx(1.511e9, rel=5e-3)
  twin = dataclasses.replace(v2, attention="softmax")
  assert flops.parameter_count(v2) - flops.parameter_count(twin) == 24 * (
    2048 * 2048 + 2048 * 16
  )
  assert (
    flops.parameter_count(dataclasses.replace(v2, tie_embeddings=False))
    - flops.parameter_count(v2)
    == 100_288 * 2048
  )


@pytest.mark.parametrize(
  "kind, peak",
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
def test_peak_flops(kind, peak):
  assert flops.peak_flops(kind) == peak
