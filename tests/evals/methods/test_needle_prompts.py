"""Prompts with needles have the needles at their depths and exact lengths."""

import dataclasses
import itertools
import math
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.data.tokenizer import Tokenizer, load_tokenizer
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.evals.methods import needle_prompts
from diffjax.evals.methods.needle_prompts import NeedlePrompt
from diffjax.inference.trained import Trained

BYTES = load_tokenizer("bytes")
HAYSTACK = needle_prompts.synthetic_haystack(BYTES, tokens=20_000)
NEEDLE = re.compile(r"\nThe special magic (\w+) number is: (\d{5})\n")


class Needle(NamedTuple):
  """A needle in a prompt, and its first and last position in `ids`."""

  city: str
  number: str
  start: int
  stop: int


def make(**changes: Any) -> list[NeedlePrompt]:
  """Returns prompts of 3,000 tokens with four needles, unless changed."""
  arguments = {
    "length": 3000,
    "num_needles": 4,
    "num_asked": 2,
    "depth": 0.5,
    "samples": 5,
    "seed": 0,
    "haystack": HAYSTACK,
    **changes,
  }
  return needle_prompts.make_prompts(BYTES, **arguments)


def find_needles(prompt: NeedlePrompt) -> list[Needle]:
  """Returns the needles in a prompt, in the order of the text."""
  needles = []
  for match in NEEDLE.finditer(BYTES.decode(prompt.ids)):
    # Decoding drops the separator, the first token.
    start, stop = match.start() + 1, match.end() + 1
    needles.append(Needle(match[1], match[2], start, stop))
  return needles


def haystack_around(prompt: NeedlePrompt, answer_index: int) -> tuple[str, str]:
  """Returns the text before and after an answer, without any needles."""
  needle_start, needle_stop = prompt.answer_spans[answer_index]
  question_start, _ = prompt.query_span
  before = BYTES.decode(prompt.ids[:needle_start])
  before = before.removeprefix(needle_prompts.OPENING)
  after = BYTES.decode(prompt.ids[needle_stop:question_start])
  return NEEDLE.sub("", before), NEEDLE.sub("", after)


@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_prompts_have_their_length_and_distinct_needles(num_needles, num_asked):
  """A needle is a sentence with a city and its number in a long text."""
  prompts = make(num_needles=num_needles, num_asked=num_asked, samples=20)

  for prompt in prompts:
    assert len(prompt.ids) == 3000
    assert prompt.ids[0] == BYTES.separator
    needles = find_needles(prompt)
    assert len(needles) == num_needles
    assert len({needle.city for needle in needles}) == num_needles
    assert len({needle.number for needle in needles}) == num_needles


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_the_spans_of_answers_are_their_needles(depth, num_needles, num_asked):
  """A needle is a sentence with a city and a number, which is the answer."""
  prompts = make(
    depth=depth, num_needles=num_needles, num_asked=num_asked, samples=20
  )

  for prompt in prompts:
    spans = {}
    for needle in find_needles(prompt):
      spans[needle.number] = (needle.start, needle.stop)
    for number, span in zip(prompt.answers, prompt.answer_spans, strict=True):
      assert span == spans[number]


def question_of(prompt: NeedlePrompt) -> str:
  """Returns the text at the end of a prompt that asks for the answers."""
  start, stop = prompt.query_span
  assert stop == len(prompt.ids)
  return BYTES.decode(prompt.ids[start:stop])


def cities_of_answers(prompt: NeedlePrompt) -> list[str]:
  """Returns the cities whose numbers are the answers, in their order."""
  city_by_number = {}
  for needle in find_needles(prompt):
    city_by_number[needle.number] = needle.city
  return [city_by_number[number] for number in prompt.answers]


@pytest.mark.parametrize("num_needles", [1, 6])
def test_a_question_for_one_number_names_its_city(num_needles):
  for prompt in make(num_needles=num_needles, num_asked=1, samples=20):
    (city,) = cities_of_answers(prompt)
    assert question_of(prompt) == (
      f"\nWhat is the special magic {city} number?"
      f" The special magic {city} number is:"
    )


