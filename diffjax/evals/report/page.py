"""The report: one HTML page of a model or of two, with what differs, how they were trained, where they look and what was measured.

The page holds all that it shows, scripts and pictures included. Its own security policy forbids requests, so it can be sent as a file.
Measurements come from the JSON files beside the page; the attention maps are computed when the page is made. page.html is its template.

The pictures in docs/images are the maps.png that this writes and the page's first screen, of the tiny pair:

    python -m diffjax.evaluate --suite=report --workdir=runs/tiny --against=runs/tiny_transformer \\
      --set.report.prompt=$'def area(width, height):\\n  return width * height'
    python tests/evals/report/browser.py runs/tiny/evals/report.html --width=1200 --height=880 --screenshot=docs/images/report.png
"""

from __future__ import annotations

import importlib
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from diffjax.config import UserError
from diffjax.evals import SUITES
from diffjax.evals.report import curves, maps, plots, results, summary
from diffjax.evals.report.elements import (
  Html,
  data_address,
  drawing,
  element,
  escape,
  number,
  picture,
  table,
)
from diffjax.evals.report.maps import Settings, check
from diffjax.host.files import write_atomically
from diffjax.inference.trained import Trained
from diffjax.plots.curves import loss_curves
from diffjax.plots.styles import Style
from diffjax.training.metrics import read_log

__all__ = ["Settings", "check", "write"]

_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
# Fields of config.model in the table of models.
_SIZES = (
  "attention",
  "num_layers",
  "embed_dim",
  "num_heads",
  "num_kv_heads",
  "head_dim",
  "ffn_dim",
  "vocab_size",
  "max_length",
)


def write(
  models: Sequence[tuple[Trained, Mapping[str, Any]]],
  settings: Settings,
  directory: epath.Path,
  suites: Sequence[str],
) -> epath.Path:
  """Makes the page, and maps.png: the attention maps of one head of the first model that has a noise map.

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
  trained, described = (
    [model for model, _ in models],
    [description for _, description in models],
  )
  styles = plots.styles_of(described)
  names = [style.name for style in styles]
  measured = _results(directory, suites)
  own = {
    suite: found
    for suite, found in measured.items()
    if _measures(found, described)
  }
  prompt, computed = maps.compute(trained, settings)
  path = directory / "report.html"
  try:
    chosen = _chosen_maps(computed, names, directory / "maps.png")
    page = string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
      title=escape(" and ".join(names)),
      links=Html().join(
        element("a", _title(name), href=f"#{name}")
        for name in ("training", "attention-maps", *measured, "models")
      ),
      compared=_compared(trained, described, styles),
      first=summary.first_screen(own, styles),
      training=_training(described, styles),
      clipped=maps.CLIPPED,
      chosen=chosen,
      prompt=escape(prompt),
      panels="\n".join(
        maps.panel(each, name, settings)
        for each, name in zip(computed, names, strict=True)
      ),
      measurements="\n".join(
        [
          *(
            _measurement(found, described, directory)
            for found in measured.values()
          ),
          _missing(measured, suites),
        ]
      ),
      models=_models(trained, described, names),
    )
    write_atomically(path, page)
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error}"
    ) from error
  return path


def _title(name: str) -> str:
  return name.replace("-", " ").replace("_", " ").replace("nll", "NLL")


def _results(
  directory: epath.Path, suites: Sequence[str]
) -> dict[str, dict[str, Any]]:
  """The results of each suite that has any."""
  measured = {}
  for suite in suites:
    path = directory / f"{suite}.json"
    if not path.exists():
      continue
    try:
      found = json.loads(path.read_text(encoding="utf-8"))
      ok = (
        found["suite"] == suite
        and found["models"]
        and all("at" in row and "value" in row for row in found["figures"])
      )
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise UserError(
        f"{path} holds no results of a suite ({error}); measure again, or move it away"
      ) from error
    if not ok:
      raise UserError(
        f"{path} holds no results of the suite {suite}; measure again, or move it away"
      )
    measured[suite] = found
  return measured


def _measures(
  found: Mapping[str, Any], described: Sequence[Mapping[str, Any]]
) -> bool:
  """Whether results are of the page's models."""
  return [model["name"] for model in found["models"]] == [
    description["name"] for description in described
  ]


def _compared(
  models: Sequence[Trained],
  described: Sequence[Mapping[str, Any]],
  styles: Sequence[Style],
) -> Html:
  """What each model is, in a line."""
  lines = []
  for model, description, style in zip(models, described, styles, strict=True):
    key = element(
      "span", style.name, class_="key", style=f"--key:{style.color}"
    )
    lines.append(
      element(
        "p",
        Html(
          f"{key} {escape(description['name'])}, {description['parameters']:,} parameters, {model.tokenizer.spec}"
        ),
      )
    )
  return Html("\n".join(lines))


