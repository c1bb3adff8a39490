"""A trained model in the interface of the LM Evaluation Harness.

lm-eval is in the extra `eval`. It needs neither torch nor transformers.

Texts begin with the tokens that begin a document, as in training. A control
token that is spelled out in a text is text.

A context that is too long for the model loses its oldest tokens, except the
tokens that begin the document. Long answers are shortened so that the context
keeps half of the model's maximum length.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping, Sequence
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

# The capacity of the smallest sampler, in tokens per row.
_MIN_CAPACITY = 64

# Messages quote at most this many characters of a text.
_MAX_QUOTED = 40


class DiffjaxLM(TemplateLM):
  """Answers lm-eval's three kinds of requests on this process's device.

  On several hosts, each process answers all requests. Each is rank 0 of world
  size 1, so lm-eval needs no torch.
  """

  def __init__(self, trained: Trained, *, batch_tokens: int):
    """Initializes the interface.

    Args:
      trained: the model.
      batch_tokens: the number of tokens in a batch, including padding.
    """
    super().__init__()
    self._trained = trained
    self._batch_tokens = batch_tokens

  @property
  def eot_token_id(self) -> int:
    """The token that ends a document."""
    return self._trained.tokenizer.document_tokens.end[-1]

  @property
  def prefix_token_id(self) -> int:
    """The token that stands for an empty context."""
    return self._trained.tokenizer.document_tokens.no_context

  @property
  def max_length(self) -> int:
    """The maximum number of tokens in a row."""
    return self._trained.config.model.max_length

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: object
  ) -> list[int]:
    """Returns the ids of a text that begins a document.

    If add_special_tokens is False, there are no control tokens.
    """
    del kwargs
    tokenizer = self._trained.tokenizer
    ids = tokenizer.encode(string)
    if add_special_tokens is False:
      return ids
    return [*tokenizer.document_tokens.start, *ids]

  def _loglikelihood_tokens(
    self,
    requests: list[tuple[tuple[str, str], list[int], list[int]]],
    **kwargs: object,
  ) -> list[tuple[float, bool]]:
    """Returns the log-likelihood of each continuation, and if it is greedy.

    Args:
      requests: the texts, which lm-eval uses as keys of its cache, and the ids
        of context and continuation.
      **kwargs: options of lm-eval, which are ignored.

    Raises:
      UserError: if a continuation is longer than the model accepts.
    """
    del kwargs
    contexts = []
    pairs = []
    for (_, text), context, continuation in requests:
      # A tokenizer may join the continuation with the context's last token.
      if not continuation:
        continuation = self.tok_encode(text, add_special_tokens=False)
      if len(continuation) > self.max_length:
        raise UserError(
          f"an answer of {len(continuation)} tokens ({text[:_MAX_QUOTED]!r}) is"
          " longer than the model takes (config.model.max_length ="
          f" {self.max_length})"
        )
      # The model does not read the last token.
      room = self.max_length + 1 - len(continuation)
      cut_context = self._cut(context, room)
      contexts.append(context)
      pairs.append((cut_context or [self.prefix_token_id], continuation))
    self._report_cuts(contexts, [context for context, _ in pairs])

    results = []
    for pair_score in self._score(pairs):
      results.append((pair_score.log_probability, pair_score.is_greedy))
    return results

  def loglikelihood_rolling(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns the log-likelihoods of whole texts.

    A text is split into windows in which every token is scored once.
    """
    del disable_tqdm
    pairs = []
    text_indices = []
    for index, request in enumerate(requests):
      ids = self.tok_encode(request.args[0], add_special_tokens=False)
      windows = get_rolling_token_windows(
        ids,
        prefix_token=self.prefix_token_id,
        max_seq_len=self.max_length,
        context_len=1,
      )
      for window in windows:
        pairs.append(make_disjoint_window(window))
        text_indices.append(index)

    sums = [0.0] * len(requests)
    scores = self._score(pairs)
    for index, window_score in zip(text_indices, scores, strict=True):
      sums[index] += window_score.log_probability
    return sums

  def generate_until(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns continuations of contexts, which end before a stop string."""
    del disable_tqdm
    tokenizer = self._trained.tokenizer
    contexts = [
      tokenizer.encode_prompt(request.args[0]) for request in requests
    ]
    # Requests with equal options and lengths of answers share batches. Options
    # are JSON texts here, because a dict cannot be a key.
    groups = collections.defaultdict(list)
    for index, request in enumerate(requests):
      options = request.args[1]
      num_requested = normalize_gen_kwargs(options)["max_gen_toks"]
      num_new = self._num_new_tokens(len(contexts[index]), num_requested)
      groups[json.dumps(options, sort_keys=True), num_new].append(index)

    texts = [""] * len(requests)
    for (options_json, num_new), indices in groups.items():
      group_contexts = [contexts[index] for index in indices]
      options = normalize_gen_kwargs(json.loads(options_json))
      answers = self._generate(group_contexts, num_new, options)
      for index, answer in zip(indices, answers, strict=True):
        texts[index] = answer
    return texts

  def _generate(
    self,
    contexts: list[list[int]],
    num_new: int,
    options: Mapping[str, Any],
  ) -> list[str]:
    """Returns an answer to each context, with the same options.

    Args:
      contexts: ids of the contexts.
      num_new: the maximum number of tokens in an answer.
      options: lm-eval's options, after `normalize_gen_kwargs`.
    """
    if num_new < options["max_gen_toks"]:
      logging.warning(
        "%d answers have at most %d of %d tokens, since the model takes %d",
        len(contexts),
        num_new,
        options["max_gen_toks"],
        self.max_length,
      )
    prompts = [
      self._cut(context, self.max_length - num_new) for context in contexts
    ]
    self._report_cuts(contexts, prompts)

    tokenizer = self._trained.tokenizer
    stop_strings = [stop for stop in options["until"] if stop]
    longest_prompt = max(len(prompt) for prompt in prompts)
    sampler = self._make_sampler(longest_prompt + num_new)
    generated = sampler.generate(
      prompts,
      num_new,
      temperature=options.get("temperature", float(options["do_sample"])),
      top_k=options.get("top_k", 0),
      top_p=options.get("top_p", 1.0),
      stop_ids=tokenizer.document_tokens.stop,
      stop=StopStrings(tokenizer, prompts, stop_strings),
    )
    answers = []
    for prompt, ids in zip(prompts, generated, strict=True):
      text = tokenizer.decode_after(prompt, ids)
      answers.append(cut_at_stop(text, stop_strings))
    return answers

  def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
    """Returns the scores of continuations after contexts."""
    return score(
      self._trained.model,
      self._trained.params,
      pairs,
      batch_tokens=self._batch_tokens,
    )

  def _make_sampler(self, num_tokens: int) -> Sampler:
    """Returns a sampler for rows of `num_tokens` tokens.

    Its capacity is a power of two or the model's maximum length, so that few
    programs are compiled.
    """
    power_of_two = 1 << (num_tokens - 1).bit_length()
    capacity = min(max(_MIN_CAPACITY, power_of_two), self.max_length)
    return Sampler(
      self._trained.model,
      self._trained.params,
      batch_size=max(1, self._batch_tokens // capacity),
      capacity=capacity,
    )

  def _num_new_tokens(self, context_length: int, num_requested: int) -> int:
    """Returns the maximum number of tokens in an answer to a context.

    This is the requested number, or less if the context would otherwise lose
    tokens and have less than half of the model's maximum length.
    """
    if context_length + num_requested <= self.max_length:
      return num_requested
    context_room = max(self.max_length - num_requested, self.max_length // 2)
    if context_room < 2:
      raise UserError(
        f"config.model.max_length = {self.max_length}: a context and an"
        " answer need at least 4 tokens"
      )
    return self.max_length - context_room

  def _cut(self, context: list[int], room: int) -> list[int]:
    """Returns a context with at most `room` tokens.

    They are the tokens that begin the document, and the newest tokens.
    """
    if len(context) <= room:
      return context
    num_start = min(len(self._trained.tokenizer.document_tokens.start), room)
    num_newest = room - num_start
    return context[:num_start] + context[len(context) - num_newest :]

  def _report_cuts(
    self, contexts: Sequence[list[int]], cut_contexts: Sequence[list[int]]
  ) -> None:
    """Logs how many contexts were cut, and how many were lost."""
    num_cut = 0
    num_lost = 0
    for context, cut_context in zip(contexts, cut_contexts, strict=True):
      if len(cut_context) < len(context):
        num_cut += 1
        if len(cut_context) == 1:
          num_lost += 1
    if num_cut > 0:
      logging.warning(
        "%d of %d contexts are longer than the model takes (%d tokens) and were"
        " cut",
        num_cut,
        len(contexts),
        self.max_length,
      )
    if num_lost > 0:
      logging.warning(
        "%d of these contexts were lost: their answers are as long as the model"
        " takes",
        num_lost,
      )
