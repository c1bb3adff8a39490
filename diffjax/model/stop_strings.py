"""Strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from diffjax.data.tokenizer import Tokenizer


def first_stop(text: str, stops: Sequence[str]) -> int | None:
  """Returns where the first of the stop strings begins; None without one."""
  indices = [text.index(stop) for stop in stops if stop in text]
  return min(indices, default=None)


class StopStrings:
  """Says whether an answer has one of the stop strings.

  The sampler does not say which prompt it answers. After a prompt without text,
  the first word may lack the space that it has after others. If there are such
  prompts and others, the stop string must be found in both forms.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    stops: Sequence[str],
  ):
    self._tokenizer = tokenizer
    self._stops = stops
    # One prompt with text and one without, if there are.
    self._contexts = {bool(tokenizer.decode(ids)): ids for ids in prompts}

  def __call__(self, answer: list[int]) -> bool:
    for context in self._contexts.values():
      text = self._tokenizer.decode_after(context, answer)
      if first_stop(text, self._stops) is None:
        return False
    return True
