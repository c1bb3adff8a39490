"""The needle suite, with models whose answers are known."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import matplotlib.axes
import numpy as np
import pytest

from diffjax.config import Config, DataConfig, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import needle
from diffjax.evals.measurement import Measurement
from diffjax.evals.needle import Needle
from diffjax.evals.report import intervals, plots
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")
SMALL = Needle(
  pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=10, haystack="synthetic"
)


def make_model(max_length: int = 4096) -> Trained:
  """Returns a model without parameters, for a FakeSampler."""
  config = Config(model=ModelConfig(max_length=max_length))
  return Trained("model", config, None, None, BYTES)


class FakeSampler:
  """A sampler over a function from the text of a prompt to an answer."""

  def __init__(self, answer: Callable[[str], str]):
    self.answer = answer

  def __call__(
    self, model: Any, params: Any, *, batch_size: int, capacity: int
  ) -> FakeSampler:
    self.capacity = capacity
    return self

  def generate(
    self,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    stop_ids: Sequence[int],
  ) -> list[list[int]]:
    assert stop_ids == (BYTES.separator,)
    answers = []
    for prompt in prompts:
      assert len(prompt) + max_new_tokens == self.capacity
      answer = BYTES.encode(self.answer(BYTES.decode(prompt)))
      answers.append(answer[:max_new_tokens])
    return answers


def answer_all(prompt: str) -> str:
  """Returns the numbers of all cities in the question."""
  needles = re.findall(r"\nThe special magic (\w+) number is: (\d+)\n", prompt)
  numbers = dict(needles)
  words = re.findall(r"\w+", prompt.rsplit("?", 1)[1])
  answers = [numbers[word] for word in words if word in numbers]
  return " " + " and ".join(answers)


def answer_first(prompt: str) -> str:
  """Returns the number of the first city in the question."""
  return answer_all(prompt).split(" and ")[0]


def guess(prompt: str) -> str:
  """Returns two random numbers."""
  rng = random.Random(prompt)
  return f" {rng.randrange(10_000, 50_000)} {rng.randrange(10_000, 50_000)}"


def evaluate(
  monkeypatch: pytest.MonkeyPatch,
  suite: Needle,
  answer: Callable[[str], str],
  trained: Trained | None = None,
) -> list[Measurement]:
  """Returns the measurements of a model that answers by a function."""
  monkeypatch.setattr(needle, "Sampler", FakeSampler(answer))
  return list(suite.evaluate(trained or make_model()))


def test_a_model_that_answers_all_has_accuracy_1(monkeypatch):
  """The function `answer_all` takes the place of a model."""
  suite = Needle(
    pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=10, haystack="synthetic"
  )

  measurements = evaluate(monkeypatch, suite, answer_all)

  for measurement in measurements:
    assert intervals.interval(measurement).value == 1.0


def test_a_model_that_answers_one_of_two_has_accuracy_one_half(monkeypatch):
  """Of four needles, two are asked for ("4/2")."""
  suite = Needle(
    pairs=("4/2",), lengths=(1000, 2000), samples=10, haystack="synthetic"
  )

  measurements = evaluate(monkeypatch, suite, answer_first)

  for measurement in measurements:
    assert intervals.interval(measurement).value == 0.5


def test_each_pair_length_and_depth_has_a_measurement(monkeypatch):
  """The pair "4/2" asks for two of four needles.

  The default is five depths. The mean over them is measured too.
  """
  suite = Needle(
    pairs=("1/1", "4/2"),
    lengths=(1000, 2000),
    samples=10,
    haystack="synthetic",
  )

  measurements = evaluate(monkeypatch, suite, answer_all)

  num_pairs = 2
  num_lengths = 2
  num_depths = 5
  assert len(measurements) == num_pairs * num_lengths * (num_depths + 1)
  for measurement in measurements:
    num_prompts = len(measurement.units)
    if measurement.at["depth"] == "mean":
      assert num_prompts == 10 * num_depths
    else:
      assert num_prompts == 10


def test_two_prompts_do_not_make_an_accuracy_certain(monkeypatch):
  """Two wrong answers of two leave a wide interval.

  A second model with the same answers takes part in the comparison.
  """
  suite = Needle(
    lengths=(1000,), samples=2, depths=(0.5,), haystack="synthetic"
  )

  measurements = evaluate(monkeypatch, suite, guess)

  for result in intervals.compare(measurements, measurements):
    assert result["value"] == 0
    assert result["low"] == 0
    assert result["high"] > 0.5
    assert result["difference"]["low"] < -0.5
    assert result["difference"]["high"] > 0.5


def test_a_model_that_guesses_has_almost_no_accuracy(monkeypatch):
  """The function `guess` answers with two of 40,000 numbers."""
  suite = Needle(
    pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=10, haystack="synthetic"
  )

  measurements = evaluate(monkeypatch, suite, guess)

  values = []
  for measurement in measurements:
    values.append(intervals.interval(measurement).value)
  assert np.mean(values) < 0.01


@pytest.mark.parametrize("max_length, length", [(65536, 4096), (2048, 2048)])
def test_the_default_is_the_papers_table_at_4096_tokens_or_fewer(
  monkeypatch, max_length, length
):
  """The paper asks for 1 of 1, 2 of 2, 2 of 4 and 2 of 6 needles.

  A model that takes fewer than 4,096 tokens is measured at its own maximum.
  """
  trained = make_model(max_length)
  suite = Needle(samples=1, haystack="synthetic")

  measurements = evaluate(monkeypatch, suite, answer_all, trained)

  # The number of needles, and how many of them a question asks for.
  rows = set()
  for measurement in measurements:
    at = measurement.at
    assert at["length"] == length
    rows.add((at["needles"], at["asked"]))
  assert rows == {(1, 1), (2, 2), (4, 2), (6, 2)}


def test_a_real_model_and_sampler():
  """A model with random parameters is asked, and answers nothing right."""
  config = ModelConfig(
    num_layers=1,
    embed_dim=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=16,
    max_length=320,
  )
  model = Decoder(config)
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  trained = Trained("model", Config(model=config), model, params, BYTES)
  suite = Needle(
    pairs=("1/1",),
    depths=(0.5,),
    samples=3,
    haystack="synthetic",
    batch_tokens=640,
  )

  measurements = list(suite.evaluate(trained))

  # One depth, and the mean over depths.
  assert len(measurements) == 2
  for measurement in measurements:
    assert measurement.at["length"] == 320
    assert intervals.interval(measurement).value == 0.0


# Two pairs of needles and asked ones, two lengths, and the five default depths.
PLOTTED = Needle(
  pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=2, haystack="synthetic"
)


@pytest.fixture
def heat_maps(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
  """The values of the heat maps that are drawn during a test."""
  drawn = []

  def record(axes: Any, values: np.ndarray, **options: Any) -> None:
    drawn.append(values)

  monkeypatch.setattr(matplotlib.axes.Axes, "imshow", record)
  return drawn


def test_the_plot_of_two_models_has_heat_maps_of_their_difference(
  monkeypatch, heat_maps, tmp_path
):
  """The first model answers all questions, the second only the first of two.

  The fixture `heat_maps` records the values that are drawn.
  """
  first = evaluate(monkeypatch, PLOTTED, answer_all)
  second = evaluate(monkeypatch, PLOTTED, answer_first)
  suite_results = {
    "models": [{"name": "one"}, {"name": "other"}],
    "figures": list(intervals.compare(first, second)),
  }

  plots.save(PLOTTED.plot(suite_results), tmp_path / "needle.png")

  assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")
  for values in heat_maps:
    num_depths = 5
    num_lengths = 2
    assert values.shape == (num_depths, num_lengths)
  distinct_values = [set(values.flat) for values in heat_maps]
  assert distinct_values == [
    # One needle: first model, second model, difference.
    {1.0},
    {1.0},
    {0.0},
    # Two of four needles: first model, second model, difference.
    {1.0},
    {0.5},
    {0.5},
  ]


def test_the_plot_of_one_model_has_a_heat_map_for_each_pair(
  monkeypatch, heat_maps
):
  """The fixture `heat_maps` records the values that are drawn."""
  measurements = evaluate(monkeypatch, PLOTTED, answer_all)
  suite_results = {
    "models": [{"name": "one"}],
    "figures": list(intervals.compare(measurements)),
  }

  PLOTTED.plot(suite_results)

  # One asks for 1 of 1 needles, and the other for 2 of 4.
  num_pairs = 2
  assert len(heat_maps) == num_pairs


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"lengths": (8192,)},
      "set.needle.lengths = 8192: the model takes at most 4096 tokens",
      id="long length",
    ),
    pytest.param(
      {"lengths": (0,)},
      "set.needle.lengths = 0: must be more than the 20 tokens",
      id="short length",
    ),
    pytest.param(
      {"pairs": ("2",)}, "set.needle.pairs = '2': must be N/R", id="no pair"
    ),
    pytest.param(
      {"pairs": ("1/2",)},
      "2 of 1 needles cannot be asked for",
      id="more asked than needles",
    ),
    pytest.param(
      {"pairs": ("4/4",)},
      "set.needle.new_tokens = 20: 4 numbers take 36 tokens of 'bytes'",
      id="long answer",
    ),
    pytest.param({"samples": 0}, "set.needle.samples = 0", id="samples"),
    pytest.param(
      {"haystack": "hay"},
      "haystack = 'hay': must be 'validation' or 'synthetic'",
      id="haystack",
    ),
    pytest.param(
      {"depths": (2.0,)},
      "set.needle.depths = 2.0: must lie between 0",
      id="depth",
    ),
  ],
)
def test_an_invalid_setting_raises(settings, message):
  """The model takes at most 4,096 tokens."""
  trained = make_model(max_length=4096)

  with pytest.raises(UserError, match=message):
    # Some settings are checked here, and others when the data is loaded.
    suite = dataclasses.replace(SMALL, **settings)
    list(suite.evaluate(trained))


def test_missing_validation_text_raises(tmp_path):
  data = DataConfig(source=f"text:{tmp_path}/gone.txt")
  trained = dataclasses.replace(make_model(), config=Config(data=data))
  suite = dataclasses.replace(SMALL, haystack="validation")

  message = "gone.txt.*haystack = 'synthetic' needs no data"
  with pytest.raises(UserError, match=message):
    list(suite.evaluate(trained))
