"""Continues text.

    python -m diffjax.generate --workdir=runs/tiny --prompt='def main('
    python -m diffjax.generate --workdir=runs/tiny --prompt='import ' --prompt='class ' --top_p=0.9

One prompt is answered on the terminal as it comes; several (--prompt repeated, of any lengths) are answered together. The answer ends where
the model ends its document, at --max_new_tokens, or before a --stop string. --temperature=0 takes the likeliest token each time.
With --tensor=4 four devices share a model that does not fit one.
"""

from __future__ import annotations

if __name__ == "__main__":
  # Before the other imports, which take a while: Ctrl-C ends them too.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from diffjax import allow_deprecated_call
from diffjax.cli import command
from diffjax.data.stop_strings import StopStrings, cut_at_stop, first_stop

if TYPE_CHECKING:
  from diffjax.data.tokenizer import Tokenizer

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory; local or gs://."
)
_STEP = flags.DEFINE_integer(
  "step", None, "Which checkpoint; the newest complete one by default."
)
_TENSOR = flags.DEFINE_integer(
  "tensor",
  1,
  "Devices that share the model, each with some of its heads.",
  lower_bound=1,
)
_WEIGHT_DTYPE = flags.DEFINE_enum(
  "weight_dtype",
  None,
  ["int8"],
  "Rounds the layers' matrices to 8 bits; needs qwix.",
)
_PROMPT = flags.DEFINE_multi_string(
  "prompt", [], "Text to continue; may be given several times."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
  "max_new_tokens", 200, "Most tokens to add."
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.8, "Divides the logits; 0 for the likeliest token."
)
_TOP_K = flags.DEFINE_integer(
  "top_k", 0, "Draw among the k likeliest tokens; 0 for all."
)
_TOP_P = flags.DEFINE_float(
  "top_p",
  1.0,
  "Draw among the likeliest tokens that together have this probability.",
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of the draws.", lower_bound=0, upper_bound=2**31 - 1
)
_STOP = flags.DEFINE_multi_string(
  "stop", [], "End before this text; may be given several times."
)

_REPLACEMENT_CHARACTER = "\ufffd"


def main() -> None:
  """Continues the prompts of the flags."""
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  if not _PROMPT.value:
    raise app.UsageError(
      "pass --prompt=TEXT: what to continue ('' for a document of the model's own)"
    )
  if "" in _STOP.value:
    raise app.UsageError("--stop must not be empty")
  from diffjax.host import runtime
  from diffjax.host.progress import say
  from diffjax.inference import trained
  from diffjax.inference.sampler import Sampler, row_capacity

  runtime.keep_compiled_programs()
  # Loading and compiling take seconds in which nothing else is printed.
  say(f"loading {_WORKDIR.value}")
  model = trained.load(
    _WORKDIR.value,
    _STEP.value,
    tensor=_TENSOR.value,
    weight_dtype=_WEIGHT_DTYPE.value,
  )
  tokenizer = model.tokenizer
  prompts = [tokenizer.encode_prompt(text) for text in _PROMPT.value]
  sampler = Sampler(
    model.model,
    model.params,
    batch_size=len(prompts),
    capacity=row_capacity(model.config.model, prompts, _MAX_NEW_TOKENS.value),
  )
  stop = None
  if _STOP.value:
    stop = StopStrings(tokenizer, prompts, _STOP.value)
  answers = [list[int]() for _ in prompts]
  printer = None
  if len(prompts) == 1:
    printer = StreamPrinter(
      _PROMPT.value[0], tokenizer, prompts[0], _STOP.value
    )
  for new in sampler.stream(
    prompts,
    _MAX_NEW_TOKENS.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    seed=_SEED.value,
    stop_ids=tokenizer.document_tokens.stop,
    stop=stop,
  ):
    for answer, tokens in zip(answers, new, strict=True):
      answer += tokens
    if printer is not None:
      printer.update(answers[0])
  if printer is not None:
    printer.finish(answers[0])
    return
  for number, prompt_text in enumerate(_PROMPT.value, 1):
    prompt, answer = prompts[number - 1], answers[number - 1]
    text = tokenizer.decode_after(prompt, answer)
    text = cut_at_stop(text, _STOP.value)
    print(f"--- {number} ---\n{prompt_text}{text}")


def longest_partial_stop(text: str, stops: Sequence[str]) -> int:
  """Returns the length of the longest suffix that begins a stop string."""
  longest = 0
  for stop in stops:
    for length in range(1, len(stop)):
      if text.endswith(stop[:length]):
        longest = max(longest, length)
  return longest


class StreamPrinter:
  """Prints a prompt and its answer while it grows.

  Held back until more tokens arrive: an incomplete UTF-8 character at the end,
  and text that could be the beginning of a stop string. The prompt is printed
  with the first tokens, so that nothing is printed if the model fails.
  """

  def __init__(
    self,
    prompt_text: str,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    stops: Sequence[str],
  ):
    self._prompt_text = prompt_text
    self._tokenizer = tokenizer
    self._prompt_ids = prompt_ids
    self._stops = stops
    self._num_printed = 0

  def update(self, answer: list[int]) -> None:
    """Prints what is new and certain."""
    text = self._tokenizer.decode_after(self._prompt_ids, answer)
    end = first_stop(text, self._stops)
    if end is None:
      text = text.rstrip(_REPLACEMENT_CHARACTER)
      end = len(text) - longest_partial_stop(text, self._stops)
    self._print(text[:end])

  def finish(self, answer: list[int]) -> None:
    """Prints the rest and a line break: no more tokens will come."""
    text = self._tokenizer.decode_after(self._prompt_ids, answer)
    self._print(cut_at_stop(text, self._stops))
    print(flush=True)

  def _print(self, answer_text: str) -> None:
    certain = self._prompt_text + answer_text
    sys.stdout.write(certain[self._num_printed :])
    sys.stdout.flush()
    self._num_printed = max(self._num_printed, len(certain))


# diffjax.generate() was the function that is diffjax.complete() today.
allow_deprecated_call(__name__)

if __name__ == "__main__":
  command.run(main, with_config=False)
