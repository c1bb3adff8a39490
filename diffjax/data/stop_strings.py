"""Strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from diffjax.data.abstract_tokenizer import Tokenizer


def first_stop(text: str, stops: Sequence[str]) -> int | None:
  """Returns where the first of the stop strings begins; None without one."""
  indices = [text.index(stop) for stop in stops if stop in text]
  return min(indices, default=None)


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
  """Returns the text before the first of the stop strings."""
  end = first_stop(text, stops)
  return text if end is None else text[:end]


class StopStrings:
  """Returns True once an answer has a stop string after every kind of prompt.

  The sampler does not say which prompt it answers. After a prompt without text,
  the first word may lack the space that it has after others. If there are
  prompts of both kinds, the stop string must be found in both forms.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    stops: Sequence[str],
  ):
    self._tokenizer = tokenizer
    self._stops = stops
    with_text = [ids for ids in prompts if tokenizer.has_text(ids)]
    without_text = [ids for ids in prompts if not tokenizer.has_text(ids)]
    # One prompt of each kind stands for all.
    self._prompts = with_text[:1] + without_text[:1]

  def __call__(self, answer: list[int]) -> bool:
    for prompt in self._prompts:
      text = self._tokenizer.decode_after(prompt, answer)
      if first_stop(text, self._stops) is None:
        return False
    return True
