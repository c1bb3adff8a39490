"""With prompts, only the tokens of answers have weight."""

import dataclasses
import json
import pathlib
import struct
from typing import NamedTuple

import chex
import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import packing, pipeline, prepared, sources
from diffjax.data.batches import BatchShare
from diffjax.data.document import Document
from diffjax.data.row import Row, decode_row, encode_row, make_batch

LENGTH = 16
QUESTION_AND_ANSWER = DataConfig(
  validation_fraction=0.0, prompt_field="question", text_field="answer"
)


def make_example(start, prompt_size, answer_size) -> packing.Example:
  """Returns an example of different tokens: start, start + 1, …

  Args:
    start: The first token, which stands for the separator.
    prompt_size: Number of tokens of the prompt, without the separator.
    answer_size: Number of tokens of the answer, without the separator.
  """
  num_tokens = 1 + prompt_size + answer_size + 1
  tokens = np.arange(start, start + num_tokens, dtype=np.int32)
  return packing.Example(tokens, prompt_length=1 + prompt_size)


class Packed(NamedTuple):
  """The rows of examples, and the counts of examples that did not fit."""

  rows: list[Row]
  counts: packing.ExampleCounts


def pack(examples) -> Packed:
  """Packs examples into rows of LENGTH tokens."""
  counts = packing.ExampleCounts(LENGTH)
  dataset = grain.MapDataset.source(examples).to_iter_dataset(
    grain.ReadOptions(num_threads=0)
  )
  rows = list(packing.pack(dataset, LENGTH, "documents", counts))
  return Packed(rows, counts)


def learned_tokens(batch) -> list[int]:
  """Returns the targets with weight, sorted."""
  return sorted(batch["targets"][batch["weights"] > 0].tolist())


def test_the_weights_of_a_known_row():
  """Only the tokens of answers have weight."""
  # Two segments, "s p p | a a s" and "s p | a s": separators s, tokens p of the
  # prompt, and tokens a of the answer.
  row = Row(
    tokens=np.arange(10, 20, dtype=np.int32),
    segment_lengths=np.array([6, 4], np.int32),
    prompt_lengths=np.array([3, 2], np.int32),
  )

  batch = make_batch([row], length=11)

  # The answers have weight, with the separators after them. 0 is padding.
  targets = [11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0]
  weights = [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]
  segment_ids = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0]
  assert batch["targets"].tolist() == [targets]
  assert batch["weights"].tolist() == [weights]
  assert batch["segment_ids"].tolist() == [segment_ids]


