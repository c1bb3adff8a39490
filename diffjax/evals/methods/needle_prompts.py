"""Prompts of the needle measurement: numbers that are hidden in a long text.

A needle is a sentence that gives a city a magic number. A prompt has an
opening, a long text (the haystack) with needles, and a question about some of
the numbers:

    Some cities have a special magic number, …
    The old river watches the quiet bridge behind the market.
    The special magic Oslo number is: 31415
    …
    What is the special magic Oslo number? The special magic Oslo number is:

The prompt ends with the first words of the answer. They end with "is:", the
text before the number in the needle. No space follows, because tokenizers
differ in whether a space belongs to the number after it.

The haystack is the validation text of the model's own training data, or
sentences of a small grammar. (The paper's essays are not available.) Each
sample begins at a random piece of the haystack. A short haystack is repeated.
Digits in the haystack do no harm, because the suites look for a
number only in the text that the model writes.

A piece has at most 32 tokens and is a line or a part of a line. Needles stand
between pieces, at the boundary nearest to their depth.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diffjax.config import UserError
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.methods.validation_documents import validation_documents
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

# Half-open range of the magic numbers.
_NUMBER_RANGE = (10_000, 50_000)

# The maximum number of tokens in a piece of the haystack.
MAX_PIECE_TOKENS = 32

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
    ids: The whole prompt: the tokens that begin a document, opening, haystack
      with needles, and question.
    answers: The numbers asked for, in the order of the question. The needle of
      the first one is at the requested depth.
    answer_spans: The needles of the answers, with their line breaks.
    query_span: The question and the first words of the answer. It ends at the
      end of the prompt.
    bos_span: The tokens that begin a document.
  """

  ids: list[int]
  answers: list[str]
  answer_spans: list[tuple[int, int]]
  query_span: tuple[int, int]
  bos_span: tuple[int, int]


class _Needle(NamedTuple):
  """A needle: a sentence that gives a city a number.

  Attributes:
    city: The city. Each needle of a prompt has another one.
    number: The number in digits.
    ids: The token ids of the sentence.
  """

  city: str
  number: str
  ids: list[int]


class _Placement(NamedTuple):
  """Where a needle is to be inserted into the haystack.

  Attributes:
    needle: The needle.
    depth: The position: 0 is the beginning of the haystack, 1 is its end.
    order: The sort key of needles that are inserted at the same boundary.
  """

  needle: _Needle
  depth: float
  order: float


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
  """Returns prompts that ask for numbers hidden in a long text.

  Each number is in a needle, a sentence that gives a city its number. The same
  arguments give the same prompts.

  Args:
    tokenizer: The tokenizer of the model.
    length: The exact number of tokens in each prompt.
    num_needles: N, the number of needles in each prompt.
    num_asked: R, the number of needles that the question asks for.
    depth: The position of the first needle asked for: 0 is the beginning of the
      haystack, 1 is its end. The others are at random positions.
    samples: The number of prompts.
    seed: The seed of cities, numbers, positions and beginnings of the haystack.
    haystack: Ids of pieces, from `synthetic_haystack` or `validation_haystack`.

  Raises:
    UserError: if there are fewer needles than the question asks for, or fewer
      cities than needles; if the depth is not between 0 and 1; or if the length
      is too short for needles and question.
  """
  _check_settings(num_needles, num_asked, depth)
  # Each combination of arguments has its own random numbers.
  rng = np.random.default_rng(
    [seed, length, num_needles, num_asked, round(depth * 1_000_000)]
  )
  opening = tokenizer.encode_prompt(OPENING)
  newline = tokenizer.encode("\n")
  num_bos_tokens = len(tokenizer.document_tokens.start)
  prompts = []
  for _ in range(samples):
    needles = _draw_needles(tokenizer, num_needles, rng)
    asked_needles = needles[:num_asked]
    query = tokenizer.encode(_question(asked_needles))

    # The haystack fills the rest of the prompt.
    num_haystack_tokens = _room_for_haystack(length, opening, needles, query)
    first_piece = int(rng.integers(len(haystack)))
    pieces = _take_pieces(haystack, first_piece, num_haystack_tokens, newline)

    # Needles stand at boundaries between pieces.
    needles_by_boundary = _place_needles(needles, pieces, depth, rng)
    text = _insert_needles(opening, pieces, needles_by_boundary)
    prompts.append(
      NeedlePrompt(
        ids=text.ids + query,
        answers=[needle.number for needle in asked_needles],
        answer_spans=[text.spans[needle.city] for needle in asked_needles],
        query_span=(len(text.ids), length),
        bos_span=(0, num_bos_tokens),
      )
    )
  return prompts


