"""Estimates what preparing needs: bytes to read, disk space and time."""

from __future__ import annotations

import collections
import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from diffjax.config import DataConfig, UserError
from diffjax.data import sources
from diffjax.data.sample import take_sample
from diffjax.data.shards import Work, worker_count
from diffjax.host.progress import say, short_number

# Smaller local sources are prepared within seconds. No sample is taken of them,
# and the disk is not checked.
SMALL_BYTES = 64 << 20

# ArrayRecord pads the rows and the footer of a file to 64 KiB each. The file of
# the sample is padded too, so estimates are a few percent too large.
_FILE_PADDING_BYTES = 128 << 10


class Needs(NamedTuple):
  """What the missing rows of a source need.

  Attributes:
    num_files: Number of files to read.
    read_bytes: Bytes to read. Files that both splits read count twice.
    tokens: Number of tokens, estimated from a sample.
    row_bytes: Bytes of the rows on disk, estimated.
    seconds: Time on one core, estimated.
  """

  num_files: int
  read_bytes: float
  tokens: float
  row_bytes: float
  seconds: float


def announce(works: Sequence[Work], config: DataConfig, workers: int) -> None:
  """Prints what preparing each source needs, and checks the disk space.

  Reads a sample of each source. Small local sources are left out.

  Args:
    works: The sources whose rows are not complete.
    config: The data fields.
    workers: Number of processes. 0 for one for each CPU.

  Raises:
    UserError: if a disk has less free space than its rows need.
  """
  # Several sources may be written to the same disk.
  bytes_by_disk: dict[int, float] = collections.defaultdict(float)
  for work in works:
    if _is_small(work):
      continue
    needs = estimate(work, config)
    existing_directory = _nearest_existing(work.directory)
    free_bytes = shutil.disk_usage(existing_directory).free
    num_workers = worker_count(workers, len(work.missing))
    _print_needs(work, needs, free_bytes, num_workers)

    disk = os.stat(existing_directory).st_dev
    bytes_by_disk[disk] += needs.row_bytes
    if bytes_by_disk[disk] > free_bytes:
      raise _disk_too_small(work, bytes_by_disk[disk], free_bytes)


def estimate(work: Work, config: DataConfig) -> Needs:
  """Returns what the missing shards of a source need.

  Prepares a sample of the source, and multiplies its numbers by how many such
  samples the missing shards hold.
  """
  missing = work.missing
  # "train" is the first split, if it is prepared. It has more documents than
  # "validation".
  first_split = next(iter(work.source_by_split))
  sampled_source = work.source_by_split[first_split]
  sample = take_sample(sampled_source, config)
  if sample.tokens == 0:
    return Needs(
      num_files=0, read_bytes=0.0, tokens=0.0, row_bytes=0.0, seconds=0.0
    )

  num_files = 0
  read_bytes = 0.0
  # How often the work on the sample is done for the missing shards.
  num_samples = 0.0
  for split, source in work.source_by_split.items():
    shards = [shard for shard in missing if shard.split == split]
    num_parts = sum(shard.stop - shard.start for shard in shards)
    if num_parts > 0:
      num_files = max(num_files, source.num_files)
    split_bytes = source.size * num_parts / len(source.parts)
    read_bytes += split_bytes
    # The splits may read the same files. Then each split takes its share of the
    # documents.
    documents_ratio = source.split_share / sampled_source.split_share
    num_samples += split_bytes / sample.stored_bytes * documents_ratio
  padding_bytes = _FILE_PADDING_BYTES * len(missing)
  return Needs(
    num_files=num_files,
    read_bytes=read_bytes,
    tokens=sample.tokens * num_samples,
    row_bytes=sample.row_bytes * num_samples + padding_bytes,
    seconds=sample.seconds * num_samples,
  )


def _is_small(work: Work) -> bool:
  """Returns whether a source is local and small."""
  if sources.is_on_hub(work.spec):
    return False
  largest_split = max(source.size for source in work.source_by_split.values())
  return largest_split < SMALL_BYTES


def _nearest_existing(path: str) -> str:
  """Returns the path, or its nearest parent that exists."""
  path = os.path.abspath(path)
  while not os.path.exists(path):
    path = os.path.dirname(path)
  return path


def _print_needs(
  work: Work, needs: Needs, free_bytes: float, num_workers: int
) -> None:
  """Prints the files, tokens, disk space and time that a source needs."""
  verb = "download" if sources.is_on_hub(work.spec) else "read"
  read_size = short_number(needs.read_bytes)
  num_tokens = short_number(needs.tokens)
  rows_size = short_number(needs.row_bytes)
  free_size = short_number(free_bytes)
  duration = _format_duration(needs.seconds / num_workers)
  plural = "s" if num_workers > 1 else ""
  say(
    f"{work.spec}: {needs.num_files} files to {verb}, up to {read_size}B;"
    f" about {num_tokens} tokens in {rows_size}B of rows in {work.directory}"
    f" ({free_size}B free); about {duration} with {num_workers}"
    f" worker{plural}"
  )


def _disk_too_small(
  work: Work, needed_bytes: float, free_bytes: float
) -> UserError:
  """Returns the error for a disk that has too little space for the rows.

  Args:
    work: The source whose rows do not fit.
    needed_bytes: The estimated size of its rows, and of the rows of earlier
      sources on the same disk.
    free_bytes: The free space of the disk.
  """
  num_files = max(source.num_files for source in work.source_by_split.values())
  return UserError(
    f"{work.directory}: the disk has {short_number(free_bytes)}B free, and the"
    f" rows need about {short_number(needed_bytes)}B. Prepare on another disk"
    " with --config.data.prepared_dir=DIR, read fewer files with"
    f" --config.data.files (now {num_files}), or tokenize during training with"
    " --config.data.mode=streamed"
  )


def _format_duration(seconds: float) -> str:
  """Returns hours and minutes, or minutes and seconds, such as "2 h 05 min"."""
  minutes, seconds = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {seconds:02} s"
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes:02} min"
