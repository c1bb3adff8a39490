"""The model card of an exported model: the README.md next to its weights.

It begins with the metadata that the Hugging Face Hub reads. card.md.j2 is its
template. If the model was trained with diffjax, the card also has the run's
config and measurements.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jinja2
from etils import epath

from diffjax.cli import config_file
from diffjax.config import Config, ModelConfig, UserError, from_config_dict
from diffjax.evals import SUITES
from diffjax.evals.report import results
from diffjax.host.files import write_atomically
from diffjax.interop.layout import Model
from diffjax.model.attention import attention_class
from diffjax.training.checkpoint import find_checkpoint
from diffjax.training.manifest import SCORE_PREFIX
from diffjax.training.metrics import read_log

_TEMPLATE = pathlib.Path(__file__).with_name("card.md.j2")

# The fields of config.model in the table of sizes.
_SIZE_FIELDS = (
  "num_layers",
  "embed_dim",
  "num_heads",
  "num_kv_heads",
  "head_dim",
  "ffn_dim",
  "vocab_size",
  "max_length",
)

# The maximum number of a suite's figures in its table.
_MAX_FIGURES = 12

# A row of a table: the text of its cells.
_Row = list[str]


class _Run(NamedTuple):
  """The run that trained an exported model.

  Attributes:
    workdir: Its directory.
    step: The step of the exported checkpoint.
    config: Its config.
  """

  workdir: epath.Path
  step: int
  config: Config


class _SuiteTable(NamedTuple):
  """The table of a suite's figures.

  Attributes:
    name: The name of the suite.
    checkpoint: The checkpoint that was measured, such as "step 500".
    rows: The first figures.
    num_figures: The number of all figures.
  """

  name: str
  checkpoint: str
  rows: list[_Row]
  num_figures: int


def write_card(
  path: str,
  model: Model,
  *,
  layout: str,
  dtype: str,
  source_layout: str,
  source_path: str,
) -> None:
  """Writes the card of a model that has just been exported.

  Args:
    path: The directory of the exported model.
    model: The model.
    layout: The name of the layout of the exported model, such as "motif".
    dtype: The type of its tensors.
    source_layout: The name of the layout that the model was read from.
    source_path: The directory that it was read from. If it is a run's workdir,
      the card has the run's config and measurements.

  Raises:
    UserError: if the card cannot be written.
  """
  run = None
  if source_layout == "diffjax":
    run = _find_run(source_path)

  values = {
    "directory": epath.Path(path).name,
    "layout": layout,
    "source_layout": source_layout,
    "dtype": dtype,
    "run": run,
    **_model_values(model, dtype),
  }
  if run is not None:
    values.update(_run_values(run))
  text = _load_template().render(values)

  target = epath.Path(path) / "README.md"
  # Paths may have bytes that are not UTF-8. Those bytes are written unchanged.
  content = text.encode("utf-8", "surrogateescape")
  try:
    write_atomically(target, content)
  except OSError as error:
    raise UserError(
      f"cannot write {target}: {error.strerror or error}"
    ) from error


def _find_run(workdir: str) -> _Run | None:
  """Returns the run that trained the model of a workdir.

  Returns None if the model was not trained by diffjax.
  """
  checkpoint = find_checkpoint(workdir, json_only=True)
  # The checkpoint of a converted model has no position in the training data.
  if checkpoint is None or not checkpoint.data_state:
    return None
  config = from_config_dict(checkpoint.config)
  return _Run(epath.Path(workdir), checkpoint.step, config)


def _model_values(model: Model, dtype: str) -> dict[str, Any]:
  """Returns the values of the template that describe a model."""
  layer_class = attention_class(model.config)
  num_parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
  return {
    "has_noise_map": layer_class.has_noise_map,
    "model_name": layer_class.model_name or model.config.attention,
    "num_parameters": num_parameters,
    "max_length": model.config.max_length,
    "size_rows": _size_rows(model.config, dtype),
    # The tokenizer of a published model adds these tokens itself.
    "tokenizer_adds_document_tokens": model.tokenizer.has_own_document_tokens,
  }


def _run_values(run: _Run) -> dict[str, Any]:
  """Returns the values of the template that describe a run."""
  return {
    "training_rows": _training_rows(run),
    "config_toml": config_file.to_toml(run.config, comments=False),
    "loss_rows": _loss_rows(run),
    "suites": _suite_tables(run),
  }


def _load_template() -> jinja2.Template:
  """Loads card.md.j2, with the filters that it uses."""
  environment = jinja2.Environment(
    # A line with only a statement leaves no line in the card.
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["cell"] = _escape_cell
  environment.filters["thousands"] = _format_thousands
  return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _escape_cell(text: str) -> str:
  """Replaces the characters that would end a cell of a Markdown table."""
  return text.replace("|", "\\|").replace("\n", " ")


def _format_thousands(number: int) -> str:
  """Returns a number with separators, such as 1,000,000."""
  return f"{number:,}"


def _size_rows(config: ModelConfig, dtype: str) -> list[_Row]:
  """Returns the rows of the table of a model's variant and sizes.

  Args:
    config: The config of the model.
    dtype: The type of its tensors.
  """
  rows = [["attention", config.attention]]
  for field in _SIZE_FIELDS:
    rows.append([field, str(getattr(config, field))])
  rows.append(["type of the tensors", dtype])
  return rows


def _training_rows(run: _Run) -> list[_Row]:
  """Returns the rows of the table of a run's main settings."""
  data = run.config.data
  train = run.config.train
  optimizer = run.config.optimizer
  step_tokens = train.batch_size * data.length
  validation_text = data.validation_source
  if not validation_text:
    validation_text = "a part of the text that was held out"
  rows = [
    ["steps", f"{run.step:,} of {train.steps:,}"],
    ["tokens", f"{run.step * step_tokens:,}, {step_tokens:,} a step"],
    ["text", data.source],
    ["validation text", validation_text],
    ["tokenizer", data.tokenizer],
    ["rows", f"{data.length:,} tokens, {data.packing}"],
    [
      "optimizer",
      f"{optimizer.name}, learning rate {optimizer.learning_rate:g},"
      f" {optimizer.schedule}",
    ],
    ["seed", str(train.seed)],
  ]
  if train.init_from:
    rows.append(["started from", train.init_from])
  return rows


