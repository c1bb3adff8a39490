"""Packs a dataset into rows of tokens, once, or trains a tokenizer on it.

    python -m diffjax.prepare --config=configs/diff_1b.py --config.data.prepared_dir=/data/rows
    python -m diffjax.prepare --config=configs/diff_1b.py --train_tokenizer=/data/bpe

Rows are written to config.data.prepared_dir, or to the user's cache. If the command is stopped, the same command continues. A training run
of one process prepares missing rows by itself. Runs of several processes need this command first; for large datasets it is faster.
"""

if __name__ == "__main__":
  # Before the other imports, which take a while: Ctrl-C ends them too.
  from diffjax.host.signals import end_at_ctrl_c

  end_at_ctrl_c()

from absl import flags

from diffjax.cli import command
from diffjax.config import Config, DataConfig
from diffjax.data import plan, prepared, sources, tokenizer_training
from diffjax.host.progress import say

_WORKERS = flags.DEFINE_integer(
  "workers",
  0,
  "Number of processes that tokenise and write; 0 for one a CPU. The rows are the same for any number.",
  lower_bound=0,
)
_TRAIN_TOKENIZER = flags.DEFINE_string(
  "train_tokenizer",
  "",
  "Directory to write a BPE tokenizer to, trained on the source's training documents, instead of preparing rows.",
)
_VOCAB_SIZE = flags.DEFINE_integer(
  "vocab_size",
  32768,
  "Number of tokens of the tokenizer to train, the separator included.",
)


def main(config: Config) -> None:
  """Prepares rows, or trains a tokenizer."""
  config = plan.resolve(config, process_count=1)
  if not _TRAIN_TOKENIZER.value:
    prepared.prepare(config.data, _WORKERS.value)
    return
  path = tokenizer_training.train_tokenizer(
    _training_documents(config.data), _VOCAB_SIZE.value, _TRAIN_TOKENIZER.value
  )
  say(
    f"trained a tokenizer of {_VOCAB_SIZE.value} tokens: {path} and tokenizer.json beside it; to use it, --config.data.tokenizer={path} "
    f"--config.model.vocab_size={_VOCAB_SIZE.value}"
  )


def _training_documents(config: DataConfig):
  """The texts of the training split, one source after the other."""
  for component in sources.parse_mixture(config.source):
    source = sources.documents(component.spec, "train", config)
    for part in source.parts:
      for document in source.read(part):
        yield (document.prompt or "") + document.text


if __name__ == "__main__":
  command.run(main)
