"""The report: an HTML page about one model, or about two that are compared.

The page shows what differs, how the models were trained, their attention maps
and what the suites measured. It contains its scripts and pictures, and its
security policy forbids requests, so it can be sent as a file. The results of
the suites are read from the JSON files beside the page. The attention maps are
computed when the page is made.

This module prepares the content, and the templates (*.html.j2) turn it into
HTML. They escape all text but the JSON of the attention maps.

docs/images shows maps.png and the page's first screen, for the tiny pair. To
make them:

    python -m diffjax.evaluate --suite=report --workdir=runs/tiny \\
      --against=runs/tiny_transformer \\
      --set.report.prompt=$'def area(width, height):\\n  return width * height'
    python tests/evals/report/browser.py runs/tiny/evals/report.html \\
      --width=1200 --height=880 --screenshot=docs/images/report.png
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from etils import epath

from diffjax.config import UserError
from diffjax.evals import SUITES
from diffjax.evals.report import (
  curves,
  map_pictures,
  maps,
  measurements,
  pictures,
  plots,
  summary,
)
from diffjax.evals.report.map_pictures import Panel
from diffjax.evals.report.measurements import Section
from diffjax.evals.report.pictures import Picture
from diffjax.evals.report.summary import FirstScreen
from diffjax.evals.suite import Model
from diffjax.host.files import write_atomically
from diffjax.inference.trained import Trained
from diffjax.plots.curves import Log, loss_curves
from diffjax.plots.styles import Style
from diffjax.training.metrics import read_log

_TEMPLATE_DIR = pathlib.Path(__file__).parent

# Fields of config.model in the table of models.
_MODEL_FIELDS = (
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


@dataclasses.dataclass(frozen=True)
class _StyledModel:
  """A model of the page.

  Attributes:
    trained: The model.
    description: Its name, workdir, attention variant and number of parameters,
      as in the results of the suites.
    style: Its name on the page, such as "DIFF", and its colour.
  """

  trained: Trained
  description: Mapping[str, Any]
  style: Style

  @property
  def properties(self) -> dict[str, str]:
    """The rows of the table of models: the model's properties by name."""
    config = self.trained.config.model
    properties = {
      "run": str(self.description["name"]),
      "parameters": f"{self.description['parameters']:,}",
    }
    for field in _MODEL_FIELDS:
      properties[field.replace("_", " ")] = str(getattr(config, field))
    properties["tokenizer"] = self.trained.tokenizer.spec
    return properties


@dataclasses.dataclass(frozen=True)
class _Training:
  """The section that shows how the models were trained.

  Attributes:
    missing: A sentence for each model without a log.
    curves: Plots of the losses, and of λ if a model has it.
  """

  missing: list[str]
  curves: list[Picture]


@dataclasses.dataclass(frozen=True)
class _AttentionMaps:
  """The section with attention maps.

  Attributes:
    head_picture: The maps of one head of the first model that has a noise map
      (λA₂). None if no model has one.
    prompt: The text of the maps.
    clipped_share: The share of the weights beyond the scale of colours, such as
      "1%".
    panels: The maps of each model.
  """

  head_picture: Picture | None
  prompt: str
  clipped_share: str
  panels: list[Panel]


@dataclasses.dataclass(frozen=True)
class _Page:
  """The content of page.html.j2.

  Attributes:
    models: One model, or two that are compared.
    first_screen: The main figures of the suites.
    training: How the models were trained.
    attention_maps: The attention maps of a text.
    sections: The results of each suite that was measured.
    not_measured: The names of the other suites.
    unknown_suites: The names of suites that were measured, but whose modules
      are not imported.
  """

  models: list[_StyledModel]
  first_screen: FirstScreen
  training: _Training
  attention_maps: _AttentionMaps
  sections: list[Section]
  not_measured: list[str]
  unknown_suites: list[str]

  @property
  def title(self) -> str:
    """The names of the models, such as "DIFF and Transformer"."""
    return " and ".join([model.style.name for model in self.models])


def write(
  models: Sequence[Model],
  prompt_ids: Sequence[int],
  directory: epath.Path,
  *,
  max_layers: int,
  max_heads: int,
) -> epath.Path:
  """Writes the report: DIRECTORY/report.html and DIRECTORY/maps.png.

  maps.png shows the attention maps of one head. It is written only if a model
  has a noise map (λA₂).

  Args:
    models: One model, or two with one tokenizer.
    prompt_ids: The token ids of the text whose attention maps are shown.
    directory: Contains the results of the suites. The page is written there.
    max_layers: The maximum number of layers whose maps can be chosen.
    max_heads: The maximum number of heads whose maps can be chosen.

  Returns:
    The path of the page.

  Raises:
    UserError: if results cannot be read, or the page cannot be written.
  """
  styled_models = _with_styles(models)
  suites = [name for name in SUITES if name != "report"]
  results_by_suite = measurements.read_results(directory, suites)
  trained_models = [model.trained for model in models]
  model_maps = maps.compute(trained_models, prompt_ids)
  page_path = directory / "report.html"
  try:
    head_picture = _write_head_picture(
      styled_models, model_maps, directory / "maps.png"
    )
    page = _Page(
      models=styled_models,
      first_screen=_first_screen(styled_models, results_by_suite),
      training=_read_training(styled_models),
      attention_maps=_AttentionMaps(
        head_picture=head_picture,
        prompt=models[0].trained.tokenizer.decode(prompt_ids),
        clipped_share=map_pictures.CLIPPED_SHARE,
        panels=_panels(styled_models, model_maps, max_layers, max_heads),
      ),
      sections=_sections(styled_models, results_by_suite, directory),
      not_measured=[name for name in suites if name not in results_by_suite],
      unknown_suites=measurements.unknown_suites(directory),
    )
    write_atomically(page_path, _render(page))
  except OSError as error:
    raise UserError(
      f"cannot write {page_path}: {error.strerror or error}"
    ) from error
  return page_path


