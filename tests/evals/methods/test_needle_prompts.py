"""Prompts with needles have the needles in their places and exact lengths."""

import dataclasses
import re

import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.evals.methods import needle_prompts

BYTES = load_tokenizer("bytes")
HAYSTACK = needle_prompts.synthetic_haystack(BYTES, tokens=20_000)


def make(**changes):
  arguments = dict(
    length=3000,
    num_needles=4,
    num_asked=2,
    depth=0.5,
    samples=5,
    seed=0,
    haystack=HAYSTACK,
  )
  return needle_prompts.make_prompts(BYTES, **arguments | changes)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_needles_stand_where_they_should(depth, num_needles, num_asked):
  for prompt in make(
    depth=depth, num_needles=num_needles, num_asked=num_asked, samples=20
  ):
    text = BYTES.decode(prompt.ids)
    assert (
      len(prompt.ids) == 3000
      and prompt.ids[0] == BYTES.separator
      and prompt.query_span[1] == 3000
    )
    found = re.findall(r"\nThe special magic (\w+) number is: (\d{5})\n", text)
    assert (
      len(found) == num_needles
      and len({city for city, _ in found})
      == len({number for _, number in found})
      == num_needles
    )
    question = BYTES.decode(prompt.ids[slice(*prompt.query_span)])
    assert question.startswith("\nWhat ") and question.endswith(":")
    cities = [
      dict((number, city) for city, number in found)[answer]
      for answer in prompt.answers
    ]
    assert [
      city
      for city in re.findall(r"\w+", question.split("?")[1])
      if city in needle_prompts.CITIES
    ] == cities
    for (start, stop), answer, city in zip(
      prompt.answer_spans, prompt.answers, cities, strict=True
    ):
      assert (
        BYTES.decode(prompt.ids[start:stop])
        == f"\nThe special magic {city} number is: {answer}\n"
      )
    # The haystack before the answer, without opening and other needles
    start = prompt.answer_spans[0][0]
    needles = [
      match.span()
      for match in re.finditer(
        r"\nThe special magic \w+ number is: \d{5}\n", text
      )
    ]
    length = lambda spans: sum(stop - start for start, stop in spans)
    begin = len(
      needle_prompts.OPENING
    )  # decoding drops the separator, so text begins one byte earlier than ids
    before = (
      start
      - 1
      - begin
      - length(span for span in needles if span[0] < start - 1)
    )
    room = prompt.query_span[0] - 1 - begin - length(needles)
    assert abs(before - depth * room) <= needle_prompts._MAX_PIECE_TOKENS / 2
    assert (before == 0) == (depth == 0) and (before == room) == (depth == 1)


def test_other_needles_stand_at_random_and_samples_differ():
  prompts = make(depth=0.0, num_needles=2, num_asked=2, samples=200)
  second = [prompt.answer_spans[1][0] / 3000 for prompt in prompts]
  assert (
    min(second) < 0.2 and max(second) > 0.8 and 0.4 < sum(second) / 200 < 0.65
  )
  assert len({tuple(prompt.ids) for prompt in prompts}) == 200
  assert (
    len(
      {
        tuple(
          prompt.ids[
            len(needle_prompts.OPENING) + 60 : len(needle_prompts.OPENING) + 90
          ]
        )
        for prompt in prompts
      }
    )
    > 50
  )


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_where_needles_meet_the_answer_is_the_first_or_the_last(depth):
  for prompt in make(length=600, num_needles=6, depth=depth, samples=20):
    starts = [
      match.start() + 1
      for match in re.finditer(
        r"\nThe special magic \w+ number is: \d{5}\n", BYTES.decode(prompt.ids)
      )
    ]
    assert prompt.answer_spans[0][0] == (
      min(starts) if depth == 0 else max(starts)
    )


def test_no_city_is_part_of_another():
  assert not [
    (city, other)
    for city in needle_prompts.CITIES
    for other in needle_prompts.CITIES
    if city != other and city in other
  ]


def test_same_seed_same_prompts():
  assert make() == make() and make() != make(seed=1)
  assert needle_prompts.synthetic_haystack(
    BYTES, tokens=5000
  ) == needle_prompts.synthetic_haystack(BYTES, tokens=5000)
  assert not {first.answers[0] for first in make()} & {
    other.answers[0] for other in make(depth=0.25)
  }


def test_length_is_exact_with_a_tokenizer_of_many_bytes_a_token(tmp_path):
  text = needle_prompts.OPENING + "".join(
    f"The special magic {city} number is: {12345 + 7 * index}\n"
    for index, city in enumerate(needle_prompts.CITIES)
  )
  tokenizer = load_tokenizer(str(train_tokenizer([text] * 3, 400, tmp_path)))
  haystack = needle_prompts.synthetic_haystack(tokenizer, tokens=3000)
  for length in range(400, 430):
    for prompt in needle_prompts.make_prompts(
      tokenizer,
      length=length,
      num_needles=2,
      num_asked=1,
      depth=0.5,
      samples=2,
      seed=0,
      haystack=haystack,
    ):
      assert len(prompt.ids) == length
      assert prompt.answers[0] in tokenizer.decode(
        prompt.ids[slice(*prompt.answer_spans[0])]
      )


def test_validation_haystack_is_the_held_out_text(tmp_path):
  for name in ("train", "held"):
    (tmp_path / f"{name}.txt").write_text(
      "".join(f"{name} line {number}\n" for number in range(100))
    )
  config = DataConfig(
    source=f"text:{tmp_path}/train.txt",
    validation_source=f"text:{tmp_path}/held.txt",
  )
  text = BYTES.decode(
    sum(needle_prompts.validation_haystack(BYTES, config, tokens=10**6), [])
  )
  assert [line for line in text.splitlines() if line] == [
    f"held line {number}" for number in range(100)
  ]
  with pytest.raises(UserError, match="none.txt"):
    needle_prompts.validation_haystack(
      BYTES,
      dataclasses.replace(
        config, validation_source=f"text:{tmp_path}/none.txt"
      ),
      tokens=10,
    )


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(num_asked=5), "5 of 4 needles cannot be asked for"),
    (dict(num_needles=0, num_asked=0), "0 of 0 needles"),
    (dict(num_needles=1000), "of at most"),
    (dict(depth=1.5), "between 0 .beginning. and 1"),
    (
      dict(length=200),
      "200 tokens do not hold 4 needles with opening and question, which take 4",
    ),
  ],
)
def test_bad_arguments(changes, message):
  with pytest.raises(UserError, match=message):
    make(**changes)