def _check_settings(num_needles: int, num_asked: int, depth: float) -> None:
  """Raises UserError if no prompt has these needles at this depth."""
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
  """Returns the question for the numbers of some needles.

  It ends with the first words of the answer, as in "What is the special magic
  Oslo number? The special magic Oslo number is:".
  """
  cities = [needle.city for needle in needles]
  if len(cities) == 1:
    subject = f"special magic {cities[0]} number"
    return f"\nWhat is the {subject}? The {subject} is:"
  names = f"{', '.join(cities[:-1])} and {cities[-1]}"
  subject = f"special magic {names} numbers"
  return f"\nWhat are the {subject}? The {subject} are:"


def _room_for_haystack(
  length: int,
  opening: Sequence[int],
  needles: Sequence[_Needle],
  query: Sequence[int],
) -> int:
  """Returns the number of tokens that the other parts leave for the haystack.

  Args:
    length: The number of tokens in the prompt.
    opening: Ids of the opening.
    needles: All needles of the prompt.
    query: Ids of the question.

  Raises:
    UserError: if the other parts take more than the whole prompt.
  """
  num_needle_tokens = sum(len(needle.ids) for needle in needles)
  num_other_tokens = len(opening) + num_needle_tokens + len(query)
  if num_other_tokens > length:
    raise UserError(
      f"{length} tokens do not hold {len(needles)} needles with opening and"
      f" question, which take {num_other_tokens} of this tokenizer's; use a"
      " longer length or fewer needles"
    )
  return length - num_other_tokens


def _take_pieces(
  haystack: Sequence[Sequence[int]],
  first_piece: int,
  num_tokens: int,
  newline: list[int],
) -> list[list[int]]:
  """Returns consecutive pieces of the haystack with `num_tokens` tokens.

  After its last piece, the haystack begins again. The last piece is cut to the
  number of tokens, and ends with a line break.

  Args:
    haystack: Ids of pieces.
    first_piece: The index of the first piece.
    num_tokens: The number of tokens in total.
    newline: Ids of a line break.
  """
  pieces: list[list[int]] = []
  index = first_piece
  num_remaining = num_tokens
  while num_remaining > 0:
    piece = list(haystack[index % len(haystack)])
    if len(piece) > num_remaining:
      num_text_tokens = max(num_remaining - len(newline), 0)
      piece = piece[:num_text_tokens] + newline
      # There may be no room for all tokens of the line break.
      piece = piece[:num_remaining]
    pieces.append(piece)
    num_remaining -= len(piece)
    index += 1
  return pieces


def _place_needles(
  needles: Sequence[_Needle],
  pieces: Sequence[list[int]],
  depth: float,
  rng: np.random.Generator,
) -> list[list[_Needle]]:
  """Returns the needles at each boundary between pieces, in their order.

  Boundary i is before piece i. The last boundary is after the last piece. The
  first needle is at the boundary nearest to `depth`, and the others are at
  random boundaries.

  Args:
    needles: All needles of a prompt, those of the question first.
    pieces: Ids of each piece of the haystack.
    depth: 0 for the beginning of the haystack, 1 for its end.
    rng: Draws the random boundaries.
  """
  # The number of tokens before each boundary.
  offsets = [0]
  for piece in pieces:
    offsets.append(offsets[-1] + len(piece))
  num_tokens = offsets[-1]

  # Needles at the same boundary are in random order, with one exception: at
  # depth 0 the first needle precedes the others, and at depth 1 it follows
  # them. Random numbers are between 0 and 1, so its depth is its sort key.
  first_needle, *other_needles = needles
  placements = [_Placement(first_needle, depth, order=depth)]
  random_numbers = rng.random((len(other_needles), 2))
  for needle, numbers in zip(other_needles, random_numbers, strict=True):
    random_depth, random_order = numbers
    placements.append(_Placement(needle, random_depth, random_order))

  needles_by_boundary: list[list[_Needle]] = [[] for _ in offsets]
  for placement in sorted(placements, key=operator.attrgetter("order")):
    boundary = _nearest(offsets, placement.depth * num_tokens)
    needles_by_boundary[boundary].append(placement.needle)
  return needles_by_boundary


