"""The optimizer: AdamW or Muon, the learning rate, and skipping of bad steps.

Parameters are selected by name, according to the table in
diffjax/parameters.py, to which attention variants add their own. A parameter
that is not in the table raises an error.

`optax.contrib.muon` is not used directly, because it selects parameters by
rank. With stacked layers, it would orthogonalize the gains [L, E], which have
two axes, but not the matrices [L, E, F].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int
from optax.contrib import MuonDimensionNumbers

from diffjax.config import OptimizerConfig, UserError
from diffjax.parameters import PARAMETERS, is_matrix

# RMS of a Muon update. An AdamW update has about the same RMS, so both
# optimizers use the same learning rate and weight decay (Liu et al. 2025,
# arXiv:2502.16982).
_MUON_UPDATE_RMS = 0.2

# Metrics that are monitored for spikes, and their labels in messages. Arrays of
# shape [2] in this file hold one value for each, in this order.
_MONITORED = {"loss": "loss", "grad_norm": "gradient norm"}

# Weight of the newest step in the running averages of the monitored metrics.
# The weights have the same mean age as a window of 128 steps, which OLMo and
# Levanter use.
_EMA_WEIGHT = 2 / (128 + 1)

# Spike detection is inactive for this number of steps, as in OLMo and Levanter.
_MIN_STEPS_FOR_DETECTION = 64

# Lower bounds on the standard deviations, relative to the mean. The bound on
# the loss prevents skips on a plateau, where the loss hardly varies. The bound
# on the gradient norm is larger because healthy runs have bursts of up to twice
# the mean norm: with 6 sigmas, 1/6 puts the limit at twice the mean.
_MIN_RELATIVE_STD = (0.01, 1 / 6)


def make_optimizer(
  config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimizer of a run.

  It applies gradient clipping, Adam or Muon, decoupled weight decay and the
  learning rate, in this order.

  Bad steps are skipped. A step is bad if its loss or gradient norm is not
  finite, or is a spike: more than `config.spike_sigmas` standard deviations
  above the running mean. A skipped step changes neither parameters nor moments.
  `skip_metrics` returns how many steps were skipped. The schedule counts
  skipped steps too, so the learning rate of step n is always `schedule(n)`.

  Example:

  ```
  optimizer = make_optimizer(config, make_schedule(config, steps=1000))
  trained = trained_part(config, params)
  state = optimizer.init(trained)
  updates, state = optimizer.update(gradients, state, trained, value=loss)
  ```

  Args:
    config: `config.optimizer` of the run.
    schedule: The learning rate by step, from `make_schedule`.

  Returns:
    An optimizer of trees from `trained_part`. If `update` is called without
    `value`, only the gradient norm is monitored. `init` and `update` raise
    ValueError if they do not know the name of a parameter.
  """
  adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
  if config.name == "adamw":
    direction = adam
  elif config.name == "muon":
    transforms = {"muon": _scale_by_muon(config), "adam": adam}
    direction = optax.partition(transforms, _partition_labels)
  else:
    raise ValueError(
      f"config.optimizer.name = {config.name!r}: must be 'adamw' or 'muon'"
    )

  if config.clip_norm:
    clip = optax.clip_by_global_norm(config.clip_norm)
  else:
    clip = optax.identity()

  decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
  inner = optax.chain(clip, direction, decay)
  return optax.chain(
    _skip_bad_steps(inner, config.spike_sigmas),
    # Not part of `inner`, so that its step count includes skipped steps.
    optax.scale_by_learning_rate(schedule),
  )


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Returns the schedule of the learning rate.

  The learning rate rises linearly from 0 to its peak at step `warmup_steps`.
  It then falls to `final_fraction` of the peak at step `steps`. Steps count
  from 0 here: the last one is `steps - 1`, which the log calls `steps`. The
  fall is:

  - "linear": linear.
  - "cosine": half a period of a cosine.
  - "wsd" (warmup, stable, decay): constant, then linear for `decay_fraction` of
    the run.

  Args:
    config: `config.optimizer` of the run. If `warmup_steps` is larger than
      `steps`, the warmup takes the whole run and reaches the peak at its end.
    steps: The total number of updates.

  Returns:
    A function from the number of updates so far to the learning rate of the
    next one. It can be traced.
  """
  peak = config.learning_rate
  floor = config.learning_rate * config.final_fraction
  warmup_steps = min(config.warmup_steps, steps)
  # Optax requires at least one step.
  remaining_steps = max(steps - warmup_steps, 1)

  phases: list[optax.Schedule] = []
  # The steps at which the second phase and later ones begin.
  boundaries: list[int] = []
  if warmup_steps:
    phases.append(optax.linear_schedule(0.0, peak, warmup_steps))
    boundaries.append(warmup_steps)

  if config.schedule == "linear":
    phases.append(optax.linear_schedule(peak, floor, remaining_steps))
  elif config.schedule == "cosine":
    phases.append(
      optax.cosine_decay_schedule(
        peak, remaining_steps, alpha=config.final_fraction
      )
    )
  elif config.schedule == "wsd":
    decay_steps = round(steps * config.decay_fraction)
    decay_steps = min(max(decay_steps, 1), remaining_steps)
    decay_start = warmup_steps + remaining_steps - decay_steps
    phases.append(optax.constant_schedule(peak))
    boundaries.append(decay_start)
    phases.append(optax.linear_schedule(peak, floor, decay_steps))
  else:
    raise ValueError(
      f"config.optimizer.schedule = {config.schedule!r}:"
      " must be 'linear', 'cosine' or 'wsd'"
    )
  return optax.join_schedules(phases, boundaries)


def trained_part(config: OptimizerConfig, params: Any) -> Any:
  """Returns the parameters without the frozen ones, for the optimizer.

  Frozen parameters have no gradient and no moments. They do not contribute to
  the gradient norm and do not decay.

  Args:
    config: `config.optimizer` of the run.
    params: The tree of all parameters.

  Returns:
    A tree with the same keys. In place of each frozen parameter is an empty
    node, `optax.MaskedNode()`.

  Raises:
    UserError: if `config.frozen` or `config.trained` contains a name that is
      not in the table of parameters, or that the model does not have.
  """
  _check_names_in_model(config, params)
  frozen = frozen_names(config)
  if not frozen:
    return params

  def mask_if_frozen(path: tuple[Any, ...], leaf: Any) -> Any:
    if _parameter_name(path) in frozen:
      return optax.MaskedNode()
    return leaf

  return jax.tree_util.tree_map_with_path(mask_if_frozen, params)


def frozen_names(config: OptimizerConfig) -> frozenset[str]:
  """Returns the names of all parameters that are not trained.

  If `config.trained` is set, this includes every other name in the table of
  parameters, whether or not the model has such a parameter.

  Raises:
    UserError: if `config.frozen` or `config.trained` contains a name that is
      not in the table of parameters.
  """
  frozen = _names_in_field(config, "frozen")
  trained = _names_in_field(config, "trained")
  if trained:
    frozen |= PARAMETERS.keys() - trained
  return frozen


def with_frozen(part: Any, params: Any) -> Any:
  """Returns the trained parameters together with the frozen ones.

  This is the inverse of `trained_part`.

  Args:
    part: The trained parameters, a tree from `trained_part`.
    params: The tree of all parameters. The frozen ones are taken from it.
  """

  def is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)

  def merge(trained: Any, original: Any) -> Any:
    if is_masked(trained):
      return original
    return trained

  return jax.tree.map(merge, part, params, is_leaf=is_masked)


def decay_mask(params: Any) -> Any:
  """Returns a tree of bools: True for the layers' matrices, which decay.

  Args:
    params: The tree of parameters, or any tree with the same keys.

  Raises:
    ValueError: if a name is not in the table of parameters.
  """
  return _map_names(is_matrix, params)


def skip_metrics(before: Any, after: Any, sigmas: float) -> dict[str, Array]:
  """Returns the counts of skipped steps, and the limits that a step had.

  Args:
    before: The state of the optimizer before the step.
    after: The state of the optimizer after the step.
    sigmas: `config.optimizer.spike_sigmas` of the run.

  Returns:
    Scalars on the device:

    - "skipped_steps": Steps skipped since the run began, int32.
    - "skipped_in_a_row": Consecutive steps skipped up to this one, int32.
    - "loss_mean", "grad_norm_mean": The running means before the step, float32.
      Absent if `sigmas` is 0.
    - "loss_limit", "grad_norm_limit": Values above these are spikes, float32.
      Infinite while spike detection is inactive. Absent if `sigmas` is 0.
  """
  state_before = _find_skip_state(before)
  state_after = _find_skip_state(after)
  metrics = {
    "skipped_steps": state_after.skipped,
    "skipped_in_a_row": state_after.in_a_row,
  }
  if not sigmas:
    # Spikes are not detected.
    return metrics

  limits = _spike_limits(state_before, sigmas)
  for index, name in enumerate(_MONITORED):
    metrics[f"{name}_mean"] = state_before.mean[index]
    metrics[f"{name}_limit"] = limits[index]
  return metrics


def skip_reason(metrics: Mapping[str, float]) -> str:
  """Returns why a step was skipped, such as "gradient norm 14.2, limit 3.1".

  Args:
    metrics: "loss" and "grad_norm" of the step, and its `skip_metrics`.
  """
  for name, label in _MONITORED.items():
    value = metrics[name]
    if not math.isfinite(value):
      return f"{label} {value}"

  # Both metrics are finite, so one of them is above its limit, or both. The one
  # that is further above is the reason.
  loss_excess = metrics["loss"] / metrics["loss_limit"]
  norm_excess = metrics["grad_norm"] / metrics["grad_norm_limit"]
  name = "loss" if loss_excess >= norm_excess else "grad_norm"
  limit = metrics[f"{name}_limit"]
  return f"{_MONITORED[name]} {metrics[name]:.3g}, limit {limit:.3g}"


class SkipState(NamedTuple):
  """State of the wrapper that skips bad steps.

  It is part of the optimizer's state and therefore of checkpoints. A resumed
  run skips and counts the same steps as an uninterrupted run.

  Attributes:
    skipped: Number of skipped steps since the run began.
    in_a_row: Number of consecutive skipped steps up to the last step.
    seen: Number of steps with a finite loss and gradient norm. Only these enter
      the running averages.
    mean: Running means of the loss and of the gradient norm.
    variance: Running variances of the loss and of the gradient norm.
    inner: State of the wrapped optimizer.
  """

  skipped: Int[Array, ""]
  in_a_row: Int[Array, ""]
  seen: Int[Array, ""]
  mean: Float[Array, "2"]
  variance: Float[Array, "2"]
  inner: Any


def _skip_bad_steps(
  inner: optax.GradientTransformation, sigmas: float
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that bad steps do not change parameters or moments.

  In a bad step, the updates are zero and the state of `inner` stays the same.
  `make_optimizer` describes which steps are bad. `sigmas` is
  `config.spike_sigmas`. If it is 0, spikes are not detected.

  The value of a spike is clipped to the limit before it enters the running
  averages, so a single spike changes them little. After a lasting change of the
  loss or of the gradient norm, the averages adapt and the run stops skipping.

  `optax.apply_if_finite` is not used, because it applies an update after a
  number of non-finite ones, and because it does not monitor the loss.
  """

  def init(params: Any) -> SkipState:
    return SkipState(
      skipped=jnp.zeros((), jnp.int32),
      in_a_row=jnp.zeros((), jnp.int32),
      seen=jnp.zeros((), jnp.int32),
      mean=jnp.zeros(2, jnp.float32),
      variance=jnp.zeros(2, jnp.float32),
      inner=inner.init(params),
    )

  def update(
    gradients: Any,
    state: SkipState,
    params: Any = None,
    *,
    value: Float[Array, ""] | float = 0.0,
    **extra_args: Any,
  ) -> tuple[Any, SkipState]:
    del extra_args
    # Optax calls the loss `value`.
    loss = jnp.asarray(value, jnp.float32)
    # The norm is finite only if every element is. XLA computes it once for this
    # check and for clipping. If only the norm overflows, the step is also bad:
    # clipping would scale the gradient to zero.
    grad_norm = optax.tree.norm(gradients).astype(jnp.float32)
    measured = jnp.stack([loss, grad_norm])

    if sigmas:
      limits = _spike_limits(state, sigmas)
    else:
      limits = jnp.full(2, jnp.inf)
    is_finite: Bool[Array, ""] = jnp.all(jnp.isfinite(measured))
    is_good = is_finite & jnp.all(measured <= limits)

    updates, inner_state = inner.update(gradients, state.inner, params)
    updates = optax.tree.where(is_good, updates, optax.tree.zeros_like(updates))
    inner_state = optax.tree.where(is_good, inner_state, state.inner)

    # Limits the influence of a spike on the averages.
    clipped = jnp.minimum(measured, limits)
    mean, variance = _updated_averages(state, clipped)
    return updates, SkipState(
      skipped=jnp.where(is_good, state.skipped, state.skipped + 1),
      in_a_row=jnp.where(is_good, 0, state.in_a_row + 1),
      seen=state.seen + is_finite,
      mean=jnp.where(is_finite, mean, state.mean),
      variance=jnp.where(is_finite, variance, state.variance),
      inner=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init, update)


