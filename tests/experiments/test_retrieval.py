"""Associative recall: the examples, the questions and what is measured."""

import concurrent.futures
import re

import numpy as np
import pytest

from diffjax.config import UserError
from diffjax.data import pipeline
from diffjax.data.tokenizer import load_tokenizer
from diffjax.inference.trained import load
from diffjax.training.checkpoint import Checkpoints
from experiments import grid, series
from experiments.retrieval import experiment, task
from experiments.retrieval.config import get_config


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


@pytest.mark.parametrize("num_words, num_distractors", experiment.CELLS)
def test_a_context_has_one_pair_with_the_key_of_the_question(
  tmp_path, num_words, num_distractors
):
  """A prompt is a separator, the words of the context, "?" and a key."""
  tokenizer_dir = write_data(tmp_path, count=4)["data.tokenizer"]
  tokenizer = load_tokenizer(tokenizer_dir)

  questions = experiment.make_questions(
    tokenizer, num_words, num_distractors, num_samples=40
  )

  assert len(questions.tokens) == 40
  for tokens, value, position in zip(*questions, strict=True):
    prompt = [task.WORDS[token] for token in tokens]
    _, *context, question_mark, key = prompt
    pair = f"{key}:{task.WORDS[value]}"
    assert len(context) == num_words
    assert question_mark == "?"
    assert [word for word in context if word.startswith(f"{key}:")] == [pair]
    assert prompt[position] == pair


def test_the_cell_of_reference_is_measured():
  assert experiment.REFERENCE in experiment.CELLS


def test_attention_shares_are_weights_divided_by_their_sum():
  """Weights of DIFF can be negative. So there are shares of absolute values."""
  # A prompt is a separator, a context with the answer, and a question.
  separator = 0.1
  answer = 0.5
  first_noise = -0.2
  second_noise = 0.1
  question = [0.1, 0.2]
  weights = np.array(
    [[separator, first_noise, answer, second_noise, *question]]
  )

  measured = experiment.shares(weights, places=np.array([2]))

  total = weights.sum()
  assert measured["answer_signed"] == pytest.approx(answer / total)
  noise = first_noise + second_noise
  assert measured["noise_signed"] == pytest.approx(noise / total)
  absolute_total = np.abs(weights).sum()
  assert measured["answer_absolute"] == pytest.approx(answer / absolute_total)
  absolute_noise_share = (0.2 + 0.1) / absolute_total
  assert measured["noise_absolute"] == pytest.approx(absolute_noise_share)


def test_attention_shares_of_questions_are_ratios_of_sums():
  """A mean of ratios could be large: a single sum may be nearly 0."""
  # The weights of a separator, two words, "?" and the key of a question.
  first_weights = [0.0, 0.5, -0.1, 0.1, 0.3]
  first_answer_position = 1
  second_weights = [0.0, -0.2, 0.7, 0.0, -0.3]
  second_answer_position = 2

  measured = experiment.shares(
    np.array([first_weights, second_weights]),
    np.array([first_answer_position, second_answer_position]),
  )

  total = sum(first_weights) + sum(second_weights)
  answers = 0.5 + 0.7
  noise = -0.1 - 0.2
  assert measured["answer_signed"] == pytest.approx(answers / total)
  assert measured["noise_signed"] == pytest.approx(noise / total)


@pytest.fixture
def make_run(make_workdir, tmp_path):
  """A function that returns the workdir and the config of a run.

  make_run(num_steps=5, eval_interval=2, saved_steps=[2, 4, 5]) makes a run of
  five steps with three checkpoints.
  """
  (expanded,) = grid.expand(
    "retrieval", grid.Grid(variants=("diff",), baseline="diff"), {}
  )

  def make(num_steps, eval_interval, saved_steps):
    fields = {
      "data.tokenizer": write_data(tmp_path / "words", 4)["data.tokenizer"],
      "train.steps": num_steps,
      "eval.interval": eval_interval,
      "optimizer.warmup_steps": 1,
    }
    workdir, config = make_workdir("run", expanded.config, fields)
    params = load(workdir).params
    with Checkpoints(workdir, keep=9) as checkpoints:
      for step in saved_steps:
        checkpoints.save(
          step, {"params": params}, data_state={}, config=config.to_dict()
        )
        checkpoints.wait()
    return workdir, config

  return make


@pytest.mark.full
def test_the_checkpoints_of_evaluations_and_the_last_one_are_measured(make_run):
  """Step 3 has a checkpoint because the run was stopped there."""
  workdir, config = make_run(
    num_steps=5, eval_interval=2, saved_steps=[2, 3, 4, 5]
  )

  measured = experiment.measure(
    workdir, config, cells=[experiment.REFERENCE], num_samples=8
  )

  assert series.column(measured["curve"], "step") == [2, 4, 5]


