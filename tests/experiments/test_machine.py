"""The description of the machine of a run."""

import os
import platform

import pytest

from experiments import machine
from experiments.launch import Devices


def test_the_processor_is_named_in_cpuinfo(tmp_path):
  cpu_info = tmp_path / "cpuinfo"
  cpu_info.write_text(
    "processor\t: 0\n"
    "model\t\t: 106\n"
    "model name\t: Intel(R) Xeon(R) CPU @ 2.60GHz\n"
    "\n"
    "processor\t: 1\n"
  )

  assert machine.processor(cpu_info) == "Intel(R) Xeon(R) CPU @ 2.60GHz"


def test_the_processor_is_the_machine_type_without_cpuinfo(tmp_path):
  assert machine.processor(tmp_path / "missing") == platform.machine()


@pytest.mark.parametrize(
  "devices, num_slots, devices_of_a_run",
  [
    pytest.param(Devices("gpu", "H100", 8), 1, "8 × H100 (gpu)", id="all_gpus"),
    pytest.param(
      Devices("gpu", "H100", 8), 8, "1 × H100 (gpu)", id="a_gpu_each"
    ),
    pytest.param(
      Devices("cpu", "a CPU", 1), 2, "1 × a CPU (cpu)", id="shared_cpu"
    ),
  ],
)
def test_runs_side_by_side_share_devices_and_cores(
  devices, num_slots, devices_of_a_run
):
  """Each of `num_slots` runs gets an equal part, and at least one core."""
  num_cores = max(1, (os.cpu_count() or 1) // num_slots)
  cores_of_a_run = f"{num_cores} × {machine.processor()}"

  description = machine.describe(devices, num_slots)

  assert description == f"{devices_of_a_run}, {cores_of_a_run}"
