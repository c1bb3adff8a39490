"""The many-shot suite, with models whose answers are known."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from etils import epath

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import many_shot
from diffjax.evals.many_shot import ManyShot
from diffjax.evals.measurement import Measurement
from diffjax.evals.report import intervals
from diffjax.evals.suite import Model
from diffjax.inference.trained import Trained

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "model", Config(model=ModelConfig(max_length=4096)), None, None, BYTES
)

# All synthetic demonstrations have as many letters as this one.
SYNTHETIC_DEMONSTRATION = (
  "utterance: midana kokati bugolu fezusi\nintent: tarive\n\n"
)

TRAIN = [
  {"text": "what is word0?", "label": "class 0"},
  {"text": "what is word1?", "label": "class 1"},
  {"text": "what is word2?", "label": "class 2"},
]


class RowStates(NamedTuple):
  """The state of a FakeSampler.

  Attributes:
    prompts: The text that each row has read.
    answers: The text that each row has written.
    logits: The logits of the next token, [B, N].
  """

  prompts: list[str]
  answers: list[str]
  logits: np.ndarray


class FakeSampler:
  """A sampler over a function from the text of a prompt to a label.

  The token that continues the label has the largest logit. The logits of all
  other tokens are random.
  """

  def __init__(self, answer: Callable[[str], str]):
    self.answer = answer
    self.prompts: list[str] = []

  def __call__(
    self, model: Any, params: Any, *, batch_size: int, capacity: int
  ) -> FakeSampler:
    self.batch_size = batch_size
    self.capacity = capacity
    return self

  def prefill(self, prompts: Sequence[list[int]]) -> RowStates:
    for prompt in prompts:
      assert prompt[0] == BYTES.separator
    empty = [""] * self.batch_size
    return self.read(self.state(empty, empty), prompts)

  def read(self, state: RowStates, more: Sequence[list[int]]) -> RowStates:
    texts = [""] * self.batch_size
    for row, ids in enumerate(more):
      texts[row] = state.prompts[row] + BYTES.decode(ids)
    return self.state(texts, [""] * self.batch_size)

  def step(self, state: RowStates, tokens: Sequence[int]) -> RowStates:
    answers = []
    for answer, token in zip(state.answers, tokens, strict=True):
      answers.append(answer + chr(token))
    return self.state(state.prompts, answers)

  def state(self, prompts: list[str], answers: list[str]) -> RowStates:
    logits = np.random.default_rng(0).normal(size=(self.batch_size, 256))
    rows = zip(prompts, answers, strict=True)
    for row, (prompt, answer) in enumerate(rows):
      assert len(prompt) + len(answer) < self.capacity
      if not prompt.endswith(("intent:", "Type:")):
        continue
      self.prompts.append(prompt)
      whole_answer = f" {self.answer(prompt)}\n\n"
      if whole_answer.startswith(answer) and answer != whole_answer:
        next_character = whole_answer[len(answer)]
        logits[row, ord(next_character)] = 10
    return RowStates(prompts, answers, logits)


class ParsedPrompt(NamedTuple):
  """The query of a prompt, and the (text, label) of its demonstrations."""

  query: str
  demonstrations: list[tuple[str, str]]


def parse(prompt: str) -> ParsedPrompt:
  """Returns the parts of a prompt."""
  *blocks, query_block = prompt.split("\n\n")
  demonstrations = []
  for block in blocks:
    text_line, label_line = block.split("\n")
    text = text_line.split(": ", 1)[1]
    label = label_line.split(": ", 1)[1]
    demonstrations.append((text, label))
  query_line = query_block.split("\n")[0]
  return ParsedPrompt(query_line.split(": ", 1)[1], demonstrations)


def look_up(prompt: str) -> str:
  """Returns a label that the demonstrations give to a word of the query.

  The word is the one with the fewest labels. So this is an oracle that learns
  only from demonstrations.
  """
  query, demonstrations = parse(prompt)
  labels_of_words = collections.defaultdict(set)
  for text, label in demonstrations:
    for word in text.split():
      labels_of_words[word].add(label)
  candidates = []
  for word in query.split():
    if word in labels_of_words:
      candidates.append(labels_of_words[word])
  if not candidates:
    return "?"
  return min(min(candidates, key=len))


def repeat_first_label(prompt: str) -> str:
  """Returns the label of the first demonstration."""
  _, first_label = parse(prompt).demonstrations[0]
  return first_label


def evaluate(
  monkeypatch: pytest.MonkeyPatch, sampler: FakeSampler, **settings: Any
) -> list[Measurement]:
  """Returns the measurements of the model that a sampler imitates."""
  monkeypatch.setattr(many_shot, "Sampler", sampler)
  suite = ManyShot(**{"samples": 20, "sets": 2, "orders": 3, **settings})
  return list(suite.evaluate(TRAINED))


def value(measurement: Measurement) -> float:
  """Returns the number of a measurement, without its interval."""
  return intervals.interval(measurement).value


def write_records(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
  """Writes a JSONL file and the directory that contains it."""
  path.parent.mkdir(exist_ok=True)
  with path.open("w") as file:
    for record in records:
      file.write(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def oracle_sampler() -> FakeSampler:
  """A model that learns from demonstrations only."""
  return FakeSampler(look_up)


@pytest.fixture(scope="module")
def oracle_measurements(oracle_sampler: FakeSampler) -> list[Measurement]:
  """The measurements of the oracle, with one word for each class."""
  with pytest.MonkeyPatch.context() as patch:
    return evaluate(patch, oracle_sampler, synthetic_words=1)


@pytest.fixture(scope="module")
def oracle_accuracies(
  oracle_measurements: list[Measurement],
) -> list[Measurement]:
  """The accuracies of the oracle, by number of demonstrations."""
  return [item for item in oracle_measurements if item.name == "accuracy"]


def test_the_number_of_demonstrations_doubles_up_to_the_limit(monkeypatch):
  """The last number is the number of demonstrations that fit in a prompt."""
  tokens_of_one = len(SYNTHETIC_DEMONSTRATION)
  # A prompt of 1,000 tokens has a separator, demonstrations, and the query with
  # its label, which takes as many tokens as a demonstration.
  num_fitting = (1000 - 1) // tokens_of_one - 1

  measurements = evaluate(
    monkeypatch, FakeSampler(look_up), orders=0, max_tokens=1000
  )

  counts = [item.at["demonstrations"] for item in measurements]
  assert counts == [1, 2, 4, 8, 16, num_fitting]


def test_an_oracle_answers_every_query_after_enough_demonstrations(
  oracle_accuracies,
):
  """The oracle looks up the label of a word of the query in demonstrations."""
  after_one_demonstration = value(oracle_accuracies[0])
  after_most_demonstrations = value(oracle_accuracies[-1])

  # One demonstration shows one label of six.
  assert after_one_demonstration < 0.5
  assert after_most_demonstrations == 1.0


def test_a_query_is_one_unit_for_all_sets_of_demonstrations(
  oracle_measurements, oracle_accuracies
):
  """20 queries are asked after each of two sets of demonstrations."""
  for measurement in oracle_measurements:
    assert len(measurement.units) == 20
  # The lower bound for 20 right answers of 20. It would be higher for 40 of 40.
  assert 0.8 < intervals.interval(oracle_accuracies[-1]).low < 0.9


def test_the_longest_prompts_fill_the_models_length(oracle_accuracies):
  """The model takes 4,096 tokens, here bytes."""
  tokens_of_one = len(SYNTHETIC_DEMONSTRATION)
  # A prompt has a separator, demonstrations, and the query with its label. That
  # takes as many tokens as a demonstration.
  num_fitting = (4096 - 1) // tokens_of_one - 1

  num_tokens = [accuracy.at["tokens"] for accuracy in oracle_accuracies]

  assert num_tokens == sorted(num_tokens)
  assert num_tokens[-1] == num_fitting * tokens_of_one


@pytest.mark.usefixtures("oracle_measurements")
def test_a_batch_has_32768_tokens(oracle_sampler):
  """A prompt of the model has at most 4,096 tokens."""
  assert oracle_sampler.batch_size == 32_768 // 4096


def test_the_order_of_demonstrations_does_not_change_an_oracle(
  oracle_measurements,
):
  """The oracle looks up labels, so its best and worst accuracy are equal."""
  range_by_order = {}
  for measurement in oracle_measurements:
    if measurement.name == "best minus worst":
      range_by_order[measurement.at["order"]] = value(measurement)

  assert range_by_order == {"random": 0.0, "alternating": 0.0}


def test_a_model_that_repeats_the_first_label_depends_on_the_order(monkeypatch):
  """The best of six orders of the demonstrations is better than the worst."""
  sampler = FakeSampler(repeat_first_label)

  measurements = evaluate(monkeypatch, sampler, samples=60, orders=6)

  by_order = {item.at.get("order"): item for item in measurements}
  for order in ("random", "alternating"):
    best_minus_worst = by_order[order]
    # Whether a query is answered right, [60 queries, 6 orders].
    is_right = best_minus_worst.units
    accuracies = is_right.mean(axis=0)
    expected = accuracies.max() - accuracies.min()
    assert value(best_minus_worst) == pytest.approx(expected)
    assert value(best_minus_worst) > 0


def test_a_model_that_repeats_the_first_label_has_a_low_accuracy(monkeypatch):
  """It is right by chance, for one query of six."""
  sampler = FakeSampler(repeat_first_label)

  accuracies = evaluate(monkeypatch, sampler, samples=60, orders=0)

  for accuracy in accuracies:
    assert value(accuracy) < 0.4


@pytest.fixture(scope="module")
def prompts_of_one_set() -> list[ParsedPrompt]:
  """The prompts for one set of demonstrations, which fill up 1,000 tokens."""
  sampler = FakeSampler(look_up)
  with pytest.MonkeyPatch.context() as patch:
    evaluate(patch, sampler, sets=1, orders=0, max_tokens=1000)
  return [parse(prompt) for prompt in sampler.prompts]


@pytest.fixture(scope="module")
def demonstration_lists(
  prompts_of_one_set: list[ParsedPrompt],
) -> list[list[tuple[str, str]]]:
  """The lists of demonstrations (text, label), the shortest one first."""
  lists = []
  for prompt in prompts_of_one_set:
    if prompt.demonstrations not in lists:
      lists.append(prompt.demonstrations)
  return sorted(lists, key=len)


def test_each_query_is_asked_after_the_same_demonstrations(
  prompts_of_one_set, demonstration_lists
):
  """20 queries follow each list of demonstrations."""
  for demonstrations in demonstration_lists:
    queries = set()
    for prompt in prompts_of_one_set:
      if prompt.demonstrations == demonstrations:
        queries.add(prompt.query)
    assert len(queries) == 20


def test_a_longer_list_of_demonstrations_begins_with_the_shorter_one(
  demonstration_lists,
):
  """The lists have 1, 2, 4, … demonstrations."""
  for shorter, longer in itertools.pairwise(demonstration_lists):
    assert len(shorter) < len(longer)
    assert longer[: len(shorter)] == shorter


def test_demonstrations_are_balanced(demonstration_lists):
  """Each of the six classes has nearly the same number of demonstrations."""
  longest_list = demonstration_lists[-1]

  counts = collections.Counter(label for _, label in longest_list)

  assert len(counts) == 6
  assert max(counts.values()) - min(counts.values()) <= 1


def test_no_prompt_shows_a_query(monkeypatch, tmp_path):
  """Demonstrations are texts of the training file that are not queries."""
  shared = {"text": "what is query0?", "label": "class 0"}
  train = [
    shared,
    {"text": "what is word0?", "label": "class 0"},
    {"text": "what is word1?", "label": "class 1"},
  ]
  queries = [shared, {"text": "what is query1?", "label": "class 1"}]
  write_records(tmp_path / "mine" / "train.jsonl", train)
  write_records(tmp_path / "mine" / "test.jsonl", queries)
  sampler = FakeSampler(look_up)

  evaluate(monkeypatch, sampler, datasets=("mine",), data_dir=str(tmp_path))

  shown_texts = set()
  for prompt in sampler.prompts:
    for text, _ in parse(prompt).demonstrations:
      shown_texts.add(text)
  assert shown_texts == {"what is word0?", "what is word1?"}


def test_no_synthetic_demonstration_is_a_query():
  """Random texts repeat only rarely, so all texts of a dataset are compared."""
  dataset = ManyShot().load(TRAINED)["synthetic"]

  train_texts = {example.text for example in dataset.train}
  test_texts = {example.text for example in dataset.test}
  assert train_texts.isdisjoint(test_texts)


def test_a_label_needs_a_demonstration_that_is_no_query(monkeypatch, tmp_path):
  """Queries are never shown, so "class 2" would have no demonstration."""
  query = {"text": "what is word2?", "label": "class 2"}
  train = [
    {"text": "what is word0?", "label": "class 0"},
    {"text": "what is word1?", "label": "class 1"},
    query,
  ]
  write_records(tmp_path / "mine" / "train.jsonl", train)
  write_records(tmp_path / "mine" / "test.jsonl", [query])
  suite = ManyShot(datasets=("mine",), data_dir=str(tmp_path))

  message = (
    "test.jsonl:1: every demonstration of the label 'class 2' is also a query;"
    " add other texts to .*train.jsonl"
  )
  with pytest.raises(UserError, match=message):
    suite.load(TRAINED)


@pytest.mark.parametrize(
  "name, demonstration_pattern",
  [
    ("trec_fine", r"Question: what is word\d\?\nType: class \d\n\n"),
    ("banking77", r"utterance: what is word\d\?\nintent: class \d\n\n"),
  ],
)
def test_the_name_of_a_dataset_determines_the_words_of_its_prompts(
  monkeypatch, tmp_path, name, demonstration_pattern
):
  """Texts of TREC are questions, and texts of other datasets are utterances."""
  write_records(tmp_path / name / "train.jsonl", TRAIN)
  query = {"text": "what is word0? please", "label": "class 0"}
  write_records(tmp_path / name / "test.jsonl", [query])
  sampler = FakeSampler(look_up)

  evaluate(monkeypatch, sampler, datasets=(name,), data_dir=str(tmp_path))

  assert sampler.prompts
  for prompt in sampler.prompts:
    assert re.match(demonstration_pattern, prompt)


def test_a_dataset_is_read_from_files(monkeypatch, tmp_path):
  """The oracle looks up the label of "word0?", for example."""
  train = [
    {"text": "what is word0?", "label": "class 0"},
    {"text": "what is word1?", "label": "class 1"},
    {"text": "what is word2?", "label": "class 2"},
  ]
  queries = [
    {"text": "explain word0?", "label": "class 0"},
    {"text": "explain word1?", "label": "class 1"},
    {"text": "explain word2?", "label": "class 2"},
  ]
  write_records(tmp_path / "mine" / "train.jsonl", train)
  write_records(tmp_path / "mine" / "test.jsonl", queries)
  oracle = FakeSampler(look_up)

  measurements = evaluate(
    monkeypatch, oracle, datasets=("mine",), data_dir=str(tmp_path), orders=0
  )

  tokens_of_one = len("utterance: what is word0?\nintent: class 0\n\n")
  assert [measurement.at for measurement in measurements] == [
    {"dataset": "mine", "demonstrations": 1, "tokens": 1 * tokens_of_one},
    {"dataset": "mine", "demonstrations": 2, "tokens": 2 * tokens_of_one},
    {"dataset": "mine", "demonstrations": 3, "tokens": 3 * tokens_of_one},
  ]
  # After all three demonstrations, the oracle knows all labels.
  assert value(measurements[-1]) == 1.0


@pytest.mark.parametrize(
  "test_records, message",
  [
    pytest.param(
      [TRAIN[0], {"text": "a", "label": "other"}],
      "test.jsonl:2: the label 'other' is not one of the 3 labels of"
      " .*train.jsonl",
      id="unknown label",
    ),
    pytest.param(
      [{"text": "a"}],
      "test.jsonl:1: the field 'label' is missing",
      id="no label",
    ),
    pytest.param(
      [{"text": "a", "label": 3}],
      "test.jsonl:1: the field 'label' must be a string",
      id="label that is a number",
    ),
    pytest.param(
      [{"text": "a", "label": "b\nc"}],
      "test.jsonl:1: a label must be one line",
      id="label of two lines",
    ),
    pytest.param(
      [{"text": "a", "label": " "}],
      "test.jsonl:1: a label must be one line, and not empty",
      id="empty label",
    ),
    pytest.param([], "test.jsonl: is empty", id="empty file"),
    pytest.param(
      [{**TRAIN[0], "text": "long " * 1000}],
      "4096 tokens do not hold the longest query of 'mine'",
      id="query that is too long",
    ),
  ],
)
def test_an_invalid_record_is_reported_in_one_line(
  monkeypatch, tmp_path, test_records, message
):
  write_records(tmp_path / "mine" / "train.jsonl", TRAIN)
  write_records(tmp_path / "mine" / "test.jsonl", test_records)

  with pytest.raises(UserError, match=message) as error:
    evaluate(
      monkeypatch,
      FakeSampler(look_up),
      datasets=("mine",),
      data_dir=str(tmp_path),
    )
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"datasets": ("trec",)},
      "'trec' is not 'synthetic'; set.many_shot.data_dir must name",
      id="no data_dir",
    ),
    pytest.param(
      {"datasets": ("trec",), "data_dir": "/nowhere"},
      "/nowhere/trec/train.jsonl: cannot be read",
      id="missing data_dir",
    ),
    pytest.param(
      {"max_tokens": 5000},
      "set.many_shot.max_tokens = 5000: the model takes at most 4096",
      id="max_tokens",
    ),
    pytest.param(
      {"samples": 0},
      "set.many_shot.samples = 0: must be at least 1",
      id="samples",
    ),
  ],
)
def test_an_invalid_setting_raises(monkeypatch, settings, message):
  """The model takes at most 4,096 tokens."""
  with pytest.raises(UserError, match=message):
    evaluate(monkeypatch, FakeSampler(look_up), **settings)


def test_the_default_dataset_is_synthetic():
  assert ManyShot().datasets == ("synthetic",)


@pytest.mark.parametrize("names", [("one",), ("one", "other")])
def test_one_or_two_models_are_plotted(monkeypatch, tmp_path, names):
  monkeypatch.setattr(many_shot, "Sampler", FakeSampler(look_up))
  suite = ManyShot(samples=20, sets=2, orders=0, max_tokens=600)
  models = [Model(TRAINED, {"name": name}) for name in names]
  data = [suite.load(TRAINED) for _ in models]

  suite.run(models, data, epath.Path(tmp_path))

  image = (tmp_path / "many_shot.png").read_bytes()
  assert image.startswith(b"\x89PNG")


def test_random_parameters_give_accuracies_between_0_and_1(make_trained):
  """The model and the sampler are real. All other tests replace them."""
  trained = make_trained("softmax", num_layers=1, max_length=256)
  # With large parameters, the probabilities of tokens are not nearly uniform.
  params = jax.tree.map(lambda leaf: 3 * np.asarray(leaf), trained.params)
  trained = dataclasses.replace(trained, params=params)
  suite = ManyShot(
    samples=4,
    sets=1,
    orders=2,
    synthetic_classes=2,
    synthetic_words=1,
    batch_tokens=1024,
  )

  measurements = list(suite.evaluate(trained))

  names_and_counts = []
  for measurement in measurements:
    assert 0 <= value(measurement) <= 1
    count = measurement.at["demonstrations"]
    names_and_counts.append((measurement.name, count))
  # At most three demonstrations fit into 256 tokens.
  assert names_and_counts == [
    ("accuracy", 1),
    ("accuracy", 2),
    ("accuracy", 3),
    ("best minus worst", 3),
    ("best minus worst", 3),
  ]
