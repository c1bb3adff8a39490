"""AdamW or Muon, its schedule and its limits.

Every parameter is treated by its name, in two tables below. A name in neither is an error: optax's Muon, left alone, takes every
2-D array for a matrix, so that with stacked layers the gains [L, E] are orthogonalised and the matrices [L, E, F] are not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int
from optax.contrib import MuonDimensionNumbers

from diffjax.config import OptimizerConfig

# Matrices of the layers, with the axes that each one sums over and those it writes to; what is left, axis 0, is the layer.
# They decay, and they are what Muon orthogonalises: one matrix a layer, whatever the number of heads.
_MATRICES = {
  "query": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3, 4)),  # [L, E, H, G, D]
  "key": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3, 4)),  # [L, E, K, M, D]
  "value": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),  # [L, E, K, V]
  "out": MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3),  # [L, H, V, E]
  "lambda_hat": MuonDimensionNumbers(reduction_axis=1, output_axis=2),  # [L, E, H]
  "gate": MuonDimensionNumbers(reduction_axis=1, output_axis=2),  # [L, E, F]
  "up": MuonDimensionNumbers(reduction_axis=1, output_axis=2),  # [L, E, F]
  "down": MuonDimensionNumbers(reduction_axis=1, output_axis=2),  # [L, F, E]
}

# Embeddings, gains and λ vectors: AdamW without weight decay.
_OTHERS = frozenset(
  {"embedding", "unembedding", "final_norm", "attention_norm", "ffn_norm", "head_gain", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}
)

# RMS of Muon's update, near AdamW's own, so that one learning rate and one weight decay serve both (Liu et al. 2025, arXiv:2502.16982).
_MUON_RMS = 0.2


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
  """Clip → Adam or Muon direction → decoupled weight decay → learning rate, with non-finite steps skipped.

  A step whose gradient's global norm (or whose loss, if the caller passes it as `update(…, value=loss)`) is not finite changes no
  parameter and no moment, and is counted: see `skipped_steps`. The schedule follows the step, skipped or not, so that the
  learning rate of step n is `make_schedule(config, steps)(n)` in every run.

  Args:
    config: The run's `config.optimizer`.
    steps: Updates in all, which the schedule ends with.

  Returns:
    The optimizer. Its `init` and `update` raise ValueError for a parameter whose name they do not know.
  """
  adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
  if config.name == "muon":
    muon = optax.chain(
      optax.contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=_muon_axes),
      optax.stateless(lambda updates, _: jax.tree.map(_to_adam_rms, updates, _muon_axes(updates))),
    )
    direction = optax.partition({"muon": muon, "adam": adam}, _labels)
  elif config.name == "adamw":
    direction = adam
  else:
    raise ValueError(f"no optimizer is called {config.name!r}")
  return optax.chain(
    _skip_non_finite(
      optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
      )
    ),
    optax.scale_by_learning_rate(make_schedule(config, steps)),
  )


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate by step: linear warmup from 0, then linear, cosine or wsd down to `final_fraction` of the peak.

  The peak is reached at step `warmup_steps`, and the floor at step `steps`, which is the first one that training does not take.

  Args:
    config: The run's `config.optimizer`.
    steps: Updates in all.

  Returns:
    A function of the step (updates taken before it) that may be traced.
  """
  peak, floor = config.learning_rate, config.learning_rate * config.final_fraction
  left = max(steps - config.warmup_steps, 1)
  parts: list[optax.Schedule]
  starts: list[int]
  if config.schedule == "linear":
    parts, starts = [optax.linear_schedule(peak, floor, left)], []
  elif config.schedule == "cosine":
    parts, starts = [optax.cosine_decay_schedule(peak, left, alpha=config.final_fraction)], []
  elif config.schedule == "wsd":
    decay = min(max(round(steps * config.decay_fraction), 1), left)
    parts, starts = [optax.constant_schedule(peak), optax.linear_schedule(peak, floor, decay)], [config.warmup_steps + left - decay]
  else:
    raise ValueError(f"no schedule is called {config.schedule!r}")
  if config.warmup_steps:
    parts, starts = [optax.linear_schedule(0.0, peak, config.warmup_steps), *parts], [config.warmup_steps, *starts]
  return optax.join_schedules(parts, starts)


def decay_mask(params: Any) -> Any:
  """Which parameters decay, by name.

  Args:
    params: The tree of parameters, or of anything in their places.

  Returns:
    The same tree of bools: True for the layers' matrices.

  Raises:
    ValueError: for a name that this file does not know.
  """
  return jax.tree_util.tree_map_with_path(lambda path, _: _name(path) in _MATRICES, params)


def skipped_steps(opt_state: Any) -> Int[Array, ""]:
  """Steps left out so far because their gradient or loss was not finite.

  Args:
    opt_state: State of an optimizer that `make_optimizer` made.

  Returns:
    Their number, as an int32 scalar on the device.
  """
  states = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, SkipState))
  (state,) = [state for state in states if isinstance(state, SkipState)]
  return state.skipped


class SkipState(NamedTuple):
  """State of the wrapper that skips: in the optimizer's state, so that a resumed run counts on."""

  # Steps skipped since the run began
  skipped: Int[Array, ""]
  # The wrapped optimizer's state
  inner: Any


def _skip_non_finite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Replaces the update by zeros, and keeps the state, where the gradient's norm or the loss is not finite.

  Not optax.apply_if_finite: that one gives in after a number of such steps, and does not see the loss.
  """

  def init(params):
    return SkipState(jnp.zeros((), jnp.int32), inner.init(params))

  def update(gradients, state, params=None, *, value: Float[Array, ""] | float = 0.0, **extra):
    del extra
    # The norm, not each element: XLA shares it with the clip, and a norm that overflows would clip every gradient to zero anyway.
    finite: Bool[Array, ""] = jnp.isfinite(optax.global_norm(gradients)) & jnp.isfinite(value)
    updates, inner_state = inner.update(gradients, state.inner, params)
    updates = jax.tree.map(lambda new: jnp.where(finite, new, jnp.zeros_like(new)), updates)
    inner_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner_state, state.inner)
    return updates, SkipState(state.skipped + (~finite).astype(jnp.int32), inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _name(path: tuple[Any, ...]) -> str:
  name = path[-1].key
  if name not in _MATRICES and name not in _OTHERS:
    raise ValueError(
      f"the optimizer does not know the parameter {'/'.join(key.key for key in path)}: "
      "add its name to _MATRICES or _OTHERS in diffjax/training/optimizer.py"
    )
  return name


def _labels(params: Any) -> Any:
  return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if _name(path) in _MATRICES else "adam", params)


def _muon_axes(updates: Any) -> Any:
  return jax.tree_util.tree_map_with_path(lambda path, _: _MATRICES[_name(path)], updates)


def _to_adam_rms(update: Float[Array, "L ..."], axes: MuonDimensionNumbers) -> Float[Array, "L ..."]:
  # An orthogonal [m, n] matrix has an RMS of 1/√max(m, n).
  fans = [math.prod(update.shape[axis] for axis in ((side,) if isinstance(side, int) else side)) for side in axes]
  return _MUON_RMS * max(fans) ** 0.5 * update
