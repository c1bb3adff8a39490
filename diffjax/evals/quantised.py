"""Measurements of other suites with attention logits of few bits.

The quantization is simulated. It is dynamic post-training absmax quantization:
with b bits, each logit is rounded to the nearest of 2ᵇ − 1 evenly spaced values
between minus and plus the largest |logit|. Everything else stays in full
precision. The paper does not say over which logits the largest one is taken. So
there are three choices:

- "tensor": all logits of an attention layer for a sequence, of both maps. The
  largest outlier determines the step.
- "head": each map of each head.
- "row": each query of each map. A kernel that sees one row of logits at a time
  could do this.

Each sequence has its own scales, so results do not depend on the other
sequences of a batch. Masked logits do not count. In generation, the prompt is
read in chunks. Then, "tensor" and "head" mean the logits of one chunk, and the
tokens that fill up the last chunk count too.

A quantized model (`quantise`) has the rounding as its `logits_transform`, so
any suite can measure it. Its attention variant must support this
(`Attention.supports`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import matplotlib.figure
from jaxtyping import Array, Bool, Float
from matplotlib.axes import Axes

from diffjax.config import Bound, field, one_of
from diffjax.evals.harness import Harness
from diffjax.evals.many_shot import ManyShot
from diffjax.evals.mathematics import Mathematics
from diffjax.evals.measurement import Measurement
from diffjax.evals.needle import Needle
from diffjax.evals.position_nll import PositionNLL
from diffjax.evals.report.plots import WIDTH, by_model, draw_line
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.evals.validation import Validation
from diffjax.inference.trained import Trained
from diffjax.model.attention import QUANTIZED_LOGITS
from diffjax.model.stacks import check_support
from diffjax.plots.styles import Style

# The suites that can be measured. Each is a field of `Quantised`.
_SUITES = (
  "validation",
  "needle",
  "position_nll",
  "many_shot",
  "harness",
  "mathematics",
)

# The axes of logits [B, Q, G, T, S] over which the largest one is taken.
_AXES = {"tensor": (1, 2, 3, 4), "head": (3, 4), "row": (4,)}

# Two bits give the levels −1, 0 and 1. float32 has 24 significant bits.
_BITS = Bound(low=2, high=24)


@dataclasses.dataclass(frozen=True)
class Quantised(Suite[dict[str, Any]]):
  """Loss and accuracy with attention logits of few bits.

  The measurements are the main ones of other suites (`_is_included`), with the
  same units. Their names begin with the suite, such as "validation: loss
  (nats/token)". Each is measured in full precision, and then with each number
  of bits and kind of scale.

  The settings of the other suites are fields. On the command line, they are
  flags such as --set.quantised.needle.samples=50.
  """

  name: ClassVar[str] = "quantised"
  table: ClassVar[TableSpec] = TableSpec(
    unit="samples",
    notes=(
      "bits: of an attention logit; all: not quantised",
      "per: the logits that share a scale",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure(
      "loss with the coarsest logits",
      "validation: loss",
      "lower",
      {"per": "tensor"},
    ),
  )

  measurements: tuple[str, ...] = field(
    ("validation", "needle"),
    f"Suites to measure: {', '.join(_SUITES)}.",
    bound=one_of(*_SUITES),
  )
  bits: tuple[int, ...] = field(
    (8, 6, 4),
    "Bits of a logit. Logits of full precision are measured too.",
    bound=_BITS,
  )
  per: tuple[str, ...] = field(
    ("tensor", "head", "row"),
    f"Logits that share a scale: {', '.join(_AXES)}.",
    bound=one_of(*_AXES),
  )
  validation: Validation = field(
    Validation(rows=128), "Settings of the suite validation."
  )
  needle: Needle = field(
    Needle(pairs=("1/1",), samples=20), "Settings of the suite needle."
  )
  position_nll: PositionNLL = field(
    PositionNLL(per_octave=1), "Settings of the suite position_nll."
  )
  many_shot: ManyShot = field(
    ManyShot(orders=0), "Settings of the suite many_shot."
  )
  harness: Harness = field(
    Harness(tasks=("hellaswag",)),
    "Settings of the suite harness. The paper measures hellaswag.",
  )
  mathematics: Mathematics = field(
    Mathematics(), "Settings of the suite mathematics."
  )

  def load(self, trained: Trained) -> dict[str, Any]:
    """Returns the data of the suites to measure, by name.

    Raises:
      UserError: if the attention variant does not support quantized logits, or
        if a suite cannot load its data.
    """
    check_support(trained.config.model, QUANTIZED_LOGITS, "--suite=quantised")
    data_of_suites = {}
    for suite in self._suites():
      data_of_suites[suite.name] = suite.load(trained)
    return data_of_suites

  def measure(
    self, trained: Trained, data_of_suites: dict[str, Any]
  ) -> Iterator[Measurement]:
    """Yields each suite's measurements in full precision, then quantized."""
    for suite in self._suites():
      measurements = suite.measure(trained, data_of_suites[suite.name])
      yield from _labelled(suite, measurements, bits="all", per="")
      for per in self.per:
        for bits in self.bits:
          # The suite loads its data again, since some can be read only once.
          measurements = suite.evaluate(quantise(trained, bits, per))
          yield from _labelled(suite, measurements, bits=bits, per=per)

  def plot(
    self, suite_results: Mapping[str, Any]
  ) -> matplotlib.figure.Figure | None:
    """Draws a panel for each measurement, over the bits of a logit.

    A panel has a line for each model and kind of scale.
    """
    titles = _panel_titles(suite_results["figures"])
    if not titles:
      return None
    bits = _quantized_bits(suite_results["figures"])
    tick_labels = ["all", *[str(number) for number in bits]]

    # In inches: 5 for each panel.
    width = max(WIDTH, 5 * len(titles))
    figure = matplotlib.figure.Figure((width, 4), layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=True):
      for style, results in by_model(suite_results):
        panel_results = [
          result for result in results if _panel_title(result) == title
        ]
        _draw_lines(axes, style, panel_results, bits)
      measurement, _, unit = title.partition(": ")
      axes.set(title=measurement, xlabel="bits of a logit", ylabel=unit)
      axes.set_xticks(range(len(tick_labels)), tick_labels)
    # The lines are the same in all panels, so only the last one has a legend.
    panels[-1].legend(fontsize=9)
    return figure

  def _suites(self) -> list[Suite]:
    """Returns the suites that `measurements` names, with their settings."""
    # A suite that is named twice is measured once.
    names = dict.fromkeys(self.measurements)
    return [getattr(self, name) for name in names]


