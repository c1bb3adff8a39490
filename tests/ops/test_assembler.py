"""The assembler of the GPU kernels: which ptxas is found, preferred and trusted."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jaxlib
import pytest

from diffjax.ops.diff_attention.gpu import assembler
from tests.harness import ROOT

PACKAGED = "nvidia/cu13/bin"


def install_ptxas(
  folder: pathlib.Path, release: str, mode: int = 0o755
) -> pathlib.Path:
  """Writes a program that prints a version as ptxas does."""
  folder.mkdir(parents=True)
  path = folder / "ptxas"
  path.write_text(
    f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n"
  )
  path.chmod(mode)
  return path


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """A machine without any ptxas: an empty PATH and an empty site-packages."""
  site = tmp_path / "site"
  monkeypatch.setattr(sys, "path", [str(site)])
  monkeypatch.setenv("PATH", str(tmp_path / "bin"))
  assembler.refusal.cache_clear()
  yield tmp_path
  assembler.refusal.cache_clear()


@pytest.fixture
def jax_takes(monkeypatch):
  """jax_takes(release, version): the release of JAX's assembler, and JAX's version."""

  def take(release, version=(0, 11, 2), has_nvjitlink=False):
    def asked():
      if isinstance(release, Exception):
        raise release
      return release

    monkeypatch.setattr(assembler, "release", asked)
    monkeypatch.setattr(assembler, "is_nvjitlink_loaded", lambda: has_nvjitlink)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))

  return take


def test_the_version_is_read(machine):
  path = install_ptxas(machine / "bin", "13.5")
  assert assembler.version(path) == (13, 5, 88)


def test_what_does_not_run_has_no_version(machine):
  not_executable = install_ptxas(machine / "bin", "13.5", mode=0o644)
  assert assembler.version(not_executable) == ()
  assert assembler.version(machine / "missing") == ()
  silent = machine / "silent"
  silent.write_text("#!/bin/sh\n")
  silent.chmod(0o755)
  assert assembler.version(silent) == ()


def test_the_packaged_one_is_found(machine, monkeypatch):
  assert assembler.packaged() is None
  second = install_ptxas(machine / "second" / PACKAGED, "13.4")
  monkeypatch.setattr(sys, "path", [*sys.path, str(machine / "second")])
  assert assembler.packaged() == second
  first = install_ptxas(machine / "site" / PACKAGED, "13.5")
  assert assembler.packaged() == first


@pytest.mark.parametrize("on_path", [None, "13.0", "12.9"])
def test_the_packaged_one_is_preferred_to_an_older_one(machine, on_path):
  packaged = install_ptxas(machine / "site" / PACKAGED, "13.5")
  if on_path is not None:
    install_ptxas(machine / "bin", on_path)
  before = os.environ["PATH"]
  assembler.prefer_packaged()
  assert os.environ["PATH"] == f"{packaged.parent}{os.pathsep}{before}"


@pytest.mark.parametrize(
  ("packaged", "mode", "on_path"),
  [
    (None, 0o755, "13.0"),
    (None, 0o755, None),
    ("13.2", 0o755, "13.0"),
    ("13.2", 0o755, None),
    ("13.5", 0o755, "13.3"),
    ("13.3", 0o755, "14.0"),
    ("13.5", 0o644, "13.0"),
  ],
)
def test_the_path_stays(machine, packaged, mode, on_path):
  """If there is no packaged one, it is too old or not executable, or PATH's serves."""
  if packaged is not None:
    install_ptxas(machine / "site" / PACKAGED, packaged, mode)
  if on_path is not None:
    install_ptxas(machine / "bin", on_path)
  before = os.environ["PATH"]
  assembler.prefer_packaged()
  assert os.environ["PATH"] == before


def test_without_a_path_the_packaged_one_is_preferred(machine, monkeypatch):
  packaged = install_ptxas(machine / "site" / PACKAGED, "13.5")
  monkeypatch.delenv("PATH")
  assembler.prefer_packaged()
  assert os.environ["PATH"].split(os.pathsep)[0] == str(packaged.parent)


