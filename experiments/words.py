"""Data of made-up words: JSONL files of examples, and a tokenizer with one token a word."""

from __future__ import annotations

import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SEPARATOR = "<|endoftext|>"


def write(
  directory: pathlib.Path,
  words: Sequence[str],
  examples: Mapping[str, Iterable[Mapping[str, str]]],
  of: Any,
) -> dict[str, str]:
  """Writes training and validation examples and the tokenizer, unless they exist already.

  Args:
    directory: where to write.
    words: the vocabulary, SEPARATOR first.
    examples: "train" and "validation", each the records of a JSONL file; not read if the files exist.
    of: everything that determines the examples (JSON-able); its hash is in the path.

  Returns:
    The fields of a config that point to the files.
  """
  target = (
    directory
    / f"data-{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:12]}"
  )
  if not target.exists():
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as building:
      complete = pathlib.Path(building) / "complete"
      complete.mkdir()
      for name, records in examples.items():
        with (complete / f"{name}.jsonl").open("w", encoding="utf-8") as file:
          file.writelines(json.dumps(record) + "\n" for record in records)
      (complete / "tokenizer.json").write_text(
        json.dumps(_tokenizer(words)), encoding="utf-8"
      )
      try:
        complete.rename(target)
      except OSError:  # another process was first
        if not target.exists():
          raise
  return {
    "data.source": f"jsonl:{target}/train.jsonl",
    "data.validation_source": f"jsonl:{target}/validation.jsonl",
    "data.tokenizer": f"{target}/tokenizer.json",
  }


def _tokenizer(words: Sequence[str]) -> dict[str, object]:
  """A Hugging Face tokenizer with one token per word."""
  special = {
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
    "added_tokens": [special],
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
