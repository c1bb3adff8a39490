"""Disk space and time to prepare FineWeb-Edu, on a synthetic copy of it.

    TIKTOKEN_CACHE_DIR=DIR python -m benchmarks.fineweb_edu --rows=20000

Writes Parquet files with FineWeb-Edu's schema, row groups of 1,000 rows, snappy
compression and document lengths, and prepares them with one worker and with one
worker a CPU. `--rows=727000` makes files of about the original size.

The text is English prose from documentation on this machine, not web text. Its
tokens are about as long as those of web text, but names and numbers differ, so
bytes per token are accurate to about a tenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import random
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from benchmarks import cpu_name
from diffjax.config import DataConfig
from diffjax.data import prepared

# From the data set's card: sample/100BT has 140 files of about 727 row groups.
_ROW_GROUP = 1000
_FILE_GIGABYTES = 2.15
# Characters of a document, nearly all of one byte. 9.67 M rows are 28.5 GB of
# snappy, and one byte of it holds about 1.65 bytes of text. The lengths of web
# pages are about log-normal.
_MEAN_BYTES = 4700
_SIGMA = 0.9
_SUFFIXES = (".md", ".rst", ".txt", "METADATA", "copyright")
# Characters of a paragraph. Shorter ones are mostly headings and code.
_MIN_PARAGRAPH = 200
# The share of letters, spaces, commas and full stops in prose.
_MIN_LETTERS = 0.9
# The columns of FineWeb-Edu.
_COLUMNS = (
  "text",
  "id",
  "dump",
  "url",
  "file_path",
  "language",
  "language_score",
  "token_count",
  "score",
  "int_score",
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """The flags of the command.

  Attributes:
    files: Number of files.
    rows: Rows of a file.
    tokenizer: `config.data.tokenizer`.
    length: `config.data.length`.
    workers: Number of workers. 0 for one on each CPU.
    text_megabytes: Amount of different text, in millions of characters.
    text: Directories of documentation.
  """

  files: int
  rows: int
  tokenizer: str
  length: int
  workers: int
  text_megabytes: int
  text: list[str]


def read_paragraphs(directories: Sequence[str], limit: int) -> list[str]:
  """Returns different paragraphs of prose from documentation files.

  Args:
    directories: Where to look for .md, .rst and .txt files and the like.
    limit: Number of characters to stop at.
  """
  paragraphs: dict[str, None] = {}
  size = 0
  for directory in directories:
    for path in sorted(pathlib.Path(directory).rglob("*")):
      if not path.name.endswith(_SUFFIXES) or not path.is_file():
        continue
      text = path.read_text(encoding="utf-8", errors="ignore")
      for paragraph in text.split("\n\n"):
        paragraph = " ".join(paragraph.split())
        if _is_prose(paragraph) and paragraph not in paragraphs:
          paragraphs[paragraph] = None
          size += len(paragraph)
      if size > limit:
        return list(paragraphs)
  return list(paragraphs)


def _is_prose(paragraph: str) -> bool:
  """Returns whether a paragraph is long enough and mostly letters."""
  if len(paragraph) < _MIN_PARAGRAPH:
    return False
  num_letters = sum(
    character.isalpha() or character in " ,." for character in paragraph
  )
  return num_letters > _MIN_LETTERS * len(paragraph)


def make_document(paragraphs: Sequence[str], rng: random.Random) -> str:
  """Returns random paragraphs, with a length drawn like FineWeb-Edu's."""
  # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
  length = _MEAN_BYTES * rng.lognormvariate(-(_SIGMA**2) / 2, _SIGMA)
  document = rng.choice(paragraphs)
  while len(document) < length:
    document += "\n" + rng.choice(paragraphs)
  return document[: round(length) + 1]


def write_file(path: str, num_rows: int, paragraphs: list[str]) -> None:
  """Writes a Parquet file with the format of FineWeb-Edu."""
  rng = random.Random(path)
  writer = None
  for first in range(0, num_rows, _ROW_GROUP):
    table = _make_row_group(min(_ROW_GROUP, num_rows - first), paragraphs, rng)
    if writer is None:
      writer = pyarrow.parquet.ParquetWriter(
        path, table.schema, compression="snappy"
      )
    writer.write_table(table, row_group_size=_ROW_GROUP)
  assert writer is not None
  writer.close()


