"""Prompts of the needle measurement: numbers that are hidden in a long text.

A needle is a sentence that gives a city a magic number. A prompt has an
opening, a long text (the haystack) with needles, and a question about some of
the numbers:

    Some cities have a special magic number, …
    The old river watches the quiet bridge behind the market.
    The special magic Oslo number is: 31415
    …
    What is the special magic Oslo number? The special magic Oslo number is:

The prompt ends with the first words of the answer. They end with "is:" as the
needle does, without a space: tokenizers differ in whether a space belongs to
the number after it.

The haystack is the validation text of the model's own training data, or
sentences of a small grammar. (The paper's essays are not available.) Each
sample begins at a random piece of the haystack, and repeats the haystack if it
is too short. Digits in the haystack do no harm, because the suites look for a
number only in the text that the model writes.

A piece has at most 32 tokens and is a line or a part of a line. Needles stand
between pieces, at the boundary nearest to their depth.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from diffjax.config import DataConfig, UserError
from diffjax.data import sources
from diffjax.data.document import Document
from diffjax.data.tokenizer import Tokenizer
from diffjax.inference.trained import Trained

OPENING = (
  "Some cities have a special magic number, and the text below hides those"
  " numbers between other lines. Find them and remember them: you will be asked"
  " for them at the end.\n"
)
NEEDLE = "\nThe special magic {city} number is: {number}\n"

# No name is part of another name.
CITIES = (
  "Almaty Amman Amsterdam Antananarivo Astana Athens Baghdad Bangalore "
  "Bangkok Barcelona Beirut Belgrade Berlin Bratislava Brussels Bucharest "
  "Budapest Cairo Chicago Colombo Copenhagen Dakar Damascus Delhi Doha Dubai "
  "Dublin Geneva Hanoi Havana Helsinki Istanbul Jakarta Johannesburg Kampala "
  "Kathmandu Khartoum Kigali Lagos Lima Lisbon London Madrid Manila Maputo "
  "Melbourne Montreal Moscow Mumbai Nairobi Oslo Paris Prague Quito Rabat "
  "Riga Rome Santiago Sarajevo Seattle Seoul Shanghai Sofia Stockholm Sydney "
  "Tashkent Thimphu Tokyo Toronto Tunis Vancouver Victoria Vienna Warsaw "
  "Yangon Yerevan Zagreb Zurich"
).split()

# Numbers are at least the first and less than the second.
_NUMBER_RANGE = (10_000, 50_000)

# The maximum number of tokens in a piece of the haystack.
_MAX_PIECE_TOKENS = 32

# Words of the sentences of the synthetic haystack.
_NOUNS = (
  "river garden engine letter window farmer bridge forest kitchen teacher"
  " mountain ship painter road market lamp horse song"
).split()
_ADJECTIVES = (
  "old quiet green narrow bright heavy distant simple warm broken early small"
  " wide patient hollow clean"
).split()
_VERBS = (
  "passes watches follows remembers carries finds leaves answers repairs draws"
).split()
_PREPOSITIONS = "behind near above beside before under across around".split()


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
  """A prompt. Spans are half-open ranges of positions in `ids`.

  Attributes:
    ids: the whole prompt: the tokens that begin a document, opening, haystack
      with needles, and question.
    answers: the numbers asked for, in the order of the question. The needle of
      the first one is at the requested depth.
    answer_spans: the needles of the answers, with their line breaks.
    query_span: the question and the first words of the answer. It ends at the
      end of the prompt.
    bos_span: the tokens that begin a document.
  """

  ids: list[int]
  answers: list[str]
  answer_spans: list[tuple[int, int]]
  query_span: tuple[int, int]
  bos_span: tuple[int, int]


class _Needle(NamedTuple):
  """A needle: the city, its number and the ids of the sentence."""

  city: str
  number: str
  ids: list[int]


class _Position(NamedTuple):
  """Where a needle is in the haystack.

  Attributes:
    num_pieces: the number of pieces before the needle.
    rank: the order among needles with the same number of pieces before them.
  """

  num_pieces: int
  rank: float


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
  """Returns prompts of one length and depth.

  The same arguments give the same prompts.

  Args:
    tokenizer: the tokenizer of the model.
    length: the exact number of tokens in each prompt.
    num_needles: N, the number of needles in each prompt.
    num_asked: R, the number of needles that the question asks for.
    depth: the position of the first needle asked for: 0 is the beginning of the
      haystack, 1 is its end. The others are at random positions.
    samples: the number of prompts.
    seed: the seed of cities, numbers, positions and beginnings of the haystack.
    haystack: ids of pieces, from `synthetic_haystack` or `validation_haystack`.

  Raises:
    UserError: if there are fewer needles than the question asks for, or fewer
      cities than needles, or if the length is too short for needles and
      question.
  """
  if not 1 <= num_asked <= num_needles <= len(CITIES):
    raise UserError(
      f"{num_asked} of {num_needles} needles cannot be asked for: ask for at"
      " least 1, and at most as many as there are, of at most"
      f" {len(CITIES)}"
    )
  if not 0 <= depth <= 1:
    raise UserError(
      "a needle's depth lies between 0 (beginning) and 1 (end of the haystack);"
      f" got {depth}"
    )

  rng = np.random.default_rng(
    [seed, length, num_needles, num_asked, round(depth * 1_000_000)]
  )
  opening = tokenizer.encode_prompt(OPENING)
  newline = tokenizer.encode("\n")
  bos_span = (0, len(tokenizer.document_tokens.start))
  prompts = []
  for _ in range(samples):
    needles = _draw_needles(tokenizer, num_needles, rng)
    query = tokenizer.encode(_question(needles[:num_asked]))
    num_needle_tokens = sum(len(needle.ids) for needle in needles)
    num_other_tokens = len(opening) + num_needle_tokens + len(query)
    if num_other_tokens > length:
      raise UserError(
        f"{length} tokens do not hold {num_needles} needles with opening and"
        f" question, which take {num_other_tokens} of this tokenizer's; use a"
        " longer length or fewer needles"
      )

    first_piece = int(rng.integers(len(haystack)))
    pieces = _take_pieces(
      haystack, first_piece, length - num_other_tokens, newline
    )
    positions = _draw_positions(pieces, depth, num_needles, rng)
    body, spans = _insert_needles(opening, pieces, needles, positions)
    prompts.append(
      NeedlePrompt(
        ids=body + query,
        answers=[needle.number for needle in needles[:num_asked]],
        answer_spans=spans[:num_asked],
        query_span=(len(body), length),
        bos_span=bos_span,
      )
    )
  return prompts


def _draw_needles(
  tokenizer: Tokenizer, num_needles: int, rng: np.random.Generator
) -> list[_Needle]:
  """Returns needles with different cities and numbers."""
  city_indices = rng.choice(len(CITIES), num_needles, replace=False)
  numbers = rng.choice(np.arange(*_NUMBER_RANGE), num_needles, replace=False)
  needles = []
  for city_index, number in zip(city_indices, numbers, strict=True):
    city = CITIES[city_index]
    ids = tokenizer.encode(NEEDLE.format(city=city, number=number))
    needles.append(_Needle(city, str(number), ids))
  return needles


def _question(needles: Sequence[_Needle]) -> str:
  """Returns the question for some needles, with the answer's first words."""
  cities = [needle.city for needle in needles]
  if len(cities) == 1:
    subject = f"special magic {cities[0]} number"
    return f"\nWhat is the {subject}? The {subject} is:"
  names = f"{', '.join(cities[:-1])} and {cities[-1]}"
  subject = f"special magic {names} numbers"
  return f"\nWhat are the {subject}? The {subject} are:"


