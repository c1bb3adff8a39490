"""A plan in words: memory, traffic, the estimate of a step's time, and what would take less."""

from __future__ import annotations

import collections
import math

from diffjax.compiled.plan import TOPOLOGIES, Plan
from diffjax.config import Config
from diffjax.model.flops import step_flops
from diffjax.training import memory
from diffjax.training.optimizer import frozen_names


def print_plan(config: Config, plan: Plan) -> None:
  """Prints what a config's training step takes."""
  axes = " × ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
  print(
    f"{plan.chips} chips ({plan.device_kind}), mesh {axes}; compiled in {plan.seconds:.0f} s"
  )
  print("memory, GiB a chip")
  for name in (
    "parameters",
    "optimizer",
    "batch",
    "temporaries",
    "program",
    "total",
  ):
    print(
      f"  {name:<12}{getattr(plan, name) / 2**30:>8.2f}{f' of {plan.available / 2**30:.2f}' if name == 'total' else ''}"
    )
  tokens = config.train.batch_size * config.data.length
  flops = step_flops(
    config.model, config.data.length, tokens, frozen_names(config.optimizer)
  ).training
  print(
    f"FLOPs a step, nominal (without rematerialisation): {flops:.3g}, {flops / plan.chips:.3g} a chip",
    end="",
  )
  print(
    f"; {plan.peak_seconds:.3g} s at the chip's peak"
    if plan.peak_seconds
    else ""
  )
  if plan.program:
    _report_estimate(plan)
    if plan.windowed:
      print(
        f"windowed einsums: {plan.windowed}, products cut into loops over a parameter's shards; each is slow and rounds its partial sums"
      )
    kernels = [
      f"{name}{f' × {count}' if count > 1 else ''}"
      for name, count in collections.Counter(plan.kernels).items()
    ]
    print(f"attention kernels: {', '.join(kernels) or 'none'}")
    print(
      f"received in a step, GiB a chip{f': not counted, the program has {plan.unread}' if plan.unread else ''}"
    )
    for crossed in sorted({crossed for crossed, _ in plan.received}):
      kinds = {
        kind: size
        for (axes_of_kind, kind), size in sorted(plan.received.items())
        if axes_of_kind == crossed
      }
      parts = ", ".join(
        f"{kind} {size / 2**30:.3f}" for kind, size in kinds.items()
      )
      print(
        f"  {' and '.join(crossed):<16}{sum(kinds.values()) / 2**30:>8.3f}: {parts}"
      )


def _report_estimate(plan: Plan) -> None:
  if plan.estimate is None:
    print(
      "seconds a step, the compiler's estimate: none, since "
      + (
        f"the program has {plan.unread}"
        if plan.unread
        else "there is none for this generation"
      )
    )
    return
  print(
    "seconds a step, the compiler's estimate (cycles × iterations, which rank programs; not a time)"
  )
  for part, seconds in sorted(
    plan.estimate.parts.items(), key=lambda entry: -entry[1]
  ):
    note = ""
    if part == "exposed collectives":
      whole = sum(whole for whole, _ in plan.estimate.collectives.values())
      shown = ", ".join(
        f"{kind} {shown:.4f} of {whole:.4f}"
        for kind, (whole, shown) in sorted(plan.estimate.collectives.items())
      )
      note = f": {seconds / whole:.0%} of all collectives; {shown}"
    print(f"  {part:<24}{seconds:>8.4f}{note}")
  without = (
    " (without attention kernels, for whose shape there is no estimate)"
    if plan.kernels and not plan.estimate.has_kernels
    else ""
  )
  print(f"  {'total':<24}{plan.estimate.seconds:>8.4f}{without}")
  print(f"bound on MFU, the compiler's estimate: {plan.mfu_bound:.1%}{without}")


def changes(
  config: Config, topology: str, slices: int, plan: Plan
) -> list[str]:
  """Changes of the config or the topology that would take less memory. Those of the kind that dominates come first.

  Args:
    config: the run's config.
    topology: generation and chips of a slice: "v5e:4x4".
    slices: number of such slices.
    plan: of the step there.
  """
  devices = math.prod(plan.mesh.values())
  state, activations = (
    memory.flags_for_state(config, plan.mesh, slices),
    memory.flags_for_activations(config, devices),
  )
  found = (
    state + activations
    if plan.parameters + plan.optimizer > plan.temporaries
    else activations + state
  )
  generation, _, shape = topology.partition(":")
  for larger in TOPOLOGIES[generation][
    TOPOLOGIES[generation].index(shape) + 1 :
  ]:
    factor = math.prod(map(int, larger.split("x"))) * slices / plan.chips
    if (
      plan.total <= factor * plan.available
      and config.train.batch_size % (devices * factor) == 0
    ):
      found.append(f"--topology={generation}:{larger}")
      break
  return found or [
    f"the config: {memory.SMALLER_MODEL}; or the generation of TPU"
  ]
