"""What tells a source's files from changed ones without reading them whole.

A stream that is resumed goes on at a place in its files, which should be what they were. Compared are the names and sizes of all files, and
the first and last bytes of some (of a TFDS data set, the number of its records, and some of them): enough for files that were replaced,
rewritten, added or cut. Text that changed elsewhere at the same size is not seen. The files' times may tell of it, but a copy of the files
has other times too. The Hub gives a hash of each file's whole content, which is compared instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from diffjax.config import UserError
from diffjax.data.document import reason
from diffjax.data.files import File, open_file
from diffjax.progress import say

_SAMPLED = 32
_SAMPLE = 4096  # bytes, at either end of a file


def fingerprint(files: Sequence[File]) -> dict[str, str]:
  """Digests (hex) of the files' "names and sizes", "text" (of samples) and "times".

  Raises:
    UserError: if a file cannot be read.
  """
  return {
    "names and sizes": digest([(file.name, file.size) for file in files]),
    "text": _text_digest(files),
    "times": digest([file.time for file in files]),
  }


def _text_digest(files: Sequence[File]) -> str:
  content_ids = [file.content_id for file in files]
  if all(content_ids):
    return digest(content_ids)
  samples = hashlib.sha256()
  for index in sampled(len(files)):
    path, size = files[index].path, files[index].size
    try:
      with open_file(path) as file:
        samples.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        samples.update(file.read(_SAMPLE))
    except OSError as error:
      raise UserError(f"{path}: cannot be read ({reason(error)})") from error
  return samples.hexdigest()


def sampled(count: int) -> list[int]:
  """The indices, of `count`, of what is compared: some, the first and the last among them."""
  return sorted(
    {(count - 1) * number // (_SAMPLED - 1) for number in range(_SAMPLED)}
  )


def digest(value: object) -> str:
  """sha256 (hex) of a value that JSON holds."""
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def check_unchanged(
  saved: Mapping[str, Mapping[str, str]] | None,
  own: Mapping[str, Mapping[str, str]],
) -> None:
  """Refuses to go on in changed files, and says what cannot be checked.

  Args:
    saved: The fingerprints of a checkpoint, by source; None if it has none.
    own: Those of the run, of the same sources.

  Raises:
    UserError: if the files of a source have changed. Names the source, and what to do.
  """
  if saved is None:
    say(
      "this checkpoint is of a version that did not note which files it read: whether they have changed since is not checked"
    )
    return
  for spec, now in own.items():
    changed = next(
      (
        what
        for what in ("names and sizes", "text")
        if saved[spec][what] != now[what]
      ),
      None,
    )
    if changed:
      raise UserError(
        f"cannot continue in the data from this checkpoint: of the files of {spec!r}, the {changed} changed since, and a stream goes on at "
        "a place in the old ones: put those back, or start over with another --workdir (--config.train.init_from keeps the parameters)"
      )
    if saved[spec]["times"] != now["times"]:
      say(
        f"the files of {spec!r} have other times than at this checkpoint; their names, their sizes and the samples of their text that are "
        "compared are the same, so the run goes on; a change elsewhere in them would not be noticed"
      )
