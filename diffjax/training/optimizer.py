"""AdamW or Muon, its schedule and its limits.

Every parameter is treated by its name, as the table of parameters says. An unknown name is an error: optax's Muon, left alone, takes every
2-D array for a matrix, so that with stacked layers the gains [L, E] are orthogonalised and the matrices [L, E, F] are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int
from optax.contrib import MuonDimensionNumbers

from diffjax.config import OptimizerConfig, UserError
from diffjax.parameters import PARAMETERS, is_matrix

# RMS of Muon's update, near AdamW's own, so that one learning rate and one weight decay serve both (Liu et al. 2025, arXiv:2502.16982).
_MUON_RMS = 0.2

# A spike is measured against averages that give step n − i the weight (1 − _NEWEST)^i. Their mean age is that of a plain window of 128
# steps, as OLMo and Levanter use. Like theirs, spike detection is inactive for the first 64 steps.
_NEWEST = 2 / 129
_INACTIVE = 64
# The measured quantities: the names of their metrics, and words for messages.
_MEASURED = {"loss": "loss", "grad_norm": "gradient norm"}
# Lower bounds of their standard deviations, as shares of the mean. On a plateau of nearly equal losses noise must not count as a spike. Nor
# must, at 6 σ, a gradient of less than twice the mean norm: healthy runs of small variance have bursts of those.
_LEAST_DEVIATION = (0.01, 1 / 6)


def make_optimizer(
  config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
  """Clip → Adam or Muon direction → decoupled weight decay → learning rate, with non-finite and spiking steps skipped.

  A step is skipped if its gradient's global norm (or its loss, if the caller passes it as `update(…, value=loss)`) is not finite, or lies
  more than `config.spike_sigmas` standard deviations above its running mean. A skipped step changes no parameter and no moment, and is
  counted: see `skip_metrics`. A spike enters the means as if it lay at that limit. A single one moves them little, but after a lasting
  change of the loss or the gradients the means follow, and the run stops skipping. The schedule counts skipped steps too, so that the
  learning rate of step n is `schedule(n)` in every run.

  Args:
    config: The run's `config.optimizer`.
    schedule: Its learning rate by step, of `make_schedule`.

  Returns:
    The optimizer, of the trees that `trained_part` returns. Its `init` and `update` raise ValueError for a parameter whose name they do not
    know.
  """
  adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
  if config.name == "muon":
    muon = optax.chain(
      optax.contrib.scale_by_muon(
        beta=config.muon_momentum, weight_dimension_numbers=_muon_axes
      ),
      optax.stateless(
        lambda updates, _: jax.tree.map(
          _to_adam_rms, updates, _muon_axes(updates)
        )
      ),
    )
    direction = optax.partition({"muon": muon, "adam": adam}, _labels)
  elif config.name == "adamw":
    direction = adam
  else:
    raise ValueError(f"no optimizer is called {config.name!r}")
  return optax.chain(
    _skip_bad_steps(
      optax.chain(
        optax.clip_by_global_norm(config.clip_norm)
        if config.clip_norm
        else optax.identity(),
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
      ),
      config.spike_sigmas,
    ),
    optax.scale_by_learning_rate(schedule),
  )


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate by step: linear warmup from 0, then linear, cosine or wsd down to `final_fraction` of the peak.

  The peak is reached at step `warmup_steps`, and the floor at step `steps`, which is the first one that training does not take. A warmup
  longer than the run is cut to its steps.

  Args:
    config: The run's `config.optimizer`.
    steps: Updates in all.

  Returns:
    A function of the step (updates taken before it) that may be traced.
  """
  peak, floor = (
    config.learning_rate,
    config.learning_rate * config.final_fraction,
  )
  warmup = min(config.warmup_steps, steps)
  left = max(steps - warmup, 1)
  parts: list[optax.Schedule]
  starts: list[int]
  if config.schedule == "linear":
    parts, starts = [optax.linear_schedule(peak, floor, left)], []
  elif config.schedule == "cosine":
    parts, starts = (
      [optax.cosine_decay_schedule(peak, left, alpha=config.final_fraction)],
      [],
    )
  elif config.schedule == "wsd":
    decay = min(max(round(steps * config.decay_fraction), 1), left)
    parts, starts = (
      [
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, floor, decay),
      ],
      [warmup + left - decay],
    )
  else:
    raise ValueError(f"no schedule is called {config.schedule!r}")
  if warmup:
    parts, starts = (
      [optax.linear_schedule(0.0, peak, warmup), *parts],
      [warmup, *starts],
    )
  return optax.join_schedules(parts, starts)


