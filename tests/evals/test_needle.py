"""The needle suite: models with a known answer get their known scores."""

import dataclasses
import random
import re

import jax.numpy as jnp
import matplotlib.axes
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import needle
from diffjax.evals.report import intervals, plots
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")


def trained(model=None, params=None, **changes):
  return Trained(
    "model",
    Config(model=ModelConfig(**dict(max_length=4096) | changes)),
    model,
    params,
    BYTES,
  )


class Sampler:
  """The sampler's interface over a function from a prompt's text to the model's text."""

  def __init__(self, write):
    self.write = write

  def __call__(self, model, params, *, batch_size, capacity):
    self.capacity = capacity
    return self

  def generate(self, prompts, max_new_tokens, *, stop_ids):
    assert all(
      len(prompt) + max_new_tokens == self.capacity for prompt in prompts
    ) and stop_ids == (255,)
    return [
      BYTES.encode(self.write(BYTES.decode(prompt)))[:max_new_tokens]
      for prompt in prompts
    ]


def copy(text):
  """Looks up every city of the question."""
  numbers = dict(
    re.findall(r"\nThe special magic (\w+) number is: (\d+)\n", text)
  )
  return " " + " and ".join(
    numbers[word]
    for word in re.findall(r"\w+", text.rsplit("?", 1)[1])
    if word in numbers
  )


def guess(text):
  draw = random.Random(text)
  return f" {draw.randrange(10_000, 50_000)} {draw.randrange(10_000, 50_000)}"


def only_the_first(text):
  return copy(text).split(" and ")[0]


SMALL = needle.Needle(
  pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=10, haystack="synthetic"
)


@pytest.mark.parametrize(
  "write, accuracy",
  [(copy, {1: 1.0, 2: 1.0}), (only_the_first, {1: 1.0, 2: 0.5})],
)
def test_known_answers(monkeypatch, write, accuracy):
  monkeypatch.setattr(needle, "Sampler", Sampler(write))
  found = list(SMALL.evaluate(trained()))
  assert len(found) == 2 * 2 * 6
  for figure in found:
    assert intervals.interval(figure).value == accuracy[figure.at["asked"]]
    assert len(figure.units) == (50 if figure.at["depth"] == "mean" else 10)


def test_two_prompts_are_no_certainty(monkeypatch):
  monkeypatch.setattr(needle, "Sampler", Sampler(guess))
  found = list(
    dataclasses.replace(SMALL, samples=2, depths=(0.5,)).evaluate(trained())
  )
  for row in intervals.compare(found, found):
    assert row["value"] == 0 and row["low"] == 0 and row["high"] > 0.5
    assert row["difference"]["low"] < -0.5 and row["difference"]["high"] > 0.5


def test_a_model_that_guesses_gets_about_none(monkeypatch):
  monkeypatch.setattr(needle, "Sampler", Sampler(guess))
  assert (
    np.mean(
      [intervals.interval(figure).value for figure in SMALL.evaluate(trained())]
    )
    < 0.01
  )


def test_default_is_the_table_at_4k(monkeypatch):
  monkeypatch.setattr(needle, "Sampler", Sampler(copy))
  settings = dataclasses.replace(
    needle.Needle(), samples=1, haystack="synthetic"
  )
  found = {
    (figure.at["needles"], figure.at["asked"], figure.at["length"])
    for figure in settings.evaluate(trained(max_length=65536))
  }
  assert found == {(1, 1, 4096), (2, 2, 4096), (4, 2, 4096), (6, 2, 4096)}
  assert {
    figure.at["length"]
    for figure in settings.evaluate(trained(max_length=2048))
  } == {2048}


def test_a_real_model_and_sampler():
  config = ModelConfig(
    num_layers=1,
    embed_dim=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=16,
    max_length=512,
  )
  model = Decoder(config)
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  settings = needle.Needle(
    pairs=("1/1",),
    depths=(0.5,),
    samples=3,
    haystack="synthetic",
    batch_tokens=1024,
  )
  found = list(
    settings.evaluate(
      dataclasses.replace(trained(max_length=512), model=model, params=params)
    )
  )
  assert [
    (figure.at["length"], intervals.interval(figure).value) for figure in found
  ] == [(512, 0.0), (512, 0.0)]


def test_plot(monkeypatch, tmp_path):
  cells = []
  monkeypatch.setattr(
    matplotlib.axes.Axes, "imshow", lambda self, array, **_: cells.append(array)
  )
  results = []
  for write in (copy, only_the_first):
    monkeypatch.setattr(needle, "Sampler", Sampler(write))
    results.append(list(SMALL.evaluate(trained())))
  models = [{"name": "one"}, {"name": "other"}]
  figure = SMALL.plot(
    {"models": models, "figures": list(intervals.compare(*results))}
  )
  plots.save(figure, tmp_path / "needle.png")
  assert (tmp_path / "needle.png").read_bytes()[:4] == b"\x89PNG"
  assert [array.shape for array in cells] == [(5, 2)] * 6
  assert [set(array.flat) for array in cells] == [
    {1.0},
    {1.0},
    {0.0},
    {1.0},
    {0.5},
    {0.5},
  ]
  SMALL.plot(
    {"models": models[:1], "figures": list(intervals.compare(results[0]))}
  )
  assert len(cells) == 8


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      dict(lengths=(8192,)),
      "set.needle.lengths = 8192: the model takes at most 4096 tokens",
    ),
    (
      dict(lengths=(0,)),
      "set.needle.lengths = 0: must be more than the 20 tokens",
    ),
    (dict(pairs=("2",)), "set.needle.pairs = '2': must be N/R"),
    (dict(pairs=("1/2",)), "2 of 1 needles cannot be asked for"),
    (
      dict(pairs=("4/4",)),
      "set.needle.new_tokens = 20: 4 numbers take 36 tokens of 'bytes'",
    ),
    (dict(samples=0), "set.needle.samples = 0"),
    (
      dict(haystack="hay"),
      "haystack = 'hay': must be 'validation' or 'synthetic'",
    ),
    (dict(depths=(2.0,)), "set.needle.depths = 2.0: must lie between 0"),
  ],
)
def test_bad_settings(monkeypatch, changes, message):
  monkeypatch.setattr(needle, "Sampler", Sampler(copy))
  with pytest.raises(UserError, match=message):
    list(dataclasses.replace(SMALL, **changes).evaluate(trained()))


def test_validation_text_that_is_not_at_hand(monkeypatch, tmp_path):
  monkeypatch.setattr(needle, "Sampler", Sampler(copy))
  gone = dataclasses.replace(
    trained(),
    config=Config(data=DataConfig(source=f"text:{tmp_path}/gone.txt")),
  )
  with pytest.raises(
    UserError, match="gone.txt.*haystack = 'synthetic' needs no data"
  ):
    list(dataclasses.replace(SMALL, haystack="validation").evaluate(gone))
