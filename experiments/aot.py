"""Compiles the training steps of a study for TPUs that need not be attached."""

from __future__ import annotations

from diffjax.config import Config, UserError
from experiments.study import Study


def compile_variants(study: Study, topology: str) -> None:
  """Compiles each variant for a slice of TPUs, and prints table rows.

  The rows are on the variant's training step or, if the experiment has a
  `plan`, on the programs that it compiles.

  Args:
    study: The study. One run of each variant is compiled.
    topology: The slice, such as "v5p:4x4x4".

  Raises:
    UserError: if there is nothing to compile, or if a variant cannot be
      compiled for the topology; and, after the last row, if variants are too
      large.
  """
  experiment = study.experiment
  if not (experiment.trains or experiment.pretrained or experiment.plan):
    raise UserError(
      f"{study.name} takes no step of diffjax.train, so there is nothing to"
      " compile"
    )
  print(f"compiling for {topology}", flush=True)
  # Runs of a variant differ only in the seed.
  config_by_variant: dict[str, Config] = {}
  for run in study.chosen:
    config_by_variant.setdefault(run.variant, run.config)

  too_large = []
  is_first = True
  for variant, config in config_by_variant.items():
    try:
      if experiment.plan:
        rows = experiment.plan(config, topology)
      else:
        rows = [training_row(config, topology)]
    except UserError as error:
      raise UserError(f"{variant}: {error}") from error
    if is_first:
      columns = ["", *rows[0]]
      print(f"| {' | '.join(columns)} |")
      print("|---" * len(columns) + "|")
      is_first = False
    for row in rows:
      cells = [variant, *row.values()]
      print(f"| {' | '.join(cells)} |", flush=True)
    if any(row.get("fits") == "no" for row in rows):
      too_large.append(variant)

  if too_large:
    raise UserError(
      f"{', '.join(too_large)}: too large for {topology}; python -m diffjax.aot"
      " says how to reduce memory"
    )


def training_row(config: Config, topology: str) -> dict[str, str]:
  """Compiles a config's training step, and returns its table row.

  Args:
    config: The config.
    topology: The slice of TPUs.

  Returns:
    The memory, the FLOPs and the time of compilation, by the titles of the
    table.
  """
  from diffjax.compiled.plan import compile_plan
  from diffjax.model.flops import step_flops

  plan = compile_plan(config, topology)
  length = config.data.length
  tokens = config.train.batch_size * length
  flops = step_flops(config.model, length, tokens).training
  total_gib = plan.total / 2**30
  available_gib = plan.available / 2**30
  return {
    "GiB a chip": f"{total_gib:.2f} of {available_gib:.2f}",
    "fits": "yes" if plan.fits else "no",
    "FLOPs": f"{flops:.3g}",
    "compiled in": f"{plan.seconds:.0f} s",
  }
