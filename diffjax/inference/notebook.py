"""Training and generating as a notebook calls them: `diffjax.train` and `diffjax.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_collections
from etils import epath

from diffjax.config import Config, check, from_config_dict
from diffjax.host import absent_tpu
from diffjax.inference.sampler import Sampler, row_capacity
from diffjax.inference.token_ids import is_integer
from diffjax.inference.trained import Trained, load
from diffjax.training import loop

# Prompts that are continued together: memory, not the result.
_BATCH = 16


def train(
  config: Config | ml_collections.ConfigDict | dict[str, Any],
  workdir: epath.PathLike,
) -> Trained:
  """Trains to `config.train.steps`, from the newest checkpoint in `workdir` if there is one, and loads what has been trained.

  It may be called again and again, and in any thread. In the main thread Ctrl-C ends it after the step in hand, with a checkpoint;
  a second one ends the process.

  Args:
    config: the run's config; or the ConfigDict of a config file (`diffjax.configs.tiny.get_config()`).
    workdir: directory of checkpoints, metrics, plot and sample; local or gs://.

  Returns:
    The model of the newest checkpoint.

  Raises:
    UserError: for whatever the user can fix, as `training.loop.train`; and if the run was stopped before its first step.
  """
  absent_tpu.skip()
  if isinstance(config, Config):
    check(config)
  else:
    config = from_config_dict(config)
  loop.train(config, str(workdir))
  return load(workdir)


def generate(
  trained: Trained,
  prompts: str | Sequence[str],
  max_new_tokens: int = 200,
  *,
  temperature: float = 0.8,
  top_k: int = 0,
  top_p: float = 1.0,
  seed: int = 0,
) -> list[str]:
  """Continues texts, each as the beginning of a document.

  Every call compiles for seconds. For many calls make one `diffjax.Sampler`, which compiles once and takes token ids as well.

  Args:
    trained: the model, as `diffjax.train` and `diffjax.load` return it.
    prompts: texts of any lengths; "" for a document of the model's own. One text counts as a list of one.
    max_new_tokens: most tokens to add to each. Prompt and addition together may have `trained.config.model.max_length` tokens.
    temperature: divides the logits; 0 takes the likeliest token.
    top_k: draw among the k likeliest tokens; 0 for all.
    top_p: draw among the likeliest tokens that together have this probability, above 0 and at most 1.
    seed: of the draws. A prompt's continuation also depends on its place among the prompts, not on the others.

  Returns:
    The new text of each prompt. It ends where the model ends the document, or after `max_new_tokens`.

  Raises:
    UserError: if a prompt and its addition are too long, or an option is out of range.
  """
  texts = [prompts] if isinstance(prompts, str) else list(prompts)
  token_prompts = [trained.tokenizer.encode_prompt(text) for text in texts]
  capacity = None
  if is_integer(max_new_tokens):  # The sampler refuses others.
    capacity = row_capacity(trained.config.model, token_prompts, max_new_tokens)
  batch_size = max(1, min(len(texts), _BATCH))
  sampler = Sampler(trained, batch_size=batch_size, capacity=capacity)
  return sampler.generate(
    texts,
    max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
  )
