"""Prompts and answers: only answers are learned, in every kind of data."""

import dataclasses
import json
import os

import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import packing, pipeline, prepared, sources
from diffjax.data.batches import BatchShare
from diffjax.data.row import Row, decode_row, encode_row, make_batch
from tests.harness.tiers import full

LENGTH = 16
ALL = DataConfig(
  validation_fraction=0.0, prompt_field="question", text_field="answer"
)


def make_example(start, prompt_size, answer_size):
  """Returns an example of different tokens: start, start + 1, …

  Args:
    start: The first token, which stands for the separator.
    prompt_size: Number of tokens of the prompt, without the separator.
    answer_size: Number of tokens of the answer, without the separator.
  """
  end = start + 1 + prompt_size + answer_size + 1
  tokens = np.arange(start, end, dtype=np.int32)
  return packing.Example(tokens, 1 + prompt_size)


def pack(examples, length=LENGTH):
  """Returns the rows of the examples, and the counts of examples left out."""
  counts = packing.ExampleCounts(length)
  dataset = grain.MapDataset.source(examples).to_iter_dataset(
    grain.ReadOptions(num_threads=0)
  )
  return list(packing.pack(dataset, length, "documents", counts)), counts


def learned_tokens(batch):
  """Returns the targets that have weight, sorted."""
  return sorted(batch["targets"][batch["weights"] > 0].tolist())


