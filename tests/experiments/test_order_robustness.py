"""Classification from demonstrations: episodes, orders and what is measured."""

import collections
import functools

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

SIZES = task.SIZES


def label_counts(demonstrations):
  """Returns how often each word is shown with each label."""
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
  assert set(counts.values()) == {len(demonstrations) // SIZES.classes}


@pytest.mark.parametrize("seed", range(5))
def test_balanced_episodes_have_one_answer_for_every_word(seed):
  rng = np.random.default_rng(seed)

  demonstrations, queries = task.balanced_episode(rng, SIZES)

  words = {query.text for query in queries}
  assert len(words) == len(queries) == task.WORDS
  counts = label_counts(demonstrations)
  for query in queries:
    (label, most), (_, second) = counts[query.text].most_common(2)
    assert label == query.label
    assert most == 2
    assert second == 1


def training_episodes(count):
  """Returns random training episodes."""
  rng = np.random.default_rng(0)
  return [task.training_episode(rng, SIZES) for _ in range(count)]


def test_training_episodes_have_the_share_of_wrong_labels():
  num_right = 0
  num_shown = 0
  for episode in training_episodes(300):
    right_labels = {query.text: query.label for query in episode.queries}
    for example in episode.demonstrations:
      word, label = example.text.split(":")
      if word in right_labels:
        num_shown += 1
        num_right += label == right_labels[word]

  share_right = num_right / num_shown
  assert share_right == pytest.approx(1 - SIZES.mislabelled, abs=0.01)


def test_training_episodes_often_use_few_words():
  num_used = []
  for episode in training_episodes(100):
    assert len(episode.demonstrations) == SIZES.demonstrations * task.WORDS
    assert len(episode.queries) == SIZES.queries
    num_used.append(len(label_counts(episode.demonstrations)))

  assert min(num_used) == 2
  assert max(num_used) > 20
  assert np.median(num_used) < task.WORDS / 2


@pytest.fixture
def demonstrations():
  return task.balanced_episode(np.random.default_rng(0), SIZES).demonstrations


@pytest.mark.parametrize("kind", experiment.ORDERS)
def test_orders_are_random_and_keep_the_demonstrations(kind, demonstrations):
  rng = np.random.default_rng(1)
  order = experiment.ORDERS[kind]

  draws = [order(demonstrations, rng) for _ in range(5)]

  different_draws = set(map(tuple, draws))
  assert len(different_draws) == 5
  for draw in draws:
    assert sorted(draw) == sorted(demonstrations)


def labels_in_blocks(kind, demonstrations, size):
  """Returns the labels of an order, cut into blocks."""
  rng = np.random.default_rng(1)
  ordered = experiment.ORDERS[kind](demonstrations, rng)
  labels = np.array([example.label for example in ordered])
  return labels.reshape(-1, size)


def test_alternating_orders_show_one_of_each_class_in_turn(demonstrations):
  for block in labels_in_blocks("alternating", demonstrations, SIZES.classes):
    assert len(set(block)) == SIZES.classes


def test_blocked_orders_show_one_class_after_the_other(demonstrations):
  size = len(demonstrations) // SIZES.classes

  for block in labels_in_blocks("blocked", demonstrations, size):
    assert len(set(block)) == 1

  # A random order does not.
  first, *_ = labels_in_blocks("random", demonstrations, size)
  assert len(set(first)) > 1


def test_spread_of_given_answers():
  labels = np.array([[1, 2], [3, 4]])
  # The first of three orders of the first set is better by half.
  answers = np.array(
    [
      [[1, 2], [1, 1], [1, 1]],
      [[3, 4], [3, 4], [3, 4]],
    ]
  )

  numbers = experiment.spread(answers, labels)

  assert numbers["accuracy"] == pytest.approx(10 / 12)
  assert numbers["spread"] == 0.25
  assert numbers["changed"] == pytest.approx(2 / 12)


def test_a_row_is_an_episode_and_its_answers_are_learned(tmp_path):
  changes = {"train.batch_size": 4, "train.steps": 50}
  one = grid.Grid(("diff",), "diff")
  (run,) = grid.expand("order_robustness", one, changes)
  run = grid.with_fields(run, experiment.prepare(tmp_path, run.config))
  tokenizer = load_tokenizer(run.config.data.tokenizer)
  assert run.config.model.vocab_size == tokenizer.vocab_size
  assert tokenizer.vocab_size == len(task.VOCABULARY)

  batch = next(pipeline.training_batches(run.config))

  for row in range(4):
    tokens = batch["tokens"][row]
    targets = batch["targets"][row]
    is_learned = batch["weights"][row] > 0
    assert (batch["segment_ids"][row] == 1).all()
    assert tokens[0] == targets[-1] == tokenizer.separator

    # Without the separators at both ends.
    context_tokens = tokens[1:][~is_learned[1:]]
    learned_tokens = targets[:-1][is_learned[:-1]]
    context = tokenizer.decode(context_tokens).split()
    learned = tokenizer.decode(learned_tokens).split()
    # The last word of the context is the first query.
    *shown, _ = context
    queries = learned[::2]
    labels = learned[1::2]
    assert len(queries) == len(labels) == SIZES.queries
    shown_words = set()
    for demonstration in shown:
      word, colon, _ = demonstration.partition(":")
      assert colon
      shown_words.add(word)
    assert set(queries) <= shown_words
    for label in labels:
      assert label.startswith("y")


class CountingModel:
  """A model that answers by the labels shown with the query's word.

  It counts all demonstrations of the word, or only the last one.
  """

  def __init__(self, counts_all: bool):
    self._counts_all = counts_all
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
    """Returns one-hot sums of labels, for an identity output embedding."""
    del variables
    vocab_size = len(task.VOCABULARY)
    shown = tokens[:, 1:-1]
    query = tokens[:, -1:]
    weight = (self._words[shown] == query).astype(jnp.float32)
    if not self._counts_all:
      number = jnp.arange(1, 1 + shown.shape[1])
      last = jnp.max(weight * number, axis=1, keepdims=True)
      weight = weight * (number == last)
    one_hot = jax.nn.one_hot(self._labels[shown], vocab_size)
    counts = jnp.einsum("bn,bnv->bv", weight, one_hot)
    return jnp.broadcast_to(counts[:, None], (*tokens.shape, vocab_size))


@pytest.fixture
def measure(tmp_path, monkeypatch):
  """Returns a function that measures a CountingModel."""
  (run,) = grid.expand("order_robustness", grid.Grid(("diff",), "diff"), {})
  tokenizer = load_tokenizer(task.write(tmp_path, 4, SIZES)["data.tokenizer"])
  params = {"embedding": jnp.eye(len(task.VOCABULARY))}
  # Fewer sets are enough to see a difference.
  monkeypatch.setattr(experiment, "SETS", 8)

  def measure_model(counts_all):
    model = CountingModel(counts_all)

    def load(workdir):
      return trained.Trained(workdir, run.config, model, params, tokenizer)

    monkeypatch.setattr(trained, "load", load)
    return experiment.measure("", run.config)

  return measure_model


def test_a_model_that_counts_all_demonstrations_ignores_the_order(measure):
  measured = measure(counts_all=True)

  for kind in experiment.ORDERS:
    assert measured[f"{kind}_accuracy"] == 1
    assert measured[f"{kind}_spread"] == 0
    assert measured[f"{kind}_changed"] == 0
  # A few demonstrations do not show every word.
  assert measured["curve"][0] < 0.5
  assert measured["curve"][-1] == 1
  assert measured.keys() >= set(experiment.EXPERIMENT.metrics.values())


def test_a_model_that_counts_the_last_demonstration_depends_on_the_order(
  measure,
):
  measured = measure(counts_all=False)

  for kind in experiment.ORDERS:
    assert 0.4 < measured[f"{kind}_accuracy"] < 0.9
    assert measured[f"{kind}_changed"] > 0.2
  assert measured["random_spread"] > 0.2
  assert measured["alternating_spread"] > 0.2
  random_accuracy = measured["random_accuracy"]
  assert random_accuracy == pytest.approx(1 - SIZES.mislabelled, abs=0.05)
  # A class comes after another as often as before it, and words and wrong
  # labels are balanced. So half of the answers are right in every blocked
  # order.
  assert measured["blocked_accuracy"] == 0.5
  assert measured["blocked_spread"] == 0


def test_the_plot_has_every_row(make_results):
  def measured(run):
    numbers = dict.fromkeys(experiment.EXPERIMENT.metrics.values(), 0.3)
    numbers["random_spread"] = 0.1 * run.seed
    return numbers | {"curve": [0.2, 0.3, 0.4, 0.5, 0.6]}

  grid_results = make_results(
    "order_robustness", experiment.EXPERIMENT, measured
  )
  figure = experiment.plot(grid_results)

  for axes in figure.axes:
    _, labels = axes.get_legend_handles_labels()
    assert len(labels) == 4


def test_larger_models_are_the_runs_of_ablations():
  gpu_grid = grid.load("order_robustness", "gpu").grids["gpu"]
  run, *_ = grid.expand("order_robustness", gpu_grid, {})

  assert not experiment.LARGE.trains
  assert run.pretrained.config == run.config


@pytest.mark.full
def test_many_shot_measurements_have_the_columns_of_table_and_plot(
  make_workdir, make_results, monkeypatch
):
  (run,) = grid.expand("ablations", grid.Grid(("diff",), "diff"), {})
  workdir, config = make_workdir("run", run.config, {"model.max_length": 512})
  small_suite = functools.partial(many_shot.ManyShot, batch_tokens=1024)
  monkeypatch.setattr(many_shot, "ManyShot", small_suite)

  measured = experiment.measure_many_shot(
    workdir, config, num_orders=2, num_queries=4
  )

  assert measured["counts"][:3] == [1, 2, 4]
  assert len(measured["curve"]) == len(measured["counts"])
  assert measured["accuracy"] == measured["curve"][-1]
  assert measured.keys() >= set(experiment.LARGE.metrics.values())

  def same_for_all(run):
    return measured

  grid_results = make_results(
    "order_robustness", experiment.LARGE, same_for_all, "gpu"
  )
  curve, spreads = experiment.plot_many_shot(grid_results).axes
  _, labels = curve.get_legend_handles_labels()
  assert len(labels) == 3