def _with_styles(models: Sequence[Model]) -> list[_StyledModel]:
  """Returns the models with their names and colours on the page."""
  styles = plots.styles_of([model.description for model in models])
  styled_models = []
  for model, style in zip(models, styles, strict=True):
    styled_models.append(_StyledModel(model.trained, model.description, style))
  return styled_models


def _names(models: Sequence[_StyledModel]) -> list[str]:
  """Returns the names that the models have in the results of suites."""
  return [str(model.description["name"]) for model in models]


def _first_screen(
  models: Sequence[_StyledModel],
  results_by_suite: Mapping[str, Mapping[str, Any]],
) -> FirstScreen:
  """Returns the first screen: the main figures of the suites.

  Results of other models than the page's are left out.
  """
  names = _names(models)
  results_of_models = {}
  for suite, suite_results in results_by_suite.items():
    if measurements.model_names(suite_results) == names:
      results_of_models[suite] = suite_results
  return summary.first_screen(results_of_models, len(models))


def _sections(
  models: Sequence[_StyledModel],
  results_by_suite: Mapping[str, Mapping[str, Any]],
  directory: epath.Path,
) -> list[Section]:
  """Returns the sections of the suites that were measured.

  Args:
    models: The models of the page.
    results_by_suite: The results of these suites.
    directory: Contains the plots of the suites.
  """
  names = _names(models)
  sections = []
  for suite_results in results_by_suite.values():
    sections.append(measurements.section(suite_results, names, directory))
  return sections


def _read_training(models: Sequence[_StyledModel]) -> _Training:
  """Returns the section about training, with curves from the runs' logs."""
  logs = []
  missing = []
  for model in models:
    workdir = model.description["workdir"]
    path = epath.Path(workdir) / "metrics.jsonl"
    if path.exists():
      logs.append((model.style, read_log(path)))
    else:
      missing.append(f"{model.style.name}: no metrics.jsonl in {workdir}.")
  return _Training(missing, _draw_curves(logs))


def _draw_curves(logs: Sequence[Log]) -> list[Picture]:
  """Returns plots of the losses and of λ over training.

  Args:
    logs: The style and the log entries of each run that has a log.
  """
  if not logs:
    return []
  losses = Picture(
    pictures.svg_address(loss_curves(logs), "loss"),
    name="loss curves",
    caption="Training and validation loss.",
  )
  # None if no run has λ, such as two Transformers.
  lambda_figure = curves.lambda_curves(logs)
  if lambda_figure is None:
    return [losses]
  lambdas = Picture(
    pictures.svg_address(lambda_figure, "lambda"),
    name="lambda by layer",
    caption="λ by layer over training (V2: the mean over tokens and heads).",
  )
  return [losses, lambdas]


def _write_head_picture(
  models: Sequence[_StyledModel],
  model_maps: Sequence[maps.Maps],
  path: epath.Path,
) -> Picture | None:
  """Draws one head's attention maps, and writes the picture as a PNG file.

  The model is the first one that has a noise map (λA₂), and the head is the one
  in which that map cancels most.

  Args:
    models: The models.
    model_maps: The maps of each model.
    path: The path of the PNG file.

  Returns:
    The picture. None if no model has a noise map.
  """
  for model, maps_of_model in zip(models, model_maps, strict=True):
    if not maps_of_model.has_noise_map:
      continue
    figure, caption = map_pictures.head_picture(maps_of_model)
    plots.save(figure, path)
    name = model.style.name
    return Picture(
      pictures.png_address(path.read_bytes()),
      f"attention maps of {name}",
      f"{name}. {caption}",
    )
  return None


def _panels(
  models: Sequence[_StyledModel],
  model_maps: Sequence[maps.Maps],
  max_layers: int,
  max_heads: int,
) -> list[Panel]:
  """Returns the attention maps of each model, for its panel on the page."""
  panels = []
  for model, maps_of_model in zip(models, model_maps, strict=True):
    panel = map_pictures.panel(
      maps_of_model, model.style.name, max_layers, max_heads
    )
    panels.append(panel)
  return panels


def _render(page: _Page) -> str:
  """Returns the page as HTML."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATE_DIR),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
  )
  return environment.get_template("page.html.j2").render(page=page)
