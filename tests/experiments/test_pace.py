"""How long the rest of a grid is expected to take."""

import datetime
import re

import pytest

from experiments import grid, pace
from experiments.pace import Pace

# Config fields of a small model.
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


def runs(variant, seeds, changes=None):
  """Returns runs of a small model, one for each seed.

  Args:
    variant: The variant of ablations.
    seeds: The seeds.
    changes: Further config fields, such as {"train.steps": 4}.
  """
  chosen = grid.Grid(variants=(variant,), baseline=variant, seeds=seeds)
  return grid.expand("ablations", chosen, {**SMALL, **(changes or {})})


def one_run(variant="diff", changes=None, seed=0):
  """Returns a run of a small model. Without changes it has 600 steps."""
  (run,) = runs(variant, (seed,), changes)
  return run


@pytest.fixture
def finished_pace():
  """The estimates after three runs of DIFF took 10, 20 and 50 seconds."""
  first, second, third = runs("diff", seeds=(1, 2, 3))
  finished = [(first, 50.0), (second, 10.0), (third, 20.0)]
  return Pace(finished, runs=[], slots=1, resumes=True)


def test_a_run_is_expected_to_take_the_median_of_its_shape(finished_pace):
  seconds, num_runs = finished_pace.expected(one_run())

  # The median of three runs, which took 10, 20 and 50 seconds.
  assert seconds == 20.0
  assert num_runs == 3


def test_learning_rates_and_lambda_init_do_not_change_the_time(finished_pace):
  """They are numbers, and change no shape of an array."""
  run = one_run("diff_lambda_0.8", {"optimizer.learning_rate": 0.1})

  seconds, num_runs = finished_pace.expected(run)

  # The median of the three finished runs.
  assert seconds == 20.0
  assert num_runs == 3


def test_a_run_with_twice_the_steps_takes_twice_as_long(finished_pace):
  # The finished runs have 600 steps, and their median is 20 seconds.
  run = one_run(changes={"train.steps": 1200})

  seconds, num_runs = finished_pace.expected(run)

  assert seconds == pytest.approx(2 * 20.0)
  # No finished run has as many steps.
  assert num_runs == 0


def test_a_run_of_another_shape_takes_time_in_proportion_to_flops(
  finished_pace,
):
  # The finished runs have a width of 32, and their median is 20 seconds.
  finished_flops = pace.training_flops(one_run().config)
  wider = one_run(changes={"model.ffn_dim": 64})

  seconds, num_runs = finished_pace.expected(wider)

  factor = pace.training_flops(wider.config) / finished_flops
  assert factor > 1
  assert seconds == pytest.approx(20.0 * factor)
  # No finished run has its shape.
  assert num_runs == 0


def test_nothing_is_expected_before_a_run_has_finished():
  run = one_run()
  estimates = Pace(finished=[], runs=[run], slots=1, resumes=True)

  assert estimates.expected(run) is None


def test_runs_that_train_nothing_are_expected_to_take_equally_long():
  diff = one_run("diff", {"train.steps": 0})
  transformer = one_run("transformer", {"train.steps": 0})
  estimates = Pace(
    finished=[(diff, 30.0)], runs=[transformer], slots=1, resumes=False
  )

  seconds, _ = estimates.expected(transformer)

  assert seconds == 30.0


def seconds_left(text):
  """Returns the seconds in a text such as "2 runs left, about 50 s"."""
  return int(re.search(r"about (\d+) s\b", text)[1])


@pytest.fixture
def short_runs():
  """Four runs that are expected to take 10 seconds each."""
  return runs("diff", seeds=(0, 1, 2, 3), changes={"train.steps": 100})


@pytest.fixture
def long_run():
  """A run that is expected to take 60 seconds."""
  return one_run(changes={"train.steps": 600}, seed=4)


@pytest.fixture
def runs_of_10_and_60_seconds():
  """A run as long as the short runs, and one as long as the long run."""
  finished_short_run = one_run(changes={"train.steps": 100}, seed=9)
  finished_long_run = one_run(changes={"train.steps": 600}, seed=9)
  return [(finished_short_run, 10.0), (finished_long_run, 60.0)]


def test_short_runs_fit_beside_a_long_one(
  clock, runs_of_10_and_60_seconds, short_runs, long_run
):
  """Two runs go on at a time. Short runs take 10 seconds, the long one 60."""
  first, second, third, fourth = short_runs
  todo = [long_run, first, second, third, fourth]
  estimates = Pace(runs_of_10_and_60_seconds, todo, slots=2, resumes=True)
  estimates.begin(long_run)
  estimates.begin(first)
  clock.now += 10

  text = estimates.end(first, seconds=10.0)

  left_of_long_run = 60 - 10
  left_of_short_runs = 3 * 10
  # The short runs follow each other beside the long one.
  assert seconds_left(text) == max(left_of_long_run, left_of_short_runs)


