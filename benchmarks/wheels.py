"""Packages for a machine without a network: wheels are downloaded where there is one, and installed there."""

from __future__ import annotations

import importlib
import importlib.metadata
import pathlib
import subprocess
import sys

_PLATFORMS = (
  "manylinux2014_x86_64",
  *(
    f"manylinux_2_{minor}_x86_64"
    for minor in (17, 24, 26, 27, 28, 31, 34, 35, 39)
  ),
)


def download(target: pathlib.Path, *what: str) -> None:
  """Downloads wheels for Python 3.12 on Linux, whatever this machine has, so that all machines get the same.

  Args:
    target: the directory to make.
    what: packages, or options of `pip download`. What a package needs is not downloaded with it.
  """
  temporary = target.with_name(f"{target.name}.tmp")
  platforms = [
    part for platform in _PLATFORMS for part in ("--platform", platform)
  ]
  command = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "-q",
    "--no-deps",
    "--only-binary=:all:",
    "--python-version",
    "3.12",
  ]
  subprocess.run(
    [
      *command,
      "--implementation",
      "cp",
      *platforms,
      "-d",
      str(temporary),
      *what,
    ],
    check=True,
  )
  temporary.rename(target)


def install(wheels: pathlib.Path, site: pathlib.Path) -> None:
  """Installs the wheels of packages that this machine lacks, or has in older versions, into a directory, for this process too.

  Raises:
    RuntimeError: pip failed; the message is its last line.
  """
  from pip._vendor.packaging import utils, version

  sys.path.insert(0, str(site))
  missing = []
  for wheel in sorted(wheels.glob("*.whl")):
    name, packed, *_ = utils.parse_wheel_filename(wheel.name)
    try:
      if version.Version(importlib.metadata.version(name)) >= packed:
        continue
    except importlib.metadata.PackageNotFoundError:
      pass
    missing.append(str(wheel))
  if missing:
    command = [
      sys.executable,
      "-m",
      "pip",
      "install",
      "-q",
      "--no-index",
      "--no-deps",
      "--upgrade",
      "--target",
      str(site),
      *missing,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
      raise RuntimeError(
        f"-m pip install failed: {result.stderr.strip().splitlines()[-1]}"
      )
    importlib.invalidate_caches()  # Python remembers that the directory was missing
