"""The assembler of the GPU kernels: which ptxas is found, used and trusted."""

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

# Where the package nvidia-cuda-nvcc installs ptxas.
PACKAGE_FOLDER = "nvidia/cu13/bin"


def install_program(path: pathlib.Path, script: str) -> None:
  """Writes an executable shell script."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(0o755)


def install_ptxas(folder: pathlib.Path, release: str) -> pathlib.Path:
  """Writes a program that prints its version as ptxas does."""
  path = folder / "ptxas"
  message = f"Cuda compilation tools, release {release}, V{release}.88"
  install_program(path, f"echo '{message}'")
  return path


@pytest.fixture(autouse=True)
def refusal_is_not_cached():
  """`refusal` is computed once per process: forgets that of other tests."""
  assembler.refusal.cache_clear()
  yield
  assembler.refusal.cache_clear()


@pytest.fixture
def site_packages(monkeypatch, tmp_path):
  """The only folder on sys.path. It has no ptxas yet."""
  folder = tmp_path / "site"
  monkeypatch.setattr(sys, "path", [str(folder)])
  return folder


@pytest.fixture
def bin_folder(monkeypatch, tmp_path):
  """The only folder on PATH. It has no ptxas yet."""
  folder = tmp_path / "bin"
  monkeypatch.setenv("PATH", str(folder))
  return folder


def test_version_is_read_from_the_program(bin_folder):
  ptxas = install_ptxas(bin_folder, "13.5")

  assert assembler.version(ptxas) == (13, 5, 88)


def test_missing_program_has_no_version(bin_folder):
  assert assembler.version(bin_folder / "ptxas") == ()


def test_program_that_is_not_executable_has_no_version(bin_folder):
  ptxas = install_ptxas(bin_folder, "13.5")
  ptxas.chmod(0o644)

  assert assembler.version(ptxas) == ()


def test_program_that_prints_nothing_has_no_version(bin_folder):
  install_program(bin_folder / "ptxas", "")

  assert assembler.version(bin_folder / "ptxas") == ()


def test_no_packaged_ptxas_is_found_without_the_package(site_packages):
  assert assembler.packaged() is None


def test_packaged_ptxas_is_found_in_the_first_folder_that_has_it(
  site_packages, monkeypatch, tmp_path
):
  """Of three folders on sys.path, the second one and the third have a ptxas."""
  without_ptxas = tmp_path / "without_ptxas"
  other = tmp_path / "other"
  folders = [str(without_ptxas), str(site_packages), str(other)]
  monkeypatch.setattr(sys, "path", folders)
  ptxas = install_ptxas(site_packages / PACKAGE_FOLDER, "13.5")
  install_ptxas(other / PACKAGE_FOLDER, "13.4")

  found = assembler.packaged()

  assert found == ptxas


@pytest.mark.parametrize("release_on_path", [None, "13.0", "12.9"])
def test_packaged_ptxas_is_preferred_to_an_unsafe_one(
  site_packages, bin_folder, release_on_path
):
  """Its folder becomes the first one on PATH. Before 13.3, ptxas is unsafe."""
  packaged = install_ptxas(site_packages / PACKAGE_FOLDER, "13.5")
  if release_on_path is not None:
    install_ptxas(bin_folder, release_on_path)

  assembler.prefer_packaged()

  expected = os.pathsep.join([str(packaged.parent), str(bin_folder)])
  assert os.environ["PATH"] == expected


def test_packaged_ptxas_is_preferred_without_a_path(
  site_packages, bin_folder, monkeypatch
):
  """The environment variable PATH does not exist."""
  packaged = install_ptxas(site_packages / PACKAGE_FOLDER, "13.5")
  monkeypatch.delenv("PATH")

  assembler.prefer_packaged()

  first_folder = os.environ["PATH"].split(os.pathsep)[0]
  assert first_folder == str(packaged.parent)


@pytest.mark.parametrize(
  ("packaged_release", "release_on_path"),
  [
    pytest.param(None, "13.0", id="no_package"),
    pytest.param(None, None, id="no_ptxas"),
    pytest.param("13.2", "13.0", id="unsafe_package"),
    pytest.param("13.2", None, id="only_unsafe_package"),
    pytest.param("13.5", "13.3", id="safe_path"),
    pytest.param("13.3", "14.0", id="newer_on_path"),
  ],
)
def test_path_changes_only_if_it_replaces_an_unsafe_ptxas_by_a_safe_one(
  site_packages, bin_folder, packaged_release, release_on_path
):
  """ptxas is safe from release 13.3 on. PATH stays in all these cases."""
  if packaged_release is not None:
    install_ptxas(site_packages / PACKAGE_FOLDER, packaged_release)
  if release_on_path is not None:
    install_ptxas(bin_folder, release_on_path)

  assembler.prefer_packaged()

  assert os.environ["PATH"] == str(bin_folder)


def test_path_does_not_change_if_the_package_is_not_executable(
  site_packages, bin_folder
):
  packaged = install_ptxas(site_packages / PACKAGE_FOLDER, "13.5")
  packaged.chmod(0o644)
  # An unsafe ptxas, which a usable package would replace.
  install_ptxas(bin_folder, "13.0")

  assembler.prefer_packaged()

  assert os.environ["PATH"] == str(bin_folder)


def test_packaged_ptxas_is_preferred_before_jax_looks_for_one(
  site_packages, bin_folder, monkeypatch
):
  """JAX looks once in a process, so a later change of PATH has no effect."""
  packaged = install_ptxas(site_packages / PACKAGE_FOLDER, "13.5")
  paths_when_jax_looks = []

  def record_path_and_return_release():
    paths_when_jax_looks.append(os.environ["PATH"])
    return (13, 5)

  # This function makes JAX look for ptxas.
  monkeypatch.setattr(assembler, "release", record_path_and_return_release)
  monkeypatch.setattr(assembler, "is_nvjitlink_loaded", lambda: False)

  reason_to_refuse = assembler.refusal()

  assert reason_to_refuse is None
  expected_path = os.pathsep.join([str(packaged.parent), str(bin_folder)])
  assert paths_when_jax_looks == [expected_path]


@pytest.fixture
def set_jax(monkeypatch, site_packages, bin_folder):
  """Sets JAX's version, its ptxas release, and whether it has nvJitLink."""

  def set_versions(release, version=(0, 11, 2), has_nvjitlink=False):
    monkeypatch.setattr(assembler, "release", lambda: release)
    monkeypatch.setattr(assembler, "is_nvjitlink_loaded", lambda: has_nvjitlink)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))

  return set_versions