def test_a_long_run_that_starts_last_delays_the_end(
  clock, runs_of_10_and_60_seconds, short_runs, long_run
):
  """Two runs go on at a time. Short runs take 10 seconds, the long one 60."""
  first, second, third, fourth = short_runs
  todo = [first, second, third, fourth, long_run]
  estimates = Pace(runs_of_10_and_60_seconds, todo, slots=2, resumes=True)
  estimates.begin(first)
  estimates.begin(second)
  clock.now += 10

  text = estimates.end(first, seconds=10.0)

  # The second run ends now, too.
  third_beside_fourth = 10
  long_run_alone = 60
  assert seconds_left(text) == third_beside_fourth + long_run_alone


def test_runs_in_one_slot_take_the_sum_of_their_times(
  clock, runs_of_10_and_60_seconds, short_runs, long_run
):
  todo = [long_run, *short_runs]
  estimates = Pace(runs_of_10_and_60_seconds, todo, slots=1, resumes=True)
  estimates.begin(long_run)
  clock.now += 60

  text = estimates.end(long_run, seconds=60.0)

  # Four short runs of 10 seconds are left.
  assert seconds_left(text) == 4 * 10


@pytest.fixture
def evening(monkeypatch):
  """Sets the time of day to 22:00 on 25 November 2026."""

  class Evening(datetime.datetime):
    @classmethod
    def now(cls):
      return cls(2026, 11, 25, 22, 0)

  monkeypatch.setattr(pace.datetime, "datetime", Evening)


def test_there_is_no_text_after_the_last_run():
  run = one_run()
  estimates = Pace(finished=[], runs=[run], slots=1, resumes=True)
  estimates.begin(run)

  text = estimates.end(run, seconds=3000.0)

  assert text == ""


def test_a_run_of_unknown_time_tells_only_how_many_runs_are_left(clock):
  first, second = runs("diff", (0, 1))
  estimates = Pace(finished=[], runs=[first, second], slots=1, resumes=True)
  estimates.begin(first)
  clock.now += 3000

  # Another launcher has trained the run.
  text = estimates.end(first, seconds=None)

  assert text == "1 run left"


@pytest.mark.usefixtures("evening")
def test_a_text_tells_when_the_last_run_will_end(clock):
  """The first of three runs ends at 22:00 on Wednesday, 25 November."""
  minutes = 60
  first, second, third = runs("diff", (0, 1, 2))
  todo = [first, second, third]
  estimates = Pace(finished=[], runs=todo, slots=1, resumes=True)
  estimates.begin(first)
  clock.now += 65 * minutes

  text = estimates.end(first, seconds=65 * minutes)

  # Two runs of 65 minutes take 130 minutes, from 22:00 until 00:10.
  assert text == "2 runs left, about 2 h 10 min, until Thu 26 Nov 00:10"


def test_the_time_of_a_run_includes_its_earlier_starts(clock):
  first, second = runs("diff", (0, 1))
  estimates = Pace(finished=[], runs=[first, second], slots=1, resumes=True)
  estimates.begin(first)
  # This start takes 50 seconds, and an earlier one took 30.
  clock.now += 50

  text = estimates.end(first, seconds=50.0 + 30.0)

  assert seconds_left(text) == 50 + 30


@pytest.mark.usefixtures("evening")
def test_a_text_after_two_runs_uses_their_median(clock):
  """It is 22:00. The two runs took 4,000 and 3,000 seconds."""
  first, second, third = runs("diff", (0, 1, 2))
  estimates = Pace(
    finished=[(first, 4000.0)], runs=[second, third], slots=1, resumes=True
  )
  estimates.begin(second)
  clock.now += 3000

  text = estimates.end(second, seconds=3000.0)

  # Their median is 3,500 seconds, or 58 minutes.
  assert text == "1 run left, about 58 min, until 22:58"


def test_a_grid_that_is_stopped_before_its_first_run_has_no_estimate():
  # Five of the eight runs of the grid had finished before.
  todo = runs("diff", (0, 1, 2))
  estimates = Pace(finished=[], runs=todo, slots=1, resumes=True)

  text = estimates.stopped(total=8)

  assert text == "5 of 8 runs are done; the same command goes on"


@pytest.mark.parametrize(
  "resumes, minutes_left",
  [
    # The second run goes on after 5 of 10 minutes, and the third one takes 10.
    pytest.param(True, 5 + 10, id="resumes"),
    # The second run starts again, so both runs take 10 minutes.
    pytest.param(False, 10 + 10, id="starts again"),
  ],
)
def test_a_stopped_grid_tells_the_time_left(clock, resumes, minutes_left):
  """The grid is stopped in the middle of the second of three runs."""
  minutes = 60
  first, second, third = runs("diff", (0, 1, 2))
  todo = [first, second, third]
  estimates = Pace(finished=[], runs=todo, slots=1, resumes=resumes)
  estimates.begin(first)
  clock.now += 10 * minutes
  estimates.end(first, seconds=10 * minutes)
  estimates.begin(second)
  clock.now += 5 * minutes

  text = estimates.stopped(total=3)

  assert text == (
    f"1 of 3 runs are done; the rest would take about {minutes_left} min at"
    " this pace; the same command goes on"
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
def test_a_time_is_told_in_its_two_largest_units(seconds, words):
  assert pace.in_words(seconds) == words
