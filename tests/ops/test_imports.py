"""The operation with nothing installed but jax, numpy and jaxtyping, in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
import sys
import diffjax.ops.diff_attention as ops
from jax._src import xla_bridge

assert not xla_bridge._backends, "the import started a backend"
loaded = [name for name in sys.modules if "pallas" in name]
assert not loaded, f"the import brought {loaded}"

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
q, k, v = normal(2, 6, 4, 2, 8), normal(2, 6, 2, 2, 8), normal(2, 6, 2, 16)
loss = lambda implementation: lambda *a: jnp.sum(jnp.sin(ops.diff_attention(*a, implementation=implementation)))
gradients = [jax.jit(jax.grad(loss(name), (0, 1, 2, 3)))(q, k, v, 0.4) for name in ("auto", "chunked", "reference")]
for actual in gradients[:2]:
  for a, e in zip(actual, gradients[2]):
    np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
whole = ops.diff_attention(q, k, v, 0.4)
cache = [jnp.swapaxes(x, 1, 2) for x in (k.reshape(2, 6, 2, 16), v)]
last = ops.decode_attention(q[:, -1], *cache, 0.4, jnp.full(2, 6))
np.testing.assert_allclose(last, whole[:, -1], rtol=1e-4, atol=1e-5)
print("done")
"""


def _needed(*packages: str) -> dict[str, importlib.metadata.Distribution]:
  """The distributions of these packages and of all that they require, by name."""
  found: dict[str, importlib.metadata.Distribution] = {}
  waiting = list(packages)
  while waiting:
    name = waiting.pop()
    if name in found:
      continue
    found[name] = importlib.metadata.distribution(name)
    required = [
      entry for entry in found[name].requires or [] if "extra ==" not in entry
    ]
    waiting += [
      re.match(r"[\w.-]+", entry)[0].lower().replace("_", "-")
      for entry in required
    ]
  return found


def test_import_needs_jax_numpy_and_jaxtyping_alone_and_starts_no_backend(
  tmp_path,
):
  """The process sees a folder of links to these packages instead of what is installed here."""
  names = set()
  for distribution in _needed("jax", "numpy", "jaxtyping").values():
    for file in distribution.files or []:
      top = file.parts[0]
      if top not in ("..", "__pycache__"):
        names.add(top)
        if not (link := tmp_path / top).exists():
          link.symlink_to(pathlib.Path(distribution.locate_file(top)).resolve())
  (tmp_path / "diffjax").symlink_to(ROOT / "diffjax")
  missing = subprocess.run(
    [sys.executable, "-S", "-c", "import flax"],
    env=_environment(tmp_path),
    capture_output=True,
    text=True,
  )
  assert "No module named 'flax'" in missing.stderr
  command = [sys.executable, "-S", "-c", PROGRAM]
  process = subprocess.run(
    command,
    env=_environment(tmp_path),
    capture_output=True,
    text=True,
    cwd=tmp_path,
  )
  assert process.returncode == 0 and process.stdout.endswith("done\n"), (
    process.stdout + process.stderr
  )


def _environment(packages: pathlib.Path) -> dict[str, str]:
  """-S leaves site-packages out; PYTHONPATH then names all that there is besides the standard library."""
  return os.environ | {"PYTHONPATH": str(packages), "JAX_PLATFORMS": "cpu"}
