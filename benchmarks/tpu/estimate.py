"""The compiler's estimate of a kernel's cycles, without a TPU.

libtpu compiles in another process, since it may end its process. It writes its
estimate of each kernel into a folder.

The estimates have limits. libtpu has none for v4. For v5p and v7x they are not
complete: for twice the length the estimate of the forward kernel is 1.4 times
as large, or missing. They are wrong if the mask is data, as with segment ids
and with offsets that are known only at run time. At T 4096 an estimate takes
minutes and up to 14 GB of memory, and more with every tile.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.tpu.case import SLICES, Case, KernelCase
from benchmarks.tpu.splash import Splash
from diffjax.compiled.plan import ENVIRONMENT

_PROFILE_ENTRY = re.compile(r'hlo_op_name: "([^"]*)"\s*estimated_cycles: (\d+)')
# A forward kernel that runs only if the result of the quick one is of no use.
_ONLINE_KERNEL = "_online"


class _Compilation(NamedTuple):
  """The result of the process that compiles a case.

  Attributes:
    cycles: Estimated cycles by direction.
    has_ended: Whether the process ended in time, with or without an error.
  """

  cycles: dict[str, int]
  has_ended: bool


def estimate(case: KernelCase, timeout: float) -> dict[str, int]:
  """Returns the estimated cycles of each direction.

  Args:
    case: The case.
    timeout: Seconds after which the compiler is stopped.

  Returns:
    Cycles by direction. Directions without an estimate are missing.
  """
  cycles, has_ended = _compile_in_child(case, timeout, backward_only=False)
  # For v5e and v5p, libtpu may end with an error after the first estimate.
  if has_ended and cycles.keys() == {"forward"}:
    backward = _compile_in_child(case, timeout, backward_only=True)
    cycles |= backward.cycles
  return case.plausible(cycles)


def _compile_in_child(
  case: KernelCase, timeout: float, *, backward_only: bool
) -> _Compilation:
  """Compiles a case in another process, and reads the estimates.

  Args:
    case: The case.
    timeout: Seconds after which the process is stopped.
    backward_only: As for `compile_case`.
  """
  assert isinstance(case, Case | Splash)
  fields = dataclasses.asdict(case)
  arguments = json.dumps([type(case).__name__, fields, backward_only])
  command = [sys.executable, "-m", "benchmarks.tpu.estimate", arguments]
  has_ended = True
  # libtpu writes its estimates as text files into this folder.
  with tempfile.TemporaryDirectory() as folder:
    profile_flag = f"--xla_jf_dump_static_llo_profile_to={folder}"
    environment = os.environ | ENVIRONMENT
    environment["LIBTPU_INIT_ARGS"] = profile_flag
    try:
      subprocess.run(
        command, env=environment, capture_output=True, timeout=timeout
      )
    except subprocess.TimeoutExpired:
      has_ended = False
    texts = []
    for path in pathlib.Path(folder).iterdir():
      if path.is_file():
        texts.append(path.read_text(errors="replace", encoding="utf-8"))
  cycles = read_profile("\n".join(texts), case.kernel_names)
  return _Compilation(cycles, has_ended)


def read_profile(
  text: str, kernel_names: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
  """Returns the cycles of each direction in libtpu's profile.

  Args:
    text: The profile.
    kernel_names: Parts of the names of the kernels of each direction.

  Returns:
    The sum over all calls of the direction's kernels. A direction is missing if
    one of its kernels has no cycles. An estimate of 0 counts as none.
  """
  cycles = {}
  for direction, names in kernel_names.items():
    cycles_by_name = dict.fromkeys(names, 0)
    for operation, count in _PROFILE_ENTRY.findall(text):
      if _ONLINE_KERNEL in operation:
        continue
      for name in names:
        if name in operation:
          cycles_by_name[name] += int(count)
    if all(cycles_by_name.values()):
      cycles[direction] = sum(cycles_by_name.values())
  return cycles


def compile_case(case: KernelCase, *, backward_only: bool) -> None:
  """Compiles the gradient of a case for a TPU that is not there.

  libtpu writes its estimates as a side effect. Nothing is returned.

  Args:
    case: The case.
    backward_only: Whether to compile only the backward direction. Otherwise,
      both directions are one program.
  """
  from jax.experimental import topologies
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=SLICES[case.generation]
  )
  mesh = Mesh([topology.devices[0]], ("x",))
  sharding = NamedSharding(mesh, PartitionSpec())

  def on_device(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

  attend, shapes = case.operation(heads=1)

  def total(*arguments: jax.Array) -> jax.Array:
    return jnp.sum(attend(*arguments).astype(jnp.float32))

  # A function of `jax.vjp` is a pytree of the arrays that the forward direction
  # saves. So the backward direction alone is a program with this argument.
  def make_pull_back(*arguments: jax.Array) -> Callable:
    _, pull_back = jax.vjp(total, *arguments)
    return pull_back

  def call_pull_back(pull_back: Callable) -> Any:
    return pull_back(jnp.float32(1))

  with (
    jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    case.building(),
  ):
    if backward_only:
      function = call_pull_back
      arguments = [jax.eval_shape(make_pull_back, *shapes)]
    else:
      function = jax.grad(total, argnums=tuple(range(len(shapes))))
      arguments = shapes
    arguments_on_device = jax.tree.map(on_device, arguments)
    lowered = jax.jit(function).lower(*arguments_on_device)
    lowered.compile(compiler_options=case.compiler_options)


def main(arguments: str) -> None:
  """Compiles the case that `_compile_in_child` has passed as JSON."""
  name, fields, backward_only = json.loads(arguments)
  case: KernelCase
  if name == "Case":
    case = Case(**fields)
  else:
    case = Splash(**fields)
  compile_case(case, backward_only=backward_only)


if __name__ == "__main__":
  main(sys.argv[1])
