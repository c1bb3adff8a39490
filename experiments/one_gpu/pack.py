"""Makes the pack that on_gpu.py needs, on a machine with a network.

    python -m experiments.one_gpu.pack runs/one_gpu [--set=FIELD=VALUE …]

It writes DIR/pack: text.jsonl.xz (the Python files of the packages that text.txt pins, a document each), tokenizer/ (trained on them) and
wheels/ (packages that training needs). What is downloaded for the text stays in DIR/downloads. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import pathlib
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence

from benchmarks import wheels

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Largest pack, so that the repository's files (8 MiB) fit beside it where 64 MiB can be brought along
_MAX_MIB = 55

# What training needs beyond JAX, SciPy, matplotlib, and packages whose wheels are large: tensorstore, tokenizers and uvloop
_PACKAGES = (
  "absl-py",
  "aiofiles",
  "array_record",
  "cloudpickle",
  "etils",
  "flax",
  "fsspec",
  "grain",
  "humanize",
  "jaxtyping",
  "markdown-it-py",
  "mdurl",
  "ml_collections",
  "msgpack",
  "optax",
  "orbax-checkpoint",
  "packaging",
  "portpicker",
  "prometheus_client",
  "protobuf",
  "psutil",
  "pygments",
  "pyyaml",
  "rich",
  "simplejson",
  "tensorboardX",
  "treescope",
  "typing_extensions",
  "wadler-lindig",
  "zipp",
)

# Files that are left out of the text: shorter ones, and ones that zlib shrinks less or more than so many times. The former hold data as
# text, the latter tables and generated code.
_MIN_BYTES, _MIN_RATIO, _MAX_RATIO = 400, 2, 10


def main(arguments: Sequence[str]) -> None:
  parser = argparse.ArgumentParser(description="Makes the pack for on_gpu.py.")
  parser.add_argument("dir", type=pathlib.Path, help="where to make it")
  parser.add_argument(
    "--set",
    action="append",
    default=[],
    metavar="FIELD=VALUE",
    help="a field of the config, as given to on_gpu.py",
  )
  parsed = parser.parse_args(arguments)
  directory = parsed.dir.resolve()
  pack, downloads, text = (
    directory / "pack",
    directory / "downloads",
    directory / "text.jsonl",
  )
  pack.mkdir(parents=True, exist_ok=True)
  if not downloads.exists():
    wheels.download(downloads, "--require-hashes", "-r", str(HERE / "text.txt"))
  if not (pack / "wheels").exists():
    wheels.download(pack / "wheels", *_PACKAGES)
  if not text.exists():
    _write(
      text,
      "".join(
        json.dumps({"text": document}, ensure_ascii=False) + "\n"
        for document in documents(downloads)
      ).encode(),
    )
  if not (pack / "tokenizer/tokenizer.json").exists():
    _train_tokenizer(text, pack / "tokenizer", parsed.set)
  if not (pack / "text.jsonl.xz").exists():
    _write(pack / "text.jsonl.xz", compress(text.read_bytes()))
  for path in sorted(pack.iterdir()):
    print(f"{_mib(path):6.1f} MiB {path}")
  if (size := _mib(pack)) > _MAX_MIB:
    sys.exit(f"error: {pack} takes {size:.1f} MiB, more than {_MAX_MIB}")


def documents(downloads: pathlib.Path) -> Iterator[str]:
  """The Python files of the wheels in a directory, in the order of names, each content once."""
  seen: set[bytes] = set()
  for wheel in sorted(downloads.glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
      for name in sorted(archive.namelist()):
        if not name.endswith(".py"):
          continue
        content = archive.read(name)
        digest = hashlib.sha256(content).digest()
        if (
          len(content) < _MIN_BYTES
          or digest in seen
          or not _MIN_RATIO
          < len(content) / len(zlib.compress(content))
          < _MAX_RATIO
        ):
          continue
        seen.add(digest)
        try:
          yield content.decode()
        except UnicodeDecodeError:
          continue


def compress(content: bytes) -> bytes:
  """The content as xz, with a dictionary that spans several packages: files of one have parts in common."""
  return lzma.compress(
    content,
    filters=[{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27}],
  )


def _train_tokenizer(
  text: pathlib.Path, target: pathlib.Path, settings: Sequence[str]
) -> None:
  vocabulary = next(
    (
      value
      for field, _, value in (each.partition("=") for each in settings)
      if field == "model.vocab_size"
    ),
    "4096",
  )
  command = [
    sys.executable,
    "-m",
    "diffjax.prepare",
    f"--config={HERE / 'config.py'}",
    *(f"--config.{each}" for each in settings),
  ]
  command += [
    f"--config.data.source=jsonl:{text}",
    f"--train_tokenizer={target}",
    f"--vocab_size={vocabulary}",
  ]
  subprocess.run(command, check=True, cwd=ROOT)


def _write(path: pathlib.Path, content: bytes) -> None:
  temporary = path.with_name(f"{path.name}.tmp")
  temporary.write_bytes(content)
  temporary.replace(path)


def _mib(path: pathlib.Path) -> float:
  return (
    sum(
      file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file()
    )
    / 2**20
  )


if __name__ == "__main__":
  main(sys.argv[1:])
