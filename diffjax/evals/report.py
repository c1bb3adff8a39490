"""One HTML page of a model, or of two beside each other: how they were trained, where they look, and what was measured.

The page holds all that it shows, scripts and pictures included, asks no network for anything (its own security policy forbids it), and
can be sent as a file. Measurements are those whose JSON files lie beside it; the attention maps are computed when it is made.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.figure
from etils import epath

from diffjax.config import UserError
from diffjax.evals import report_maps, results
from diffjax.training.trained import Trained

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light; --line: #d8dce3; --soft: #5b6472; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f27; background: #fff; max-width: 76rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p, figcaption { color: var(--soft); max-width: 60rem; } nav a { margin-right: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; } .wide { overflow-x: auto; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; } .bounds { color: var(--soft); font-size: .85em; }
.clear { font-weight: 700; } img { max-width: min(100%, 54rem); } figure { margin: .6rem 0; } .warning { color: #8a3b00; }
.maps { display: flex; flex-wrap: wrap; gap: 1rem; } .maps img { width: 20rem; height: 20rem; image-rendering: pixelated;
border: 1px solid var(--line); cursor: crosshair; } label { margin-right: 1rem; }
pre { white-space: pre-wrap; background: #f5f6f8; padding: .6rem; }
"""


@dataclasses.dataclass(frozen=True)
class Settings:
  """Of the page."""

  # Text whose attention maps are drawn; "" for the beginning of the validation text
  prompt: str = ""
  # Tokens of the maps, at most
  tokens: int = 96
  # Layers that are drawn, at most, evenly spaced from the first to the last
  layers: int = 6
  # Heads that are drawn, at most, from the first; their mean over all heads is drawn too
  heads: int = 4


def write(
  models: Sequence[tuple[Trained, Mapping[str, Any]]], settings: Settings, directory: epath.Path, suites: Sequence[str]
) -> epath.Path:
  """Makes the page.

  Args:
    models: one or two, each with its description as in the suites' results.
    settings: of the page.
    directory: where the suites' results are, and where the page goes, as report.html.
    suites: names of the suites, in the page's order.

  Returns:
    The page.

  Raises:
    UserError: if results cannot be read, a setting is out of range, or the page cannot be written.
  """
  described = [description for _, description in models]
  names = [str(description["name"]) for description in described]
  root = ET.Element("html", lang="en")
  head, body = ET.SubElement(root, "head"), ET.SubElement(root, "body")
  ET.SubElement(head, "meta", charset="utf-8")
  ET.SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
  ET.SubElement(head, "meta", name="viewport", content="width=device-width")
  ET.SubElement(head, "title").text = " and ".join(names)
  ET.SubElement(head, "style").text = _STYLE
  ET.SubElement(body, "h1").text = " and ".join(names)
  found = list(_results(directory, suites))
  sections = ["models", "training", "attention-maps", *(results["suite"] for results in found)]
  nav = ET.SubElement(body, "nav")
  for section in sections:
    ET.SubElement(nav, "a", href=f"#{section}").text = section.replace("-", " ").replace("_", " ")
  _models(_section(body, "models"), [model for model, _ in models], described)
  _training(_section(body, "training"), described)
  report_maps.add(_section(body, "attention-maps"), [model for model, _ in models], settings)
  for one in found:
    _measurement(_section(body, one["suite"]), one, names, directory)
  if missing := [name for name in suites if name not in {one["suite"] for one in found}]:
    ET.SubElement(body, "p").text = f"Not measured here: {', '.join(missing)}."
  path = directory / "report.html"
  temporary = directory / "report.html.tmp"
  try:
    temporary.write_text(f"<!doctype html>\n{ET.tostring(root, encoding='unicode', method='html')}\n")
    temporary.replace(path)
  except OSError as error:
    raise UserError(f"cannot write {path}: {error.strerror or error}") from error
  return path


def _section(body: ET.Element, name: str) -> ET.Element:
  section = ET.SubElement(body, "section", id=name)
  ET.SubElement(section, "h2").text = name.replace("-", " ").replace("_", " ").capitalize()
  return section