def _spike_limits(state: SkipState, sigmas: float) -> Float[Array, "2"]:
  """Returns the values above which the loss and the gradient norm are spikes.

  The limits are infinite while spike detection is inactive.
  """
  std = jnp.sqrt(state.variance)
  min_std = jnp.array(_MIN_RELATIVE_STD) * state.mean
  limits = state.mean + sigmas * jnp.maximum(std, min_std)
  # A limit of 0 means that every previous value was 0: batches of padding.
  is_inactive = (state.seen < _MIN_STEPS_FOR_DETECTION) | (limits <= 0)
  return jnp.where(is_inactive, jnp.inf, limits)


def _updated_averages(
  state: SkipState, values: Float[Array, "2"]
) -> tuple[Float[Array, "2"], Float[Array, "2"]]:
  """Returns the running mean and variance including the values of a step.

  With w = _EMA_WEIGHT, step n − i has the weight (1 − w)^i. The weights of n
  steps sum to (1 − (1 − w)^n) / w. The averages are divided by this sum, so the
  zeros in the initial state do not bias them.
  """
  num_steps = state.seen + 1
  # 1 − (1 − w)^n. The naive formula loses digits to cancellation.
  normalizer = -jnp.expm1(num_steps * math.log1p(-_EMA_WEIGHT))
  # The share of the newest step. It is 1 in the first step, except for
  # rounding.
  share = jnp.minimum(_EMA_WEIGHT / normalizer, 1.0)

  # The recurrence of the exponentially weighted mean and variance (Finch 2009,
  # "Incremental calculation of weighted mean and variance").
  deviation = values - state.mean
  mean = state.mean + share * deviation
  variance = (1 - share) * (state.variance + share * deviation**2)
  return mean, variance


