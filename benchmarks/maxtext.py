"""The time of our training step relative to MaxText's, both estimated.

    python3.12 -m venv maxtext-env
    maxtext-env/bin/pip install 'maxtext[tpu]==0.2.5' jax==0.12.0.1 \\
      libtpu==0.0.50.1
    python -m benchmarks.maxtext --python=maxtext-env/bin/python

Compiles both steps with libtpu, for TPUs that are not there, and prints a
table. It takes half an hour. MaxText requires Python 3.12 and certain versions
of jax and libtpu, so it has an environment of its own. Without its extra `tpu`
it installs no dependencies. Our environment should have the same versions of
jax and libtpu; the lines of the programs show both.

Seconds are the compiler's estimate, read as `diffjax.aot` reads it. Kernels
have no estimate. The two backward kernels of MaxText's splash attention count
as our one of the same shape, and its forward kernel as ours, which favours
MaxText.

benchmarks/maxtext_step.py describes MaxText's step.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.maxtext_step import SHAPES
from diffjax.compiled.estimate import Scope, estimate
from diffjax.compiled.hardware import CHIPS, Topology, Torus
from diffjax.compiled.plan import (
  ENVIRONMENT,
  call_with_devices,
  kernel_cycles,
)
from diffjax.compiled.text import windowed_einsums
from diffjax.config import Config, from_config_dict
from diffjax.model.flops import peak_flops, step_flops
from diffjax.parallel.mesh import make_mesh
from diffjax.training.program import build

VARIANTS = ("diff", "transformer")
DEVICE_KINDS = {"v5e": "TPU v5e", "v5p": "TPU v5p"}

# The kernels of MaxText, and ours with the same estimate.
SPLASH_KERNELS = {
  "splash_mha_fwd": "diff_attention_forward_plain",
  "splash_mha_dkv": "diff_attention_backward_plain",
}

# Parts that exist in both programs. MaxText's instructions do not have the
# names of modules.
SCOPES = (
  Scope(
    r"\bloss\b",
    part="outside the layers, elementwise",
    product_part="outside the layers, products",
  ),
  Scope(
    r"while/body",
    part="layers, elementwise",
    product_part="layers, products",
  ),
  Scope(
    r"",
    part="outside the layers, elementwise",
    product_part="outside the layers, products",
  ),
)


class OurShape(NamedTuple):
  """A config of diffjax with the same shape as a shape of MaxText.

  Attributes:
    topology: The slice of TPUs.
    config: Name of the config.
    overrides: Changed fields of the config.
    remat_policies: Further rematerialization policies to compile, which fit
      into memory.
  """

  topology: str
  config: str
  overrides: dict[str, Any]
  remat_policies: tuple[str, ...]


OUR_SHAPES = {
  "1b": OurShape(
    topology="v5e:4x4", config="diff_1b", overrides={}, remat_policies=()
  ),
  "13b": OurShape(
    topology="v5p:4x4x4",
    config="diff_13b",
    overrides={"mesh.data": 4, "mesh.fsdp": 16},
    remat_policies=("none",),
  ),
}


class MaxTextProgram(NamedTuple):
  """Options with which MaxText's step is compiled.

  Attributes:
    name: Name of the row.
    remat: MaxText's remat_policy.
    options: Options of the compiler.
    settings: Further settings of MaxText.
    needs_sparse_cores: Whether the chip must have sparse cores, which v5e has
      not.
  """

  name: str
  remat: str
  options: dict[str, str]
  settings: dict[str, str]
  needs_sparse_cores: bool = False


# Turns off windowed einsums: products that are loops over the shards. The names
# of the rows call it "flag".
_FLAG = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
# Gathers and sums run on the sparse cores, as in our own compiler options in
# diffjax/training/program.py.
_OFFLOADED_COLLECTIVES = (
  "all_gather",
  "2d_all_gather",
  "3d_all_gather",
  "reduce_scatter",
  "nd_reduce_scatter",
  "all_reduce",
)
_SPARSE_CORES = {
  f"xla_tpu_enable_sparse_core_collective_offload_{collective}": "true"
  for collective in _OFFLOADED_COLLECTIVES
}
MAXTEXT_PROGRAMS = (
  MaxTextProgram("full", remat="full", options={}, settings={}),
  MaxTextProgram("full, flag", remat="full", options=_FLAG, settings={}),
  MaxTextProgram(
    "save_qkv_proj, flag", remat="save_qkv_proj", options=_FLAG, settings={}
  ),
  MaxTextProgram(
    "mlpwi_0 and mlpwi_1 kept, flag",
    remat="custom",
    options=_FLAG,
    settings={"mlpwi_0": "device", "mlpwi_1": "device"},
  ),
  MaxTextProgram(
    "minimal_with_context, flag",
    remat="minimal_with_context",
    options=_FLAG,
    settings={},
  ),
  MaxTextProgram(
    "minimal_with_context, flag, sparse cores",
    remat="minimal_with_context",
    options=_FLAG | _SPARSE_CORES,
    settings={},
    needs_sparse_cores=True,
  ),
)


class CompiledStep(NamedTuple):
  """A compiled training step.

  Attributes:
    text: The program.
    mesh: Devices along each axis.
    temporaries_bytes: Memory of temporaries on a chip.
    versions: Versions of jax and libtpu.
  """

  text: str
  mesh: dict[str, int]
  temporaries_bytes: int
  versions: dict[str, str]


class StepEstimate(NamedTuple):
  """The estimate of a compiled step, a row of the table.

  Attributes:
    seconds: Seconds of the step.
    mfu_bound: The bound on MFU.
    parts: Seconds by part.
    num_windowed_einsums: Products that are loops over shards.
    temporaries_gib: Memory of temporaries on a chip, in GiB.
    versions: Versions of jax and libtpu.
  """

  seconds: float
  mfu_bound: float
  parts: dict[str, float]
  num_windowed_einsums: int
  temporaries_gib: float
  versions: dict[str, str]


def load_config(shape: OurShape, variant: str, remat: str | None) -> Config:
  """Returns our config of a shape.

  Args:
    shape: The shape.
    variant: "diff" or "transformer".
    remat: The remat policy. None for the config's own.
  """
  module = importlib.import_module(f"diffjax.configs.{shape.config}")
  config = module.get_config(variant)
  config.update_from_flattened_dict(shape.overrides)
  if remat is not None:
    config.update_from_flattened_dict({"model.remat": remat})
  return from_config_dict(config)


def compile_ours(config: Config, topology: str) -> CompiledStep:
  """Compiles our training step for a slice."""
  return call_with_devices(
    _compile_for_devices, config, topology, topology=topology
  )


def _compile_for_devices(
  devices: Sequence[jax.Device],
  num_chips: int,
  memory_bytes: int,
  config: Config,
  topology: str,
) -> CompiledStep:
  """Compiles our step in the process that has libtpu.

  `call_with_devices` passes the first three arguments.

  Args:
    devices: The devices of the slice.
    num_chips: Not used.
    memory_bytes: Not used.
    config: The config.
    topology: Not used.
  """
  del num_chips, memory_bytes, topology
  program = build(config, make_mesh(config.mesh, devices))
  compiled = program.lower_train_step().compile()
  versions = {}
  for package in ("jax", "libtpu"):
    versions[package] = importlib.metadata.version(package)
  text = compiled.as_text()
  memory = compiled.memory_analysis()
  assert text is not None
  assert memory is not None
  return CompiledStep(
    text=text,
    mesh=dict(program.mesh.shape),
    temporaries_bytes=memory.temp_size_in_bytes,
    versions=versions,
  )


def compile_maxtext(
  python: str, shape: str, program: MaxTextProgram
) -> CompiledStep | None:
  """Compiles MaxText's training step under another interpreter.

  Args:
    python: The interpreter of MaxText's environment.
    shape: A name in SHAPES.
    program: The options.

  Returns:
    The step. None if it does not fit into memory.

  Raises:
    RuntimeError: if the other process fails.
  """
  script = pathlib.Path(__file__).resolve().with_name("maxtext_step.py")
  # The other interpreter must not import our packages or read our flags.
  environment = dict(os.environ)
  for name in ("PYTHONPATH", "LIBTPU_INIT_ARGS", "XLA_FLAGS"):
    environment.pop(name, None)
  environment |= ENVIRONMENT
  with tempfile.TemporaryDirectory() as scratch:
    command = [
      python,
      str(script),
      shape,
      scratch,
      f"--remat={program.remat}",
      f"--options={json.dumps(program.options)}",
      f"--settings={json.dumps(program.settings)}",
    ]
    process = subprocess.run(
      command, env=environment, capture_output=True, text=True
    )
    if process.returncode != 0:
      raise RuntimeError(
        f"{script.name} ended with {process.returncode}; correct this"
        f" error:\n{process.stdout[-2000:]}{process.stderr[-4000:]}"
      )
    folder = pathlib.Path(scratch)
    result = json.loads((folder / "step.json").read_text(encoding="utf-8"))
    if "refused" in result:
      return None
    text = (folder / "step.txt").read_text(encoding="utf-8")
  return CompiledStep(
    text=text,
    mesh=result["mesh"],
    temporaries_bytes=result["temporaries_bytes"],
    versions=result["versions"],
  )


def estimate_step(
  step: CompiledStep, config: Config, topology_name: str
) -> StepEstimate:
  """Returns the estimated time of a compiled step.

  Args:
    step: The step, ours or MaxText's.
    config: Our config of the same shape, for FLOPs and kernels.
    topology_name: The slice.
  """
  topology = Topology.parse(topology_name)
  chip = CHIPS[topology.generation]
  mesh = {"data": 1, "fsdp": topology.num_chips, "context": 1, "tensor": 1}
  kernels = kernel_cycles(config, mesh, topology.generation, chip.num_cores)
  # MaxText's kernels count as ours.
  for splash_kernel, our_kernel in SPLASH_KERNELS.items():
    if our_kernel in kernels:
      kernels[splash_kernel] = kernels[our_kernel]
  torus = Torus.from_topology(topology_name)
  result = estimate(
    step.text,
    step.mesh,
    chip,
    torus,
    kernel_cycles=kernels,
    scopes=SCOPES,
  )
  assert result is not None

  # The bound on MFU: the time of the model's FLOPs at the chips' peak, over the
  # time of the step.
  length = config.data.length
  num_tokens = config.train.batch_size * length
  flops = step_flops(config.model, length, num_tokens).training
  peak = peak_flops(DEVICE_KINDS[topology.generation])
  assert peak is not None
  peak_seconds = flops / topology.num_chips / peak
  return StepEstimate(
    seconds=result.seconds,
    mfu_bound=peak_seconds / result.seconds,
    parts=result.parts,
    num_windowed_einsums=windowed_einsums(step.text),
    temporaries_gib=step.temporaries_bytes / 2**30,
    versions=step.versions,
  )


def compare(python: str, shape_name: str) -> dict[str, StepEstimate | None]:
  """Compiles our steps and MaxText's for a shape, and estimates their times.

  Args:
    python: The interpreter of MaxText's environment.
    shape_name: A name in SHAPES.

  Returns:
    Estimates by the names of the programs. None if a step does not fit.
  """
  shape = OUR_SHAPES[shape_name]
  estimates: dict[str, StepEstimate | None] = {}
  # None stands for the config's own policy.
  for remat in (None, *shape.remat_policies):
    for variant in VARIANTS:
      config = load_config(shape, variant, remat)
      our_step = compile_ours(config, shape.topology)
      name = f"{shape_name} diffjax {variant}"
      if remat is not None:
        name += f", remat {remat}"
      estimates[name] = estimate_step(our_step, config, shape.topology)
      _report(name, estimates[name])

  has_sparse_cores = not shape.topology.startswith("v5e")
  transformer = load_config(shape, "transformer", remat=None)
  for program in MAXTEXT_PROGRAMS:
    if program.needs_sparse_cores and not has_sparse_cores:
      continue
    name = f"{shape_name} MaxText {program.name}"
    their_step = compile_maxtext(python, shape_name, program)
    if their_step is None:
      estimates[name] = None
    else:
      estimates[name] = estimate_step(their_step, transformer, shape.topology)
    _report(name, estimates[name])
  return estimates


def _report(name: str, result: StepEstimate | None) -> None:
  """Prints an estimate at once, because the table comes half an hour later."""
  print(f"{name}: {result}", file=sys.stderr, flush=True)


def format_table(estimates: dict[str, StepEstimate | None]) -> str:
  """Returns the table in Markdown, with a row for each program."""
  headings = (
    "",
    "step, s",
    "bound on MFU",
    "products",
    "elementwise",
    "copies",
    "kernels",
    "exposed",
    "temporaries, GiB",
  )
  lines = [_format_row(headings), "|---" * len(headings) + "|"]
  for name, result in estimates.items():
    if result is None:
      empty_cells = [""] * (len(headings) - 2)
      lines.append(_format_row([name, "does not fit", *empty_cells]))
    else:
      lines.append(_format_row([name, *_cells(result)]))
  return "\n".join(lines)


def _format_row(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _cells(result: StepEstimate) -> list[str]:
  """Returns the cells of a row after its name, in the order of the headings."""

  def seconds_of(kind: str) -> float:
    """Returns the seconds of all parts whose names contain a word."""
    return sum(time for part, time in result.parts.items() if kind in part)

  products = f"{seconds_of('products'):.3f}"
  if result.num_windowed_einsums > 0:
    products += f" ({result.num_windowed_einsums} windowed)"
  elementwise = seconds_of("elementwise") + result.parts.get("other", 0)
  return [
    f"{result.seconds:.3f}",
    f"{result.mfu_bound:.1%}",
    products,
    f"{elementwise:.3f}",
    f"{seconds_of('copies'):.3f}",
    f"{seconds_of('kernels'):.3f}",
    f"{seconds_of('exposed'):.3f}",
    f"{result.temporaries_gib:.1f}",
  ]


def main() -> None:
  """Estimates all programs of the chosen shapes, and prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--python", required=True, help="the interpreter of MaxText's environment"
  )
  parser.add_argument(
    "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES)
  )
  flags = parser.parse_args()
  estimates: dict[str, StepEstimate | None] = {}
  for shape in flags.shapes:
    estimates |= compare(flags.python, shape)
  print(format_table(estimates))


if __name__ == "__main__":
  main()
