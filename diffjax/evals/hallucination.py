"""Contextual hallucination: texts of the model that contradict their source or add to it.

The paper's protocol (paper.md, §5): summaries (XSum, CNN-DM, MultiNews) and answers (Qasper, HotpotQA, 2WikiMQA), 100 samples of each set,
judged by another model; the accuracy is the share without hallucination. This suite calls no judge. A first run writes, for each model,

    JUDGE_DIR/MODEL/generations.jsonl      the model's texts
    JUDGE_DIR/MODEL/judge_prompts.jsonl    {"id": …, "sha256": …, "prompt": …} a line, to be sent to a judge

and a run that finds the judge's replies beside them,

    JUDGE_DIR/MODEL/verdicts.jsonl         {"id": …, "sha256": …, "verdict": "yes" or "no"} a line, yes for a hallucination

gives `free of hallucination` too. It reads the model's texts from the file, since those were judged. Replies to other prompts, whose sha256
differs, are an error, and so are replies to some of the prompts only.

Data are files DATA_DIR/SET.jsonl, for summaries with the fields document and summary (the reference), for answers with context, question
and answers (a list of right answers). The choices that the paper leaves open: decoding is greedy, up to the first line break (answers) or
blank line (summaries); a source too long for the model loses its end, for the judge too; ROUGE-L is the F1 of words, the best over the
references, where a word is a sequence of letters, marks and digits of any script, ASCII words are stemmed as English, and each letter of a
script without spaces (Chinese, Japanese, Thai, …) is a word; exact match ignores case, punctuation and articles. An empty output has no
hallucination, so the share of empty outputs is a figure too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath

from diffjax.config import UserError, at_least, field
from diffjax.evals.measurement import Measurement, mean_of, proportion
from diffjax.evals.methods import jsonl
from diffjax.evals.report.results import TableSpec
from diffjax.evals.suite import Suite
from diffjax.host.files import write_atomically
from diffjax.host.progress import say
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained

_SUMMARY = {"document": str, "summary": str}
_ANSWER = {"context": str, "question": str, "answers": list}
_JUDGE = """Below are a source text and {what}. Does the {kind} say anything that contradicts the source, or that the source does not \
support? Reply with one word: yes if it does, no if it does not.

Source:
{source}
{question}
{title}:
{output}
"""


@dataclasses.dataclass(frozen=True)
class Sample:
  """A summary or answer to write.

  Attributes:
    id: SET/LINE.
    kind: "summary" or "answer".
    ids: The prompt.
    source: The part of the source that is in the prompt.
    question: "" for summaries.
    references: Right outputs.
  """

  id: str
  kind: str
  ids: list[int]
  source: str
  question: str
  references: list[str]

  def judge_prompt(self, output: str) -> str:
    """The judge's prompt about an output."""
    what, question = {
      "summary": ("a summary of it", ""),
      "answer": (
        "an answer to a question about it",
        f"\nQuestion: {self.question}\n",
      ),
    }[self.kind]
    return _JUDGE.format(
      what=what,
      kind=self.kind,
      source=self.source,
      question=question,
      title=self.kind.capitalize(),
      output=output,
    )


class _Data(NamedTuple):
  """The samples of each set, and ROUGE-L of a reference and a text."""

  samples: dict[str, list[Sample]]
  rouge_l: Callable[[str, str], float]


