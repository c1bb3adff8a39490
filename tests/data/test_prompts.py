"""Prompts and answers: only answers are learnt, packed, stored, cut or streamed."""

import dataclasses
import json
import os

import grain
import numpy as np
import pytest

from diffjax.config import DataConfig, UserError
from diffjax.data import packing, pipeline, prepared, sources
from diffjax.data.row import Row, decode_row, encode_row, make_batch
from tests.tiers import full

LENGTH = 16
ALL = DataConfig(
  validation_fraction=0.0, prompt_field="question", text_field="answer"
)


def example(start, prompt, answer):
  """Tokens from `start` on, all different: the separator and `prompt` of them, then `answer` and the separator."""
  return packing.Example(
    np.arange(start, start + prompt + answer + 2, dtype=np.int32), 1 + prompt
  )


def pack(examples, length=LENGTH):
  counts = packing.ExampleCounts(length)
  dataset = grain.MapDataset.source(examples).to_iter_dataset(
    grain.ReadOptions(num_threads=0)
  )
  return list(packing.pack(dataset, length, "documents", counts)), counts


def learnt(batch):
  """The targets with weight."""
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
  plain = make_batch([row._replace(prompt_lengths=np.zeros(2, np.int32))], 11)
  np.testing.assert_array_equal(
    plain["weights"][0], [1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]
  )
  assert all(
    (plain[key] == batch[key]).all() for key in batch if key != "weights"
  ), "weights alone differ"