def _find_skip_state(opt_state: Any) -> SkipState:
  """Returns the SkipState in the state of an optimizer."""

  def is_skip_state(node: Any) -> bool:
    return isinstance(node, SkipState)

  for node in jax.tree.leaves(opt_state, is_leaf=is_skip_state):
    if is_skip_state(node):
      return node
  raise ValueError("the state is not from an optimizer of `make_optimizer`")


def _check_names_in_model(config: OptimizerConfig, params: Any) -> None:
  """Raises UserError if the config freezes or trains what the model lacks."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  model_names = {_parameter_name(path) for path, _ in leaves}
  for field in ("frozen", "trained"):
    missing = _names_in_field(config, field) - model_names
    if missing:
      raise UserError(
        f"config.optimizer.{field}: this model has no {min(missing)!r};"
        f" it has {', '.join(sorted(model_names))}"
      )


def _names_in_field(config: OptimizerConfig, field: str) -> frozenset[str]:
  """Returns the parameter names in a comma-separated field of the config.

  Raises UserError if a name is not in the table of parameters.
  """
  entries = getattr(config, field).split(",")
  stripped = [entry.strip() for entry in entries]
  names = frozenset(name for name in stripped if name)
  unknown = names - PARAMETERS.keys()
  if unknown:
    raise UserError(
      f"config.optimizer.{field}: {min(unknown)!r} is no parameter;"
      f" there are {', '.join(PARAMETERS)}"
    )
  return names


def _parameter_name(path: tuple[Any, ...]) -> str:
  """Returns the name of a parameter: the last key of its path in the tree."""
  name = path[-1].key
  if name not in PARAMETERS:
    full_name = "/".join(entry.key for entry in path)
    raise ValueError(
      f"the optimizer does not know the parameter {full_name}:"
      " an attention variant declares it in extra_parameters"
    )
  return name


def _map_names(function: Callable[[str], Any], tree: Any) -> Any:
  """Returns a tree with `function(name)` in place of each parameter."""

  def apply(path: tuple[Any, ...], leaf: Any) -> Any:
    del leaf
    return function(_parameter_name(path))

  return jax.tree_util.tree_map_with_path(apply, tree)


def _partition_labels(params: Any) -> Any:
  """Returns a tree that labels each parameter with its optimizer."""

  def label(name: str) -> str:
    return "muon" if is_matrix(name) else "adam"

  return _map_names(label, params)


def _scale_by_muon(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns Muon, with updates that have the RMS of AdamW's updates."""

  # `optax.stateless` requires the second argument.
  def rescale(updates: Any, params: Any) -> Any:
    del params
    dimension_numbers = _muon_dimension_numbers(updates)
    return jax.tree.map(_to_adam_rms, updates, dimension_numbers)

  return optax.chain(
    optax.contrib.scale_by_muon(
      beta=config.muon_momentum,
      weight_dimension_numbers=_muon_dimension_numbers,
    ),
    optax.stateless(rescale),
  )


