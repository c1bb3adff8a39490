"""The hallucination suite: outputs, judge prompts and verdicts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from diffjax.config import Config, ModelConfig, UserError
from diffjax.data.tokenizer import load_tokenizer
from diffjax.evals import hallucination
from diffjax.evals.hallucination import Hallucination
from diffjax.evals.measurement import Measurement
from diffjax.evals.report import intervals
from diffjax.inference.trained import Trained

BYTES = load_tokenizer("bytes")
TRAINED = Trained(
  "runs/diff at step 5",
  Config(model=ModelConfig(max_length=400)),
  None,
  {"embedding": np.zeros((2, 2))},
  BYTES,
)


def news_record(number: int) -> dict[str, Any]:
  """Returns a document with its summary."""
  return {
    "document": f"The river rose by {number} metres. Nobody was hurt.",
    "summary": f"River rises by {number} metres",
  }


def fact_record(age: int) -> dict[str, Any]:
  """Returns a question with its source and answers."""
  return {
    "context": f"Ann is {age}.",
    "question": "How old is Ann?",
    "answers": [f"{age}", f"{age} years"],
  }


# The summaries xsum/1 to xsum/5, and the answers hotpotqa/1 to hotpotqa/3.
NEWS = [news_record(number) for number in range(1, 6)]
FACTS = [fact_record(age) for age in range(30, 33)]


class FakeSampler:
  """A sampler over a function from the text of a prompt to an output."""

  def __init__(self, write: Callable[[str], str]):
    self.write = write
    self.prompts: list[str] = []

  def __call__(
    self, model: Any, params: Any, *, batch_size: int, capacity: int
  ) -> FakeSampler:
    self.capacity = capacity
    return self

  def generate(
    self,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    *,
    stop_ids: Sequence[int],
    stop: Callable[[list[int]], bool],
  ) -> list[list[int]]:
    assert stop_ids == (BYTES.separator,)
    outputs = []
    for prompt in prompts:
      assert len(prompt) + max_new_tokens <= self.capacity
      text = BYTES.decode(prompt)
      self.prompts.append(text)
      output: list[int] = []
      for token in BYTES.encode(self.write(text))[:max_new_tokens]:
        output.append(token)
        if stop(output):
          break
      # `write_reference` continues with "more" after the end of its output.
      assert b"more" not in bytes(output)
      outputs.append(output)
    return outputs


def write_reference(prompt: str) -> str:
  """Returns the reference of a prompt's source, and more text."""
  if "Question:" in prompt:
    after_name = prompt.partition(" is ")[2]
    age = after_name.partition(".")[0]
    return f" The {age}.\nQuestion: more"
  after_verb = prompt.partition("rose by ")[2]
  number = after_verb.partition(" ")[0]
  return f"\nRiver rises by {number} metres\n\nDocument: more"


def write_other_text(prompt: str) -> str:
  """Returns a text that is no reference."""
  return "something else"


def write_nothing(prompt: str) -> str:
  """Returns an empty text."""
  return ""


def rouge_l_of_equal_texts(reference: str, text: str) -> float:
  """Returns 1 for equal texts, without the library that ROUGE-L needs."""
  return float(reference == text)


def load_rouge_l_of_equal_texts() -> Callable[[str, str], float]:
  """Returns what replaces ROUGE-L in these tests."""
  return rouge_l_of_equal_texts


