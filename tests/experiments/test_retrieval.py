"""Associative recall: the examples, the questions and what is measured."""

import concurrent.futures
import functools
import pathlib

import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.data import pipeline
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import attention, needle
from diffjax.inference.trained import load
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, series
from experiments.retrieval import experiment, task


def write_data(directory, count=40):
  """Writes training data, and returns the config fields that point to it."""
  return task.write(directory, count, task.Training())


@pytest.mark.parametrize(
  "distractors, fillers",
  [
    pytest.param(0, 0, id="only the pairs that are asked for"),
    pytest.param(5, 3, id="more distractors than fillers"),
    pytest.param(40, 10, id="many distractors"),
  ],
)
def test_a_context_has_pairs_of_different_keys_and_fillers(
  distractors, fillers
):
  """A pair is a word like "k7:v4". Distractors are not asked for."""
  example = task.make_example(
    np.random.default_rng(0), asked=3, distractors=distractors, fillers=fillers
  )

  *words, question = example.context
  assert question == "?"
  pairs = [word for word in words if word.startswith("k")]
  keys = {pair.partition(":")[0] for pair in pairs}
  assert len(keys) == len(pairs) == 3 + distractors
  assert len(words) - len(pairs) == fillers


def test_the_answer_of_an_example_has_pairs_of_its_context():
  example = task.make_example(
    np.random.default_rng(0), asked=3, distractors=5, fillers=3
  )

  # The answer is "key value key value key value", for the pairs at `places`.
  assert len(example.answer) == 2 * 3
  for index, position in enumerate(example.places):
    key = example.answer[2 * index]
    value = example.answer[2 * index + 1]
    assert example.context[position] == f"{key}:{value}"


@pytest.mark.parametrize("length, distractors", experiment.CELLS)
def test_a_context_has_one_pair_with_the_key_of_the_question(
  tmp_path, length, distractors
):
  """The context has `length` words. The question is "?" and a key."""
  tokenizer_dir = write_data(tmp_path, count=4)["data.tokenizer"]
  tokenizer = load_tokenizer(tokenizer_dir)

  questions = experiment.make_questions(
    tokenizer, length, distractors, num_samples=40
  )

  # A separator comes first.
  assert questions.tokens.shape == (40, 1 + length + 2)
  for index in range(40):
    words = [task.WORDS[token] for token in questions.tokens[index]]
    *context, mark, key = words
    value = task.WORDS[questions.values[index]]
    assert mark == "?"
    assert context[questions.places[index]] == f"{key}:{value}"
    matches = [word for word in context if word.startswith(f"{key}:")]
    assert len(matches) == 1


def test_the_cell_of_reference_is_measured():
  assert experiment.REFERENCE in experiment.CELLS


def test_attention_to_the_answer_and_to_other_words_is_relative_to_the_sum():
  """Weights of DIFF can be negative."""
  # The positions are the separator, five words, "?" and the key of a question.
  # The answer is the word at position 2. The only other word with a weight is
  # that at position 4.
  weights = np.array([[0.1, 0.0, 0.5, 0.0, -0.1, 0.0, 0.1, 0.2]])

  measured = experiment.shares(weights, places=np.array([2]))

  total = 0.1 + 0.5 - 0.1 + 0.1 + 0.2
  assert measured["answer_signed"] == pytest.approx(0.5 / total)
  assert measured["noise_signed"] == pytest.approx(-0.1 / total)
  absolute_total = 0.1 + 0.5 + 0.1 + 0.1 + 0.2
  assert measured["answer_absolute"] == pytest.approx(0.5 / absolute_total)
  assert measured["noise_absolute"] == pytest.approx(0.1 / absolute_total)


def test_attention_shares_of_questions_are_ratios_of_sums():
  """The weights of a single question may add up to nearly 0."""
  # The positions are the separator, two words, "?" and the key of a question.
  weights = np.array(
    [
      [0.0, 0.5, -0.1, 0.1, 0.3],
      [0.0, -0.2, 0.7, 0.0, -0.3],
    ]
  )

  measured = experiment.shares(weights, places=np.array([1, 2]))

  # The weights of the first question add up to 0.8, those of the second to 0.2.
  total = 0.8 + 0.2
  assert measured["answer_signed"] == pytest.approx((0.5 + 0.7) / total)
  assert measured["noise_signed"] == pytest.approx((-0.1 - 0.2) / total)


