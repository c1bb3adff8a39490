"""Progress of long work: lines on stderr, and a live bar on a terminal."""

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
      self._bar.update(self._task, completed=parts, rate=self._rate())

  def _rate(self) -> str:
    return f"{_short(self._tokens)} tokens, {_short(self._tokens / max(time.monotonic() - self._start, 1e-9))} tokens/s"

  def _say_now_and_then(self) -> None:
    wait = self._first
    while not self._ended.wait(wait):
      wait, share = self._interval, self._parts / self._total
      left = (
        (time.monotonic() - self._start) * (1 - share) / share if share else 0.0
      )
      clock = time.strftime("%H:%M:%S", time.gmtime(left)) if share else "?"
      say(f"{self._label}: {share:.1%}, {self._rate()}, {clock} left")


def _short(count: float) -> str:
  for unit in ("", "K", "M", "G"):
    if count < 1000:
      return f"{count:.3g}{unit}"
    count /= 1000
  return f"{count:.3g}T"
