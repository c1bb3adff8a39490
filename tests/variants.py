"""The attention variants, a row each: what the tests of every room run over."""

import dataclasses
from typing import Any, NamedTuple

from diffjax.config import ModelConfig


class Variant(NamedTuple):
  """One layer of model/attention.py, as its author would say it, not as the code does.

  Attributes:
    sizes: G, M and V / D.
    extra: further parameters of a layer, with the letters of their axes.
    fields: of config.model, beside `attention`, in a small model of two or four heads.
  """

  sizes: tuple[int, int, int]
  extra: dict[str, str]
  fields: dict[str, Any]


# Four heads, of which two share a key head.
_GROUPED = dict(num_heads=4, num_kv_heads=2, head_norm=False)

VARIANTS = {
  "diff": Variant(
    (2, 2, 2),
    dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), "D"),
    {},
  ),
  "softmax": Variant(
    (1, 1, 1), {}, dict(num_heads=4, num_kv_heads=4, head_norm=False)
  ),
  "diff_v2": Variant((2, 1, 1), {"lambda_hat": "EH"}, _GROUPED),
  "diff_v2_linear": Variant((2, 1, 1), {"lambda_hat": "EH"}, _GROUPED),
  "diff_v2_gated": Variant(
    (2, 1, 1), {"lambda_hat": "EH", "head_gate": "EHV"}, _GROUPED
  ),
  "diff_per_token": Variant((2, 2, 2), {"lambda_hat": "EH"}, {}),
  "gated": Variant((1, 1, 1), {"head_gate": "EHV"}, _GROUPED),
  "dex": Variant((1, 1, 1), {"dex_matrix": "VU", "dex_lambda": "H"}, _GROUPED),
}


# What public models have beside their attention.
PUBLIC: dict[str, Any] = dict(
  plain_layers=1,
  window=9,
  window_pattern="wf",
  value_dim=12,
  rope_dim=4,
  rope_scaling="yarn",
  rope_factor=2.0,
  rope_original_length=16,
  projection_biases=True,
  norm="layer",
  ffn_activation="poly_norm",
  head_norm_eps=1e-3,
  lambda_init_offset=1,
  tie_embeddings=False,
)


def models(config: ModelConfig) -> dict[str, ModelConfig]:
  """A small DIFF V1 config, its like of every other variant, and two whose heads share noise maps: V1 with all that public models add, and
  V2 with a gate, values of another width and windows in three layers of four."""
  every = {
    name: dataclasses.replace(config, attention=name, **variant.fields)
    for name, variant in VARIANTS.items()
  }
  shared = dict(num_heads=4, num_noise_heads=2)
  public = dataclasses.replace(config, **shared, **PUBLIC)
  v2 = dict(
    attention="diff_v2_gated",
    head_norm=False,
    head_dim=12,
    value_dim=8,
    rope_dim=4,
    window=9,
    window_pattern="wwwf",
  )
  return every | {
    "public": public,
    "shared noise, V2": dataclasses.replace(config, **shared, **v2),
  }