@pytest.fixture
def measure_checkpoints(make_workdir, tmp_path):
  """measure_checkpoints([2, 4]): the measurements of a run with these steps.

  The run has five steps and an evaluation every two steps.
  """
  (run,) = grid.expand(
    "retrieval", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  fields = {
    "data.tokenizer": write_data(tmp_path / "words", 4)["data.tokenizer"],
    "train.steps": 5,
    "eval.interval": 2,
    "optimizer.warmup_steps": 1,
  }
  workdir, config = make_workdir("run", run.config, fields)
  params = load(workdir).params

  def measure(steps, cells=(experiment.REFERENCE,)):
    with Checkpoints(workdir, keep=9) as checkpoints:
      for step in steps:
        checkpoints.save(
          step, {"params": params}, data_state={}, config=config.to_dict()
        )
        checkpoints.wait()
    return experiment.measure(workdir, config, cells, num_samples=8)

  return measure


@pytest.mark.full
def test_the_checkpoints_of_evaluations_and_the_last_one_are_measured(
  measure_checkpoints,
):
  """A stop of the run leaves a further checkpoint, which is not measured."""
  # Numbers of words and of distractors.
  cells = [(24, 5), experiment.REFERENCE]

  # The run was stopped at step 3.
  measured = measure_checkpoints(steps=[2, 3, 4, 5], cells=cells)

  # There is an evaluation every two steps, and step 5 is the last one.
  assert series.column(measured["curve"], "step") == [2, 4, 5]
  lengths = series.column(measured["grid"], "length")
  distractors = series.column(measured["grid"], "distractors")
  assert list(zip(lengths, distractors, strict=True)) == cells


@pytest.mark.full
def test_a_run_without_its_last_checkpoint_is_not_measured(
  measure_checkpoints,
):
  """The run has five steps."""
  with pytest.raises(UserError, match="no complete checkpoint of step 5"):
    measure_checkpoints(steps=[2, 3, 4])


def test_runs_side_by_side_can_write_the_data_at_once(tmp_path):
  """All runs of the experiment read the same files, which each may write."""
  shared_dir = tmp_path / "shared"
  shared_dir.mkdir()

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    written_by_threads = list(pool.map(write_data, [shared_dir] * 4))

  # All have the same config fields, which point to one directory.
  fields = written_by_threads[0]
  assert written_by_threads == [fields] * 4
  assert len(list(shared_dir.iterdir())) == 1
  # The files are those of a single run. A field is a path or "jsonl:PATH".
  expected_fields = write_data(tmp_path / "alone")
  for field, location in fields.items():
    actual_path = pathlib.Path(location.removeprefix("jsonl:"))
    expected_path = pathlib.Path(expected_fields[field].removeprefix("jsonl:"))
    # The name of the directory is a hash of what determines its files.
    assert actual_path.parent.name == expected_path.parent.name
    assert actual_path.read_bytes() == expected_path.read_bytes()


def test_existing_data_is_used_again(tmp_path):
  first = write_data(tmp_path)

  second = write_data(tmp_path)

  assert first == second


def test_training_learns_only_the_words_after_the_question(tmp_path):
  changes = {"train.batch_size": 2}
  (run,) = grid.expand(
    "retrieval", grid.Grid(variants=("diff",), baseline="diff"), changes
  )
  run = grid.with_fields(run, write_data(tmp_path))
  tokenizer = load_tokenizer(run.config.data.tokenizer)
  assert run.config.model.vocab_size >= tokenizer.vocab_size
  assert tokenizer.vocab_size == len(task.WORDS)
  (question,) = tokenizer.encode("?")

  batch = next(pipeline.training_batches(run.config))

  # A segment of a row is an example. Its answer has a key and a value for each
  # pair that is asked for. The loss begins at the question.
  for row in range(2):
    segments = batch["segment_ids"][row]
    for segment in range(1, segments.max() + 1):
      in_segment = segments == segment
      is_learned = in_segment & (batch["weights"][row] > 0)
      learned = tokenizer.decode(batch["targets"][row][is_learned])
      assert len(learned.split()) == 2 * task.ASKED

      is_question = in_segment & (batch["tokens"][row] == question)
      (start,) = np.flatnonzero(is_question)
      assert np.flatnonzero(is_learned)[0] == start


def test_larger_models_are_the_runs_of_ablations():
  """The grid for GPUs measures models of ablations, and trains none."""
  gpu_grid = grid.load("retrieval", "gpu").grids["gpu"]

  run, *_ = grid.expand("retrieval", gpu_grid, {})

  assert not experiment.LARGE.trains
  assert run.pretrained.config == run.config


@pytest.mark.full
def test_needles_of_a_model_with_random_parameters(make_workdir, monkeypatch):
  (run,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  workdir, config = make_workdir("run", run.config, {"model.max_length": 1024})
  # Small batches take less time.
  monkeypatch.setattr(
    attention,
    "AttentionShares",
    functools.partial(attention.AttentionShares, batch_tokens=1024),
  )
  monkeypatch.setattr(
    needle, "Needle", functools.partial(needle.Needle, batch_tokens=1024)
  )

  measured = experiment.measure_needles(
    workdir, config, needles=("6/2",), num_prompts=1
  )

  # "6/2" are six needles, of which two are asked for. A model with random
  # parameters finds none of them.
  assert measured["accuracy_6/2"] == 0
  assert 0 < measured["answer_absolute"] < 0.2
  assert 0.2 < measured["noise_absolute"] < 1
  # All columns of the table are there, but for other numbers of needles.
  missing = set(experiment.LARGE.metrics.values()) - measured.keys()
  assert missing == {"accuracy_1/1", "accuracy_2/2", "accuracy_4/2"}


def test_the_plot_of_needles_has_every_row(make_results):
  def measured(run):
    numbers = dict.fromkeys(experiment.LARGE.metrics.values(), 0.5)
    return numbers | {"accuracy_6/2": 0.1 * run.seed}

  grid_results = make_results(
    "retrieval", experiment.LARGE, measured, chosen="gpu"
  )

  accuracy, _ = experiment.plot_needles(grid_results).axes

  # The Transformer, DIFF and DIFF V2.
  _, labels = accuracy.get_legend_handles_labels()
  assert len(labels) == 3
