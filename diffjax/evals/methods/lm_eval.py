"""A trained model in the interface of the LM Evaluation Harness.

lm-eval is in the extra `eval`. It needs neither torch nor transformers.

Texts begin with the tokens that begin a document, as in training. A control
token that is spelled out in a text is text.

A context that is too long for the model loses its oldest tokens, except the
tokens that begin the document. Long answers are shortened so that the context
keeps half of the model's maximum length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class _GenerationGroup(NamedTuple):
  """Requests for generation that may share batches.

  Attributes:
    options: The options of all requests, after `normalize_gen_kwargs`.
    num_new: The maximum number of tokens in an answer.
    indices: The indices of the requests.
  """

  options: Mapping[str, Any]
  num_new: int
  indices: list[int]


class DiffjaxLM(TemplateLM):
  """A model of lm-eval that scores and generates text with a diffjax model.

  lm-eval asks for the log-likelihoods of continuations and of whole texts, and
  for generated answers. They are computed on this process's device.

  On several hosts, each process answers all requests. Each is rank 0 of world
  size 1, so lm-eval needs no torch.
  """

  def __init__(self, trained: Trained, *, batch_tokens: int):
    """Wraps a model for lm-eval.

    Args:
      trained: The model.
      batch_tokens: The number of tokens in a batch, including padding.
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
    """The maximum number of tokens in one sequence."""
    return self._trained.config.model.max_length

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: object
  ) -> list[int]:
    """Returns the ids of a text that begins a document.

    If add_special_tokens is False, there are no control tokens.
    """
    # lm-eval may pass more arguments.
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
    """Scores continuations after contexts, as lm-eval requests them.

    Args:
      requests: For each request, the texts of context and continuation, then
        the ids of both. (lm-eval uses the texts as keys of its cache.)
      **kwargs: Options of lm-eval, which are ignored.

    Returns:
      For each request, the log-likelihood of the continuation, and whether
      greedy decoding would write it.

    Raises:
      UserError: if a continuation is longer than the model accepts.
    """
    del kwargs
    contexts = []
    cut_contexts = []
    continuations = []
    for (_, text), context, given_ids in requests:
      continuation = self._continuation_ids(text, given_ids)
      # The model does not read the last token.
      room = self.max_length + 1 - len(continuation)
      cut_context = self._cut(context, room)
      contexts.append(context)
      # An empty context becomes the token that stands for it.
      cut_contexts.append(cut_context or [self.prefix_token_id])
      continuations.append(continuation)
    self._report_cuts(contexts, cut_contexts)

    pairs = list(zip(cut_contexts, continuations, strict=True))
    results = []
    for pair_score in self._score(pairs):
      results.append((pair_score.log_probability, pair_score.is_greedy))
    return results

  def _continuation_ids(self, text: str, given_ids: list[int]) -> list[int]:
    """Returns the ids of a continuation, from a request of lm-eval.

    Args:
      text: The continuation.
      given_ids: The ids in the request. They are empty if the tokenizer joins
        the continuation with the context's last token.

    Raises:
      UserError: if there are more tokens than the model accepts.
    """
    ids = given_ids or self.tok_encode(text, add_special_tokens=False)
    if len(ids) > self.max_length:
      raise UserError(
        f"an answer of {len(ids)} tokens ({text[:_MAX_QUOTED]!r}) is longer"
        " than the model takes (config.model.max_length ="
        f" {self.max_length})"
      )
    return ids

  def loglikelihood_rolling(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns the log-likelihoods of whole texts.

    A long text is split into windows that the model can read. Each token is
    scored in one of them.
    """
    del disable_tqdm
    pairs = []
    # The index of the text of each pair.
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

    log_likelihoods = [0.0] * len(requests)
    scores = self._score(pairs)
    for index, window_score in zip(text_indices, scores, strict=True):
      log_likelihoods[index] += window_score.log_probability
    return log_likelihoods

  def generate_until(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns an answer to each request, which ends before a stop string.

    Args:
      requests: Each has the text of a context and the options of generation.
      disable_tqdm: Ignored.
    """
    del disable_tqdm
    tokenizer = self._trained.tokenizer
    contexts = [
      tokenizer.encode_prompt(request.args[0]) for request in requests
    ]
    texts = [""] * len(requests)
    for group in self._group_requests(requests, contexts):
      group_contexts = [contexts[index] for index in group.indices]
      answers = self._generate(group_contexts, group.num_new, group.options)
      for index, answer in zip(group.indices, answers, strict=True):
        texts[index] = answer
    return texts

  def _group_requests(
    self, requests: Sequence[Instance], contexts: Sequence[list[int]]
  ) -> list[_GenerationGroup]:
    """Returns groups of requests with equal options and lengths of answers."""
    groups: dict[tuple[str, int], _GenerationGroup] = {}
    for index, request in enumerate(requests):
      given_options = request.args[1]
      options = normalize_gen_kwargs(given_options)
      num_new = self._num_new_tokens(
        len(contexts[index]), options["max_gen_toks"]
      )
      # A dict cannot be part of a key, but its JSON text can.
      key = (json.dumps(given_options, sort_keys=True), num_new)
      if key not in groups:
        groups[key] = _GenerationGroup(options, num_new, [])
      groups[key].indices.append(index)
    return list(groups.values())

  def _generate(
    self,
    contexts: list[list[int]],
    num_new: int,
    options: Mapping[str, Any],
  ) -> list[str]:
    """Returns generated answers to contexts, which share their options.

    Args:
      contexts: Ids of the contexts.
      num_new: The maximum number of tokens in an answer.
      options: lm-eval's options, after `normalize_gen_kwargs`.
    """
    # `_num_new_tokens` allows fewer tokens than requested if there is no room.
    if num_new < options["max_gen_toks"]:
      logging.warning(
        "%d answers have at most %d of %d tokens, since the model takes %d",
        len(contexts),
        num_new,
        options["max_gen_toks"],
        self.max_length,
      )
    room = self.max_length - num_new
    prompts = [self._cut(context, room) for context in contexts]
    self._report_cuts(contexts, prompts)

    tokenizer = self._trained.tokenizer
    stop_strings = [stop for stop in options["until"] if stop]
    # If a task sets no temperature, it is 1 for sampling and 0, which is
    # greedy, otherwise.
    default_temperature = float(options["do_sample"])
    longest_prompt = max(len(prompt) for prompt in prompts)
    sampler = self._make_sampler(longest_prompt + num_new)
    generated = sampler.generate(
      prompts,
      num_new,
      temperature=options.get("temperature", default_temperature),
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

    This is the requested number if both fit into the model's maximum length.
    Otherwise a long answer is shortened, so that at least half of the maximum
    length is left for the context.
    """
    if context_length + num_requested <= self.max_length:
      return num_requested
    context_room = max(self.max_length - num_requested, self.max_length // 2)
    # A token that begins the document, and a token of text.
    if context_room < 2:
      raise UserError(
        f"config.model.max_length = {self.max_length}: a context and an"
        " answer need at least 4 tokens"
      )
    return self.max_length - context_room

  def _cut(self, context: list[int], room: int) -> list[int]:
    """Returns a context with at most `room` tokens.

    A longer context keeps the tokens that begin the document and its last
    tokens.
    """
    if len(context) <= room:
      return context
    document_start = self._trained.tokenizer.document_tokens.start
    num_first = min(len(document_start), room)
    num_last = room - num_first
    return context[:num_first] + context[len(context) - num_last :]

  def _report_cuts(
    self, contexts: Sequence[list[int]], cut_contexts: Sequence[list[int]]
  ) -> None:
    """Logs how many contexts were cut, and how many lost all their text."""
    num_cut = 0
    num_lost = 0
    for context, cut_context in zip(contexts, cut_contexts, strict=True):
      is_cut = len(cut_context) < len(context)
      if not is_cut:
        continue
      num_cut += 1
      # Only the token that begins the document is left.
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
        "%d of these contexts were cut completely: an answer alone has as many"
        " tokens as the model takes",
        num_lost,
      )
