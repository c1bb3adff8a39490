"""Measures a finished run in a process of its own: python -m experiments.measure NAME GRID WORKDIR TRAINED (experiments.run calls it)."""

from __future__ import annotations

import json
import pathlib
import sys

from diffjax.command import from_config_dict
from diffjax.config import UserError
from diffjax.training import runtime
from experiments import grid as grids


def main(name: str, grid: str, workdir: str, trained: str) -> None:
  """Writes what the experiment's `measure` finds as measured.json into the workdir; TRAINED is the workdir of the trained model."""
  runtime.keep_compiled_programs()
  experiment = grids.load(name, grid)
  assert experiment.measure is not None
  directory = pathlib.Path(workdir)
  found = experiment.measure(trained, from_config_dict(json.loads((directory / "config.json").read_text())))
  (directory / "measured.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  try:
    main(*sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
