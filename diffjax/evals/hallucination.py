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
from diffjax.data.tokenizer import Tokenizer
from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.methods import jsonl, judge
from diffjax.evals.methods.text_overlap import RougeL, is_match, load_rouge_l
from diffjax.evals.methods.token_limit import checked_token_limit
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

# Programs are compiled for prompts and outputs of at least this many tokens.
_MIN_CAPACITY = 64

# The number of values of each parameter that enter the fingerprint of a model.
_NUM_FINGERPRINT_VALUES = 256


@dataclasses.dataclass(frozen=True)
class Sample:
  """A task for the model: to write a summary or an answer.

  Attributes:
    id: SET/LINE, such as "xsum/3".
    kind: "summary" or "answer".
    prompt_ids: The token ids of the prompt.
    source: The text to summarize or to find the answer in, as far as it is in
      the prompt.
    question: The question. Empty for a summary.
    references: Right outputs.
    is_cut: Whether the end of the source did not fit into the prompt.
  """

  id: str
  kind: str
  prompt_ids: list[int]
  source: str
  question: str
  references: list[str]
  is_cut: bool

  def judge_prompt(self, output: str) -> str:
    """Returns the prompt that asks a judge about the model's output."""
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
  """A record of the data, as the three parts of a prompt.

  Attributes:
    location: "FILE:LINE" of the record.
    kind: "summary" or "answer".
    before_source: The beginning of the prompt.
    source: The text to summarize or to find the answer in. It may be cut.
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


class _Source(NamedTuple):
  """A source as far as it fits into a prompt.

  Attributes:
    ids: The token ids.
    text: The text, which the judge gets.
    is_cut: Whether the end of the whole source is missing.
  """

  ids: list[int]
  text: str
  is_cut: bool


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
    capacity = checked_token_limit(self.name, self.max_tokens, trained)
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
    generations_path = directory / "generations.jsonl"
    prompts_path = directory / "judge_prompts.jsonl"
    verdicts_path = directory / "verdicts.jsonl"

    outputs = self._reuse_or_generate(trained, samples, generations_path)
    judge_prompts = {}
    for sample in samples:
      judge_prompts[sample.id] = sample.judge_prompt(outputs[sample.id])
    _write_records(prompts_path, judge.prompt_records(judge_prompts))

    hallucination_by_id = None
    if verdicts_path.exists():
      hallucination_by_id = judge.read_verdicts(verdicts_path, judge_prompts)
    else:
      say(
        f"{prompts_path}: send these prompts to a judge and write its replies"
        f" to {verdicts_path} to have hallucinations counted"
      )

    for name, set_samples in data.samples_by_set.items():
      if hallucination_by_id is not None:
        yield _free_of_hallucination(name, set_samples, hallucination_by_id)
      yield from _compare_with_references(
        name, set_samples, outputs, data.rouge_l
      )

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
    """Reads a set and returns samples of randomly chosen records.

    Warns if sources are cut, because they are too long for the model.

    Args:
      name: The name of the set, and of its file without .jsonl.
      trained: The model.
      capacity: The most tokens of a prompt and its output together.
    """
    path = os.path.join(self.data_dir, f"{name}.jsonl")
    samples = []
    for request in self._choose_requests(path):
      samples.append(self._make_sample(name, request, trained, capacity))

    num_cut = sum(sample.is_cut for sample in samples)
    if num_cut > 0:
      logging.warning(
        "%s: %d of %d sources do not fit into %d tokens and lost their end",
        path,
        num_cut,
        len(samples),
        capacity,
      )
    return samples

  def _choose_requests(self, path: str) -> list[_Request]:
    """Returns the requests of randomly chosen records, in the file's order."""
    # The first record tells whether the file asks for answers or summaries.
    first_record = jsonl.read(path, {})[0]
    if "question" in first_record.value:
      records = jsonl.read(path, _ANSWER_FIELDS)
      make_request = _answer_request
    else:
      records = jsonl.read(path, _SUMMARY_FIELDS)
      make_request = _summary_request

    rng = np.random.default_rng(self.seed)
    chosen_indices = rng.permutation(len(records))[: self.samples]
    return [make_request(records[index]) for index in sorted(chosen_indices)]

  def _make_sample(
    self, set_name: str, request: _Request, trained: Trained, capacity: int
  ) -> Sample:
    """Tokenizes the prompt of a request, with as much of its source as fits.

    Args:
      set_name: The name of the set, for the sample's id.
      request: The request.
      trained: The model.
      capacity: The most tokens of a prompt and its output together.

    Raises:
      UserError: if no token of the source fits.
    """
    tokenizer = trained.tokenizer
    start_ids = [
      *tokenizer.document_tokens.start,
      *tokenizer.encode(request.before_source),
    ]
    end_ids = tokenizer.encode(request.after_source)

    max_new_tokens = self._max_new_tokens(request.kind)
    num_other_tokens = max_new_tokens + len(start_ids) + len(end_ids)
    max_source_tokens = capacity - num_other_tokens
    if max_source_tokens < 1:
      raise UserError(
        f"{request.location}: the prompt without its source and the output take"
        f" {num_other_tokens} tokens, and there is room for {capacity}"
      )
    source = _cut_source(tokenizer, request.source, max_source_tokens)
    # The location is "FILE:LINE".
    line_number = request.location.rpartition(":")[2]
    return Sample(
      id=f"{set_name}/{line_number}",
      kind=request.kind,
      prompt_ids=start_ids + source.ids + end_ids,
      source=source.text,
      question=request.question,
      references=request.references,
      is_cut=source.is_cut,
    )

  def _reuse_or_generate(
    self, trained: Trained, samples: Sequence[Sample], path: epath.Path
  ) -> dict[str, str]:
    """Returns the model's output for each sample, by the sample's id.

    Outputs of an earlier run are reused if the model, the prompt and the limit
    of tokens are the same. All outputs are written to the file for later runs.

    Args:
      trained: The model.
      samples: The samples.
      path: The file of outputs. It may be missing.
    """
    cache_keys = self._output_cache_keys(trained, samples)
    outputs = _read_cached_outputs(path, cache_keys)
    # Each kind has its own limit of tokens, and its own end of an output.
    for kind in _OUTPUT_ENDS:
      missing_samples = []
      for sample in samples:
        if sample.kind == kind and sample.id not in outputs:
          missing_samples.append(sample)
      if missing_samples:
        outputs.update(self._generate(trained, missing_samples, kind))

    records = []
    for sample in samples:
      records.append({**cache_keys[sample.id], "output": outputs[sample.id]})
    _write_records(path, records)
    return outputs

  def _output_cache_keys(
    self, trained: Trained, samples: Sequence[Sample]
  ) -> dict[str, dict[str, Any]]:
    """Returns the cache key of each sample's output, by the sample's id.

    A cache key holds all that the output depends on. A stored output is reused
    if its key is equal. A record of generations.jsonl is a key with the field
    "output" added.
    """
    model_fingerprint = _fingerprint(trained)
    cache_keys = {}
    for sample in samples:
      cache_keys[sample.id] = {
        "id": sample.id,
        "model": model_fingerprint,
        "prompt_sha256": judge.sha256(json.dumps(sample.prompt_ids)),
        "max_new_tokens": self._max_new_tokens(sample.kind),
      }
    return cache_keys

  def _generate(
    self, trained: Trained, samples: Sequence[Sample], kind: str
  ) -> dict[str, str]:
    """Generates the outputs for samples of one kind.

    An output is cut at the text that ends its kind, such as a line break.

    Args:
      trained: The model.
      samples: The samples. At least one.
      kind: The kind of the samples, "summary" or "answer".

    Returns:
      The outputs by the samples' ids.
    """
    prompts = [sample.prompt_ids for sample in samples]
    max_new_tokens = self._max_new_tokens(kind)
    longest_prompt = max(map(len, prompts))
    sampler = self._make_sampler(trained, longest_prompt + max_new_tokens)
    tokenizer = trained.tokenizer
    output_end = _OUTPUT_ENDS[kind]

    def has_ended(ids: list[int]) -> bool:
      # Line breaks before the output do not end it.
      return output_end in tokenizer.decode(ids).lstrip()

    generated = sampler.generate(
      prompts,
      max_new_tokens,
      stop_ids=tokenizer.document_tokens.stop,
      stop=has_ended,
    )
    outputs = {}
    for sample, ids in zip(samples, generated, strict=True):
      text = tokenizer.decode(ids).strip()
      outputs[sample.id] = text.partition(output_end)[0].strip()
    return outputs

  def _make_sampler(self, trained: Trained, num_tokens: int) -> Sampler:
    """Returns a sampler for rows of `num_tokens` tokens.

    Its capacity is a power of two or the model's maximum length, so that few
    programs are compiled.
    """
    next_power_of_two = 1 << (num_tokens - 1).bit_length()
    capacity = max(_MIN_CAPACITY, next_power_of_two)
    capacity = min(capacity, trained.config.model.max_length)
    return Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, self.batch_tokens // capacity),
      capacity=capacity,
    )


