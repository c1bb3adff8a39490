"""Measures a finished run in a process of its own.

    python -m experiments.measure NAME GRID WORKDIR TRAINED

experiments/execute.py starts it. NAME is an experiment's name or the path of
its folder, and TRAINED is the workdir of the trained model. --import=MODULE
imports a module first.
"""

from __future__ import annotations

import json
import pathlib
import sys

from diffjax.config import Config, UserError, from_config_dict
from diffjax.evals.report.results import finite
from diffjax.host import runtime
from diffjax.model.registry import import_modules
from diffjax.training import manifest
from experiments import grid, imports


def main(name: str, grid_name: str, workdir: str, trained: str) -> None:
  """Writes the results of the experiment's `measure` to measured.json.

  Args:
    name: The experiment's name, or the path of its folder.
    grid_name: The name of the run's grid.
    workdir: The run's workdir. It holds config.json, the run's config.
    trained: The workdir of the trained model.

  Raises:
    UserError: if the model's last checkpoint is damaged.
  """
  runtime.keep_compiled_programs()
  experiment = grid.load(name, grid_name)
  assert experiment.measure is not None
  directory = pathlib.Path(workdir)
  config_text = (directory / "config.json").read_text(encoding="utf-8")
  config = from_config_dict(json.loads(config_text))
  if experiment.trains or experiment.pretrained:
    _check_last_checkpoint(trained, config)
  measured = experiment.measure(trained, config)
  text = json.dumps(finite(measured))
  (directory / "measured.json").write_text(f"{text}\n", encoding="utf-8")


def _check_last_checkpoint(trained: str, config: Config) -> None:
  """Raises UserError if the checkpoint of the last step is damaged.

  Loading would use an older checkpoint instead, which has other results.
  """
  last_step = config.train.steps
  path = manifest.checkpoint_directory(trained) / str(last_step)
  try:
    manifest.verify(path, last_step)
  except manifest.Damage as damage:
    raise UserError(
      f"{path} is damaged: {damage}; delete it, and run again to train its"
      " steps once more"
    ) from damage


if __name__ == "__main__":
  try:
    modules, arguments = imports.split(sys.argv[1:])
    import_modules(modules)
    main(*arguments)
  except UserError as error:
    sys.exit(f"error: {error}")