def _nearest(offsets: Sequence[int], target: float) -> int:
  """Returns the index of the offset nearest to a target.

  Args:
    offsets: Increasing numbers from 0 on. If two are equally near, the result
      is the smaller one's index.
    target: A number that is not negative.
  """
  after = bisect.bisect_left(offsets, target)
  after = min(after, len(offsets) - 1)
  if after == 0:
    return 0
  before = after - 1
  if target - offsets[before] <= offsets[after] - target:
    return before
  return after


class _TextWithNeedles(NamedTuple):
  """The opening and the haystack with needles.

  Attributes:
    ids: The token ids.
    spans: The half-open range of each needle's positions in `ids`, by city.
  """

  ids: list[int]
  spans: dict[str, tuple[int, int]]


def _insert_needles(
  opening: list[int],
  pieces: Sequence[list[int]],
  needles_by_boundary: Sequence[Sequence[_Needle]],
) -> _TextWithNeedles:
  """Returns the opening and the pieces, with needles between the pieces.

  Args:
    opening: Ids of the text before the first piece.
    pieces: Ids of each piece of the haystack.
    needles_by_boundary: The needles before each piece, then those after the
      last piece.
  """
  ids = list(opening)
  spans = {}
  for index, needles in enumerate(needles_by_boundary):
    for needle in needles:
      start = len(ids)
      ids += needle.ids
      spans[needle.city] = (start, len(ids))
    if index < len(pieces):
      ids += pieces[index]
  return _TextWithNeedles(ids, spans)


def find_haystack(
  trained: Trained, kind: str, *, tokens: int
) -> list[list[int]]:
  """Returns a haystack, the long text that hides needles, in pieces.

  Args:
    trained: The model.
    kind: The suite's setting `haystack`: "validation" for validation text of
      the model's training data, or "synthetic" for random sentences.
    tokens: The minimum number of tokens. Validation text may have fewer.

  Raises:
    UserError: if the kind is unknown, or if the validation text cannot be read.
  """
  if kind == "synthetic":
    return synthetic_haystack(trained.tokenizer, tokens=tokens)
  if kind != "validation":
    raise UserError(f"haystack = {kind!r}: must be 'validation' or 'synthetic'")
  try:
    return validation_haystack(trained, tokens=tokens)
  except UserError as error:
    raise UserError(f"{error}; haystack = 'synthetic' needs no data") from error


def synthetic_haystack(
  tokenizer: Tokenizer, *, tokens: int, seed: int = 0
) -> list[list[int]]:
  """Returns a haystack: pieces of random sentences from a small grammar.

  Each sentence is a line, without digits and without names of cities.

  Args:
    tokenizer: The tokenizer of the model.
    tokens: The minimum number of tokens in total.
    seed: The seed of the sentences.
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


def validation_haystack(trained: Trained, *, tokens: int) -> list[list[int]]:
  """Returns a haystack: pieces of a model's validation documents, in order.

  Args:
    trained: The model.
    tokens: Documents are read until the pieces have this many tokens.

  Raises:
    UserError: if the data cannot be read or have no validation documents.
  """
  pieces: list[list[int]] = []
  num_tokens = 0
  for document in validation_documents(trained):
    lines = (document.text + "\n").splitlines(keepends=True)
    for ids in trained.tokenizer.encode_batch(lines):
      pieces += _split_line(ids)
      num_tokens += len(ids)
    if num_tokens >= tokens:
      return pieces
  if not pieces:
    raise UserError(
      "config.data.validation_source, or else config.data.source, has no"
      " validation documents to hide needles in; use the synthetic haystack"
    )
  return pieces


def _split_line(ids: list[int]) -> list[list[int]]:
  """Returns the pieces of a line, with at most `MAX_PIECE_TOKENS` each."""
  starts = range(0, len(ids), MAX_PIECE_TOKENS)
  return [ids[start : start + MAX_PIECE_TOKENS] for start in starts]
