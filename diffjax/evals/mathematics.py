"""Accuracy on questions with a final answer, such as GSM8K or MATH.

The data are local JSONL files. A record has a "question" or "problem", and an
"answer" or "solution" that contains the final answer. The final answer follows
"####" (GSM8K), is in \\boxed{…} (MATH), or is the whole field (MATH-500, AIME).
If a record has both fields, the answer is compared, and the solution is shown
in demonstrations. Example:

    {"question": "What is 3 + 3?", "answer": "3 + 3 = 6.\\n#### 6"}

Decoding is greedy. `methods/final_answer.py` extracts the final answer of the
model's text and compares it, with math-verify (the extra `eval`).

The paper gives the mean of eight such benchmarks. It does not specify the
prompts. The choices here:

- A question is written in the template that the model was fine-tuned with
  (config.data.prompt_template), by default "Question: …\\nAnswer:\\n". If two
  models are compared, both get the template of the first. The default is
  zero-shot, as for the models of the paper's second stage. For a model that was
  not fine-tuned, `shots` demonstrations of another file (the training split)
  come before every question. They show the solutions of that file, with a
  blank line between demonstrations.
- An answer ends where the model ends the document, after `new_tokens` tokens,
  or where the model begins another question.
- The mean over files gives each file the same weight, as a mean of benchmarks
  does.
- If the fraction of answers that ended is low, raise `new_tokens`. The paper's
  second stage writes up to 16K tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from etils import epath

from diffjax.config import UserError, at_least, field
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.measurement import Measurement, proportion
from diffjax.evals.methods import equivalence, final_answer, jsonl
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

# The beginning of another question is looked for in this many last tokens.
_NUM_LAST_TOKENS = 64


class Question(NamedTuple):
  """A record of a file.

  Attributes:
    location: "FILE:LINE", for messages.
    text: The question.
    solution: The text that demonstrations show after the question.
    answer: The right final answer, such as "6".
  """

  location: str
  text: str
  solution: str
  answer: str


class Benchmark(NamedTuple):
  """A file of questions.

  Attributes:
    name: The name of the file, without its ending.
    questions: The questions to ask.
    prompts: The token ids of the prompt of each question.
  """

  name: str
  questions: list[Question]
  prompts: list[list[int]]


class _Scores(NamedTuple):
  """What is measured of the answers to a benchmark, for each question.

  Attributes:
    is_right: Whether the final answer is right.
    has_ended: Whether the answer ended within `new_tokens` tokens.
  """

  is_right: list[bool]
  has_ended: list[bool]


@dataclasses.dataclass(frozen=True)
class Mathematics(Suite[list[Benchmark]]):
  """Accuracy of the final answers to mathematical questions.

  For each file, "accuracy" is the fraction of questions whose final answer is
  right, and "ended" is the fraction of answers that ended within `new_tokens`
  tokens. With several files, the accuracy of the file "mean" is the mean of the
  files' accuracies. The units are questions.
  """

  name: ClassVar[str] = "mathematics"
  table: ClassVar[TableSpec] = TableSpec(
    unit="questions",
    notes=(
      "accuracy: share of the questions with the right final answer",
      "ended: share of the answers that needed no more than new_tokens",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure("mathematics solved", "accuracy", "higher"),
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

  def load(self, trained: Trained) -> list[Benchmark]:
    """Returns the benchmarks with their prompts.

    Raises:
      UserError: if a file cannot be read, a record lacks a field, a
        demonstration is a scored question, a prompt leaves no room for an
        answer, or math-verify is missing.
    """
    paths = self._paths()
    demonstrations = self._read_demonstrations()
    # Raises an error if math-verify is missing.
    equivalence.start()
    questions_by_name = {}
    all_questions = []
    for path in paths:
      questions = read(path)
      if self.questions > 0:
        questions = questions[: self.questions]
      questions_by_name[epath.Path(path).stem] = questions
      all_questions += questions
    _check_not_scored(demonstrations, all_questions)

    benchmarks = []
    for name, questions in questions_by_name.items():
      prompts = _encode_prompts(trained, demonstrations, questions)
      benchmark = Benchmark(name, questions, prompts)
      self._check_lengths(trained, benchmark)
      benchmarks.append(benchmark)
    return benchmarks

  def measure(
    self, trained: Trained, benchmarks: list[Benchmark]
  ) -> Iterator[Measurement]:
    """Yields the measurements of each benchmark, and their mean accuracy."""
    prompt_lengths: list[int] = []
    for benchmark in benchmarks:
      prompt_lengths += map(len, benchmark.prompts)
    capacity = max(prompt_lengths) + self.new_tokens
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, self.batch_tokens // capacity),
      capacity=capacity,
    )

    all_outcomes: list[bool] = []
    # For each outcome, the index of its benchmark.
    groups: list[int] = []
    for index, benchmark in enumerate(benchmarks):
      scores = self._score_answers(trained, sampler, benchmark)
      yield proportion("accuracy", scores.is_right, file=benchmark.name)
      yield proportion("ended", scores.has_ended, file=benchmark.name)
      all_outcomes += scores.is_right
      groups += [index] * len(scores.is_right)
    # Each benchmark has the same weight in the mean.
    if len(benchmarks) > 1:
      yield proportion("accuracy", all_outcomes, groups, file="mean")

  def _score_answers(
    self, trained: Trained, sampler: Sampler, benchmark: Benchmark
  ) -> _Scores:
    """Generates the answers to a benchmark's questions and scores them."""
    tokenizer = trained.tokenizer
    next_question = _NextQuestion(
      tokenizer, trained.config.data.prompt_template
    )
    answers = sampler.generate(
      benchmark.prompts,
      self.new_tokens,
      stop_ids=tokenizer.document_tokens.stop,
      stop=next_question.has_begun,
    )
    is_right = []
    has_ended = []
    for answer_ids, question in zip(answers, benchmark.questions, strict=True):
      answer_text = next_question.cut(tokenizer.decode(answer_ids))
      is_right.append(_is_right(answer_text, question))
      # An answer with the maximum number of tokens may end exactly there.
      is_short = len(answer_ids) < self.new_tokens
      has_ended.append(is_short or next_question.has_begun(answer_ids))
    return _Scores(is_right, has_ended)

  def _paths(self) -> list[str]:
    """Returns the paths of the question files, from the setting `files`.

    Raises UserError if there are none, or if two files have the same name.
    """
    paths = []
    for path in self.files.split(","):
      if path.strip():
        paths.append(path.strip())
    if not paths:
      raise UserError(
        "set.mathematics.files names JSONL files of questions, with commas"
        " between: records with a question (or problem) and an answer (or"
        " solution)"
      )
    names = {epath.Path(path).stem for path in paths}
    if len(names) < len(paths):
      raise UserError(
        f"set.mathematics.files = {self.files}: two files have the same name,"
        " which names the figures; rename one"
      )
    return paths

  def _read_demonstrations(self) -> list[Question]:
    """Returns the first `shots` records of `shots_file`.

    Raises UserError if there are fewer.
    """
    if self.shots == 0:
      return []
    if not self.shots_file:
      raise UserError(
        f"set.mathematics.shots = {self.shots}: set.mathematics.shots_file must"
        " name a file of demonstrations"
      )
    records = read(self.shots_file)
    if len(records) < self.shots:
      raise UserError(
        f"set.mathematics.shots = {self.shots}: {self.shots_file} has"
        f" {len(records)} records"
      )
    return records[: self.shots]

  def _check_lengths(self, trained: Trained, benchmark: Benchmark) -> None:
    """Raises UserError if a prompt and its answer do not fit the model."""
    max_length = trained.config.model.max_length
    for question, prompt in zip(
      benchmark.questions, benchmark.prompts, strict=True
    ):
      if len(prompt) + self.new_tokens > max_length:
        raise UserError(
          f"{question.location}: a prompt of {len(prompt)} tokens,"
          " demonstrations included, and set.mathematics.new_tokens ="
          f" {self.new_tokens} are more than the model's {max_length} (its"
          " config.model.max_length)"
        )


