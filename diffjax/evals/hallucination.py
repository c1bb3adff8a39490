"""Contextual hallucination: outputs that contradict their source or add to it.

The protocol of the paper (paper.md, §5): The model writes summaries (XSum,
CNN-DM, MultiNews) and answers (Qasper, HotpotQA, 2WikiMQA), 100 of each set.
Another model judges them. The accuracy is the fraction without hallucination.

This suite does not call a judge. The first run writes two files per model:

    JUDGE_DIR/MODEL/generations.jsonl    the model's outputs
    JUDGE_DIR/MODEL/judge_prompts.jsonl  lines of {"id", "sha256", "prompt"}

The user sends the prompts to a judge and writes its replies into a third file:

    JUDGE_DIR/MODEL/verdicts.jsonl       lines of {"id", "sha256", "verdict"}

A verdict is "yes" for a hallucination, else "no". A later run reads the
verdicts and also yields "free of hallucination". That run reads the model's
outputs from the file, because the judge saw those. Verdicts on other prompts
have another sha256 and are an error. Verdicts on only some prompts are an error
too.

The data are files DATA_DIR/SET.jsonl. A record for a summary has the fields
"document" and "summary" (the reference). A record for an answer has "context",
"question" and "answers" (a list of right answers).

The paper does not specify these choices:

- Decoding is greedy. An answer ends at the first line break, a summary at the
  first blank line.
- If a source is too long for the model, its end is cut off, for the judge too.
- `methods/text_overlap.py` defines ROUGE-L and exact match. An output is
  compared with each reference, and the best ROUGE-L counts.
- An empty output has no hallucination. So the fraction of empty outputs is
  measured too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath

from diffjax.config import UserError, at_least, field
from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.methods import jsonl, judge
from diffjax.evals.methods.text_overlap import RougeL, is_match, load_rouge_l
from diffjax.evals.report.results import MainFigure, TableSpec
from diffjax.evals.suite import Suite
from diffjax.host.files import write_atomically
from diffjax.host.progress import say
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

_SUMMARY_FIELDS = {"document": str, "summary": str}
_ANSWER_FIELDS = {"context": str, "question": str, "answers": list}

# The text that ends an output, by the kind of output.
_OUTPUT_ENDS = {"summary": "\n\n", "answer": "\n"}

# Tokens of the shortest prompt and output that a program is compiled for.
_MIN_CAPACITY = 64

# How many values of each parameter tell models apart.
_NUM_FINGERPRINT_VALUES = 256


@dataclasses.dataclass(frozen=True)
class Sample:
  """A summary or answer that the model is asked to write.

  Attributes:
    id: SET/LINE.
    kind: "summary" or "answer".
    prompt_ids: The token ids of the prompt.
    source: The part of the source that is in the prompt.
    question: The question. Empty for a summary.
    references: Right outputs.
    is_cut: Whether the end of the source is not in the prompt.
  """

  id: str
  kind: str
  prompt_ids: list[int]
  source: str
  question: str
  references: list[str]
  is_cut: bool

  def judge_prompt(self, output: str) -> str:
    """Returns the judge's prompt about an output."""
    if self.kind == "summary":
      return judge.summary_prompt(self.source, output)
    return judge.answer_prompt(self.source, self.question, output)


class _Data(NamedTuple):
  """What `measure` needs.

  Attributes:
    samples_by_set: The samples of each set.
    rouge_l: Computes ROUGE-L.
  """

  samples_by_set: dict[str, list[Sample]]
  rouge_l: RougeL


class _Request(NamedTuple):
  """A record of the data, as the parts of a prompt.

  Attributes:
    location: "FILE:LINE" of the record, for messages.
    kind: "summary" or "answer".
    before_source: The beginning of the prompt.
    source: The text that the output must agree with.
    after_source: The end of the prompt.
    question: The question. Empty for a summary.
    references: Right outputs.
  """

  location: str
  kind: str
  before_source: str
  source: str
  after_source: str
  question: str
  references: list[str]


