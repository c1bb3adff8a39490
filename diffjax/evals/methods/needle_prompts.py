"""Prompts of the needle measurement: sentences that give cities magic numbers, hidden in a long text, and a question about some of them.

A length counts all tokens of a prompt. The haystack is the validation text of the model's own training data (the paper's essays are not
available), or sentences of a small grammar. Every sample begins at another place of it, and it is repeated where it is too short. Needles
stand between pieces of at most 32 tokens, each a line or a part of one, at the boundary nearest to their depth. Digits in the text do no
harm, since a hit is looked for in the text that the model writes. The first words of the answer end with the needle's own "is:", without a
space, because tokenizers differ in where the space before a number belongs.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from diffjax.config import DataConfig, UserError
from diffjax.data import sources
from diffjax.data.tokenizer import Tokenizer
from diffjax.inference.trained import Trained

OPENING = (
  "Some cities have a special magic number, and the text below hides those numbers between other lines. "
  "Find them and remember them: you will be asked for them at the end.\n"
)
NEEDLE = "\nThe special magic {city} number is: {number}\n"
_PIECE = 32  # tokens of the haystack, at most, between two places for needles
# No name is part of another
CITIES = (
  "Almaty Amman Amsterdam Antananarivo Astana Athens Baghdad Bangalore Bangkok Barcelona Beirut Belgrade Berlin Bratislava Brussels "
  "Bucharest Budapest Cairo Chicago Colombo Copenhagen Dakar Damascus Delhi Doha Dubai Dublin Geneva Hanoi Havana Helsinki Istanbul "
  "Jakarta Johannesburg Kampala Kathmandu Khartoum Kigali Lagos Lima Lisbon London Madrid Manila Maputo Melbourne Montreal Moscow "
  "Mumbai Nairobi Oslo Paris Prague Quito Rabat Riga Rome Santiago Sarajevo Seattle Seoul Shanghai Sofia Stockholm Sydney Tashkent "
  "Thimphu Tokyo Toronto Tunis Vancouver Victoria Vienna Warsaw Yangon Yerevan Zagreb Zurich"
).split()


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
  """A prompt. Spans are half-open ranges of positions in `ids`.

  Attributes:
    ids: The prompt: start of a document, opening, haystack with needles, question with the answer's first words.
    answers: The numbers asked for, in the question's order. The needle of the first one stands at the depth.
    answer_spans: Their needles, line breaks included, in the same order.
    query_span: The question with the answer's first words, up to the end.
    bos_span: The start of a document.
  """

  ids: list[int]
  answers: list[str]
  answer_spans: list[tuple[int, int]]
  query_span: tuple[int, int]
  bos_span: tuple[int, int]


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
  """Makes prompts of one length and depth. The same arguments give the same prompts.

  Args:
    tokenizer: The model's.
    length: Number of tokens of every prompt, exactly.
    num_needles: N, the number of needles in each.
    num_asked: R, the number of needles asked for.
    depth: The place of the first needle asked for: 0 is the beginning of the haystack, 1 its end. The others stand at random.
    samples: Number of prompts.
    seed: Of cities, numbers, places and the beginnings in the haystack.
    haystack: Pieces as ids, from `synthetic_haystack` or `validation_haystack`.

  Raises:
    UserError: if more needles are asked for than there are, there are more needles than cities, or the length does not hold needles and
      question.
  """
  if not 1 <= num_asked <= num_needles <= len(CITIES):
    raise UserError(
      f"{num_asked} of {num_needles} needles cannot be asked for: at least 1, at most as many as there are, of at most {len(CITIES)}"
    )
  if not 0 <= depth <= 1:
    raise UserError(
      f"a needle's depth lies between 0 (beginning) and 1 (end of the haystack); got {depth}"
    )
  rng = np.random.default_rng(
    [seed, length, num_needles, num_asked, round(depth * 1_000_000)]
  )
  opening = tokenizer.encode_prompt(OPENING)
  newline = _encode(tokenizer, "\n")
  prompts = []
  for _ in range(samples):
    cities = [
      CITIES[index]
      for index in rng.choice(len(CITIES), num_needles, replace=False)
    ]
    numbers = [
      str(number)
      for number in rng.choice(
        np.arange(10_000, 50_000), num_needles, replace=False
      )
    ]
    needles = [
      _encode(tokenizer, NEEDLE.format(city=city, number=number))
      for city, number in zip(cities, numbers, strict=True)
    ]
    query = _encode(tokenizer, _question(cities[:num_asked]))
    room = length - len(opening) - sum(map(len, needles)) - len(query)
    if room < 0:
      raise UserError(
        f"{length} tokens do not hold {num_needles} needles with opening and question, which take {length - room} of this tokenizer's; "
        "use a longer length or fewer needles"
      )
    pieces = _take(haystack, int(rng.integers(len(haystack))), room, newline)
    boundaries = [0, *itertools.accumulate(map(len, pieces))]
    # Where two needles meet, the first one that is asked for is before the others at depth 0 and behind them at depth 1
    places = [(_nearest(boundaries, depth * room), depth)]
    places += [
      (_nearest(boundaries, at * room), tie)
      for at, tie in rng.random((num_needles - 1, 2))
    ]
    prompts.append(
      _assemble(
        opening,
        pieces,
        needles,
        places,
        query,
        numbers[:num_asked],
        bos_span=(0, len(tokenizer.document_tokens.start)),
      )
    )
  return prompts


def _assemble(
  opening: list[int],
  pieces: Sequence[list[int]],
  needles: Sequence[list[int]],
  places: Sequence[tuple[int, float]],
  query: list[int],
  answers: list[str],
  *,
  bos_span: tuple[int, int],
) -> NeedlePrompt:
  """Joins the parts of a prompt.

  Args:
    opening: Ids of the first part.
    pieces: Ids of the haystack's.
    needles: Ids of each needle, the ones asked for first.
    places: Of each needle the number of pieces before it, and its rank among needles of the same place.
    query: Ids of the last part.
    answers: The numbers asked for.
    bos_span: The start of the document.
  """
  ids, spans, done = list(opening), {}, 0
  for needle in sorted(range(len(needles)), key=lambda needle: places[needle]):
    before = places[needle][0]
    ids += itertools.chain.from_iterable(pieces[done:before])
    spans[needle] = (len(ids), len(ids) + len(needles[needle]))
    ids += needles[needle]
    done = before
  ids += itertools.chain.from_iterable(pieces[done:])
  return NeedlePrompt(
    ids + query,
    answers,
    [spans[needle] for needle in range(len(answers))],
    (len(ids), len(ids) + len(query)),
    bos_span,
  )


def _question(cities: Sequence[str]) -> str:
  if len(cities) == 1:
    return f"\nWhat is the special magic {cities[0]} number? The special magic {cities[0]} number is:"
  names = f"{', '.join(cities[:-1])} and {cities[-1]}"
  return f"\nWhat are the special magic {names} numbers? The special magic {names} numbers are:"


def _take(
  haystack: Sequence[Sequence[int]], start: int, room: int, newline: list[int]
) -> list[list[int]]:
  """Pieces of `room` tokens in all. The last one is cut, and ends its line."""
  pieces: list[list[int]] = []
  for index in itertools.count(start):
    piece = list(haystack[index % len(haystack)])
    if len(piece) >= room:
      piece = (
        piece
        if len(piece) == room
        else (piece[: max(room - len(newline), 0)] + newline)[:room]
      )
      return pieces + [piece] * (room > 0)
    pieces.append(piece)
    room -= len(piece)
  raise AssertionError("itertools.count does not end")


def _nearest(boundaries: Sequence[int], offset: float) -> int:
  """The index of the boundary nearest to an offset."""
  after = min(bisect.bisect_left(boundaries, offset), len(boundaries) - 1)
  return (
    after - 1
    if after and offset - boundaries[after - 1] <= boundaries[after] - offset
    else after
  )


def synthetic_haystack(
  tokenizer: Tokenizer, *, tokens: int, seed: int = 0
) -> list[list[int]]:
  """Pieces of ids, at least `tokens` in all: sentences of a small grammar, one a line, without digits or names of cities."""
  rng = np.random.default_rng(seed)
  nouns = "river garden engine letter window farmer bridge forest kitchen teacher mountain ship painter road market lamp horse song".split()
  adjectives = "old quiet green narrow bright heavy distant simple warm broken early small wide patient hollow clean".split()
  verbs = "passes watches follows remembers carries finds leaves answers repairs draws".split()
  places = "behind near above beside before under across around".split()
  pieces: list[list[int]] = []
  while tokens > 0:
    noun, other, third = rng.choice(nouns, 3, replace=False)
    adjective, verb, place = (
      rng.choice(adjectives),
      rng.choice(verbs),
      rng.choice(places),
    )
    added = _split(
      _encode(
        tokenizer,
        f"The {adjective} {noun} {verb} the {other} {place} the {third}.\n",
      )
    )
    pieces += added
    tokens -= sum(map(len, added))
  return pieces


def validation_haystack(
  tokenizer: Tokenizer, config: DataConfig, *, tokens: int
) -> list[list[int]]:
  """Pieces of ids, at least `tokens` in all if there are as many: the validation documents of a run, one after the other.

  Raises:
    UserError: if the data cannot be read or holds no validation documents.
  """
  pieces: list[list[int]] = []
  field = (
    "data.validation_source" if config.validation_source else "data.source"
  )
  for component in sources.parse_mixture(
    config.validation_source or config.source, field
  ):
    source = sources.documents(component.spec, "validation", config)
    for document in itertools.chain.from_iterable(
      map(source.read, source.parts)
    ):
      for line in tokenizer.encode_batch(
        (document.text + "\n").splitlines(keepends=True)
      ):
        pieces += _split(line)
        tokens -= len(line)
      if tokens <= 0:
        return pieces
  if not pieces:
    raise UserError(
      f"config.{field} has no validation documents to hide needles in; use the synthetic haystack"
    )
  return pieces


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
  return tokenizer.encode(text)


def _split(ids: list[int]) -> list[list[int]]:
  return [ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE)]


def find_haystack(
  trained: Trained, kind: str, *, tokens: int
) -> list[list[int]]:
  """The haystack of a suite's setting `haystack`, of at least `tokens` tokens if there are as many.

  Raises:
    UserError: for an unknown kind, or validation text that cannot be read.
  """
  if kind == "synthetic":
    return synthetic_haystack(trained.tokenizer, tokens=tokens)
  if kind != "validation":
    raise UserError(f"haystack = {kind!r}: must be 'validation' or 'synthetic'")
  try:
    return validation_haystack(
      trained.tokenizer, trained.config.data, tokens=tokens
    )
  except UserError as error:
    raise UserError(f"{error}; haystack = 'synthetic' needs no data") from error
