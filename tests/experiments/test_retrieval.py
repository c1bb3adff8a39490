"""Associative recall: the pair asked for stands once, where the example says, and questions look as in training."""

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
from experiments import grid, plots, results
from experiments.retrieval import experiment, task


def test_examples():
  rng = np.random.default_rng(0)
  for distractors, fillers in ((0, 0), (5, 3), (40, 10)):
    example = task.make_example(
      rng, asked=3, distractors=distractors, fillers=fillers
    )
    context = example.context
    keys = [word.partition(":")[0] for word in context if word.startswith("k")]
    assert context[-1] == "?" and len(context) == 3 + distractors + fillers + 1
    assert (
      len(set(keys)) == len(keys) == 3 + distractors
      and sum(word.startswith("n") for word in context) == fillers
    )
    for number, place in enumerate(example.places):
      assert context[place] == ":".join(
        example.answer[2 * number : 2 * number + 2]
      )


def test_questions_of_every_cell(tmp_path):
  """Prompts have one length and end with a key; the position is that of its pair, the only one with that key."""
  tokenizer = load_tokenizer(
    task.write(tmp_path, 4, task.Training())["data.tokenizer"]
  )
  for length, distractors in experiment._CELLS:
    tokens, wanted, places = experiment._questions(
      tokenizer, length, distractors
    )
    assert tokens.shape == (experiment._SAMPLES, length + 3)
    for row, value, place in zip(tokens, wanted, places, strict=True):
      context, key = (
        [task.WORDS[token] for token in row[1:-2]],
        task.WORDS[row[-1]],
      )
      assert task.WORDS[row[-2]] == "?" and [context[place - 1]] == [
        word for word in context if word.startswith(f"{key}:")
      ]
      assert (
        key not in context
        and context[place - 1] == f"{key}:{task.WORDS[value]}"
      )
  assert experiment._REFERENCE in experiment._CELLS


def test_shares_of_a_known_attention():
  weights = np.zeros((2, 8))
  weights[0, [0, 2, 4, 6, 7]] = [
    0.1,
    0.5,
    -0.1,
    0.1,
    0.2,
  ]  # separator, the pair, another word, "?", the key
  weights[1, [0, 3, 4, 7]] = [0.0, 0.7, -0.1, 0.2]
  found = experiment._shares(weights, np.array([2, 3]))
  assert found["answer_signed"] == pytest.approx(1.2 / 1.6) and found[
    "noise_signed"
  ] == pytest.approx(-0.2 / 1.6)
  assert found["answer_absolute"] == pytest.approx(1.2 / 2.0) and found[
    "noise_absolute"
  ] == pytest.approx(0.2 / 2.0)


@pytest.mark.full
@pytest.mark.parametrize("variant", ["transformer", "diff", "diff_v2"])
def test_a_run_that_was_stopped_is_measured_as_others(
  make_workdir, monkeypatch, tmp_path, variant
):
  """A resumed run has one more checkpoint, which does not count; a run that lacks a checkpoint is not measured."""
  monkeypatch.setattr(experiment, "_CELLS", ((24, 5), experiment._REFERENCE))
  monkeypatch.setattr(experiment, "_SAMPLES", 8)
  run = grid.expand("retrieval", grid.Grid((variant,), variant), {})[0]
  fields = {
    "data.tokenizer": task.write(tmp_path / "words", 4, task.Training())[
      "data.tokenizer"
    ]
  }
  fields |= {"train.steps": 5, "eval.interval": 2, "optimizer.warmup_steps": 1}
  workdir, config = make_workdir("run", run.config, fields)
  params = load(workdir).params
  with Checkpoints(workdir, keep=9) as checkpoints:
    for step in (2, 3, 4, 5):
      if step == 5:
        checkpoints.wait()
        with pytest.raises(UserError, match="no complete checkpoint of step 5"):
          experiment.measure(workdir, config)
      checkpoints.save(
        step, {"params": params}, data_state={}, config=config.to_dict()
      )
      checkpoints.wait()
  found = experiment.measure(workdir, config)
  assert [row["step"] for row in found["curve"]] == [2, 4, 5]
  assert [(row["length"], row["distractors"]) for row in found["grid"]] == [
    (24, 5),
    experiment._REFERENCE,
  ]


