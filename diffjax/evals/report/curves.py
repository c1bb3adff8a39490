"""λ by layer over training, from runs' logs."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import matplotlib.figure
import matplotlib.ticker

from diffjax.plots import styles
from diffjax.plots.curves import Log, series


def lambda_curves(logs: Sequence[Log]) -> matplotlib.figure.Figure | None:
  """λ of each layer over steps, a field for each model that has it; None if no model has."""
  found = [
    (
      style,
      lines,
      sorted(
        {
          key
          for line in lines
          for key in line
          if key.startswith("lambda/layer_")
        }
      ),
    )
    for style, lines in logs
  ]
  found = [(style, lines, keys) for style, lines, keys in found if keys]
  if not found:
    return None
  figure = matplotlib.figure.Figure(
    (10, 3.6 * len(found)), layout="constrained"
  )
  for axes, (style, lines, keys) in zip(
    figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True
  ):
    for number, key in enumerate(keys):
      color = matplotlib.colormaps["viridis"](
        0.75 * number / max(len(keys) - 1, 1)
      )
      axes.plot(
        *series(lines, key),
        color=color,
        linewidth=1.4,
        label=f"layer {int(key.rpartition('_')[2])}",
      )
    axes.set(title=f"λ of {style.name}", xlabel="step", ylabel="λ")
    axes.xaxis.set_major_formatter(
      matplotlib.ticker.StrMethodFormatter("{x:,.0f}")
    )
    axes.legend(
      fontsize=9,
      ncols=-(-len(keys) // 10),
      loc="center left",
      bbox_to_anchor=(1, 0.5),
    )
  styles.tidy(figure)
  return figure
