"""Compiles a run's training step for TPUs, without any TPU.

It prints the memory that the step needs, what limits its time, and whether it
fits. docs/estimates.md says what the memory and the time include.

    python -m diffjax.aot --config=configs/diff_1b.py --topology=v5e:4x4
    python -m diffjax.aot --config=configs/diff_13b.py --topology=v5p:4x4x4 \\
      --slices=2
    python -m diffjax.aot --config=configs/diff_1b.py --topology=v6e:4x4 --remat

It needs the TPU compiler, libtpu ('.[tpu]', Linux on x86-64). It exits with 1
if the step does not fit.
"""

from __future__ import annotations

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import dataclasses

from absl import app, flags

from diffjax.cli import command
from diffjax.compiled.plan import Plan, compile_plan
from diffjax.compiled.report import changes, print_plan
from diffjax.config import REMAT, Config, UserError

_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "Generation and chips of a slice, such as v5e:4x4 or v5p:4x4x4.",
)
_SLICES = flags.DEFINE_integer(
  "slices",
  1,
  "Slices of that topology, joined by the data-centre network.",
  lower_bound=1,
)
_REMAT = flags.DEFINE_bool(
  "remat",
  False,
  "Compare all values of config.model.remat, and name the quickest that fits.",
)

_GIB = 2**30


def main(config: Config) -> None:
  """Prints the memory and time of the config's training step on --topology.

  With --remat, it compares the values of config.model.remat instead.

  Raises:
    UserError: if the step does not fit.
  """
  topology = _TOPOLOGY.value
  num_slices = _SLICES.value
  if not topology:
    raise app.UsageError(
      "pass --topology=GENERATION:CHIPS, for example --topology=v5e:4x4"
    )
  if _REMAT.value:
    _compare_remat(config, topology, num_slices)
    return

  plan = compile_plan(config, topology, num_slices)
  print_plan(config, plan)
  if not plan.fits:
    suggestions = changes(config, topology, num_slices, plan)
    raise UserError(
      f"does not fit: {plan.total / _GIB:.2f} GiB of"
      f" {plan.available / _GIB:.2f} GiB a chip. Change"
      f" {'; or '.join(suggestions)}"
    )
  print("fits")


def _compare_remat(config: Config, topology: str, num_slices: int) -> None:
  """Compiles the step with each remat policy, and prints a table of them.

  A policy determines which activations are recomputed in the backward pass.
  Below the table, the quickest policy is named with which the step fits.

  Args:
    config: The run's config. Its own policy is ignored.
    topology: The value of --topology.
    num_slices: The value of --slices.

  Raises:
    UserError: if the step fits with no policy.
  """
  print(
    f"{'remat':<12}{'GiB a chip':>16}{'seconds a step':>18}{'bound on MFU':>15}"
    "  by the compiler's estimate"
  )
  costs: dict[str, float] = {}
  for policy in REMAT:
    model = dataclasses.replace(config.model, remat=policy)
    policy_config = dataclasses.replace(config, model=model)
    plan = compile_plan(policy_config, topology, num_slices)
    _print_row(policy, plan)
    if plan.fits:
      costs[policy] = _policy_cost(policy, plan)

  if not costs:
    raise UserError(
      "no policy fits; without --remat the command says what else would take"
      " less"
    )
  # Of policies with equal costs, the first one by name is chosen.
  quickest = min(sorted(costs), key=costs.__getitem__)
  print(f"quickest that fits: --config.model.remat={quickest}")


def _policy_cost(policy: str, plan: Plan) -> float:
  """Returns the cost of a step with a remat policy, for comparisons.

  It is the estimated time. Without an estimate, it is the position of the
  policy in `REMAT`, since later policies recompute more.
  """
  if plan.estimate is None:
    return float(REMAT.index(policy))
  return plan.estimate.seconds


def _print_row(policy: str, plan: Plan) -> None:
  """Prints the table's row of a policy: its memory, time and MFU."""
  memory = f"{plan.total / _GIB:.2f} of {plan.available / _GIB:.2f}"
  seconds = "none"
  mfu_bound = "none"
  if plan.estimate is not None:
    seconds = f"{plan.estimate.seconds:.4f}"
    mfu_bound = f"{plan.mfu_bound:.1%}"
  remark = "" if plan.fits else "  does not fit"
  print(
    f"{policy:<12}{memory:>16}{seconds:>18}{mfu_bound:>15}{remark}",
    flush=True,
  )


if __name__ == "__main__":
  command.run(main)
