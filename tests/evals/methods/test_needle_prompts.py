"""Prompts with needles have the needles at their depths and exact lengths."""

import dataclasses
import itertools
import re
from typing import Any, NamedTuple

import pytest

from diffjax.config import UserError
from diffjax.data.tokenizer import load_tokenizer
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
def test_the_question_names_the_cities_of_the_answers(
  depth, num_needles, num_asked
):
  """A needle is a sentence with a city and its number in a long text.

  A prompt of 3,000 tokens ends with a question for the numbers of some cities.
  """
  prompts = make(
    depth=depth, num_needles=num_needles, num_asked=num_asked, samples=20
  )

  for prompt in prompts:
    # The cities whose numbers are the answers.
    needles = {needle.number: needle for needle in find_needles(prompt)}
    answer_cities = []
    for number, span in zip(prompt.answers, prompt.answer_spans, strict=True):
      needle = needles[number]
      assert span == (needle.start, needle.stop)
      answer_cities.append(needle.city)
    assert len(answer_cities) == num_asked

    start, stop = prompt.query_span
    assert stop == 3000
    question = BYTES.decode(prompt.ids[start:stop])
    assert question.startswith("\nWhat ")
    assert question.endswith(":")
    # The cities are named again behind the question mark.
    _, after_question = question.split("?")
    words = re.findall(r"\w+", after_question)
    asked_cities = [word for word in words if word in needle_prompts.CITIES]
    assert asked_cities == answer_cities


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_the_first_answer_is_at_its_depth(depth, num_needles, num_asked):
  """The depth is the share of the haystack's tokens before the answer.

  Needles go between sentences, so a depth is off by half a sentence at most.
  """
  prompts = make(
    depth=depth, num_needles=num_needles, num_asked=num_asked, samples=20
  )

  for prompt in prompts:
    # A separator and the opening come before the haystack. Tokens are bytes.
    haystack_start = 1 + len(needle_prompts.OPENING)
    answer_start, _ = prompt.answer_spans[0]
    # The tokens of the haystack before the answer, and all of them. The tokens
    # of needles are subtracted.
    tokens_before = answer_start - haystack_start
    all_tokens = prompt.query_span[0] - haystack_start
    for needle in find_needles(prompt):
      needle_length = needle.stop - needle.start
      all_tokens -= needle_length
      if needle.start < answer_start:
        tokens_before -= needle_length
    half_piece = needle_prompts.MAX_PIECE_TOKENS / 2
    assert abs(tokens_before - depth * all_tokens) <= half_piece
    assert (tokens_before == 0) == (depth == 0)
    assert (tokens_before == all_tokens) == (depth == 1)


@pytest.fixture(scope="module")
def many_prompts() -> list[NeedlePrompt]:
  """200 prompts with the first answer at the beginning, and a second one."""
  return make(depth=0.0, num_needles=2, num_asked=2, samples=200)


def test_other_needles_are_at_random_depths(many_prompts):
  """The first needle of the 200 prompts is at the depth 0."""
  depths = []
  for prompt in many_prompts:
    second_start, _ = prompt.answer_spans[1]
    depths.append(second_start / 3000)

  # Random depths are spread from 0 to 1, with a mean of about 1/2.
  assert min(depths) < 0.2
  assert max(depths) > 0.8
  mean_depth = sum(depths) / 200
  assert 0.4 < mean_depth < 0.65


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


def test_the_length_is_exact_if_tokens_have_several_bytes(tmp_path):
  """Prompts of 400 to 429 tokens have exactly these lengths."""
  # A tokenizer that has learned the needles has tokens of several bytes.
  text = needle_prompts.OPENING
  for index, city in enumerate(needle_prompts.CITIES):
    # Any numbers of five digits.
    number = 12345 + 7 * index
    text += f"The special magic {city} number is: {number}\n"
  tokenizer = load_tokenizer(str(train_tokenizer([text] * 3, 400, tmp_path)))
  haystack = needle_prompts.synthetic_haystack(tokenizer, tokens=3000)

  for length in range(400, 430):
    prompts = needle_prompts.make_prompts(
      tokenizer,
      length=length,
      num_needles=2,
      num_asked=1,
      depth=0.5,
      samples=2,
      seed=0,
      haystack=haystack,
    )
    for prompt in prompts:
      assert len(prompt.ids) == length
      start, stop = prompt.answer_spans[0]
      assert prompt.answers[0] in tokenizer.decode(prompt.ids[start:stop])


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
    pytest.param(
      {"num_asked": 5}, "5 of 4 needles cannot be asked for", id="num_asked"
    ),
    pytest.param(
      {"num_needles": 0, "num_asked": 0}, "0 of 0 needles", id="no needles"
    ),
    pytest.param({"num_needles": 1000}, "of at most", id="many needles"),
    pytest.param({"depth": 1.5}, "between 0 .beginning. and 1", id="depth"),
    pytest.param(
      {"length": 200},
      "200 tokens do not hold 4 needles with opening and question, which take"
      " 4",
      id="length",
    ),
  ],
)
def test_an_invalid_argument_raises(changes, message):
  with pytest.raises(UserError, match=message):
    make(**changes)
