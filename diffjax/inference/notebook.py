"""Training and generation for notebooks: `diffjax.fit`, `diffjax.complete`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_collections
from etils import epath

from diffjax.config import Config, check, from_config_dict
from diffjax.host import absent_tpu
from diffjax.inference.finish import finish
from diffjax.inference.sampler import Sampler, row_capacity
from diffjax.inference.token_ids import is_integer
from diffjax.inference.trained import Trained, load
from diffjax.training import loop

# How many prompts are continued at the same time. It changes the memory that is
# needed, not the results.
_BATCH_SIZE = 16


def fit(
  config: Config | ml_collections.ConfigDict | dict[str, Any],
  workdir: epath.PathLike,
) -> Trained:
  """Trains to `config.train.steps` and returns the trained model.

  Continues from the newest checkpoint in `workdir` if there is one. Can be
  called repeatedly and in any thread. In the main thread, Ctrl-C saves a
  checkpoint after the current step and ends training. A second Ctrl-C ends the
  process.

  Args:
    config: the run's config, or the ConfigDict of a config file
      (`diffjax.configs.tiny.get_config()`).
    workdir: directory of checkpoints, metrics, plot and sample; local or gs://.

  Returns:
    The model of the newest checkpoint.

  Raises:
    UserError: if the user can fix the error, as in `training.loop.train`, or if
      the run was stopped before its first step.
  """
  absent_tpu.skip()
  if isinstance(config, Config):
    check(config)
  else:
    config = from_config_dict(config)
  finish(loop.train(config, str(workdir)))
  return load(workdir)


def complete(
  trained: Trained,
  prompts: str | Sequence[str],
  max_new_tokens: int = 200,
  *,
  temperature: float = 0.8,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
) -> list[str]:
  """Continues texts. Each is the beginning of a document.

  Every call compiles for seconds. For many calls, make one `diffjax.Sampler`.
  It compiles once, and also takes token ids.

  Args:
    trained: the model, as `diffjax.fit` and `diffjax.load` return it.
    prompts: texts of any lengths; "" for a new document. One text counts as a
      list of one.
    max_new_tokens: the most tokens to add to each text. A prompt and its new
      tokens must fit `trained.config.model.max_length`.
    temperature: divides the logits. 0 takes the likeliest token.
    top_k: draws among the k likeliest tokens. 0 for all.
    top_p: draws among the likeliest tokens that together have this probability,
      above 0 and at most 1.
    seed: seed of the draws. The continuation of a prompt also depends on its
      position among the prompts, but not on the other prompts.

  Returns:
    The new text of each prompt. It ends where the model ends the document, or
    after `max_new_tokens`.

  Raises:
    UserError: if a prompt and its new tokens are too long, or if an option is
      out of range.
  """
  if isinstance(prompts, str):
    prompts = [prompts]
  texts = list(prompts)
  token_prompts = [trained.tokenizer.encode_prompt(text) for text in texts]
  capacity = None
  # If it is not an integer, `sampler.generate` raises the error below.
  if is_integer(max_new_tokens):
    capacity = row_capacity(trained.config.model, token_prompts, max_new_tokens)
  batch_size = max(1, min(len(texts), _BATCH_SIZE))
  sampler = Sampler(trained, batch_size=batch_size, capacity=capacity)
  return sampler.generate(
    texts,
    max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
  )