def test_without_prompts_all_tokens_of_a_text_are_learned():
  """Plain text has no prompts, so their lengths are zero."""
  # Two segments, "s a a a a s" and "s a a s": separators s and tokens a.
  row = Row(
    tokens=np.arange(10, 20, dtype=np.int32),
    segment_lengths=np.array([6, 4], np.int32),
    prompt_lengths=np.array([0, 0], np.int32),
  )

  batch = make_batch([row], length=11)

  # Target 16 begins the second segment, and 0 is padding.
  targets = [11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0]
  weights = [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
  assert batch["targets"].tolist() == [targets]
  assert batch["weights"].tolist() == [weights]


def test_prompts_change_only_the_weights():
  row = Row(
    tokens=np.arange(10, 20, dtype=np.int32),
    segment_lengths=np.array([6, 4], np.int32),
    prompt_lengths=np.array([3, 2], np.int32),
  )
  row_without_prompts = row._replace(prompt_lengths=np.zeros(2, np.int32))

  batch = make_batch([row], length=11)
  batch_without_prompts = make_batch([row_without_prompts], length=11)

  del batch["weights"]
  del batch_without_prompts["weights"]
  chex.assert_trees_all_equal(batch_without_prompts, batch)


@pytest.fixture
def short_examples() -> list[packing.Example]:
  """Returns 200 examples. Example n has tokens from 100n to 100n + 99."""
  rng = np.random.default_rng(0)
  short_examples = []
  for index in range(200):
    prompt_size = rng.integers(0, 9)
    answer_size = rng.integers(1, 5)
    short_examples.append(
      make_example(1 + 100 * index, prompt_size, answer_size)
    )
  return short_examples


def test_every_answer_is_learned_once(short_examples):
  """The targets with weight are the tokens of all answers.

  All of `short_examples` fit in a row, so none is skipped or cut.
  """
  packed = pack(short_examples)

  batch = make_batch(packed.rows, LENGTH)

  answer_tokens = []
  for example in short_examples:
    answer_tokens += example.tokens[example.prompt_length :].tolist()
  assert learned_tokens(batch) == sorted(answer_tokens)
  assert packed.counts.skipped == 0
  assert packed.counts.cut == 0


def test_a_learned_target_is_of_the_same_example_as_its_input(short_examples):
  batch = make_batch(pack(short_examples).rows, LENGTH)

  # Example n has tokens from 100n to 100n + 99.
  has_weight = batch["weights"] > 0
  example_of_target = batch["targets"][has_weight] // 100
  example_of_input = batch["tokens"][has_weight] // 100
  chex.assert_trees_all_equal(example_of_target, example_of_input)


def test_segments_are_whole_examples_with_their_prompts(short_examples):
  """Each segment has the length of an example, and the length of its prompt.

  All tokens of `short_examples` are different, so the first one identifies an
  example.
  """
  rows = pack(short_examples).rows

  segments = []
  for row in rows:
    segment_starts = np.cumsum(row.segment_lengths) - row.segment_lengths
    first_tokens = row.tokens[segment_starts]
    segments += zip(
      first_tokens, row.segment_lengths, row.prompt_lengths, strict=True
    )
  expected = []
  for example in short_examples:
    first_token = example.tokens[0]
    expected.append((first_token, len(example.tokens), example.prompt_length))
  assert sorted(segments) == sorted(expected)


def test_examples_share_rows(short_examples):
  rows = pack(short_examples).rows

  assert len(rows) < len(short_examples)


@pytest.fixture
def long_examples() -> list[packing.Example]:
  """Returns 300 examples. Many are longer than a row."""
  rng = np.random.default_rng(1)
  long_examples = []
  for index in range(300):
    prompt_size = rng.integers(0, 40)
    answer_size = rng.integers(1, 60)
    long_examples.append(
      make_example(1 + 1000 * index, prompt_size, answer_size)
    )
  return long_examples


def test_examples_that_do_not_fit_are_counted():
  """Prompts that fill a row are skipped, and long answers are cut.

  A row has 16 inputs and a last target, so it holds 17 tokens. A separator is
  before the prompt, and one is after the answer.
  """
  fitting = [
    make_example(100, prompt_size=2, answer_size=13),
    # Only the last separator does not fit. It is dropped, which is no cut.
    make_example(200, prompt_size=2, answer_size=14),
  ]
  with_long_answers = [
    make_example(300, prompt_size=2, answer_size=15),
    make_example(400, prompt_size=2, answer_size=90),
  ]
  with_long_prompts = [
    make_example(500, prompt_size=16, answer_size=1),
    make_example(600, prompt_size=80, answer_size=1),
  ]

  packed = pack(fitting + with_long_answers + with_long_prompts)

  assert packed.counts.cut == len(with_long_answers)
  assert packed.counts.skipped == len(with_long_prompts)


def test_every_row_has_something_to_learn(long_examples):
  """A row of prompt tokens alone would be wasted computation."""
  batch = make_batch(pack(long_examples).rows, LENGTH)

  has_weight = batch["weights"].any(axis=1)
  assert has_weight.all()


def test_all_pieces_of_a_long_answer_are_learned(long_examples):
  """An answer that is longer than a row continues in other rows.

  All tokens of `long_examples` are different.
  """
  batch = make_batch(pack(long_examples).rows, length=16)

  # A row holds 16 inputs and a last target.
  tokens_per_row = 17
  expected = set()
  for example in long_examples:
    # Examples without room for an answer beside the prompt are skipped.
    if example.prompt_length < tokens_per_row:
      expected.update(example.tokens[example.prompt_length :])
    # The first token of each row is not a target.
    expected.difference_update(example.tokens[::tokens_per_row])
  assert learned_tokens(batch) == sorted(expected)


def test_a_prompt_may_leave_room_for_one_token_of_the_answer():
  """The only weight of the row is on its last target."""
  # A separator and 15 tokens of the prompt are the 16 inputs of a row.
  packed = pack([make_example(1, prompt_size=15, answer_size=1)])

  batch = make_batch(packed.rows, length=16)

  assert batch["weights"].tolist() == [[0] * 15 + [1]]
  # The rest is the last separator alone, which does not count as cut.
  assert packed.counts.skipped == 0
  assert packed.counts.cut == 0


def test_a_prompt_that_fills_a_row_is_skipped():
  # A separator and 16 tokens of the prompt are the 17 tokens of a row, which
  # are 16 inputs and a last target.
  packed = pack([make_example(1, prompt_size=16, answer_size=5)])

  assert not packed.rows
  assert packed.counts.skipped == 1
  assert packed.counts.cut == 0


# Records of rows.


@pytest.mark.parametrize("vocab_size", [256, 100_000])
def test_a_decoded_record_is_the_encoded_row(vocab_size):
  """Ids of a large vocabulary take four bytes instead of two."""
  examples = [
    make_example(1, prompt_size=3, answer_size=4),
    # Longer than a row of 16 inputs.
    make_example(20, prompt_size=2, answer_size=30),
    make_example(60, prompt_size=0, answer_size=1),
  ]

  for row in pack(examples).rows:
    record = encode_row(row, vocab_size=vocab_size, with_prompts=True)
    chex.assert_trees_all_equal(decode_row(record), row)


def test_a_record_that_was_cut_short_is_an_error():
  (row,) = pack([make_example(1, prompt_size=3, answer_size=4)]).rows
  record = encode_row(row, vocab_size=256, with_prompts=True)
  record_without_last_byte = record[:-1]

  with pytest.raises(ValueError, match="tokens"):
    decode_row(record_without_last_byte)


# Prepared rows of earlier versions are on disks, so their bytes stay the same.


def test_a_row_without_prompts_has_the_bytes_of_earlier_versions():
  """Rows that were prepared long ago must stay readable."""
  # The bytes of "hi" and "!", with the separator 255.
  tokens = [255, 104, 105, 255, 255, 33]
  row = Row(
    tokens=np.array(tokens, np.int32),
    segment_lengths=np.array([4, 2], np.int32),
    prompt_lengths=np.array([0, 0], np.int32),
  )

  record = encode_row(row, vocab_size=256, with_prompts=False)

  # The numbers are little-endian, of four bytes and of two bytes.
  num_segments = struct.pack("<i", 2)
  segment_lengths = struct.pack("<2i", 4, 2)
  token_ids = struct.pack("<6H", *tokens)
  assert record == num_segments + segment_lengths + token_ids
  chex.assert_trees_all_equal(decode_row(record), row)


def test_a_row_with_prompts_has_the_bytes_of_earlier_versions():
  """Rows that were prepared long ago must stay readable."""
  # The bytes of "hi" and "!", with the separator 255.
  tokens = [255, 104, 105, 255, 255, 33]
  row = Row(
    tokens=np.array(tokens, np.int32),
    segment_lengths=np.array([4, 2], np.int32),
    prompt_lengths=np.array([2, 1], np.int32),
  )

  record = encode_row(row, vocab_size=256, with_prompts=True)

  # The numbers are little-endian, of four bytes and of two bytes. A negative
  # number of segments tells that there are lengths of prompts.
  num_segments = struct.pack("<i", -2)
  segment_lengths = struct.pack("<2i", 4, 2)
  prompt_lengths = struct.pack("<2i", 2, 1)
  token_ids = struct.pack("<6H", *tokens)
  expected = num_segments + segment_lengths + prompt_lengths + token_ids
  assert record == expected
  chex.assert_trees_all_equal(decode_row(record), row)


def test_rows_without_prompts_have_the_fields_of_earlier_versions(jsonl):
  """Rows on disk are used only if their description has the same fields."""
  (target,) = prepared.targets(DataConfig(source=f"jsonl:{jsonl}"))

  assert sorted(target.description) == [
    "format",
    "length",
    "packing",
    "source",
    "splits",
    "text_field",
    "tokenizer",
    "validation_fraction",
  ]


# Records of questions and answers.


def read(spec, config=QUESTION_AND_ANSWER, split="train") -> list[Document]:
  """Returns the documents of a source."""
  source = sources.documents(spec, split, config)
  documents = []
  for part in source.parts:
    documents.extend(source.read(part))
  return documents


def write_jsonl(path, records) -> str:
  """Writes a JSONL file, and returns the source that reads it."""
  lines = [json.dumps(record) + "\n" for record in records]
  path.write_text("".join(lines))
  return f"jsonl:{path}"


def write_parquet(path, records) -> str:
  """Writes a Parquet file, and returns the source that reads it."""
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
  return f"parquet:{path}"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
  "text_field", ["answer", "turns.1.value", "turns.-1.value"]
)
def test_the_answer_can_be_in_a_list_of_turns(tmp_path, write, text_field):
  """A path such as turns.-1.value names the value of the last turn."""
  record = {
    "question": "3 + 1?",
    "answer": "4",
    "turns": [
      {"from": "user", "value": "?"},
      {"from": "model", "value": "4"},
    ],
  }
  source = write(tmp_path / "records", [record, record])
  config = DataConfig(
    validation_fraction=0.0, prompt_field="question", text_field=text_field
  )

  documents = read(source, config)

  # The prompt is made by the default of config.data.prompt_template.
  prompt = "Question: 3 + 1?\nAnswer:\n"
  document = Document(text="4", replaced=False, prompt=prompt)
  assert documents == [document, document]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_the_prompt_template_can_have_braces(tmp_path, write):
  """Only {prompt} is replaced, so the other braces stay."""
  record = {"question": "3 + 1?", "answer": "4"}
  source = write(tmp_path / "records", [record])
  config = DataConfig(
    validation_fraction=0.0,
    prompt_field="question",
    text_field="answer",
    prompt_template="{{prompt}}!",
  )

  (document,) = read(source, config)

  assert document.prompt == "{3 + 1?}!"


