"""Curves of how models were trained, from their runs' metrics.jsonl: the loss, and λ by layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.figure
from etils import epath

# The lines of each model's log, by its name.
Logs = Mapping[str, Sequence[Mapping[str, Any]]]


def read_log(path: epath.Path) -> list[dict[str, Any]]:
  """The lines of a metrics.jsonl that hold a step. The last line of a run that was killed may be cut and does not count."""
  lines = []
  for line in path.read_text(encoding="utf-8").splitlines():
    try:
      parsed = json.loads(line)
    except ValueError:
      continue
    if isinstance(parsed, dict) and "step" in parsed:
      lines.append(parsed)
  return lines


def loss_curves(logs: Logs) -> matplotlib.figure.Figure:
  """Training and validation loss over steps, a colour for each model."""
  figure = matplotlib.figure.Figure((9, 4), layout="constrained")
  axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
  for number, (name, lines) in enumerate(logs.items()):
    for metric, style, label in (("train/loss", "-", "training"), ("validation/loss", "o--", "validation")):
      steps, values = _series(lines, metric)
      if steps:
        axes.plot(steps, values, style, color=f"C{number}", label=f"{name}, {label}", markersize=4, linewidth=1)
  axes.grid(alpha=0.3)
  axes.legend(fontsize=8)
  return figure


def lambda_curves(logs: Logs) -> matplotlib.figure.Figure | None:
  """λ of each layer over steps, a field for each model that has it; None if no model has."""
  layers = {name: sorted({key for line in lines for key in line if key.startswith("lambda/layer_")}) for name, lines in logs.items()}
  layers = {name: keys for name, keys in layers.items() if keys}
  if not layers:
    return None
  figure = matplotlib.figure.Figure((9, 3.5 * len(layers)), layout="constrained")
  for axes, (name, keys) in zip(figure.subplots(len(layers), 1, squeeze=False)[:, 0], layers.items(), strict=True):
    for number, key in enumerate(keys):
      color = matplotlib.colormaps["viridis"](number / max(len(keys) - 1, 1))
      axes.plot(*_series(logs[name], key), color=color, linewidth=1, label=f"layer {int(key.rpartition('_')[2])}")
    axes.set(title=name, xlabel="step", ylabel="λ")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=-(-len(keys) // 10), loc="center left", bbox_to_anchor=(1, 0.5))
  return figure


def _series(lines: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
  points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
  return [step for step, _ in points], [value for _, value in points]
