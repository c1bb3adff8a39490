"""Flags that the commands share."""

from __future__ import annotations

import argparse

from benchmarks.tpu import cost
from benchmarks.tpu.case import SLICES


def make_parser(
  description: str | None, generations: list[str], timeout: float
) -> argparse.ArgumentParser:
  """Returns a parser with --generations and --timeout.

  Args:
    description: The docstring of the command.
    generations: The default generations.
    timeout: The default timeout, in seconds.
  """
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--generations",
    nargs="+",
    choices=SLICES,
    default=generations,
    help="chips to estimate; on a TPU, its own is measured",
  )
  parser.add_argument(
    "--timeout", type=float, default=timeout, help="seconds of an estimate"
  )
  return parser


def selected_generations(flags: argparse.Namespace) -> list[str]:
  """Returns the generations of the flags, or this machine's if it has a TPU."""
  if cost.on_tpu():
    return [cost.generation_here()]
  return flags.generations