def test_a_question_for_two_numbers_names_their_cities():
  for prompt in make(num_needles=6, num_asked=2, samples=20):
    first_city, second_city = cities_of_answers(prompt)
    assert question_of(prompt) == (
      f"\nWhat are the special magic {first_city} and {second_city} numbers?"
      f" The special magic {first_city} and {second_city} numbers are:"
    )


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_the_first_answer_is_at_its_depth(depth, num_needles, num_asked):
  """The depth is the share of the haystack that precedes the answer's needle.

  The haystack is the text that the needles are hidden in.
  """
  prompts = make(
    depth=depth, num_needles=num_needles, num_asked=num_asked, samples=20
  )

  # Needles go between the pieces of the haystack, so they are at most half a
  # piece away from their depth. Tokens are characters.
  half_piece = needle_prompts.MAX_PIECE_TOKENS / 2
  for prompt in prompts:
    before, after = haystack_around(prompt, answer_index=0)
    haystack_length = len(before) + len(after)
    expected = depth * haystack_length
    assert len(before) == pytest.approx(expected, abs=half_piece)


@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_depths_0_and_1_are_the_ends_of_the_haystack(num_needles, num_asked):
  for prompt in make(depth=0.0, num_needles=num_needles, num_asked=num_asked):
    before, _ = haystack_around(prompt, answer_index=0)
    assert before == ""
  for prompt in make(depth=1.0, num_needles=num_needles, num_asked=num_asked):
    _, after = haystack_around(prompt, answer_index=0)
    assert after == ""


@pytest.fixture(scope="module")
def many_prompts() -> list[NeedlePrompt]:
  """200 prompts with the first answer at the beginning, and a second one."""
  return make(depth=0.0, num_needles=2, num_asked=2, samples=200)


def test_other_needles_are_at_random_depths():
  """Only the needle of the first answer is at the given depth."""
  num_prompts = 200
  prompts = make(depth=0.0, num_needles=2, num_asked=2, samples=num_prompts)

  depths = []
  for prompt in prompts:
    before, after = haystack_around(prompt, answer_index=1)
    haystack_length = len(before) + len(after)
    depths.append(len(before) / haystack_length)

  # Uniform depths have the mean 1/2 and the standard deviation 1/√12.
  standard_error = 1 / math.sqrt(12 * num_prompts)
  assert np.mean(depths) == pytest.approx(1 / 2, abs=5 * standard_error)
  assert min(depths) < 0.1
  assert max(depths) > 0.9


def test_samples_differ(many_prompts):
  distinct_prompts = {tuple(prompt.ids) for prompt in many_prompts}

  assert len(distinct_prompts) == 200


def test_samples_begin_at_different_pieces_of_the_haystack(many_prompts):
  """The text behind the first needle differs in most of the 200 prompts."""
  # The first needle follows the opening, and takes fewer than 60 tokens.
  start = len(needle_prompts.OPENING) + 60
  beginnings = set()
  for prompt in many_prompts:
    beginnings.add(tuple(prompt.ids[start : start + 30]))

  assert len(beginnings) > 50


def test_the_answer_at_depth_0_is_the_first_of_adjacent_needles():
  """In a short prompt, needles are at the same place of the haystack."""
  prompts = make(length=600, num_needles=6, depth=0.0, samples=20)

  for prompt in prompts:
    answer_start, _ = prompt.answer_spans[0]
    starts = [needle.start for needle in find_needles(prompt)]
    assert answer_start == min(starts)


def test_the_answer_at_depth_1_is_the_last_of_adjacent_needles():
  """In a short prompt, needles are at the same place of the haystack."""
  prompts = make(length=600, num_needles=6, depth=1.0, samples=20)

  for prompt in prompts:
    answer_start, _ = prompt.answer_spans[0]
    starts = [needle.start for needle in find_needles(prompt)]
    assert answer_start == max(starts)


