"""Prompts for a judge of hallucinations, and the judge's verdicts.

The judge is another model, which is not called here. The user sends it the
prompts and writes its replies to a file of verdicts. Each prompt and verdict
has the SHA-256 of the prompt, so that a verdict on an older prompt is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from etils import epath

from diffjax.config import UserError
from diffjax.evals.methods import jsonl

# The fields of a line of verdicts.jsonl.
_VERDICT_FIELDS = {"id": str, "sha256": str, "verdict": str}

# Messages quote at most this many characters of a wrong verdict.
_MAX_QUOTED = 40

_PROMPT = """Below are a source text and {description}. Does the {kind} say \
anything that contradicts the source, or that the source does not support? \
Reply with one word: yes if it does, no if it does not.

Source:
{source}
{question}
{title}:
{output}
"""


def summary_prompt(source: str, summary: str) -> str:
  """Returns the judge's prompt about a summary of a source."""
  return _PROMPT.format(
    description="a summary of it",
    kind="summary",
    source=source,
    question="",
    title="Summary",
    output=summary,
  )


def answer_prompt(source: str, question: str, answer: str) -> str:
  """Returns the judge's prompt about an answer to a question about a source."""
  return _PROMPT.format(
    description="an answer to a question about it",
    kind="answer",
    source=source,
    question=f"\nQuestion: {question}\n",
    title="Answer",
    output=answer,
  )


def prompt_records(prompts: Mapping[str, str]) -> list[dict[str, str]]:
  """Returns the records of judge_prompts.jsonl, which the judge is sent.

  Args:
    prompts: The judge's prompts by the id of the output.
  """
  return [
    {"id": output_id, "sha256": sha256(prompt), "prompt": prompt}
    for output_id, prompt in prompts.items()
  ]


def read_verdicts(
  path: epath.PathLike, prompts: Mapping[str, str]
) -> dict[str, bool]:
  """Reads the judge's verdicts: whether each output has a hallucination.

  Args:
    path: The file of verdicts, with {"id", "sha256", "verdict"} on each line.
    prompts: The judge's prompts by the id of the output.

  Returns:
    True for a hallucination, by the id of the output.

  Raises:
    UserError: if a verdict is about another prompt, is neither yes nor no, or
      is the second one about its prompt, or if a prompt has no verdict.
  """
  hallucination_by_id: dict[str, bool] = {}
  for record in jsonl.read(path, _VERDICT_FIELDS):
    _check_prompt(record, prompts)
    is_hallucination = _parse_verdict(record)
    output_id = record.value["id"]
    if output_id in hallucination_by_id:
      raise UserError(
        f"{record.location}: a second verdict on {output_id!r}; keep one of"
        " them"
      )
    hallucination_by_id[output_id] = is_hallucination

  for output_id in prompts:
    if output_id not in hallucination_by_id:
      raise UserError(
        f"{path}: holds {len(hallucination_by_id)} verdicts on {len(prompts)}"
        f" prompts; {output_id!r} is the first without one"
      )
  return hallucination_by_id


def _check_prompt(record: jsonl.Record, prompts: Mapping[str, str]) -> None:
  """Raises UserError if a verdict is not about one of the prompts."""
  output_id = record.value["id"]
  if output_id not in prompts:
    raise UserError(
      f"{record.location}: unknown id {output_id!r}: it is not one of the"
      f" {len(prompts)} prompts of judge_prompts.jsonl; remove the line"
    )
  if record.value["sha256"] != sha256(prompts[output_id]):
    raise UserError(
      f"{record.location}: a verdict on an older prompt of {output_id!r} (its"
      " sha256 differs); judge judge_prompts.jsonl again"
    )


def _parse_verdict(record: jsonl.Record) -> bool:
  """Returns True for "yes", a hallucination, and False for "no".

  Ignores case, spaces and full stops around the word. Raises UserError for any
  other text.
  """
  text = record.value["verdict"]
  verdict = text.strip().strip(".").lower()
  if verdict not in ("yes", "no"):
    raise UserError(
      f"{record.location}: the verdict must be yes (a hallucination) or no; got"
      f" {text[:_MAX_QUOTED]!r}"
    )
  return verdict == "yes"


def sha256(text: str) -> str:
  """Returns the SHA-256 of a text in hexadecimal."""
  # A model can write half of a surrogate pair, which UTF-8 does not allow.
  content = text.encode("utf-8", errors="surrogatepass")
  return hashlib.sha256(content).hexdigest()
