"""The needle suite: where the needles stand, and what models with a known answer score."""

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import matplotlib.axes
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.data.tokenizer_training import train_tokenizer
from diffjax.evals import needle
from diffjax.evals.report import figures
from diffjax.model.decoder import Decoder
from diffjax.training.trained import Trained

BYTES = load_tokenizer("bytes")
HAYSTACK = needle.synthetic_haystack(BYTES, tokens=20_000)


def make(**changes):
  arguments = dict(length=3000, num_needles=4, num_asked=2, depth=0.5, samples=5, seed=0, haystack=HAYSTACK)
  return needle.make_prompts(BYTES, **arguments | changes)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("num_needles, num_asked", [(1, 1), (6, 2)])
def test_needles_stand_where_they_should(depth, num_needles, num_asked):
  for prompt in make(depth=depth, num_needles=num_needles, num_asked=num_asked, samples=20):
    text = BYTES.decode(prompt.ids)
    assert len(prompt.ids) == 3000 and prompt.ids[0] == BYTES.separator and prompt.query_span[1] == 3000
    found = re.findall(r"\nThe special magic (\w+) number is: (\d{5})\n", text)
    assert len(found) == num_needles and len({city for city, _ in found}) == len({number for _, number in found}) == num_needles
    question = BYTES.decode(prompt.ids[slice(*prompt.query_span)])
    assert question.startswith("\nWhat ") and question.endswith(":")
    cities = [dict((number, city) for city, number in found)[answer] for answer in prompt.answers]
    assert [city for city in re.findall(r"\w+", question.split("?")[1]) if city in needle.CITIES] == cities
    for (start, stop), answer, city in zip(prompt.answer_spans, prompt.answers, cities, strict=True):
      assert BYTES.decode(prompt.ids[start:stop]) == f"\nThe special magic {city} number is: {answer}\n"
    # The haystack before the answer, without opening and other needles
    start = prompt.answer_spans[0][0]
    needles = [match.span() for match in re.finditer(r"\nThe special magic \w+ number is: \d{5}\n", text)]
    length = lambda spans: sum(stop - start for start, stop in spans)
    begin = len(needle.OPENING)  # decoding drops the separator, so text begins one byte earlier than ids
    before = start - 1 - begin - length(span for span in needles if span[0] < start - 1)
    room = prompt.query_span[0] - 1 - begin - length(needles)
    assert abs(before - depth * room) <= needle._PIECE / 2
    assert (before == 0) == (depth == 0) and (before == room) == (depth == 1)


def test_other_needles_stand_at_random_and_samples_differ():
  prompts = make(depth=0.0, num_needles=2, num_asked=2, samples=200)
  second = [prompt.answer_spans[1][0] / 3000 for prompt in prompts]
  assert min(second) < 0.2 and max(second) > 0.8 and 0.4 < sum(second) / 200 < 0.65
  assert len({tuple(prompt.ids) for prompt in prompts}) == 200
  assert len({tuple(prompt.ids[len(needle.OPENING) + 60 : len(needle.OPENING) + 90]) for prompt in prompts}) > 50


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_where_needles_meet_the_answer_is_the_first_or_the_last(depth):
  for prompt in make(length=600, num_needles=6, depth=depth, samples=20):
    starts = [match.start() + 1 for match in re.finditer(r"\nThe special magic \w+ number is: \d{5}\n", BYTES.decode(prompt.ids))]
    assert prompt.answer_spans[0][0] == (min(starts) if depth == 0 else max(starts))


def test_no_city_is_part_of_another():
  assert not [(city, other) for city in needle.CITIES for other in needle.CITIES if city != other and city in other]


def test_same_seed_same_prompts():
  assert make() == make() and make() != make(seed=1)
  assert needle.synthetic_haystack(BYTES, tokens=5000) == needle.synthetic_haystack(BYTES, tokens=5000)
  assert not {first.answers[0] for first in make()} & {other.answers[0] for other in make(depth=0.25)}


