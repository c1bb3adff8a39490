"""Classification from demonstrations: episodes, orders and what is measured."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffjax.data import pipeline
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import many_shot
from diffjax.inference import trained
from experiments import grid
from experiments.order_robustness import experiment, task

# An episode shows demonstrations "word:label", and then asks for the labels of
# some words, its queries. Some demonstrations have a wrong label.
SIZES = task.SIZES


def label_counts(demonstrations):
  """Returns how often each word has each label: counts[word][label]."""
  counts = collections.defaultdict(collections.Counter)
  for example in demonstrations:
    word, label = example.text.split(":")
    assert label == example.label
    counts[word][label] += 1
  return counts


@pytest.mark.parametrize("seed", range(5))
def test_balanced_episodes_show_every_label_equally_often(seed):
  rng = np.random.default_rng(seed)

  demonstrations, _ = task.balanced_episode(rng, SIZES)

  counts = collections.Counter(example.label for example in demonstrations)
  assert len(counts) == SIZES.classes
  for count in counts.values():
    assert count == len(demonstrations) / SIZES.classes


@pytest.mark.parametrize("seed", range(5))
def test_balanced_episodes_ask_once_for_every_word(seed):
  rng = np.random.default_rng(seed)

  _, queries = task.balanced_episode(rng, SIZES)

  words = {query.text for query in queries}
  assert len(words) == task.WORDS
  assert len(queries) == task.WORDS


@pytest.mark.parametrize("seed", range(5))
def test_the_right_label_is_the_most_frequent_one_of_a_word(seed):
  rng = np.random.default_rng(seed)

  demonstrations, queries = task.balanced_episode(rng, SIZES)

  # A word is shown three times: twice with its right label, which is the label
  # of the query, and once with a wrong one.
  counts = label_counts(demonstrations)
  for query in queries:
    counts_of_word = counts[query.text]
    assert counts_of_word[query.label] == 2
    assert sorted(counts_of_word.values()) == [1, 2]


def test_a_third_of_the_training_demonstrations_have_a_wrong_label():
  """A demonstration such as "w7:y4" shows the label y4 for the word w7."""
  sizes = task.Sizes(mislabelled=1 / 3)
  rng = np.random.default_rng(0)

  is_right = []
  for _ in range(300):
    episode = task.training_episode(rng, sizes)
    # A query is a word with its right label.
    right_labels = {query.text: query.label for query in episode.queries}
    for demonstration in episode.demonstrations:
      word, _ = demonstration.text.split(":")
      if word in right_labels:
        is_right.append(demonstration.label == right_labels[word])

  # Two standard errors of a share of 2/3 among 10,000 demonstrations.
  assert len(is_right) > 10_000
  assert np.mean(is_right) == pytest.approx(1 - 1 / 3, abs=0.01)


def test_training_episodes_have_the_same_length():
  rng = np.random.default_rng(0)

  for _ in range(100):
    episode = task.training_episode(rng, SIZES)

    assert len(episode.demonstrations) == SIZES.demonstrations * task.WORDS
    assert len(episode.queries) == SIZES.queries


def test_training_episodes_use_few_words_more_often_than_many():
  """The logarithm of the number of words is uniform, between 2 and 24."""
  rng = np.random.default_rng(0)

  num_words = []
  for _ in range(100):
    episode = task.training_episode(rng, SIZES)
    words = label_counts(episode.demonstrations).keys()
    num_words.append(len(words))

  assert min(num_words) == 2
  assert 20 < max(num_words) <= 24
  # The median of uniform numbers would be 13.
  assert np.median(num_words) < 24 / 2


@pytest.fixture
def demonstrations():
  """The demonstrations of an episode with every label equally often."""
  return task.balanced_episode(np.random.default_rng(0), SIZES).demonstrations


@pytest.mark.parametrize("kind", experiment.ORDERS)
def test_orders_are_random_and_keep_the_demonstrations(kind, demonstrations):
  rng = np.random.default_rng(1)
  order = experiment.ORDERS[kind]

  draws = [tuple(order(demonstrations, rng)) for _ in range(5)]

  # The five orders are different.
  assert len(set(draws)) == 5
  for draw in draws:
    assert sorted(draw) == sorted(demonstrations)


def labels_in_blocks(kind, demonstrations, size):
  """Returns the labels [blocks, size] of demonstrations in an order.

  Args:
    kind: The name of the order: "random", "alternating" or "blocked".
    demonstrations: The demonstrations.
    size: The number of demonstrations in a block.
  """
  rng = np.random.default_rng(1)
  ordered = experiment.ORDERS[kind](demonstrations, rng)
  labels = np.array([example.label for example in ordered])
  return labels.reshape(-1, size)


def test_alternating_orders_show_one_of_each_class_in_turn(demonstrations):
  blocks = labels_in_blocks("alternating", demonstrations, size=SIZES.classes)

  for block in blocks:
    assert len(set(block)) == SIZES.classes


def test_blocked_orders_show_one_class_after_the_other(demonstrations):
  num_per_class = len(demonstrations) // SIZES.classes

  blocks = labels_in_blocks("blocked", demonstrations, size=num_per_class)

  for block in blocks:
    assert len(set(block)) == 1


def test_random_orders_mix_the_classes(demonstrations):
  num_per_class = len(demonstrations) // SIZES.classes

  first_block, *_ = labels_in_blocks(
    "random", demonstrations, size=num_per_class
  )

  assert len(set(first_block)) > 1


def test_accuracy_spread_and_changed_answers_are_computed():
  # Two sets of demonstrations with two queries each, in three orders.
  labels = np.array([[1, 2], [3, 4]])
  answers_of_first_set = [[1, 2], [1, 1], [1, 1]]
  answers_of_second_set = [[3, 4], [3, 4], [3, 4]]
  answers = np.array([answers_of_first_set, answers_of_second_set])

  measured = experiment.spread(answers, labels)

  # Two of twelve answers are wrong.
  assert measured["accuracy"] == pytest.approx(10 / 12)
  # The spread is the best accuracy of a set minus its worst one: 1 − 0.5 for
  # the first set, and 1 − 1 for the second.
  assert measured["spread"] == (0.5 + 0.0) / 2
  # There are three pairs of orders for each of four queries. In two of these
  # pairs, the answers to the second query of the first set differ.
  assert measured["changed"] == pytest.approx(2 / 12)


@pytest.fixture(scope="module")
def training_rows(tmp_path_factory):
  """A tokenizer and a batch of four rows for training."""
  (run,) = grid.expand(
    "order_robustness",
    grid.Grid(variants=("diff",), baseline="diff"),
    {"train.batch_size": 4, "train.steps": 50},
  )
  path = tmp_path_factory.mktemp("rows")
  run = grid.with_fields(run, experiment.prepare(path, run.config))
  tokenizer = load_tokenizer(run.config.data.tokenizer)
  assert run.config.model.vocab_size == tokenizer.vocab_size
  return tokenizer, next(pipeline.training_batches(run.config))


def test_the_tokenizer_has_the_vocabulary_of_the_task(training_rows):
  tokenizer, _ = training_rows

  assert tokenizer.vocab_size == len(task.VOCABULARY)


def test_a_row_of_the_training_is_one_episode(training_rows):
  tokenizer, batch = training_rows

  # The segments of a row are numbered from 1. An episode is one segment between
  # two separators.
  assert (batch["segment_ids"] == 1).all()
  assert (batch["tokens"][:, 0] == tokenizer.separator).all()
  assert (batch["targets"][:, -1] == tokenizer.separator).all()


def test_the_loss_covers_the_queries_and_their_labels(training_rows):
  """The words with a loss are, for example, "w7 y4 w2 y1"."""
  tokenizer, batch = training_rows

  # The last target of a row is a separator.
  targets = batch["targets"][:, :-1]
  has_loss = batch["weights"][:, :-1] > 0
  for row in range(4):
    text = tokenizer.decode(targets[row][has_loss[row]])

    # There are 16 queries, each with a label.
    assert re.fullmatch(r"w\d+ y\d+( w\d+ y\d+){15}", text)


def test_queries_are_about_words_of_the_demonstrations(training_rows):
  """A row is, for example, "w7:y4 w2:y1 w7:y4 w2 y1 w7 y4"."""
  tokenizer, batch = training_rows

  for tokens in batch["tokens"]:
    text = tokenizer.decode(tokens)
    words_of_demonstrations = re.findall(r"(w\d+):", text)
    words_of_queries = re.findall(r"(w\d+) ", text)

    assert len(words_of_queries) == 16
    assert set(words_of_queries) <= set(words_of_demonstrations)


class CountingModel:
  """A model that answers with the most frequent label of the query's word.

  It counts "all" demonstrations of the word, or only the "last" one.
  """

  def __init__(self, counted: str):
    # The token of a demonstration "word:label" is an index of VOCABULARY, and
    # so are the tokens of its word and of its label.
    self._counted = counted
    words = np.zeros(len(task.VOCABULARY), int)
    labels = np.zeros(len(task.VOCABULARY), int)
    for index, name in enumerate(task.VOCABULARY):
      word, colon, label = name.partition(":")
      if colon:
        words[index] = task.VOCABULARY.index(word)
        labels[index] = task.VOCABULARY.index(label)
    self._words = jnp.array(words)
    self._labels = jnp.array(labels)

  def apply(self, variables, tokens):
    """Returns the counts of all labels as hidden states [B, T, V].

    With an identity matrix as the output embedding, they are the logits.
    """
    del variables
    vocab_size = len(task.VOCABULARY)
    # A row is a separator, the demonstrations and the query.
    demonstrations = tokens[:, 1:-1]
    query = tokens[:, -1:]
    is_counted = self._words[demonstrations] == query
    if self._counted == "last":
      number = jnp.arange(1, 1 + demonstrations.shape[1])
      last = jnp.max(is_counted * number, axis=1, keepdims=True)
      is_counted = is_counted & (number == last)
    labels = jax.nn.one_hot(self._labels[demonstrations], vocab_size)
    counts = jnp.einsum("bn,bnv->bv", is_counted.astype(jnp.float32), labels)
    return jnp.broadcast_to(counts[:, None], (*tokens.shape, vocab_size))


@pytest.fixture
def measure(tmp_path, monkeypatch):
  """A function that returns the measurements of a CountingModel."""
  (run,) = grid.expand(
    "order_robustness", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  tokenizer = load_tokenizer(task.write(tmp_path, 4, SIZES)["data.tokenizer"])
  params = {"embedding": jnp.eye(len(task.VOCABULARY))}
  # Fewer sets are enough to see a difference.
  monkeypatch.setattr(experiment, "SETS", 8)

  def measure_model(model):
    def load(workdir):
      return trained.Trained(workdir, run.config, model, params, tokenizer)

    monkeypatch.setattr(trained, "load", load)
    return experiment.measure("", run.config)

  return measure_model


def test_a_model_that_counts_all_demonstrations_ignores_the_order(measure):
  """It answers with the most frequent label of a word, which is right."""
  measured = measure(CountingModel(counted="all"))

  expected = {}
  for kind in ("random", "alternating", "blocked"):
    expected[f"{kind}_accuracy"] = 1
    # The best accuracy of an order minus the worst.
    expected[f"{kind}_spread"] = 0
    # The share of answers that differ between two orders.
    expected[f"{kind}_changed"] = 0
  columns = experiment.EXPERIMENT.metrics.values()
  assert {column: measured[column] for column in columns} == expected


def test_the_curve_has_the_accuracy_by_the_number_of_demonstrations(measure):
  """The model knows the label of a word if a demonstration shows the word."""
  measured = measure(CountingModel(counted="all"))

  accuracy = dict(zip(experiment.COUNTS, measured["curve"], strict=True))
  # Six demonstrations show at most 6 of the 24 words. All of them show each
  # word three times.
  assert accuracy[6] < 0.5
  assert accuracy[72] == 1


def test_a_model_that_counts_the_last_demonstration_depends_on_the_order(
  measure,
):
  """The last of a word's three demonstrations is wrong in a third of orders."""
  measured = measure(CountingModel(counted="last"))

  assert measured["random_accuracy"] == pytest.approx(2 / 3, abs=0.05)
  assert measured["alternating_accuracy"] == pytest.approx(2 / 3, abs=0.05)
  # In each blocked order, half of the words have their wrong label last.
  assert measured["blocked_accuracy"] == 0.5
  assert measured["blocked_spread"] == 0
  # Far from the 0 of a model that ignores the order.
  assert measured["random_changed"] > 0.2
  assert measured["alternating_changed"] > 0.2
  assert measured["blocked_changed"] > 0.2
  assert measured["random_spread"] > 0.2
  assert measured["alternating_spread"] > 0.2