def trained_part(config: OptimizerConfig, params: Any) -> Any:
  """The parameters that are trained. The frozen ones have no gradient, no moments and no part in the norm, and they do not decay.

  Args:
    config: The run's `config.optimizer`.
    params: The tree of parameters.

  Returns:
    The same tree, with an empty node in place of each frozen parameter.

  Raises:
    UserError: if config.frozen or config.trained has a name that is not a parameter's, or that the model lacks.
  """
  here = {
    _name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
  }
  for field in ("frozen", "trained"):
    if missing := _names(config, field) - here:
      raise UserError(
        f"config.optimizer.{field}: this model has no {min(missing)!r}; it has {', '.join(sorted(here))}"
      )
  frozen = frozen_names(config)
  keep = lambda path, leaf: (
    optax.MaskedNode() if _name(path) in frozen else leaf
  )
  return jax.tree_util.tree_map_with_path(keep, params) if frozen else params


def frozen_names(config: OptimizerConfig) -> frozenset[str]:
  """The names of all parameters, of this model or another, that `config` does not train.

  Raises:
    UserError: if config.frozen or config.trained has a name that is not a parameter's.
  """
  frozen, trained = _names(config, "frozen"), _names(config, "trained")
  return frozen | (PARAMETERS.keys() - trained) if trained else frozen


def with_frozen(part: Any, params: Any) -> Any:
  """The whole tree again: a trained part, and from `params` what it leaves out."""
  empty = lambda node: isinstance(node, optax.MaskedNode)
  return jax.tree.map(
    lambda node, leaf: leaf if empty(node) else node,
    part,
    params,
    is_leaf=empty,
  )


def decay_mask(params: Any) -> Any:
  """A tree that marks the parameters that decay, by name.

  Args:
    params: The tree of parameters, or of anything in their places.

  Returns:
    The same tree of bools: True for the layers' matrices.

  Raises:
    ValueError: for a name that the table of parameters does not have.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, _: is_matrix(_name(path)), params
  )


def skip_metrics(before: Any, after: Any, sigmas: float) -> dict[str, Array]:
  """The counts of skipped steps, and the means and limits that a step was measured against.

  Args:
    before: State of an optimizer that `make_optimizer` made, before the step.
    after: The same after it.
    sigmas: The run's `config.optimizer.spike_sigmas`.

  Returns:
    Scalars on the device: "skipped_steps" since the run began and "skipped_in_a_row" up to now (int32); and, unless sigmas is 0,
    the running means "loss_mean" and "grad_norm_mean" and the limits "loss_limit" and "grad_norm_limit" (float32) that the step was
    measured against; the limits are infinite while spike detection is inactive.
  """
  old, new = _skip_state(before), _skip_state(after)
  metrics = {"skipped_steps": new.skipped, "skipped_in_a_row": new.in_a_row}
  for index, name in enumerate(_MEASURED if sigmas else ()):
    metrics |= {
      f"{name}_mean": old.mean[index],
      f"{name}_limit": _limit(old, sigmas)[index],
    }
  return metrics


def skip_reason(metrics: Mapping[str, float]) -> str:
  """Returns why a step was skipped, such as "gradient norm 14.2, limit 3.1".

  Args:
    metrics: The step's "loss" and "grad_norm", and its `skip_metrics`.
  """
  for name, words in _MEASURED.items():
    if not math.isfinite(metrics[name]):
      return f"{words} {metrics[name]}"
  loss_excess = metrics["loss"] / metrics["loss_limit"]
  norm_excess = metrics["grad_norm"] / metrics["grad_norm_limit"]
  name = "loss" if loss_excess >= norm_excess else "grad_norm"
  limit = metrics[f"{name}_limit"]
  return f"{_MEASURED[name]} {metrics[name]:.3g}, limit {limit:.3g}"


class SkipState(NamedTuple):
  """State of the wrapper that skips steps: part of the optimizer's state, so that a resumed run skips and counts as an unbroken one."""

  # Steps skipped since the run began
  skipped: Int[Array, ""]
  # Steps skipped since the last step that was not
  in_a_row: Int[Array, ""]
  # Steps that the means count: all whose loss and gradient were finite
  seen: Int[Array, ""]
  # Running mean and variance of the loss and of the gradient's norm
  mean: Float[Array, "2"]
  variance: Float[Array, "2"]
  # The wrapped optimizer's state
  inner: Any