def _loss_rows(run: _Run) -> list[_Row]:
  """Returns the rows of the table of validation results.

  A row has the name of a result, its last value up to the exported step, and
  the step of that value.
  """
  path = run.workdir / "metrics.jsonl"
  if not path.exists():
    return []
  rows: dict[str, _Row] = {}
  for entry in read_log(path):
    if entry["step"] > run.step:
      continue
    for name, value in entry.items():
      # A loss that was not finite is logged as None.
      if name.startswith(SCORE_PREFIX) and value is not None:
        short_name = name.removeprefix(SCORE_PREFIX)
        rows[name] = [short_name, f"{value:.4g}", str(entry["step"])]
  return list(rows.values())


def _suite_tables(run: _Run) -> list[_SuiteTable]:
  """Returns the tables of the suites that have results in the workdir."""
  tables = []
  for suite in SUITES:
    content = _read_results(run.workdir / "evals" / f"{suite}.json")
    if content is not None:
      tables.append(_suite_table(suite, content))
  return tables


def _suite_table(suite: str, content: Mapping[str, Any]) -> _SuiteTable:
  """Returns the table of a suite's results.

  Args:
    suite: The name of the suite.
    content: The content of the file of its results.
  """
  figures = content["figures"]
  rows = []
  for figure in figures[:_MAX_FIGURES]:
    # The figure's coordinates, such as {"length": 512, "depth": 0.5}.
    coordinates = []
    for setting, coordinate in figure["at"].items():
      coordinates.append(f"{setting} {coordinate}")
    number = results.number(figure)
    rows.append([figure["name"], ", ".join(coordinates), number])
  # The name of a model is "WORKDIR at step STEP". The card has "step STEP".
  model = content["models"][0]
  _, _, checkpoint = str(model["name"]).rpartition(" at ")
  return _SuiteTable(suite, checkpoint, rows, num_figures=len(figures))


def _read_results(path: epath.Path) -> Mapping[str, Any] | None:
  """Reads the file of a suite's results.

  Returns None if the file does not exist or does not have the fields that the
  card needs.
  """
  try:
    content = json.loads(path.read_bytes())
    if not content["models"][0]["name"]:
      return None
    for figure in content["figures"]:
      has_value = "at" in figure and "value" in figure
      if not has_value or not figure["name"]:
        return None
  except (OSError, ValueError, LookupError, TypeError):
    return None
  return content