@dataclasses.dataclass(frozen=True)
class Hallucination(Suite[_Data]):
  """Quality of summaries and answers, and how many are free of hallucination.

  All measurements are fractions, by set. "ROUGE-L" is the overlap with the
  reference. "exact match" is the fraction of answers that equal a reference.
  "empty outputs" is the fraction of outputs without text. "free of
  hallucination" is the fraction of outputs that a judge finds supported by
  their source. It needs the judge's verdicts. The units are outputs.
  """

  name: ClassVar[str] = "hallucination"
  table: ClassVar[TableSpec] = TableSpec(
    unit="outputs",
    notes=(
      "ROUGE-L: overlap with the reference, from 0 to 1",
      "free of hallucination: needs the verdicts of a judge",
    ),
  )
  main_figures: ClassVar[tuple[MainFigure, ...]] = (
    MainFigure(
      "answers free of hallucination", "free of hallucination", "higher"
    ),
  )

  sets: tuple[str, ...] = field(
    ("xsum", "cnn_dm", "multinews", "qasper", "hotpotqa", "2wikimqa"),
    "Names of files in data_dir, without .jsonl.",
  )
  data_dir: str = field("", "Directory of the files.")
  judge_dir: str = field(
    "",
    "Directory of generations, judge prompts and verdicts. Empty for"
    " DATA_DIR/judged.",
  )
  samples: int = field(100, "Records of each set.", bound=at_least(1))
  seed: int = field(0, "Seed of the choice of records.")
  max_tokens: int = field(
    0,
    "Tokens of a prompt and its output, at most. 0 for the model's"
    " config.model.max_length.",
  )
  summary_tokens: int = field(
    128, "Tokens of a summary, at most.", bound=at_least(1)
  )
  answer_tokens: int = field(
    32, "Tokens of an answer, at most.", bound=at_least(1)
  )
  batch_tokens: int = field(
    32_768, "Tokens of a batch, which has at least one prompt."
  )

  def load(self, trained: Trained) -> _Data:
    """Returns the samples of each set.

    Raises:
      UserError: if rouge-score is not installed, a file cannot be read, or a
        prompt does not fit the model.
    """
    rouge_l = load_rouge_l()
    if not self.data_dir:
      raise UserError(
        "set.hallucination.data_dir must name the directory that holds"
        " SET.jsonl, such as xsum.jsonl, for every set"
      )
    capacity = self._capacity(trained)
    samples_by_set = {}
    for name in self.sets:
      samples_by_set[name] = self._read_samples(name, trained, capacity)
    return _Data(samples_by_set, rouge_l)

  def measure(self, trained: Trained, data: _Data) -> Iterator[Measurement]:
    """Yields the measurements of each set.

    Writes the outputs and the judge's prompts, and reads the verdicts if there
    are any.
    """
    samples = []
    for set_samples in data.samples_by_set.values():
      samples += set_samples
    directory = self._model_dir(trained)
    outputs = self._outputs(trained, samples, directory / "generations.jsonl")

    judge_prompts = {}
    for sample in samples:
      judge_prompts[sample.id] = sample.judge_prompt(outputs[sample.id])
    prompts_path = directory / "judge_prompts.jsonl"
    _write(prompts_path, judge.prompt_records(judge_prompts))

    verdicts_path = directory / "verdicts.jsonl"
    has_hallucination = None
    if verdicts_path.exists():
      has_hallucination = judge.read_verdicts(verdicts_path, judge_prompts)
    else:
      say(
        f"{prompts_path}: send these prompts to a judge and write its replies"
        f" to {verdicts_path} to have hallucinations counted"
      )

    for name, set_samples in data.samples_by_set.items():
      if has_hallucination is not None:
        yield _free_of_hallucination(name, set_samples, has_hallucination)
      yield from _compare(name, set_samples, outputs, data.rouge_l)

  def _capacity(self, trained: Trained) -> int:
    """Returns the maximum number of tokens of a prompt and its output."""
    max_length = trained.config.model.max_length
    if self.max_tokens == 0:
      return max_length
    if not 1 <= self.max_tokens <= max_length:
      raise UserError(
        f"set.hallucination.max_tokens = {self.max_tokens}: the model takes at"
        f" most {max_length} (its config.model.max_length)"
      )
    return self.max_tokens

  def _max_new_tokens(self, kind: str) -> int:
    """Returns the maximum number of tokens of an output."""
    return self.summary_tokens if kind == "summary" else self.answer_tokens

  def _model_dir(self, trained: Trained) -> epath.Path:
    """Returns the directory of a model's outputs, prompts and verdicts."""
    judge_dir = self.judge_dir or os.path.join(self.data_dir, "judged")
    # Models whose names differ only in punctuation get different directories.
    readable_name = re.sub(r"[^A-Za-z0-9]+", "-", trained.name).strip("-")
    suffix = judge.sha256(trained.name)[:6]
    return epath.Path(judge_dir).expanduser() / f"{readable_name}-{suffix}"

  def _read_samples(
    self, name: str, trained: Trained, capacity: int
  ) -> list[Sample]:
    """Returns the samples of a set. Warns if sources do not fit."""
    path = os.path.join(self.data_dir, f"{name}.jsonl")
    first_record = jsonl.read(path, {})[0]
    if "question" in first_record.value:
      records = jsonl.read(path, _ANSWER_FIELDS)
      make_request = _answer_request
    else:
      records = jsonl.read(path, _SUMMARY_FIELDS)
      make_request = _summary_request
    rng = np.random.default_rng(self.seed)
    chosen_indices = rng.permutation(len(records))[: self.samples]

    samples = []
    num_cut = 0
    for index in sorted(chosen_indices):
      request = make_request(records[index])
      sample = self._make_sample(name, request, trained, capacity)
      samples.append(sample)
      if sample.is_cut:
        num_cut += 1
    if num_cut > 0:
      logging.warning(
        "%s: %d of %d sources do not fit into %d tokens and lost their end",
        path,
        num_cut,
        len(samples),
        capacity,
      )
    return samples

  def _make_sample(
    self, set_name: str, request: _Request, trained: Trained, capacity: int
  ) -> Sample:
    """Returns the sample of a request, with as much of its source as fits."""
    tokenizer = trained.tokenizer
    start_ids = [
      *tokenizer.document_tokens.start,
      *tokenizer.encode(request.before_source),
    ]
    source_ids = tokenizer.encode(request.source)
    end_ids = tokenizer.encode(request.after_source)

    max_new_tokens = self._max_new_tokens(request.kind)
    num_other_tokens = max_new_tokens + len(start_ids) + len(end_ids)
    max_source_tokens = capacity - num_other_tokens
    if max_source_tokens < 1:
      raise UserError(
        f"{request.location}: the prompt without its source and the output take"
        f" {num_other_tokens} tokens, and there is room for {capacity}"
      )
    source = request.source
    is_cut = len(source_ids) > max_source_tokens
    if is_cut:
      source_ids = source_ids[:max_source_tokens]
      source = tokenizer.decode(source_ids)
    line_number = request.location.rpartition(":")[2]
    return Sample(
      id=f"{set_name}/{line_number}",
      kind=request.kind,
      prompt_ids=start_ids + source_ids + end_ids,
      source=source,
      question=request.question,
      references=request.references,
      is_cut=is_cut,
    )

  def _outputs(
    self, trained: Trained, samples: Sequence[Sample], path: epath.Path
  ) -> dict[str, str]:
    """Returns the model's output for each sample, by the sample's id.

    Reuses the outputs of an earlier run if the model, the prompt and the limit
    of tokens are the same. Writes all outputs.

    Args:
      trained: The model.
      samples: The samples.
      path: The file of outputs.
    """
    keys = self._generation_keys(trained, samples)
    outputs = _read_outputs(path, keys)
    for kind in _OUTPUT_ENDS:
      missing = []
      for sample in samples:
        if sample.kind == kind and sample.id not in outputs:
          missing.append(sample)
      if missing:
        outputs.update(self._generate(trained, missing, kind))

    records = []
    for sample in samples:
      records.append({**keys[sample.id], "output": outputs[sample.id]})
    _write(path, records)
    return outputs

  def _generation_keys(
    self, trained: Trained, samples: Sequence[Sample]
  ) -> dict[str, dict[str, Any]]:
    """Returns what each output depends on, by the sample's id.

    A record of generations.jsonl consists of these fields and "output".
    """
    model = _fingerprint(trained)
    keys = {}
    for sample in samples:
      keys[sample.id] = {
        "id": sample.id,
        "model": model,
        "prompt_sha256": judge.sha256(json.dumps(sample.prompt_ids)),
        "max_new_tokens": self._max_new_tokens(sample.kind),
      }
    return keys

  def _generate(
    self, trained: Trained, samples: Sequence[Sample], kind: str
  ) -> dict[str, str]:
    """Returns the model's outputs for samples of one kind, by their ids."""
    prompts = [sample.prompt_ids for sample in samples]
    max_new_tokens = self._max_new_tokens(kind)
    num_tokens = max(map(len, prompts)) + max_new_tokens
    # Rounded up to a power of two, so that few programs are compiled.
    capacity = max(_MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())
    capacity = min(capacity, trained.config.model.max_length)
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, self.batch_tokens // capacity),
      capacity=capacity,
    )
    tokenizer = trained.tokenizer
    end = _OUTPUT_ENDS[kind]

    def has_ended(ids: list[int]) -> bool:
      return end in tokenizer.decode(ids).lstrip()

    generated = sampler.generate(
      prompts,
      max_new_tokens,
      stop_ids=tokenizer.document_tokens.stop,
      stop=has_ended,
    )
    outputs = {}
    for sample, ids in zip(samples, generated, strict=True):
      text = tokenizer.decode(ids).strip()
      outputs[sample.id] = text.partition(end)[0].strip()
    return outputs