def _skip_state(opt_state: Any) -> SkipState:
  states = jax.tree.leaves(
    opt_state, is_leaf=lambda node: isinstance(node, SkipState)
  )
  (state,) = [state for state in states if isinstance(state, SkipState)]
  return state


def _limit(state: SkipState, sigmas: float) -> Float[Array, "2"]:
  """The limits above which the loss and the norm are spikes."""
  limit = state.mean + sigmas * jnp.maximum(
    jnp.sqrt(state.variance), jnp.array(_LEAST_DEVIATION) * state.mean
  )
  return jnp.where(
    (state.seen < _INACTIVE) | (limit <= 0), jnp.inf, limit
  )  # a limit of 0: every loss or norm so far was 0


def _skip_bad_steps(
  inner: optax.GradientTransformation, sigmas: float
) -> optax.GradientTransformationExtraArgs:
  """Replaces the update by zeros, and keeps the state, where the gradient's norm or the loss is not finite or a spike.

  optax.apply_if_finite does not serve: it takes the step after a number of non-finite ones, and it does not see the loss.
  """

  def init(params):
    zero, zeros = jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.float32)
    return SkipState(zero, zero, zero, zeros, zeros, inner.init(params))

  def update(
    gradients,
    state,
    params=None,
    *,
    value: Float[Array, ""] | float = 0.0,
    **extra,
  ):
    del extra
    # The norm decides, not each element: XLA shares it with the clip, and a norm that overflows would clip every gradient to zero anyway.
    measured = jnp.stack(
      [
        jnp.asarray(value, jnp.float32),
        optax.tree.norm(gradients).astype(jnp.float32),
      ]
    )
    finite: Bool[Array, ""] = jnp.all(jnp.isfinite(measured))
    limit = _limit(state, sigmas) if sigmas else jnp.full(2, jnp.inf)
    take = finite & jnp.all(measured <= limit)
    updates, inner_state = inner.update(gradients, state.inner, params)
    updates = jax.tree.map(
      lambda new: jnp.where(take, new, jnp.zeros_like(new)), updates
    )
    # The newest step's share of the weights so far. With it the mean and the variance below are weighted without a bias.
    share = jnp.minimum(
      _NEWEST / -jnp.expm1((state.seen + 1) * math.log1p(-_NEWEST)), 1.0
    )
    away = jnp.minimum(measured, limit) - state.mean
    new = SkipState(
      skipped=state.skipped + ~take,
      in_a_row=jnp.where(take, 0, state.in_a_row + 1),
      seen=state.seen + finite,
      mean=jnp.where(finite, state.mean + share * away, state.mean),
      variance=jnp.where(
        finite, (1 - share) * (state.variance + share * away**2), state.variance
      ),
      inner=jax.tree.map(
        lambda new, old: jnp.where(take, new, old), inner_state, state.inner
      ),
    )
    return updates, new

  return optax.GradientTransformationExtraArgs(init, update)


def _names(config: OptimizerConfig, field: str) -> frozenset[str]:
  names = frozenset(
    filter(None, (name.strip() for name in getattr(config, field).split(",")))
  )
  if unknown := names - PARAMETERS.keys():
    raise UserError(
      f"config.optimizer.{field}: {min(unknown)!r} is no parameter; there are {', '.join(PARAMETERS)}"
    )
  return names


def _name(path: tuple[Any, ...]) -> str:
  name = path[-1].key
  if name not in PARAMETERS:
    raise ValueError(
      f"the optimizer does not know the parameter {'/'.join(key.key for key in path)}: an attention variant declares it in extra_parameters"
    )
  return name


def _labels(params: Any) -> Any:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: "muon" if is_matrix(_name(path)) else "adam", params
  )


def _muon_axes(updates: Any) -> Any:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: _sides(_name(path)), updates
  )


def _sides(name: str) -> MuonDimensionNumbers:
  """The axes that a matrix sums over and those it writes to. What is left, axis 0, is the layer: one matrix a layer, whatever the heads."""
  parameter = PARAMETERS[name]
  inputs, outputs = (
    tuple(parameter.axes.index(axis) for axis in side)
    for side in (parameter.inputs, parameter.outputs)
  )
  return MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)


def _to_adam_rms(
  update: Float[Array, "L ..."], axes: MuonDimensionNumbers
) -> Float[Array, "L ..."]:
  # An orthogonal [m, n] matrix has an RMS of 1/√max(m, n).
  fans = [math.prod(update.shape[axis] for axis in side) for side in axes]
  return _MUON_RMS * max(fans) ** 0.5 * update
