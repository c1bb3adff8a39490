"""Many-shot learning: decoding gives labels, models with a known answer get it, and demonstrations are balanced."""

import collections
import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import many_shot
from diffjax.evals.many_shot import ManyShot
from diffjax.evals.methods.demonstration_orders import (
  alternating,
  balanced,
  shuffled,
)
from diffjax.evals.methods.label_decoding import LabelTree, decode_labels
from diffjax.evals.methods.labelled_texts import Example, synthetic_dataset
from diffjax.evals.report import intervals, plots
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained
from diffjax.model.decoder import Decoder, logits
from tests.harness.parameters import parameters

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "model", Config(model=ModelConfig(max_length=4096)), None, None, BYTES
)


class FakeSampler:
  """The sampler's interface over a function from a prompt's text to the label that it writes, byte by byte."""

  def __init__(self, answer):
    self.answer, self.prompts = answer, []

  def __call__(self, model, params, *, batch_size, capacity):
    self.batch_size, self.capacity = batch_size, capacity
    return self

  def prefill(self, prompts):
    assert all(prompt[0] == BYTES.separator for prompt in prompts)
    return self.read(
      types.SimpleNamespace(texts=[""] * self.batch_size), prompts
    )

  def read(self, state, more):
    texts = [
      text + BYTES.decode(ids)
      for text, ids in zip(state.texts, more, strict=False)
    ]
    return self.state(
      texts + [""] * (self.batch_size - len(texts)), [""] * self.batch_size
    )

  def step(self, state, tokens):
    return self.state(
      state.texts,
      [
        written + chr(token)
        for written, token in zip(state.written, tokens, strict=True)
      ],
    )

  def state(self, texts, written):
    table = np.random.default_rng(0).normal(
      size=(self.batch_size, 256)
    )  # what is not wanted is random
    for row, (text, so_far) in enumerate(zip(texts, written, strict=True)):
      assert len(text) + len(so_far) < self.capacity
      if text.endswith(("intent:", "Type:")):
        self.prompts.append(text)
        wanted = f" {self.answer(text)}\n\n"
        if wanted.startswith(so_far) and len(so_far) < len(wanted):
          table[row, ord(wanted[len(so_far)])] = 10
    return types.SimpleNamespace(texts=texts, written=written, logits=table)


def demonstrations(text):
  """The query and the demonstrations of a prompt, as a model that understands it reads them."""
  *shown, query = [block.split("\n") for block in text.split("\n\n")]
  return query[0].split(": ", 1)[1], [
    (first.split(": ", 1)[1], second.split(": ", 1)[1])
    for first, second in shown
  ]


def look_up(text):
  """The label of the demonstration that shares most words with the query's rarest: an oracle that learns from context alone."""
  query, shown = demonstrations(text)
  labels_of = collections.defaultdict(set)
  for words, label in shown:
    for word in words.split():
      labels_of[word].add(label)
  known = [labels_of[word] for word in query.split() if word in labels_of]
  return sorted(min(known, key=len))[0] if known else "?"


def run(monkeypatch, answer, **settings):
  sampler = FakeSampler(answer)
  monkeypatch.setattr(many_shot, "Sampler", sampler)
  return list(
    ManyShot(**dict(samples=20, sets=2, orders=3) | settings).evaluate(TRAINED)
  ), sampler


def test_an_oracle_that_reads_the_demonstrations_gets_every_query(monkeypatch):
  found, sampler = run(monkeypatch, look_up, synthetic_words=1)
  accuracy = [figure for figure in found if figure.name == "accuracy"]
  counts = [figure.at["demonstrations"] for figure in accuracy]
  assert (
    counts[:6] == [1, 2, 4, 8, 16, 32]
    and counts[-2] < counts[-1] < 2 * counts[-2]
  )
  assert (
    intervals.interval(accuracy[0]).value < 0.5
    and intervals.interval(accuracy[-1]).value == 1.0
  )
  assert (
    0.8 < intervals.interval(accuracy[-1]).low < 0.9
  )  # 20 queries, however many draws of demonstrations
  assert all(len(figure.units) == 20 for figure in found)
  tokens = [figure.at["tokens"] for figure in accuracy]
  assert tokens == sorted(tokens) and 4096 - 150 < tokens[-1] < 4096
  assert max(map(len, sampler.prompts)) < 4096 and sampler.batch_size == 8
  # The order of demonstrations does not matter to it
  robustness = [figure for figure in found if figure.name == "best minus worst"]
  assert [figure.at["order"] for figure in robustness] == [
    "random",
    "alternating",
  ]
  assert [intervals.interval(figure).value for figure in robustness] == [
    0.0,
    0.0,
  ]
  assert all(np.isnan(intervals.interval(figure).high) for figure in robustness)