def test_examples_share_rows_and_every_answer_is_learnt_once():
  rng = np.random.default_rng(0)
  examples, start = [], 1
  for _ in range(200):
    examples.append(example(start, rng.integers(0, 9), rng.integers(1, 5)))
    start += 100
  rows, counts = pack(examples)
  batch = make_batch(rows, LENGTH)
  assert learnt(batch) == sorted(
    token
    for each in examples
    for token in each.tokens[each.prompt_length :].tolist()
  )
  assert max(len(row.segment_lengths) for row in rows) > 1 and (
    counts.skipped,
    counts.cut,
  ) == (0, 0)
  same = (batch["targets"] // 100) == (batch["tokens"] // 100)
  assert same[batch["weights"] > 0].all(), (
    "a target is of its input's own example"
  )
  for row in rows:  # segments are whole examples, each with its own prompt
    first = np.cumsum(row.segment_lengths) - row.segment_lengths
    expected = {
      each.tokens[0]: (len(each.tokens), each.prompt_length)
      for each in examples
    }
    assert [expected[token] for token in row.tokens[first]] == list(
      zip(row.segment_lengths, row.prompt_lengths, strict=True)
    )


def test_every_row_has_something_to_learn():
  rng = np.random.default_rng(1)
  examples = [
    example(1 + 1000 * index, rng.integers(0, 40), rng.integers(1, 60))
    for index in range(300)
  ]
  rows, counts = pack(examples)
  fits = [each for each in examples if each.prompt_length <= LENGTH]
  cut = [each for each in fits if len(each.tokens) > LENGTH + 2]
  assert (
    (counts.skipped, counts.cut) == (300 - len(fits), len(cut))
    and 50 < len(fits) < 250
    and len(cut) > 50
  )
  batch = make_batch(rows, LENGTH)
  assert batch["weights"].any(axis=1).all()
  # Where an answer goes on in another piece, that piece's first token has no input before it
  expected = [
    each.tokens[index]
    for each in fits
    for index in range(each.prompt_length, len(each.tokens))
    if index % (LENGTH + 1)
  ]
  assert learnt(batch) == sorted(expected)


def test_prompts_at_the_end_of_a_row():
  """One token of the answer is enough; a prompt that fills the row is left out, and counted."""
  (row,), counts = pack([example(1, LENGTH - 1, 1)])
  np.testing.assert_array_equal(
    make_batch([row], LENGTH)["weights"][0], [0] * (LENGTH - 1) + [1]
  )
  assert (counts.skipped, counts.cut) == (0, 0), (
    "what is left of it is the last separator alone"
  )
  rows, counts = pack([example(1, LENGTH, 5)])
  assert not rows and (counts.skipped, counts.cut) == (1, 0)


def test_records_give_back_their_row():
  for vocab_size in (256, 100_000):
    for row in pack([example(1, 3, 4), example(20, 2, 30), example(60, 0, 1)])[
      0
    ]:
      again = decode_row(encode_row(row, vocab_size, True))
      for left, right in zip(row, again, strict=True):
        np.testing.assert_array_equal(left, right)
  with pytest.raises(ValueError, match="tokens"):
    decode_row(encode_row(row, 256, True)[:-1])


def test_plain_rows_are_stored_as_before():
  """The bytes are those of earlier versions, which are on disks."""
  row = Row(
    np.array([255, 104, 105, 255, 255, 33], np.int32),
    np.array([4, 2], np.int32),
    np.zeros(2, np.int32),
  )
  stored = bytes.fromhex(
    "02000000 04000000 02000000 ff00 6800 6900 ff00 ff00 2100"
  )
  assert encode_row(row, 256, False) == stored and decode_row(
    stored
  ).prompt_lengths.tolist() == [0, 0]
  with_prompts = encode_row(
    row._replace(prompt_lengths=np.array([2, 1], np.int32)), 256, True
  )
  assert with_prompts == bytes.fromhex(
    "feffffff 04000000 02000000 02000000 01000000 ff00 6800 6900 ff00 ff00 2100"
  )


def test_plain_rows_are_described_as_before(jsonl):
  """A plain config asks for the description that versions without prompts wrote."""
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
  source = sources.documents(spec, split, config)
  return [document for part in source.parts for document in source.read(part)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
  "text_field", ["answer", "turns.1.value", "turns.-1.value"]
)
def test_fields(tmp_path, kind, text_field):
  turns = lambda index: [
    {"from": "user", "value": "?"},
    {"from": "model", "value": f"{index + 1}"},
  ]
  records = [
    {
      "question": f"{index} + 1?",
      "answer": f"{index + 1}",
      "turns": turns(index),
    }
    for index in range(300)
  ]
  path = tmp_path / f"a.{kind}"
  if kind == "jsonl":
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
  else:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
  found = read(
    f"{kind}:{path}", dataclasses.replace(ALL, text_field=text_field)
  )
  assert found == [
    (f"{index + 1}", False, f"Question: {index} + 1?\nAnswer:\n")
    for index in range(300)
  ]
  own = dataclasses.replace(
    ALL, text_field=text_field, prompt_template="{{prompt}}!"
  )
  assert read(f"{kind}:{path}", own)[3].prompt == "{3 + 1?}!"


def test_a_name_with_a_dot_is_a_name_first(tmp_path):
  (tmp_path / "a.jsonl").write_text(
    '{"question": "?", "a.b": "name", "a": {"b": "path"}}\n'
  )
  assert (
    read(
      f"jsonl:{tmp_path}/a.jsonl", dataclasses.replace(ALL, text_field="a.b")
    )[0].text
    == "name"
  )


@pytest.mark.parametrize(
  ("record", "message"),
  [
    (
      '{"answer": "2"}',
      r"a.jsonl:3: config.data.prompt_field = 'question' is not text here; the fields are answer \(str\)",
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
      r"a.jsonl:3: config.data.text_field = 'answer' is not text here; the fields are question \(str\)",
    ),
    ('["1 + 1?", "2"]', "a.jsonl:3: .*must be a JSON object"),
  ],
)
def test_bad_records_are_named(tmp_path, record, message):
  (tmp_path / "a.jsonl").write_text(
    '{"question": "a", "answer": "b"}\n' * 2 + record + "\n"
  )
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
  (tmp_path / "a.jsonl").write_text(
    '{"question": "a", "turns": [{"value": "b"}]}\n'
  )
  with pytest.raises(UserError, match="a.jsonl:1: config.data.text_field"):
    read(f"jsonl:{tmp_path}/a.jsonl", dataclasses.replace(ALL, text_field=path))


def test_bad_parquet(tmp_path):
  import pyarrow
  import pyarrow.parquet

  path = tmp_path / "a.parquet"
  pyarrow.parquet.write_table(
    pyarrow.table(
      {"question": ["a", None], "answer": ["b", "c"], "turns": [["x"], []]}
    ),
    path,
  )
  for changed, message in [
    ({}, "prompt_field = 'question' is not text in row 1 of row group 0"),
    (
      {"prompt_field": "problem"},
      "has no column config.data.prompt_field = 'problem'; its columns are question, answer, turns",
    ),
    (
      {"prompt_field": "answer", "text_field": "turns.0"},
      "text_field = 'turns.0' is not text in row 1",
    ),
  ]:
    with pytest.raises(UserError, match=message):
      read(f"parquet:{path}", dataclasses.replace(ALL, **changed))


def test_records_without_an_answer_are_skipped(tmp_path):
  (tmp_path / "a.jsonl").write_text(
    '{"question": "a", "answer": ""}\n{"question": "a", "answer": null}\n{"question": "", "answer": "b"}\n'
  )
  assert read(f"jsonl:{tmp_path}/a.jsonl") == [
    ("b", False, "Question: \nAnswer:\n")
  ]


def test_answers_to_one_question_stay_together(tmp_path):
  lines = [
    json.dumps({"question": f"{index % 100}", "answer": f"{index}"}) + "\n"
    for index in range(1000)
  ]
  (tmp_path / "a.jsonl").write_text("".join(lines))
  config = dataclasses.replace(ALL, validation_fraction=0.2)
  train, validation = (
    read(f"jsonl:{tmp_path}/a.jsonl", config, split)
    for split in ("train", "validation")
  )
  assert len(train) + len(validation) == 1000 and len(validation) > 50
  assert not {document.prompt for document in train} & {
    document.prompt for document in validation
  }


@pytest.mark.parametrize("spec", ["stdlib", "text:*.py"])
def test_plain_text_has_no_prompts(spec):
  with pytest.raises(
    UserError,
    match="config.data.prompt_field = 'question'.*plain text without fields",
  ):
    sources.documents(spec, "train", ALL)


# --- Prepared and streamed ---


def answers(batches):
  """The learnt bytes of each segment of the batches: those with weight."""
  out = []
  for batch in batches:
    for targets, segments, weights in zip(
      batch["targets"], batch["segment_ids"], batch["weights"], strict=True
    ):
      out += [
        bytes(targets[(segments == segment) & (weights > 0)].astype(np.uint8))
        for segment in np.unique(segments[segments > 0])
      ]
  return out


def fitting(examples):
  return [
    answered
    for asked, answered in examples
    if len(f"Q: {asked} A:{answered}".encode()) + 2 <= 129
  ]


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_answers_alone_are_learnt(make_example_config, examples, mode):
  config = make_example_config(mode=mode, validation_fraction=0.0, batch_size=1)
  if mode == "prepared":
    prepared.prepare(config.data, 1)
    batches = list(pipeline.training_rows(config))
  else:
    batches = list(pipeline.streamed_dataset(config, repeat=False))
  found = answers(batches)
  whole = [answered.encode() + b"\xff" for answered in fitting(examples)]
  assert (
    len(whole) > 60
    and not set(whole) - set(found)
    and len(set(found)) == len(found)
  )
  assert not any(b"Q:" in each or b"question" in each for each in found)


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
  states, expected = [], []
  for _ in range(30):
    states.append(json.loads(json.dumps(batches.get_state())))
    expected.append(next(batches))
  other = pipeline.training_batches(config)
  for step in steps:
    other.set_state(states[step])
    for batch in expected[step : step + 2]:
      again = next(other)
      for key in batch:
        np.testing.assert_array_equal(again[key], batch[key], err_msg=key)
  batches.close()
  other.close()


def test_streaming_keeps_grains_contract(make_example_config):
  config = make_example_config(
    mode="streamed", batch_size=2, length=48
  )  # some prompts fill a row
  with np.printoptions(threshold=4):
    grain.experimental.assert_equal_output_after_checkpoint(
      pipeline.streamed_dataset(config, repeat=False)
    )


def test_processes_change_nothing(make_example_config):
  config = make_example_config()
  prepared.prepare(config.data, 1)
  whole = pipeline.training_batches(config)
  shares = [
    pipeline.training_batches(config, process_index=index, process_count=2)
    for index in range(2)
  ]
  for _ in range(5):
    parts = [next(share) for share in shares]
    for key, value in next(whole).items():
      np.testing.assert_array_equal(
        np.concatenate([part[key] for part in parts]), value, err_msg=key
      )


def test_what_does_not_fit_is_counted_and_said(
  make_example_config, examples, capsys
):
  config = make_example_config(length=32, validation_fraction=0.0)
  (target,) = prepared.prepare(config.data, 1)
  with open(os.path.join(target.directory, "meta.json")) as file:
    totals = json.load(file)["splits"]["train"]
  prompts = [len(f"Q: {asked} A:".encode()) + 1 for asked, _ in examples]
  skipped = sum(length > 32 for length in prompts)
  cut = sum(
    prompt <= 32 and prompt + len(answered.encode()) + 1 > 34
    for prompt, (_, answered) in zip(prompts, examples, strict=True)
  )
  assert (
    (totals["skipped"], totals["cut"]) == (skipped, cut)
    and 10 < skipped < 110
    and cut > 5
  )
  said = capsys.readouterr().err
  assert (
    f"{skipped} documents are left out: their prompts fill a row" in said
    and f"{cut} documents are longer than a row" in said
  )
  next(
    pipeline.training_batches(make_example_config(length=32, mode="streamed"))
  )
  said = capsys.readouterr().err
  assert (
    said.count("such examples are left out") == 1
    and "config.data.length = 32" in said
  )


def test_prompts_that_all_fill_a_row(make_example_config, monkeypatch):
  with pytest.raises(
    UserError, match="empty: no document to train on.*prompts"
  ):
    prepared.prepare(make_example_config(length=8).data, 1)
  monkeypatch.setattr(packing.ExampleCounts, "_MAX_SKIPPED_IN_A_ROW", 200)
  with pytest.raises(
    UserError,
    match=r"a prompt of \d+ tokens fills a row \(config.data.length = 8\).*raise config.data.length",
  ):
    next(
      pipeline.training_batches(make_example_config(length=8, mode="streamed"))
    )


CHANGES = [
  {"prompt_field": "turns.0.value"},
  {"prompt_template": "{prompt}"},
  {"text_field": "turns.1.value"},
]


def test_other_fields_are_other_rows(make_example_config, tmp_path):
  config = make_example_config().data
  directories = {
    prepared.targets(dataclasses.replace(config, **change))[0].directory
    for change in [{}, *CHANGES]
  }
  plain = dataclasses.replace(config, prompt_field="")
  assert len(directories | {prepared.targets(plain)[0].directory}) == 5
  assert (
    prepared.targets(dataclasses.replace(plain, prompt_template="{prompt}"))[
      0
    ].directory
    == prepared.targets(plain)[0].directory
  )
  config, plain = (
    dataclasses.replace(each, prepared_dir=str(tmp_path / "rows"))
    for each in (config, plain)
  )
  prepared.prepare(config, 1)
  for other in [dataclasses.replace(config, **change) for change in CHANGES] + [
    plain
  ]:
    with pytest.raises(
      UserError,
      match=r"holds other rows: config.data.(prompt_field|prompt_template|text_field) \(there",
    ):
      prepared.is_prepared(prepared.targets(other)[0])


@pytest.mark.parametrize("mode", ["prepared", "streamed"])
def test_a_state_of_other_fields_is_refused(make_example_config, mode):
  state = pipeline.training_batches(make_example_config(mode=mode)).get_state()
  for change in [*CHANGES, {"prompt_field": ""}]:
    with pytest.raises(UserError, match="the data"):
      pipeline.training_batches(
        make_example_config(mode=mode, **change)
      ).set_state(state)