def test_length_is_exact_with_a_tokenizer_of_many_bytes_a_token(tmp_path):
  text = needle.OPENING + "".join(f"The special magic {city} number is: {12345 + 7 * index}\n" for index, city in enumerate(needle.CITIES))
  tokenizer = load_tokenizer(str(train_tokenizer([text] * 3, 400, tmp_path)))
  haystack = needle.synthetic_haystack(tokenizer, tokens=3000)
  for length in range(400, 430):
    for prompt in needle.make_prompts(
      tokenizer, length=length, num_needles=2, num_asked=1, depth=0.5, samples=2, seed=0, haystack=haystack
    ):
      assert len(prompt.ids) == length
      assert prompt.answers[0] in tokenizer.decode(prompt.ids[slice(*prompt.answer_spans[0])])


def test_validation_haystack_is_the_held_out_text(tmp_path):
  for name in ("train", "held"):
    (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {number}\n" for number in range(100)))
  config = DataConfig(source=f"text:{tmp_path}/train.txt", validation_source=f"text:{tmp_path}/held.txt")
  text = BYTES.decode(sum(needle.validation_haystack(BYTES, config, tokens=10**6), []))
  assert [line for line in text.splitlines() if line] == [f"held line {number}" for number in range(100)]
  with pytest.raises(UserError, match="none.txt"):
    needle.validation_haystack(BYTES, dataclasses.replace(config, validation_source=f"text:{tmp_path}/none.txt"), tokens=10)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(num_asked=5), "5 of 4 needles cannot be asked for"),
    (dict(num_needles=0, num_asked=0), "0 of 0 needles"),
    (dict(num_needles=1000), "of at most"),
    (dict(depth=1.5), "between 0 .beginning. and 1"),
    (dict(length=200), "200 tokens do not hold 4 needles with opening and question, which take 4"),
  ],
)
def test_bad_arguments(changes, message):
  with pytest.raises(UserError, match=message):
    make(**changes)


def trained(model=None, params=None, **changes):
  return Trained("model", Config(model=ModelConfig(**dict(max_length=4096) | changes)), model, params, BYTES)


class Sampler:
  """The sampler's interface over a function from a prompt's text to what is written."""

  def __init__(self, write):
    self.write = write

  def __call__(self, model, params, *, batch_size, capacity):
    self.capacity = capacity
    return self

  def generate(self, prompts, max_new_tokens, *, stop_ids):
    assert all(len(prompt) + max_new_tokens == self.capacity for prompt in prompts) and stop_ids == (255,)
    return [BYTES.encode(self.write(BYTES.decode(prompt)))[:max_new_tokens] for prompt in prompts]


def copy(text):
  """Looks every city of the question up."""
  numbers = dict(re.findall(r"\nThe special magic (\w+) number is: (\d+)\n", text))
  return " " + " and ".join(numbers[word] for word in re.findall(r"\w+", text.rsplit("?", 1)[1]) if word in numbers)


def guess(text):
  draw = random.Random(text)
  return f" {draw.randrange(10_000, 50_000)} {draw.randrange(10_000, 50_000)}"


def only_the_first(text):
  return copy(text).split(" and ")[0]


SMALL = needle.Settings(pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=10, haystack="synthetic")


@pytest.mark.parametrize("write, accuracy", [(copy, {1: 1.0, 2: 1.0}), (only_the_first, {1: 1.0, 2: 0.5})])
def test_known_answers(monkeypatch, write, accuracy):
  monkeypatch.setattr(needle, "Sampler", Sampler(write))
  found = list(needle.evaluate(trained(), SMALL))
  assert len(found) == 2 * 2 * 6
  for figure in found:
    assert figures.interval(figure).value == accuracy[figure.at["asked"]]
    assert len(figure.units) == (50 if figure.at["depth"] == "mean" else 10)


