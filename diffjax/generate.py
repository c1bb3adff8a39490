"""Continues text.

    python -m diffjax.generate --workdir=runs/tiny --prompt='def main('
    python -m diffjax.generate --workdir=runs/tiny --prompt='import ' \\
      --prompt='class ' --top_p=0.9

A single prompt is answered on the terminal while the answer is generated.
Several prompts (--prompt repeated, of any lengths) are answered together. An
answer ends where the model ends its document, at --max_new_tokens, or before a
--stop string. --temperature=0 takes the likeliest token each time. With
--tensor=4, four devices share a model that does not fit one.
"""

from __future__ import annotations

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from diffjax import allow_deprecated_call
from diffjax.cli import command
from diffjax.data.stop_strings import StopStrings, cut_at_stop, first_stop

# These are imported when they are used, so that a mistyped flag is reported at
# once.
if TYPE_CHECKING:
  from diffjax.data.tokenizer import Tokenizer
  from diffjax.inference.trained import Trained

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
  """Continues the texts in --prompt."""
  _check_flags()
  from diffjax.host import runtime
  from diffjax.host.progress import say
  from diffjax.inference import trained

  runtime.keep_compiled_programs()
  # Loading and compiling take seconds in which nothing else is printed.
  say(f"loading {_WORKDIR.value}")
  model = trained.load(
    _WORKDIR.value,
    _STEP.value,
    tensor=_TENSOR.value,
    weight_dtype=_WEIGHT_DTYPE.value,
  )
  prompts = [model.tokenizer.encode_prompt(text) for text in _PROMPT.value]
  if len(prompts) == 1:
    _print_stream(model, prompts[0])
  else:
    _print_answers(model, prompts)


def _check_flags() -> None:
  """Raises app.UsageError if the flags are wrong."""
  if not _WORKDIR.value:
    raise app.UsageError("pass --workdir=DIR: the directory of a run")
  if not _PROMPT.value:
    raise app.UsageError(
      "pass --prompt=TEXT: what to continue ('' for a document of the model's"
      " own)"
    )
  if "" in _STOP.value:
    raise app.UsageError("--stop must not be empty")


def _stream(
  model: Trained, prompts: list[list[int]]
) -> Iterator[list[list[int]]]:
  """Generates answers to prompts with the options of the flags.

  Yields the next tokens of each answer, until all answers are complete.
  """
  from diffjax.inference.sampler import Sampler, row_capacity

  tokenizer = model.tokenizer
  sampler = Sampler(
    model.model,
    model.params,
    batch_size=len(prompts),
    capacity=row_capacity(model.config.model, prompts, _MAX_NEW_TOKENS.value),
  )
  stop = None
  if _STOP.value:
    stop = StopStrings(tokenizer, prompts, _STOP.value)
  yield from sampler.stream(
    prompts,
    _MAX_NEW_TOKENS.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    seed=_SEED.value,
    stop_ids=tokenizer.document_tokens.stop,
    stop=stop,
  )


def _print_stream(model: Trained, prompt: list[int]) -> None:
  """Prints the answer to a single prompt while it is generated."""
  printer = StreamPrinter(
    _PROMPT.value[0], model.tokenizer, prompt, _STOP.value
  )
  answer: list[int] = []
  for new_tokens in _stream(model, [prompt]):
    # There is one answer, since there is one prompt.
    answer += new_tokens[0]
    printer.update(answer)
  printer.finish(answer)


def _print_answers(model: Trained, prompts: list[list[int]]) -> None:
  """Prints the answers to several prompts when all are complete."""
  answers: list[list[int]] = [[] for _ in prompts]
  for new_tokens in _stream(model, prompts):
    for answer, tokens in zip(answers, new_tokens, strict=True):
      answer += tokens
  answered = zip(_PROMPT.value, prompts, answers, strict=True)
  for number, (prompt_text, prompt, answer) in enumerate(answered, start=1):
    text = model.tokenizer.decode_after(prompt, answer)
    text = cut_at_stop(text, _STOP.value)
    print(f"--- {number} ---\n{prompt_text}{text}")


def longest_partial_stop(text: str, stops: Sequence[str]) -> int:
  """Returns the length of the longest suffix that could become a stop string.

  Example: "see </" with the stop string "</s>" → 2, the length of "</"
  """
  longest = 0
  for stop in stops:
    for length in range(1, len(stop)):
      if text.endswith(stop[:length]):
        longest = max(longest, length)
  return longest


class StreamPrinter:
  """Prints a prompt and its answer while the answer grows.

  Text at the end that may still change is printed later: an incomplete UTF-8
  character, and the possible beginning of a stop string. The prompt is printed
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
    """Prints text that is new and can no longer change.

    Args:
      answer: all token ids of the answer so far.
    """
    text = self._tokenizer.decode_after(self._prompt_ids, answer)
    end = first_stop(text, self._stops)
    if end is None:
      # An incomplete UTF-8 character is decoded as replacement characters.
      text = text.rstrip(_REPLACEMENT_CHARACTER)
      end = len(text) - longest_partial_stop(text, self._stops)
    self._print(text[:end])

  def finish(self, answer: list[int]) -> None:
    """Prints the rest of the complete answer, and a line break.

    Args:
      answer: all token ids of the answer.
    """
    text = self._tokenizer.decode_after(self._prompt_ids, answer)
    self._print(cut_at_stop(text, self._stops))
    print(flush=True)

  def _print(self, answer_text: str) -> None:
    """Prints the part of the prompt and the answer that is not printed yet."""
    text = self._prompt_text + answer_text
    sys.stdout.write(text[self._num_printed :])
    sys.stdout.flush()
    # Printed text stays printed, even if the answer's text becomes shorter.
    self._num_printed = max(self._num_printed, len(text))


# diffjax.generate() was the function that is diffjax.complete() today.
allow_deprecated_call(__name__)

if __name__ == "__main__":
  command.run(main, with_config=False)
