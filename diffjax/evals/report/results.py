"""Results of a suite, as JSON for other programs and as a table for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import rich.table
import rich.text
from etils import epath

from diffjax.config import UserError


def check_writable(directory: epath.Path) -> None:
  """Makes the directory and writes a file in it, before hours are spent on results that could not be kept.

  Raises:
    UserError: if that fails.
  """
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / ".writable"
    probe.write_text("", encoding="utf-8")
    probe.unlink()
  except OSError as error:
    raise UserError(
      f"cannot write results in {directory}: {error.strerror or error}; choose another place with --out=DIR"
    ) from error


def write(path: epath.Path, results: Mapping[str, Any]) -> None:
  """Writes results, from `finite`, as JSON, completely or not at all.

  Raises:
    UserError: if that fails.
  """
  temporary = path.parent / f"{path.name}.tmp"
  try:
    temporary.write_text(
      json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
      encoding="utf-8",
    )
    temporary.replace(path)
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error}"
    ) from error


def finite(value: Any) -> Any:
  """The value with None for numbers that are not finite, which JSON does not have."""
  if isinstance(value, Mapping):
    return {key: finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [finite(item) for item in value]
  return (
    None if isinstance(value, float) and not math.isfinite(value) else value
  )


def table(results: Mapping[str, Any]) -> rich.table.Table:
  """The figures of one model, or of two and their paired difference, with intervals. A difference whose interval excludes 0 is bold."""
  out = rich.table.Table(
    title=rich.text.Text(results["suite"]),
    title_justify="left",
    title_style="bold",
  )
  places = list(
    dict.fromkeys(name for row in results["figures"] for name in row["at"])
  )
  out.add_column("")
  for place in places:
    out.add_column(place, justify="right")
  for model in results["models"]:
    out.add_column(rich.text.Text(model["name"]), justify="right")
  if len(results["models"]) > 1:
    out.add_column("difference", justify="right")
  for row in results["figures"]:
    cells = [
      row["name"],
      *(str(row["at"].get(place, "")) for place in places),
      number(row),
    ]
    if len(results["models"]) > 1:
      cells += [number(row.get("against")), number(row.get("difference"))]
    styles = [
      "bold"
      if index == len(places) + 3 and excludes_zero(row.get("difference"))
      else ""
      for index in range(len(cells))
    ]
    out.add_row(
      *(
        rich.text.Text(cell, style)
        for cell, style in zip(cells, styles, strict=True)
      )
    )
  return out


def number(interval: Mapping[str, Any] | None) -> str:
  """An interval as text: its value and bounds. A dash stands for a missing value."""
  if interval is None or not _is_number(interval["value"]):
    return "–"
  if not (_is_number(interval["low"]) and _is_number(interval["high"])):
    return f"{interval['value']:.4g}"
  return (
    f"{interval['value']:.4g} [{interval['low']:.4g}, {interval['high']:.4g}]"
  )


def excludes_zero(interval: Mapping[str, Any] | None) -> bool:
  """True if an interval lies on one side of 0."""
  return (
    interval is not None
    and _is_number(interval["low"])
    and (interval["low"] > 0 or interval["high"] < 0)
  )


def _is_number(value: float | None) -> bool:
  return value is not None and math.isfinite(value)
