"""Measures a finished run in a process of its own: python -m experiments.measure NAME GRID WORKDIR TRAINED (experiments.run calls it).

NAME is an experiment's name or the path of its folder. --import=MODULE imports a module first.
"""

from __future__ import annotations

import json
import pathlib
import sys

from diffjax.config import UserError, from_config_dict
from diffjax.evals.report.results import finite
from diffjax.host import runtime
from diffjax.model.registry import import_modules
from diffjax.training import manifest
from experiments import grid as grids
from experiments import imports


def main(name: str, grid: str, workdir: str, trained: str) -> None:
  """Writes what the experiment's `measure` finds as measured.json into the workdir; TRAINED is the workdir of the trained model."""
  runtime.keep_compiled_programs()
  experiment = grids.load(name, grid)
  assert experiment.measure is not None
  directory = pathlib.Path(workdir)
  config = from_config_dict(
    json.loads((directory / "config.json").read_text(encoding="utf-8"))
  )
  if (
    experiment.trains or experiment.pretrained
  ):  # a damaged checkpoint is passed over for an older one, which is another result
    path = manifest.checkpoint_directory(trained) / str(config.train.steps)
    try:
      manifest.verify(path, config.train.steps)
    except manifest.Damage as damage:
      raise UserError(
        f"{path} is damaged: {damage}; delete it, and run again to train its steps once more"
      ) from damage
  found = experiment.measure(trained, config)
  (directory / "measured.json").write_text(
    json.dumps(finite(found)) + "\n", encoding="utf-8"
  )


if __name__ == "__main__":
  try:
    modules, arguments = imports.split(sys.argv[1:])
    import_modules(modules)
    main(*arguments)
  except UserError as error:
    sys.exit(f"error: {error}")