def _results(directory: epath.Path, suites: Sequence[str]) -> Iterator[dict[str, Any]]:
  """The suites' results that there are."""
  for suite in suites:
    path = directory / f"{suite}.json"
    if not path.exists():
      continue
    try:
      found = json.loads(path.read_text())
      ok = found["suite"] == suite and found["models"] and all("at" in row and "value" in row for row in found["figures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise UserError(f"{path} holds no results of a suite ({error}); measure again, or move it away") from error
    if not ok:
      raise UserError(f"{path} holds no results of the suite {suite}; measure again, or move it away")
    yield found


def _models(section: ET.Element, models: Sequence[Trained], described: Sequence[Mapping[str, Any]]) -> None:
  fields = ("attention", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_length")
  rows = [["", *(str(description["name"]) for description in described)]]
  rows.append(["parameters", *(f"{description['parameters']:,}" for description in described)])
  rows += [[field.replace("_", " "), *(str(getattr(model.config.model, field)) for model in models)] for field in fields]
  rows.append(["tokenizer", *(model.tokenizer.spec for model in models)])
  _table(section, rows)


def _training(section: ET.Element, described: Sequence[Mapping[str, Any]]) -> None:
  """Loss curves and λ by layer, as far as the runs have logs."""
  logs = {}
  for description in described:
    path = epath.Path(description["workdir"]) / "metrics.jsonl"
    if path.exists():
      logs[str(description["name"])] = list(_log(path))
    else:
      ET.SubElement(section, "p").text = f"{description['name']}: no metrics.jsonl in {description['workdir']}."
  if not logs:
    return
  figure = matplotlib.figure.Figure((9, 4), layout="constrained")
  axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
  for number, (name, lines) in enumerate(logs.items()):
    for metric, style, label in (("train/loss", "-", "training"), ("validation/loss", "o--", "validation")):
      steps, values = _series(lines, metric)
      if steps:
        axes.plot(steps, values, style, color=f"C{number}", label=f"{name}, {label}", markersize=4, linewidth=1)
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
  _picture(section, _svg(figure, "loss"), "Training and validation loss.", "loss curves")
  layered = {name: sorted({key for line in lines for key in line if key.startswith("lambda/layer_")}) for name, lines in logs.items()}
  with_lambda = {name: layers for name, layers in layered.items() if layers}
  if not with_lambda:
    return
  figure = matplotlib.figure.Figure((9, 3.5 * len(with_lambda)), layout="constrained")
  for axes, (name, layers) in zip(figure.subplots(len(with_lambda), 1, squeeze=False)[:, 0], with_lambda.items(), strict=True):
    for number, layer in enumerate(layers):
      color = matplotlib.colormaps["viridis"](number / max(len(layers) - 1, 1))
      axes.plot(*_series(logs[name], layer), color=color, linewidth=1, label=f"layer {int(layer.rpartition('_')[2])}")
    axes.set(title=name, xlabel="step", ylabel="λ")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=-(-len(layers) // 10), loc="center left", bbox_to_anchor=(1, 0.5))
  _picture(section, _svg(figure, "lambda"), "λ by layer over training (V2: the mean over tokens and heads).", "lambda by layer")


def _log(path: epath.Path) -> Iterator[dict[str, Any]]:
  for line in path.read_text().splitlines():
    try:
      parsed = json.loads(line)
    except ValueError:
      continue  # the last line of a run that was killed while it wrote
    if isinstance(parsed, dict) and "step" in parsed:
      yield parsed


def _series(lines: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
  points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
  return [step for step, _ in points], [value for _, value in points]


def _measurement(section: ET.Element, found: Mapping[str, Any], names: Sequence[str], directory: epath.Path) -> None:
  """A suite's plot and its table."""
  measured = [model["name"] for model in found["models"]]
  if measured != list(names):
    ET.SubElement(section, "p", {"class": "warning"}).text = f"Measured of {' and '.join(measured)}, not of this page's models."
  plot = directory / f"{found['suite']}.png"
  if plot.exists():
    _picture(section, _data("image/png", plot.read_bytes()), "", f"plot of {found['suite']}")
  places = list(dict.fromkeys(place for row in found["figures"] for place in row["at"]))
  both = len(measured) > 1
  table = ET.SubElement(ET.SubElement(section, "div", {"class": "wide"}), "table")
  header = ET.SubElement(ET.SubElement(table, "thead"), "tr")
  for cell in ["", *places, *measured, *["difference"] * both]:
    ET.SubElement(header, "th").text = cell
  rows = ET.SubElement(table, "tbody")
  for row in found["figures"]:
    line = ET.SubElement(rows, "tr")
    ET.SubElement(line, "td").text = row["name"]
    for place in places:
      ET.SubElement(line, "td").text = str(row["at"].get(place, ""))
    _cell(line, row)
    if both:
      _cell(line, row.get("against"))
      _cell(line, row.get("difference"), clear=results.excludes_zero(row.get("difference")))
  details = ET.SubElement(section, "details")
  ET.SubElement(details, "summary").text = "settings"
  ET.SubElement(details, "pre").text = json.dumps(found["settings"], indent=1, ensure_ascii=False)


def _cell(line: ET.Element, interval: Mapping[str, Any] | None, clear: bool = False) -> None:
  """A number with its bounds; bold where it is a difference that excludes 0."""
  value, _, bounds = results.number(interval).partition(" ")
  cell = ET.SubElement(line, "td", {"class": "clear"} if clear else {})
  cell.text = value
  if bounds:
    small = ET.SubElement(cell, "span", {"class": "bounds"})
    small.text = f" {bounds}"


def _table(section: ET.Element, rows: Sequence[Sequence[str]]) -> None:
  table = ET.SubElement(ET.SubElement(section, "div", {"class": "wide"}), "table")
  for index, cells in enumerate(rows):
    line = ET.SubElement(table, "tr")
    for cell in cells:
      ET.SubElement(line, "td" if index else "th").text = cell


def _picture(section: ET.Element, source: str, caption: str, name: str) -> None:
  figure = ET.SubElement(section, "figure")
  ET.SubElement(figure, "img", src=source, alt=name)
  if caption:
    ET.SubElement(figure, "figcaption").text = caption


def _svg(figure: matplotlib.figure.Figure, salt: str) -> str:
  """As the address of a picture, the same bytes for the same figure."""
  file = io.BytesIO()
  with matplotlib.rc_context({"svg.hashsalt": salt}):
    figure.savefig(file, format="svg", metadata={"Date": None})
  return _data("image/svg+xml", file.getvalue())


def _data(kind: str, content: bytes) -> str:
  return f"data:{kind};base64,{base64.b64encode(content).decode()}"