def test_a_model_that_repeats_the_first_label_depends_on_the_order(monkeypatch):
  found, _ = run(
    monkeypatch,
    lambda text: demonstrations(text)[1][0][1],
    samples=60,
    orders=6,
  )
  for figure in found:
    value = intervals.interval(figure).value
    if figure.name == "best minus worst":
      labels = figure.units.sum(0)  # queries that each order got
      assert (
        value == pytest.approx((labels.max() - labels.min()) / 60) and value > 0
      )
    else:
      assert value < 0.4


def test_each_query_is_asked_after_the_same_balanced_demonstrations(
  monkeypatch,
):
  _, sampler = run(monkeypatch, look_up, sets=1, orders=0, max_tokens=1000)
  by_beginning = collections.Counter(
    text.rpartition("\n\n")[0] for text in dict.fromkeys(sampler.prompts)
  )
  assert set(by_beginning.values()) == {20}
  beginnings = sorted(by_beginning, key=len)
  assert [
    len(demonstrations(f"{text}\n\nutterance: x\nintent:")[1])
    for text in beginnings[:4]
  ] == [1, 2, 4, 8]
  assert all(
    longer.startswith(shorter)
    for shorter, longer in zip(beginnings, beginnings[1:], strict=False)
  )
  counts = collections.Counter(
    label
    for _, label in demonstrations(
      f"{beginnings[-1]}\n\nutterance: x\nintent:"
    )[1]
  )
  assert len(counts) == 6 and max(counts.values()) - min(counts.values()) <= 1


def test_no_prompt_shows_a_query(monkeypatch, tmp_path):
  queries = [
    {"text": f"what is query{number}?", "label": f"class {number}"}
    for number in range(3)
  ]
  write(tmp_path, "mine", train=queries[:2] + TRAIN, test=queries)
  data_dir = str(tmp_path)
  found, sampler = run(
    monkeypatch, look_up, datasets=("mine", "synthetic"), data_dir=data_dir
  )
  assert max(
    figure.at["demonstrations"]
    for figure in found
    if figure.at["dataset"] == "mine"
  ) == len(TRAIN)
  asked = {demonstrations(prompt)[0] for prompt in sampler.prompts}
  for prompt in sampler.prompts:
    shown = {text for text, _ in demonstrations(prompt)[1]}
    assert not shown & asked
  # Synthetic texts repeat by chance, too rarely for one run to show it.
  dataset = ManyShot().load(TRAINED)["synthetic"]
  assert not {shot.text for shot in dataset.train} & {
    query.text for query in dataset.test
  }


def test_a_label_needs_a_demonstration_that_is_no_query(monkeypatch, tmp_path):
  write(tmp_path, "mine", train=TRAIN, test=TRAIN[2:])
  message = "test.jsonl:1: every demonstration of the label 'class 2' is also a"
  with pytest.raises(UserError, match=message):
    run(monkeypatch, look_up, datasets=("mine",), data_dir=str(tmp_path))


def test_rounds_are_balanced_until_a_class_has_no_more():
  examples = [
    Example(f"{label}{number}", label)
    for label, count in zip("abcd", (3, 50, 50, 50), strict=True)
    for number in range(count)
  ]
  found = balanced(examples, np.random.default_rng(0))
  assert sorted(found) == sorted(examples)
  for stop in range(1, len(found)):
    counts = collections.Counter(example.label for example in found[:stop])
    rest = [counts[label] for label in "bcd"]
    assert max(rest) - min(rest) <= 1 and (
      stop > 12
      or max(counts.values()) - min(counts[label] for label in "abcd") <= 1
    )
  assert (
    len(
      {
        tuple(example.label for example in found[start : start + 3])
        for start in range(12, 150, 3)
      }
    )
    > 3
  )


