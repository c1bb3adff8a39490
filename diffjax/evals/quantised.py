"""Quantised attention logits: the effect of few bits on other measurements.

Dynamic post-training quantisation by absmax, simulated: with b bits, a logit becomes the nearest of 2ᵇ − 1 evenly spaced values between
minus and plus the largest |logit|, and all else stays in full precision. The paper does not say over which logits the largest is taken:

- "tensor": all logits that an attention layer computes for a sequence, both maps. The largest outlier sets the step.
- "head": each head's map by itself.
- "row": each query of each map, as a kernel that sees one row of logits at a time could do.

Each sequence has its own scales, so that results do not depend on the other sequences of a batch. Masked logits do not count. In
generation the prompt is read in chunks: "tensor" and "head" then mean one chunk, and the tokens that fill up the last chunk count too.

A quantised model (`quantise`) has the rounding as its `logits_transform`, so that any measurement can be made of it. The attention variant
must support that (`Attention.supports`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import matplotlib.figure
from etils import epath
from jaxtyping import Array, Bool, Float

from diffjax.config import UserError
from diffjax.evals import (
  harness,
  many_shot,
  mathematics,
  needle,
  position_nll,
  validation,
)
from diffjax.evals.report.figures import Figure
from diffjax.evals.report.plots import WIDTH, by_model, draw_line, save
from diffjax.evals.report.results import TableSpec
from diffjax.inference.trained import Trained
from diffjax.model.attention import QUANTIZED_LOGITS
from diffjax.model.stacks import check_support

# The axes of [B, Q, G, T, S] over which the largest logit is taken.
_AXES = {"tensor": (1, 2, 3, 4), "head": (3, 4), "row": (4,)}
# Measurements by name, and a test of which of their figures count.
_MEASUREMENTS: dict[str, tuple[Any, Callable[[Figure], bool]]] = {
  "validation": (validation, lambda figure: figure.name.startswith("loss")),
  "needle": (needle, lambda figure: figure.at["depth"] == "mean"),
  "position_nll": (position_nll, lambda figure: True),
  "many_shot": (many_shot, lambda figure: True),
  "harness": (harness, lambda figure: True),
  "mathematics": (mathematics, lambda figure: figure.name == "accuracy"),
}


TABLE = TableSpec(
  unit="samples",
  notes=(
    "bits: of an attention logit; all: not quantised",
    "per: the logits that share a scale",
  ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the suite and of its measurements, such as --set.quantised.needle.samples=50."""

  # Names of the measurements
  measurements: tuple[str, ...] = ("validation", "needle")
  # Bits of a logit. Logits of full precision are measured too
  bits: tuple[int, ...] = (8, 6, 4)
  # Sets of logits with a scale each: "tensor", "head", "row"
  per: tuple[str, ...] = ("tensor", "head", "row")
  validation: validation.Settings = validation.Settings(rows=128)
  needle: needle.Settings = needle.Settings(pairs=("1/1",), samples=20)
  position_nll: position_nll.Settings = position_nll.Settings(per_octave=1)
  many_shot: many_shot.Settings = many_shot.Settings(orders=0)
  harness: harness.Settings = harness.Settings(
    tasks=("hellaswag",)
  )  # the paper's
  mathematics: mathematics.Settings = mathematics.Settings()


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """Measures without quantisation, and with each number of bits and scale.

  Args:
    trained: the model.
    settings: settings of the suite and of its measurements.

  Returns:
    The figures of the measurements. Their units are those of the measurements.

  Raises:
    UserError: for unknown measurements or kinds of scale, for bits below 2 or
      above 24, or if the attention variant does not support quantised logits.
  """
  _check_names("measurements", settings.measurements, _MEASUREMENTS)
  _check_names("per", settings.per, _AXES)
  for bits in settings.bits:
    if not 2 <= bits <= 24:
      raise UserError(f"set.quantised.bits = {bits}: must be from 2 to 24")
  check_support(trained.config.model, QUANTIZED_LOGITS, "--suite=quantised")
  # The measurements check their settings here, before the first of them runs.
  unquantised = {}
  for name in settings.measurements:
    measurement, _ = _MEASUREMENTS[name]
    unquantised[name] = measurement.evaluate(trained, getattr(settings, name))
  return _measure(trained, settings, unquantised)