@pytest.mark.full
def test_the_accuracy_is_measured_in_each_cell(make_run):
  """A cell is a number of words in the context and of distractors."""
  workdir, config = make_run(num_steps=2, eval_interval=2, saved_steps=[2])
  cells = [(24, 5), (96, 95)]

  measured = experiment.measure(workdir, config, cells, num_samples=8)

  measured_cells = []
  for record in measured["grid"]:
    measured_cells.append((record["length"], record["distractors"]))
  assert measured_cells == cells


@pytest.mark.full
def test_a_run_without_its_last_checkpoint_is_not_measured(make_run):
  workdir, config = make_run(
    num_steps=5, eval_interval=2, saved_steps=[2, 3, 4]
  )

  with pytest.raises(UserError, match="no complete checkpoint of step 5"):
    experiment.measure(
      workdir, config, cells=[experiment.REFERENCE], num_samples=8
    )


def read_files(directory):
  """Returns the contents of the JSON and JSONL files, by relative path."""
  paths = directory.rglob("*.json*")
  return {path.relative_to(directory): path.read_bytes() for path in paths}


def test_runs_side_by_side_can_write_the_data_at_once(tmp_path):
  """All runs of the experiment read the same files, which each may write."""
  dir_of_one_run = tmp_path / "alone"
  write_data(dir_of_one_run)
  shared_dir = tmp_path / "shared"
  shared_dir.mkdir()

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    fields_of_runs = list(pool.map(write_data, [shared_dir] * 4))

  # These config fields point to the files.
  assert fields_of_runs == [fields_of_runs[0]] * 4
  assert read_files(shared_dir) == read_files(dir_of_one_run)


def test_existing_data_is_used_again(tmp_path):
  first = write_data(tmp_path)

  second = write_data(tmp_path)

  assert first == second


def test_the_tokenizer_has_the_vocabulary_of_the_task(tmp_path):
  tokenizer = load_tokenizer(write_data(tmp_path)["data.tokenizer"])
  config = get_config("diff")

  assert tokenizer.vocab_size == len(task.WORDS)
  assert config.model.vocab_size >= tokenizer.vocab_size


def test_the_loss_covers_the_words_after_the_question(tmp_path):
  """An example is, for example, "k17:v3 n5 k90:v2 ? k90 v2 k17 v3"."""
  (run,) = grid.expand(
    "retrieval",
    grid.Grid(variants=("diff",), baseline="diff"),
    {"train.batch_size": 2},
  )
  config = grid.with_fields(run, write_data(tmp_path)).config
  tokenizer = load_tokenizer(config.data.tokenizer)

  batch = next(pipeline.training_batches(config))

  # A row has several examples, which are its segments.
  for row in range(2):
    for segment in range(1, batch["segment_ids"][row].max() + 1):
      in_segment = batch["segment_ids"][row] == segment
      targets = batch["targets"][row][in_segment]
      has_loss = batch["weights"][row][in_segment] > 0
      _, answer = tokenizer.decode(targets).split(" ? ")

      assert tokenizer.decode(targets[has_loss]) == answer
      # Eight pairs are asked for.
      assert re.fullmatch(r"k\d+ v\d+( k\d+ v\d+){7}", answer)


def test_larger_models_are_the_runs_of_ablations():
  """The grid for GPUs measures models of ablations, and trains none."""
  gpu_grid = grid.load("retrieval", "gpu").grids["gpu"]

  run, *_ = grid.expand("retrieval", gpu_grid, {})

  assert not experiment.LARGE.trains
  assert run.pretrained.config == run.config


@pytest.mark.full
def test_a_model_with_random_parameters_finds_no_needles(make_workdir):
  (run,) = grid.expand(
    "ablations", grid.Grid(variants=("diff",), baseline="diff"), {}
  )
  workdir, config = make_workdir("run", run.config, {"model.max_length": 1024})

  # There are six needles. Two are asked for.
  measured = experiment.measure_needles(
    workdir, config, needles=("6/2",), num_prompts=1
  )

  assert measured.keys() == {
    "accuracy_6/2",
    "answer_signed",
    "noise_signed",
    "answer_absolute",
    "noise_absolute",
  }
  assert measured["accuracy_6/2"] == 0
  # Random parameters attend to all tokens. The answer is one sentence of the
  # text, and the noise is the rest.
  assert 0 < measured["answer_absolute"] < 0.2
  assert 0.2 < measured["noise_absolute"] < 1


def test_the_plot_of_needles_has_all_architectures(make_results):
  def measured(run):
    numbers = {}
    for column in experiment.LARGE.metrics.values():
      numbers[column] = 0.5
    return numbers

  grid_results = make_results(
    "retrieval", experiment.LARGE, measured, chosen="gpu"
  )

  accuracy, _ = experiment.plot_needles(grid_results).axes

  _, labels = accuracy.get_legend_handles_labels()
  names = [label.removesuffix(", size 125m") for label in labels]
  assert names == ["Transformer", "DIFF", "DIFF V2"]