def test_a_model_that_guesses_gets_about_none(monkeypatch):
  monkeypatch.setattr(needle, "Sampler", Sampler(guess))
  assert np.mean([figures.interval(figure).value for figure in needle.evaluate(trained(), SMALL)]) < 0.01


def test_default_is_the_table_at_4k(monkeypatch):
  monkeypatch.setattr(needle, "Sampler", Sampler(copy))
  settings = dataclasses.replace(needle.Settings(), samples=1, haystack="synthetic")
  found = {
    (figure.at["needles"], figure.at["asked"], figure.at["length"]) for figure in needle.evaluate(trained(max_length=65536), settings)
  }
  assert found == {(1, 1, 4096), (2, 2, 4096), (4, 2, 4096), (6, 2, 4096)}
  assert {figure.at["length"] for figure in needle.evaluate(trained(max_length=2048), settings)} == {2048}


def test_a_real_model_and_sampler():
  config = ModelConfig(num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, head_dim=8, ffn_dim=16, max_length=512)
  model = Decoder(config)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  settings = needle.Settings(pairs=("1/1",), depths=(0.5,), samples=3, haystack="synthetic", batch_tokens=1024)
  found = list(needle.evaluate(dataclasses.replace(trained(max_length=512), model=model, params=params), settings))
  assert [(figure.at["length"], figures.interval(figure).value) for figure in found] == [(512, 0.0), (512, 0.0)]


def test_plot(monkeypatch, tmp_path):
  cells = []
  monkeypatch.setattr(matplotlib.axes.Axes, "imshow", lambda self, array, **_: cells.append(array))
  results = []
  for write in (copy, only_the_first):
    monkeypatch.setattr(needle, "Sampler", Sampler(write))
    results.append(list(needle.evaluate(trained(), SMALL)))
  models = [{"name": "one"}, {"name": "other"}]
  needle.plot({"models": models, "figures": list(figures.compare(*results))}, tmp_path / "needle.png")
  assert (tmp_path / "needle.png").read_bytes()[:4] == b"\x89PNG"
  assert [array.shape for array in cells] == [(5, 2)] * 6
  assert [set(array.flat) for array in cells] == [{1.0}, {1.0}, {0.0}, {1.0}, {0.5}, {0.5}]
  needle.plot({"models": models[:1], "figures": list(figures.compare(results[0]))}, tmp_path / "needle.png")
  assert len(cells) == 8


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(lengths=(8192,)), "set.needle.lengths = 8192: the model takes at most 4096 tokens"),
    (dict(lengths=(0,)), "set.needle.lengths = 0: must be more than the 20 tokens"),
    (dict(pairs=("2",)), "set.needle.pairs = '2': must be N/R"),
    (dict(pairs=("1/2",)), "2 of 1 needles cannot be asked for"),
    (dict(pairs=("4/4",)), "set.needle.new_tokens = 20: 4 numbers take 36 tokens of 'bytes'"),
    (dict(samples=0), "set.needle.samples = 0"),
    (dict(haystack="hay"), "haystack = 'hay': must be 'validation' or 'synthetic'"),
    (dict(depths=(2.0,)), "depth lies between 0"),
  ],
)
def test_bad_settings(monkeypatch, changes, message):
  monkeypatch.setattr(needle, "Sampler", Sampler(copy))
  with pytest.raises(UserError, match=message):
    list(needle.evaluate(trained(), dataclasses.replace(SMALL, **changes)))


def test_validation_text_that_is_not_at_hand(monkeypatch, tmp_path):
  monkeypatch.setattr(needle, "Sampler", Sampler(copy))
  gone = dataclasses.replace(trained(), config=Config(data=DataConfig(source=f"text:{tmp_path}/gone.txt")))
  with pytest.raises(UserError, match="gone.txt.*haystack = 'synthetic' needs no data"):
    list(needle.evaluate(gone, dataclasses.replace(SMALL, haystack="validation")))