def test_no_city_is_part_of_another():
  for city, other_city in itertools.permutations(needle_prompts.CITIES, 2):
    assert city not in other_city


def test_a_seed_determines_the_prompts():
  assert make() == make()
  assert make() != make(seed=1)


def test_the_synthetic_haystack_is_always_the_same():
  first = needle_prompts.synthetic_haystack(BYTES, tokens=5000)
  second = needle_prompts.synthetic_haystack(BYTES, tokens=5000)

  assert first == second


def test_other_depths_have_other_numbers():
  middle_answers = {prompt.answers[0] for prompt in make(depth=0.5)}
  early_answers = {prompt.answers[0] for prompt in make(depth=0.25)}
  assert middle_answers.isdisjoint(early_answers)


def make_for_subwords(tokenizer: Tokenizer, length: int) -> list[NeedlePrompt]:
  """Returns two prompts with two needles and a question for one of them."""
  return needle_prompts.make_prompts(
    tokenizer,
    length=length,
    num_needles=2,
    num_asked=1,
    depth=0.5,
    samples=2,
    seed=0,
    haystack=needle_prompts.synthetic_haystack(tokenizer, tokens=3000),
  )


@pytest.fixture(scope="module")
def subword_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
  """A tokenizer whose tokens have several bytes, trained on needles."""
  text = needle_prompts.OPENING
  for city in needle_prompts.CITIES:
    text += needle_prompts.NEEDLE.format(city=city, number=12345)
  directory = tmp_path_factory.mktemp("tokenizer")
  path = train_tokenizer([text], vocab_size=400, directory=directory)
  return load_tokenizer(str(path))


@pytest.mark.parametrize("length", range(400, 430))
def test_the_length_is_exact_if_tokens_have_several_bytes(
  subword_tokenizer, length
):
  for prompt in make_for_subwords(subword_tokenizer, length):
    assert len(prompt.ids) == length


def test_the_span_of_an_answer_counts_tokens(subword_tokenizer):
  """Each token has several bytes."""
  for prompt in make_for_subwords(subword_tokenizer, length=400):
    (answer,) = prompt.answers
    ((start, stop),) = prompt.answer_spans
    assert answer in subword_tokenizer.decode(prompt.ids[start:stop])


def with_validation_source(trained: Trained, source: str) -> Trained:
  """Returns the model with another source of validation text."""
  data = dataclasses.replace(trained.config.data, validation_source=source)
  config = dataclasses.replace(trained.config, data=data)
  return dataclasses.replace(trained, config=config)


def test_the_validation_haystack_is_the_validation_text(make_trained, tmp_path):
  """The pieces of the haystack are the lines of the text, as tokens."""
  lines = [f"held line {number}" for number in range(100)]
  (tmp_path / "held.txt").write_text("\n".join(lines))
  trained = with_validation_source(make_trained(), f"text:{tmp_path}/held.txt")

  pieces = needle_prompts.validation_haystack(trained, tokens=10**6)

  ids = list(itertools.chain.from_iterable(pieces))
  assert BYTES.decode(ids).splitlines() == lines


def test_missing_validation_text_raises(make_trained, tmp_path):
  trained = with_validation_source(make_trained(), f"text:{tmp_path}/none.txt")

  with pytest.raises(UserError, match="none.txt"):
    needle_prompts.validation_haystack(trained, tokens=10)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"num_asked": 5}, "5 of 4 needles cannot be asked for"),
    ({"num_needles": 0, "num_asked": 0}, "0 of 0 needles"),
    ({"num_needles": 1000}, "of at most"),
    ({"depth": 1.5}, "between 0 .beginning. and 1"),
    (
      {"length": 200},
      "200 tokens do not hold 4 needles with opening and question, which take"
      " 4",
    ),
  ],
)
def test_an_invalid_argument_raises(changes, message):
  with pytest.raises(UserError, match=message):
    make(**changes)