def _check_names(
  field: str, names: Iterable[str], known_names: Iterable[str]
) -> None:
  """Raises UserError if a setting has an unknown name."""
  for name in names:
    if name not in known_names:
      raise UserError(
        f"set.quantised.{field} = {name!r}: there are {', '.join(known_names)}"
      )


def _measure(
  trained: Trained,
  settings: Settings,
  unquantised: Mapping[str, Iterator[Figure]],
) -> Iterator[Figure]:
  """Of each measurement, first the figures of `unquantised`."""
  for name, figures in unquantised.items():
    module, counts = _MEASUREMENTS[name]
    models: list[tuple[dict[str, Any], Trained]] = [
      ({"bits": bits, "per": per}, quantise(trained, bits, per))
      for per in settings.per
      for bits in settings.bits
    ]
    quantised = (
      (at, module.evaluate(model, getattr(settings, name)))
      for at, model in models
    )
    for at, found in itertools.chain(
      [({"bits": "all", "per": ""}, figures)], quantised
    ):
      for figure in found:
        if counts(figure):
          yield dataclasses.replace(
            figure, name=f"{name}: {figure.name}", at={**at, **figure.at}
          )


def quantise(trained: Trained, bits: int, per: str) -> Trained:
  """Returns the same model with quantised attention logits.

  Args:
    trained: the model. Its attention variant must support quantised logits.
    bits: the bits of a logit.
    per: which logits share a scale: "tensor", "head" or "row".
  """
  model = trained.model.clone(logits_transform=LogitsQuantisation(bits, per))
  return dataclasses.replace(
    trained,
    name=f"{trained.name}, logits of {bits} bits per {per}",
    model=model,
  )


@dataclasses.dataclass(frozen=True)
class LogitsQuantisation:
  """A `logits_transform` of `Attention` that rounds logits by `absmax`.

  Attributes:
    bits: the bits of a logit.
    per: which logits share a scale: "tensor", "head" or "row".
  """

  bits: int
  per: str

  def __call__(
    self, logits: Float[Array, "B Q G T S"], mask: Bool[Array, "B T S"]
  ) -> Float[Array, "B Q G T S"]:
    """Returns the rounded logits. Hidden logits do not set a scale."""
    is_visible = mask[:, None, None]  # [B, 1, 1, T, S]
    return absmax(logits, is_visible, self.bits, _AXES[self.per])


def absmax(
  logits: Float[Array, "B Q G T S"],
  seen: Bool[Array, "B 1 1 T S"],
  bits: int,
  axes: tuple[int, ...],
) -> Float[Array, "B Q G T S"]:
  """Logits rounded to 2^bits − 1 levels between minus and plus the largest visible |logit| over some axes."""
  largest = jnp.max(
    jnp.where(seen, jnp.abs(logits), 0.0), axis=axes, keepdims=True
  )
  step = largest / (2 ** (bits - 1) - 1)
  return jnp.where(
    largest > 0,
    jnp.round(logits / jnp.where(largest > 0, step, 1)) * step,
    logits,
  )


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Plots each measurement over bits, a line for each model and kind of scale."""
  figures = [row for row in results["figures"] if row["at"]["bits"] != "all"]
  kinds = list(dict.fromkeys(_kind(row) for row in results["figures"]))
  bits = sorted({row["at"]["bits"] for row in figures}, reverse=True)
  figure = matplotlib.figure.Figure(
    (max(WIDTH, 5 * len(kinds)), 4), layout="constrained"
  )
  for axes, kind in zip(
    figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True
  ):
    for model, rows in by_model(results):
      rows = [row for row in rows if _kind(row) == kind]
      for per, style in (("tensor", ":"), ("head", "--"), ("row", "-")):
        chosen = [row for row in rows if row["at"]["per"] in ("", per)]
        if len(chosen) > 1:
          x = [
            0
            if row["at"]["bits"] == "all"
            else 1 + bits.index(row["at"]["bits"])
            for row in chosen
          ]
          draw_line(axes, x, chosen, model, f", scaled per {per}", style)
    measurement, _, unit = kind.partition(": ")
    axes.set(title=measurement, xlabel="bits of a logit", ylabel=unit)
    axes.set_xticks(range(len(bits) + 1), ["all", *map(str, bits)])
  if kinds:
    axes.legend(fontsize=9)
  save(figure, path)


def _kind(row: Mapping[str, Any]) -> str:
  place = ", ".join(
    f"{key} {value}"
    for key, value in row["at"].items()
    if key not in ("bits", "per", "depth")
  )
  return f"{row['name']} {place}".strip()
