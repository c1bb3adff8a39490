"""Attention variants that are defined outside the package.

Tests run every feature with them. A place that knows only the package's own
variants would compute them as another variant, or fail.
"""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

import diffjax.model.attention  # noqa: F401 (registers the package's variants)
from diffjax.evals import SUITES
from diffjax.model import registry, variant_styles
from diffjax.parameters import PARAMETERS
from tests.harness import ROOT
from tests.harness.pages import python_blocks

# Two variants that differ from those of the package as much as possible. They
# have three maps, none of which is a softmax, a parameter with an axis of its
# own, and a metric. The weights of the second one depend on earlier queries.
SOURCE = '''
"""Two strange attention variants."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import diffjax
from diffjax.parameters import Parameter


@diffjax.register("strange")
class StrangeAttention(diffjax.Attention):
  """weights = σ(s₁ + b₁) − tanh(s₂ + b₂) / 4 + s₃ / 8 over visible keys."""

  extra_parameters = {
    "strange_bias": Parameter("LHR"),
    "strange_mix": Parameter("LEH", inputs="E"),
  }
  extra_axes = {"R": 2}
  supports = {
    "cached_decoding", "context_parallelism", "windows", "quantized_logits"
  }
  weights_formula = "σ − tanh + s"

  def head_sizes(self):
    return super().head_sizes()._replace(G=3, M=3)

  def compute_lambda(self, x, lambda_init):
    mix = self.parameter("strange_mix")
    return jnp.tanh(x.astype(jnp.float32) @ mix)

  def maps(self, q, k, lam, mask):
    bias = self.parameter("strange_bias", nn.initializers.normal(1.0))
    s = self.logits(q, k, mask)  # [B, H, 3, T, S]
    maps = {
      "σ": jax.nn.sigmoid(s[:, :, 0] + bias[:, 0, None, None]),
      "tanh": jnp.tanh(s[:, :, 1] + bias[:, 1, None, None]) / 4,
      "s": jnp.moveaxis(lam, 2, 1)[..., None] * s[:, :, 2] / 8,
    }
    return {name: jnp.where(mask[:, None], x, 0) for name, x in maps.items()}

  def weights(self, q, k, lam, mask):
    first, second, third = self.maps(q, k, lam, mask).values()
    self.record_metric("strangeness", jnp.mean(third, axis=(0, 2, 3)))
    return first - second + third


@diffjax.register("strange_sum")
class StrangeSumAttention(StrangeAttention):
  """Adds the weights of all queries that a token sees as keys."""

  supports = {"windows", "quantized_logits"}

  def weights(self, q, k, lam, mask):
    weights = super().weights(q, k, lam, mask)
    seen = mask[:, None].astype(weights.dtype)
    return weights + seen @ weights / 16
'''
MODULE = "strange_attention"
# The examples of the documentation.
PAGE = ROOT / "docs/variants.md"
DINT_MODULE = "dint"
SIGMOID_MODULE = "distance_sigmoid"
MODULES = (MODULE, DINT_MODULE, SIGMOID_MODULE)
# The suite of docs/evaluation.md.
SUITE_PAGE = ROOT / "docs/evaluation.md"
SUITE_MODULE = "confident"
NAMES = ("strange", "strange_sum")
# Fields of config.model for a small model of these variants.
FIELDS = dict(num_heads=4, num_kv_heads=2, head_norm=False)


@contextlib.contextmanager
def restore_registry() -> Iterator[None]:
  """Removes, at the end, variants and suites that were registered inside."""
  tables = (
    registry.ATTENTION,
    PARAMETERS,
    variant_styles._assigned_styles,
    SUITES,
  )
  originals = [dict(table) for table in tables]
  try:
    yield
  finally:
    for table, original in zip(tables, originals, strict=True):
      table.clear()
      table.update(original)
    for module in (*MODULES, SUITE_MODULE):
      sys.modules.pop(module, None)


def write_modules(directory: pathlib.Path) -> None:
  """Writes the modules of all variants and of the suite to a directory."""
  (directory / f"{MODULE}.py").write_text(SOURCE)
  dint, sigmoid, _ = python_blocks(PAGE.read_text())
  (directory / f"{DINT_MODULE}.py").write_text(dint)
  (directory / f"{SIGMOID_MODULE}.py").write_text(sigmoid)
  (suite,) = python_blocks(SUITE_PAGE.read_text())
  (directory / f"{SUITE_MODULE}.py").write_text(suite)


@contextlib.contextmanager
def registered(directory: pathlib.Path) -> Iterator[None]:
  """Writes the modules to a directory and imports them from there.

  The variants and the suite are removed at the end.
  """
  write_modules(directory)
  sys.path.insert(0, str(directory))
  try:
    with restore_registry():
      registry.import_modules((*MODULES, SUITE_MODULE))
      yield
  finally:
    sys.path.remove(str(directory))
