"""The report: one HTML page of a model or of two, with how they were trained, where they look and what was measured.

The page holds all that it shows, scripts and pictures included. Its own security policy forbids requests, so it can be sent as a file.
Measurements come from the JSON files beside the page; the attention maps are computed when the page is made. page.html is its template.
"""

from __future__ import annotations

import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from diffjax.config import UserError
from diffjax.evals.report import curves, maps, results
from diffjax.evals.report.elements import Html, data_address, drawing, element, escape, picture, table
from diffjax.evals.report.maps import Settings
from diffjax.training.trained import Trained

__all__ = ["Settings", "write"]

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
# Fields of config.model in the table of models.
_SIZES = ("attention", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_length")


def write(
  models: Sequence[tuple[Trained, Mapping[str, Any]]], settings: Settings, directory: epath.Path, suites: Sequence[str]
) -> epath.Path:
  """Makes the page.

  Args:
    models: one or two, each with its description as in the suites' results.
    settings: of the attention maps.
    directory: holds the suites' results; the page is written there, as report.html.
    suites: names of the suites, in the page's order.

  Returns:
    The page.

  Raises:
    UserError: if results cannot be read, a setting is out of range, or the page cannot be written.
  """
  trained, described = [model for model, _ in models], [description for _, description in models]
  names = [str(description["name"]) for description in described]
  measured = _results(directory, suites)
  prompt, panels = maps.draw(trained, settings)
  page = string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
    title=escape(" and ".join(names)),
    links=Html().join(element("a", _title(name), href=f"#{name}") for name in ("models", "training", "attention-maps", *measured)),
    models=_models(trained, described),
    training=_training(described),
    clipped=maps.CLIPPED,
    prompt=escape(prompt),
    panels="\n".join(panels),
    measurements="\n".join([*(_measurement(found, names, directory) for found in measured.values()), _missing(measured, suites)]),
  )
  path = directory / "report.html"
  temporary = directory / "report.html.tmp"
  try:
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
  except OSError as error:
    raise UserError(f"cannot write {path}: {error.strerror or error}") from error
  return path


def _title(name: str) -> str:
  return name.replace("-", " ").replace("_", " ")


def _results(directory: epath.Path, suites: Sequence[str]) -> dict[str, dict[str, Any]]:
  """The results of each suite that has any."""
  measured = {}
  for suite in suites:
    path = directory / f"{suite}.json"
    if not path.exists():
      continue
    try:
      found = json.loads(path.read_text(encoding="utf-8"))
      ok = found["suite"] == suite and found["models"] and all("at" in row and "value" in row for row in found["figures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise UserError(f"{path} holds no results of a suite ({error}); measure again, or move it away") from error
    if not ok:
      raise UserError(f"{path} holds no results of the suite {suite}; measure again, or move it away")
    measured[suite] = found
  return measured


def _models(models: Sequence[Trained], described: Sequence[Mapping[str, Any]]) -> Html:
  """Sizes and tokenizers."""
  rows = [["", *(str(description["name"]) for description in described)]]
  rows.append(["parameters", *(f"{description['parameters']:,}" for description in described)])
  rows += [[_title(field), *(str(getattr(model.config.model, field)) for model in models)] for field in _SIZES]
  rows.append(["tokenizer", *(model.tokenizer.spec for model in models)])
  return table(rows)


def _training(described: Sequence[Mapping[str, Any]]) -> Html:
  """Curves of the runs that have logs."""
  logs, parts = {}, []
  for description in described:
    path = epath.Path(description["workdir"]) / "metrics.jsonl"
    if path.exists():
      logs[str(description["name"])] = curves.read_log(path)
    else:
      parts.append(element("p", f"{description['name']}: no metrics.jsonl in {description['workdir']}."))
  if logs:
    parts.append(picture(drawing(curves.loss_curves(logs), "loss"), "loss curves", "Training and validation loss."))
  if (figure := curves.lambda_curves(logs)) is not None:
    caption = "λ by layer over training (V2: the mean over tokens and heads)."
    parts.append(picture(drawing(figure, "lambda"), "lambda by layer", caption))
  return Html("\n".join(parts))


def _measurement(found: Mapping[str, Any], names: Sequence[str], directory: epath.Path) -> Html:
  """The section of a suite: its plot, its table and its settings."""
  suite, measured = found["suite"], [model["name"] for model in found["models"]]
  parts = [element("h2", _title(suite).capitalize())]
  if measured != list(names):
    parts.append(element("p", f"Measured of {' and '.join(measured)}, not of this page's models.", class_="warning"))
  plot = directory / f"{suite}.png"
  if plot.exists():
    parts.append(picture(data_address("image/png", plot.read_bytes()), f"plot of {suite}"))
  parts.append(_figures(found, measured))
  settings = json.dumps(found["settings"], indent=1, ensure_ascii=False)
  parts.append(element("details", element("summary", "settings"), element("pre", settings)))
  return element("section", *parts, id=suite)


def _figures(found: Mapping[str, Any], measured: Sequence[str]) -> Html:
  """The table of a suite's figures: of each model and, for two, their difference, which is bold where its interval excludes 0."""
  places = list(dict.fromkeys(place for row in found["figures"] for place in row["at"]))
  both = len(measured) > 1
  rows: list[list[str | tuple[str, str]]] = [["", *places, *measured, *["difference"] * both]]
  for row in found["figures"]:
    cells = [row["name"], *(str(row["at"].get(place, "")) for place in places), _number(row)]
    if both:
      difference = _number(row.get("difference"))
      cells += [_number(row.get("against")), (difference, "clear") if results.excludes_zero(row.get("difference")) else difference]
    rows.append(cells)
  return table(rows)


def _number(interval: Mapping[str, Any] | None) -> Html:
  """A number with its bounds in small type."""
  value, _, bounds = results.number(interval).partition(" ")
  return Html(escape(value) + (element("span", f" {bounds}", class_="bounds") if bounds else ""))


def _missing(measured: Mapping[str, Any], suites: Sequence[str]) -> Html:
  missing = [name for name in suites if name not in measured]
  return element("p", f"Not measured here: {', '.join(missing)}.") if missing else Html()
