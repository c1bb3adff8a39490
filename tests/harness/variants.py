"""The attention variants that the tests of all parts of the package run."""

import dataclasses
from typing import Any, NamedTuple

from diffjax.config import ModelConfig
from diffjax.model.attention import ATTENTION


class Variant(NamedTuple):
  """What a layer of a variant looks like.

  Attributes:
    sizes: G, M and V / D.
    extra: the parameters that only some variants have, with their axes.
  """

  sizes: tuple[int, int, int]
  extra: dict[str, str]


# What the papers and posts say, independently of the code. A new variant needs
# no entry: its tests then take what its class says.
EXPECTED = {
  "diff": Variant(
    (2, 2, 2),
    {"lambda_q1": "D", "lambda_k1": "D", "lambda_q2": "D", "lambda_k2": "D"},
  ),
  "softmax": Variant((1, 1, 1), {}),
  "diff_v2": Variant((2, 1, 1), {"lambda_hat": "EH"}),
  "diff_v2_linear": Variant((2, 1, 1), {"lambda_hat": "EH"}),
  "diff_v2_gated": Variant((2, 1, 1), {"lambda_hat": "EH", "head_gate": "EHV"}),
  "diff_per_token": Variant((2, 2, 2), {"lambda_hat": "EH"}),
  "gated": Variant((1, 1, 1), {"head_gate": "EHV"}),
  "dex": Variant((1, 1, 1), {"dex_matrix": "VU", "dex_lambda": "H"}),
}


def declared(name: str) -> Variant:
  """Returns what the class of a variant says."""
  layer_class = ATTENTION[name]
  sizes = layer_class(num_heads=2, head_dim=8, parent=None).head_sizes()
  extra = {}
  for parameter_name, parameter in layer_class.extra_parameters.items():
    extra[parameter_name] = parameter.axes.removeprefix("L")
  return Variant((sizes.G, sizes.M, sizes.V // sizes.D), extra)


VARIANTS = {name: EXPECTED.get(name) or declared(name) for name in ATTENTION}


def supporting(*features: str) -> list[str]:
  """Returns the variants that support all of these features."""
  names = []
  for name, layer_class in ATTENTION.items():
    if layer_class.supports.issuperset(features):
      names.append(name)
  return names


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


def small_model(config: ModelConfig, name: str) -> ModelConfig:
  """Returns a small model of a variant.

  If its values are as wide as its keys, it has four heads, of which two share a
  key head. The Transformer is DIFF V1's twin, so each head has its own.

  Args:
    config: a small model of DIFF V1 with two heads.
    name: the variant.
  """
  if name == "diff":
    return config
  layer_class = ATTENTION[name]
  fields: dict[str, Any] = dict(attention=name, head_norm=layer_class.head_norm)
  if layer_class.value_dim_factor == 1:
    fields["num_heads"] = 4
    fields["num_kv_heads"] = 2
  if name == "softmax":
    fields["num_kv_heads"] = 4
  return dataclasses.replace(config, **fields)


def models(config: ModelConfig) -> dict[str, ModelConfig]:
  """Returns a small model of each variant, and two with shared noise maps.

  "public" is DIFF V1 with everything that public models add. "shared noise, V2"
  is DIFF V2 with a gate, values of another width, and windows in three layers
  of four.

  Args:
    config: a small model of DIFF V1 with two heads.
  """
  every = {name: small_model(config, name) for name in ATTENTION}
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