@pytest.fixture
def data_dir(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
  """A directory with a set of each kind. ROUGE-L is 1 for equal texts."""
  write_records(tmp_path / "xsum.jsonl", NEWS)
  write_records(tmp_path / "hotpotqa.jsonl", FACTS)
  monkeypatch.setattr(
    hallucination, "load_rouge_l", load_rouge_l_of_equal_texts
  )
  return tmp_path


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
  """The sampler of a model that writes the references."""
  return use_sampler(monkeypatch, write_reference)


def use_sampler(
  monkeypatch: pytest.MonkeyPatch, write: Callable[[str], str]
) -> FakeSampler:
  """Makes the suite use a sampler that writes by a function."""
  sampler = FakeSampler(write)
  monkeypatch.setattr(hallucination, "Sampler", sampler)
  return sampler


def measure(
  data_dir: pathlib.Path, trained: Trained = TRAINED, **settings: Any
) -> dict[tuple[str, str], Measurement]:
  """Returns the measurements by (name, set)."""
  all_settings = {
    "sets": ("xsum", "hotpotqa"),
    "data_dir": str(data_dir),
    **settings,
  }
  measurements = {}
  for measurement in Hallucination(**all_settings).evaluate(trained):
    measurements[measurement.name, measurement.at["set"]] = measurement
  return measurements


def evaluate(
  data_dir: pathlib.Path, trained: Trained = TRAINED, **settings: Any
) -> dict[tuple[str, str], float]:
  """Returns the values of the measurements by (name, set)."""
  values = {}
  for key, measurement in measure(data_dir, trained, **settings).items():
    values[key] = intervals.interval(measurement).value
  return values


def write_records(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
  """Writes a JSONL file."""
  lines = [json.dumps(record) + "\n" for record in records]
  path.write_text("".join(lines))


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a JSONL file."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def model_dir(data_dir: pathlib.Path) -> pathlib.Path:
  """Returns the directory of the only model that has written outputs."""
  (directory,) = (data_dir / "judged").iterdir()
  return directory


def judge_outputs(
  data_dir: pathlib.Path, **settings: Any
) -> list[dict[str, Any]]:
  """Evaluates once, and returns the verdict " no" on each output."""
  evaluate(data_dir, **settings)
  verdicts = []
  for prompt in read_records(model_dir(data_dir) / "judge_prompts.jsonl"):
    verdicts.append(
      {"id": prompt["id"], "sha256": prompt["sha256"], "verdict": " no"}
    )
  return verdicts


def write_verdicts(
  data_dir: pathlib.Path, verdicts: list[dict[str, Any]]
) -> None:
  """Writes the verdicts where the suite reads them."""
  write_records(model_dir(data_dir) / "verdicts.jsonl", verdicts)


@pytest.mark.usefixtures("sampler")
def test_three_equal_outcomes_leave_wide_intervals_of_fractions(data_dir):
  """All of three answers are right, free of hallucination, and not empty."""
  verdicts = judge_outputs(data_dir, sets=("hotpotqa",))
  write_verdicts(data_dir, verdicts)

  measurements = measure(data_dir, sets=("hotpotqa",))

  exact_match = intervals.interval(measurements["exact match", "hotpotqa"])
  assert exact_match.value == 1
  assert exact_match.low < 0.5
  free_of_hallucination = intervals.interval(
    measurements["free of hallucination", "hotpotqa"]
  )
  assert free_of_hallucination == exact_match
  empty = intervals.interval(measurements["empty outputs", "hotpotqa"])
  assert empty.value == 0
  assert empty.high > 0.5


@pytest.mark.usefixtures("sampler")
def test_rouge_of_equal_values_has_no_interval(data_dir):
  """All three scores are 0, so each draw of a bootstrap has the same mean."""
  measurements = measure(data_dir, sets=("hotpotqa",))

  rouge = intervals.interval(measurements["ROUGE-L", "hotpotqa"])
  assert rouge.value == 0
  assert np.isnan(rouge.low)
  assert np.isnan(rouge.high)


# The fixture `sampler` makes the model write the reference of each question.
@pytest.mark.usefixtures("sampler")
def test_outputs_are_compared_with_references(data_dir):
  """The model writes the summaries of "xsum" and the answers of "hotpotqa"."""
  values = evaluate(data_dir)

  assert values == {
    ("ROUGE-L", "xsum"): 1.0,
    ("empty outputs", "xsum"): 0.0,
    # The answers are "The 30." and so on, and the references are "30".
    ("ROUGE-L", "hotpotqa"): 0.0,
    # An exact match ignores articles and full stops.
    ("exact match", "hotpotqa"): 1.0,
    ("empty outputs", "hotpotqa"): 0.0,
  }


def test_prompts_contain_source_and_question(data_dir, sampler):
  evaluate(data_dir)

  # The prompts of five summaries come before the prompts of answers.
  summary_prompt = sampler.prompts[0]
  assert summary_prompt == (
    "Document: The river rose by 1 metres. Nobody was hurt.\n\nSummary:"
  )
  answer_prompt = sampler.prompts[5]
  assert answer_prompt == "Ann is 30.\n\nQuestion: How old is Ann?\nAnswer:"


@pytest.mark.usefixtures("sampler")
def test_outputs_are_written_to_a_file(data_dir):
  """The fixture `sampler` makes the model write the reference of each source.

  These are five summaries of xsum.jsonl and three answers of hotpotqa.jsonl.
  """
  evaluate(data_dir)

  outputs = {}
  for record in read_records(model_dir(data_dir) / "generations.jsonl"):
    outputs[record["id"]] = record["output"]
  assert outputs == {
    "xsum/1": "River rises by 1 metres",
    "xsum/2": "River rises by 2 metres",
    "xsum/3": "River rises by 3 metres",
    "xsum/4": "River rises by 4 metres",
    "xsum/5": "River rises by 5 metres",
    "hotpotqa/1": "The 30.",
    "hotpotqa/2": "The 31.",
    "hotpotqa/3": "The 32.",
  }


@pytest.mark.usefixtures("sampler")
def test_the_directory_of_a_model_has_its_name_and_a_hash(data_dir):
  """The hash distinguishes, for example, "diff/1" from "diff 1"."""
  model = dataclasses.replace(TRAINED, name="runs/diff at step 5")

  evaluate(data_dir, model)

  directory_name = model_dir(data_dir).name
  assert re.fullmatch("runs-diff-at-step-5-[0-9a-f]+", directory_name)


@pytest.mark.usefixtures("sampler")
def test_each_output_has_a_judge_prompt(data_dir):
  """A judge reads an output at the end of a prompt, and gives a verdict."""
  evaluate(data_dir)

  outputs = read_records(model_dir(data_dir) / "generations.jsonl")
  prompts = read_records(model_dir(data_dir) / "judge_prompts.jsonl")
  for output, prompt in zip(outputs, prompts, strict=True):
    assert prompt["id"] == output["id"]
    prompt_text = prompt["prompt"].strip()
    assert prompt_text.endswith(output["output"])


@pytest.mark.usefixtures("sampler")
def test_each_judge_prompt_has_its_hash(data_dir):
  """The hash tells later whether a verdict is on this prompt."""
  evaluate(data_dir)

  for prompt in read_records(model_dir(data_dir) / "judge_prompts.jsonl"):
    prompt_bytes = prompt["prompt"].encode()
    assert prompt["sha256"] == hashlib.sha256(prompt_bytes).hexdigest()


@pytest.mark.usefixtures("sampler")
def test_a_message_asks_for_a_judge(data_dir, capsys):
  evaluate(data_dir)

  assert "send these prompts to a judge" in capsys.readouterr().err


@pytest.mark.usefixtures("sampler")
def test_judge_prompts_contain_source_and_question(data_dir):
  evaluate(data_dir)

  prompts = read_records(model_dir(data_dir) / "judge_prompts.jsonl")
  # Five summaries come first, then the answers.
  summary_prompt = prompts[0]["prompt"]
  assert "The river rose by 1 metres. Nobody was hurt." in summary_prompt
  assert "Summary:" in summary_prompt
  answer_prompt = prompts[5]["prompt"]
  assert "Ann is 30." in answer_prompt
  assert "How old is Ann?" in answer_prompt
  assert "Answer:" in answer_prompt


# The fixture `sampler` makes the model write the reference of each source.
@pytest.mark.usefixtures("sampler")
def test_verdicts_are_counted(data_dir):
  """A judge finds a hallucination in one of the five summaries of "xsum"."""
  first, *remaining = judge_outputs(data_dir, sets=("xsum",))
  write_verdicts(data_dir, [{**first, "verdict": "Yes."}, *remaining])

  values = evaluate(data_dir, sets=("xsum",))

  assert values["free of hallucination", "xsum"] == pytest.approx(4 / 5)


@pytest.mark.usefixtures("sampler")
def test_existing_outputs_are_used_again(data_dir, monkeypatch):
  """A second evaluation reads the outputs from a file.

  The fixture `sampler` makes the model write the reference of each question.
  """
  write_verdicts(data_dir, judge_outputs(data_dir))
  # From here on, the model would write something else.
  other_sampler = use_sampler(monkeypatch, write_other_text)

  values = evaluate(data_dir)

  assert not other_sampler.prompts
  assert values["ROUGE-L", "xsum"] == 1.0


@pytest.mark.usefixtures("sampler")
def test_verdicts_on_outputs_of_other_parameters_raise(data_dir, monkeypatch):
  """A model of the same name, but with other parameters, writes new outputs.

  A judge prompt contains the output, so the verdicts are on older prompts.
  """
  write_verdicts(data_dir, judge_outputs(data_dir))
  new_sampler = use_sampler(monkeypatch, write_nothing)
  new_params = {"embedding": np.ones((2, 2))}
  new_model = dataclasses.replace(TRAINED, params=new_params)

  message = "a verdict on an older prompt of 'xsum/1'"
  with pytest.raises(UserError, match=message):
    evaluate(data_dir, new_model)

  num_new_outputs = len(new_sampler.prompts)
  assert num_new_outputs == len(NEWS) + len(FACTS)


@pytest.mark.usefixtures("sampler")
def test_each_model_has_its_own_directory(data_dir, monkeypatch):
  """The verdicts on one model do not count for another one."""
  write_verdicts(data_dir, judge_outputs(data_dir))
  other = dataclasses.replace(TRAINED, name="runs/other at step 5")
  use_sampler(monkeypatch, write_nothing)

  values = evaluate(data_dir, other)

  assert values["empty outputs", "xsum"] == 1.0
  # The other model has no verdicts yet.
  assert ("free of hallucination", "xsum") not in values
  model_directories = list((data_dir / "judged").iterdir())
  assert len(model_directories) == 2


@pytest.mark.usefixtures("sampler")
def test_a_new_limit_generates_only_outputs_that_it_affects(
  data_dir, monkeypatch
):
  """The limit of summaries changes, so the three answers are used again.

  `sampler` and `new_sampler` both write the references.
  """
  # Nine tokens, here bytes, cut the summary "River rises by 1 metres".
  evaluate(data_dir, summary_tokens=9)
  new_sampler = use_sampler(monkeypatch, write_reference)

  values = evaluate(data_dir, summary_tokens=128)

  # The new summaries are whole. There are five.
  assert values["ROUGE-L", "xsum"] == 1.0
  assert len(new_sampler.prompts) == 5


@pytest.mark.parametrize(
  "changes, message",
  [
    pytest.param(
      {"sha256": "0" * 64},
      "verdicts.jsonl:2: a verdict on an older prompt of 'xsum/2'",
      id="older prompt",
    ),
    pytest.param(
      {"id": "xsum/9"},
      "verdicts.jsonl:2: unknown id 'xsum/9': it is not one of the 8 prompts",
      id="unknown id",
    ),
    pytest.param(
      {"verdict": "maybe"},
      "verdicts.jsonl:2: the verdict must be yes (a hallucination) or no; got"
      " 'maybe'",
      id="neither yes nor no",
    ),
  ],
)
@pytest.mark.usefixtures("sampler")
def test_an_invalid_verdict_is_reported_in_one_line(data_dir, changes, message):
  """The second of 8 verdicts is changed. It is on the output "xsum/2"."""
  first, second, *remaining = judge_outputs(data_dir)
  assert second["id"] == "xsum/2"
  write_verdicts(data_dir, [first, {**second, **changes}, *remaining])

  with pytest.raises(UserError, match=re.escape(message)) as error:
    evaluate(data_dir)
  assert "\n" not in str(error.value)


@pytest.mark.usefixtures("sampler")
def test_a_record_without_a_verdict_raises(data_dir):
  verdicts = judge_outputs(data_dir)
  del verdicts[1]["verdict"]
  write_verdicts(data_dir, verdicts)

  message = "verdicts.jsonl:2: the field 'verdict' is missing"
  with pytest.raises(UserError, match=message):
    evaluate(data_dir)


@pytest.mark.usefixtures("sampler")
def test_a_second_verdict_on_an_output_raises(data_dir):
  verdicts = judge_outputs(data_dir)
  write_verdicts(data_dir, [*verdicts, verdicts[0]])

  # The ninth line of the file has the second verdict.
  message = "verdicts.jsonl:9: a second verdict on 'xsum/1'"
  with pytest.raises(UserError, match=message):
    evaluate(data_dir)


@pytest.mark.usefixtures("sampler")
def test_an_output_without_a_verdict_raises(data_dir):
  """The judge has forgotten the third of 8 outputs."""
  verdicts = judge_outputs(data_dir)
  del verdicts[2]
  write_verdicts(data_dir, verdicts)

  message = (
    "verdicts.jsonl: holds 7 verdicts on 8 prompts; 'xsum/3' is the first"
    " without one"
  )
  with pytest.raises(UserError, match=message):
    evaluate(data_dir)


@pytest.mark.usefixtures("sampler")
def test_a_file_without_verdicts_raises(data_dir):
  evaluate(data_dir)
  write_verdicts(data_dir, [])

  with pytest.raises(UserError, match="verdicts.jsonl: is empty"):
    evaluate(data_dir)


def test_samples_are_drawn(data_dir, sampler):
  evaluate(data_dir, sets=("xsum",), samples=2)

  assert len(sampler.prompts) == 2


@pytest.fixture
def long_document(data_dir: pathlib.Path) -> str:
  """The only document of "xsum". It is longer than the model's 400 tokens."""
  document = "y" * 1000
  record = {"document": document, "summary": "?"}
  write_records(data_dir / "xsum.jsonl", [record])
  return document


def test_the_end_of_a_long_source_is_cut(data_dir, sampler, long_document):
  """The prompt and the summary fill up the model's 400 tokens, here bytes."""
  start, end = "Document: ", "\n\nSummary:"
  num_separators = 1
  num_summary_tokens = 128
  num_prompt_tokens = 400 - num_separators - num_summary_tokens
  num_source_tokens = num_prompt_tokens - len(start) - len(end)

  evaluate(data_dir, sets=("xsum",), summary_tokens=num_summary_tokens)

  cut_document = long_document[:num_source_tokens]
  assert sampler.prompts == [f"{start}{cut_document}{end}"]


@pytest.mark.usefixtures("long_document")
def test_a_judge_reads_the_same_part_of_a_long_source_as_the_model(
  data_dir, sampler
):
  """A document of 1,000 letters "y" is cut at its end."""
  evaluate(data_dir, sets=("xsum",))

  (model_prompt,) = sampler.prompts
  part = model_prompt.removeprefix("Document: ").removesuffix("\n\nSummary:")
  (record,) = read_records(model_dir(data_dir) / "judge_prompts.jsonl")
  assert part in record["prompt"]
  assert part + "y" not in record["prompt"]


@pytest.mark.usefixtures("long_document", "sampler")
def test_a_warning_says_how_many_sources_are_cut(data_dir, caplog):
  evaluate(data_dir, sets=("xsum",))

  message = "1 of 1 sources do not fit into 400 tokens and lost their end"
  assert message in caplog.text


@pytest.mark.parametrize(
  "name, records, message",
  [
    pytest.param(
      "xsum",
      [{"document": "a"}],
      "xsum.jsonl:1: the field 'summary' is missing",
      id="no summary",
    ),
    pytest.param(
      "hotpotqa",
      [FACTS[0], {"context": "a", "answers": []}],
      "hotpotqa.jsonl:2: the field 'question' is missing",
      id="no question",
    ),
    pytest.param(
      "hotpotqa",
      [{**FACTS[0], "answers": []}],
      "hotpotqa.jsonl:1: the field 'answers' must be a list of strings, and"
      " not empty",
      id="no answers",
    ),
    pytest.param(
      "hotpotqa",
      [{**FACTS[0], "answers": [3]}],
      "hotpotqa.jsonl:1: the field 'answers' must be a list of strings",
      id="answer that is a number",
    ),
    pytest.param(
      "hotpotqa",
      [{**FACTS[0], "question": "long " * 100}],
      "hotpotqa.jsonl:1: the prompt without its source and the output take"
      " 5.. tokens",
      id="long question",
    ),
    pytest.param("xsum", [], "xsum.jsonl: is empty", id="empty file"),
  ],
)
@pytest.mark.usefixtures("sampler")
def test_an_invalid_record_is_reported_in_one_line(
  data_dir, name, records, message
):
  write_records(data_dir / f"{name}.jsonl", records)

  with pytest.raises(UserError, match=message) as error:
    evaluate(data_dir, sets=(name,))
  assert "\n" not in str(error.value)


@pytest.mark.usefixtures("sampler")
def test_a_missing_set_raises(data_dir):
  (data_dir / "xsum.jsonl").unlink()

  with pytest.raises(UserError, match="xsum.jsonl: cannot be read"):
    evaluate(data_dir, sets=("xsum",))


@pytest.mark.parametrize(
  "settings, message",
  [
    pytest.param(
      {"max_tokens": 500},
      "set.hallucination.max_tokens = 500: the model takes at most 400",
      id="max_tokens",
    ),
    pytest.param({"samples": 0}, "set.hallucination.samples = 0", id="samples"),
    pytest.param(
      {"judge_dir": "/dev/null"},
      "cannot write /dev/null/.*set.hallucination.judge_dir chooses another"
      " place",
      id="judge_dir",
    ),
  ],
)
@pytest.mark.usefixtures("sampler")
def test_an_invalid_setting_is_reported_in_one_line(
  data_dir, settings, message
):
  """The model takes at most 400 tokens."""
  with pytest.raises(UserError, match=message) as error:
    evaluate(data_dir, sets=("xsum",), **settings)
  assert "\n" not in str(error.value)


def test_the_suite_needs_a_data_dir(data_dir):
  message = "set.hallucination.data_dir must name the directory"
  with pytest.raises(UserError, match=message):
    list(Hallucination(sets=("xsum",)).evaluate(TRAINED))


def test_the_suite_needs_rouge_score(monkeypatch):
  monkeypatch.setitem(sys.modules, "rouge_score", None)

  message = r"ROUGE-L needs rouge-score, .*pip install 'diffjax\[eval\]'"
  with pytest.raises(UserError, match=message):
    list(Hallucination().evaluate(TRAINED))


def test_random_parameters_give_wrong_answers(make_trained, data_dir):
  """The model and the sampler are real. All other tests replace them."""
  trained = make_trained("softmax", num_layers=1, max_length=256)

  values = evaluate(
    data_dir,
    trained=trained,
    sets=("hotpotqa",),
    samples=2,
    answer_tokens=8,
    batch_tokens=256,
  )

  assert values["exact match", "hotpotqa"] == 0.0
  outputs = read_records(model_dir(data_dir) / "generations.jsonl")
  assert len(outputs) == 2
