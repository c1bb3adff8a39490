"""Measures a finished run in a process of its own: python -m experiments.measure NAME WORKDIR (experiments.run calls it)."""

from __future__ import annotations

import json
import pathlib
import sys

from diffjax.config import UserError
from diffjax.training import runtime
from diffjax.training.trained import load
from experiments import grid


def main(name: str, workdir: str) -> None:
  """Writes what the experiment's `measure` finds as measured.json into the workdir."""
  runtime.keep_compiled_programs()
  experiment = grid.load(name)
  assert experiment.measure is not None
  found = experiment.measure(workdir, load(workdir).config)
  (pathlib.Path(workdir) / "measured.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
  try:
    main(*sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
