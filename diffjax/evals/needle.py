"""Multi-needle retrieval: sentences that give cities magic numbers are hidden in a long text, and the model is asked for some of them.

The paper's protocol (paper.md, §5): N needles, R of them asked for; the first one asked stands at a given depth, the others at random;
50 samples for each depth and length; greedy decoding of 20 tokens; a hit is a number found in what the model wrote. What it leaves open:

- All R are asked for in one question, whose answer begins with their cities in order; a sample scores the share of the R numbers that
  the model wrote. So R = 2 needs both from one generation, as "query cities" says, and costs one prompt.
- Numbers lie between 10,000 and 49,999: below 50,000 as in the public template, and none can be part of another, so that a model that
  guesses five digits hits once in 40,000 times.
- A length counts everything: the prompt has exactly the length minus the tokens to be written, so that a model can be asked at the full
  length that it was trained for.
- The haystack is the validation text of the model's own training data (the paper's essays are not at hand), or sentences made up from a
  small grammar; every sample begins at another place of it, and it is repeated where it is too short. Needles stand between pieces of
  at most 32 tokens, each a line or a part of one, at the boundary nearest to the depth. Digits in the text do no harm: what counts is
  what the model writes.
- The answer's opening words end with the needle's own "is:", without a space, because tokenizers differ in where a number's space goes.

The table at 4K is the default. The heat map at 64K:

    --set.needle.pairs=8/1 --set.needle.lengths=8192,16384,24576,32768,40960,49152,57344,65536
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.figure
import numpy as np
from etils import epath

from diffjax.config import DataConfig, UserError
from diffjax.data import sources
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.report.figures import Figure, mean_of
from diffjax.evals.report.plots import save
from diffjax.model.sampler import Sampler
from diffjax.training.trained import Trained

OPENING = (
  "Some cities have a special magic number, and the text below hides those numbers between other lines. "
  "Find them and remember them: you will be asked for them at the end.\n"
)
NEEDLE = "\nThe special magic {city} number is: {number}\n"
_PIECE = 32  # tokens of the haystack between two places where a needle may stand
# No name is part of another
CITIES = (
  "Almaty Amman Amsterdam Antananarivo Astana Athens Baghdad Bangalore Bangkok Barcelona Beirut Belgrade Berlin Bratislava Brussels "
  "Bucharest Budapest Cairo Chicago Colombo Copenhagen Dakar Damascus Delhi Doha Dubai Dublin Geneva Hanoi Havana Helsinki Istanbul "
  "Jakarta Johannesburg Kampala Kathmandu Khartoum Kigali Lagos Lima Lisbon London Madrid Manila Maputo Melbourne Montreal Moscow "
  "Mumbai Nairobi Oslo Paris Prague Quito Rabat Riga Rome Santiago Sarajevo Seattle Seoul Shanghai Sofia Stockholm Sydney Tashkent "
  "Thimphu Tokyo Toronto Tunis Vancouver Victoria Vienna Warsaw Yangon Yerevan Zagreb Zurich"
).split()


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is asked, and how often."""

  # N/R: needles in the text / how many of them are asked for
  pairs: tuple[str, ...] = ("1/1", "2/2", "4/2", "6/2")
  # Tokens, the answer's included; none: 4096, or the model's config.model.max_length if that is less
  lengths: tuple[int, ...] = ()
  # Where the first needle asked for stands: 0 is the beginning of the haystack, 1 its end
  depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
  # Prompts for each pair, length and depth
  samples: int = 50
  # Tokens that the model writes
  new_tokens: int = 20
  # "validation" (held-out text of the model's training data) or "synthetic" (made-up sentences)
  haystack: str = "validation"
  # Of cities, numbers and places
  seed: int = 0
  # Tokens of a batch: as many rows at a time as it holds, at least one
  batch_tokens: int = 32_768


