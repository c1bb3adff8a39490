"""Accuracy on questions with a final answer, in the form of GSM8K or MATH, from local JSONL files.

A record has a "question" or "problem", and an "answer" or "solution" that holds the final answer: behind "####" (GSM8K), in \\boxed{…}
(MATH), or alone (MATH-500, AIME). If it has both, the answer is compared and the solution is demonstrated. The model writes greedily.
`methods/final_answer.py` extracts its final answer and compares it, with math-verify (the extra `eval`). The paper gives the mean of eight such benchmarks and not their
prompts. The choices here:

- A question stands in the template that the model was fine-tuned with (config.data.prompt_template), by default "Question: …\\nAnswer:\\n".
  Two models that are compared are both asked in the first one's. The default is zero-shot, as for models of the paper's second stage. For
  a model that was not fine-tuned, `shots` demonstrations of another file (the training split) stand before every question: solutions as
  they are written there, with a blank line between them.
- An answer ends where the model ends the document, at `new_tokens`, or where the model begins another question by itself.
- The mean over files weights every file alike, as a mean of benchmarks does. `ended` is the share of answers that did not need more than
  `new_tokens`; where it is low, raise `new_tokens` (the paper's second stage writes up to 16K).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from etils import epath

from diffjax.config import UserError, at_least, field
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.measurement import Measurement, proportion
from diffjax.evals.methods import equivalence, jsonl
from diffjax.evals.methods.final_answer import extract, reference, same
from diffjax.evals.report.results import TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

_TAIL = 64  # tokens looked at for the beginning of another question


class Question(NamedTuple):
  """A record.

  Attributes:
    place: "FILE:LINE".
    text: The question.
    solution: The solution.
    answer: The final answer in it.
  """

  place: str
  text: str
  solution: str
  answer: str


class _Data(NamedTuple):
  """Files and their prompts."""

  files: list[tuple[str, list[Question]]]
  prompts: list[list[list[int]]]
  capacity: int


@dataclasses.dataclass(frozen=True)
class Mathematics(Suite[_Data]):
  """Accuracy of the final answers to mathematical questions.

  For each file, "accuracy" is the fraction of questions whose final answer is
  right, and "ended" is the fraction of answers that needed no more than
  `new_tokens` tokens. With several files, the file "mean" is the mean accuracy
  of the files. The units are questions.
  """

  name: ClassVar[str] = "mathematics"
  table: ClassVar[TableSpec] = TableSpec(
    unit="questions",
    notes=(
      "accuracy: share of the questions with the right final answer",
      "ended: share of the answers that needed no more than new_tokens",
    ),
  )

  files: str = field(
    "",
    "JSONL files with commas between. Each is a benchmark, named by its file.",
  )
  questions: int = field(
    0, "Questions of each file, its first ones. 0 for all.", bound=at_least(0)
  )
  shots: int = field(
    0, "Demonstrations before every question.", bound=at_least(0)
  )
  shots_file: str = field(
    "", "JSONL file whose first records are the demonstrations."
  )
  new_tokens: int = field(
    512, "Tokens that the model writes, at most.", bound=at_least(1)
  )
  batch_tokens: int = field(
    32_768, "Tokens of a batch, which has at least one row."
  )

  def load(self, trained: Trained) -> _Data:
    """Reads the files and makes the prompts."""
    paths = [path.strip() for path in self.files.split(",") if path.strip()]
    _check(self, paths)
    equivalence.start()
    template = trained.config.data.prompt_template
    files = [
      (epath.Path(name).stem, read(name)[: self.questions or None])
      for name in paths
    ]
    demonstrations: list[Question] = []
    if self.shots:
      demonstrations = read(self.shots_file)[: self.shots]
    _check_demonstrations(demonstrations, files)
    shots = "".join(
      f"{_ask(template, shot.text)}{shot.solution}\n\n"
      for shot in demonstrations
    )
    prompts = [
      [
        trained.tokenizer.encode_prompt(shots + _ask(template, question.text))
        for question in questions
      ]
      for _, questions in files
    ]
    capacity = _capacity(trained, self, files, prompts)
    return _Data(files, prompts, capacity)

  def measure(self, trained: Trained, data: _Data) -> Iterator[Measurement]:
    """Yields accuracies."""
    files, prompts, capacity = data
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, self.batch_tokens // capacity),
      capacity=capacity,
    )
    another = _Another(trained.tokenizer, trained.config.data.prompt_template)
    right: list[np.ndarray] = []
    for (name, questions), ids in zip(files, prompts, strict=True):
      written = sampler.generate(
        ids,
        self.new_tokens,
        stop_ids=trained.tokenizer.document_tokens.stop,
        stop=another,
      )
      answers = [
        extract(another.cut(trained.tokenizer.decode(tokens)))
        for tokens in written
      ]
      right.append(
        np.array(
          [
            answer is not None and same(answer, question.answer)
            for answer, question in zip(answers, questions, strict=True)
          ],
          float,
        )
      )
      yield proportion("accuracy", right[-1], file=name)
      yield proportion(
        "ended",
        [
          len(tokens) < self.new_tokens or another(tokens) for tokens in written
        ],
        file=name,
      )
    if len(files) > 1:
      yield proportion(
        "accuracy",
        np.concatenate(right),
        np.repeat(np.arange(len(right)), list(map(len, right))),
        file="mean",
      )


def read(path: epath.PathLike) -> list[Question]:
  """Reads the questions of a file.

  Raises:
    UserError: for a record that lacks a question or an answer, or whose answer holds no final answer. Names file and line.
  """
  questions = []
  for place, record in jsonl.read(path, {}):
    answer = reference(answered := _field(place, record, "answer", "solution"))
    if not answer:
      raise UserError(
        f"{place}: there is no final answer in {answered[:40]!r}; it must be behind ####, in \\boxed{{}} or alone"
      )
    questions.append(
      Question(
        place,
        _field(place, record, "question", "problem"),
        _field(place, record, "solution", "answer"),
        answer,
      )
    )
  return questions


def _field(place: str, record: dict[str, object], *names: str) -> str:
  """The text of the first of the fields that the record has."""
  name = next((name for name in names if record.get(name) is not None), None)
  if name is None:
    raise UserError(
      f"{place}: the field {' or '.join(map(repr, names))} is missing; there are {', '.join(map(repr, record)) or 'none'}"
    )
  value = record[name]
  if isinstance(value, int) and not isinstance(value, bool):  # AIME's answers
    return str(value)
  if not isinstance(value, str):
    raise UserError(
      f"{place}: the field {name!r} must be a string; got {str(value)[:40]!r}"
    )
  return value


class _Another:
  """The beginning of another question, which ends an answer. Called with an answer's tokens, it says whether there is one."""

  def __init__(self, tokenizer: Tokenizer, template: str):
    self._tokenizer, self._head = (
      tokenizer,
      template.partition("{prompt}")[0].strip(),
    )

  def __call__(self, tokens: list[int]) -> bool:
    return bool(self._head) and f"\n{self._head}" in self._tokenizer.decode(
      tokens[-_TAIL:]
    )

  def cut(self, text: str) -> str:
    """The text before another question."""
    return text.partition(f"\n{self._head}")[0] if self._head else text