def _models(
  models: Sequence[Trained],
  described: Sequence[Mapping[str, Any]],
  names: Sequence[str],
) -> Html:
  """Sizes and tokenizers."""
  rows = [["", *names]]
  rows.append(["run", *(str(description["name"]) for description in described)])
  rows.append(
    [
      "parameters",
      *(f"{description['parameters']:,}" for description in described),
    ]
  )
  rows += [
    [
      _title(field),
      *(str(getattr(model.config.model, field)) for model in models),
    ]
    for field in _SIZES
  ]
  rows.append(["tokenizer", *(model.tokenizer.spec for model in models)])
  return table(rows)


def _training(
  described: Sequence[Mapping[str, Any]], styles: Sequence[Style]
) -> Html:
  """Curves of the runs that have logs."""
  logs, parts = [], []
  for description, style in zip(described, styles, strict=True):
    path = epath.Path(description["workdir"]) / "metrics.jsonl"
    if path.exists():
      logs.append((style, read_log(path)))
    else:
      parts.append(
        element(
          "p", f"{style.name}: no metrics.jsonl in {description['workdir']}."
        )
      )
  if logs:
    parts.append(
      picture(
        drawing(loss_curves(logs), "loss"),
        "loss curves",
        "Training and validation loss.",
      )
    )
  if (figure := curves.lambda_curves(logs)) is not None:
    caption = "λ by layer over training (V2: the mean over tokens and heads)."
    parts.append(picture(drawing(figure, "lambda"), "lambda by layer", caption))
  return Html("\n".join(parts))


def _chosen_maps(
  computed: Sequence[maps.Maps], names: Sequence[str], path: epath.Path
) -> Html:
  """Returns the picture of one head of the first model that has a noise map.

  Without such a model, it is empty.

  Args:
    computed: the maps of each model.
    names: the models' names in words.
    path: where the picture is also written, as a PNG.
  """
  for model_maps, name in zip(computed, names, strict=True):
    if not model_maps.has_noise_map:
      continue
    figure, caption = maps.picture(model_maps)
    plots.save(figure, path)
    return picture(
      data_address("image/png", path.read_bytes()),
      f"attention maps of {name}",
      f"{name}. {caption}",
    )
  return Html()


def _measurement(
  found: Mapping[str, Any],
  described: Sequence[Mapping[str, Any]],
  directory: epath.Path,
) -> Html:
  """The section of a suite: what it measures, its plot, its table and its settings."""
  suite, names = (
    found["suite"],
    [style.name for style in plots.styles_of(found["models"])],
  )
  about = (importlib.import_module(SUITES[suite]).__doc__ or "").partition(
    "\n"
  )[0]
  parts = [
    element("h2", _title(suite).capitalize().replace("nll", "NLL")),
    element("p", about),
  ]
  if not _measures(found, described):
    measured = " and ".join(str(model["name"]) for model in found["models"])
    parts.append(
      element(
        "p",
        f"Measured of {measured}, not of this page's models.",
        class_="warning",
      )
    )
  plot = directory / f"{suite}.png"
  if plot.exists():
    parts.append(
      picture(data_address("image/png", plot.read_bytes()), f"plot of {suite}")
    )
  parts += _figures(found, names)
  settings = json.dumps(found["settings"], indent=1, ensure_ascii=False)
  parts.append(
    element("details", element("summary", "settings"), element("pre", settings))
  )
  return element("section", *parts, id=suite)


def _figures(found: Mapping[str, Any], names: Sequence[str]) -> list[Html]:
  """The figures of a suite: those that tell something in a table, and the others in one that is folded."""
  telling: list[Mapping[str, Any]] = []
  others: list[Mapping[str, Any]] = []
  main = [line.row for line in summary.headlines({found["suite"]: found})]
  for row in found["figures"]:
    tells = (
      results.excludes_zero(row["difference"])
      if "difference" in row
      else row["value"] != 0
    )
    (telling if tells or row in main else others).append(row)
  parts = [_table(telling, found["figures"], names)] if telling else []
  if others:
    rows = f"{len(others)} row{'s' * (len(others) > 1)}"
    what = (
      f"{rows} without a clear difference" if len(names) > 1 else f"{rows} of 0"
    )
    parts.append(
      element(
        "details",
        element("summary", what),
        _table(others, found["figures"], names),
      )
    )
  return parts


def _table(
  rows: Sequence[Mapping[str, Any]],
  every: Sequence[Mapping[str, Any]],
  names: Sequence[str],
) -> Html:
  """Figures of each model and, for two, their difference, which is bold where its interval excludes 0. `every` row names the columns."""
  places = list(dict.fromkeys(place for row in every for place in row["at"]))
  both = len(names) > 1
  cells: list[list[str | tuple[str, str]]] = [
    ["", *places, *names, *["difference"] * both]
  ]
  for row in rows:
    line = [
      row["name"],
      *(str(row["at"].get(place, "")) for place in places),
      number(row),
    ]
    if both:
      difference = number(row.get("difference"))
      line += [
        number(row.get("against")),
        (difference, "clear")
        if results.excludes_zero(row.get("difference"))
        else difference,
      ]
    cells.append(line)
  return table(cells)


def _missing(measured: Mapping[str, Any], suites: Sequence[str]) -> Html:
  missing = [name for name in suites if name not in measured]
  return (
    element("p", f"Not measured here: {', '.join(missing)}.")
    if missing
    else Html()
  )
