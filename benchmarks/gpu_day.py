"""Checks and times the GPU kernels on a machine that is there for minutes and has no network. benchmarks/gpu/DAY.md says what to look at.

    python -m benchmarks.gpu_day pack runs/gpu_day      # where there is a network: writes runs/gpu_day/pack
    python -m benchmarks.gpu_day 1 runs/gpu_day         # on the GPU, then 2 and 3: each ends within --limit seconds
    python -m experiments.one_gpu.on_gpu runs/one_gpu   # the fourth call, with a pack of its own

The machine needs Python 3.12, JAX for CUDA and pip. A call begins with its own parts and goes on with what others have left, so that the
same one again, or the next, measures what is missing. Results are in DIR/out, or in $OUT if that is set: DIR/out is copied there first, and
what comes back from $OUT belongs into DIR/out.

--rehearse does the same with tiny sizes on a CPU, the kernels in their interpreter.
"""

from __future__ import annotations

import argparse
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile

from benchmarks import wheels

# Until packages are installed, those other than the standard library may be missing.

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The parts that a call begins with, beside the checks. Names of the benchmark's parts; a rehearsal has fewer.
CALLS = {
  "1": ("v1_128",),
  "2": ("steps", "v1_64", "plain_128", "decode"),
  "3": ("v2_128", "plain_64", "v2_64", "packed"),
}
REHEARSED = {"1": ("v1_64",), "2": ("steps", "decode"), "3": ("packed",)}
_MAX_MIB = 55  # of the pack, so that the repository's files (8 MiB) fit beside it where 64 MiB can be brought along
_RESERVE = 15  # seconds to end, and to write the report

# What the benchmark needs beyond JAX, and tokamax with what it needs of its packages
_PACKAGES = (
  "absl-py",
  "etils",
  "flax",
  "fsspec",
  "jaxtyping",
  "markdown-it-py",
  "mdurl",
  "msgpack",
  "optax",
  "pygments",
  "pyyaml",
  "rich",
  "treescope",
  "typing_extensions",
  "wadler-lindig",
  "zipp",
  "annotated-types",
  "einshape",
  "immutabledict",
  "pydantic",
  "pydantic-core",
  "qwix",
  "tokamax",
  "tqdm",
  "typing-inspection",
)


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    "python -m benchmarks.gpu_day",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("call", choices=("pack", *CALLS))
  parser.add_argument("dir", type=pathlib.Path)
  parser.add_argument(
    "--limit",
    type=float,
    default=525,
    help="seconds for this call, 525 by default",
  )
  parser.add_argument(
    "--rehearse", action="store_true", help="tiny sizes on the CPU"
  )
  flags, rest = parser.parse_known_args(
    arguments
  )  # what else is given is for the benchmark: --again=failed, say
  directory = flags.dir.resolve()
  if flags.call == "pack":
    pack(directory)
  else:
    sys.exit(
      call(
        flags.call,
        directory,
        time.monotonic() + flags.limit,
        flags.rehearse,
        rest,
      )
    )


def pack(directory: pathlib.Path) -> None:
  """Makes DIR/pack: wheels/, and ptxas.xz, the newest assembler. What is there already is not made again."""
  packed, downloads = directory / "pack", directory / "downloads"
  packed.mkdir(parents=True, exist_ok=True)
  if not (packed / "wheels").exists():
    wheels.download(packed / "wheels", *_PACKAGES)
  if not (packed / "ptxas.xz").exists():
    if not downloads.exists():
      wheels.download(downloads, "nvidia-cuda-nvcc>=13.3")
    (wheel,) = downloads.glob("nvidia_cuda_nvcc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
      (name,) = [
        name for name in archive.namelist() if name.endswith("bin/ptxas")
      ]
      content = lzma.compress(archive.read(name), preset=9)
    temporary = packed / "ptxas.xz.tmp"
    temporary.write_bytes(content)
    temporary.replace(packed / "ptxas.xz")
  size = lambda path: (
    sum(
      file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()
    )
    / 2**20
  )
  for path in sorted(packed.iterdir()):
    print(f"{size(path):6.1f} MiB {path}")
  if size(packed) > _MAX_MIB:
    sys.exit(
      f"error: {packed} takes {size(packed):.1f} MiB, more than {_MAX_MIB}"
    )


def call(
  name: str,
  directory: pathlib.Path,
  deadline: float,
  rehearse: bool,
  rest: list[str],
) -> int:
  """Unpacks and runs the benchmark; its exit code."""
  packed, work = directory / "pack", directory / "work"
  if not (packed / "ptxas.xz").exists():
    sys.exit(
      f"error: {packed}/ptxas.xz is missing; python -m benchmarks.gpu_day pack {directory} makes it"
    )
  wheels.install(packed / "wheels", work / "site")
  out = pathlib.Path(os.environ.get("OUT") or directory / "out").resolve()
  if out != directory / "out" and (directory / "out").exists():
    shutil.copytree(directory / "out", out, dirs_exist_ok=True)
  out.mkdir(parents=True, exist_ok=True)
  paths = [str(work / "site"), str(ROOT), os.environ.get("PYTHONPATH")]
  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "PYTHONUNBUFFERED": "1",
  }
  command = [
    sys.executable,
    "-m",
    "benchmarks.gpu",
    "--out",
    str(out),
    "--ptxas",
    str(unpack_ptxas(packed, work)),
    "--parts",
    *parts(name, rehearse),
  ]
  command += [
    f"--seconds={deadline - time.monotonic() - _RESERVE:.0f}",
    *(["--rehearse"] if rehearse else []),
    *rest,
  ]
  with open(out / f"log_{name}.txt", "a", encoding="utf-8") as log:
    process = subprocess.Popen(
      command,
      env=environment,
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    assert process.stdout
    for line in process.stdout:
      print(line, end="", flush=True)
      log.write(line)
      log.flush()
    return process.wait()


def parts(name: str, rehearse: bool) -> list[str]:
  """The parts of a call, in their order: the checks, its own ones, then those of the others."""
  calls = REHEARSED if rehearse else CALLS
  return [
    "checks",
    *calls[name],
    *(
      part
      for other, theirs in calls.items()
      if other != name
      for part in theirs
    ),
  ]


def unpack_ptxas(packed: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
  """The folder with the packed ptxas."""
  path = work / "bin/ptxas"
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(lzma.decompress((packed / "ptxas.xz").read_bytes()))
    temporary.chmod(0o755)
    temporary.replace(path)
  return path.parent


if __name__ == "__main__":
  main()