def test_a_field_with_a_dot_in_its_name_comes_before_a_path(tmp_path):
  """ "a.b" is a field of the record, and also the path to a field of "a"."""
  record = {"question": "?", "a.b": "name", "a": {"b": "path"}}
  source = write_jsonl(tmp_path / "a.jsonl", [record])
  config = DataConfig(
    validation_fraction=0.0, prompt_field="question", text_field="a.b"
  )

  (document,) = read(source, config)

  assert document.text == "name"


@pytest.mark.parametrize(
  ("record", "message"),
  [
    pytest.param(
      '{"answer": "2"}',
      "a.jsonl:3: config.data.prompt_field = 'question' is not text here;"
      r" the fields are answer \(str\)",
      id="no prompt",
    ),
    pytest.param(
      '{"question": null, "answer": "2"}',
      "a.jsonl:3: config.data.prompt_field",
      id="null prompt",
    ),
    pytest.param(
      '{"question": ["1 + 1?"], "answer": "2"}',
      r"a.jsonl:3: config.data.prompt_field = .*question \(list\)",
      id="list as prompt",
    ),
    pytest.param(
      '{"question": "1 + 1?"}',
      "a.jsonl:3: config.data.text_field = 'answer' is not text here;"
      r" the fields are question \(str\)",
      id="no answer",
    ),
    pytest.param(
      '["1 + 1?", "2"]',
      "a.jsonl:3: .*must be a JSON object",
      id="no object",
    ),
  ],
)
def test_a_bad_record_is_named(tmp_path, record, message):
  """The error is one line with the file, the line, and the bad field."""
  path = tmp_path / "a.jsonl"
  good_record = '{"question": "a", "answer": "b"}'
  path.write_text(f"{good_record}\n{good_record}\n{record}\n")

  with pytest.raises(UserError, match=message) as caught:
    read(f"jsonl:{path}")
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  "path",
  [
    "turns.1.value",
    "turns.-2.value",
    "turns.x.value",
    "turns.0.value.x",
    "turns.0",
    "turns..value",
  ],
)
def test_a_path_that_leads_nowhere_is_an_error(tmp_path, path):
  """The record has one turn, so turns.0.value would be right."""
  record = {"question": "a", "turns": [{"value": "b"}]}
  source = write_jsonl(tmp_path / "a.jsonl", [record])
  config = DataConfig(
    validation_fraction=0.0, prompt_field="question", text_field=path
  )

  with pytest.raises(UserError, match="a.jsonl:1: config.data.text_field"):
    read(source, config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(
      {},
      "prompt_field = 'question' is not text in row 1 of row group 0",
      id="null prompt",
    ),
    pytest.param(
      {"prompt_field": "problem"},
      "has no column config.data.prompt_field = 'problem';"
      " its columns are question, answer, turns",
      id="no column",
    ),
    pytest.param(
      {"prompt_field": "answer", "text_field": "turns.0"},
      "text_field = 'turns.0' is not text in row 1",
      id="empty list",
    ),
  ],
)
def test_a_bad_row_of_parquet_is_named(tmp_path, changes, message):
  """The error has the row, or the columns if one is missing."""
  records = [
    {"question": "a", "answer": "b", "turns": ["x"]},
    {"question": None, "answer": "c", "turns": []},
  ]
  source = write_parquet(tmp_path / "a.parquet", records)

  with pytest.raises(UserError, match=message):
    read(source, dataclasses.replace(QUESTION_AND_ANSWER, **changes))


