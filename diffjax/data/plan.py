"""Resolves the data fields whose values depend on the run.

`config.data.mode = "auto"` depends on the number of processes.
`config.data.files = 0` depends, for hf:// sources, on the number of tokens that
the run trains on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from diffjax.config import Config, DataConfig, UserError
from diffjax.data import file_source, sources
from diffjax.data.sample import take_sample
from diffjax.host.progress import say, short_number

# Tokens to read for each token to train on. Packing leaves about 2% of a row
# empty, and the first documents are not exactly like all others.
_MARGIN = 1.1


def resolve(
  config: Config, process_count: int, note: Callable[[str], None] = say
) -> Config:
  """Returns the config with data.mode and data.files as the run uses them.

  The result depends only on the arguments and the files, so all processes and
  later runs of the same command get the same one.

  Args:
    config: The config as the user wrote it.
    process_count: Number of processes of the run.
    note: Called with a line for the user if a number of files is computed.

  Raises:
    UserError: if the files of an hf:// source must be sampled and cannot be
      read.
  """
  data = config.data
  if data.mode == "auto":
    mode = "prepared" if process_count == 1 else "streamed"
    data = dataclasses.replace(data, mode=mode)

  components = sources.parse_mixture(data.source)
  has_remote = any(
    sources.is_on_hub(component.spec) for component in components
  )
  if has_remote and data.files == 0:
    train = config.train
    tokens = train.steps * train.batch_size * data.length
    num_files = _files_needed(components, tokens, data, note)
    data = dataclasses.replace(data, files=num_files)
  return dataclasses.replace(config, data=data)


def _files_needed(
  components: Sequence[sources.Component],
  tokens: int,
  config: DataConfig,
  note: Callable[[str], None],
) -> int:
  """Returns how many files of each source hold the tokens of a run.

  All sources of a mixture share one number: the largest number of files that an
  hf:// source needs or that a local source has. So all local files are read.
  """
  largest = 1
  for component in components:
    if not sources.has_files(component.spec):
      continue
    source = sources.documents(component.spec, "train", config)
    assert isinstance(source, file_source.FileSource)
    if sources.is_on_hub(component.spec):
      num_files = _remote_files_needed(
        source, component.weight * tokens, config, note
      )
    else:
      num_files = len(source.matched_sizes)
    largest = max(largest, num_files)
  return largest


def _remote_files_needed(
  source: file_source.FileSource,
  tokens: float,
  config: DataConfig,
  note: Callable[[str], None],
) -> int:
  """Returns how many files of an hf:// source hold a number of tokens.

  The first documents are read, to estimate the number of tokens per byte.

  Args:
    source: The source.
    tokens: Number of tokens that the run takes from it.
    config: The data fields.
    note: Called with a line for the user.

  Raises:
    UserError: if the source has no documents, or cannot be read.
  """
  sample = take_sample(source, config)
  if sample.tokens == 0:
    raise UserError(
      f"config.data.source {source.spec!r}: empty: no document to train on"
    )
  tokens_per_byte = sample.tokens / sample.stored_bytes
  sizes = source.matched_sizes
  # If no number suffices, the loop ends with all files.
  for num_files in range(1, len(sizes) + 1):
    num_bytes = sum(file_source.spread(sizes, num_files))
    available_tokens = num_bytes * tokens_per_byte
    if available_tokens >= _MARGIN * tokens:
      break

  if available_tokens < tokens:
    num_epochs = tokens / available_tokens
    note(
      f"{source.spec}: its {len(sizes)} files hold about"
      f" {short_number(available_tokens)} tokens and the run takes"
      f" {short_number(tokens)}: they are read {num_epochs:.1f} times"
    )
  else:
    note(
      f"{source.spec}: reading {num_files} of {len(sizes)} files"
      f" ({short_number(num_bytes)}B), about {short_number(available_tokens)}"
      f" tokens for the run's {short_number(tokens)} (config.data.files sets"
      " the number)"
    )
  return num_files
