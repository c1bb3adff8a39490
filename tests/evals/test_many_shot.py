"""The many-shot suite, with models whose answers are known."""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import many_shot
from diffjax.evals.many_shot import ManyShot
from diffjax.evals.measurement import Measurement
from diffjax.evals.report import intervals, plots
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "model", Config(model=ModelConfig(max_length=4096)), None, None, BYTES
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


def answer_unknown(prompt: str) -> str:
  """Returns no label."""
  return "?"


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


def test_the_number_of_demonstrations_doubles_up_to_the_limit(
  oracle_accuracies,
):
  """The last number is that of demonstrations that fit into 4,096 tokens."""
  counts = [accuracy.at["demonstrations"] for accuracy in oracle_accuracies]

  assert counts[:6] == [1, 2, 4, 8, 16, 32]
  assert counts[-2] < counts[-1] < 2 * counts[-2]


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


def test_the_longest_prompts_fill_the_models_length(
  oracle_accuracies, oracle_sampler
):
  """The model takes 4,096 tokens, here bytes.

  The last prompts have no room for one more demonstration.
  """
  num_tokens = [accuracy.at["tokens"] for accuracy in oracle_accuracies]

  assert num_tokens == sorted(num_tokens)
  assert 4096 - 150 < num_tokens[-1] < 4096
  assert max(len(prompt) for prompt in oracle_sampler.prompts) < 4096
  # By default, a batch has 32,768 tokens.
  assert oracle_sampler.batch_size == 32_768 // 4096


def test_the_order_of_demonstrations_does_not_change_an_oracle(
  oracle_measurements,
):
  """The oracle looks up labels, so its best and worst accuracy are equal."""
  ranges = []
  for measurement in oracle_measurements:
    if measurement.name == "best minus worst":
      ranges.append(measurement)

  assert [item.at["order"] for item in ranges] == ["random", "alternating"]
  for measurement in ranges:
    assert value(measurement) == 0.0
    # All queries are alike, and a bootstrap of equal units has no bounds.
    assert np.isnan(intervals.interval(measurement).high)


def test_a_model_that_repeats_the_first_label_depends_on_the_order(monkeypatch):
  """Its accuracy differs between six orders of the same demonstrations."""
  sampler = FakeSampler(repeat_first_label)

  measurements = evaluate(monkeypatch, sampler, samples=60, orders=6)

  for measurement in measurements:
    if measurement.name == "best minus worst":
      # Whether a query is answered right, [60 queries, 6 orders].
      is_right = measurement.units
      num_right_by_order = is_right.sum(axis=0)
      num_best = num_right_by_order.max()
      num_worst = num_right_by_order.min()
      expected = (num_best - num_worst) / 60
      assert value(measurement) == pytest.approx(expected)
      assert value(measurement) > 0
    else:
      # The accuracy. One label of six is right by chance.
      assert value(measurement) < 0.4


@pytest.fixture(scope="module")
def queries_of_one_set() -> dict[str, set[str]]:
  """The queries after each list of demonstrations, of one set of those."""
  sampler = FakeSampler(look_up)
  with pytest.MonkeyPatch.context() as patch:
    evaluate(patch, sampler, sets=1, orders=0, max_tokens=1000)
  queries = collections.defaultdict(set)
  for prompt in sampler.prompts:
    demonstrations, _, query = prompt.rpartition("\n\n")
    queries[demonstrations].add(query)
  return queries


def test_each_query_is_asked_after_the_same_demonstrations(queries_of_one_set):
  """20 queries follow each list of demonstrations."""
  for queries in queries_of_one_set.values():
    assert len(queries) == 20


def test_a_longer_list_of_demonstrations_begins_with_the_shorter_one(
  queries_of_one_set,
):
  """The keys of `queries_of_one_set` are lists of demonstrations, as text."""
  texts = sorted(queries_of_one_set, key=len)

  # A blank line separates demonstrations.
  counts = [len(text.split("\n\n")) for text in texts]
  assert counts[:4] == [1, 2, 4, 8]
  for shorter, longer in itertools.pairwise(texts):
    assert longer.startswith(shorter)


def test_demonstrations_are_balanced(queries_of_one_set):
  """Each of the six classes has nearly the same number of demonstrations.

  The keys of `queries_of_one_set` are lists of demonstrations, as text.
  """
  longest = max(queries_of_one_set, key=len)
  # The label is at the end of a demonstration.
  labels = [block.rpartition(": ")[2] for block in longest.split("\n\n")]
  counts = collections.Counter(labels)

  assert len(counts) == 6
  assert max(counts.values()) - min(counts.values()) <= 1


