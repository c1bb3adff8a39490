"""What preparing will take: bytes to read, disk space and time."""

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

# Local sources of less than this (bytes) are prepared within seconds. No sample
# is taken of them, and the disk is not checked.
_SMALL = 64 << 20
# ArrayRecord pads the rows and the footer of a file to 64 KiB each. The file of
# the sample is padded too, so estimates are a few percent too large.
_FILE_PADDING = 128 << 10  # bytes


class Needs(NamedTuple):
  """What the missing rows of a source need.

  Attributes:
    num_files: Files to read.
    read_bytes: Bytes to read. Files that two splits share count twice.
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
  """Prints what preparing needs, and checks that the disk is large enough.

  It reads a sample of each source. Small local sources are left out.

  Args:
    works: The targets that are not complete.
    config: The data fields.
    workers: Number of processes; 0 for one a CPU.

  Raises:
    UserError: if the free space on a disk is less than its rows need.
  """
  needed_bytes: dict[int, float] = collections.defaultdict(float)
  for work in works:
    if _is_small(work):
      continue
    needs = estimate(work, config)
    existing = _nearest_existing(work.directory)
    free_bytes = shutil.disk_usage(existing).free
    disk = os.stat(existing).st_dev
    needed_bytes[disk] += needs.row_bytes
    num_workers = worker_count(workers, len(work.missing))
    _print(work, needs, free_bytes, num_workers)
    if needed_bytes[disk] > free_bytes:
      raise _disk_too_small(work, needed_bytes[disk], free_bytes)


def estimate(work: Work, config: DataConfig) -> Needs:
  """Returns what the missing shards of a target need, from a sample."""
  all_missing = work.missing
  # "train" comes first. It has more documents than validation has.
  sampled = next(iter(work.opened.values()))
  sample = take_sample(sampled, config)
  if not sample.tokens:
    return Needs(0, 0.0, 0.0, 0.0, 0.0)
  num_files = 0
  read_bytes = 0.0
  num_samples = 0.0
  for split, source in work.opened.items():
    missing = [shard for shard in all_missing if shard.split == split]
    missing_parts = sum(shard.stop - shard.start for shard in missing)
    share = missing_parts / len(source.parts)
    if missing:
      num_files = max(num_files, source.num_files)
    read_bytes += share * source.size
    num_repeats = share * source.size / sample.stored_bytes
    # The same bytes hold more or fewer documents of this split than of the
    # sampled one.
    share_ratio = source.split_share / sampled.split_share
    num_samples += num_repeats * share_ratio
  padding = _FILE_PADDING * len(all_missing)
  return Needs(
    num_files,
    read_bytes,
    sample.tokens * num_samples,
    sample.row_bytes * num_samples + padding,
    sample.seconds * num_samples,
  )


def _is_small(work: Work) -> bool:
  if sources.is_on_hub(work.spec):
    return False
  return max(source.size for source in work.opened.values()) < _SMALL


def _nearest_existing(path: str) -> str:
  """Returns the path, or its nearest parent that exists."""
  path = os.path.abspath(path)
  while not os.path.exists(path):
    path = os.path.dirname(path)
  return path


def _print(
  work: Work, needs: Needs, free_bytes: float, num_workers: int
) -> None:
  verb = "download" if sources.is_on_hub(work.spec) else "read"
  plural = "s" if num_workers > 1 else ""
  seconds = needs.seconds / num_workers
  say(
    f"{work.spec}: {needs.num_files} files to {verb}, up to"
    f" {short_number(needs.read_bytes)}B; about {short_number(needs.tokens)}"
    f" tokens in {short_number(needs.row_bytes)}B of rows in {work.directory}"
    f" ({short_number(free_bytes)}B free); about {_duration(seconds)} with"
    f" {num_workers} worker{plural}"
  )


def _disk_too_small(
  work: Work, needed_bytes: float, free_bytes: float
) -> UserError:
  num_files = max(source.num_files for source in work.opened.values())
  return UserError(
    f"{work.directory}: the disk has {short_number(free_bytes)}B free, and the"
    f" rows need about {short_number(needed_bytes)}B. Prepare on another disk"
    " with --config.data.prepared_dir=DIR, read fewer files with"
    f" --config.data.files (now {num_files}), or tokenize during training with"
    " --config.data.mode=streamed"
  )


def _duration(seconds: float) -> str:
  """Returns hours and minutes, or minutes and seconds, such as "2 h 05 min"."""
  minutes, seconds = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes} min {seconds:02} s"
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes:02} min"