def test_orders_hold_the_same_demonstrations():
  examples = [
    Example(f"{label}{number}", label) for number in range(9) for label in "abc"
  ] + [Example("a9", "a")]
  rng = np.random.default_rng(0)
  for order in (shuffled, alternating):
    first, second = order(examples, rng), order(examples, rng)
    assert (
      sorted(first) == sorted(second) == sorted(examples) and first != second
    )
  for _ in range(5):
    labels = "".join(example.label for example in alternating(examples, rng))
    assert labels == labels[:3] * 9 + "a" and set(labels[:3]) == set("abc")


def test_synthetic_classes_have_words_of_their_own():
  dataset = synthetic_dataset(5, 3, seed=1)
  train, test = dataset.train, dataset.test
  assert dataset == synthetic_dataset(5, 3, seed=1)
  assert train != synthetic_dataset(5, 3, seed=2).train
  labels = {example.label for example in train}
  assert len(labels) == 5 and collections.Counter(
    e.label for e in test
  ) == dict.fromkeys(labels, 200)
  words = {
    label: {word for e in train if e.label == label for word in e.text.split()}
    for label in labels
  }
  shared = set.intersection(*words.values())
  own = [words[label] - shared for label in sorted(labels)]
  assert (
    len(shared) == 20
    and [len(some) for some in own] == [3] * 5
    and len(set.union(*own)) == 15
  )
  assert all(
    len(set(e.text.split()) - shared) == 1 and not labels & set(e.text.split())
    for e in train + test
  )


@pytest.fixture(scope="module")
def real():
  config = ModelConfig(
    num_layers=2,
    embed_dim=32,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=32,
    max_length=256,
  )
  model = Decoder(config)
  params = jax.tree.map(
    lambda x: x * 3,
    parameters(model, jnp.zeros((1, 1), jnp.int32)),
  )
  return Trained("real", Config(model=config), model, params, BYTES)


def test_decoding_takes_the_likeliest_token_that_leads_to_a_label(real):
  """Decoding equals a loop over the whole model, with labels that begin alike and one that is the beginning of another."""
  labels = ["cat", "cat food", "catalogue", "dog", "do"]
  endings = [BYTES.encode(f" {label}\n\n") for label in labels]
  sampler = Sampler(real.model, real.params, batch_size=4, capacity=128)
  apply = jax.jit(
    lambda row: logits(
      real.params, real.model.apply({"params": real.params}, row)
    )
  )

  def expected(prompt):
    written, left = [], endings
    while len(left) > 1:
      row = np.zeros((1, 128), np.int32)
      row[0, : len(prompt) + len(written)] = [*prompt, *written]
      table = np.asarray(apply(row))[0, len(prompt) + len(written) - 1]
      written.append(
        max(
          {ending[len(written)] for ending in left},
          key=lambda token: table[token],
        )
      )
      left = [ending for ending in left if ending[: len(written)] == written]
    return endings.index(left[0])

  beginning = BYTES.encode("A beginning that all share. ")
  tails = [
    BYTES.encode(text)
    for text in (
      "x",
      "what is it?",
      "y" * 70,
      "cats",
      "a",
      "bb",
      "Z" * 9,
      "dog",
      "?!",
      "do",
      "1",
      "2 3",
    )
  ]
  shared, found = sampler.prefill([beginning] * 4), []
  for start in range(0, len(tails), 4):
    found += decode_labels(
      sampler,
      sampler.read(shared, tails[start : start + 4]),
      4,
      LabelTree.grow(endings),
    )
  assert found == [expected([*beginning, *tail]) for tail in tails]
  assert len(set(found)) > 1


def test_whatever_the_logits_a_label_comes_out():
  rng = np.random.default_rng(0)
  labels = ["a", "ab", "abc", "b", "ba", "entity", "entity:animal"]
  sampler = types.SimpleNamespace(
    batch_size=3,
    step=lambda state, tokens: types.SimpleNamespace(
      logits=rng.normal(size=(3, 256))
    ),
  )
  tree = LabelTree.grow([BYTES.encode(f" {label}\n\n") for label in labels])
  found = [
    label
    for _ in range(200)
    for label in decode_labels(sampler, sampler.step(None, None), 3, tree)
  ]
  assert set(found) == set(range(len(labels)))
  assert decode_labels(
    sampler, sampler.step(None, None), 3, LabelTree.grow([[1]])
  ) == [0, 0, 0]
  for same in ([[1, 2], [1, 2]], [[1, 2], [1, 2, 3]]):
    with pytest.raises(
      UserError, match="labels 0, 1 .counted from 0. have the same tokens"
    ):
      LabelTree.grow(same)


