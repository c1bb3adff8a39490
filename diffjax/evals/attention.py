"""Attention of the last query: the share of the answer's needle, and attention noise.

The weights are those that multiply the values (`Attention.weights`), A₁ for the Transformer and A₁ − λA₂ for DIFF, of the prompt's last
token, which the answer follows. They are averaged over heads and layers, divided by their sum, and added up over the parts of the prompt: BOS, the context before
the answer, the answer (the whole sentence of its needle), the context after it, and the query. Noise is the context before and after.

A row of A₁ − λA₂ sums to 1 − λ and has negative entries, and the paper does not say how it normalises them. There are two versions:

- "signed": the weights divided by their sum, so that the shares sum to 1, as the paper's do, with linear steps only. Context from which the
  second map takes as much as the first gives counts as nothing: this is the noise that differential attention cancels in its output,
  where similar values meet weights of both signs. A share can be negative or above 1. Where λ is near 1 the sum is near 0, and shares grow
  without bound.
- "absolute": the same of |weights| after the average. Weights do not cancel within a part, so this is the harder measure for DIFF, and is
  bounded.

For the Transformer both are the same. The average comes before the normalisation, so that layers with a λ near 1, which write little, have
little influence. Prompts are those of the needle suite, N needles and one of them asked for. The other needles are context.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from etils import epath
from jaxtyping import Array, Float

from diffjax.config import UserError
from diffjax.evals.methods import inside
from diffjax.evals.methods.needle_prompts import (
  NeedlePrompt,
  find_haystack,
  make_prompts,
)
from diffjax.evals.report.figures import Figure, mean_of
from diffjax.evals.report.plots import WIDTH, by_model, draw_line, save
from diffjax.evals.report.results import TableSpec
from diffjax.host.progress import Progress
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder

PARTS = ("BOS", "context before", "answer", "context after", "query")
OTHERS = tuple(part for part in PARTS if part != "answer")


TABLE = TableSpec(
  unit="prompts",
  summary={"depth": "mean"},
  notes=(
    "Shares of the attention of a prompt's last token, over all depths.",
    "answer: the sentence with the answer; noise: the context around it",
    "signed: of the weights, A1 - λA2 for DIFF; absolute: of their absolute values",
  ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the suite."""

  # Tokens of a prompt; 0 for 4096, or the model's config.model.max_length if that is less
  length: int = 0
  # Needles in it, one of them asked for
  needles: int = 6
  # Places of the answer's needle: 0 is the beginning of the haystack, 1 its end
  depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
  # Prompts for each depth
  samples: int = 50
  # "validation" (held-out text of the model's training data) or "synthetic" (made-up sentences)
  haystack: str = "validation"
  # Seed of cities, numbers and places
  seed: int = 0
  # Tokens of a batch; at least one prompt
  batch_tokens: int = 16_384


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """The answer's share and the noise, signed and absolute, for each depth and over all; the other parts' shares over all.

  The units are prompts.

  Raises:
    UserError: for settings that this model does not allow.
  """
  limit = trained.config.model.max_length
  length = settings.length or min(4096, limit)
  if not 1 <= length <= limit:
    raise UserError(
      f"set.attention.length = {length}: {trained.name} takes 1 to {limit} tokens (config.model.max_length)"
    )
  for name in ("samples", "batch_tokens"):
    if (value := getattr(settings, name)) < 1:
      raise UserError(f"set.attention.{name} = {value}: must be at least 1")
  if not settings.depths:
    raise UserError(
      "set.attention.depths = (): name at least one, between 0 and 1"
    )
  prompts = functools.partial(
    make_prompts,
    trained.tokenizer,
    length=length,
    num_needles=settings.needles,
    num_asked=1,
    seed=settings.seed,
    haystack=find_haystack(trained, settings.haystack, tokens=16 * length),
  )
  for depth in settings.depths:
    prompts(depth=depth, samples=1)  # refuses needles and depths that cannot be
  return _measure(trained, settings, prompts, length)


