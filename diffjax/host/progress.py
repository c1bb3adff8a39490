"""Progress of long work: lines on stderr, and a live bar on a terminal."""

import datetime
import sys
import threading
import time


def say(message: str) -> None:
  """One line for the user, on stderr like all progress."""
  print(f"diffjax: {message}", file=sys.stderr, flush=True)


class Progress:
  """Share done, tokens, tokens/s and time left.

  Args:
    label: What is being done.
    total: Parts in all.
    first: Seconds until the first line where stderr is no terminal.
    interval: Seconds between lines there. They come also while nothing is reported, as during a single long document.
  """

  def __init__(
    self, label: str, total: int, first: float = 2.0, interval: float = 10.0
  ):
    self._label, self._total, self._first, self._interval = (
      label,
      max(total, 1),
      first,
      interval,
    )
    self._start = time.monotonic()
    self._parts, self._tokens = 0.0, 0.0
    self._ended = threading.Event()
    self._bar = None
    if sys.stderr.isatty():
      from rich import console, progress

      columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
      )
      self._bar = progress.Progress(
        *columns, console=console.Console(stderr=True), transient=True
      )
      self._task = self._bar.add_task(label, total=self._total, rate="")

  def __enter__(self) -> "Progress":
    if self._bar:
      self._bar.start()
    else:
      threading.Thread(
        target=self._say_now_and_then, name="progress", daemon=True
      ).start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._ended.set()
    if self._bar:
      self._bar.stop()

  def update(self, parts: float, tokens: float) -> None:
    """Takes how far it has come since the start of this process."""
    self._parts, self._tokens = parts, tokens
    if self._bar:
      self._bar.update(self._task, completed=parts, rate=self._speed())

  def line(self) -> str:
    """Returns the progress as text, without the values not known yet."""
    elapsed = time.monotonic() - self._start
    share = self._parts / self._total
    values = [f"{self._label}: {share:.1%}"]
    if self._tokens:
      values += [f"{short_number(self._tokens)} tokens", self._speed()]
    if share:
      seconds_left = elapsed * (1 - share) / share
      values.append(f"{_clock(seconds_left)} left")
    else:
      values.append(f"{_clock(elapsed)} so far")
    return ", ".join(values)

  def _speed(self) -> str:
    if not self._tokens:
      return ""
    elapsed = max(time.monotonic() - self._start, 1e-9)
    return f"{short_number(self._tokens / elapsed)} tokens/s"

  def _say_now_and_then(self) -> None:
    wait = self._first
    while not self._ended.wait(wait):
      wait = self._interval
      say(self.line())


def short_number(number: float) -> str:
  """Returns a number with three digits and a unit, such as "12.5K"."""
  for unit in ("", "K", "M", "G"):
    # 999.5 and above would be rounded to 1e+03.
    if number < 999.5:
      return f"{number:.3g}{unit}"
    number /= 1000
  return f"{number:.3g}T"


def _clock(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))