def _summary_request(record: jsonl.Record) -> _Request:
  """Returns the request for a summary."""
  return _Request(
    location=record.location,
    kind="summary",
    before_source="Document: ",
    source=record.value["document"],
    after_source="\n\nSummary:",
    question="",
    references=[record.value["summary"]],
  )


def _answer_request(record: jsonl.Record) -> _Request:
  """Returns the request for an answer. Raises UserError for bad references."""
  question = record.value["question"]
  references = record.value["answers"]
  are_strings = all(isinstance(reference, str) for reference in references)
  if not references or not are_strings:
    raise UserError(
      f"{record.location}: the field 'answers' must be a list of strings, and not"
      f" empty; got {str(references)[:40]!r}"
    )
  return _Request(
    location=record.location,
    kind="answer",
    before_source="",
    source=record.value["context"],
    after_source=f"\n\nQuestion: {question}\nAnswer:",
    question=question,
    references=references,
  )


def _free_of_hallucination(
  set_name: str,
  samples: Sequence[Sample],
  has_hallucination: Mapping[str, bool],
) -> Measurement:
  """Measures the fraction of a set's outputs without hallucination."""
  outcomes = [not has_hallucination[sample.id] for sample in samples]
  return proportion("free of hallucination", outcomes, set=set_name)


