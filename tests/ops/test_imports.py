"""The operation runs with only jax, numpy and jaxtyping installed."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.harness import ROOT

# This program runs in the environment that has only these packages.
PROGRAM_THAT_USES_THE_OPERATIONS = """
import sys

import diffjax.ops.diff_attention as ops
from jax._src import xla_bridge

assert not xla_bridge._backends, "the import started a backend"
pallas = [name for name in sys.modules if "pallas" in name]
assert not pallas, f"the import loaded {pallas}"

import jax
import jax.numpy as jnp
import numpy as np


def gradients(implementation):
  def loss(*arrays):
    out = ops.diff_attention(*arrays, implementation=implementation)
    return jnp.sum(jnp.sin(out))

  return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, 0.4)


rng = np.random.default_rng(0)
q = rng.standard_normal((2, 6, 4, 2, 8), np.float32)
k = rng.standard_normal((2, 6, 2, 2, 8), np.float32)
v = rng.standard_normal((2, 6, 2, 16), np.float32)
expected_gradients = gradients("reference")
for implementation in ("auto", "chunked"):
  for a, e in zip(gradients(implementation), expected_gradients):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)

out = np.asarray(jax.jit(ops.diff_attention)(q, k, v, 0.4))
k_cache = np.swapaxes(k.reshape(2, 6, 2, 16), 1, 2)
v_cache = np.swapaxes(v, 1, 2)
lengths = np.full(2, 6, np.int32)
decode = jax.jit(ops.decode_attention)
last = decode(q[:, -1], k_cache, v_cache, 0.4, lengths)
np.testing.assert_allclose(last, out[:, -1], rtol=1e-4, atol=1e-5)
print("done")
"""


def required_distributions(
  *packages: str,
) -> list[importlib.metadata.Distribution]:
  """Returns packages and everything that they require, without extras."""
  distributions = {}
  remaining = list(packages)
  while remaining:
    name = remaining.pop()
    if name in distributions:
      continue
    distribution = importlib.metadata.distribution(name)
    distributions[name] = distribution
    for requirement in distribution.requires or []:
      if "extra ==" not in requirement:
        package = re.match(r"[\w.-]+", requirement)[0]
        remaining.append(package.lower().replace("_", "-"))
  return list(distributions.values())


@pytest.fixture
def small_environment(tmp_path) -> pathlib.Path:
  """A folder with links to diffjax, jax, numpy, jaxtyping and their needs."""
  for distribution in required_distributions("jax", "numpy", "jaxtyping"):
    for file in distribution.files or []:
      name = file.parts[0]
      link = tmp_path / name
      if name in ("..", "__pycache__") or link.exists():
        continue
      installed = pathlib.Path(distribution.locate_file(name))
      link.symlink_to(installed.resolve())
  (tmp_path / "diffjax").symlink_to(ROOT / "diffjax")
  return tmp_path


def run_python(program: str, packages: pathlib.Path):
  """Runs a program with the standard library and a folder of packages."""
  return subprocess.run(
    # -S leaves out the installed packages.
    [sys.executable, "-S", "-c", program],
    env=os.environ | {"PYTHONPATH": str(packages), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    cwd=packages,
  )


def test_other_packages_are_missing_in_the_small_environment(small_environment):
  """Flax is installed here, so this shows that the environment is separate."""
  process = run_python("import flax", small_environment)

  assert "No module named 'flax'" in process.stderr


def test_operation_runs_in_the_small_environment(small_environment):
  """It has only jax, numpy, jaxtyping and what these need."""
  process = run_python(PROGRAM_THAT_USES_THE_OPERATIONS, small_environment)

  assert process.returncode == 0, process.stdout + process.stderr
  # The program prints this at its end.
  assert process.stdout.endswith("done\n")