def quantise(trained: Trained, bits: int, per: str) -> Trained:
  """Returns a model with the same parameters and quantized attention logits.

  Args:
    trained: The model. Its attention variant must support quantized logits.
    bits: The number of bits of a logit.
    per: The logits that share a scale: "tensor", "head" or "row".
  """
  model = trained.model.clone(logits_transform=LogitsQuantisation(bits, per))
  return dataclasses.replace(
    trained,
    name=f"{trained.name}, logits of {bits} bits per {per}",
    model=model,
  )


@dataclasses.dataclass(frozen=True)
class LogitsQuantisation:
  """Rounds attention logits. It is a `logits_transform` of `Attention`.

  Attributes:
    bits: The number of bits of a logit.
    per: The logits that share a scale: "tensor", "head" or "row".
  """

  bits: int
  per: str

  def __call__(
    self, logits: Float[Array, "B Q G T S"], mask: Bool[Array, "B T S"]
  ) -> Float[Array, "B Q G T S"]:
    """Returns the rounded logits.

    Args:
      logits: The logits of each map. Q and G are the query groups and maps.
      mask: Whether a query sees a key. Masked logits do not determine a scale.
    """
    is_visible = mask[:, None, None]  # [B, 1, 1, T, S]
    return absmax(logits, is_visible, self.bits, _AXES[self.per])


