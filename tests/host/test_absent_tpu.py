"""A newcomer's first page: nothing from the TPU's library where there is no TPU, and a TPU that may be there is looked for."""

import os
import subprocess
import sys

import pytest

from diffjax.host import absent_tpu
from tests.conftest import ROOT


@pytest.fixture
def machine(monkeypatch):
  """A machine with libtpu and nothing else; `machine(devices=["/dev/accel0"], plugins=["xla_cuda13"])` has these too."""
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  monkeypatch.delitem(sys.modules, "jax")
  for name in [name for name in os.environ if "TPU" in name]:
    monkeypatch.delenv(name)

  def make(devices=(), plugins=(), vendors=(), libtpu=True):
    there = [
      *devices,
      *(
        f"/sys/bus/pci/devices/{index}/vendor" for index in range(len(vendors))
      ),
    ]
    monkeypatch.setattr(
      absent_tpu.glob,
      "glob",
      lambda pattern: [
        path
        for path in there
        if absent_tpu.pathlib.PurePath(path).match(pattern)
      ],
    )
    monkeypatch.setattr(
      absent_tpu.os.path, "exists", lambda path: path in there
    )
    monkeypatch.setattr(
      absent_tpu, "_pci_vendor", lambda path: vendors[int(path.split("/")[-2])]
    )
    monkeypatch.setattr(
      absent_tpu.importlib.util,
      "find_spec",
      lambda name: object() if name == "libtpu" and libtpu else None,
    )
    points = [type("Point", (), {"name": name})() for name in plugins]
    monkeypatch.setattr(
      absent_tpu.importlib.metadata, "entry_points", lambda group: points
    )

  return make


@pytest.mark.parametrize(
  "there, skipped",
  [
    ({}, True),
    (dict(vendors=["0x8086"]), True),
    (dict(plugins=["xla_cuda13"]), True),
    (dict(libtpu=False), False),
    (dict(devices=["/dev/accel0"]), False),
    (dict(devices=["/dev/vfio/0"]), False),
    (dict(vendors=["0x8086", "0x1ae0"]), False),
    (dict(plugins=["xla_cuda13"], devices=["/dev/nvidia0"]), False),
    (dict(plugins=["xla_cuda12"], devices=["/dev/dxg"]), False),
    (dict(plugins=["another"]), False),
  ],
)
def test_only_a_machine_without_accelerators_computes_on_its_cpu_at_once(
  machine, there, skipped
):
  machine(**there)
  absent_tpu.skip()
  assert os.environ.get("JAX_PLATFORMS") == ("cpu" if skipped else None)


@pytest.mark.parametrize(
  "name",
  ["TPU_WORKER_ID", "LIBTPU_INIT_ARGS", "JAX_FORCE_TPU_INIT", "JAX_PLATFORMS"],
)
def test_who_asks_for_a_tpu_gets_jaxs_own_search(machine, monkeypatch, name):
  machine()
  monkeypatch.setenv(name, "tpu")
  absent_tpu.skip()
  assert os.environ.get("JAX_PLATFORMS") == (
    "tpu" if name == "JAX_PLATFORMS" else None
  )


def test_variables_that_only_sound_like_it_do_not_ask(machine, monkeypatch):
  machine()
  monkeypatch.setenv("OUTPUT_DIR", "x")
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # of JAX
  monkeypatch.setenv("TPU_LIBRARY_PATH", "x")  # of libtpu
  absent_tpu.skip()
  assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.full
@pytest.mark.parametrize("first", ["", "import jax; "])
def test_nothing_is_printed_of_a_tpu(first):
  """Also in a notebook that has imported JAX, where JAX by itself prints what the library says."""
  environment = {
    name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"
  }
  environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = (
    "1"  # another process may have loaded it
  )

  def run(code):
    code = f"{code}import jax; print(jax.devices()[0].platform)"
    result = subprocess.run(
      [sys.executable, "-c", code],
      cwd=ROOT,
      env=environment,
      capture_output=True,
      text=True,
    )
    return result.stdout, result.stderr

  if "TPU" not in run("")[1]:
    pytest.skip("JAX says nothing about TPUs here")
  out, errors = run(
    f"{first}from diffjax.host import absent_tpu; absent_tpu.skip(); "
  )
  assert out == "cpu\n" and "TPU" not in errors
