"""The needle suite, with models whose answers are known."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.axes
import numpy as np
import pytest
from etils import epath

from diffjax.config import Config, DataConfig, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import needle
from diffjax.evals.measurement import Measurement
from diffjax.evals.needle import Needle
from diffjax.evals.report import intervals
from diffjax.evals.suite import Model
from diffjax.inference.trained import Trained

BYTES = load_tokenizer("bytes")


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


def answer_nothing(prompt: str) -> str:
  """Returns an empty text."""
  return ""


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
    pairs=("1/1", "4/2"), lengths=(1000, 2000), samples=10, haystack="synthetic"
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
  """The interval of 0 right answers of 2 reaches to 1/2 and more."""
  suite = Needle(
    lengths=(1000,), samples=2, depths=(0.5,), haystack="synthetic"
  )

  measurements = evaluate(monkeypatch, suite, answer_nothing)

  for measurement in measurements:
    accuracy = intervals.interval(measurement)
    assert accuracy.value == 0
    assert accuracy.low == 0
    assert accuracy.high > 0.5


def test_two_prompts_do_not_make_a_difference_of_models_certain(monkeypatch):
  """Both models have 0 right answers of 2."""
  suite = Needle(
    lengths=(1000,), samples=2, depths=(0.5,), haystack="synthetic"
  )

  first = evaluate(monkeypatch, suite, answer_nothing)
  second = evaluate(monkeypatch, suite, answer_nothing)

  for result in intervals.compare(first, second):
    difference = result["difference"]
    assert difference["low"] < -0.5
    assert difference["high"] > 0.5


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
def test_default_prompts_have_4096_tokens_or_as_many_as_the_model_takes(
  monkeypatch, max_length, length
):
  trained = make_model(max_length)
  suite = Needle(samples=1, haystack="synthetic")

  measurements = evaluate(monkeypatch, suite, answer_all, trained)

  lengths = {measurement.at["length"] for measurement in measurements}
  assert lengths == {length}


def test_default_questions_are_those_of_the_paper(monkeypatch):
  """The paper asks for 1 of 1, 2 of 2, 2 of 4 and 2 of 6 needles."""
  suite = Needle(samples=1, haystack="synthetic")

  measurements = evaluate(monkeypatch, suite, answer_all)

  asked_and_needles = set()
  for measurement in measurements:
    at = measurement.at
    asked_and_needles.add((at["asked"], at["needles"]))
  assert asked_and_needles == {(1, 1), (2, 2), (2, 4), (2, 6)}


def test_random_parameters_give_no_right_answer(make_trained):
  """The model and the sampler are real. All other tests replace them.

  A right answer is one of 40,000 numbers.
  """
  trained = make_trained("softmax", num_layers=1, max_length=320)
  suite = Needle(
    pairs=("1/1",),
    depths=(0.5,),
    samples=3,
    haystack="synthetic",
    batch_tokens=640,
  )

  at_one_depth, mean_over_depths = suite.evaluate(trained)

  for measurement in (at_one_depth, mean_over_depths):
    assert measurement.at["length"] == 320
    assert intervals.interval(measurement).value == 0.0


@pytest.fixture
def heat_maps(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
  """The values of the heat maps that are drawn during a test."""
  drawn = []

  def record(axes: Any, values: np.ndarray, **options: Any) -> None:
    drawn.append(values)

  monkeypatch.setattr(matplotlib.axes.Axes, "imshow", record)
  return drawn


def test_the_plot_of_two_models_has_heat_maps_of_their_difference(
  monkeypatch, heat_maps
):
  """The first model answers all questions. The second names one number only.

  So the second accuracy is 1 if one needle is asked for, and 1/2 if two are.
  """
  suite = Needle(
    pairs=("1/1", "4/2"),
    lengths=(1000, 2000),
    depths=(0.0, 0.5, 1.0),
    samples=2,
    haystack="synthetic",
  )
  first = evaluate(monkeypatch, suite, answer_all)
  second = evaluate(monkeypatch, suite, answer_first)
  suite_results = {
    "models": [{"name": "one"}, {"name": "other"}],
    "figures": list(intervals.compare(first, second)),
  }

  suite.plot(suite_results)

  num_depths, num_lengths = 3, 2
  ones = np.ones((num_depths, num_lengths))
  expected = [
    # One needle: first model, second model, difference.
    1 * ones,
    1 * ones,
    0 * ones,
    # Two of four needles: first model, second model, difference.
    1 * ones,
    0.5 * ones,
    0.5 * ones,
  ]
  np.testing.assert_array_equal(heat_maps, expected)


def test_the_plot_of_one_model_has_a_heat_map_for_each_pair(
  monkeypatch, heat_maps, tmp_path
):
  """The fixture `heat_maps` records the values that are drawn."""
  monkeypatch.setattr(needle, "Sampler", FakeSampler(answer_all))
  pairs = ("1/1", "4/2")
  suite = Needle(pairs=pairs, lengths=(1000,), samples=2, haystack="synthetic")
  model = Model(make_model(), {"name": "one"})

  suite.run([model], [suite.load(model.trained)], epath.Path(tmp_path))

  assert len(heat_maps) == len(pairs)


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
    suite = Needle(**{"haystack": "synthetic", **settings})
    suite.load(trained)


def test_missing_validation_text_raises(tmp_path):
  """The needles are hidden in the model's validation text, or in generated one.

  The error names the missing file, and the setting that needs no file.
  """
  data = DataConfig(source=f"text:{tmp_path}/gone.txt")
  trained = Trained("model", Config(data=data), None, None, BYTES)
  suite = Needle(haystack="validation")

  message = "gone.txt.*haystack = 'synthetic' needs no data"
  with pytest.raises(UserError, match=message):
    suite.load(trained)
