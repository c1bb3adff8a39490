"""Multi-needle retrieval: sentences that give cities magic numbers are hidden in a long text, and the model is asked for some of them.

The paper's protocol (paper.md, §5): N needles, of which R are asked for; the first one asked for stands at a given depth, the others at
random; 50 samples for each depth and length; greedy decoding of 20 tokens; a hit is a number found in the text that the model wrote. The
paper leaves these choices open:

- One question asks for all R numbers, and its answer begins with their cities in order. A sample scores the share of the R numbers that the
  model wrote. So R = 2 needs both from one generation, as "query cities" says, and costs one prompt.
- Numbers are between 10,000 and 49,999: below 50,000 as in the public template, and none is part of another, so that a guess of five digits
  hits once in 40,000 times.
- A length counts all tokens: the prompt has the length minus the tokens to write, so that a model can be asked at its full length.
- Prompts and haystacks are described in `methods/needle_prompts.py`.

The table at 4K is the default. The heat map at 64K:

    --set.needle.pairs=8/1 --set.needle.lengths=8192,16384,24576,32768,40960,49152,57344,65536
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib.figure
import numpy as np
from etils import epath

from diffjax.config import UserError
from diffjax.evals.methods.needle_prompts import (
  NeedlePrompt,
  find_haystack,
  make_prompts,
)
from diffjax.evals.report.figures import Figure, proportion
from diffjax.evals.report.plots import WIDTH, save, styles_of
from diffjax.evals.report.results import TableSpec, excludes_zero
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

TABLE = TableSpec(
  unit="prompts",
  summary={"depth": "mean"},
  notes=("accuracy: share of the numbers asked for that the model wrote",),
)


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of the suite."""

  # N/R: needles in the text / needles asked for
  pairs: tuple[str, ...] = ("1/1", "2/2", "4/2", "6/2")
  # Tokens, the answer's included; () for 4096, or the model's config.model.max_length if that is less
  lengths: tuple[int, ...] = ()
  # Places of the first needle asked for: 0 is the beginning of the haystack, 1 its end
  depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
  # Prompts for each pair, length and depth
  samples: int = 50
  # Tokens that the model writes, at most
  new_tokens: int = 20
  # "validation" (held-out text of the model's training data) or "synthetic" (made-up sentences)
  haystack: str = "validation"
  # Seed of cities, numbers and places
  seed: int = 0
  # Tokens of a batch; at least one row
  batch_tokens: int = 32_768


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """Retrieval accuracy for each pair, length and depth, and the mean over depths.

  Yields:
    `accuracy`, the share of the numbers asked for that were written. Its units are prompts, with R numbers each: a model that finds one may
    find the others, so the interval counts a prompt as one trial.

  Raises:
    UserError: for settings that this model does not allow.
  """
  limit = trained.config.model.max_length
  pairs = [_pair(pair) for pair in settings.pairs]
  lengths = settings.lengths or (min(4096, limit),)
  _check(trained, settings, pairs, lengths)
  # Sixteen times the longest length, so that samples differ
  haystack = find_haystack(trained, settings.haystack, tokens=16 * max(lengths))

  def prompts(
    length: int, pair: tuple[int, int], depth: float, samples: int
  ) -> list[NeedlePrompt]:
    return make_prompts(
      trained.tokenizer,
      length=length - settings.new_tokens,
      num_needles=pair[0],
      num_asked=pair[1],
      depth=depth,
      samples=samples,
      seed=settings.seed,
      haystack=haystack,
    )

  for length, pair, depth in itertools.product(lengths, pairs, settings.depths):
    prompts(
      length, pair, depth, samples=1
    )  # refuses needles, depths and lengths that cannot be
  return _measure(trained, settings, prompts, lengths, pairs)


