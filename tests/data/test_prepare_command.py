"""The command trains tokenizers, prepares rows, and reports errors."""

import pytest

from diffjax.data import tokenizer


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


def test_the_command_prepares_rows_with_a_tokenizer_that_it_trained(
  run, jsonl, tmp_path, texts
):
  """The second command reads the tokenizer.json that the first one wrote.

  The file `jsonl` has the documents `texts`.
  """
  source_flag = f"--config.data.source=jsonl:{jsonl}"
  tokenizer_dir = tmp_path / "tokenizer"
  rows_dir = tmp_path / "rows"

  # The first command trains a tokenizer.
  training = run(
    source_flag, f"--train_tokenizer={tokenizer_dir}", "--vocab_size=400"
  )
  assert training.returncode == 0, training.stderr
  trained = tokenizer.load_tokenizer(f"{tokenizer_dir}/tokenizer.tiktoken")
  assert trained.vocab_size == 400
  # A token has more than two bytes on average.
  num_tokens = len(trained.encode(texts[4]))
  num_bytes = len(texts[4].encode())
  assert num_tokens < num_bytes / 2

  # The second command prepares rows with the tokenizer.
  preparing = run(
    source_flag,
    f"--config.data.tokenizer={tokenizer_dir}/tokenizer.json",
    f"--config.data.prepared_dir={rows_dir}",
    "--workers=1",
  )
  assert preparing.returncode == 0, preparing.stderr
  assert "documents" in preparing.stderr
  assert "tokens/s" in preparing.stderr
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
