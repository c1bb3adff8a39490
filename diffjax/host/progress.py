"""Progress of long work: lines on stderr, and a live bar on a terminal."""

from __future__ import annotations

import datetime
import sys
import threading
import time
from typing import Any

# Avoids a division by zero right after the start.
_MIN_SECONDS = 1e-9


def say(message: str) -> None:
  """Prints a line for the user, on stderr."""
  print(f"diffjax: {message}", file=sys.stderr, flush=True)


class Progress:
  """A context that shows the progress of work: its share, speed and time left.

  On a terminal, this is a live bar. Otherwise, it is a line now and then.

  Example:
    with Progress("preparing c4", total=len(shards)) as progress:
      for done, shard in enumerate(shards, start=1):
        num_tokens += prepare(shard)
        progress.update(done, num_tokens)
  """

  def __init__(
    self, label: str, total: int, first: float = 2.0, interval: float = 10.0
  ):
    """Initializes the progress. Nothing is shown before the context is entered.

    Args:
      label: What is being done.
      total: Number of parts.
      first: Seconds until the first line.
      interval: Seconds between lines. A line is printed even if there was no
        update since the last one.
    """
    self._label = label
    self._total = max(total, 1)
    self._first = first
    self._interval = interval
    self._start = time.monotonic()
    self._parts = 0.0
    self._tokens = 0.0
    self._ended = threading.Event()
    self._bar: _Bar | None = None
    if sys.stderr.isatty():
      self._bar = _Bar(label, self._total)

  def __enter__(self) -> Progress:
    if self._bar is not None:
      self._bar.start()
    else:
      thread = threading.Thread(
        target=self._print_lines, name="progress", daemon=True
      )
      thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._ended.set()
    if self._bar is not None:
      self._bar.stop()

  def update(self, parts: float, tokens: float) -> None:
    """Sets the progress since the start of this process.

    Args:
      parts: Number of finished parts.
      tokens: Number of tokens in them.
    """
    self._parts = parts
    self._tokens = tokens
    if self._bar is not None:
      self._bar.update(parts, self._speed())

  def line(self) -> str:
    """Returns the progress as text.

    Example: "preparing c4: 25.0%, 2M tokens, 98.1K tokens/s, 0:01:02 left".
    Before the first update, the time so far replaces the time left.
    """
    elapsed = time.monotonic() - self._start
    share = self._parts / self._total
    values = [f"{self._label}: {share:.1%}"]
    if self._tokens > 0:
      values += [f"{short_number(self._tokens)} tokens", self._speed()]
    if share > 0:
      seconds_left = elapsed * (1 - share) / share
      values.append(f"{_clock(seconds_left)} left")
    else:
      values.append(f"{_clock(elapsed)} so far")
    return ", ".join(values)

  def _speed(self) -> str:
    """Returns the speed as text; "" if it is not known yet."""
    if self._tokens == 0:
      return ""
    elapsed = max(time.monotonic() - self._start, _MIN_SECONDS)
    return f"{short_number(self._tokens / elapsed)} tokens/s"

  def _print_lines(self) -> None:
    """Prints the progress at intervals, until the context ends."""
    timeout = self._first
    # `wait` returns False at the timeout, and True if the context has ended.
    while not self._ended.wait(timeout):
      timeout = self._interval
      say(self.line())


class _Bar:
  """A live progress bar on stderr, which must be a terminal."""

  def __init__(self, label: str, total: int):
    """Initializes the bar. It is shown from `start` to `stop`.

    Args:
      label: The text before the bar.
      total: Number of parts.
    """
    from rich import console, progress

    self._progress: Any = progress.Progress(
      progress.TextColumn("{task.description}"),
      progress.BarColumn(),
      progress.TaskProgressColumn(),
      progress.TextColumn("{task.fields[rate]}"),
      progress.TimeRemainingColumn(),
      console=console.Console(stderr=True),
      transient=True,
    )
    self._task = self._progress.add_task(label, total=total, rate="")

  def start(self) -> None:
    self._progress.start()

  def stop(self) -> None:
    self._progress.stop()

  def update(self, parts: float, rate: str) -> None:
    self._progress.update(self._task, completed=parts, rate=rate)


def short_number(number: float) -> str:
  """Returns a number with three digits and a suffix, such as "12.5K"."""
  for suffix in ("", "K", "M", "G"):
    # 999.5 and above would be rounded to 1e+03.
    if number < 999.5:
      return f"{number:.3g}{suffix}"
    number /= 1000
  return f"{number:.3g}T"


def _clock(seconds: float) -> str:
  """Returns a duration such as "0:01:02"."""
  return str(datetime.timedelta(seconds=round(seconds)))