def test_data_is_written_whole_by_whoever_is_first(tmp_path):
  """Also beside the remains of a killed process, and with several processes at once."""
  wanted = task.write(tmp_path / "alone", 40, task.Training())
  (tmp_path / "several").mkdir()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    found = list(
      pool.map(
        lambda _: task.write(tmp_path / "several", 40, task.Training()),
        range(4),
      )
    )
  assert [path.name for path in (tmp_path / "several").iterdir()] == [
    pathlib.Path(wanted["data.tokenizer"]).parent.name
  ]
  for field in wanted:
    one, other = (
      pathlib.Path(places[field].removeprefix("jsonl:"))
      for places in (wanted, found[0])
    )
    assert one.read_bytes() == other.read_bytes() and all(
      places == found[0] for places in found
    )


def test_training_learns_the_words_after_the_question(tmp_path):
  run = grid.expand(
    "retrieval", grid.Grid(("diff",), "diff"), {"train.batch_size": 2}
  )[0]
  run = grid.with_fields(run, task.write(tmp_path, 40, task.Training()))
  tokenizer = load_tokenizer(run.config.data.tokenizer)
  assert run.config.model.vocab_size >= tokenizer.vocab_size == len(task.WORDS)
  batch = next(pipeline.training_batches(run.config))
  question = tokenizer.encode("?")[0]
  for tokens, targets, segments, weights in zip(
    *(batch[key] for key in ("tokens", "targets", "segment_ids", "weights")),
    strict=True,
  ):
    for segment in range(1, segments.max() + 1):
      mine = segments == segment
      learnt = tokenizer.decode(targets[mine & (weights > 0)])
      (start,) = np.flatnonzero(mine & (tokens == question))
      assert (
        len(learnt.split()) == 2 * task.ASKED
        and np.flatnonzero(mine & (weights > 0))[0] == start
      )
  assert task.write(tmp_path, 40, task.Training()) == {
    field: getattr(run.config.data, field[5:])
    for field in ("data.source", "data.validation_source", "data.tokenizer")
  }


@pytest.mark.full
def test_larger_models_are_asked_for_needles(
  make_workdir, make_results, monkeypatch, tmp_path
):
  """Measured on ablations' runs, which are trained there: all numbers that table and plot want, from the suites' own figures."""
  run = grid.expand(
    "retrieval", grid.load("retrieval", "gpu").grids["gpu"], {}
  )[0]
  assert run.pretrained.config == run.config and not experiment.LARGE.trains
  workdir, config = make_workdir(
    "run",
    grid.expand("ablations", grid.Grid(("diff",), "diff"), {})[0].config,
    {"model.max_length": 1024},
  )
  monkeypatch.setattr(experiment, "_PAIRS", ("6/2",))
  monkeypatch.setattr(experiment, "_PROMPTS", 1)
  for module, name in ((attention, "AttentionShares"), (needle, "Needle")):
    small = functools.partial(getattr(module, name), batch_tokens=1024)
    monkeypatch.setattr(module, name, small)
  found = experiment.measure_needles(workdir, config)
  assert found["accuracy_6/2"] == 0, "the parameters are random"
  assert 0 < found["answer_absolute"] < 0.2 < found["noise_absolute"] < 1
  monkeypatch.undo()
  every = lambda run: {
    **found,
    **{f"accuracy_{pair}": 0.5 for pair in experiment._PAIRS},
  }
  made = make_results("retrieval", experiment.LARGE, every, "gpu")
  plots.save(experiment.plot_needles(made), tmp_path)
  assert (tmp_path / "plot.png").stat().st_size > 10_000
  assert "| diff,size=125m | " in results.table(experiment.LARGE, made)