def _take_pieces(
  haystack: Sequence[Sequence[int]],
  first_piece: int,
  num_tokens: int,
  newline: list[int],
) -> list[list[int]]:
  """Returns consecutive pieces with `num_tokens` tokens in total.

  The last piece is cut, and ends with a line break.
  """
  pieces: list[list[int]] = []
  index = first_piece
  remaining = num_tokens
  while remaining > 0:
    piece = list(haystack[index % len(haystack)])
    if len(piece) > remaining:
      text_length = max(remaining - len(newline), 0)
      piece = (piece[:text_length] + newline)[:remaining]
    pieces.append(piece)
    remaining -= len(piece)
    index += 1
  return pieces


def _draw_positions(
  pieces: Sequence[list[int]],
  depth: float,
  num_needles: int,
  rng: np.random.Generator,
) -> list[_Position]:
  """Returns the positions of needles: the first at `depth`, others at random.

  The rank of the first needle is its depth. So among needles at the same
  boundary, it is the first one at depth 0 and the last one at depth 1.
  """
  boundaries = [0]
  for piece in pieces:
    boundaries.append(boundaries[-1] + len(piece))
  num_tokens = boundaries[-1]

  positions = [_Position(_nearest(boundaries, depth * num_tokens), depth)]
  for random_depth, rank in rng.random((num_needles - 1, 2)):
    boundary = _nearest(boundaries, random_depth * num_tokens)
    positions.append(_Position(boundary, rank))
  return positions