def test_records_without_an_answer_are_skipped(tmp_path):
  """Without an answer, there is nothing to learn. The question may be empty."""
  records = [
    {"question": "a", "answer": ""},
    {"question": "a", "answer": None},
    {"question": "", "answer": "b"},
  ]
  source = write_jsonl(tmp_path / "a.jsonl", records)

  documents = read(source)

  prompt = "Question: \nAnswer:\n"
  assert documents == [Document(text="b", replaced=False, prompt=prompt)]


def test_all_answers_to_a_question_are_in_the_same_split(tmp_path):
  """Otherwise the model would be validated on questions that it has seen."""
  # There are 10 answers to each of 100 questions.
  records = []
  for index in range(1000):
    records.append({"question": f"{index % 100}", "answer": f"{index}"})
  source = write_jsonl(tmp_path / "a.jsonl", records)
  config = DataConfig(
    validation_fraction=0.2, prompt_field="question", text_field="answer"
  )

  train = read(source, config, "train")
  validation = read(source, config, "validation")

  assert len(train) + len(validation) == 1000
  # About a fifth of 1000. The number varies, because whole questions are drawn.
  assert len(validation) > 50
  train_prompts = {document.prompt for document in train}
  validation_prompts = {document.prompt for document in validation}
  assert train_prompts.isdisjoint(validation_prompts)