def _measure(
  trained: Trained,
  settings: Settings,
  make: Callable[..., list[NeedlePrompt]],
  lengths: Sequence[int],
  pairs: Sequence[tuple[int, int]],
) -> Iterator[Figure]:
  for length in lengths:
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, min(settings.samples, settings.batch_tokens // length)),
      capacity=length,
    )
    for pair in pairs:
      place: dict[str, Any] = {
        "needles": pair[0],
        "asked": pair[1],
        "length": length,
      }
      every: list[float] = []
      for depth in settings.depths:
        prompts = make(length, pair, depth, settings.samples)
        written = sampler.generate(
          [prompt.ids for prompt in prompts],
          settings.new_tokens,
          stop_ids=trained.tokenizer.document_tokens.stop,
        )
        found = [
          _share_found(trained.tokenizer.decode(ids), prompt.answers)
          for ids, prompt in zip(written, prompts, strict=True)
        ]
        yield proportion("accuracy", found, **place, depth=depth)
        every += found
      yield proportion("accuracy", every, **place, depth="mean")


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Heat maps of accuracy over length and depth: a row for each pair of N and R, a column for each model and one for the difference.

  A difference whose interval excludes 0 is bold."""
  rows = [row for row in results["figures"] if row["at"]["depth"] != "mean"]
  axis = lambda name: sorted({row["at"][name] for row in rows})
  pairs = list(
    dict.fromkeys((row["at"]["needles"], row["at"]["asked"]) for row in rows)
  )
  lengths, depths = axis("length"), axis("depth")
  columns = [
    (style.name, key)
    for style, key in zip(
      styles_of(results["models"]), ("value", "against"), strict=False
    )
  ]
  columns += [("difference", "difference")] * (len(columns) > 1)
  figure = matplotlib.figure.Figure(
    (
      max(WIDTH, 1.5 + len(columns) * 0.7 * len(lengths)),
      0.6 + 2.4 * len(pairs),
    ),
    layout="constrained",
  )
  axes = figure.subplots(len(pairs), len(columns), squeeze=False)
  for (needles, asked), line in zip(pairs, axes, strict=True):
    for (title, key), place in zip(columns, line, strict=True):
      cells, clear = (
        np.full((len(depths), len(lengths)), np.nan),
        np.zeros((len(depths), len(lengths)), bool),
      )
      for row in rows:
        if (row["at"]["needles"], row["at"]["asked"]) == (needles, asked):
          value = row[key] if key == "value" else row[key]["value"]
          cell = (
            depths.index(row["at"]["depth"]),
            lengths.index(row["at"]["length"]),
          )
          cells[cell], clear[cell] = (
            value,
            key == "difference" and excludes_zero(row[key]),
          )
      low, colors = (-1, "RdBu") if key == "difference" else (0, "YlGn")
      place.imshow(cells, vmin=low, vmax=1, cmap=colors, aspect="auto")
      for (y, x), value in np.ndenumerate(cells):
        look = {
          "color": "white" if abs(value) > 0.6 else "black",
          "fontweight": "bold" if clear[y, x] else "normal",
        }
        place.text(
          x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, **look
        )
      place.set_xticks(
        range(len(lengths)), [f"{length / 1024:.4g}K" for length in lengths]
      )
      place.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
      place.set_title(f"{title}: {asked} of {needles} needles", fontsize=10)
    line[0].set_ylabel("depth of the answer")
  for place in axes[-1]:
    place.set_xlabel("length (tokens)")
  save(figure, path)


def _pair(text: str) -> tuple[int, int]:
  try:
    num_needles, num_asked = map(int, text.split("/"))
  except ValueError:
    raise UserError(
      f"set.needle.pairs = {text!r}: must be N/R, needles in the text and needles asked for, such as 4/2"
    ) from None
  return num_needles, num_asked


def _check(
  trained: Trained,
  settings: Settings,
  pairs: Sequence[tuple[int, int]],
  lengths: Sequence[int],
) -> None:
  limit = trained.config.model.max_length
  if (longest := max(lengths)) > limit:
    raise UserError(
      f"set.needle.lengths = {longest}: the model takes at most {limit} tokens (its config.model.max_length)"
    )
  if (shortest := min(lengths)) <= settings.new_tokens:
    raise UserError(
      f"set.needle.lengths = {shortest}: must be more than the {settings.new_tokens} tokens of the answer"
    )
  if settings.samples < 1:
    raise UserError(
      f"set.needle.samples = {settings.samples}: must be at least 1"
    )
  for _, num_asked in pairs:
    needed = len(
      trained.tokenizer.encode(" " + " and ".join(["40404"] * num_asked))
    )
    if needed > settings.new_tokens:
      raise UserError(
        f"set.needle.new_tokens = {settings.new_tokens}: {num_asked} numbers take {needed} tokens of {trained.tokenizer.spec!r}; "
        "raise it, or ask for fewer"
      )


def _share_found(text: str, answers: Sequence[str]) -> float:
  return sum(answer in text for answer in answers) / len(answers)