def _muon_dimension_numbers(updates: Any) -> Any:
  """Returns a tree with the MuonDimensionNumbers of each parameter."""
  return _map_names(_matrix_dimension_numbers, updates)


def _matrix_dimension_numbers(name: str) -> MuonDimensionNumbers:
  """Returns the axes of a parameter's inputs and outputs.

  Muon orthogonalizes the matrix from inputs to outputs. The heads of a layer
  form one matrix. The remaining axis 0 is the layer.
  """
  parameter = PARAMETERS[name]
  axes = parameter.axes
  return MuonDimensionNumbers(
    reduction_axis=tuple(axes.index(axis) for axis in parameter.inputs),
    output_axis=tuple(axes.index(axis) for axis in parameter.outputs),
  )


def _to_adam_rms(
  update: Float[Array, "L ..."], dimension_numbers: MuonDimensionNumbers
) -> Float[Array, "L ..."]:
  """Scales the orthogonal matrices of all layers to the RMS of AdamW."""
  reduction_axes, output_axes = dimension_numbers
  fan_in = math.prod(update.shape[axis] for axis in reduction_axes)
  fan_out = math.prod(update.shape[axis] for axis in output_axes)
  # An orthogonal [m, n] matrix has the RMS 1 / sqrt(max(m, n)).
  inverse_rms = max(fan_in, fan_out) ** 0.5
  return _MUON_UPDATE_RMS * inverse_rms * update