def _measure(
  trained: Trained,
  settings: Settings,
  make: Callable[..., list[NeedlePrompt]],
  length: int,
) -> Iterator[Figure]:
  weights = jax.jit(
    lambda params, tokens: last_query(trained.model, params, tokens)
  )
  size = max(1, min(settings.samples, settings.batch_tokens // length))
  found: dict[
    tuple[str, str], list[list[float]]
  ] = {}  # by part and sign, for each depth one share a prompt
  with Progress(
    f"attention of {trained.short_name}",
    settings.samples * len(settings.depths),
  ) as progress:
    for index, depth in enumerate(settings.depths):
      prompts = make(depth=depth, samples=settings.samples)
      shares: dict[tuple[str, str], list[float]] = {}
      for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        rows = [prompt.ids for prompt in batch]
        tokens = np.asarray(
          rows + rows[:1] * (size - len(rows)), np.int32
        )  # all batches have one shape
        for prompt, row in zip(
          batch,
          np.asarray(weights(trained.params, tokens), np.float64),
          strict=False,
        ):
          for key, share in shares_of(row, prompt).items():
            shares.setdefault(key, []).append(share)
        done = index * settings.samples + first + len(batch)
        progress.update(done, done * length)
      for key, values in shares.items():
        found.setdefault(key, []).append(values)
  wanted = [
    (part, sign)
    for sign in ("signed", "absolute")
    for part in ("answer", "noise")
  ] + [(part, "signed") for part in OTHERS]
  for part, sign in wanted:
    by_depth = found[part, sign]
    if part not in OTHERS:
      for depth, values in zip(settings.depths, by_depth, strict=True):
        yield mean_of(part, values, weights=sign, depth=depth)
    yield mean_of(part, np.concatenate(by_depth), weights=sign, depth="mean")


def last_query(model: Decoder, params: Any, tokens: Any) -> Float[Array, "B S"]:
  """Returns the weights of the last query, averaged over heads and layers.

  Args:
    model: the decoder.
    params: its parameters.
    tokens: int32[B, T].
  """

  def layer_result(attended: inside.Attended) -> Float[Array, "B S"]:
    length = attended.q.shape[1]
    count = 1
    if not attended.has_independent_queries:
      count = length
    queries = attended.queries(length - count, count)
    last_weights = queries.weights()[:, :, -1]  # [B, H, S]
    return jnp.mean(last_weights, axis=1)

  results = inside.measure(
    model, params, {"tokens": tokens}, attention=layer_result
  )
  return jnp.mean(results["attention"], axis=0)


def shares_of(
  weights: Float[np.ndarray, "S"], prompt: NeedlePrompt
) -> dict[tuple[str, str], float]:
  """The shares of the parts of a prompt and of the noise, by (part, "signed" or "absolute")."""
  bounds = [*prompt.bos_span, *prompt.answer_spans[0], *prompt.query_span]
  out: dict[tuple[str, str], float] = {}
  for sign, chosen in (("signed", weights), ("absolute", np.abs(weights))):
    total = float(chosen.sum())
    shares = {
      part: float(chosen[start:end].sum()) / total if total else float("nan")
      for part, (start, end) in zip(
        PARTS, itertools.pairwise(bounds), strict=True
      )
    }
    shares["noise"] = shares["context before"] + shares["context after"]
    out |= {(part, sign): share for part, share in shares.items()}
  return out


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Plots answer and noise over the answer's depth, signed and absolute."""
  figure = matplotlib.figure.Figure((WIDTH, 4), layout="constrained")
  for axes, part in zip(
    figure.subplots(1, 2), ("answer", "noise"), strict=True
  ):
    for model, rows in by_model(results, part):
      for sign, style in (("signed", "-"), ("absolute", ":")):
        chosen = [
          row
          for row in rows
          if row["at"]["weights"] == sign and row["at"]["depth"] != "mean"
        ]
        draw_line(
          axes,
          [row["at"]["depth"] for row in chosen],
          chosen,
          model,
          f", {sign}",
          style,
        )
    axes.set(
      title=f"attention: {part}",
      xlabel="depth of the answer (share of the text before it)",
      ylabel="share of attention",
    )
  figure.legend(
    *axes.get_legend_handles_labels(),
    loc="outside lower center",
    ncols=4,
    fontsize=9,
  )
  save(figure, path)