@dataclasses.dataclass(frozen=True)
class Hallucination(Suite[_Data]):
  """Quality of summaries and answers, and how many are free of hallucination.

  All measurements are fractions, by set. "ROUGE-L" is the overlap with the
  reference. "exact match" is the fraction of answers that equal a reference.
  "empty outputs" is the fraction of outputs without text. "free of
  hallucination" is the fraction of outputs that a judge finds supported by their
  source. It needs the judge's verdicts. The units are outputs.
  """

  name: ClassVar[str] = "hallucination"
  table: ClassVar[TableSpec] = TableSpec(
    unit="outputs",
    notes=(
      "ROUGE-L: overlap with the reference, from 0 to 1",
      "free of hallucination: needs the verdicts of a judge",
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
    """Returns the samples of each set."""
    rouge_l = _load_rouge()
    samples = {name: _read(name, trained, self) for name in self.sets}
    return _Data(samples, rouge_l)

  def measure(self, trained: Trained, data: _Data) -> Iterator[Measurement]:
    """Yields measurements."""
    samples, rouge_l = data
    everything = [sample for some in samples.values() for sample in some]
    home = epath.Path(
      self.judge_dir or os.path.join(self.data_dir, "judged")
    ).expanduser() / _folder(trained.name)
    outputs = _outputs(trained, self, everything, home / "generations.jsonl")
    prompts = {
      sample.id: sample.judge_prompt(outputs[sample.id])
      for sample in everything
    }
    path = home / "judge_prompts.jsonl"
    _write(
      path,
      (
        {"id": key, "sha256": _sha256(prompt), "prompt": prompt}
        for key, prompt in prompts.items()
      ),
    )
    verdicts = home / "verdicts.jsonl"
    judged = read_verdicts(verdicts, prompts) if verdicts.exists() else {}
    if not judged:
      say(
        f"{path}: send these prompts to a judge and write its replies to {verdicts} to have hallucinations counted"
      )
    for name, some in samples.items():
      texts = [outputs[sample.id] for sample in some]
      if judged:
        yield proportion(
          "free of hallucination",
          (not judged[sample.id] for sample in some),
          set=name,
        )
      best = [
        max(rouge_l(reference, text) for reference in sample.references)
        for sample, text in zip(some, texts, strict=True)
      ]
      yield mean_of("ROUGE-L", best, set=name)
      if some[0].kind == "answer":
        yield proportion(
          "exact match",
          (
            is_match(text, sample.references)
            for sample, text in zip(some, texts, strict=True)
          ),
          set=name,
        )
      yield proportion("empty outputs", (not text for text in texts), set=name)


def read_verdicts(
  path: epath.PathLike, prompts: dict[str, str]
) -> dict[str, bool]:
  """Reads whether each output has a hallucination.

  Args:
    path: File of one {"id", "sha256", "verdict"} a line.
    prompts: The judge's prompts, by id.

  Returns:
    True for a hallucination, by id.

  Raises:
    UserError: for a verdict on another prompt, a second one on the same, one that is neither yes nor no, or a prompt without a verdict.
  """
  found: dict[str, bool] = {}
  for place, row in jsonl.read(
    path, {"id": str, "sha256": str, "verdict": str}
  ):
    key, verdict = row["id"], row["verdict"].strip().strip(".").lower()
    if key not in prompts:
      raise UserError(
        f"{place}: a verdict on {key!r}, which is not one of the {len(prompts)} prompts of judge_prompts.jsonl beside it"
      )
    if row["sha256"] != _sha256(prompts[key]):
      raise UserError(
        f"{place}: a verdict on an older prompt of {key!r} (its sha256 differs); judge judge_prompts.jsonl again"
      )
    if verdict not in ("yes", "no"):
      raise UserError(
        f"{place}: the verdict must be yes (a hallucination) or no; got {row['verdict'][:40]!r}"
      )
    if key in found:
      raise UserError(f"{place}: a second verdict on {key!r}")
    found[key] = verdict == "yes"
  if missing := [key for key in prompts if key not in found]:
    raise UserError(
      f"{path}: holds {len(found)} verdicts on {len(prompts)} prompts; {missing[0]!r} is the first without one"
    )
  return found


def is_match(text: str, references: Sequence[str]) -> bool:
  """True if a text equals one of the references, apart from case, punctuation, articles and spaces."""

  def normal(text: str) -> list[str]:
    letters = itertools.filterfalse(_is_punctuation, _normalise(text))
    words = "".join(letters).split()
    return [word for word in words if word not in ("a", "an", "the")]

  return any(normal(text) == normal(reference) for reference in references)


def _normalise(text: str) -> str:
  """Returns a text without case, and with one form for equal characters."""
  return unicodedata.normalize("NFKC", text).casefold()


def _is_punctuation(character: str) -> bool:
  if character in string.punctuation:
    return True
  return unicodedata.category(character).startswith("P")


class _WordTokenizer:
  """Divides a text into words, in the interface of rouge-score.

  rouge-score's own tokenizer drops all letters but those of ASCII. On ASCII
  texts both give the same words.
  """

  def __init__(self) -> None:
    # Imported here: they come with the extra `eval`.
    import regex
    from nltk.stem import porter

    unspaced = (
      r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
    )
    # A letter of a script without spaces with its marks, or a word of others.
    self._word = regex.compile(
      rf"[[{unspaced}]&&[\p{{L}}\p{{N}}]]\p{{M}}*|[\p{{L}}\p{{M}}\p{{N}}--[{unspaced}]]+",
      regex.V1,
    )
    self._stem = porter.PorterStemmer().stem

  def tokenize(self, text: str) -> list[str]:
    """Returns the words of a text, stemmed if they are ASCII."""
    words = []
    for word in self._word.findall(_normalise(text)):
      # Like rouge-score, does not stem short words.
      if word.isascii() and len(word) > 3:
        word = self._stem(word)
      words.append(word)
    return words


def _load_rouge() -> Callable[[str, str], float]:
  try:
    from rouge_score import rouge_scorer

    tokenizer = _WordTokenizer()
  except ImportError as error:
    raise UserError(
      f"ROUGE-L needs rouge-score, which cannot be imported ({error}); pip install 'diffjax[eval]'"
    ) from error
  scorer = rouge_scorer.RougeScorer(["rougeL"], tokenizer=tokenizer)
  return lambda reference, text: (
    scorer.score(reference, text)["rougeL"].fmeasure
  )


def _read(name: str, trained: Trained, settings: Hallucination) -> list[Sample]:
  """The chosen records of a set, as prompts."""
  limit = trained.config.model.max_length
  capacity = settings.max_tokens or limit
  if not settings.data_dir:
    raise UserError(
      "set.hallucination.data_dir must name the directory that holds SET.jsonl, such as xsum.jsonl, for every set"
    )
  if not 1 <= capacity <= limit:
    raise UserError(
      f"set.hallucination.max_tokens = {settings.max_tokens}: the model takes at most {limit} (its config.model.max_length)"
    )
  path = os.path.join(settings.data_dir, f"{name}.jsonl")
  fields = _ANSWER if "question" in jsonl.read(path, {})[0].value else _SUMMARY
  records = jsonl.read(path, fields)
  chosen = np.random.default_rng(settings.seed).permutation(len(records))[
    : settings.samples
  ]
  encode = trained.tokenizer.encode
  samples, cut = [], 0
  for place, row in (records[index] for index in sorted(chosen)):
    if fields is _SUMMARY:
      kind, before, source, question, references = (
        "summary",
        "Document: ",
        row["document"],
        "",
        [row["summary"]],
      )
      after, new = "\n\nSummary:", settings.summary_tokens
    else:
      kind, before, source, question, references = (
        "answer",
        "",
        row["context"],
        row["question"],
        row["answers"],
      )
      after, new = f"\n\nQuestion: {question}\nAnswer:", settings.answer_tokens
      if not references or not all(
        isinstance(reference, str) for reference in references
      ):
        raise UserError(
          f"{place}: the field 'answers' must be a list of strings, and not empty; got {str(references)[:40]!r}"
        )
    first, middle, last = (
      [*trained.tokenizer.document_tokens.start, *encode(before)],
      encode(source),
      encode(after),
    )
    room = capacity - new - len(first) - len(last)
    if room < 1:
      raise UserError(
        f"{place}: the prompt without its source and the output take {capacity - room} tokens, and there is room for {capacity}"
      )
    if len(middle) > room:
      middle, cut = middle[:room], cut + 1
      source = trained.tokenizer.decode(middle)
    samples.append(
      Sample(
        f"{name}/{place.rsplit(':', 1)[1]}",
        kind,
        first + middle + last,
        source,
        question,
        references,
      )
    )
  if cut:
    logging.warning(
      "%s: %d of %d sources do not fit into %d tokens and lost their end",
      path,
      cut,
      len(samples),
      capacity,
    )
  return samples


def _outputs(
  trained: Trained,
  settings: Hallucination,
  samples: Sequence[Sample],
  path: epath.Path,
) -> dict[str, str]:
  """The model's output for each sample. Outputs for the same prompts and limits are read from the file; all are written to it."""
  model = _fingerprint(trained)
  limits = {
    "summary": settings.summary_tokens,
    "answer": settings.answer_tokens,
  }
  stamps = {
    sample.id: {
      "id": sample.id,
      "model": model,
      "prompt_sha256": _sha256(json.dumps(sample.ids)),
      "max_new_tokens": limits[sample.kind],
    }
    for sample in samples
  }
  outputs: dict[str, str] = {}
  if path.exists():
    for _, row in jsonl.read(path, {"id": str, "output": str}):
      output = row.pop("output")
      if stamps.get(row["id"]) == row:
        outputs[row["id"]] = output
  decode = trained.tokenizer.decode
  for kind, end in (("summary", "\n\n"), ("answer", "\n")):
    waiting = [
      sample
      for sample in samples
      if sample.kind == kind and sample.id not in outputs
    ]
    if not waiting:
      continue
    longest = max(len(sample.ids) for sample in waiting) + limits[kind]
    capacity = min(
      max(64, 1 << (longest - 1).bit_length()), trained.config.model.max_length
    )  # a power of two, so that few are compiled
    sampler = Sampler(
      trained.model,
      trained.params,
      batch_size=max(1, settings.batch_tokens // capacity),
      capacity=capacity,
    )

    def ended(ids: list[int], end: str = end) -> bool:
      return end in decode(ids).lstrip()

    written = sampler.generate(
      [sample.ids for sample in waiting],
      limits[kind],
      stop_ids=trained.tokenizer.document_tokens.stop,
      stop=ended,
    )
    for sample, ids in zip(waiting, written, strict=True):
      outputs[sample.id] = decode(ids).strip().split(end)[0].strip()
  _write(
    path,
    ({**stamps[sample.id], "output": outputs[sample.id]} for sample in samples),
  )
  return outputs


def _fingerprint(trained: Trained) -> str:
  """A digest of the name and the first values of each parameter, which differs between models and between steps."""
  digest = hashlib.sha256(trained.name.encode())
  for leaf in jax.tree.leaves(trained.params):
    digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)][:256]).tobytes())
  return digest.hexdigest()[:16]


def _folder(name: str) -> str:
  """The name of a model's folder."""
  return f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}-{_sha256(name)[:6]}"


def _sha256(text: str) -> str:
  return hashlib.sha256(
    text.encode("utf-8", errors="surrogatepass")
  ).hexdigest()


def _write(path: epath.Path, rows: Iterable[dict[str, Any]]) -> None:
  """Writes a file of JSON lines, completely or not at all."""
  lines = [json.dumps(row) + "\n" for row in rows]
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines))
  except OSError as error:
    raise UserError(
      f"cannot write {path}: {error.strerror or error}; set.hallucination.judge_dir chooses another place"
    ) from error
