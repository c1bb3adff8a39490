"""How long the rest of a grid is expected to take."""

import datetime
import re

import pytest

from experiments import grid, pace
from experiments.pace import Pace

SMALL = {
  "model.num_layers": 1,
  "model.embed_dim": 32,
  "model.head_dim": 8,
  "model.ffn_dim": 32,
  "train.batch_size": 2,
}


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands still: `clock.now` is its time in seconds."""

  class Clock:
    now = 1000.0

  def monotonic():
    return Clock.now

  monkeypatch.setattr(pace.time, "monotonic", monotonic)
  return Clock


def runs(variant, seeds, **fields):
  """Returns runs of a small model: train__steps=4 sets train.steps."""
  changes = dict(SMALL)
  for name, value in fields.items():
    changes[name.replace("__", ".")] = value
  return grid.expand(
    "ablations", grid.Grid((variant,), variant, seeds), changes
  )


def one_run(variant="diff", **fields):
  """Returns the run of seed 0."""
  (run,) = runs(variant, (0,), **fields)
  return run


@pytest.fixture
def finished_pace():
  """A pace after three runs of DIFF took 10, 20 and 50 seconds."""
  finished = zip(runs("diff", (1, 2, 3)), (50.0, 10.0, 20.0), strict=True)
  return Pace(finished, [], slots=1, resumes=True)


def test_a_run_takes_the_median_of_its_shape(finished_pace):
  assert finished_pace.expected(one_run()) == (20.0, 3)


def test_learning_rates_and_lambda_init_do_not_change_the_shape(finished_pace):
  run = one_run("diff_lambda_0.8", optimizer__learning_rate=0.1)

  assert finished_pace.expected(run) == (20.0, 3)


def test_a_run_with_twice_the_steps_takes_twice_as_long(finished_pace):
  run = one_run(train__steps=1200)

  assert finished_pace.expected(run) == (pytest.approx(40.0), 0)


def test_a_run_of_another_shape_takes_its_share_of_flops(finished_pace):
  wider = one_run(model__ffn_dim=64)

  seconds, num_runs = finished_pace.expected(wider)

  factor = pace.training_flops(wider.config) / pace.training_flops(
    one_run().config
  )
  assert factor > 1
  assert seconds == pytest.approx(20.0 * factor)
  assert num_runs == 0


def test_nothing_is_expected_before_a_run_has_finished():
  run = one_run()

  assert Pace([], [run], slots=1, resumes=True).expected(run) is None


def test_runs_without_steps_take_equally_long():
  transformer = one_run("transformer", train__steps=0)
  finished = [(one_run(train__steps=0), 30.0)]

  estimates = Pace(finished, [transformer], slots=1, resumes=False)

  assert estimates.expected(transformer) == (30.0, 0)


def seconds_left(text):
  """Returns the seconds in a text such as "2 runs left, about 50 s"."""
  number, unit = re.search(r"about (\d+) (s|min)\b", text).groups()
  return int(number) * {"s": 1, "min": 60}[unit]


@pytest.fixture
def short_runs():
  """Four runs that are expected to take 10 seconds."""
  return runs("diff", (0, 1, 2, 3))


@pytest.fixture
def long_run():
  """A run that is expected to take 60 seconds."""
  (run,) = runs("diff", (4,), train__steps=3000)
  return run


@pytest.fixture
def finished():
  """A short and a long run that have finished."""
  (short,) = runs("diff", (9,))
  (long,) = runs("diff", (9,), train__steps=3000)
  return [(short, 10.0), (long, 60.0)]


def test_short_runs_fit_beside_a_long_one(
  clock, finished, short_runs, long_run
):
  todo = [long_run, *short_runs]
  slots = Pace(finished, todo, slots=2, resumes=True)
  slots.begin(long_run)
  slots.begin(short_runs[0])
  clock.now += 10

  text = slots.end(short_runs[0], 0.0)

  # The long run has 50 seconds left. The others take 30 seconds in its time.
  assert seconds_left(text) == 50


def test_a_long_run_that_starts_last_delays_the_end(
  clock, finished, short_runs, long_run
):
  todo = [*short_runs, long_run]
  slots = Pace(finished, todo, slots=2, resumes=True)
  slots.begin(short_runs[0])
  slots.begin(short_runs[1])
  clock.now += 10

  text = slots.end(short_runs[0], 0.0)

  # Two short runs end after 10 seconds. Then the long one starts.
  assert seconds_left(text) == 70


def test_runs_in_one_slot_take_the_sum_of_their_times(
  clock, finished, short_runs, long_run
):
  todo = [long_run, *short_runs]
  slots = Pace(finished, todo, slots=1, resumes=True)
  slots.begin(long_run)
  clock.now += 60

  text = slots.end(long_run, 0.0)

  assert seconds_left(text) == 40


def test_after_a_run_the_rest_and_its_end_are_told(clock, monkeypatch):
  class Evening(datetime.datetime):
    @classmethod
    def now(cls):
      return cls(2026, 11, 25, 22, 0)

  monkeypatch.setattr(pace.datetime, "datetime", Evening)
  todo = runs("diff", (0, 1, 2, 3))
  # The time of the first run is not known, since another launcher trained it.
  # The second took 4,000 s with an earlier start, and the others 3,000 s.
  seconds_of_runs = [None, 4000.0, 0.0, 0.0]
  told = []
  estimates = Pace([], todo, slots=1, resumes=True)

  for run, seconds in zip(todo, seconds_of_runs, strict=True):
    estimates.begin(run)
    clock.now += 3000
    told.append(estimates.end(run, seconds))

  assert told == [
    "3 runs left",
    "2 runs left, about 2 h 13 min, until Thu 26 Nov 00:13",
    "1 run left, about 58 min, until 22:58",
    "",
  ]


def test_a_grid_that_is_stopped_early_has_no_estimate():
  todo = runs("diff", (0, 1, 2))
  estimates = Pace([], todo, slots=1, resumes=True)

  assert estimates.stopped(8) == (
    "5 of 8 runs are done; the same command goes on"
  )


@pytest.mark.parametrize(
  "resumes, time_left",
  [
    # 300 of 450 s of the second run are done.
    pytest.param(True, "10 min", id="resumes"),
    pytest.param(False, "15 min", id="starts again"),
  ],
)
def test_a_stopped_grid_tells_the_time_left(clock, resumes, time_left):
  todo = runs("diff", (0, 1, 2))
  estimates = Pace([], todo, slots=1, resumes=resumes)
  estimates.begin(todo[0])
  clock.now += 450
  estimates.end(todo[0], 450.0)
  estimates.begin(todo[1])
  clock.now += 300

  assert estimates.stopped(8) == (
    f"6 of 8 runs are done; the rest would take about {time_left} at this pace;"
    " the same command goes on"
  )


@pytest.mark.parametrize(
  "seconds, words",
  [
    (0.4, "0 s"),
    (89, "89 s"),
    (90, "2 min"),
    (3569, "59 min"),
    (3599, "1 h 0 min"),
    (7260, "2 h 1 min"),
    (2 * 86_400, "2 days 0 h"),
    (200_000, "2 days 7 h"),
  ],
)
def test_times_are_told_in_two_units(seconds, words):
  assert pace.in_words(seconds) == words
