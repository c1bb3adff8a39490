"""Messages about prepared rows whose source or config has changed.

Rows are used as they were prepared. If the files of their source have changed
since, a warning is printed. A run cannot continue a checkpoint that was trained
on different rows. The error says what has changed, and how to continue.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

from diffjax.config import DataConfig, UserError
from diffjax.data.prepared import (
  CONFIG_FIELDS,
  RowsOrigin,
  Target,
  file_fingerprints,
  meta_path,
  open_source,
  read_meta,
  targets,
)
from diffjax.host.progress import say


def warn_of_changed_files(target: Target, config: DataConfig) -> None:
  """Prints a warning if a target's files have changed since it was prepared.

  This is not an error: a run that was started with the old text continues with
  its rows. Compares names, sizes and samples of the text. Does not compare
  times, since rows may be used with copies of the files, or without them.

  Args:
    target: A target whose rows are prepared.
    config: The data fields.
  """
  aspect = _changed_aspect(target, config)
  if aspect is None:
    return
  say(
    f"warning: the rows in {target.directory} are used, which were prepared"
    f" before the {aspect} of the files of {target.spec!r} changed; for the new"
    " text delete that directory, or set config.data.prepared_dir to another"
    " one"
  )


def _changed_aspect(target: Target, config: DataConfig) -> str | None:
  """Returns which aspect of a target's files has changed since it was prepared.

  Returns:
    "names and sizes" or "text". None if neither has changed, or if the files
    cannot be compared.
  """
  if "hf://" in target.spec:
    # On the Hub, the revision selects the files.
    return None
  meta = read_meta(target)
  if meta is None or "files" not in meta:
    # An earlier version prepared the rows and stored no fingerprints of files.
    return None
  try:
    source_by_split = open_source(target.spec, target.splits, config)
    current = file_fingerprints(source_by_split)
  except UserError:
    # The files are not on this machine.
    return None
  for split in target.splits:
    for aspect in ("names and sizes", "text"):
      if meta["files"][split][aspect] != current[split][aspect]:
        return aspect
  return None


class _ChangedSource(NamedTuple):
  """A source whose text has changed since a checkpoint was written.

  Attributes:
    saved: The origin of the rows that the checkpoint was trained on.
    current: The origin of the rows that were prepared from the new text.
  """

  saved: RowsOrigin
  current: RowsOrigin


def explain_changed_rows(
  saved: Sequence[RowsOrigin],
  current: Sequence[RowsOrigin],
  config: DataConfig,
) -> str:
  """Returns why the training rows differ from a checkpoint's, and what to do.

  The reason is the first of these that has changed: a config field, the number
  of sources, the text of a source, or the weights of the sources.

  Args:
    saved: The origin of the rows of each source of the checkpoint.
    current: The same for the run. The number of sources may differ.
    config: The run's data fields.
  """
  changed_fields = _changed_fields(saved, current)
  if changed_fields:
    changes = "; ".join(changed_fields)
    return f"{changes}; set the fields back, or use another --workdir"

  if len(saved) != len(current):
    return (
      "config.data.source has changed; set the fields back, or use another"
      " --workdir"
    )

  changed_sources = _changed_sources(saved, current)
  if changed_sources:
    return _explain_changed_text(saved, changed_sources, config)

  # The rows of each source are equal, so the mixture must differ.
  return (
    "the weights in config.data.source have changed; set them back, or use"
    " another --workdir"
  )


def _changed_fields(
  saved: Sequence[RowsOrigin], current: Sequence[RowsOrigin]
) -> list[str]:
  """Returns the config fields in which descriptions differ, for messages."""
  changes = set()
  for saved_origin, origin in zip(saved, current, strict=False):
    for key, field in CONFIG_FIELDS.items():
      before = saved_origin["description"].get(key)
      now = origin["description"].get(key)
      if before != now:
        changes.add(f"config.{field} was {before!r} and is {now!r}")
  return sorted(changes)


def _changed_sources(
  saved: Sequence[RowsOrigin], current: Sequence[RowsOrigin]
) -> list[_ChangedSource]:
  """Returns the sources whose rows have another fingerprint than before."""
  changed_sources = []
  for saved_origin, origin in zip(saved, current, strict=True):
    if saved_origin["fingerprint"] != origin["fingerprint"]:
      changed_sources.append(_ChangedSource(saved_origin, origin))
  return changed_sources


def _explain_changed_text(
  saved: Sequence[RowsOrigin],
  changed_sources: Sequence[_ChangedSource],
  config: DataConfig,
) -> str:
  """Returns which sources have a new text, and how to continue.

  Args:
    saved: The origins of all rows of the checkpoint.
    changed_sources: The sources whose text has changed. At least one.
    config: The run's data fields.
  """
  saved_origins = [source.saved for source in changed_sources]
  specs = [repr(origin["description"]["source"]) for origin in saved_origins]
  new_directory = changed_sources[0].current["directory"]
  remedy = _remedy_for_changed_text(saved, saved_origins, config)
  return (
    f"no field has changed, but the text of {' and '.join(specs)} has, and its"
    f" rows were prepared anew in {new_directory}; {remedy}"
  )


def _remedy_for_changed_text(
  saved: Sequence[RowsOrigin],
  changed: Sequence[RowsOrigin],
  config: DataConfig,
) -> str:
  """Returns how to continue a checkpoint after the text of sources changed.

  Args:
    saved: The origins of all rows of the checkpoint.
    changed: The sources whose text has changed.
    config: The run's data fields.
  """
  start_over = (
    "start over with another --workdir to train on the new text"
    " (--config.train.init_from keeps the parameters)"
  )
  missing = []
  for origin in changed:
    if not _has_rows(origin):
      missing.append(origin["directory"])
  if missing:
    return (
      f"the old rows are no longer in {' and '.join(missing)}: put the old text"
      f" back and prepare it again, or {start_over}"
    )
  if len(targets(config)) == 1:
    directory = saved[0]["directory"]
    return (
      f"the old rows lie in {directory}: go on with them by"
      f" --config.data.prepared_dir={directory}, or {start_over}"
    )
  # With several sources, prepared_dir has one directory for each of them.
  return (
    "go on with the old rows by --config.data.prepared_dir=DIR, a new directory"
    f" in which {_link_commands(saved, config)}; or {start_over}"
  )


def _has_rows(origin: RowsOrigin) -> bool:
  """Returns whether the rows are still in the directory of their origin."""
  try:
    with open(meta_path(origin["directory"]), encoding="utf-8") as file:
      meta = json.load(file)
    if not meta["complete"]:
      return False
    splits = meta["splits"].values()
    return origin["fingerprint"] in [split["fingerprint"] for split in splits]
  except (OSError, ValueError, KeyError, TypeError):
    # There is no valid meta.json.
    return False


def _link_commands(saved: Sequence[RowsOrigin], config: DataConfig) -> str:
  """Returns shell commands that link a checkpoint's rows into a directory DIR.

  With config.data.prepared_dir=DIR, a run finds the rows of each of its sources
  by the name of a link. The validation rows remain unchanged.
  """
  saved_directories = {}
  for origin in saved:
    spec = origin["description"]["source"]
    saved_directories[spec] = origin["directory"]
  linked_config = dataclasses.replace(config, prepared_dir="DIR")
  commands = []
  for target, link in zip(targets(config), targets(linked_config), strict=True):
    directory = target.directory
    if "train" in target.splits:
      directory = saved_directories.get(target.spec, directory)
    commands.append(f"ln -s {directory} {link.directory}")
  return " && ".join(commands)
