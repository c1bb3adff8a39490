"""Data sets of made-up words.

A data set is a directory with JSONL files of examples, and a tokenizer that has
one token per word.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The word between documents, with token id 0.
SEPARATOR = "<|endoftext|>"


def write(
  directory: pathlib.Path,
  words: Sequence[str],
  examples: Mapping[str, Iterable[Mapping[str, str]]],
  settings: Any,
) -> dict[str, str]:
  """Writes a data set of made-up words, unless it exists.

  Args:
    directory: The parent of the data set's directory.
    words: The vocabulary. The first word is SEPARATOR.
    examples: The records of train.jsonl and validation.jsonl, by "train" and
      "validation". They are not read if the data set exists.
    settings: Everything that determines the examples, as a JSON value. Its hash
      is in the name of the data set's directory.

  Returns:
    The config fields that select the data set.
  """
  digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
  target = directory / f"data-{digest}"
  if not target.exists():
    # The files are complete when the directory gets its name.
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary_dir:
      complete = pathlib.Path(temporary_dir) / "complete"
      complete.mkdir()
      _write_files(complete, words, examples)
      try:
        complete.rename(target)
      except OSError:
        # Another process may have written the same data set.
        if not target.exists():
          raise
  return {
    "data.source": f"jsonl:{target}/train.jsonl",
    "data.validation_source": f"jsonl:{target}/validation.jsonl",
    "data.tokenizer": f"{target}/tokenizer.json",
  }


def _write_files(
  directory: pathlib.Path,
  words: Sequence[str],
  examples: Mapping[str, Iterable[Mapping[str, str]]],
) -> None:
  """Writes a JSONL file for each kind of examples, and tokenizer.json."""
  for name, records in examples.items():
    path = directory / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
      for record in records:
        file.write(json.dumps(record) + "\n")
  tokenizer = json.dumps(_tokenizer(words))
  (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")


def _tokenizer(words: Sequence[str]) -> dict[str, object]:
  """Returns the tokenizer.json of a Hugging Face tokenizer of whole words."""
  separator_token = {
    "id": 0,
    "content": SEPARATOR,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
  }
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [separator_token],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {
      "type": "WordLevel",
      "vocab": {word: index for index, word in enumerate(words)},
      "unk_token": SEPARATOR,
    },
  }
