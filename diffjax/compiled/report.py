"""Prints the plan of a training step, and suggests how to reduce its memory."""

from __future__ import annotations

import collections
import math
import operator

from diffjax.compiled.estimate import EXPOSED, Estimate
from diffjax.compiled.hardware import TOPOLOGIES, Topology
from diffjax.compiled.plan import Plan, training_flops
from diffjax.config import Config
from diffjax.training import memory

_GIB = 2**30


def print_plan(config: Config, plan: Plan) -> None:
  """Prints memory, FLOPs, estimated time and communication of a step.

  Args:
    config: The run's config.
    plan: The plan of its training step.
  """
  axes = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
  print(
    f"{plan.chips} chips ({plan.device_kind}), mesh {axes};"
    f" compiled in {plan.seconds:.0f} s"
  )
  _print_memory(plan)
  _print_flops(config, plan)
  # If the compiler refused the step, there is no program.
  if plan.program:
    _print_estimate(plan)
    _print_program(plan)
    _print_received(plan)


def _print_memory(plan: Plan) -> None:
  """Prints the table of the memory."""
  print("memory, GiB a chip")
  for name, size in (
    ("parameters", plan.parameters),
    ("optimizer", plan.optimizer),
    ("batch", plan.batch),
    ("temporaries", plan.temporaries),
    ("program", plan.program),
  ):
    print(f"  {name:<12}{size / _GIB:>8.2f}")
  print(
    f"  {'total':<12}{plan.total / _GIB:>8.2f} of {plan.available / _GIB:.2f}"
  )


def _print_flops(config: Config, plan: Plan) -> None:
  """Prints the step's nominal FLOPs, and their time at the chip's peak."""
  flops = training_flops(config)
  note = ""
  if plan.peak_seconds:
    note = f"; {plan.peak_seconds:.3g} s at the chip's peak"
  print(
    f"FLOPs a step, nominal (without rematerialisation): {flops:.3g},"
    f" {flops / plan.chips:.3g} a chip{note}"
  )


def _print_estimate(plan: Plan) -> None:
  """Prints the table of the estimated time, and the bound on MFU.

  Without an estimate, it prints the reason.
  """
  title = "seconds a step, the compiler's estimate"
  if plan.estimate is None:
    reason = "there is none for this generation"
    if plan.unread:
      reason = f"the program has {plan.unread}"
    print(f"{title}: none, since {reason}")
    return

  print(f"{title} (cycles × iterations, which rank programs; not a time)")
  _print_parts(plan.estimate)
  note = ""
  if plan.kernels and not plan.estimate.has_kernels:
    note = " (without attention kernels, for whose shape there is no estimate)"
  print(f"  {'total':<24}{plan.estimate.seconds:>8.4f}{note}")
  print(f"bound on MFU, the compiler's estimate: {plan.mfu_bound:.1%}{note}")


def _print_parts(estimate: Estimate) -> None:
  """Prints the rows of the step's parts, those with most seconds first."""
  parts = sorted(
    estimate.parts.items(), key=operator.itemgetter(1), reverse=True
  )
  for part, seconds in parts:
    note = ""
    if part == EXPOSED:
      note = _describe_collectives(estimate)
    print(f"  {part:<24}{seconds:>8.4f}{note}")


def _describe_collectives(estimate: Estimate) -> str:
  """Returns a text with the share of the collectives' time that is exposed.

  Exposed is the time that no computation overlaps. The text also has the
  exposed seconds and all seconds of each kind.

  Example:
    ": 40% of all collectives; all-gather 0.1250 of 0.5000"
  """
  total = 0.0
  kinds = []
  for kind, seconds in sorted(estimate.collectives.items()):
    total += seconds.total
    kinds.append(f"{kind} {seconds.exposed:.4f} of {seconds.total:.4f}")
  share = estimate.parts[EXPOSED] / total
  return f": {share:.0%} of all collectives; {', '.join(kinds)}"


def _print_program(plan: Plan) -> None:
  """Prints how many windowed einsums and attention kernels there are."""
  if plan.windowed:
    print(
      f"windowed einsums: {plan.windowed}, products cut into loops over a"
      " parameter's shards; each is slow and rounds its partial sums"
    )
  kernels = []
  for name, count in collections.Counter(plan.kernels).items():
    if count > 1:
      kernels.append(f"{name} × {count}")
    else:
      kernels.append(name)
  print(f"attention kernels: {', '.join(kernels) or 'none'}")


def _print_received(plan: Plan) -> None:
  """Prints a table of received bytes, with a row for each set of mesh axes.

  Example of a row, for collectives along two axes together:
    data and fsdp      0.750: all-gather 0.250, all-reduce 0.500
  """
  note = ""
  if plan.unread:
    note = f": not counted, the program has {plan.unread}"
  print(f"received in a step, GiB a chip{note}")

  # The bytes by mesh axes, and then by kind of collective.
  sizes_by_axes: dict[tuple[str, ...], dict[str, float]] = {}
  for traffic, size in sorted(plan.received.items()):
    sizes_by_axes.setdefault(traffic.axes, {})[traffic.kind] = size
  for axes, sizes in sizes_by_axes.items():
    total = sum(sizes.values())
    kinds = [f"{kind} {size / _GIB:.3f}" for kind, size in sizes.items()]
    print(f"  {' and '.join(axes):<16}{total / _GIB:>8.3f}: {', '.join(kinds)}")


def changes(
  config: Config, topology: str, slices: int, plan: Plan
) -> list[str]:
  """Returns changes of the config or the topology that reduce the memory.

  Changes that reduce the larger part come first: the training state (parameters
  and optimizer), or the temporaries. A larger topology comes last.

  Args:
    config: The run's config.
    topology: Generation and chips of a slice, such as "v5e:4x4".
    slices: Number of such slices.
    plan: The plan of the step on these slices.
  """
  num_devices = math.prod(plan.mesh.values())
  state_changes = memory.flags_for_state(config, plan.mesh, slices)
  activation_changes = memory.flags_for_activations(config, num_devices)
  state_bytes = plan.parameters + plan.optimizer
  if state_bytes > plan.temporaries:
    suggestions = state_changes + activation_changes
  else:
    suggestions = activation_changes + state_changes
  larger_topology = _larger_topology(config, topology, slices, plan)
  if larger_topology is not None:
    suggestions.append(f"--topology={larger_topology}")
  if suggestions:
    return suggestions
  return [f"the config: {memory.SMALLER_MODEL}; or the generation of TPU"]


def _larger_topology(
  config: Config, topology: str, slices: int, plan: Plan
) -> str | None:
  """Returns the smallest larger topology with sufficient memory, if any.

  It assumes that the step needs the same memory on all chips together. Each
  device must get an equal number of the batch's rows.

  Args:
    config, topology, slices, plan: As in `changes`.
  """
  devices_per_chip = math.prod(plan.mesh.values()) // plan.chips
  needed_bytes = plan.total * plan.chips
  generation, _, shape = topology.partition(":")
  shapes = TOPOLOGIES[generation]
  # The shapes are sorted from small to large.
  larger_shapes = shapes[shapes.index(shape) + 1 :]
  for larger_shape in larger_shapes:
    larger_topology = f"{generation}:{larger_shape}"
    num_chips = Topology.parse(larger_topology).num_chips * slices
    num_devices = num_chips * devices_per_chip
    has_equal_rows = config.train.batch_size % num_devices == 0
    if has_equal_rows and needed_bytes <= plan.available * num_chips:
      return larger_topology
  return None
