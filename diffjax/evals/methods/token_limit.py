"""The limit of tokens of a prompt and its answer."""

from __future__ import annotations

from diffjax.config import UserError
from diffjax.inference.trained import Trained


def checked_token_limit(suite: str, max_tokens: int, trained: Trained) -> int:
  """Returns the most tokens that a prompt and its answer may have together.

  Args:
    suite: The name of the suite, for the message.
    max_tokens: The suite's setting. 0 for the most that the model takes.
    trained: The model.

  Raises:
    UserError: if the setting is more than the model takes, or negative.
  """
  max_length = trained.config.model.max_length
  if max_tokens == 0:
    return max_length
  if not 1 <= max_tokens <= max_length:
    raise UserError(
      f"set.{suite}.max_tokens = {max_tokens}: the model takes at most"
      f" {max_length} (its config.model.max_length)"
    )
  return max_tokens