def read(path: epath.PathLike) -> list[Question]:
  """Reads the questions of a JSONL file, with their solutions and answers.

  Raises:
    UserError: if a record has no question, answer or final answer. The message
      names the file and the line.
  """
  questions = []
  for record in jsonl.read(path, {}):
    text_with_answer = _read_text(record, ("answer", "solution"))
    answer = final_answer.reference_answer(text_with_answer)
    if not answer:
      raise UserError(
        f"{record.location}: there is no final answer in"
        f" {text_with_answer[:40]!r}; it must be behind ####, in \\boxed{{}} or"
        " alone"
      )
    question = Question(
      location=record.location,
      text=_read_text(record, ("question", "problem")),
      solution=_read_text(record, ("solution", "answer")),
      answer=answer,
    )
    questions.append(question)
  return questions


def _read_text(record: jsonl.Record, names: Sequence[str]) -> str:
  """Returns the text in a field that can have one of several names.

  Args:
    record: The record.
    names: The names, the preferred one first.

  Raises:
    UserError: if the record has none of these fields, or the field is neither a
      string nor an integer.
  """
  for name in names:
    value = record.value.get(name)
    if value is not None:
      return _to_text(record.location, name, value)
  wanted = " or ".join(map(repr, names))
  present = ", ".join(map(repr, record.value)) or "none"
  raise UserError(
    f"{record.location}: the field {wanted} is missing; there are {present}"
  )