def _compare(
  set_name: str,
  samples: Sequence[Sample],
  outputs: Mapping[str, str],
  rouge_l: RougeL,
) -> Iterator[Measurement]:
  """Yields how a set's outputs compare with their references.

  Args:
    set_name: The name of the set.
    samples: The samples of the set.
    outputs: The model's outputs by the samples' ids.
    rouge_l: Computes ROUGE-L.
  """
  best_rouge_l = []
  is_empty = []
  for sample in samples:
    output = outputs[sample.id]
    scores = [rouge_l(reference, output) for reference in sample.references]
    best_rouge_l.append(max(scores))
    is_empty.append(output == "")

  yield mean_of("ROUGE-L", best_rouge_l, set=set_name)
  # All samples of a set have the same kind.
  if samples[0].kind == "answer":
    matches = []
    for sample in samples:
      matches.append(is_match(outputs[sample.id], sample.references))
    yield proportion("exact match", matches, set=set_name)
  yield proportion("empty outputs", is_empty, set=set_name)


def _read_outputs(
  path: epath.Path, keys: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
  """Returns the outputs of an earlier run that have the same keys.

  Args:
    path: The file of outputs. It may be missing.
    keys: What each output depends on, by the sample's id.
  """
  outputs: dict[str, str] = {}
  if not path.exists():
    return outputs
  for _, record in jsonl.read(path, {"id": str, "output": str}):
    output = record.pop("output")
    if keys.get(record["id"]) == record:
      outputs[record["id"]] = output
  return outputs


def _fingerprint(trained: Trained) -> str:
  """Returns a digest that differs between models and between their steps.

  It is computed from the name and the first values of each parameter.
  """
  digest = hashlib.sha256(trained.name.encode())
  for parameter in jax.tree.leaves(trained.params):
    first_row = parameter[(0,) * (parameter.ndim - 1)]
    values = np.asarray(first_row[:_NUM_FINGERPRINT_VALUES])
    digest.update(values.tobytes())
  return digest.hexdigest()[:16]


def _write(path: epath.Path, records: Sequence[Mapping[str, Any]]) -> None:
  """Writes a file of JSON lines, completely or not at all."""
  lines = [json.dumps(record) + "\n" for record in records]
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines))
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error};"
      " set.hallucination.judge_dir chooses another place"
    ) from error