def test_each_panel_of_the_plot_has_all_architectures(make_results):
  def measured(run):
    numbers = {"curve": [0.2, 0.3, 0.4, 0.5, 0.6]}
    for column in experiment.EXPERIMENT.metrics.values():
      numbers[column] = 0.3
    return numbers

  grid_results = make_results(
    "order_robustness", experiment.EXPERIMENT, measured
  )

  figure = experiment.plot(grid_results)

  for axes in figure.axes:
    _, labels = axes.get_legend_handles_labels()
    assert labels == [
      "Transformer",
      "Transformer with wide heads and head norm",
      "DIFF",
      "DIFF V2",
    ]


def test_larger_models_are_the_runs_of_ablations():
  """The grid for GPUs measures models of ablations, and trains none."""
  gpu_grid = grid.load("order_robustness", "gpu").grids["gpu"]

  run, *_ = grid.expand("order_robustness", gpu_grid, {})

  assert not experiment.LARGE.trains
  assert run.pretrained.config == run.config


@pytest.mark.full
def test_many_shot_accuracies_are_measured_by_the_number_of_demonstrations(
  make_workdir, monkeypatch
):
  (run,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  workdir, config = make_workdir("run", run.config, {"model.max_length": 512})
  many_shot_suite = many_shot.ManyShot

  def with_small_batches(**settings):
    """Small batches take less time."""
    return many_shot_suite(batch_tokens=1024, **settings)

  monkeypatch.setattr(many_shot, "ManyShot", with_small_batches)

  measured = experiment.measure_many_shot(
    workdir, config, num_orders=2, num_queries=4
  )

  # The accuracy is measured after 1, 2, 4 and so on, and after all that fit.
  first, second, third, *_ = measured["counts"]
  assert (first, second, third) == (1, 2, 4)
  assert len(measured["curve"]) == len(measured["counts"])
  assert measured["accuracy"] == measured["curve"][-1]
  assert measured.keys() >= set(experiment.LARGE.metrics.values())


def test_the_many_shot_plot_has_all_architectures(make_results):
  def measured(run):
    return {
      "counts": [1, 2, 4],
      "curve": [0.2, 0.3, 0.4],
      "random_spread": 0.1,
      "alternating_spread": 0.1,
    }

  grid_results = make_results(
    "order_robustness", experiment.LARGE, measured, chosen="gpu"
  )

  curve, _ = experiment.plot_many_shot(grid_results).axes

  _, labels = curve.get_legend_handles_labels()
  names = [label.removesuffix(", size 125m") for label in labels]
  assert names == ["Transformer", "DIFF", "DIFF V2"]