def _to_text(location: str, name: str, value: object) -> str:
  """Returns a field's string, or its integer as a string."""
  # JSON's true and false are instances of int in Python.
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  # In some data, such as AIME, the answers are integers.
  if is_integer:
    return str(value)
  if not isinstance(value, str):
    raise UserError(
      f"{location}: the field {name!r} must be a string; got"
      f" {str(value)[:40]!r}"
    )
  return value


def _check_not_scored(
  demonstrations: Sequence[Question], questions: Sequence[Question]
) -> None:
  """Raises UserError if a demonstration is one of the scored questions.

  The model would read the right answer in its prompt.
  """
  scored_locations: dict[str, str] = {}
  for question in questions:
    scored_locations[question.text.strip()] = question.location
  for demonstration in demonstrations:
    scored_location = scored_locations.get(demonstration.text.strip())
    if scored_location is not None:
      raise UserError(
        f"{demonstration.location}: this demonstration is also a scored"
        f" question ({scored_location}); set.mathematics.shots_file must hold"
        " other questions, such as the training split"
      )


def _encode_prompts(
  trained: Trained,
  demonstrations: Sequence[Question],
  questions: Sequence[Question],
) -> list[list[int]]:
  """Returns the token ids of each question's prompt.

  A prompt consists of all demonstrations and the question, in the template that
  the model was fine-tuned with.
  """
  template = trained.config.data.prompt_template
  demonstrations_text = _format_demonstrations(template, demonstrations)
  prompts = []
  for question in questions:
    question_text = _format_question(template, question.text)
    prompt = demonstrations_text + question_text
    prompts.append(trained.tokenizer.encode_prompt(prompt))
  return prompts


def _format_demonstrations(
  template: str, demonstrations: Sequence[Question]
) -> str:
  """Returns the demonstrations' questions and solutions as one text.

  A blank line follows each solution.
  """
  text = ""
  for demonstration in demonstrations:
    text += _format_question(template, demonstration.text)
    text += f"{demonstration.solution}\n\n"
  return text


def _format_question(template: str, question: str) -> str:
  """Returns the template with the question inserted, up to its answer."""
  return template.replace("{prompt}", question)


def _is_right(text: str, question: Question) -> bool:
  """Returns whether a text has a final answer that equals the right one."""
  answer = final_answer.extract_answer(text)
  return answer is not None and final_answer.is_same_answer(
    answer, question.answer
  )


class _NextQuestion:
  """Recognizes where a model goes on from its answer to another question.

  A question begins with the text before "{prompt}" in the template, such as
  "Question:", on a new line. If the template has no such text, no question is
  recognized.
  """

  def __init__(self, tokenizer: Tokenizer, template: str):
    self._tokenizer = tokenizer
    self._beginning: str | None = None
    text_before_prompt = template.partition("{prompt}")[0].strip()
    if text_before_prompt:
      self._beginning = f"\n{text_before_prompt}"

  def has_begun(self, ids: list[int]) -> bool:
    """Returns whether another question begins in the last tokens."""
    if self._beginning is None:
      return False
    last_text = self._tokenizer.decode(ids[-_NUM_LAST_TOKENS:])
    return self._beginning in last_text

  def cut(self, text: str) -> str:
    """Returns a generated text without what follows the answer."""
    if self._beginning is None:
      return text
    return text.partition(self._beginning)[0]