@pytest.mark.parametrize("release", [(13, 3), (13, 10), (14, 0)])
def test_ptxas_of_13_3_or_newer_is_trusted(set_jax, release):
  set_jax(release=release)

  assert assembler.refusal() is None


@pytest.mark.parametrize(
  ("release", "name"),
  [
    pytest.param((12, 8), "12", id="12.8"),
    pytest.param((13, 0), "13.0", id="13.0"),
    pytest.param((13, 2), "13.2", id="13.2"),
  ],
)
def test_older_ptxas_is_refused(set_jax, release, name):
  set_jax(release=release)

  assert assembler.refusal() == (
    f"needs ptxas 13.3 or newer, and JAX uses ptxas of CUDA {name} here, which"
    " can corrupt products; pip install 'diffjax[cuda]'"
  )


def test_missing_ptxas_is_refused(set_jax, monkeypatch):
  """The reason contains the first line of JAX's error."""

  def raise_error():
    raise RuntimeError("No PTX compilation provider is available.\nDetails")

  set_jax(release=None)
  monkeypatch.setattr(assembler, "release", raise_error)

  assert assembler.refusal() == (
    "needs ptxas 13.3 or newer, and JAX finds none (No PTX compilation provider"
    " is available.); pip install 'diffjax[cuda]'"
  )


@pytest.mark.parametrize(
  ("version", "has_nvjitlink"),
  [
    # JAX 0.11 does not use nvJitLink, even if cuSPARSE has loaded it.
    pytest.param((0, 11, 2), True, id="0.11_with_nvjitlink"),
    pytest.param((0, 12, 0), False, id="0.12_without_nvjitlink"),
  ],
)
def test_jax_without_nvjitlink_is_trusted(set_jax, version, has_nvjitlink):
  """nvJitLink assembles kernels in place of ptxas, and makes them spill."""
  set_jax(release=(13, 5), version=version, has_nvjitlink=has_nvjitlink)

  assert assembler.refusal() is None


@pytest.mark.parametrize(
  "version",
  [pytest.param((0, 12, 0), id="0.12"), pytest.param((0, 13, 0), id="0.13")],
)
def test_jax_with_nvjitlink_is_refused(set_jax, version):
  """From 0.12 on, JAX assembles kernels with nvJitLink if it is loaded."""
  set_jax(release=(13, 5), version=version, has_nvjitlink=True)

  assert assembler.refusal() == (
    f"needs ptxas, and JAX {jax.__version__} uses nvJitLink, which ignores"
    " the kernels' register counts and makes them spill;"
    " pip install 'diffjax[cuda]', which brings JAX 0.11"
  )


def test_loaded_library_is_found():
  # jaxlib's library is loaded in each process that imports jax.
  library = pathlib.Path(jaxlib._jax.__file__)
  name, *_ = library.name.split(".")

  assert assembler.is_loaded(name)


def test_library_that_is_not_loaded_is_not_found():
  assert not assembler.is_loaded("libnvNothing")


@pytest.mark.skipif(
  jax.__version_info__ < (0, 11, 2),
  reason="the GPU kernels need JAX 0.11.2 or newer",
)
@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="the compiler for GPUs is not installed",
)
@pytest.mark.skipif(
  assembler.packaged() is None, reason="the package with ptxas is missing"
)
def test_pallas_compiles_with_the_packaged_ptxas(bin_folder, tmp_path):
  """PATH has an old ptxas, which is asked for its version and not used."""
  arguments_of_old_ptxas = tmp_path / "arguments"
  install_program(
    bin_folder / "ptxas",
    f'echo "$@" >> {arguments_of_old_ptxas}\necho "release 13.0, V13.0.88"',
  )
  program = """
from benchmarks.gpu import static
from diffjax.ops.diff_attention.gpu import assembler

assert assembler.refusal() is None, assembler.refusal()
static.compile_small_kernel()
major, minor = assembler.release()
print(f"JAX uses ptxas {major}.{minor}")
"""

  result = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "PATH": f"{bin_folder}:/usr/bin:/bin"},
    capture_output=True,
    text=True,
    timeout=300,
  )

  assert result.returncode == 0, result.stderr
  major, minor, _ = assembler.version(assembler.packaged())
  assert result.stdout.endswith(f"JAX uses ptxas {major}.{minor}\n")
  assert set(arguments_of_old_ptxas.read_text().split()) == {"--version"}
