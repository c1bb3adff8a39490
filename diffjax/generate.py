"""Continues text.

    python -m diffjax.generate --workdir=runs/tiny --prompt='def main('
    python -m diffjax.generate --workdir=runs/tiny --prompt='import ' --prompt='class ' --top_p=0.9

One prompt is answered on the terminal as it comes; several (--prompt repeated, of any lengths) are answered together. The answer ends where
the model ends its document, at --max_new_tokens, or before a --stop string. --temperature=0 takes the likeliest token each time.
With --tensor=4 four devices share a model that does not fit one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from diffjax import command

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

# Room is made in steps of so many tokens, so that a program compiled once serves many prompts.
_ROOM = 256


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
  from diffjax.model.sampler import Sampler
  from diffjax.progress import say
  from diffjax.training import runtime, trained

  runtime.keep_compiled_programs()
  # Loading and compiling take seconds in which nothing else is printed.
  say(f"loading {_WORKDIR.value}")
  model = trained.load(
    _WORKDIR.value,
    _STEP.value,
    tensor=_TENSOR.value,
    weight_dtype=_WEIGHT_DTYPE.value,
  )
  tokenizer, limit = model.tokenizer, model.config.model.max_length
  prompts = [
    [tokenizer.separator, *map(int, tokenizer.encode(prompt))]
    for prompt in _PROMPT.value
  ]
  needed = max(map(len, prompts)) + _MAX_NEW_TOKENS.value
  # The sampler refuses prompts beyond the model's limit.
  sampler = Sampler(
    model.model,
    model.params,
    batch_size=len(prompts),
    capacity=min(limit, -(-needed // _ROOM) * _ROOM),
  )
  stop = (
    (lambda ids: _cut(tokenizer.decode(ids), _STOP.value) is not None)
    if _STOP.value
    else None
  )
  options = dict(
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    seed=_SEED.value,
  )
  answers = [list[int]() for _ in prompts]
  show = (
    _printer(_PROMPT.value[0], tokenizer, _STOP.value)
    if len(prompts) == 1
    else None
  )
  for new in sampler.stream(
    prompts,
    _MAX_NEW_TOKENS.value,
    stop_ids=[tokenizer.separator],
    stop=stop,
    **options,  # type: ignore[arg-type]
  ):
    for answer, tokens in zip(answers, new, strict=True):
      answer += tokens
    if show:
      show(answers[0], False)
  if show:
    show(answers[0], True)
    return
  for number, (prompt, answer) in enumerate(
    zip(_PROMPT.value, answers, strict=True), 1
  ):
    text = tokenizer.decode(answer)
    print(f"--- {number} ---\n{prompt}{text[: _cut(text, _STOP.value)]}")


def _cut(text: str, stops: Sequence[str]) -> int | None:
  """The place where the first of the stop strings begins; None if there is none."""
  return min((text.index(stop) for stop in stops if stop in text), default=None)


def _printer(
  prompt: str, tokenizer: Tokenizer, stops: Sequence[str]
) -> Callable[[list[int], bool], None]:
  """A function that prints the prompt and the answer as far as it is certain: no half characters, no text that may begin a stop string.

  The prompt comes with the first tokens, and not at all if the model cannot be asked for any.
  """
  printed = 0

  def show(answer: list[int], is_whole: bool) -> None:
    nonlocal printed
    text = tokenizer.decode(answer)
    end = _cut(text, stops)
    if end is None and not is_whole:
      text = text.rstrip("\ufffd")
      end = len(text) - max(
        (
          size
          for stop in stops
          for size in range(1, len(stop))
          if text.endswith(stop[:size])
        ),
        default=0,
      )
    certain = prompt + text[:end]
    sys.stdout.write(certain[printed:])
    sys.stdout.flush()
    printed = max(printed, len(certain))
    if is_whole:
      print(flush=True)

  return show


if __name__ == "__main__":
  command.run(main, with_config=False)
