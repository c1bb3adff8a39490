"""Progress of long work: lines on stderr, and a live bar on a terminal."""

import sys
import time


def say(message: str) -> None:
  """One line for the user, on stderr like all progress."""
  print(f"diffjax: {message}", file=sys.stderr, flush=True)


class Progress:
  """Share done, tokens, tokens/s and time left.

  Args:
    label: What is being done.
    total: Parts in all.
    interval: Seconds between lines where stderr is no terminal.
  """

  def __init__(self, label: str, total: int, interval: float = 10.0):
    self._label, self._total, self._interval = label, max(total, 1), interval
    self._start = self._last = time.monotonic()
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
      self._bar = progress.Progress(*columns, console=console.Console(stderr=True), transient=True)
      self._task = self._bar.add_task(label, total=self._total, rate="")

  def __enter__(self) -> "Progress":
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *exception: object) -> None:
    if self._bar:
      self._bar.stop()

  def update(self, parts: int, tokens: int) -> None:
    """Shows how far it has come since the start of this process."""
    now = time.monotonic()
    rate = tokens / max(now - self._start, 1e-9)
    shown = f"{_short(tokens)} tokens, {_short(rate)} tokens/s"
    if self._bar:
      self._bar.update(self._task, completed=parts, rate=shown)
    elif now - self._last >= self._interval:
      self._last = now
      left = (now - self._start) * (self._total - parts) / parts if parts else float("nan")
      clock = time.strftime("%H:%M:%S", time.gmtime(left)) if parts else "?"
      say(f"{self._label}: {100 * parts / self._total:.0f}%, {shown}, {clock} left")


def _short(count: float) -> str:
  for unit in ("", "K", "M", "G"):
    if count < 1000:
      return f"{count:.3g}{unit}"
    count /= 1000
  return f"{count:.3g}T"
