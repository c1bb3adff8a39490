"""A trained model in the interface of the LM Evaluation Harness.

lm-eval is in the extra `eval`. It needs neither torch nor transformers.

Texts begin with the tokens that begin a document, as in training. A control
token that is spelled out in a text is text. A context that is too long for the
model loses its oldest tokens, except those that begin the document. Long answers
are shortened so that the context keeps half of the model's length.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import Any

from absl import logging
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffjax.config import UserError
from diffjax.data.stop_strings import StopStrings, cut_at_stop
from diffjax.evals.methods.scoring import Score, score
from diffjax.inference.sampler import Sampler
from diffjax.inference.trained import Trained


class DiffjaxLM(TemplateLM):
  """Answers lm-eval's three kinds of requests on this process's device.

  On several hosts every process answers all requests: each is rank 0 of world size 1, for which lm-eval needs no torch.
  """

  def __init__(self, trained: Trained, *, batch_tokens: int):
    """Args:

    trained: The model.
    batch_tokens: Number of tokens of a batch, padding included.
    """
    super().__init__()
    self._trained, self._batch_tokens = trained, batch_tokens

  @property
  def eot_token_id(self) -> int:
    """The token that ends a document."""
    return self._trained.tokenizer.document_tokens.end[-1]

  @property
  def prefix_token_id(self) -> int:
    """The context of a text that has none."""
    return self._trained.tokenizer.document_tokens.no_context

  @property
  def max_length(self) -> int:
    """Number of tokens of the longest row."""
    return self._trained.config.model.max_length

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Returns the ids of a text that begins a document.

    If add_special_tokens is False, there are no control tokens.
    """
    tokenizer = self._trained.tokenizer
    ids = tokenizer.encode(string)
    if add_special_tokens is False:
      return ids
    return [*tokenizer.document_tokens.start, *ids]

  def _loglikelihood_tokens(
    self,
    requests: list[tuple[tuple[str, str], list[int], list[int]]],
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    """Scores continuations. A request holds the texts, for lm-eval's cache, and their ids."""
    pairs = []
    for (_, text), context, continuation in requests:
      # A tokenizer may join all of a continuation with the context's last token
      continuation = continuation or self.tok_encode(
        text, add_special_tokens=False
      )
      if len(continuation) > self.max_length:
        raise UserError(
          f"an answer of {len(continuation)} tokens ({text[:40]!r}) is longer"
          f" than the model takes (config.model.max_length = {self.max_length})"
        )
      room = self.max_length + 1 - len(continuation)
      pairs.append(
        (self._cut(context, room) or [self.prefix_token_id], continuation)
      )
    self._report_cuts(
      (request[1] for request in requests), (pair[0] for pair in pairs)
    )
    return [
      (found.log_probability, found.is_greedy) for found in self._score(pairs)
    ]

  def loglikelihood_rolling(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihoods of whole texts, in windows that score every token once."""
    pairs, owners = [], []
    for index, request in enumerate(requests):
      ids = self.tok_encode(request.args[0], add_special_tokens=False)
      windows = get_rolling_token_windows(
        ids,
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      for window in map(make_disjoint_window, windows):
        pairs.append(window)
        owners.append(index)
    sums = [0.0] * len(requests)
    for index, found in zip(owners, self._score(pairs), strict=True):
      sums[index] += found.log_probability
    return sums

  def generate_until(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Continues contexts up to the first stop string, which is not part of the result."""
    tokenizer = self._trained.tokenizer
    contexts = [
      tokenizer.encode_prompt(request.args[0]) for request in requests
    ]
    groups = collections.defaultdict(list)
    for index, request in enumerate(requests):
      requested = normalize_gen_kwargs(request.args[1])["max_gen_toks"]
      new = self._new_tokens(len(contexts[index]), requested)
      options = json.dumps(request.args[1], sort_keys=True)
      groups[options, new].append(index)
    texts = [""] * len(requests)
    for (options, new), indices in groups.items():
      wanted = normalize_gen_kwargs(json.loads(options))
      until = [stop for stop in wanted["until"] if stop]
      if new < wanted["max_gen_toks"]:
        logging.warning(
          "%d answers have at most %d of %d tokens, since the model takes %d",
          len(indices),
          new,
          wanted["max_gen_toks"],
          self.max_length,
        )

      whole = [contexts[index] for index in indices]
      prompts = [self._cut(prompt, self.max_length - new) for prompt in whole]
      self._report_cuts(whole, prompts)
      written = self._sampler(max(map(len, prompts)) + new).generate(
        prompts,
        new,
        temperature=wanted.get("temperature", float(wanted["do_sample"])),
        top_k=wanted.get("top_k", 0),
        top_p=wanted.get("top_p", 1.0),
        stop_ids=tokenizer.document_tokens.stop,
        stop=StopStrings(tokenizer, prompts, until),
      )
      for index, prompt, ids in zip(indices, prompts, written, strict=True):
        text = tokenizer.decode_after(prompt, ids)
        texts[index] = cut_at_stop(text, until)
    return texts

  def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
    return score(
      self._trained.model,
      self._trained.params,
      pairs,
      batch_tokens=self._batch_tokens,
    )

  def _sampler(self, needed: int) -> Sampler:
    """A sampler whose capacity is a power of two or the model's longest, so that few are compiled."""
    capacity = min(max(64, 1 << (needed - 1).bit_length()), self.max_length)
    return Sampler(
      self._trained.model,
      self._trained.params,
      batch_size=max(1, self._batch_tokens // capacity),
      capacity=capacity,
    )

  def _new_tokens(self, context_length: int, requested: int) -> int:
    """Returns the most tokens of an answer to a context.

    They are the requested ones, or fewer if the context would otherwise lose
    tokens and have less than half of the model's length.
    """
    if context_length + requested <= self.max_length:
      return requested
    context_room = max(self.max_length - requested, self.max_length // 2)
    if context_room < 2:
      raise UserError(
        f"config.model.max_length = {self.max_length}: a context and an"
        " answer need at least 4 tokens"
      )
    return self.max_length - context_room

  def _cut(self, context: list[int], room: int) -> list[int]:
    """Returns the start of the document and the newest tokens of a context, `room` in all."""
    if len(context) <= room:
      return context
    num_start = min(len(self._trained.tokenizer.document_tokens.start), room)
    num_newest = room - num_start
    return context[:num_start] + context[len(context) - num_newest :]

  def _report_cuts(
    self, whole: Iterable[Sequence[int]], kept: Iterable[Sequence[int]]
  ) -> None:
    num_contexts = 0
    num_cut = 0
    num_lost = 0
    for whole_context, kept_context in zip(whole, kept, strict=True):
      num_contexts += 1
      if len(kept_context) < len(whole_context):
        num_cut += 1
        if len(kept_context) == 1:
          num_lost += 1
    if num_cut > 0:
      logging.warning(
        "%d of %d contexts are longer than the model takes (%d tokens) and were cut",
        num_cut,
        num_contexts,
        self.max_length,
      )
    if num_lost > 0:
      logging.warning(
        "%d of these contexts were lost: their answers are as long as the model takes",
        num_lost,
      )
