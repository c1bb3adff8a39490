"""libtpu prints nothing on a machine without a TPU; a TPU is still found."""

import importlib.machinery
import os
import subprocess
import sys
import types
from pathlib import PurePath

import pytest

from diffjax.host import absent_tpu
from tests.harness import ROOT


@pytest.fixture
def make_machine(monkeypatch):
  """make_machine(devices=["/dev/nvidia0"], plugins=["xla_cuda13"]).

  Replaces this machine by another one. By default, it has libtpu and no
  accelerator.
  """
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.delitem(sys.modules, "jax")
  for name in list(os.environ):
    if "TPU" in name:
      monkeypatch.delenv(name)

  def make(devices=(), plugins=(), vendors=(), libtpu=True):
    paths = list(devices)
    for index in range(len(vendors)):
      paths.append(f"/sys/bus/pci/devices/{index}/vendor")

    def glob(pattern):
      return [path for path in paths if PurePath(path).match(pattern)]

    def pci_vendor(path):
      index = int(path.split("/")[-2])
      return vendors[index]

    def find_spec(name):
      if name == "libtpu" and libtpu:
        return object()
      return None

    def entry_points(group):
      return [types.SimpleNamespace(name=name) for name in plugins]

    monkeypatch.setattr(absent_tpu.glob, "glob", glob)
    monkeypatch.setattr(absent_tpu.os.path, "exists", paths.__contains__)
    monkeypatch.setattr(absent_tpu, "_pci_vendor", pci_vendor)
    monkeypatch.setattr(absent_tpu.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(
      absent_tpu.importlib.metadata, "entry_points", entry_points
    )

  return make


@pytest.mark.parametrize(
  "machine",
  [
    pytest.param({}, id="no devices"),
    pytest.param({"vendors": ["0x8086"]}, id="PCI device of Intel"),
    pytest.param({"plugins": ["xla_cuda13"]}, id="CUDA without a GPU"),
  ],
)
def test_a_machine_without_accelerators_uses_its_cpu(make_machine, machine):
  """The machine has libtpu. Without JAX_PLATFORMS, JAX would look for TPUs."""
  make_machine(**machine)

  absent_tpu.skip()

  assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
  "machine",
  [
    pytest.param({"libtpu": False}, id="no libtpu"),
    pytest.param({"devices": ["/dev/accel0"]}, id="TPU"),
    pytest.param({"devices": ["/dev/vfio/0"]}, id="TPU through VFIO"),
    pytest.param({"vendors": ["0x8086", "0x1ae0"]}, id="PCI device of Google"),
    pytest.param(
      {"plugins": ["xla_cuda13"], "devices": ["/dev/nvidia0"]}, id="GPU"
    ),
    pytest.param(
      {"plugins": ["xla_cuda12"], "devices": ["/dev/dxg"]}, id="GPU in WSL"
    ),
    pytest.param({"plugins": ["another"]}, id="plugin of other hardware"),
  ],
)
def test_a_machine_that_may_have_an_accelerator_is_left_alone(
  make_machine, machine
):
  """JAX chooses its devices itself if JAX_PLATFORMS is not set."""
  make_machine(**machine)

  absent_tpu.skip()

  assert "JAX_PLATFORMS" not in os.environ


@pytest.mark.parametrize(
  "name", ["TPU_WORKER_ID", "LIBTPU_INIT_ARGS", "JAX_FORCE_TPU_INIT"]
)
def test_jax_looks_for_a_tpu_if_a_variable_asks_for_one(
  make_machine, monkeypatch, name
):
  # A machine with libtpu and without accelerators.
  make_machine()
  monkeypatch.setenv(name, "tpu")

  absent_tpu.skip()

  assert "JAX_PLATFORMS" not in os.environ


def test_platforms_that_the_user_chose_are_kept(make_machine, monkeypatch):
  # Without the variable, JAX would use the CPU of this machine.
  make_machine()
  monkeypatch.setenv("JAX_PLATFORMS", "tpu")

  absent_tpu.skip()

  assert os.environ["JAX_PLATFORMS"] == "tpu"


@pytest.mark.parametrize(
  "name", ["OUTPUT_DIR", "TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"]
)
def test_other_variables_do_not_ask_for_a_tpu(make_machine, monkeypatch, name):
  """JAX and libtpu set the last two themselves."""
  make_machine()
  monkeypatch.setenv(name, "1")

  absent_tpu.skip()

  assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_a_module_named_jax_plugins_has_no_plugins(make_machine, monkeypatch):
  """JAX looks for plugins in a package with this name, and not in a module.

  A plugin could use other hardware, so JAX would choose its devices itself.
  """
  make_machine()
  # The spec of a package has the directories in which its modules are.
  module = importlib.machinery.ModuleSpec(
    "jax_plugins", loader=None, is_package=False
  )

  def find_spec(name):
    return {"libtpu": object(), "jax_plugins": module}.get(name)

  monkeypatch.setattr(absent_tpu.importlib.util, "find_spec", find_spec)

  absent_tpu.skip()

  assert os.environ["JAX_PLATFORMS"] == "cpu"


def run_without_platforms(code: str) -> tuple[str, str]:
  """Runs Python code without JAX_PLATFORMS, and returns stdout and stderr."""
  environment = dict(os.environ)
  environment.pop("JAX_PLATFORMS", None)
  # Another process may have loaded libtpu.
  environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  return result.stdout, result.stderr


IMPORT_JAX = """
import jax
"""
SKIP_TPU = """
from diffjax.host import absent_tpu
absent_tpu.skip()
"""
PRINT_PLATFORM = """
import jax
print(jax.devices()[0].platform)
"""


@pytest.mark.full
@pytest.mark.parametrize(
  "program",
  [
    pytest.param(SKIP_TPU + PRINT_PLATFORM, id="before JAX"),
    pytest.param(IMPORT_JAX + SKIP_TPU + PRINT_PLATFORM, id="in a notebook"),
  ],
)
def test_jax_prints_nothing_about_absent_tpus(program):
  """Otherwise, libtpu complains. A notebook may have imported JAX before."""
  # The test needs a machine on which JAX prints such a complaint.
  _, errors_without_skip = run_without_platforms(PRINT_PLATFORM)
  if "TPU" not in errors_without_skip:
    pytest.skip("JAX prints nothing about TPUs on this machine")

  out, errors = run_without_platforms(program)

  assert out == "cpu\n"
  assert "TPU" not in errors
