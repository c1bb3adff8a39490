"""Compiles a run's training step for TPUs that are not there.

It prints the memory that the step needs, what bounds its time, and whether it
fits.

    python -m diffjax.aot --config=configs/diff_1b.py --topology=v5e:4x4
    python -m diffjax.aot --config=configs/diff_13b.py --topology=v5p:4x4x4 --slices=2
    python -m diffjax.aot --config=configs/diff_1b.py --topology=v6e:4x4 --remat

It needs the TPU's compiler, libtpu ('.[tpu]', Linux on x86-64), and no TPU. It exits with 1 if the step does not fit.
"""

if __name__ == "__main__":
  # Before the other imports, which take a while: Ctrl-C ends them too.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import dataclasses

from absl import app, flags

from diffjax.cli import command
from diffjax.compiled.plan import compile_apart
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


def main(config: Config) -> None:
  """Prints the plan for --topology."""
  if not _TOPOLOGY.value:
    raise app.UsageError(
      "pass --topology=GENERATION:CHIPS, for example --topology=v5e:4x4"
    )
  if _REMAT.value:
    _compare_remat(config, _TOPOLOGY.value, _SLICES.value)
    return
  plan = compile_apart(config, _TOPOLOGY.value, _SLICES.value)
  print_plan(config, plan)
  if not plan.fits:
    less = "; or ".join(changes(config, _TOPOLOGY.value, _SLICES.value, plan))
    raise UserError(
      f"does not fit: {plan.total / 2**30:.2f} GiB of {plan.available / 2**30:.2f} GiB a chip. Change {less}"
    )
  print("fits")


def _compare_remat(config: Config, topology: str, slices: int) -> None:
  """Prints a row a policy, from the most memory to the least, and the quickest that fits.

  Raises:
    UserError: if none fits.
  """
  print(
    f"{'remat':<12}{'GiB a chip':>16}{'seconds a step':>18}{'bound on MFU':>15}  by the compiler's estimate"
  )
  fitting: list[tuple[float, str]] = []
  for order, policy in enumerate(REMAT):
    of_policy = dataclasses.replace(
      config, model=dataclasses.replace(config.model, remat=policy)
    )
    plan = compile_apart(of_policy, topology, slices)
    estimated = (
      f"{plan.estimate.seconds:>18.4f}{plan.mfu_bound:>15.1%}"
      if plan.estimate
      else f"{'none':>18}{'none':>15}"
    )
    memory = f"{plan.total / 2**30:.2f} of {plan.available / 2**30:.2f}"
    print(
      f"{policy:<12}{memory:>16}{estimated}{'' if plan.fits else '  does not fit'}",
      flush=True,
    )
    if plan.fits:
      fitting.append(
        (plan.estimate.seconds if plan.estimate else order, policy)
      )
  if not fitting:
    raise UserError(
      "no policy fits; without --remat the command says what else would take less"
    )
  print(f"quickest that fits: --config.model.remat={min(fitting)[1]}")


if __name__ == "__main__":
  command.run(main)
