"""The report as a suite: it shows the results of the others on a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from etils import epath

from diffjax.config import UserError, at_least, field
from diffjax.evals.measurement import Measurement
from diffjax.evals.methods.validation_rows import validation_rows
from diffjax.evals.report import page
from diffjax.evals.suite import Model, Suite
from diffjax.inference.trained import Trained


@dataclasses.dataclass(frozen=True)
class Report(Suite[list[int]]):
  """HTML page with curves, attention maps and the results of all suites."""

  name: ClassVar[str] = "report"

  prompt: str = field(
    "",
    "Text whose attention maps are shown. Empty for the beginning of the"
    " validation text.",
  )
  tokens: int = field(
    96, "Maximum number of tokens of a map.", bound=at_least(1)
  )
  layers: int = field(
    6,
    "Maximum number of layers to choose from, evenly spaced from the first to"
    " the last.",
    bound=at_least(1),
  )
  heads: int = field(
    4,
    "Maximum number of heads to choose from: the first ones. The mean over all"
    " heads can be chosen too.",
    bound=at_least(1),
  )

  def load(self, trained: Trained) -> list[int]:
    """Returns the token ids of the text whose attention maps are shown.

    It is the prompt, or the beginning of the validation text.

    Raises:
      UserError: if the prompt is too long, or there is no validation text.
    """
    max_length = trained.config.model.max_length
    max_tokens = min(self.tokens, max_length)
    if not self.prompt:
      return _validation_ids(trained, max_tokens)
    ids = trained.tokenizer.encode_prompt(self.prompt)
    if len(ids) > max_tokens:
      raise UserError(
        f"set.report.prompt has {len(ids)} tokens with its start token, and at"
        f" most {max_tokens} are allowed: set.report.tokens = {self.tokens} and"
        f" config.model.max_length = {max_length}; shorten it"
      )
    return ids

  def measure(
    self, trained: Trained, prompt_ids: list[int]
  ) -> Iterator[Measurement]:
    """Returns no measurements: the report shows those of other suites."""
    return iter(())

  def run(
    self,
    models: Sequence[Model],
    prompts: Sequence[list[int]],
    out: epath.Path,
  ) -> None:
    """Writes the page, and prints its path.

    Args:
      models: One model, or two to compare.
      prompts: For each model the token ids from `load`.
      out: The directory of the results and of the page.

    Raises:
      UserError: if results cannot be read, or the page cannot be written.
    """
    # Both models tokenize the same text. A model with a smaller maximum length
    # has a shorter list, which is the beginning of the other one.
    prompt_ids = min(prompts, key=len)
    path = page.write(
      models,
      prompt_ids,
      out,
      max_layers=self.layers,
      max_heads=self.heads,
    )
    print(path, flush=True)


def _validation_ids(trained: Trained, max_tokens: int) -> list[int]:
  """Returns the first tokens of the first validation document."""
  batch = next(iter(validation_rows("report", trained, 1)))
  # The row may hold several packed documents.
  segment_ids = batch["segment_ids"][0]
  document_length = int((segment_ids == segment_ids[0]).sum())
  num_tokens = min(document_length, max_tokens)
  return batch["tokens"][0, :num_tokens].tolist()