def test_weights_of_a_known_row():
  """Two segments, "s p p | a a s" and "s p | a s", then padding."""
  row = Row(
    np.arange(10, 20, dtype=np.int32),
    np.array([6, 4], np.int32),
    np.array([3, 2], np.int32),
  )
  batch = make_batch([row], 11)
  np.testing.assert_array_equal(
    batch["targets"][0], [11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0]
  )
  np.testing.assert_array_equal(
    batch["weights"][0], [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]
  )
  np.testing.assert_array_equal(
    batch["segment_ids"][0], [1] * 6 + [2] * 4 + [0]
  )
  # Without prompts, only the weights differ.
  plain_row = row._replace(prompt_lengths=np.zeros(2, np.int32))
  plain_batch = make_batch([plain_row], 11)
  np.testing.assert_array_equal(
    plain_batch["weights"][0], [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
  )
  for key in batch:
    if key != "weights":
      np.testing.assert_array_equal(plain_batch[key], batch[key])


def test_examples_share_rows_and_every_answer_is_learned_once():
  rng = np.random.default_rng(0)
  examples = []
  answer_tokens = []
  lengths = {}
  for index in range(200):
    start = 1 + 100 * index
    example = make_example(start, rng.integers(0, 9), rng.integers(1, 5))
    examples.append(example)
    answer_tokens += example.tokens[example.prompt_length :].tolist()
    lengths[start] = (len(example.tokens), example.prompt_length)
  rows, counts = pack(examples)
  batch = make_batch(rows, LENGTH)
  assert learned_tokens(batch) == sorted(answer_tokens)
  assert max(len(row.segment_lengths) for row in rows) > 1
  assert (counts.skipped, counts.cut) == (0, 0)
  # A target belongs to the same example as its input.
  same_example = (batch["targets"] // 100) == (batch["tokens"] // 100)
  assert same_example[batch["weights"] > 0].all()
  # A segment is a whole example, with its prompt.
  for row in rows:
    starts = np.cumsum(row.segment_lengths) - row.segment_lengths
    expected = [lengths[token] for token in row.tokens[starts]]
    segments = zip(row.segment_lengths, row.prompt_lengths, strict=True)
    assert list(segments) == expected


def test_every_row_has_something_to_learn():
  rng = np.random.default_rng(1)
  examples = []
  for index in range(300):
    start = 1 + 1000 * index
    examples.append(
      make_example(start, rng.integers(0, 40), rng.integers(1, 60))
    )
  rows, counts = pack(examples)
  fitting = [example for example in examples if example.prompt_length <= LENGTH]
  num_cut = sum(len(example.tokens) > LENGTH + 2 for example in fitting)
  assert (counts.skipped, counts.cut) == (300 - len(fitting), num_cut)
  assert 50 < len(fitting) < 250
  assert num_cut > 50
  batch = make_batch(rows, LENGTH)
  assert batch["weights"].any(axis=1).all()
  # An answer may continue in another piece. The first token of a piece has no
  # input before it, and is not learned.
  expected = []
  for example in fitting:
    for index in range(example.prompt_length, len(example.tokens)):
      if index % (LENGTH + 1) != 0:
        expected.append(example.tokens[index])
  assert learned_tokens(batch) == sorted(expected)


def test_prompts_at_the_end_of_a_row():
  """A prompt may leave room for one token of the answer, but not for none."""
  rows, counts = pack([make_example(1, LENGTH - 1, 1)])
  batch = make_batch(rows, LENGTH)
  np.testing.assert_array_equal(batch["weights"], [[0] * (LENGTH - 1) + [1]])
  # The rest is the last separator alone, which does not count as cut.
  assert (counts.skipped, counts.cut) == (0, 0)

  rows, counts = pack([make_example(1, LENGTH, 5)])
  assert not rows
  assert (counts.skipped, counts.cut) == (1, 0)


@pytest.mark.parametrize("vocab_size", [256, 100_000])
def test_records_give_back_their_row(vocab_size):
  rows, _ = pack(
    [make_example(1, 3, 4), make_example(20, 2, 30), make_example(60, 0, 1)]
  )
  for row in rows:
    record = encode_row(row, vocab_size, True)
    for expected, decoded in zip(row, decode_row(record), strict=True):
      np.testing.assert_array_equal(decoded, expected)


def test_a_truncated_record_is_refused():
  (row,), _ = pack([make_example(1, 3, 4)])
  with pytest.raises(ValueError, match="tokens"):
    decode_row(encode_row(row, 256, True)[:-1])


def test_plain_rows_are_stored_as_before():
  """The bytes equal those of earlier versions, which are on disks."""
  row = Row(
    np.array([255, 104, 105, 255, 255, 33], np.int32),
    np.array([4, 2], np.int32),
    np.zeros(2, np.int32),
  )
  record = bytes.fromhex(
    "02000000 04000000 02000000 ff00 6800 6900 ff00 ff00 2100"
  )
  assert encode_row(row, 256, False) == record
  assert decode_row(record).prompt_lengths.tolist() == [0, 0]
  row = row._replace(prompt_lengths=np.array([2, 1], np.int32))
  assert encode_row(row, 256, True) == bytes.fromhex(
    "feffffff 04000000 02000000 02000000 01000000 ff00 6800 6900 ff00 ff00 2100"
  )


def test_plain_rows_are_described_as_before(jsonl):
  """They have the same fields as in versions without prompts."""
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


# --- Files ---


def read(spec, config=ALL, split="train"):
  """Returns the documents of a source."""
  source = sources.documents(spec, split, config)
  documents = []
  for part in source.parts:
    documents.extend(source.read(part))
  return documents


def write_jsonl(path, records):
  """Writes a JSONL file, and returns the source that reads it."""
  lines = [json.dumps(record) + "\n" for record in records]
  path.write_text("".join(lines))
  return f"jsonl:{path}"


def write_parquet(path, records):
  """Writes a Parquet file, and returns the source that reads it."""
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
  return f"parquet:{path}"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
  "text_field", ["answer", "turns.1.value", "turns.-1.value"]
)
def test_fields(tmp_path, write, text_field):
  records = []
  expected = []
  for index in range(300):
    question = f"{index} + 1?"
    answer = f"{index + 1}"
    turns = [
      {"from": "user", "value": "?"},
      {"from": "model", "value": answer},
    ]
    records.append({"question": question, "answer": answer, "turns": turns})
    expected.append((answer, False, f"Question: {question}\nAnswer:\n"))
  source = write(tmp_path / "records", records)
  config = dataclasses.replace(ALL, text_field=text_field)
  assert read(source, config) == expected
  config = dataclasses.replace(config, prompt_template="{{prompt}}!")
  assert read(source, config)[3].prompt == "{3 + 1?}!"


def test_a_name_with_a_dot_is_a_name_first(tmp_path):
  record = {"question": "?", "a.b": "name", "a": {"b": "path"}}
  source = write_jsonl(tmp_path / "a.jsonl", [record])
  config = dataclasses.replace(ALL, text_field="a.b")
  assert read(source, config)[0].text == "name"


@pytest.mark.parametrize(
  ("record", "message"),
  [
    (
      '{"answer": "2"}',
      r"a.jsonl:3: config.data.prompt_field = 'question' is not text here;"
      r" the fields are answer \(str\)",
    ),
    (
      '{"question": null, "answer": "2"}',
      r"a.jsonl:3: config.data.prompt_field",
    ),
    (
      '{"question": ["1 + 1?"], "answer": "2"}',
      r"a.jsonl:3: config.data.prompt_field = .*question \(list\)",
    ),
    (
      '{"question": "1 + 1?"}',
      r"a.jsonl:3: config.data.text_field = 'answer' is not text here;"
      r" the fields are question \(str\)",
    ),
    ('["1 + 1?", "2"]', "a.jsonl:3: .*must be a JSON object"),
  ],
)
def test_bad_records_are_named(tmp_path, record, message):
  good = '{"question": "a", "answer": "b"}'
  (tmp_path / "a.jsonl").write_text(f"{good}\n{good}\n{record}\n")
  with pytest.raises(UserError, match=message) as caught:
    read(f"jsonl:{tmp_path}/a.jsonl")
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
def test_paths_that_lead_nowhere(tmp_path, path):
  record = {"question": "a", "turns": [{"value": "b"}]}
  source = write_jsonl(tmp_path / "a.jsonl", [record])
  config = dataclasses.replace(ALL, text_field=path)
  with pytest.raises(UserError, match="a.jsonl:1: config.data.text_field"):
    read(source, config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({}, "prompt_field = 'question' is not text in row 1 of row group 0"),
    (
      {"prompt_field": "problem"},
      "has no column config.data.prompt_field = 'problem';"
      " its columns are question, answer, turns",
    ),
    (
      {"prompt_field": "answer", "text_field": "turns.0"},
      "text_field = 'turns.0' is not text in row 1",
    ),
  ],
)
def test_bad_parquet(tmp_path, changes, message):
  records = [
    {"question": "a", "answer": "b", "turns": ["x"]},
    {"question": None, "answer": "c", "turns": []},
  ]
  source = write_parquet(tmp_path / "a.parquet", records)
  with pytest.raises(UserError, match=message):
    read(source, dataclasses.replace(ALL, **changes))