def test_a_real_model(real):
  found = list(
    ManyShot(
      samples=4,
      sets=1,
      orders=2,
      synthetic_classes=2,
      synthetic_words=1,
      batch_tokens=1024,
    ).evaluate(real)
  )
  assert [figure.at["demonstrations"] for figure in found] == [1, 2, 3, 3, 3]
  assert all(0 <= intervals.interval(figure).value <= 1 for figure in found)


def write(directory, name, **splits):
  (directory / name).mkdir()
  for split, rows in splits.items():
    (directory / name / f"{split}.jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in rows)
    )


TRAIN = [
  {"text": f"what is word{number}?", "label": f"class {number}"}
  for number in range(3)
]


@pytest.mark.parametrize(
  "name, form",
  [
    ("trec_fine", r"Question: what is word\d\?\nType: class \d\n\n"),
    ("banking77", "utterance: .*\nintent: "),
  ],
)
def test_local_data(monkeypatch, tmp_path, name, form):
  queries = [row | {"text": f"{row['text']} please"} for row in TRAIN]
  write(tmp_path, name, train=TRAIN, test=queries)
  found, sampler = run(
    monkeypatch, look_up, datasets=(name,), data_dir=str(tmp_path), orders=0
  )
  assert [figure.at for figure in found] == [
    {"dataset": name, "demonstrations": n, "tokens": found[0].at["tokens"] * n}
    for n in (1, 2, 3)
  ]
  assert intervals.interval(found[-1]).value == 1.0
  assert all(re.match(form, prompt) for prompt in sampler.prompts)


@pytest.mark.parametrize(
  "test, message",
  [
    (
      [TRAIN[0], {"text": "a", "label": "other"}],
      "test.jsonl:2: the label 'other' is not one of the 3 labels of .*train.jsonl",
    ),
    ([{"text": "a"}], "test.jsonl:1: the field 'label' is missing"),
    (
      [{"text": "a", "label": 3}],
      "test.jsonl:1: the field 'label' must be a string",
    ),
    (
      [{"text": "a", "label": "b\nc"}],
      "test.jsonl:1: a label must be one line",
    ),
    (
      [{"text": "a", "label": " "}],
      "test.jsonl:1: a label must be one line, and not empty",
    ),
    ([], "test.jsonl: is empty"),
    (
      [TRAIN[0] | {"text": "long " * 1000}],
      "4096 tokens do not hold the longest query of 'mine'",
    ),
  ],
)
def test_bad_data(monkeypatch, tmp_path, test, message):
  write(tmp_path, "mine", train=TRAIN, test=test)
  with pytest.raises(UserError, match=message) as error:
    run(monkeypatch, look_up, datasets=("mine",), data_dir=str(tmp_path))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "settings, message",
  [
    (
      dict(datasets=("trec",)),
      "'trec' is not 'synthetic'; set.many_shot.data_dir must name",
    ),
    (
      dict(datasets=("trec",), data_dir="/nowhere"),
      "/nowhere/trec/train.jsonl: cannot be read",
    ),
    (
      dict(max_tokens=5000),
      "set.many_shot.max_tokens = 5000: the model takes at most 4096",
    ),
    (dict(samples=0), "set.many_shot.samples = 0: must be at least 1"),
  ],
)
def test_bad_settings(monkeypatch, settings, message):
  with pytest.raises(UserError, match=message):
    run(monkeypatch, look_up, **settings)


def test_plot(monkeypatch, tmp_path):
  compared = [
    run(monkeypatch, answer, orders=0, max_tokens=600)[0]
    for answer in (look_up, lambda text: "?")
  ]
  for count in (1, 2):
    results = {
      "models": [{"name": "one"}, {"name": "other"}][:count],
      "figures": list(intervals.compare(*compared[:count])),
    }
    plots.save(ManyShot().plot(results), tmp_path / "many_shot.png")
    assert (tmp_path / "many_shot.png").read_bytes()[:4] == b"\x89PNG"
  assert dataclasses.replace(ManyShot(), datasets=("synthetic",)) == ManyShot()