def _ask(template: str, question: str) -> str:
  return template.replace("{prompt}", question)


def _check(settings: Mathematics, paths: Sequence[str]) -> None:
  if not paths:
    raise UserError(
      "set.mathematics.files names JSONL files of questions, with commas between: records with a question (or problem) and an answer "
      "(or solution)"
    )
  names = [epath.Path(path).stem for path in paths]
  if len(set(names)) < len(names):
    raise UserError(
      f"set.mathematics.files = {settings.files}: two files have the same name, which names the figures; rename one"
    )
  if settings.shots and not settings.shots_file:
    raise UserError(
      f"set.mathematics.shots = {settings.shots}: set.mathematics.shots_file must name a file of demonstrations"
    )
  if (
    settings.shots
    and (count := len(read(settings.shots_file))) < settings.shots
  ):
    raise UserError(
      f"set.mathematics.shots = {settings.shots}: {settings.shots_file} has {count} records"
    )


def _check_demonstrations(
  demonstrations: Sequence[Question],
  files: Sequence[tuple[str, list[Question]]],
) -> None:
  """Raises UserError if a demonstration is one of the scored questions."""
  scored_places: dict[str, str] = {}
  for _, questions in files:
    for question in questions:
      scored_places[question.text.strip()] = question.place
  for shot in demonstrations:
    scored_place = scored_places.get(shot.text.strip())
    if scored_place is not None:
      raise UserError(
        f"{shot.place}: this demonstration is also a scored question"
        f" ({scored_place}); set.mathematics.shots_file must hold other"
        " questions, such as the training split"
      )


def _capacity(
  trained: Trained,
  settings: Mathematics,
  files: Sequence[tuple[str, list[Question]]],
  prompts: list[list[list[int]]],
) -> int:
  """The number of tokens of the longest prompt and its answer."""
  limit = trained.config.model.max_length
  for (_, questions), ids in zip(files, prompts, strict=True):
    for question, prompt in zip(questions, ids, strict=True):
      if len(prompt) + settings.new_tokens > limit:
        raise UserError(
          f"{question.place}: a prompt of {len(prompt)} tokens, demonstrations included, and set.mathematics.new_tokens = "
          f"{settings.new_tokens} are more than the model's {limit} (its config.model.max_length)"
        )
  return (
    max(len(prompt) for ids in prompts for prompt in ids) + settings.new_tokens
  )