def _summary_request(record: jsonl.Record) -> _Request:
  """Returns the request for a summary of a record's document."""
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
  """Returns the request for an answer to a record's question.

  Raises UserError if the right answers are not a list of strings.
  """
  question = record.value["question"]
  references = record.value["answers"]
  are_strings = all(isinstance(reference, str) for reference in references)
  if not references or not are_strings:
    raise UserError(
      f"{record.location}: the field 'answers' must be a list of strings, and"
      f" not empty; got {str(references)[:40]!r}"
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


def _cut_source(tokenizer: Tokenizer, source: str, max_tokens: int) -> _Source:
  """Returns the beginning of a source, with at most `max_tokens` tokens."""
  ids = tokenizer.encode(source)
  if len(ids) <= max_tokens:
    return _Source(ids, source, is_cut=False)
  cut_ids = ids[:max_tokens]
  return _Source(cut_ids, tokenizer.decode(cut_ids), is_cut=True)


def _free_of_hallucination(
  set_name: str,
  samples: Sequence[Sample],
  hallucination_by_id: Mapping[str, bool],
) -> Measurement:
  """Measures the fraction of a set's outputs without hallucination."""
  outcomes = [not hallucination_by_id[sample.id] for sample in samples]
  return proportion("free of hallucination", outcomes, set=set_name)


def _compare_with_references(
  set_name: str,
  samples: Sequence[Sample],
  outputs: Mapping[str, str],
  rouge_l: RougeL,
) -> Iterator[Measurement]:
  """Yields ROUGE-L, exact match (of answers) and empty outputs of a set.

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
  # Summaries are not expected to equal a reference. All samples of a set have
  # the same kind.
  if samples[0].kind == "answer":
    matches = []
    for sample in samples:
      matches.append(is_match(outputs[sample.id], sample.references))
    yield proportion("exact match", matches, set=set_name)
  yield proportion("empty outputs", is_empty, set=set_name)


def _read_cached_outputs(
  path: epath.Path, cache_keys: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
  """Returns the outputs of an earlier run whose cache keys are unchanged.

  Args:
    path: The file of outputs. It may be missing.
    cache_keys: The cache key of each output of this run, by the sample's id.

  Returns:
    The outputs by the samples' ids.
  """
  outputs: dict[str, str] = {}
  if not path.exists():
    return outputs
  for _, record in jsonl.read(path, {"id": str, "output": str}):
    output = record.pop("output")
    # The other fields of a record are the cache key.
    stored_key = record
    sample_id = stored_key["id"]
    if stored_key == cache_keys.get(sample_id):
      outputs[sample_id] = output
  return outputs


def _fingerprint(trained: Trained) -> str:
  """Returns a digest that identifies a model at a step of its training.

  It is computed from the model's name and the first values of each parameter.
  """
  digest = hashlib.sha256(trained.name.encode())
  for parameter in jax.tree.leaves(trained.params):
    # The index 0 in all dimensions but the last.
    first_row = parameter[(0,) * (parameter.ndim - 1)]
    values = np.asarray(first_row[:_NUM_FINGERPRINT_VALUES])
    digest.update(values.tobytes())
  return digest.hexdigest()[:16]


def _write_records(
  path: epath.Path, records: Sequence[Mapping[str, Any]]
) -> None:
  """Writes a file with a JSON object per line, completely or not at all."""
  lines = [json.dumps(record) + "\n" for record in records]
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines))
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error};"
      " set.hallucination.judge_dir chooses another place"
    ) from error