def test_records_without_an_answer_are_skipped(tmp_path):
  records = [
    {"question": "a", "answer": ""},
    {"question": "a", "answer": None},
    {"question": "", "answer": "b"},
  ]
  source = write_jsonl(tmp_path / "a.jsonl", records)
  assert read(source) == [("b", False, "Question: \nAnswer:\n")]


def test_answers_to_one_question_stay_together(tmp_path):
  records = []
  for index in range(1000):
    records.append({"question": f"{index % 100}", "answer": f"{index}"})
  source = write_jsonl(tmp_path / "a.jsonl", records)
  config = dataclasses.replace(ALL, validation_fraction=0.2)
  train = read(source, config, "train")
  validation = read(source, config, "validation")
  assert len(train) + len(validation) == 1000
  assert len(validation) > 50
  train_prompts = {document.prompt for document in train}
  validation_prompts = {document.prompt for document in validation}
  assert train_prompts.isdisjoint(validation_prompts)


@pytest.mark.parametrize("spec", ["stdlib", "text:*.py"])
def test_plain_text_has_no_prompts(spec):
  with pytest.raises(
    UserError,
    match="config.data.prompt_field = 'question'.*plain text without fields",
  ):
    sources.documents(spec, "train", ALL)


# --- Prepared and streamed ---


def learned_answers(batches):
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


def prompt_length(question):
  """Returns the number of tokens of a prompt and the first separator."""
  return 1 + len(f"Q: {question} A:".encode())


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_answers_alone_are_learned(make_example_config, examples, mode):
  config = make_example_config(mode=mode, validation_fraction=0.0, batch_size=1)
  if mode == "prepared":
    prepared.prepare(config.data, 1)
    (target,) = prepared.targets(config.data)
    rows = prepared.PreparedRows(target, "train")
    batches = [make_batch(list(rows), config.data.length)]
  else:
    batches = list(pipeline.streamed_dataset(config, repeat=False))
  learned = learned_answers(batches)
  assert len(set(learned)) == len(learned)
  num_whole = 0
  for question, answer in examples:
    num_tokens = prompt_length(question) + len(answer.encode()) + 1
    if num_tokens <= config.data.length + 1:
      assert answer.encode() + b"\xff" in learned
      num_whole += 1
  assert num_whole > 60
  for answer in learned:
    assert b"Q:" not in answer
    assert b"question" not in answer


@pytest.mark.parametrize(
  "mode, num_workers, steps",
  [
    ("streamed", 0, (0, 7, 28)),
    ("prepared", 0, (7,)),
    *full([("prepared", 2, (0, 28)), ("streamed", 2, (7,))]),
  ],
)
def test_restart(make_example_config, mode, num_workers, steps):
  config = make_example_config(mode=mode, num_workers=num_workers)
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
    for batch in expected[step : step + 2]:
      again = next(restarted)
      for key in batch:
        np.testing.assert_array_equal(again[key], batch[key], err_msg=key)
  batches.close()
  restarted.close()


def test_streaming_keeps_grains_contract(make_example_config):
  # With rows of 48 tokens, some prompts fill a row.
  config = make_example_config(mode="streamed", batch_size=2, length=48)
  with np.printoptions(threshold=4):
    grain.experimental.assert_equal_output_after_checkpoint(
      pipeline.streamed_dataset(config, repeat=False)
    )


