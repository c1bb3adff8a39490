"""Batches for training and validation.

The path of a batch from a file to the loss:

1. `sources.py` opens the files and divides them into parts. A source yields the
   documents of a part (`document.py`).
2. `packing.py` tokenizes each document and packs the tokens into rows.
3. Prepared mode: `prepared.py` and `shards.py` do steps 1 and 2 once, and write
   the rows to disk. `prepared_batches.py` shuffles and mixes them.
   Streamed mode: `streamed_batches.py` does steps 1 and 2 during training. A
   checkpoint has the place in the files (`document_dataset.py`).
4. `row.make_batch` turns rows into arrays: tokens, targets, segment ids,
   positions and weights.
5. `reader.py` reads batches ahead, and reports reads that hang.
6. `training/session.py` puts a batch on the devices, by `parallel/mesh.py`. If
   the context axis of the mesh splits the rows, this also reorders the tokens
   of each row, so that all devices have the same work. `training/step.py`
   computes the loss: the cross entropy of the targets, weighted by the weights.

Validation batches skip step 5. `validation_batches.py` reads their rows in a
fixed order, and `training/validation.py` computes the losses.
"""

import math

import grain

from diffjax.config import Config, UserError
from diffjax.data.batches import FULL_SHARE, BatchShare, TrainingBatches
from diffjax.data.prepared_batches import PreparedBatches, open_or_prepare_rows
from diffjax.data.reader import prefetch
from diffjax.data.row import HostBatch
from diffjax.data.streamed_batches import (
  StreamedBatches,
  open_sources,
  stream_batches,
)
from diffjax.data.tokenizer import Tokenizer
from diffjax.data.validation_batches import (
  ValidationBatches,
  read_rows,
  shuffle_rows,
)

__all__ = [
  "BatchShare",
  "TrainingBatches",
  "ValidationBatches",
  "check_vocabulary",
  "streamed_dataset",
  "training_batches",
  "validation_batches",
]

# Embeddings of a multiple of this many tokens shard evenly.
_SHARDING_MULTIPLE = 128
# A model may have this many tokens that the tokenizer does not have.
_MAX_UNUSED_TOKENS = 255


def training_batches(
  config: Config, share: BatchShare = FULL_SHARE, *, num_processes: int = 1
) -> TrainingBatches:
  """Returns the training batches of a run.

  Args:
    config: The run's config. In prepared mode, a single process first prepares
      the rows that are missing.
    share: The share of each batch that this process reads. By default, the
      whole batch.
    num_processes: Number of processes of the run, at least `share.count`.

  Returns:
    An endless iterator over this process's rows of the global batches. It
    starts to read with the first batch that is taken.

  Raises:
    UserError: if a source cannot be read, if rows are not prepared and there
      are several processes, or if the number of shares does not divide
      config.train.batch_size.
  """
  batch_size = config.train.batch_size
  name = f"config.train.batch_size = {batch_size}"
  _check_share(name, batch_size, share, num_processes)
  if _is_streamed(config):
    mixture = open_sources(config.data, "train")
    return StreamedBatches(mixture, config, share)
  rows = open_or_prepare_rows(config.data, "train", num_processes)
  return PreparedBatches(rows, config, share)


def validation_batches(
  config: Config,
  batch_size: int,
  share: BatchShare = FULL_SHARE,
  *,
  num_processes: int = 1,
) -> ValidationBatches:
  """Returns the validation batches of a run.

  They consist of the first config.eval.rows validation rows, or of all rows if
  it is −1. Prepared rows are shuffled, with the same seed in all runs. Streamed
  rows come in the order of their documents.

  Args:
    config: The run's config. In prepared mode, a single process first prepares
      the rows that are missing.
    batch_size: Number of rows of a global batch.
    share: The share of each batch that this process reads. By default, the
      whole batch.
    num_processes: Number of processes of the run, at least `share.count`.

  Returns:
    The batches of this process. All processes have equally many.

  Raises:
    UserError: in the same cases as `training_batches`.
  """
  name = f"validation batch of {batch_size} rows"
  _check_share(name, batch_size, share, num_processes)
  if _is_streamed(config):
    sources = open_sources(config.data, "validation")
    rows = read_rows(sources, config.data, config.eval.rows)
    return ValidationBatches(sources, rows, config, batch_size, share)
  mixture = open_or_prepare_rows(config.data, "validation", num_processes)
  shuffled = shuffle_rows(mixture)
  return ValidationBatches(mixture, shuffled, config, batch_size, share)


def _check_share(
  name: str, batch_size: int, share: BatchShare, num_processes: int
) -> None:
  """Raises UserError if a batch cannot be divided into equal shares.

  Args:
    name: The batch size, for the message.
    batch_size: Number of rows of a global batch.
    share: The share of this process.
    num_processes: Number of processes of the run.
  """
  assert share.count <= num_processes, "every share needs a process"
  if batch_size % share.count != 0:
    raise UserError(
      f"{name}: must be divisible by {share.count}, the number of shares that"
      " the processes read"
    )


def _is_streamed(config: Config) -> bool:
  """Returns whether rows are made during training, not prepared before."""
  mode = config.data.mode
  assert mode != "auto", "call plan.resolve first"
  return mode == "streamed"


def streamed_dataset(
  config: Config,
  share: BatchShare = FULL_SHARE,
  repeat: bool = True,
) -> grain.IterDataset[HostBatch]:
  """Returns streamed training batches as a Grain dataset.

  It is meant for other training loops. Runs of diffjax use `training_batches`,
  which reads the same batches with a time limit, and can save its state.

  Args:
    config: The run's config.
    share: The share of the data that this process reads.
    repeat: Whether to repeat the share endlessly, shuffled. Otherwise, it is
      read once and in order, and rows that do not fill a batch are left out.
  """
  mixture = open_sources(config.data, "train")
  batches = stream_batches(mixture, config, share, repeat)
  return prefetch(batches, config.data.num_workers)


def check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
  """Checks that a model's vocabulary is as large as the tokenizer's.

  It may have up to 255 unused tokens, so that the embedding shards evenly.

  Raises:
    UserError: if it is smaller or larger. The message names a size that works.
  """
  vocab_size = config.model.vocab_size
  smallest = tokenizer.vocab_size
  largest = smallest + _MAX_UNUSED_TOKENS
  if smallest <= vocab_size <= largest:
    return

  advice = f"set it to {smallest}"
  # The tokenizer's size, rounded up to a multiple.
  padded_size = math.ceil(smallest / _SHARDING_MULTIPLE) * _SHARDING_MULTIPLE
  if padded_size != smallest:
    advice += f", or {padded_size}, which shards evenly"
  raise UserError(
    f"config.model.vocab_size = {vocab_size}:"
    f" config.data.tokenizer = {tokenizer.spec!r} has {smallest} tokens,"
    f" so it must be at least that and less than {largest + 1}; {advice}"
  )
