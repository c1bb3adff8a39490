"""Strings that end an answer."""

from __future__ import annotations

from collections.abc import Sequence

from diffjax.data.abstract_tokenizer import Tokenizer


def first_stop(text: str, stops: Sequence[str]) -> int | None:
  """Returns where the first stop string in a text begins, or None."""
  first = None
  for stop in stops:
    index = text.find(stop)
    if index >= 0 and (first is None or index < first):
      first = index
  return first


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
  """Returns the text before the first stop string, or the whole text."""
  end = first_stop(text, stops)
  if end is None:
    return text
  return text[:end]


class StopStrings:
  """A condition that ends an answer: its text has a stop string.

  The same condition is used for the answers to several prompts, because the
  sampler does not say which prompt an answer belongs to. The text of an answer
  depends only on whether its prompt has text: if it has none, the first word
  may lack the space that it has otherwise. If there are prompts of both kinds,
  both texts of the answer must have a stop string.

  Example:
    has_stop = StopStrings(tokenizer, prompts, ["\nQuestion:"])
    if has_stop(answer):
      ...
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    stops: Sequence[str],
  ):
    """Keeps one prompt with text and one without, if there are such prompts.

    Args:
      tokenizer: Decodes the answers.
      prompts: The token ids of each prompt.
      stops: The stop strings.
    """
    self._tokenizer = tokenizer
    self._stops = stops
    prompts_with_text = []
    prompts_without_text = []
    for prompt in prompts:
      if tokenizer.has_text(prompt):
        prompts_with_text.append(prompt)
      else:
        prompts_without_text.append(prompt)
    # The text of an answer depends only on whether its prompt has text, so one
    # prompt of each kind is enough.
    self._prompts = prompts_with_text[:1] + prompts_without_text[:1]

  def __call__(self, answer: list[int]) -> bool:
    """Returns True if the text of the answer has a stop string.

    It must have one whichever prompt comes before the answer.
    """
    for prompt in self._prompts:
      text = self._tokenizer.decode_after(prompt, answer)
      if first_stop(text, self._stops) is None:
        return False
    return True
