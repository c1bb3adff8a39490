"""Measures what preparing FineWeb-Edu takes, on a synthetic copy of it.

    TIKTOKEN_CACHE_DIR=DIR python -m benchmarks.fineweb_edu --rows=20000

Writes Parquet files with FineWeb-Edu's schema, row groups of 1,000 rows, snappy
compression and document lengths, and prepares them with one worker and with one
worker a CPU. `--rows=727000` makes files of about the original size.

The text is English prose from documentation on this machine, not web text. Its
tokens are about as long as those of web text, but names and numbers differ, so
bytes per token are good to about a tenth.
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
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from benchmarks import cpu_name
from diffjax.config import DataConfig
from diffjax.data import prepared

# From the data set's card: sample/100BT has 140 files of about 727 row groups.
_ROW_GROUP = 1000
_FILE_GIGABYTES = 2.15
# Characters of a document, nearly all of one byte: 28.5 GB of snappy for 9.67 M rows, about 1.65 bytes of
# text for a stored one. Lengths of web pages are about log-normal.
_MEAN_BYTES = 4700
_SIGMA = 0.9
_SUFFIXES = (".md", ".rst", ".txt", "METADATA", "copyright")
_MIN_PARAGRAPH = 200  # characters; shorter ones are mostly headings and code
_MIN_LETTERS = 0.9  # share of letters, spaces, commas and full stops in prose


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
  """Writes a Parquet file like those of FineWeb-Edu."""
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
  columns: dict[str, list[Any]] = {
    name: []
    for name in (
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
  }
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
  """Bytes of the data set: of its files, its compressed and its plain texts."""

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


def prepare(config: DataConfig, workers: int) -> dict[str, float]:
  """Prepares rows and returns tokens, seconds and bytes on disk.

  "cpu_seconds" are those of this process, so they count one worker only.
  """
  start = time.perf_counter()
  start_cpu = time.process_time()
  (target,) = prepared.prepare(config, workers)
  cpu_seconds = time.process_time() - start_cpu
  seconds = time.perf_counter() - start
  tokens = 0
  for totals in _read_meta(target.directory)["splits"].values():
    tokens += totals["tokens"]
  rows = pathlib.Path(target.directory).glob("*.array_record")
  row_bytes = sum(path.stat().st_size for path in rows)
  return {
    "tokens": tokens,
    "seconds": seconds,
    "cpu_seconds": cpu_seconds,
    "row_bytes": row_bytes,
  }


def _read_meta(directory: str) -> dict[str, Any]:
  path = pathlib.Path(directory) / "meta.json"
  return json.loads(path.read_text(encoding="utf-8"))


def measure(options: argparse.Namespace, directory: str) -> dict[str, Any]:
  """Returns the figures of the data set that the options describe."""
  paragraphs = read_paragraphs(options.text, options.text_megabytes * 10**6)
  assert paragraphs, f"no prose in {options.text}; pass --text=DIRECTORY"
  paths = []
  for number in range(options.files):
    path = pathlib.Path(directory) / f"{number:03}_00000.parquet"
    write_file(os.fspath(path), options.rows, paragraphs)
    paths.append(path)
  stored = measure_files(paths)
  results: dict[str, Any] = {
    "cpu": cpu_name(),
    "cpus": os.cpu_count(),
    "python": platform.python_version(),
    "tokenizer": options.tokenizer,
    "length": options.length,
    "files": options.files,
    "rows_per_file": options.rows,
    "different_text_bytes": sum(map(len, paragraphs)),
  }
  results |= dataclasses.asdict(stored)
  worker_counts = dict.fromkeys([1, options.workers or os.cpu_count() or 1])
  for workers in worker_counts:
    config = DataConfig(
      source=f"parquet:{directory}/*.parquet",
      tokenizer=options.tokenizer,
      length=options.length,
      prepared_dir=f"{directory}/rows-{workers}",
    )
    run = prepare(config, workers)
    rate = run["tokens"] / run["seconds"]
    results[f"tokens_per_second_{workers}_workers"] = round(rate)
    if workers == 1:
      # Other programs on the machine hardly change this.
      cpu_rate = run["tokens"] / run["cpu_seconds"]
      results["tokens_per_cpu_second"] = round(cpu_rate)
  tokens, row_bytes = run["tokens"], run["row_bytes"]
  results["tokens"] = tokens
  results["plain_bytes_per_token"] = round(stored.plain_bytes / tokens, 3)
  results["download_bytes_per_token"] = round(stored.text_bytes / tokens, 3)
  results["file_bytes_per_token"] = round(stored.file_bytes / tokens, 3)
  results["row_bytes_per_token"] = round(row_bytes / tokens, 3)
  return results


def _print(results: dict[str, Any]) -> Iterator[str]:
  yield json.dumps(results, indent=2)
  per_file = _FILE_GIGABYTES / results["file_bytes_per_token"]
  yield f"a file of {_FILE_GIGABYTES} GB has {per_file:.2f} G tokens"
  row_gigabytes = results["row_bytes_per_token"]
  yield f"1 G tokens take {row_gigabytes:.2f} GB of rows"
  hours = 1e9 / results["tokens_per_cpu_second"] / 3600
  yield f"1 G tokens take {hours:.2f} hours on one core"


def main() -> None:
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
  parser.add_argument("--out", default="", help="JSON file of the results")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as directory:
    results = measure(options, directory)
  for line in _print(results):
    print(line)
  if options.out:
    text = json.dumps(results, indent=2) + "\n"
    pathlib.Path(options.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
  main()
