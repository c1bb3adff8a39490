"""Sources of documents and mixtures of sources.

A source is a list of parts, small pieces of work that any process can read on
its own. When rows are prepared, workers share the parts. When documents are
streamed, the parts are shuffled.

If a source has no validation split of its own, the hash of a document decides
its split. So equal documents are always in the same split.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from diffjax.config import DataConfig, UserError
from diffjax.data import files
from diffjax.data.document import Source
from diffjax.data.file_source import FileSource, TextSource
from diffjax.data.jsonl_source import JsonlSource
from diffjax.data.parquet_source import ParquetSource
from diffjax.data.tfds_source import TfdsSource

KINDS = (
  "stdlib, tfds:NAME, text:GLOB, jsonl:GLOB (also .gz, .zst), parquet:GLOB;"
  " a GLOB may be local, gs:// or hf://datasets/ORG/NAME@REVISION/*.parquet"
)

_SOURCES: dict[str, type[TfdsSource] | type[FileSource]] = {
  "stdlib": TfdsSource,
  "tfds": TfdsSource,
  "text": TextSource,
  "jsonl": JsonlSource,
  "parquet": ParquetSource,
}

# Kinds of sources that have text only, without other fields.
_KINDS_WITHOUT_FIELDS = ("stdlib", "text")


class Component(NamedTuple):
  """A source of a mixture.

  Attributes:
    spec: The source.
    weight: Its share of the rows.
  """

  spec: str
  weight: float


def parse_mixture(spec: str, field: str = "data.source") -> list[Component]:
  """Returns the sources of a mixture, such as "A=0.7,B=0.3", or of just "A".

  Args:
    spec: The value of config.data.source or config.data.validation_source.
    field: The name of this field, for messages.

  Returns:
    The components, with weights that sum to 1.

  Raises:
    UserError: if a source is of an unknown kind or is listed twice, or if a
      weight is missing or not positive.
  """
  prefix = f"config.{field} = {spec!r}"
  items = [item.strip() for item in spec.split(",")]
  components = []
  for item in items:
    component = _parse_component(item, is_single=len(items) == 1)
    if component is None:
      raise UserError(
        f"{prefix}: every source of a mixture needs a weight, as in"
        f" 'A=0.7,B=0.3'; {item!r} has none"
      )
    if not 0 < component.weight < math.inf:
      raise UserError(
        f"{prefix}: the weight of {component.spec!r} must be a positive number;"
        f" got {component.weight:g}"
      )
    if not _is_source(component.spec):
      raise UserError(
        f"{prefix}: {component.spec!r} is not a source; the kinds are {KINDS}"
      )
    components.append(component)

  specs = [component.spec for component in components]
  for component_spec in specs:
    if specs.count(component_spec) > 1:
      raise UserError(
        f"{prefix}: {component_spec!r} is listed twice; add up its weights"
      )
  total = sum(component.weight for component in components)
  normalized = []
  for component in components:
    normalized.append(Component(component.spec, component.weight / total))
  return normalized


def _parse_component(item: str, is_single: bool) -> Component | None:
  """Parses "SOURCE=WEIGHT", or "SOURCE".

  Args:
    item: The text.
    is_single: Whether there are no other sources, so the weight may be missing.

  Returns:
    The source and its weight as written. None if the weight is missing.
  """
  source, equals_sign, weight = item.rpartition("=")
  if equals_sign:
    try:
      return Component(source, float(weight))
    except ValueError:
      # The equals sign belongs to the path, as in "text:/a=b/c.txt".
      pass
  if is_single:
    return Component(item, 1.0)
  return None


def _is_source(spec: str) -> bool:
  """Returns whether a spec is KIND:ARGUMENT of a known kind, or "stdlib"."""
  kind, _, argument = spec.partition(":")
  if kind == "stdlib":
    return argument == ""
  return kind in _SOURCES and argument != ""


def has_files(spec: str) -> bool:
  """Returns whether config.data.files limits the number of a source's files.

  It does not limit TFDS datasets.
  """
  kind, _, _ = spec.partition(":")
  return issubclass(_SOURCES[kind], FileSource)


def is_on_hub(spec: str) -> bool:
  """Returns whether a source is downloaded from the Hub while it is read."""
  _, _, argument = spec.partition(":")
  return files.is_on_hub(argument)


def documents(spec: str, split: str, config: DataConfig) -> Source:
  """Opens a source, to read the documents of one split.

  Without config.validation_source, the validation split is the source's own
  validation split. If it has none, validation takes the fraction
  config.validation_fraction of the documents. For an hf:// source, it reads
  only some of the parts, 1 GiB in total.

  With config.validation_source, both splits take all documents of their file
  sources.

  Args:
    spec: A single source, such as "jsonl:/data/*.jsonl.zst".
    split: "train" or "validation".
    config: The data fields.

  Returns:
    The source.

  Raises:
    UserError: if the source does not exist, is empty or has no text field, or
      if it is plain text and config.prompt_field is set.
  """
  kind, _, argument = spec.partition(":")
  if config.prompt_field and kind in _KINDS_WITHOUT_FIELDS:
    raise UserError(
      f"config.data.prompt_field = {config.prompt_field!r}: {spec!r} is plain"
      " text without fields; set it to '', or read prompts and answers from a"
      " jsonl:, parquet: or tfds: source"
    )
  return _SOURCES[kind](spec, argument, split, config)