def evaluate(trained: Trained, settings: Settings) -> Iterator[Figure]:
  """Retrieval accuracy for each pair, length and depth, and the mean over depths.

  Yields:
    `accuracy`, the share of the numbers asked for that were written; its units are prompts.

  Raises:
    UserError: for settings that cannot be met by this model.
  """
  limit = trained.config.model.max_length
  pairs = [_pair(pair) for pair in settings.pairs]
  lengths = settings.lengths or (min(4096, limit),)
  _check(trained, settings, pairs, lengths)
  # Sixteen texts of the longest length, so that samples differ
  haystack = find_haystack(trained, settings.haystack, tokens=16 * max(lengths))
  for length in lengths:
    sampler = Sampler(trained.model, trained.params, batch_size=max(1, settings.batch_tokens // length), capacity=length)
    for num_needles, num_asked in pairs:
      place = {"needles": num_needles, "asked": num_asked, "length": length}
      every: list[float] = []
      for depth in settings.depths:
        prompts = make_prompts(
          trained.tokenizer,
          length=length - settings.new_tokens,
          num_needles=num_needles,
          num_asked=num_asked,
          depth=depth,
          samples=settings.samples,
          seed=settings.seed,
          haystack=haystack,
        )
        written = sampler.generate([prompt.ids for prompt in prompts], settings.new_tokens, stop_ids=(trained.tokenizer.separator,))
        found = [_share_found(trained.tokenizer.decode(ids), prompt.answers) for ids, prompt in zip(written, prompts, strict=True)]
        yield mean_of("accuracy", found, **place, depth=depth)
        every += found
      yield mean_of("accuracy", every, **place, depth="mean")


def plot(results: dict[str, Any], path: epath.PathLike) -> None:
  """Heat maps of accuracy over length and depth: a row for each pair of N and R; the model, the one compared with, and the difference."""
  rows = [row for row in results["figures"] if row["at"]["depth"] != "mean"]
  axis = lambda name: sorted({row["at"][name] for row in rows})
  pairs = list(dict.fromkeys((row["at"]["needles"], row["at"]["asked"]) for row in rows))
  lengths, depths = axis("length"), axis("depth")
  columns = [(model["name"], key) for model, key in zip(results["models"], ("value", "against"), strict=False)]
  columns += [("difference", "difference")] * (len(columns) > 1)
  figure = matplotlib.figure.Figure((1.5 + len(columns) * max(2.6, 0.7 * len(lengths)), 0.6 + 2.4 * len(pairs)), layout="constrained")
  axes = figure.subplots(len(pairs), len(columns), squeeze=False)
  for (needles, asked), line in zip(pairs, axes, strict=True):
    for (title, key), place in zip(columns, line, strict=True):
      cells = np.full((len(depths), len(lengths)), np.nan)
      for row in rows:
        if (row["at"]["needles"], row["at"]["asked"]) == (needles, asked):
          value = row[key] if key == "value" else row[key]["value"]
          cells[depths.index(row["at"]["depth"]), lengths.index(row["at"]["length"])] = value
      low, colors = (-1, "RdBu") if key == "difference" else (0, "YlGn")
      place.imshow(cells, vmin=low, vmax=1, cmap=colors, aspect="auto")
      for (y, x), cell in np.ndenumerate(cells):
        place.text(x, y, f"{cell:.2f}", ha="center", va="center", fontsize=8, color="white" if abs(cell) > 0.6 else "black")
      place.set_xticks(range(len(lengths)), [f"{length / 1024:.4g}K" for length in lengths])
      place.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
      place.set_title(f"{title}\nN = {needles}, R = {asked}", fontsize=8)
    line[0].set_ylabel("depth of the answer")
  for place in axes[-1]:
    place.set_xlabel("length (tokens)")
  save(figure, path)


def find_haystack(trained: Trained, kind: str, *, tokens: int) -> list[list[int]]:
  """The haystack that a suite's setting names, at least so many tokens if there are.

  Raises:
    UserError: for a kind that there is not, or validation text that is not at hand.
  """
  if kind == "synthetic":
    return synthetic_haystack(trained.tokenizer, tokens=tokens)
  if kind != "validation":
    raise UserError(f"haystack = {kind!r}: must be 'validation' or 'synthetic'")
  try:
    return validation_haystack(trained.tokenizer, trained.config.data, tokens=tokens)
  except UserError as error:
    raise UserError(f"{error}; haystack = 'synthetic' needs no data") from error


def _pair(text: str) -> tuple[int, int]:
  try:
    num_needles, num_asked = map(int, text.split("/"))
  except ValueError:
    raise UserError(f"set.needle.pairs = {text!r}: must be N/R, needles in the text and how many are asked for, such as 4/2") from None
  return num_needles, num_asked


def _check(trained: Trained, settings: Settings, pairs: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
  limit = trained.config.model.max_length
  if (longest := max(lengths)) > limit:
    raise UserError(f"set.needle.lengths = {longest}: the model takes at most {limit} tokens (its config.model.max_length)")
  if (shortest := min(lengths)) <= settings.new_tokens:
    raise UserError(f"set.needle.lengths = {shortest}: must be more than the {settings.new_tokens} tokens of the answer")
  if settings.samples < 1:
    raise UserError(f"set.needle.samples = {settings.samples}: must be at least 1")
  for _, num_asked in pairs:
    needed = len(trained.tokenizer.encode(" " + " and ".join(["40404"] * num_asked)))
    if needed > settings.new_tokens:
      raise UserError(
        f"set.needle.new_tokens = {settings.new_tokens}: {num_asked} numbers take {needed} tokens of {trained.tokenizer.spec!r}; "
        "raise it or ask for fewer"
      )


def _share_found(text: str, answers: Sequence[str]) -> float:
  return sum(answer in text for answer in answers) / len(answers)


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
  """One sample. Spans are half-open ranges of positions in `ids`.

  Attributes:
    ids: the prompt: separator, opening, haystack with needles, question with the answer's first words.
    answers: the numbers asked for, in the question's order; the first one's needle stands at the depth.
    answer_spans: their needles, line breaks included, in the same order.
    query_span: the question with the answer's first words, up to the end.
    bos_span: the separator.
  """

  ids: list[int]
  answers: list[str]
  answer_spans: list[tuple[int, int]]
  query_span: tuple[int, int]
  bos_span: tuple[int, int] = (0, 1)


def make_prompts(
  tokenizer: Tokenizer,
  *,
  length: int,
  num_needles: int,
  num_asked: int,
  depth: float,
  samples: int,
  seed: int,
  haystack: Sequence[Sequence[int]],
) -> list[NeedlePrompt]:
  """Prompts of one length and depth; the same arguments give the same prompts.

  Args:
    tokenizer: the model's.
    length: tokens of every prompt, exactly.
    num_needles: N, needles in each.
    num_asked: R, how many of them are asked for.
    depth: where the first one asked for stands: 0 is the beginning of the haystack, 1 its end. The others stand at random.
    samples: prompts.
    seed: of cities, numbers, places and of where in the haystack a sample begins.
    haystack: pieces as ids, from `synthetic_haystack` or `validation_haystack`.

  Raises:
    UserError: for more asked than there are, more needles than cities, or a length that does not hold needles and question.
  """
  if not 1 <= num_asked <= num_needles <= len(CITIES):
    raise UserError(
      f"{num_asked} of {num_needles} needles cannot be asked for: at least 1, at most as many as there are, of at most {len(CITIES)}"
    )
  if not 0 <= depth <= 1:
    raise UserError(f"a needle's depth lies between 0 (beginning) and 1 (end of the haystack); got {depth}")
  rng = np.random.default_rng([seed, length, num_needles, num_asked, round(depth * 1_000_000)])
  opening = [tokenizer.separator, *_encode(tokenizer, OPENING)]
  newline = _encode(tokenizer, "\n")
  prompts = []
  for _ in range(samples):
    cities = [CITIES[index] for index in rng.choice(len(CITIES), num_needles, replace=False)]
    numbers = [str(number) for number in rng.choice(np.arange(10_000, 50_000), num_needles, replace=False)]
    needles = [_encode(tokenizer, NEEDLE.format(city=city, number=number)) for city, number in zip(cities, numbers, strict=True)]
    query = _encode(tokenizer, _question(cities[:num_asked]))
    room = length - len(opening) - sum(map(len, needles)) - len(query)
    if room < 0:
      raise UserError(
        f"{length} tokens do not hold {num_needles} needles with opening and question, which take {length - room} of this tokenizer's; "
        "ask for a longer length or fewer needles"
      )
    pieces = _take(haystack, int(rng.integers(len(haystack))), room, newline)
    boundaries = [0, *itertools.accumulate(map(len, pieces))]
    # Where two needles meet, the answer's comes first at depth 0 and last at depth 1
    places = [(_nearest(boundaries, depth * room), depth)]
    places += [(_nearest(boundaries, at * room), tie) for at, tie in rng.random((num_needles - 1, 2))]
    ids, spans = list(opening), {}
    done = 0
    for needle in sorted(range(num_needles), key=lambda needle: places[needle]):
      for piece in pieces[done : places[needle][0]]:
        ids += piece
      done = places[needle][0]
      spans[needle] = (len(ids), len(ids) + len(needles[needle]))
      ids += needles[needle]
    for piece in pieces[done:]:
      ids += piece
    query_span = (len(ids), len(ids) + len(query))
    prompts.append(NeedlePrompt(ids + query, numbers[:num_asked], [spans[needle] for needle in range(num_asked)], query_span))
  return prompts


def _question(cities: Sequence[str]) -> str:
  if len(cities) == 1:
    return f"\nWhat is the special magic {cities[0]} number? The special magic {cities[0]} number is:"
  names = f"{', '.join(cities[:-1])} and {cities[-1]}"
  return f"\nWhat are the special magic {names} numbers? The special magic {names} numbers are:"


def _take(haystack: Sequence[Sequence[int]], start: int, room: int, newline: list[int]) -> list[list[int]]:
  """Pieces of `room` tokens in all; the last one is cut and ends its line."""
  pieces: list[list[int]] = []
  for index in itertools.count(start):
    piece = list(haystack[index % len(haystack)])
    if len(piece) >= room:
      piece = piece if len(piece) == room else (piece[: max(room - len(newline), 0)] + newline)[:room]
      return pieces + [piece] * (room > 0)
    pieces.append(piece)
    room -= len(piece)
  raise AssertionError("itertools.count ends never")


def _nearest(boundaries: Sequence[int], offset: float) -> int:
  """Index of the boundary nearest to an offset."""
  after = min(bisect.bisect_left(boundaries, offset), len(boundaries) - 1)
  return after - 1 if after and offset - boundaries[after - 1] <= boundaries[after] - offset else after


def synthetic_haystack(tokenizer: Tokenizer, *, tokens: int, seed: int = 0) -> list[list[int]]:
  """Sentences of a small grammar, one a line, without digits or names of cities, in pieces of ids; at least so many tokens."""
  rng = np.random.default_rng(seed)
  nouns = "river garden engine letter window farmer bridge forest kitchen teacher mountain ship painter road market lamp horse song".split()
  adjectives = "old quiet green narrow bright heavy distant simple warm broken early small wide patient hollow clean".split()
  verbs = "passes watches follows remembers carries finds leaves answers repairs draws".split()
  places = "behind near above beside before under across around".split()
  pieces: list[list[int]] = []
  while tokens > 0:
    noun, other, third = rng.choice(nouns, 3, replace=False)
    adjective, verb, place = rng.choice(adjectives), rng.choice(verbs), rng.choice(places)
    added = _split(_encode(tokenizer, f"The {adjective} {noun} {verb} the {other} {place} the {third}.\n"))
    pieces += added
    tokens -= sum(map(len, added))
  return pieces


def validation_haystack(tokenizer: Tokenizer, config: DataConfig, *, tokens: int) -> list[list[int]]:
  """The validation documents of a run, one after the other, in pieces of ids: at least so many tokens, or all there are.

  Raises:
    UserError: if the data is not at hand or holds no validation documents.
  """
  pieces: list[list[int]] = []
  field = "data.validation_source" if config.validation_source else "data.source"
  for component in sources.parse_mixture(config.validation_source or config.source, field):
    source = sources.documents(component.spec, "validation", config)
    for document in itertools.chain.from_iterable(map(source.read, source.parts)):
      for line in tokenizer.encode_batch((document.text + "\n").splitlines(keepends=True)):
        pieces += _split(np.asarray(line).tolist())
        tokens -= len(line)
      if tokens <= 0:
        return pieces
  if not pieces:
    raise UserError(f"config.{field} has no validation documents to hide needles in; use the synthetic haystack")
  return pieces


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
  return np.asarray(tokenizer.encode(text)).tolist()


def _split(ids: list[int]) -> list[list[int]]:
  return [ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE)]
