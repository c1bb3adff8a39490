"""python -m diffjax.prepare, as a user runs it."""

import pytest

from diffjax.data import tokenizer


@pytest.fixture
def run(command, tmp_path):
  """Runs the command with a config of the defaults."""
  (tmp_path / "config.py").write_text(
    "from diffjax.config import to_config_dict\n\ndef get_config():\n  return to_config_dict()\n"
  )

  def run(*arguments):
    return command(
      "diffjax.prepare", f"--config={tmp_path}/config.py", *arguments
    )

  return run


def test_train_a_tokenizer_then_prepare_with_it(run, jsonl, tmp_path, texts):
  source = f"--config.data.source=jsonl:{jsonl}"
  result = run(source, f"--train_tokenizer={tmp_path}/out", "--vocab_size=400")
  assert result.returncode == 0, result.stderr
  loaded = tokenizer.load_tokenizer(f"{tmp_path}/out/tokenizer.tiktoken")
  assert (
    loaded.vocab_size == 400
    and len(loaded.encode(texts[4])) < len(texts[4].encode()) / 2
  )
  result = run(
    source,
    f"--config.data.tokenizer={tmp_path}/out/tokenizer.json",
    f"--config.data.prepared_dir={tmp_path}/rows",
    "--workers=2",
  )
  assert result.returncode == 0, result.stderr
  assert (
    "documents" in result.stderr
    and "tokens/s" in result.stderr
    and (tmp_path / "rows" / "meta.json").exists()
  )


def test_bad_input_is_one_line_and_exit_code_1(run, tmp_path):
  result = run("--config.data.source=text:/nowhere/*.txt")
  assert (
    result.returncode == 1
    and "no file matches" in result.stderr
    and result.stderr.strip().count("\n") == 0
  ), result.stderr


def test_a_record_without_a_prompt(run, tmp_path):
  (tmp_path / "a.jsonl").write_text(
    '{"question": "1 + 1?", "text": "2"}\n{"text": "3"}\n'
  )
  result = run(
    f"--config.data.source=jsonl:{tmp_path}/a.jsonl",
    "--config.data.prompt_field=question",
    f"--config.data.prepared_dir={tmp_path}/rows",
  )
  assert result.returncode == 1 and "Traceback" not in result.stderr
  assert result.stderr.splitlines()[-1].startswith(
    f"error: {tmp_path}/a.jsonl:2: config.data.prompt_field = 'question' is not text here"
  )