@pytest.mark.parametrize("spec", ["stdlib", "text:*.py"])
def test_a_prompt_field_of_plain_text_is_an_error(spec):
  """Only records have fields, which could be questions and answers."""
  config = DataConfig(prompt_field="question", text_field="answer")

  message = "config.data.prompt_field = 'question'.*plain text without fields"
  with pytest.raises(UserError, match=message):
    sources.documents(spec, "train", config)


# Prepared and streamed batches.


def learned_answers(batches) -> list[bytes]:
  """Returns the bytes with weight in each segment of the batches."""
  answers = []
  for batch in batches:
    for targets, segment_ids, weights in zip(
      batch["targets"], batch["segment_ids"], batch["weights"], strict=True
    ):
      # Padding has the segment id 0.
      for segment in np.unique(segment_ids[segment_ids > 0]):
        is_answer = (segment_ids == segment) & (weights > 0)
        answers.append(bytes(targets[is_answer].astype(np.uint8)))
  return answers


def test_only_answers_of_prepared_rows_are_learned(
  make_example_config, examples
):
  """The tokens with weight are the bytes of the answers, and a separator."""
  # All questions fit in a row together with their answers.
  config = make_example_config(validation_fraction=0.0, length=512).data
  (target,) = prepared.prepare(config, workers=1)
  rows = list(prepared.PreparedRows(target, "train"))

  batch = make_batch(rows, length=512)

  separator = b"\xff"
  expected = [answer.encode() + separator for _, answer in examples]
  assert sorted(learned_answers([batch])) == sorted(expected)


def test_only_answers_of_a_stream_are_learned(make_example_config, examples):
  """The tokens with weight are the bytes of the answers, and a separator."""
  # All questions fit in a row together with their answers.
  config = make_example_config(
    mode="streamed", validation_fraction=0.0, length=512, batch_size=1
  )

  batches = list(pipeline.streamed_dataset(config, repeat=False))

  separator = b"\xff"
  expected = [answer.encode() + separator for _, answer in examples]
  assert sorted(learned_answers(batches)) == sorted(expected)


