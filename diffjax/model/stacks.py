"""The stacks of equal layers that a decoder consists of."""

from __future__ import annotations

import dataclasses
import math

from diffjax.config import ModelConfig, UserError
from diffjax.model.attention import attention_class


def stacks(config: ModelConfig) -> dict[str, ModelConfig]:
  """Returns the stacks of equal layers in a decoder, the lowest first.

  The layers of a stack have equal configs and shapes, so that a scan can run
  them. `config.plain_layers` is the number of the lowest layers that have
  softmax attention. They are a stack, below the stack of the other layers. If
  it is 0, the decoder is one stack.

  Example: attention = "diff", num_layers = 12, plain_layers = 4 →
  {"plain_layers": a config with 4 softmax layers, "layers": a config with 8
  DIFF layers}

  Returns:
    The config of each stack, by the name of its parameters: "plain_layers" and
    "layers", or only "layers".

  Raises:
    UserError: if the layer class does not support the config.
  """
  layer_class = attention_class(config)
  num_plain_layers = config.plain_layers
  if num_plain_layers == 0:
    return {"layers": config}

  # The pattern continues from one stack to the next.
  window_pattern = _repeat_window_pattern(config)
  plain_stack = dataclasses.replace(
    config,
    attention="softmax",
    # Both stacks have the same total width of values: a head with V = 2D
    # (`value_dim_factor` = 2) becomes two heads with V = D.
    num_heads=config.num_heads * layer_class.value_dim_factor,
    num_kv_heads=config.num_kv_heads * layer_class.value_dim_factor,
    # Softmax layers have one map, no head norm and no λ.
    num_noise_heads=None,
    head_norm=False,
    lambda_init=None,
    lambda_init_offset=0,
    num_layers=num_plain_layers,
    plain_layers=0,
    window_pattern=window_pattern[:num_plain_layers],
  )
  upper_stack = dataclasses.replace(
    config,
    # λ_init of a layer is the schedule at (its index in the stack − offset).
    # Above 4 plain layers, the stack's layer 0 is the decoder's layer 4. So the
    # offset is −4.
    lambda_init_offset=config.lambda_init_offset - num_plain_layers,
    num_layers=config.num_layers - num_plain_layers,
    plain_layers=0,
    window_pattern=window_pattern[num_plain_layers:],
  )
  return {"plain_layers": plain_stack, "layers": upper_stack}


def is_supported(config: ModelConfig, feature: str) -> bool:
  """Returns whether all layers of a decoder support a feature.

  Args:
    config: the decoder's config.
    feature: one of `diffjax.model.attention.FEATURES`.
  """
  for stack in stacks(config).values():
    if feature not in attention_class(stack).supports:
      return False
  return True


def check_support(config: ModelConfig, feature: str, option: str) -> None:
  """Checks that all layers of a decoder support a feature.

  Args:
    config: the decoder's config.
    feature: one of `diffjax.model.attention.FEATURES`.
    option: the option that needs it, with its value, for the error message.

  Raises:
    UserError: if the attention variant does not declare that it supports it.
  """
  if is_supported(config, feature):
    return
  layer_class = attention_class(config)
  raise UserError(
    f"{option}: config.model.attention = {config.attention!r} does not declare"
    f" that it supports {feature}; if it does, add {feature!r} to"
    f" {layer_class.__name__}.supports"
  )


def _repeat_window_pattern(config: ModelConfig) -> str:
  """Returns the window pattern, repeated until it covers every layer.

  The result may be longer. Example: "wf" for 3 layers → "wfwf"
  """
  if not config.window_pattern:
    return ""
  repeats = math.ceil(config.num_layers / len(config.window_pattern))
  return config.window_pattern * repeats
