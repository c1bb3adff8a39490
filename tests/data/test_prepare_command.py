"""The command trains tokenizers, prepares rows, and reports errors."""

import pytest

from diffjax.data import tokenizer, tokenizer_training


@pytest.fixture
def run(command, tmp_path):
  """Returns a function that runs the command with the default config."""
  config_file = tmp_path / "config.py"
  config_file.write_text("""
from diffjax.config import to_config_dict

def get_config():
  return to_config_dict()
""")

  def run(*arguments):
    return command("diffjax.prepare", f"--config={config_file}", *arguments)

  return run


@pytest.mark.full
def test_the_command_trains_a_tokenizer(run, jsonl, tmp_path):
  tokenizer_dir = tmp_path / "tokenizer"

  result = run(
    f"--config.data.source=jsonl:{jsonl}",
    f"--train_tokenizer={tokenizer_dir}",
    "--vocab_size=400",
  )

  assert result.returncode == 0, result.stderr
  for name in ("tokenizer.tiktoken", "tokenizer.json"):
    trained = tokenizer.load_tokenizer(f"{tokenizer_dir}/{name}")
    assert trained.vocab_size == 400
    # The documents of the file `jsonl` have this word many times.
    assert len(trained.encode(" self")) == 1


def test_the_command_prepares_rows_with_a_trained_tokenizer(
  run, jsonl, tmp_path, texts
):
  """The file `jsonl` has the documents `texts`."""
  tokenizer_training.train_tokenizer(texts, 400, tmp_path / "tokenizer")
  rows_dir = tmp_path / "rows"

  result = run(
    f"--config.data.source=jsonl:{jsonl}",
    f"--config.data.tokenizer={tmp_path}/tokenizer/tokenizer.json",
    f"--config.data.prepared_dir={rows_dir}",
    "--workers=1",
  )

  assert result.returncode == 0, result.stderr
  assert "documents" in result.stderr
  assert "tokens/s" in result.stderr
  assert (rows_dir / "meta.json").exists()


def test_a_missing_source_is_an_error_of_one_line(run):
  result = run("--config.data.source=text:/nowhere/*.txt")

  assert result.returncode == 1
  assert "no file matches" in result.stderr
  assert len(result.stderr.splitlines()) == 1


def test_a_record_without_its_prompt_is_an_error_that_names_its_line(
  run, tmp_path
):
  """The second line of the file has no question."""
  records = '{"question": "1 + 1?", "text": "2"}\n{"text": "3"}\n'
  (tmp_path / "a.jsonl").write_text(records)

  result = run(
    f"--config.data.source=jsonl:{tmp_path}/a.jsonl",
    "--config.data.prompt_field=question",
    f"--config.data.prepared_dir={tmp_path}/rows",
  )

  assert result.returncode == 1
  assert "Traceback" not in result.stderr
  last_line = result.stderr.splitlines()[-1]
  assert last_line.startswith(
    f"error: {tmp_path}/a.jsonl:2:"
    " config.data.prompt_field = 'question' is not text here"
  )