def test_the_packaged_one_is_preferred_before_jax_is_asked(
  machine, monkeypatch
):
  """JAX looks for its assembler once in a process."""
  packaged = install_ptxas(machine / "site" / PACKAGED, "13.5")
  seen = []

  def release():
    seen.append(os.environ["PATH"].split(os.pathsep)[0])
    return (13, 5)

  monkeypatch.setattr(assembler, "release", release)
  monkeypatch.setattr(assembler, "is_nvjitlink_loaded", lambda: False)
  assert assembler.refusal() is None
  assert seen == [str(packaged.parent)]


@pytest.mark.parametrize(
  ("release", "trusted"),
  [((12, 8), False), ((13, 0), False), ((13, 2), False)]
  + [((13, 3), True), ((13, 10), True), ((14, 0), True)],
)
def test_an_old_assembler_is_not_trusted(machine, jax_takes, release, trusted):
  jax_takes(release)
  assert (assembler.refusal() is None) == trusted


@pytest.mark.parametrize(
  ("release", "named"), [((13, 0), "13.0"), ((12, 8), "12")]
)
def test_an_old_assembler_is_named(machine, jax_takes, release, named):
  jax_takes(release)
  assert assembler.refusal() == (
    f"needs ptxas 13.3 or newer, and JAX uses ptxas of CUDA {named} here, which"
    " can corrupt products; pip install 'diffjax[cuda]'"
  )


def test_an_assembler_that_is_not_found_is_not_trusted(machine, jax_takes):
  jax_takes(RuntimeError("No PTX compilation provider is available.\nDetails"))
  assert assembler.refusal() == (
    "needs ptxas 13.3 or newer, and JAX finds none (No PTX compilation provider"
    " is available.); pip install 'diffjax[cuda]'"
  )


@pytest.mark.parametrize(
  ("version", "has_nvjitlink", "trusted"),
  [((0, 11, 2), True, True), ((0, 12, 0), False, True)]
  + [((0, 12, 0), True, False), ((0, 13, 0), True, False)],
)
def test_nvjitlink_is_not_trusted(
  machine, jax_takes, version, has_nvjitlink, trusted
):
  """JAX 0.11 never takes it, though cuSPARSE loads it there, too."""
  jax_takes((13, 5), version, has_nvjitlink)
  said = assembler.refusal()
  assert (said is None) == trusted
  if not trusted:
    assert said == (
      f"needs ptxas, and JAX {jax.__version__} uses nvJitLink, which ignores"
      " the kernels' register counts and makes them spill;"
      " pip install 'diffjax[cuda]', which brings JAX 0.11"
    )


def test_loaded_libraries_are_seen():
  own = pathlib.Path(jaxlib._jax.__file__)
  assert assembler.is_loaded(own.name.split(".")[0])
  assert not assembler.is_loaded("libnvNothing")


PROGRAM = """
from benchmarks.gpu import static
from diffjax.ops.diff_attention.gpu import assembler

assert assembler.refusal() is None, assembler.refusal()
static.compile_small_kernel()
print(assembler.release())
"""


@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2)
  or importlib.util.find_spec("jax_cuda13_plugin") is None
  or assembler.packaged() is None,
  reason="needs the compiler for Hopper and its packaged ptxas",
)
def test_pallas_takes_the_packaged_ptxas(tmp_path):
  """Though there is an old one on PATH, and a backend was started before."""
  used = tmp_path / "used"
  old = tmp_path / "bin/ptxas"
  old.parent.mkdir()
  old.write_text(
    f"#!/bin/sh\necho \"$@\" >> {used}\necho 'release 13.0, V13.0.88'\n"
  )
  old.chmod(0o755)
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PATH": f"{old.parent}:/usr/bin:/bin",
  }
  result = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr
  major, minor, *_ = assembler.version(assembler.packaged())
  assert result.stdout.splitlines()[-1] == str((major, minor))
  assert set(used.read_text().split()) == {"--version"}
