"""Resolves the data fields whose values depend on the run.

`config.data.mode = "auto"` depends on the number of processes.
`config.data.files = 0` depends, for hf:// sources, on the number of tokens that
the run trains on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from diffjax.config import Config, DataConfig, UserError
from diffjax.data import file_source, sources
from diffjax.data.sample import take_sample
from diffjax.host.progress import say, short_number

# Tokens to read for each token to train on. Packing leaves about 2% of a row
# empty, and the documents of the sample are not exactly like all others.
_MARGIN = 1.1


class _FileSelection(NamedTuple):
  """Some files of a source, evenly spaced.

  Attributes:
    num_files: Number of files.
    num_bytes: Their size.
    num_tokens: An estimate of the number of tokens in them.
  """

  num_files: int
  num_bytes: int
  num_tokens: float


def resolve(
  config: Config, process_count: int, note: Callable[[str], None] = say
) -> Config:
  """Returns the config with values for data.mode "auto" and data.files 0.

  The mode is "prepared" for one process and "streamed" for several. The number
  of files is computed if there is an hf:// source. Otherwise it remains 0, for
  all files.

  The result depends only on the arguments and the files, so all processes and
  later runs of the same command get the same one.

  Args:
    config: The config as the user wrote it.
    process_count: Number of processes of the run.
    note: Prints a line for the user. Called if a number of files is computed.

  Raises:
    UserError: if the files of an hf:// source must be sampled and cannot be
      read.
  """
  data = config.data
  if data.mode == "auto":
    mode = "prepared" if process_count == 1 else "streamed"
    data = dataclasses.replace(data, mode=mode)

  components = sources.parse_mixture(data.source)
  reads_hub = any(sources.is_on_hub(component.spec) for component in components)
  if reads_hub and data.files == 0:
    train = config.train
    num_tokens = train.steps * train.batch_size * data.length
    num_files = _files_per_source(components, num_tokens, data, note)
    data = dataclasses.replace(data, files=num_files)
  return dataclasses.replace(config, data=data)


def _files_per_source(
  components: Sequence[sources.Component],
  num_tokens: int,
  config: DataConfig,
  note: Callable[[str], None],
) -> int:
  """Returns the number of files to read of each source, as for data.files.

  All sources of a mixture share one number: the largest number of files that an
  hf:// source needs or that a local source has. So all local files are read.

  Args:
    components: The sources of the mixture.
    num_tokens: Number of tokens that the run trains on.
    config: The data fields.
    note: Prints a line for the user.
  """
  largest = 1
  for component in components:
    if not sources.has_files(component.spec):
      continue
    source = sources.documents(component.spec, "train", config)
    assert isinstance(source, file_source.FileSource)
    if sources.is_on_hub(component.spec):
      source_tokens = component.weight * num_tokens
      num_files = _hub_files_needed(source, source_tokens, config, note)
    else:
      num_files = len(source.matched_sizes)
    largest = max(largest, num_files)
  return largest


def _hub_files_needed(
  source: file_source.FileSource,
  num_tokens: float,
  config: DataConfig,
  note: Callable[[str], None],
) -> int:
  """Returns how many files of an hf:// source hold a number of tokens.

  Args:
    source: The source.
    num_tokens: Number of tokens that the run takes from it.
    config: The data fields.
    note: Prints a line for the user, which tells the number of files.

  Raises:
    UserError: if the source has no documents, or cannot be read.
  """
  tokens_per_byte = _estimate_tokens_per_byte(source, config)
  all_sizes = source.matched_sizes
  selected = _select_files(all_sizes, _MARGIN * num_tokens, tokens_per_byte)
  if selected.num_tokens < num_tokens:
    num_epochs = num_tokens / selected.num_tokens
    note(
      f"{source.spec}: its {len(all_sizes)} files hold about"
      f" {short_number(selected.num_tokens)} tokens and the run takes"
      f" {short_number(num_tokens)}: they are read {num_epochs:.1f} times"
    )
  else:
    note(
      f"{source.spec}: reading {selected.num_files} of {len(all_sizes)} files"
      f" ({short_number(selected.num_bytes)}B), about"
      f" {short_number(selected.num_tokens)} tokens for the run's"
      f" {short_number(num_tokens)} (config.data.files sets the number)"
    )
  return selected.num_files


def _estimate_tokens_per_byte(
  source: file_source.FileSource, config: DataConfig
) -> float:
  """Returns the tokens per stored byte in a sample of a source.

  Raises:
    UserError: if the source has no documents, or cannot be read.
  """
  sample = take_sample(source, config)
  if sample.tokens == 0:
    raise UserError(
      f"config.data.source {source.spec!r}: empty: no document to train on"
    )
  return sample.tokens / sample.stored_bytes


def _select_files(
  sizes: Sequence[int], min_tokens: float, tokens_per_byte: float
) -> _FileSelection:
  """Returns the smallest selection of files that holds enough tokens, or all.

  Args:
    sizes: Bytes of each file. There is at least one file.
    min_tokens: Number of tokens to hold.
    tokens_per_byte: Number of tokens per byte of a file.
  """
  for num_files in range(1, len(sizes) + 1):
    num_bytes = sum(file_source.spread(sizes, num_files))
    selection = _FileSelection(
      num_files, num_bytes, num_bytes * tokens_per_byte
    )
    if selection.num_tokens >= min_tokens:
      break
  return selection
