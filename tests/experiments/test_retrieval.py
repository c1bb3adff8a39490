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
def test_an_example_has_the_pairs_and_fillers_asked_for(distractors, fillers):
  example = task.make_example(
    np.random.default_rng(0),
    asked=3,
    distractors=distractors,
    fillers=fillers,
  )

  *words, question = example.context
  assert question == "?"
  pairs = [word for word in words if word.startswith("k")]
  keys = {pair.partition(":")[0] for pair in pairs}
  assert len(keys) == len(pairs) == 3 + distractors
  assert len(words) - len(pairs) == fillers

  keys_asked = example.answer[::2]
  values_asked = example.answer[1::2]
  for key, value, position in zip(
    keys_asked, values_asked, example.places, strict=True
  ):
    assert words[position] == f"{key}:{value}"


@pytest.mark.parametrize("length, distractors", experiment.CELLS)
def test_a_question_has_one_right_pair(tmp_path, length, distractors):
  tokenizer = load_tokenizer(write_data(tmp_path, 4)["data.tokenizer"])

  questions = experiment.make_questions(
    tokenizer, length, distractors, num_samples=40
  )

  assert questions.tokens.shape == (40, length + 3)
  for tokens, value, position in zip(*questions, strict=True):
    words = [task.WORDS[token] for token in tokens]
    *context, mark, key = words
    assert mark == "?"
    matches = [word for word in context if word.startswith(f"{key}:")]
    assert matches == [words[position]]
    assert words[position] == f"{key}:{task.WORDS[value]}"


def test_the_cell_of_reference_is_measured():
  assert experiment.REFERENCE in experiment.CELLS


def test_shares_of_a_given_attention():
  # By position: the separator, five words, "?" and the key.
  weights = np.array(
    [
      [0.1, 0.0, 0.5, 0.0, -0.1, 0.0, 0.1, 0.2],
      [0.0, 0.0, 0.0, 0.7, -0.1, 0.0, 0.0, 0.2],
    ]
  )

  measured = experiment.shares(weights, places=np.array([2, 3]))

  assert measured["answer_signed"] == pytest.approx(1.2 / 1.6)
  assert measured["noise_signed"] == pytest.approx(-0.2 / 1.6)
  assert measured["answer_absolute"] == pytest.approx(1.2 / 2.0)
  assert measured["noise_absolute"] == pytest.approx(0.2 / 2.0)


@pytest.mark.full
def test_regular_checkpoints_are_measured(make_workdir, tmp_path):
  """A resumed run has one checkpoint more, which is not measured."""
  (run,) = grid.expand("retrieval", grid.Grid(("diff",), "diff"), {})
  fields = {
    "data.tokenizer": write_data(tmp_path / "words", 4)["data.tokenizer"],
    "train.steps": 5,
    "eval.interval": 2,
    "optimizer.warmup_steps": 1,
  }
  workdir, config = make_workdir("run", run.config, fields)
  params = load(workdir).params
  cells = [(24, 5), experiment.REFERENCE]

  def save(steps):
    with Checkpoints(workdir, keep=9) as checkpoints:
      for step in steps:
        checkpoints.save(
          step, {"params": params}, data_state={}, config=config.to_dict()
        )
        checkpoints.wait()

  # A run without a regular checkpoint is not measured.
  save([2, 3, 4])
  with pytest.raises(UserError, match="no complete checkpoint of step 5"):
    experiment.measure(workdir, config, cells, num_samples=8)

  save([5])
  measured = experiment.measure(workdir, config, cells, num_samples=8)

  assert series.column(measured["curve"], "step") == [2, 4, 5]
  lengths = series.column(measured["grid"], "length")
  distractors = series.column(measured["grid"], "distractors")
  assert list(zip(lengths, distractors, strict=True)) == cells


def test_several_processes_can_write_the_data_at_once(tmp_path):
  alone = write_data(tmp_path / "alone")
  shared_dir = tmp_path / "shared"
  shared_dir.mkdir()

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    written = list(pool.map(write_data, [shared_dir] * 4))

  for fields in written:
    assert fields == written[0]
  data_name = pathlib.Path(alone["data.tokenizer"]).parent.name
  assert [path.name for path in shared_dir.iterdir()] == [data_name]
  for field, location in alone.items():
    expected = pathlib.Path(location.removeprefix("jsonl:"))
    actual = pathlib.Path(written[0][field].removeprefix("jsonl:"))
    assert actual.read_bytes() == expected.read_bytes()


def test_existing_data_is_used_again(tmp_path):
  assert write_data(tmp_path) == write_data(tmp_path)


def test_training_learns_the_words_after_the_question(tmp_path):
  changes = {"train.batch_size": 2}
  (run,) = grid.expand("retrieval", grid.Grid(("diff",), "diff"), changes)
  run = grid.with_fields(run, write_data(tmp_path))
  tokenizer = load_tokenizer(run.config.data.tokenizer)
  assert run.config.model.vocab_size >= tokenizer.vocab_size
  assert tokenizer.vocab_size == len(task.WORDS)
  (question,) = tokenizer.encode("?")

  batch = next(pipeline.training_batches(run.config))

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
  gpu_grid = grid.load("retrieval", "gpu").grids["gpu"]
  run, *_ = grid.expand("retrieval", gpu_grid, {})

  assert not experiment.LARGE.trains
  assert run.pretrained.config == run.config


@pytest.mark.full
def test_needles_of_a_model_with_random_parameters(make_workdir, monkeypatch):
  (run,) = grid.expand("ablations", grid.Grid(("diff",), "diff"), {})
  workdir, config = make_workdir("run", run.config, {"model.max_length": 1024})
  for module, name in ((attention, "AttentionShares"), (needle, "Needle")):
    small = functools.partial(getattr(module, name), batch_tokens=1024)
    monkeypatch.setattr(module, name, small)

  measured = experiment.measure_needles(
    workdir, config, needles=("6/2",), num_prompts=1
  )

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

  grid_results = make_results("retrieval", experiment.LARGE, measured, "gpu")
  accuracy, _ = experiment.plot_needles(grid_results).axes

  _, labels = accuracy.get_legend_handles_labels()
  assert len(labels) == 3