def test_no_prompt_shows_a_query(monkeypatch, tmp_path):
  """Two of three queries are in the training file too.

  Demonstrations come from that file, but not these two.
  """
  queries = [
    {"text": "what is query0?", "label": "class 0"},
    {"text": "what is query1?", "label": "class 1"},
    {"text": "what is query2?", "label": "class 2"},
  ]
  write_records(tmp_path / "mine" / "train.jsonl", [*queries[:2], *TRAIN])
  write_records(tmp_path / "mine" / "test.jsonl", queries)
  sampler = FakeSampler(look_up)

  measurements = evaluate(
    monkeypatch,
    sampler,
    datasets=("mine", "synthetic"),
    data_dir=str(tmp_path),
  )

  # Of the training file "mine", the three records of TRAIN are left.
  counts = []
  for measurement in measurements:
    if measurement.at["dataset"] == "mine":
      counts.append(measurement.at["demonstrations"])
  assert max(counts) == 3
  prompts = [parse(prompt) for prompt in sampler.prompts]
  asked = {prompt.query for prompt in prompts}
  for prompt in prompts:
    for text, _ in prompt.demonstrations:
      assert text not in asked


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

  message = "test.jsonl:1: every demonstration of the label 'class 2' is also a"
  with pytest.raises(UserError, match=message):
    evaluate(
      monkeypatch,
      FakeSampler(look_up),
      datasets=("mine",),
      data_dir=str(tmp_path),
    )


@pytest.mark.parametrize(
  "name, form",
  [
    pytest.param(
      "trec_fine",
      r"Question: what is word\d\?\nType: class \d\n\n",
      id="trec_fine",
    ),
    pytest.param("banking77", "utterance: .*\nintent: ", id="banking77"),
  ],
)
def test_a_public_dataset_has_its_own_form_of_prompts(
  monkeypatch, tmp_path, name, form
):
  """Prompts of trec_fine name their parts "Question" and "Type", for example."""
  queries = [
    {"text": "what is word0? please", "label": "class 0"},
    {"text": "what is word1? please", "label": "class 1"},
    {"text": "what is word2? please", "label": "class 2"},
  ]
  write_records(tmp_path / name / "train.jsonl", TRAIN)
  write_records(tmp_path / name / "test.jsonl", queries)
  sampler = FakeSampler(look_up)

  measurements = evaluate(
    monkeypatch, sampler, datasets=(name,), data_dir=str(tmp_path), orders=0
  )

  # TRAIN has three demonstrations of the same length.
  counts = [item.at["demonstrations"] for item in measurements]
  assert counts == [1, 2, 3]
  tokens_of_one = measurements[0].at["tokens"]
  for measurement in measurements:
    assert measurement.at["dataset"] == name
    num_tokens = measurement.at["demonstrations"] * tokens_of_one
    assert measurement.at["tokens"] == num_tokens
  # After all three demonstrations, the oracle knows all labels.
  assert value(measurements[-1]) == 1.0
  for prompt in sampler.prompts:
    assert re.match(form, prompt)


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


def test_the_plot_shows_one_or_two_models(monkeypatch, tmp_path):
  path = tmp_path / "many_shot.png"
  oracle = FakeSampler(look_up)
  ignorant = FakeSampler(answer_unknown)
  first = evaluate(monkeypatch, oracle, orders=0, max_tokens=600)
  second = evaluate(monkeypatch, ignorant, orders=0, max_tokens=600)
  one_model = {
    "models": [{"name": "one"}],
    "figures": list(intervals.compare(first)),
  }
  two_models = {
    "models": [{"name": "one"}, {"name": "other"}],
    "figures": list(intervals.compare(first, second)),
  }

  for suite_results in (one_model, two_models):
    plots.save(ManyShot().plot(suite_results), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()


def test_a_real_model_and_sampler():
  """At most three demonstrations fit into the model's 256 tokens."""
  config = ModelConfig(
    num_layers=1,
    embed_dim=16,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=16,
    max_length=256,
  )
  model = Decoder(config)
  params = parameters(model, jnp.zeros((1, 1), jnp.int32))
  # Large parameters, so that the probabilities are not nearly uniform.
  params = jax.tree.map(lambda leaf: 3 * leaf, params)
  trained = Trained("real", Config(model=config), model, params, BYTES)
  suite = ManyShot(
    samples=4,
    sets=1,
    orders=2,
    synthetic_classes=2,
    synthetic_words=1,
    batch_tokens=1024,
  )

  measurements = list(suite.evaluate(trained))

  # The accuracies after 1, 2 and 3 demonstrations. Then the effects of two kinds
  # of order, which are measured with all three.
  counts = [item.at["demonstrations"] for item in measurements]
  assert counts == [1, 2, 3, 3, 3]
  for measurement in measurements:
    assert 0 <= value(measurement) <= 1