def _make_row_group(
  num_rows: int, paragraphs: list[str], rng: random.Random
) -> pyarrow.Table:
  """Returns random rows with the columns of FineWeb-Edu."""
  columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
  for _ in range(num_rows):
    text = make_document(paragraphs, rng)
    key = f"{rng.getrandbits(128):032x}"
    score = rng.uniform(2.5, 5)
    columns["text"].append(text)
    columns["id"].append(f"<urn:uuid:{key[:8]}-{key[8:12]}-{key[12:]}>")
    columns["dump"].append("CC-MAIN-2013-20")
    columns["url"].append(f"http://www.example.com/{key[:6]}/{text[:30]}")
    columns["file_path"].append(
      f"s3://commoncrawl/crawl-data/CC-MAIN-2013-20/segments/{key[:13]}/warc/"
      f"CC-MAIN-2013-{key[:14]}-{key[:5]}-ip-10-60-113-184.ec2.internal.warc.gz"
    )
    columns["language"].append("en")
    columns["language_score"].append(rng.uniform(0.65, 1))
    columns["token_count"].append(len(text) // 4)
    columns["score"].append(score)
    columns["int_score"].append(round(score))
  return pyarrow.table(columns)


@dataclasses.dataclass(frozen=True)
class Stored:
  """The sizes of the data set, in bytes.

  Attributes:
    file_bytes: The files.
    text_bytes: The compressed column of texts.
    plain_bytes: The same column without compression.
  """

  file_bytes: int
  text_bytes: int
  plain_bytes: int


def measure_files(paths: Sequence[pathlib.Path]) -> Stored:
  """Returns the sizes of Parquet files and of their text columns."""
  file_bytes = text_bytes = plain_bytes = 0
  for path in paths:
    file_bytes += path.stat().st_size
    metadata = pyarrow.parquet.read_metadata(path)
    for index in range(metadata.num_row_groups):
      column = metadata.row_group(index).column(0)
      assert column.path_in_schema == "text"
      text_bytes += column.total_compressed_size
      plain_bytes += column.total_uncompressed_size
  return Stored(file_bytes, text_bytes, plain_bytes)


class Preparation(NamedTuple):
  """What preparing rows has taken.

  Attributes:
    tokens: Number of tokens.
    seconds: Seconds by the clock.
    cpu_seconds: CPU time of this process, which does the work of one worker.
    row_bytes: Bytes of the rows on disk.
  """

  tokens: int
  seconds: float
  cpu_seconds: float
  row_bytes: int


def prepare(config: DataConfig, workers: int) -> Preparation:
  """Prepares the rows of a data set, and returns the time and the disk space.

  Args:
    config: The config of the data.
    workers: Number of workers.
  """
  start = time.perf_counter()
  start_cpu = time.process_time()
  (target,) = prepared.prepare(config, workers)
  cpu_seconds = time.process_time() - start_cpu
  seconds = time.perf_counter() - start

  directory = pathlib.Path(target.directory)
  meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
  tokens = sum(split["tokens"] for split in meta["splits"].values())
  rows = directory.glob("*.array_record")
  row_bytes = sum(path.stat().st_size for path in rows)
  return Preparation(tokens, seconds, cpu_seconds, row_bytes)


def write_files(
  settings: Settings, paragraphs: list[str], directory: str
) -> Stored:
  """Writes the copy of the data set, and returns its sizes."""
  paths = []
  for number in range(settings.files):
    path = pathlib.Path(directory) / f"{number:03}_00000.parquet"
    write_file(os.fspath(path), settings.rows, paragraphs)
    paths.append(path)
  return measure_files(paths)


def measure(settings: Settings, directory: str) -> dict[str, Any]:
  """Writes the data set and prepares it, and returns the figures of both.

  Args:
    settings: The flags.
    directory: An empty directory for the data set and its rows.
  """
  paragraphs = read_paragraphs(settings.text, settings.text_megabytes * 10**6)
  assert paragraphs, f"no prose in {settings.text}; pass --text=DIRECTORY"
  stored = write_files(settings, paragraphs, directory)
  results: dict[str, Any] = {
    "cpu": cpu_name(),
    "cpus": os.cpu_count(),
    "python": platform.python_version(),
    "tokenizer": settings.tokenizer,
    "length": settings.length,
    "files": settings.files,
    "rows_per_file": settings.rows,
    "different_text_bytes": sum(map(len, paragraphs)),
  }
  results |= dataclasses.asdict(stored)

  # With one worker and, if the machine has several CPUs, with one for each.
  num_workers = settings.workers or os.cpu_count() or 1
  for workers in sorted({1, num_workers}):
    config = DataConfig(
      source=f"parquet:{directory}/*.parquet",
      tokenizer=settings.tokenizer,
      length=settings.length,
      prepared_dir=f"{directory}/rows-{workers}",
    )
    preparation = prepare(config, workers)
    rate = preparation.tokens / preparation.seconds
    results[f"tokens_per_second_{workers}_workers"] = round(rate)
    if workers == 1:
      # Other programs on the machine hardly change this.
      cpu_rate = preparation.tokens / preparation.cpu_seconds
      results["tokens_per_cpu_second"] = round(cpu_rate)

  # All preparations have the same tokens and rows.
  tokens = preparation.tokens
  results["tokens"] = tokens
  sizes = {
    "plain": stored.plain_bytes,
    "download": stored.text_bytes,
    "file": stored.file_bytes,
    "row": preparation.row_bytes,
  }
  for name, num_bytes in sizes.items():
    results[f"{name}_bytes_per_token"] = round(num_bytes / tokens, 3)
  return results


def print_results(results: dict[str, Any]) -> None:
  """Prints the figures, and what follows from them for the original."""
  print(json.dumps(results, indent=2))
  tokens_per_file = _FILE_GIGABYTES / results["file_bytes_per_token"]
  print(f"a file of {_FILE_GIGABYTES} GB has {tokens_per_file:.2f} G tokens")
  row_gigabytes = results["row_bytes_per_token"]
  print(f"1 G tokens take {row_gigabytes:.2f} GB of rows")
  hours = 1e9 / results["tokens_per_cpu_second"] / 3600
  print(f"1 G tokens take {hours:.2f} hours on one core")


def main() -> None:
  """Measures a data set in a temporary directory, and prints the figures."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--files", type=int, default=1)
  parser.add_argument("--rows", type=int, default=20_000, help="of a file")
  parser.add_argument("--tokenizer", default="cl100k_base")
  parser.add_argument("--length", type=int, default=4096)
  parser.add_argument("--workers", type=int, default=0, help="0: all CPUs")
  parser.add_argument("--text_megabytes", type=int, default=60)
  parser.add_argument(
    "--text",
    nargs="+",
    default=["/usr/share/doc", sysconfig.get_path("purelib")],
    help="directories of documentation",
  )
  settings = Settings(**vars(parser.parse_args()))
  with tempfile.TemporaryDirectory() as directory:
    print_results(measure(settings, directory))


if __name__ == "__main__":
  main()