def check_restarts(config, steps):
  """Checks that a run has the same batches after a restart at each step."""
  batches = pipeline.training_batches(config)
  states = []
  expected = []
  for _ in range(30):
    # A checkpoint stores the state as JSON.
    states.append(json.loads(json.dumps(batches.get_state())))
    expected.append(next(batches))

  restarted = pipeline.training_batches(config)
  for step in steps:
    restarted.set_state(states[step])
    next_batches = [next(restarted), next(restarted)]
    chex.assert_trees_all_equal(next_batches, expected[step : step + 2])

  batches.close()
  restarted.close()


@pytest.mark.parametrize(
  ("num_workers", "steps"),
  [(0, (0, 7, 28)), pytest.param(2, (7,), marks=pytest.mark.full)],
)
def test_a_stream_can_restart(make_example_config, num_workers, steps):
  """A new iterator continues from the state before each of `steps`, of 30."""
  config = make_example_config(mode="streamed", num_workers=num_workers)

  check_restarts(config, steps)


@pytest.mark.parametrize(
  ("num_workers", "steps"),
  [(0, (7,)), pytest.param(2, (0, 28), marks=pytest.mark.full)],
)
def test_a_run_on_prepared_rows_can_restart(
  make_example_config, num_workers, steps
):
  """A new iterator continues from the state before each of `steps`, of 30."""
  config = make_example_config(num_workers=num_workers)
  prepared.prepare(config.data, workers=1)

  check_restarts(config, steps)


def test_a_stream_passes_grains_test_of_checkpoints(make_example_config):
  """Grain checks that the output after each checkpoint is the same."""
  # With rows of 48 tokens, some prompts fill a row.
  config = make_example_config(mode="streamed", batch_size=8, length=48)
  dataset = pipeline.streamed_dataset(config, repeat=False)

  # Grain formats every batch for its messages. Short arrays are faster.
  with np.printoptions(threshold=4):
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_two_processes_share_the_batches(make_example_config):
  """Each process reads half of the rows of every batch."""
  config = make_example_config()
  prepared.prepare(config.data, workers=1)
  global_batches = pipeline.training_batches(config)
  first_half_batches = pipeline.training_batches(
    config, share=BatchShare(index=0, count=2), num_processes=2
  )
  second_half_batches = pipeline.training_batches(
    config, share=BatchShare(index=1, count=2), num_processes=2
  )

  for _ in range(5):
    expected = next(global_batches)
    first_half = next(first_half_batches)
    second_half = next(second_half_batches)
    for name in expected:
      both_halves = np.concatenate([first_half[name], second_half[name]])
      chex.assert_trees_all_equal(both_halves, expected[name])


# Examples that do not fit.


@pytest.fixture
def two_long_prompts_and_three_long_answers(tmp_path) -> DataConfig:
  """Returns a config of six examples. Five of them do not fit in a row."""
  records = [
    {"question": "1 + 1 = ", "answer": "2"},
    {"question": "?" * 40, "answer": "2"},
    {"question": "?" * 50, "answer": "2"},
    {"question": "1 + 1 = ", "answer": "2" * 40},
    {"question": "1 + 1 = ", "answer": "2" * 50},
    {"question": "1 + 1 = ", "answer": "2" * 60},
  ]
  return DataConfig(
    source=write_jsonl(tmp_path / "a.jsonl", records),
    prompt_field="question",
    text_field="answer",
    prompt_template="{prompt}",
    # A token is a byte.
    length=32,
    validation_fraction=0.0,
  )


def test_prepared_examples_that_do_not_fit_are_reported(
  two_long_prompts_and_three_long_answers, capsys
):
  """Prompts that fill a row are left out, and long answers are cut."""
  prepared.prepare(two_long_prompts_and_three_long_answers, workers=1)

  printed = capsys.readouterr().err
  assert "2 documents are left out: their prompts fill a row" in printed
  assert "3 documents are longer than a row" in printed


def test_the_metadata_counts_examples_that_do_not_fit(
  two_long_prompts_and_three_long_answers,
):
  """Prompts that fill a row are skipped, and long answers are cut."""
  (target,) = prepared.prepare(
    two_long_prompts_and_three_long_answers, workers=1
  )

  meta = json.loads(pathlib.Path(target.directory, "meta.json").read_text())
  assert meta["splits"]["train"]["skipped"] == 2
  assert meta["splits"]["train"]["cut"] == 3


