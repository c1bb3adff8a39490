"""How long the rest of a grid takes: by the runs of the same shape, in slots, and said in words."""

import datetime
import re

import pytest

from experiments import grid, pace
from experiments.pace import Pace

FIELDS = {
  "model.num_layers": 1,
  "model.embed_dim": 32,
  "model.head_dim": 8,
  "model.ffn_dim": 32,
  "train.batch_size": 2,
}


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still; clock.now is its seconds."""

  class Clock:
    now = 1000.0

  monkeypatch.setattr(pace.time, "monotonic", lambda: Clock.now)
  return Clock


def runs(variants, seeds=(0, 1, 2, 3), name="ablations", **fields):
  changes = {
    **FIELDS,
    **{field.replace("__", "."): value for field, value in fields.items()},
  }
  return grid.expand(
    name, grid.Grid(tuple(variants), variants[0], tuple(seeds)), changes
  )


def seconds_left(text):
  number, unit = re.search(r"about (\d+) (s|min)\b", text).groups()
  return int(number) * {"s": 1, "min": 60}[unit]


def test_a_run_takes_the_median_of_its_shape():
  """Learning rates, λ_init and seeds change nothing; the number of steps and the size of the model do."""
  first, *others = runs(["diff"])
  model = Pace(
    [
      (run, seconds)
      for run, seconds in zip(others, (50.0, 10.0, 20.0), strict=True)
    ],
    [first],
    1,
    True,
  )
  (same,) = runs(["diff_lambda_0.8"], (7,), optimizer__learning_rate=0.1)
  assert model.expected(first) == model.expected(same) == (20.0, 3)
  (longer,) = runs(["diff"], (0,), train__steps=1200)
  assert model.expected(longer) == (pytest.approx(40.0), 0), "by FLOPs"
  (wider,) = runs(["diff"], (0,), model__ffn_dim=64)
  assert model.expected(wider)[0] == pytest.approx(
    20.0 * pace.training_flops(wider.config) / pace.training_flops(first.config)
  )
  assert Pace([], [first], 1, True).expected(first) is None


def test_the_rest_is_that_of_the_slots(clock):
  """Two at a time: a long run decides, and the others fit beside it."""
  short, long = runs(["diff"]), runs(["diff"], (4,), train__steps=3000)
  finished = [(run, 10.0) for run in runs(["diff"], (9,))] + [
    (run, 60.0) for run in runs(["diff"], (9,), train__steps=3000)
  ]
  assert seconds_left(begun(finished, [*long, *short], 2, clock)) == 50
  assert seconds_left(begun(finished, [*short, *long], 2, clock)) == 70, (
    "it begins last"
  )
  assert seconds_left(begun(finished, [*long, *short], 1, clock)) == 40


def begun(finished, todo, slots, clock):
  """The text after the first run ended, `slots` having begun together. The first one takes what is expected or, beside others, 10 s."""
  model = Pace(finished, todo, slots, True)
  for run in todo[:slots]:
    model.begin(run)
  ended = (
    todo[0]
    if slots == 1
    else next(run for run in todo[:slots] if run.config.train.steps == 600)
  )
  clock.now += 60.0 if slots == 1 else 10.0
  return model.end(ended, 0.0)


def test_what_is_said_after_a_run(clock, monkeypatch):
  class Now(datetime.datetime):
    @classmethod
    def now(cls):
      return cls(2026, 11, 25, 22, 0)

  monkeypatch.setattr(pace.datetime, "datetime", Now)
  todo = runs(["diff"])
  model = Pace([], todo, 1, True)
  said = []
  for run in todo:
    model.begin(run)
    clock.now += 3000
    said.append(
      model.end(
        run, None if run.seed == 0 else 4000.0 if run.seed == 1 else 0.0
      )
    )
  assert (
    said
    == [
      "3 runs left",  # another launcher trained the first, and nobody knows how long
      "2 runs left, about 2 h 13 min, until Thu 26 Nov 00:13",  # the second took 4,000 s with an earlier start
      "1 run left, about 58 min, until 22:58",
      "",
    ]
  )


@pytest.mark.parametrize("resumes, rest", [(True, "10 min"), (False, "15 min")])
def test_what_is_said_when_a_grid_is_stopped(clock, resumes, rest):
  """A run that goes on where it was has its first part behind it; one that starts again has not."""
  todo = runs(["diff"])[:3]
  model = Pace([], todo, 1, resumes)
  assert model.stopped(8) == "5 of 8 runs are done; the same command goes on"
  model.begin(todo[0])
  clock.now += 450
  model.end(todo[0], 450.0)
  model.begin(todo[1])
  clock.now += 300
  assert (
    model.stopped(8)
    == f"6 of 8 runs are done; the rest would take about {rest} at this pace; the same command goes on"
  )


def test_words():
  assert [
    pace.in_words(seconds)
    for seconds in (0.4, 89, 90, 3569, 3599, 7260, 2 * 86400, 200_000)
  ] == [
    "0 s",
    "89 s",
    "2 min",
    "59 min",
    "1 h 0 min",
    "2 h 1 min",
    "2 days 0 h",
    "2 days 7 h",
  ]


def test_runs_without_steps():
  """Of an experiment that trains by itself: they count as equally long."""
  one, other = runs(["diff", "transformer"], (0,), train__steps=0)
  assert Pace([(one, 30.0)], [other], 1, False).expected(other) == (30.0, 0)