def absmax(
  logits: Float[Array, "B Q G T S"],
  is_visible: Bool[Array, "B 1 1 T S"],
  bits: int,
  axes: tuple[int, ...],
) -> Float[Array, "B Q G T S"]:
  """Returns logits rounded to 2^bits − 1 evenly spaced levels.

  The outer levels are minus and plus the largest visible |logit|, and 0 is the
  middle one. If the largest is 0, the logits are unchanged.

  Args:
    logits: The logits.
    is_visible: Whether a logit counts for the largest one.
    bits: The number of bits of a logit.
    axes: The axes of logits over which the largest one is taken.
  """
  magnitudes = jnp.where(is_visible, jnp.abs(logits), 0.0)
  largest = jnp.max(magnitudes, axis=axes, keepdims=True)
  # There are 2^(bits − 1) − 1 levels above 0, and as many below.
  step = largest / (2 ** (bits - 1) - 1)
  has_levels = largest > 0
  # Avoids a division by zero.
  divisor = jnp.where(has_levels, step, 1)
  rounded = jnp.round(logits / divisor) * step
  return jnp.where(has_levels, rounded, logits)


def _labelled(
  suite: Suite,
  measurements: Iterable[Measurement],
  *,
  bits: int | str,
  per: str,
) -> Iterator[Measurement]:
  """Yields the main measurements of a suite, labelled with the quantization.

  Example: "loss (nats/token)" becomes "validation: loss (nats/token)" with the
  coordinates bits = 4 and per = "head".

  Args:
    suite: The suite.
    measurements: All of its measurements.
    bits: The number of bits of a logit, or "all".
    per: The logits that share a scale. "" for logits of full precision.
  """
  for measurement in measurements:
    if _is_included(suite, measurement):
      yield dataclasses.replace(
        measurement,
        name=f"{suite.name}: {measurement.name}",
        at={"bits": bits, "per": per, **measurement.at},
      )


def _is_included(suite: Suite, measurement: Measurement) -> bool:
  """Returns whether a measurement is one of the main ones of its suite.

  All measurements of a suite that is not mentioned here are included.
  """
  if suite.name == "validation":
    return measurement.name.startswith("loss")
  if suite.name == "needle":
    return measurement.at["depth"] == "mean"
  if suite.name == "mathematics":
    return measurement.name == "accuracy"
  return True


def _panel_titles(results: Iterable[Mapping[str, Any]]) -> list[str]:
  """Returns the titles of the plot's panels, in the order of the results."""
  titles = []
  for result in results:
    title = _panel_title(result)
    if title not in titles:
      titles.append(title)
  return titles


def _panel_title(result: Mapping[str, Any]) -> str:
  """Returns the title of the panel that shows a result.

  It consists of the name and the coordinates, without bits and scale. So
  results that differ only in these two are in the same panel.

  Example: "needle: accuracy needles 1, asked 1, length 4096"
  """
  coordinates = []
  for key, value in result["at"].items():
    if key not in ("bits", "per", "depth"):
      coordinates.append(f"{key} {value}")
  return f"{result['name']} {', '.join(coordinates)}".strip()


def _quantized_bits(results: Iterable[Mapping[str, Any]]) -> list[int]:
  """Returns the numbers of bits, without full precision, from high to low."""
  numbers_of_bits = set()
  for result in results:
    bits = result["at"]["bits"]
    if bits != "all":
      numbers_of_bits.add(bits)
  return sorted(numbers_of_bits, reverse=True)


def _draw_lines(
  axes: Axes,
  style: Style,
  results: Sequence[Mapping[str, Any]],
  bits: Sequence[int],
) -> None:
  """Draws a line over bits for each kind of scale.

  Each line begins with the result in full precision, at x = 0.

  Args:
    axes: The panel.
    style: The style of the model.
    results: The results of the panel and the model.
    bits: The other numbers of bits, in the order of the x axis from x = 1.
  """
  for per, linestyle in (("tensor", ":"), ("head", "--"), ("row", "-")):
    x = []
    results_of_line = []
    for result in results:
      coordinates = result["at"]
      if coordinates["bits"] == "all":
        x.append(0)
        results_of_line.append(result)
      elif coordinates["per"] == per:
        x.append(1 + bits.index(coordinates["bits"]))
        results_of_line.append(result)
    # A single point is the one of full precision. This scale was not measured.
    if len(results_of_line) > 1:
      suffix = f", scaled per {per}"
      draw_line(axes, x, results_of_line, style, suffix, linestyle)
