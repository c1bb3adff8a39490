r"""Packs a dataset into rows of tokens, once, or trains a tokenizer on it.

    python -m diffjax.prepare --config=configs/diff_1b.py \
      --config.data.prepared_dir=/data/rows
    python -m diffjax.prepare --config=configs/diff_1b.py \
      --train_tokenizer=/data/bpe

Rows are written to config.data.prepared_dir, or to the user's cache. If the
command is stopped, the same command continues. A training run of one process
prepares missing rows itself, in the same way, before its first step. This
command prepares them ahead of time, for example on a machine without
accelerators. Runs of several processes need it first.
"""

if __name__ == "__main__":
  # This comes before the slow imports, so that Ctrl-C also ends the command
  # during them.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

from collections.abc import Iterator

from absl import flags

from diffjax.cli import command
from diffjax.config import Config, DataConfig
from diffjax.data import plan, prepared, sources, tokenizer_training
from diffjax.host.progress import say

_WORKERS = flags.DEFINE_integer(
  "workers",
  0,
  "Number of processes that tokenize and write; 0 for one for each CPU. The"
  " rows are the same for any number.",
  lower_bound=0,
)
_TRAIN_TOKENIZER = flags.DEFINE_string(
  "train_tokenizer",
  "",
  "Directory to write a BPE tokenizer to, trained on the source's training"
  " documents, instead of preparing rows.",
)
_VOCAB_SIZE = flags.DEFINE_integer(
  "vocab_size",
  32768,
  "Number of tokens of the tokenizer to train, including the separator.",
)


def main(config: Config) -> None:
  """Prepares the rows of a config, or trains a tokenizer on its source."""
  # Selects the same files of a large hf:// source as a run does.
  config = plan.resolve(config, process_count=1)
  if _TRAIN_TOKENIZER.value:
    _train_tokenizer(config.data, _TRAIN_TOKENIZER.value, _VOCAB_SIZE.value)
  else:
    prepared.prepare(config.data, _WORKERS.value)


def _train_tokenizer(
  config: DataConfig, directory: str, vocab_size: int
) -> None:
  """Trains a tokenizer on the training documents, and prints how to use it.

  Args:
    config: The data fields.
    directory: Where the tokenizer is written.
    vocab_size: Number of its tokens, including the separator.
  """
  texts = _training_texts(config)
  path = tokenizer_training.train_tokenizer(texts, vocab_size, directory)
  say(
    f"trained a tokenizer of {vocab_size} tokens: {path} and tokenizer.json"
    f" beside it; to use it, --config.data.tokenizer={path}"
    f" --config.model.vocab_size={vocab_size}"
  )


def _training_texts(config: DataConfig) -> Iterator[str]:
  """Yields the training documents with their prompts, source by source."""
  for component in sources.parse_mixture(config.source):
    source = sources.documents(component.spec, "train", config)
    for part in source.parts:
      for document in source.read(part):
        prompt = document.prompt or ""
        yield prompt + document.text


if __name__ == "__main__":
  command.run(main)