def test_the_first_streamed_example_that_does_not_fit_is_reported(
  make_example_config, capsys
):
  """Some prompts of the examples fill a row of 32 tokens."""
  config = make_example_config(length=32, mode="streamed")

  next(pipeline.training_batches(config))

  printed = capsys.readouterr().err
  assert printed.count("such examples are left out") == 1
  assert "config.data.length = 32" in printed


def test_preparing_only_prompts_that_fill_a_row_is_an_error(
  make_example_config,
):
  """Every prompt of the examples has more than 8 tokens."""
  config = make_example_config(length=8)

  with pytest.raises(
    UserError, match="empty: no document to train on.*prompts"
  ):
    prepared.prepare(config.data, workers=1)


def test_streaming_only_prompts_that_fill_a_row_is_an_error(
  make_example_config, monkeypatch
):
  """Otherwise the search for an example that fits would never end."""
  # The search gives up after 200 prompts that do not fit. By default, it gives
  # up after thousands.
  monkeypatch.setattr(packing.ExampleCounts, "MAX_SKIPPED_IN_A_ROW", 200)
  # Every prompt of the examples has more than 8 tokens.
  config = make_example_config(length=8, mode="streamed")
  batches = pipeline.training_batches(config)

  message = (
    r"a prompt of \d+ tokens fills a row \(config.data.length = 8\)"
    ".*raise config.data.length"
  )
  with pytest.raises(UserError, match=message):
    next(batches)


# Other fields of prompts and answers.


def rows_directory(config) -> str:
  """Returns the directory of the rows that a config asks for."""
  (target,) = prepared.targets(config)
  return target.directory


def test_other_fields_choose_another_directory(make_example_config):
  """Rows of different fields are different."""
  config = make_example_config().data
  other_prompt = dataclasses.replace(config, prompt_field="turns.0.value")
  other_template = dataclasses.replace(config, prompt_template="{prompt}")
  other_text = dataclasses.replace(config, text_field="turns.1.value")
  no_prompt = dataclasses.replace(config, prompt_field="")

  directories = {
    rows_directory(config),
    rows_directory(other_prompt),
    rows_directory(other_template),
    rows_directory(other_text),
    rows_directory(no_prompt),
  }

  assert len(directories) == 5


def test_without_a_prompt_field_the_template_has_no_effect(make_example_config):
  """Rows of either template are the same, and so is their directory."""
  config = make_example_config(prompt_field="").data
  other_config = dataclasses.replace(config, prompt_template="{prompt}")

  assert rows_directory(other_config) == rows_directory(config)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("prompt_field", "turns.0.value"),
    ("prompt_field", ""),
    ("prompt_template", "{prompt}"),
    ("text_field", "turns.1.value"),
  ],
)
def test_a_directory_with_rows_of_other_fields_is_refused(
  make_example_config, tmp_path, field, value
):
  """A run would otherwise train on rows that its config does not describe."""
  rows_dir = str(tmp_path / "rows")
  config = make_example_config(prepared_dir=rows_dir)
  prepared.prepare(config.data, workers=1)
  other_config = make_example_config(prepared_dir=rows_dir, **{field: value})
  (target,) = prepared.targets(other_config.data)

  message = rf"holds other rows: config.data.{field} \(there"
  with pytest.raises(UserError, match=message):
    prepared.is_prepared(target)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("prompt_field", "turns.0.value"),
    ("prompt_field", ""),
    ("prompt_template", "{prompt}"),
    ("text_field", "turns.1.value"),
  ],
)
def test_a_stream_does_not_continue_with_other_fields(
  make_example_config, field, value
):
  """The same position would be in other text."""
  config = make_example_config(mode="streamed")
  state = pipeline.training_batches(config).get_state()
  changed_config = make_example_config(mode="streamed", **{field: value})
  batches = pipeline.training_batches(changed_config)

  with pytest.raises(UserError, match="the data"):
    batches.set_state(state)


def test_a_run_on_prepared_rows_does_not_continue_with_other_fields(
  make_example_config,
):
  """The same position would be in rows of another prompt template."""
  config = make_example_config(prompt_template="Q: {prompt} A:")
  prepared.prepare(config.data, workers=1)
  state = pipeline.training_batches(config).get_state()
  changed_config = make_example_config(prompt_template="{prompt}")
  prepared.prepare(changed_config.data, workers=1)
  batches = pipeline.training_batches(changed_config)

  with pytest.raises(UserError, match="the data"):
    batches.set_state(state)