def _nearest(boundaries: Sequence[int], offset: float) -> int:
  """Returns the index of the boundary nearest to an offset."""
  after = bisect.bisect_left(boundaries, offset)
  after = min(after, len(boundaries) - 1)
  if after == 0:
    return 0
  before = after - 1
  if offset - boundaries[before] <= boundaries[after] - offset:
    return before
  return after


def _insert_needles(
  opening: list[int],
  pieces: Sequence[list[int]],
  needles: Sequence[_Needle],
  positions: Sequence[_Position],
) -> tuple[list[int], list[tuple[int, int]]]:
  """Returns opening and pieces with needles, and the span of each needle."""
  ids = list(opening)
  spans = [(0, 0)] * len(needles)
  next_piece = 0
  text_order = sorted(range(len(needles)), key=positions.__getitem__)
  for index in text_order:
    num_pieces = positions[index].num_pieces
    for piece in pieces[next_piece:num_pieces]:
      ids += piece
    start = len(ids)
    ids += needles[index].ids
    spans[index] = (start, len(ids))
    next_piece = num_pieces
  for piece in pieces[next_piece:]:
    ids += piece
  return ids, spans


def find_haystack(
  trained: Trained, kind: str, *, tokens: int
) -> list[list[int]]:
  """Returns the haystack that a suite's setting `haystack` selects.

  Args:
    trained: the model.
    kind: "validation" or "synthetic".
    tokens: the minimum number of tokens. Validation text may have fewer.

  Raises:
    UserError: if the kind is unknown, or if the validation text cannot be read.
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


def synthetic_haystack(
  tokenizer: Tokenizer, *, tokens: int, seed: int = 0
) -> list[list[int]]:
  """Returns pieces of sentences from a small grammar.

  Each sentence is a line, without digits and without names of cities.

  Args:
    tokenizer: the tokenizer of the model.
    tokens: the minimum number of tokens in total.
    seed: the seed of the sentences.
  """
  rng = np.random.default_rng(seed)
  pieces: list[list[int]] = []
  num_tokens = 0
  while num_tokens < tokens:
    ids = tokenizer.encode(_random_sentence(rng))
    pieces += _split_line(ids)
    num_tokens += len(ids)
  return pieces


def _random_sentence(rng: np.random.Generator) -> str:
  """Returns a line such as "The old river finds the lamp near the road."."""
  subject, direct_object, location = rng.choice(_NOUNS, 3, replace=False)
  adjective = rng.choice(_ADJECTIVES)
  verb = rng.choice(_VERBS)
  preposition = rng.choice(_PREPOSITIONS)
  return (
    f"The {adjective} {subject} {verb} the {direct_object}"
    f" {preposition} the {location}.\n"
  )


def validation_haystack(
  tokenizer: Tokenizer, config: DataConfig, *, tokens: int
) -> list[list[int]]:
  """Returns pieces of the validation documents of a run, in their order.

  Args:
    tokenizer: the tokenizer of the model.
    config: `config.data` of the run.
    tokens: the minimum number of tokens in total, if there are as many.

  Raises:
    UserError: if the data cannot be read or have no validation documents.
  """
  field = "data.source"
  spec = config.source
  if config.validation_source:
    field = "data.validation_source"
    spec = config.validation_source

  pieces: list[list[int]] = []
  num_tokens = 0
  for document in _validation_documents(spec, field, config):
    lines = (document.text + "\n").splitlines(keepends=True)
    for ids in tokenizer.encode_batch(lines):
      pieces += _split_line(ids)
      num_tokens += len(ids)
    if num_tokens >= tokens:
      return pieces
  if not pieces:
    raise UserError(
      f"config.{field} has no validation documents to hide needles in; use the"
      " synthetic haystack"
    )
  return pieces


def _validation_documents(
  spec: str, field: str, config: DataConfig
) -> Iterator[Document]:
  """Yields the validation documents of each source in a mixture."""
  for component in sources.parse_mixture(spec, field):
    source = sources.documents(component.spec, "validation", config)
    for part in source.parts:
      yield from source.read(part)


def _split_line(ids: list[int]) -> list[list[int]]:
  """Returns the pieces of a line."""
  starts = range(0, len(ids), _MAX_PIECE_TOKENS)
  return [ids[start : start + _MAX_PIECE_TOKENS] for start in starts]
