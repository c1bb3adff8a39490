"""Classification from demonstrations: they determine every answer, and an order changes only their places."""

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
from experiments import grid, plots, results
from experiments.order_robustness import experiment, task

SIZES = task.SIZES


def shown(demonstrations):
  """The number of times that each word is shown with each label."""
  counts = collections.defaultdict(collections.Counter)
  for example in demonstrations:
    word, label = example.text.split(":")
    assert label == example.label
    counts[word][label] += 1
  return counts


def test_questions_are_balanced_and_have_one_answer():
  for seed in range(20):
    demonstrations, queries = task.balanced_episode(
      np.random.default_rng(seed), SIZES
    )
    counts = collections.Counter(example.label for example in demonstrations)
    assert (
      set(counts.values()) == {len(demonstrations) // SIZES.classes}
      and len(counts) == SIZES.classes
    )
    assert len({query.text for query in queries}) == len(queries) == task.WORDS
    for query in queries:
      (best, most), (_, second) = shown(demonstrations)[query.text].most_common(
        2
      )
      assert best == query.label and most == 2 and second == 1


def test_training_episodes_are_mislabelled_as_often_as_said():
  rng, right, total, used = np.random.default_rng(0), 0, 0, []
  for _ in range(300):
    episode = task.training_episode(rng, SIZES)
    assert (
      len(episode.demonstrations) == SIZES.demonstrations * task.WORDS
      and len(episode.queries) == SIZES.queries
    )
    label = {query.text: query.label for query in episode.queries}
    known = [
      example.label == label[word]
      for example in episode.demonstrations
      if (word := example.text.split(":")[0]) in label
    ]
    right, total = right + sum(known), total + len(known)
    used.append(len(shown(episode.demonstrations)))
  assert right / total == pytest.approx(1 - SIZES.mislabelled, abs=0.01)
  assert min(used) == 2 and max(used) > 20 and np.median(used) < task.WORDS / 2


def test_orders():
  demonstrations, _ = task.balanced_episode(np.random.default_rng(0), SIZES)
  rng, size = np.random.default_rng(1), len(demonstrations) // SIZES.classes
  labels = {}
  for kind, order in experiment._ORDERS.items():
    drawn = [order(demonstrations, rng) for _ in range(5)]
    assert len({tuple(each) for each in drawn}) == 5 and all(
      sorted(each) == sorted(demonstrations) for each in drawn
    )
    labels[kind] = [example.label for example in drawn[0]]
  starts = range(0, len(demonstrations), SIZES.classes)
  assert all(
    len(set(labels["alternating"][start : start + SIZES.classes]))
    == SIZES.classes
    for start in starts
  )
  assert all(
    len(set(labels["blocked"][start : start + size])) == 1
    for start in range(0, len(demonstrations), size)
  )
  assert len(set(labels["random"][:size])) > 1


def test_spread():
  wanted = np.array([[1, 2], [3, 4]])
  answers = np.array(
    [[[1, 2], [1, 1], [1, 1]], [[3, 4], [3, 4], [3, 4]]]
  )  # the first set has one order that is better by half
  found = experiment.spread(answers, wanted)
  assert found == {
    "accuracy": pytest.approx(10 / 12),
    "spread": 0.25,
    "changed": pytest.approx(2 / 12),
  }


def test_training_learns_the_answers(tmp_path):
  """Every row holds one whole episode, of which the queries and their labels are learnt."""
  run = grid.expand(
    "order_robustness",
    grid.Grid(("diff",), "diff"),
    {"train.batch_size": 4, "train.steps": 50},
  )[0]
  run = grid.with_fields(run, experiment.prepare(tmp_path, run.config))
  tokenizer = load_tokenizer(run.config.data.tokenizer)
  assert (
    run.config.model.vocab_size == tokenizer.vocab_size == len(task.VOCABULARY)
  )
  batch = next(pipeline.training_batches(run.config))
  for tokens, targets, weights, segments in zip(
    *(batch[key] for key in ("tokens", "targets", "weights", "segment_ids")),
    strict=True,
  ):
    assert (segments == 1).all() and tokens[0] == targets[
      -1
    ] == tokenizer.separator
    context, learnt = (
      tokenizer.decode(tokens[1:][weights[1:] == 0]).split(),
      tokenizer.decode(targets[:-1][weights[:-1] > 0]).split(),
    )
    assert len(learnt) == 2 * SIZES.queries and all(
      ":" in word for word in context[:-1]
    )
    assert set(learnt[::2]) <= {
      word.split(":")[0] for word in [*context, learnt[0]]
    } and all(word[0] == "y" for word in learnt[1::2])


@pytest.mark.parametrize("counts_all", [True, False])
def test_measure(tmp_path, monkeypatch, counts_all):
  """Measures a model that counts what is shown with the query's word, whatever the order, and of one that goes by the last time alone."""

  parts = [name.split(":") for name in task.VOCABULARY]
  word, label = (
    jnp.array(
      [
        task.VOCABULARY.index(part[place]) if len(part) > 1 else 0
        for part in parts
      ]
    )
    for place in (0, 1)
  )

  class Model:
    def apply(self, variables, tokens):
      found = word[tokens[:, 1:-1]] == tokens[:, -1:]
      number = jnp.arange(1, 1 + found.shape[1])
      weight = found * (
        1.0
        if counts_all
        else number == jnp.max(found * number, axis=1, keepdims=True)
      )
      counts = jnp.einsum(
        "bn,bnv->bv",
        weight,
        jax.nn.one_hot(label[tokens[:, 1:-1]], len(task.VOCABULARY)),
      )
      return jnp.broadcast_to(
        counts[:, None], (*tokens.shape, len(task.VOCABULARY))
      )

  run = grid.expand("order_robustness", grid.Grid(("diff",), "diff"), {})[0]
  tokenizer = load_tokenizer(task.write(tmp_path, 4, SIZES)["data.tokenizer"])
  params = {"embedding": jnp.eye(len(task.VOCABULARY))}
  monkeypatch.setattr(
    trained,
    "load",
    lambda workdir: trained.Trained("", run.config, Model(), params, tokenizer),
  )
  found = experiment.measure("", run.config)
  assert (
    set(experiment.EXPERIMENT.metrics.values()) <= found.keys()
    and found["curve"][0] < 0.5
  )
  for kind in experiment._ORDERS:
    measured = [
      found[f"{kind}_{name}"] for name in ("accuracy", "spread", "changed")
    ]
    if counts_all:
      assert measured == [1, 0, 0] and found["curve"][-1] == 1
    else:
      assert 0.4 < measured[0] < 0.9 and measured[2] > 0.2
      # Of blocks, a class comes after another as often as before it, and words and wrong labels are balanced: half of the answers are right
      assert (
        (measured[:2] == [0.5, 0]) if kind == "blocked" else measured[1] > 0.2
      )
  if not counts_all:
    assert found["random_accuracy"] == pytest.approx(
      1 - SIZES.mislabelled, abs=0.05
    )


def test_the_plot_and_the_table(make_results, tmp_path):
  rng = np.random.default_rng(0)

  def measured(run):
    level = {
      "transformer": 0.3,
      "transformer_norm": 0.28,
      "diff": 0.2,
      "diff_v2": 0.22,
    }[run.variant]
    kinds = {"random": 1.0, "alternating": 0.8, "blocked": 1.7}
    out = {
      f"{kind}_spread": level * size + rng.normal(0, 0.02)
      for kind, size in kinds.items()
    }
    out |= {f"{kind}_changed": level * size / 2 for kind, size in kinds.items()}
    out |= {
      f"{kind}_accuracy": 1 - level * size for kind, size in kinds.items()
    }
    return {
      **out,
      "curve": [0.25 + (0.7 - level) * place / 5 for place in range(5)],
    }

  found = make_results("order_robustness", experiment.EXPERIMENT, measured)
  plots.save(experiment.plot(found), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 20_000
  assert results.table(experiment.EXPERIMENT, found).count("| diff |") == 2


@pytest.mark.full
def test_larger_models_are_asked_about_words(
  make_workdir, make_results, monkeypatch, tmp_path
):
  """Measured on ablations' runs, which are trained there: all numbers that table and plot want, from the suite's own figures."""
  run = grid.expand(
    "order_robustness", grid.load("order_robustness", "gpu").grids["gpu"], {}
  )[0]
  assert run.pretrained.config == run.config and not experiment.LARGE.trains
  workdir, config = make_workdir(
    "run",
    grid.expand("ablations", grid.Grid(("diff",), "diff"), {})[0].config,
    {"model.max_length": 512},
  )
  monkeypatch.setattr(
    many_shot,
    "ManyShot",
    functools.partial(many_shot.ManyShot, batch_tokens=1024),
  )
  monkeypatch.setattr(experiment, "_ORDERS_LARGE", 2)
  monkeypatch.setattr(experiment, "_QUERIES_LARGE", 4)
  found = experiment.measure_many_shot(workdir, config)
  assert (
    found["counts"][:3] == [1, 2, 4]
    and len(found["curve"]) == len(found["counts"])
    and found["accuracy"] == found["curve"][-1]
  )
  assert set(experiment.LARGE.metrics.values()) <= found.keys()
  made = make_results(
    "order_robustness", experiment.LARGE, lambda run: found, "gpu"
  )
  plots.save(experiment.plot_many_shot(made), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 10_000
  assert "| diff,size=125m | " in results.table(experiment.LARGE, made)