def test_processes_change_nothing(make_example_config):
  config = make_example_config()
  prepared.prepare(config.data, 1)
  whole = pipeline.training_batches(config)
  first = pipeline.training_batches(
    config, share=BatchShare(0, 2), num_processes=2
  )
  second = pipeline.training_batches(
    config, share=BatchShare(1, 2), num_processes=2
  )
  for _ in range(5):
    batch = next(whole)
    first_part = next(first)
    second_part = next(second)
    for key in batch:
      np.testing.assert_array_equal(
        np.concatenate([first_part[key], second_part[key]]),
        batch[key],
        err_msg=key,
      )


def test_prepared_examples_that_do_not_fit_are_reported(
  make_example_config, examples, capsys
):
  config = make_example_config(length=32, validation_fraction=0.0)
  (target,) = prepared.prepare(config.data, 1)
  with open(os.path.join(target.directory, "meta.json")) as file:
    totals = json.load(file)["splits"]["train"]
  num_skipped = 0
  num_cut = 0
  for question, answer in examples:
    num_prompt_tokens = prompt_length(question)
    num_tokens = num_prompt_tokens + len(answer.encode()) + 1
    if num_prompt_tokens > 32:
      num_skipped += 1
    # A last piece of a single token is dropped, and does not count as cut.
    elif num_tokens > 34:
      num_cut += 1
  assert (totals["skipped"], totals["cut"]) == (num_skipped, num_cut)
  assert 10 < num_skipped < 110
  assert num_cut > 5
  printed = capsys.readouterr().err
  assert (
    f"{num_skipped} documents are left out: their prompts fill a row" in printed
  )
  assert f"{num_cut} documents are longer than a row" in printed


def test_the_first_streamed_example_that_does_not_fit_is_reported(
  make_example_config, capsys
):
  config = make_example_config(length=32, mode="streamed")
  next(pipeline.training_batches(config))
  printed = capsys.readouterr().err
  assert printed.count("such examples are left out") == 1
  assert "config.data.length = 32" in printed


def test_prompts_that_all_fill_a_row(make_example_config, monkeypatch):
  config = make_example_config(length=8)
  with pytest.raises(
    UserError, match="empty: no document to train on.*prompts"
  ):
    prepared.prepare(config.data, 1)
  monkeypatch.setattr(packing.ExampleCounts, "MAX_SKIPPED_IN_A_ROW", 200)
  config = make_example_config(length=8, mode="streamed")
  batches = pipeline.training_batches(config)
  message = (
    r"a prompt of \d+ tokens fills a row \(config.data.length = 8\)"
    ".*raise config.data.length"
  )
  with pytest.raises(UserError, match=message):
    next(batches)


CHANGES = [
  {"prompt_field": "turns.0.value"},
  {"prompt_template": "{prompt}"},
  {"text_field": "turns.1.value"},
]


def rows_directory(config):
  """Returns the directory of the rows that a config asks for."""
  (target,) = prepared.targets(config)
  return target.directory


def test_other_fields_are_other_rows(make_example_config):
  config = make_example_config().data
  plain = dataclasses.replace(config, prompt_field="")
  directories = {rows_directory(config), rows_directory(plain)}
  for changes in CHANGES:
    changed = dataclasses.replace(config, **changes)
    directories.add(rows_directory(changed))
  assert len(directories) == 2 + len(CHANGES)
  # Without a prompt field, the template has no effect.
  changed = dataclasses.replace(plain, prompt_template="{prompt}")
  assert rows_directory(changed) == rows_directory(plain)


@pytest.mark.parametrize("changes", [*CHANGES, {"prompt_field": ""}])
def test_a_directory_with_rows_of_other_fields_is_refused(
  make_example_config, tmp_path, changes
):
  config = make_example_config(prepared_dir=str(tmp_path / "rows")).data
  prepared.prepare(config, 1)
  (target,) = prepared.targets(dataclasses.replace(config, **changes))
  message = (
    r"holds other rows:"
    r" config.data.(prompt_field|prompt_template|text_field) \(there"
  )
  with pytest.raises(UserError, match=message):
    prepared.is_prepared(target)


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_state_of_other_fields_is_refused(make_example_config, mode):
  config = make_example_config(mode=mode)
  state = pipeline.training_batches(config).get_state()
  for changes in [*CHANGES, {"prompt_field": ""}]:
    config = make_example_config(mode=mode, **changes)
    batches = pipeline.training_batches(config)
    with pytest.raises(UserError, match="the data"):
      batches.set_state(state)
