"""Generation: draws tokens that continue prompts.

The model first reads the prompts into a key/value cache, in chunks of tokens.
Then tokens are drawn one at a time. If the model's attention does not support
cached decoding, the tokens themselves are stored in place of keys and values
(history.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from diffjax.config import ModelConfig, UserError
from diffjax.host.progress import say
from diffjax.inference.cache import Cache, empty_cache, extend, unstack
from diffjax.inference.history import (
  TokenHistory,
  empty_history,
  extend_history,
)
from diffjax.inference.pages import PAGE, allocate
from diffjax.inference.token_ids import is_integer, validated_token_ids
from diffjax.model.attention import CACHED_DECODING
from diffjax.model.decoder import Decoder, logits
from diffjax.model.stacks import is_supported
from diffjax.parallel.rules import heads_sharding

# Tokens of a prompt that are read at once.
_CHUNK = 128
# Tokens that are drawn between two transfers to the host. With fewer, the
# device waits for the host more often. With more, text appears less often.
_BURST = 8
# Stands for the stop ids if there are none. It is not the id of a token.
_NO_TOKEN = -1

# `row_capacity` is a multiple of this number of tokens, so that a program that
# was compiled once serves many prompts.
_CAPACITY_STEP = 256

# The variants for which this process has warned that they have no cache.
_warned_of: set[str] = set()


@flax.struct.dataclass
class SamplerState:
  """The state of generation, for a batch of rows.

  Attributes:
    cache: the keys and values of the tokens that the model has read. The tokens
      themselves if the model has no cache.
    logits: the logits of the next token of each row.
  """

  cache: Cache | TokenHistory
  logits: Float[Array, "B N"]


class DrawSettings(NamedTuple):
  """The options of a draw, as the compiled program takes them.

  Attributes:
    temperature: divides the logits.
    top_k: draws among the k most likely tokens. 0 for all.
    top_p: draws among the most likely tokens with this total probability.
    seed: the seed of the draws.
    row_numbers: a number of each row, which determines its random key.
    stop_ids: tokens that end a row. At least one.
  """

  temperature: Float[Array, ""] | np.float32
  top_k: Int[Array, ""] | np.int32
  top_p: Float[Array, ""] | np.float32
  seed: Int[Array, ""] | np.int32
  row_numbers: Int[Array, "B"] | Int[np.ndarray, "B"]
  stop_ids: Int[Array, "num_stop_ids"] | Int[np.ndarray, "num_stop_ids"]


def row_capacity(
  config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> int:
  """Returns a `capacity` for a `Sampler` that will continue these prompts.

  It is a multiple of 256, but at most the model's max_length. A sampler rejects
  longer rows.

  Args:
    config: the decoder's config.
    prompts: the token ids of each prompt.
    max_new_tokens: the most tokens that will follow each prompt.
  """
  lengths = [len(prompt) for prompt in prompts]
  # A negative max_new_tokens is rejected later, by the sampler.
  needed = max(lengths, default=1) + max(max_new_tokens, 0)
  rounded_up = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP
  return min(config.max_length, rounded_up)


class Sampler:
  """Draws continuations of prompts.

  It compiles once for a batch size and a capacity, for all lengths of prompts
  and answers. It runs on the devices that hold the parameters: one device, or a
  mesh, whose devices each hold some heads of the cache.
  """

  def __init__(
    self,
    model: Any,
    params: dict[str, Any] | None = None,
    *,
    batch_size: int = 1,
    capacity: int | None = None,
    cache_tokens: int | None = None,
    cache_dtype: Any = None,
  ):
    """Prepares the parameters for decoding, which makes a second copy of them.

    If the model's attention does not support cached decoding, every new token
    is computed from all tokens of its row. A warning is printed once.

    Args:
      model: the decoder, or a trained model from `diffjax.load`, which has
        `model`, `params` and `tokenizer`.
      params: the decoder's parameters. None with a trained model.
      batch_size: B, the number of rows that are decoded together.
      capacity: the most tokens of a row, prompt and continuation together. None
        for the model's max_length.
      cache_tokens: the most tokens of all rows together, in pages of 128. A row
        takes the pages that its prompt and continuation need, so rows of
        unequal length share the memory. None reserves memory for `capacity`
        tokens in each row. Such a cache has pages only with a cache_dtype.
      cache_dtype: "int8" for keys and values in 8 bits, with a scale for each
        page and head. None for the compute dtype.

    Raises:
      UserError: if the capacity is larger than the model's max_length, or if
        the cache's size or dtype is not supported.
    """
    self._tokenizer = None
    if params is None:
      trained = model
      model = trained.model
      params = trained.params
      self._tokenizer = trained.tokenizer
    if capacity is None:
      capacity = model.config.max_length
    _check_sizes(model.config, batch_size, capacity, cache_tokens)
    self._has_cache = is_supported(model.config, CACHED_DECODING)
    if not self._has_cache:
      _check_no_cache_options(cache_tokens, cache_dtype)
      _warn_of_recomputation(model.config)
    self.capacity = capacity
    self.batch_size = batch_size
    self._vocab_size = model.config.vocab_size

    # The number of pages that all rows share. None for a cache without pages.
    self._num_pages: int | None = None
    if cache_tokens is not None:
      self._num_pages = _pages_for(cache_tokens)
    elif cache_dtype is not None:
      self._num_pages = batch_size * _pages_for(capacity)

    self._params = params
    if self._has_cache:
      self._params = jax.jit(functools.partial(unstack, model))(params)
    programs = _make_programs(
      model,
      batch_size,
      capacity,
      num_pages=self._num_pages,
      cache_dtype=cache_dtype,
      head_sharding=heads_sharding(params),
      has_cache=self._has_cache,
    )
    # Compiled functions (see `_Programs`).
    self._make_cache = programs.make_cache
    self._prefill = programs.prefill
    self._step = programs.step
    self._draw = programs.draw

  def prefill(
    self,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]],
    max_new_tokens: int | None = None,
  ) -> SamplerState:
    """Returns the state after the model has read up to B prompts.

    Rows without a prompt have a meaningless state.

    Args:
      prompts: token ids, 1 to `capacity` of each prompt.
      max_new_tokens: the most tokens that will follow each prompt. They
        determine how many pages a row gets, if the cache has pages. None for as
        many as the capacity allows.

    Raises:
      UserError: if a prompt is empty or longer than the capacity, or has an id
        outside the vocabulary; or the cache has too few pages.
    """
    token_prompts = self._validated(prompts)
    cache = self._make_cache()
    if self._num_pages is not None:
      # Rows without a prompt need no pages.
      needed_tokens = [0] * self.batch_size
      for row, prompt in enumerate(token_prompts):
        needed_tokens[row] = self._needed_tokens(prompt, max_new_tokens)
      pages_per_row = cache.tables.shape[1]
      tables = allocate(needed_tokens, self._num_pages, pages_per_row)
      cache = cache.replace(tables=jnp.asarray(tables))
    return self._read(cache, token_prompts)

  def _needed_tokens(
    self, prompt: Int[np.ndarray, "T"], max_new_tokens: int | None
  ) -> int:
    """Returns how many tokens a prompt and its continuation have at most.

    Args:
      prompt: token ids.
      max_new_tokens: None for a continuation up to the capacity.
    """
    if max_new_tokens is None:
      return self.capacity
    return min(self.capacity, len(prompt) + max_new_tokens)

  def read(
    self, state: SamplerState, more: Sequence[Sequence[int]]
  ) -> SamplerState:
    """Returns the state after the model has read more tokens in up to B rows.

    The old state stays valid. So several prompts can share a prefix that is
    read once.

    Args:
      state: the state after the tokens before.
      more: token ids for the first rows, at least one each. The other rows have
        a meaningless state afterwards.

    Raises:
      UserError: if a row gets no token or one outside the vocabulary, or grows
        longer than the capacity.
    """
    token_rows = self._validated(more)
    # `_read` donates its cache. The copy keeps the old state valid.
    cache = jax.tree.map(jnp.copy, state.cache)
    return self._read(cache, token_rows)

  def _validated(
    self, prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]]
  ) -> list[Int[np.ndarray, "T"]]:
    """Returns prompts as int32 arrays, after checking all token ids.

    Raises:
      UserError: if an id is not in the vocabulary.
    """
    validated = []
    for number, prompt in enumerate(prompts):
      name = f"prompt {number}"
      validated.append(validated_token_ids(prompt, self._vocab_size, name))
    return validated

  def _read(
    self, cache: Cache | TokenHistory, prompts: Sequence[Int[np.ndarray, "T"]]
  ) -> SamplerState:
    """Returns the state after the model has read prompts in the first rows.

    Args:
      cache: the tokens before the prompts, often none. It is donated.
      prompts: the token ids of each prompt.

    Raises:
      UserError: if a prompt is empty, or its row has no room for it.
    """
    if len(prompts) > self.batch_size:
      raise ValueError(
        f"{len(prompts)} prompts for a batch of {self.batch_size}"
      )
    self._check_room(cache, prompts)

    # All prompts are padded to the capacity, rounded up to chunks. So the
    # program is compiled once. It stops after the longest prompt's last chunk.
    num_chunks = -(-self.capacity // _CHUNK)
    tokens = np.zeros((self.batch_size, num_chunks * _CHUNK), np.int32)
    # A row without a prompt reads one token, because logits need a token.
    lengths = np.ones(self.batch_size, np.int32)
    for row, prompt in enumerate(prompts):
      tokens[row, : len(prompt)] = prompt
      lengths[row] = len(prompt)
    return self._prefill(self._params, cache, tokens, lengths)

  def _check_room(
    self, cache: Cache | TokenHistory, prompts: Sequence[Int[np.ndarray, "T"]]
  ) -> None:
    """Raises UserError if a prompt is empty, or its row has no room for it."""
    old_lengths = np.asarray(cache.lengths)
    free_tokens = self._max_lengths(cache) - old_lengths
    for row, prompt in enumerate(prompts):
      if 1 <= len(prompt) <= free_tokens[row]:
        continue
      prefix = ""
      if old_lengths[row] > 0:
        prefix = f" behind {old_lengths[row]} others"
      raise UserError(
        f"a prompt of {len(prompt)} tokens{prefix}: it must have 1 to"
        f" {free_tokens[row]}"
      )

  def _max_lengths(self, cache: Cache | TokenHistory) -> Int[np.ndarray, "B"]:
    """Returns the most tokens that each row can have: its pages, if any."""
    max_lengths = np.full(self.batch_size, self.capacity)
    if isinstance(cache, TokenHistory) or cache.tables is None:
      return max_lengths
    # In unused entries of a table, the number num_pages means "no page".
    is_page = np.asarray(cache.tables) < self._num_pages
    num_pages = np.sum(is_page, axis=1)  # [B]
    return np.minimum(max_lengths, PAGE * num_pages)

  def step(
    self, state: SamplerState, tokens: Int[np.ndarray, "B"]
  ) -> SamplerState:
    """Returns the state after the model has read one more token in every row.

    The old state is donated. No row may grow longer than the capacity.

    Args:
      state: the state after the tokens before.
      tokens: the token id of each row.

    Raises:
      UserError: if there are not B tokens, or one is outside the vocabulary.
    """
    tokens = validated_token_ids(tokens, self._vocab_size, "tokens")
    if len(tokens) != self.batch_size:
      raise UserError(
        f"tokens has {len(tokens)} token ids: it must have"
        f" {self.batch_size}, one for each row"
      )
    return self._step(self._params, state, jnp.asarray(tokens))

  def generate(
    self,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
  ) -> list[Any]:
    """Returns continuations of any number of prompts.

    The options are the same as in `stream`.

    Args:
      prompts: token ids, or texts if the sampler was made from a trained model.
        A text is the beginning of a document. Its continuation ends where the
        model ends the document. One text is the same as a list of one.

    Returns:
      The new tokens of each prompt, or the new texts.

    Raises:
      UserError: as `stream`. The ids of all prompts are checked before any
        prompt is read. Also if prompts are both texts and token ids.
    """
    if isinstance(prompts, str):
      prompts = [prompts]
    prompt_list: list[Any] = list(prompts)
    # For each prompt, whether it is a text.
    is_text = [isinstance(prompt, str) for prompt in prompt_list]
    options = _StreamOptions(
      max_new_tokens=max_new_tokens,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      seed=seed,
      first_row=0,
      stop_ids=stop_ids,
      stop=stop,
    )
    if not any(is_text):
      return self._generate_tokens(prompt_list, options)
    if not all(is_text):
      raise UserError(
        f"prompt {is_text.index(False)} is no text, but others are: pass"
        " texts alone, or token ids alone"
      )
    return self._generate_texts(prompt_list, options)

  def _generate_texts(
    self, prompts: Sequence[str], options: _StreamOptions
  ) -> list[str]:
    """Returns the text that continues each prompt.

    It ends where the model ends the document, if not before.
    """
    tokenizer = self._tokenizer
    if tokenizer is None:
      raise ValueError(
        "prompts are texts: only a sampler made from a trained model has a"
        " tokenizer; give it token ids"
      )
    token_prompts = [tokenizer.encode_prompt(text) for text in prompts]
    # The model ends a document with one of these tokens.
    document_ends = tokenizer.document_tokens.stop
    stop_ids = [*options.stop_ids, *document_ends]
    options = options._replace(stop_ids=stop_ids)
    answers = self._generate_tokens(token_prompts, options)
    texts = []
    for prompt, answer in zip(token_prompts, answers, strict=True):
      texts.append(tokenizer.decode_after(prompt, answer))
    return texts

  def _generate_tokens(
    self, prompts: Sequence[Sequence[int]], options: _StreamOptions
  ) -> list[list[int]]:
    """Returns the new tokens of each prompt, generated in batches of prompts.

    Args:
      prompts: token ids of any number of prompts.
      options: the options of `stream`.
    """
    token_prompts = self._validated(prompts)
    answers: list[list[int]] = []
    first_prompt = 0
    while first_prompt < len(token_prompts):
      end = first_prompt + self.batch_size
      batch = self._fit_to_pages(
        token_prompts[first_prompt:end], options.max_new_tokens
      )
      # Row 0 of this batch is prompt `first_prompt`. The draws of a prompt
      # depend on its number, so that they do not depend on the batch size.
      batch_options = options._replace(first_row=first_prompt)
      answers += self._generate_batch(batch, batch_options)
      first_prompt += len(batch)
    return answers

  def _generate_batch(
    self, prompts: Sequence[Int[np.ndarray, "T"]], options: _StreamOptions
  ) -> list[list[int]]:
    """Returns the new tokens of each of up to B prompts."""
    answers: list[list[int]] = [[] for _ in prompts]
    for new_tokens in self._stream(prompts, options):
      for answer, tokens in zip(answers, new_tokens, strict=True):
        answer += tokens
    return answers

  def _fit_to_pages(
    self, prompts: Sequence[Int[np.ndarray, "T"]], max_new_tokens: int
  ) -> Sequence[Int[np.ndarray, "T"]]:
    """Returns the first prompts that fit together into the cache's pages.

    Without pages, these are all prompts. Returns at least one prompt. If even
    that does not fit, `prefill` will raise an error.

    Args:
      prompts: at most B prompts.
      max_new_tokens: the most tokens that follow each prompt.
    """
    if self._num_pages is None:
      return prompts
    used_pages = 0
    for num_fitting, prompt in enumerate(prompts):
      needed_tokens = self._needed_tokens(prompt, max_new_tokens)
      used_pages += _pages_for(needed_tokens)
      if used_pages > self._num_pages:
        return prompts[: max(1, num_fitting)]
    return prompts

  def stream(
    self,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    first_row: int = 0,
    stop_ids: Sequence[int] = (),
    stop: Callable[[list[int]], bool] | None = None,
  ) -> Iterator[list[list[int]]]:
    """Continues up to B prompts, a few tokens at a time.

    The tokens of a row do not depend on the other rows.

    Args:
      prompts: token ids.
      max_new_tokens: the most tokens to add to each prompt.
      temperature: divides the logits. 0 takes the most likely token.
      top_k: draws among the k most likely tokens. 0 for all.
      top_p: draws among the most likely tokens that together have this
        probability, after temperature and top_k.
      seed: the seed of the draws.
      first_row: the number of the first prompt. The draws of a row depend on
        the seed and the row's number.
      stop_ids: tokens that end a row. They are not part of the result.
      stop: is called after every token with all new tokens of a row. The row
        ends with the token for which it returns True.

    Yields:
      For each prompt, a list of its next tokens, at most 8. It is empty if the
      row has ended.

    Raises:
      UserError: if a prompt and max_new_tokens do not fit the capacity, if all
        rows do not fit the cache's pages, or if an option or a token id is out
        of range.
    """
    options = _StreamOptions(
      max_new_tokens=max_new_tokens,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      seed=seed,
      first_row=first_row,
      stop_ids=stop_ids,
      stop=stop,
    )
    return self._stream(prompts, options)

  def _stream(
    self,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]],
    options: _StreamOptions,
  ) -> Iterator[list[list[int]]]:
    """Yields the next tokens of each prompt, as `stream` does."""
    _check_options(options)
    stop_ids = validated_token_ids(
      options.stop_ids, self._vocab_size, "stop_ids"
    ).tolist()
    prompts = self._validated(prompts)
    max_new_tokens = options.max_new_tokens
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > self.capacity:
      raise UserError(
        f"a prompt of {longest} tokens and {max_new_tokens} new ones are more"
        f" than the {self.capacity} that a row can have"
      )

    state = self.prefill(prompts, max_new_tokens)
    settings = _draw_settings(options, self.batch_size, stop_ids)
    method = _draw_method(options)
    rows = _AnswerRows(len(prompts), self.batch_size, stop_ids, options.stop)
    for num_drawn in range(0, max_new_tokens, _BURST):
      count = min(_BURST, max_new_tokens - num_drawn)
      state, drawn = self._draw(
        self._params,
        state,
        settings,
        rows.has_ended,
        np.int32(count),
        method=method,
      )
      # `drawn` has room for _BURST tokens per row. The first `count` are drawn.
      yield rows.append(np.asarray(drawn)[:, :count])
      if rows.has_ended.all():
        return


class _AnswerRows:
  """The answers to a batch of prompts, which grow until each row ends.

  Attributes:
    has_ended: whether each of the B rows has ended. `append` replaces the array
      and does not change the old one, because JAX may still read it.
  """

  def __init__(
    self,
    num_prompts: int,
    batch_size: int,
    stop_ids: Sequence[int],
    stop: Callable[[list[int]], bool] | None,
  ):
    """Starts an empty answer for each prompt.

    Args:
      num_prompts: the number of rows with a prompt. The others count as ended.
      batch_size: B.
      stop_ids: tokens that end a row.
      stop: returns True if an answer is complete. None if it is never asked.
    """
    self.has_ended: Bool[np.ndarray, "B"] = np.arange(batch_size) >= num_prompts
    self._answers: list[list[int]] = [[] for _ in range(num_prompts)]
    self._stop_ids = stop_ids
    self._stop = stop

  def append(self, drawn: Int[np.ndarray, "B count"]) -> list[list[int]]:
    """Appends drawn tokens to the rows that have not ended.

    Returns:
      For each prompt, the tokens that became part of its answer.
    """
    has_ended = self.has_ended.copy()
    new_tokens: list[list[int]] = []
    for row, answer in enumerate(self._answers):
      if has_ended[row]:
        new_tokens.append([])
        continue
      old_length = len(answer)
      has_ended[row] = _append_until_stop(
        answer, drawn[row].tolist(), self._stop_ids, self._stop
      )
      new_tokens.append(answer[old_length:])
    self.has_ended = has_ended
    return new_tokens


def _append_until_stop(
  answer: list[int],
  drawn_tokens: Sequence[int],
  stop_ids: Sequence[int],
  stop: Callable[[list[int]], bool] | None,
) -> bool:
  """Appends drawn tokens to an answer until it is complete.

  Args:
    answer: the tokens of the answer so far. It is changed.
    drawn_tokens: the tokens that were drawn after them.
    stop_ids: tokens that end the answer. They are not appended.
    stop: returns True if an answer is complete. Is called after each token.

  Returns:
    Whether the answer is complete.
  """
  for token in drawn_tokens:
    if token in stop_ids:
      return True
    answer.append(token)
    if stop is not None and stop(answer):
      return True
  return False


class _StreamOptions(NamedTuple):
  """The arguments of `Sampler.stream`, except the prompts."""

  max_new_tokens: int
  temperature: float
  top_k: int
  top_p: float
  seed: int
  first_row: int
  stop_ids: Sequence[int]
  stop: Callable[[list[int]], bool] | None


def _draw_settings(
  options: _StreamOptions, batch_size: int, stop_ids: Sequence[int]
) -> DrawSettings:
  """Returns the options of a draw as arrays, for the compiled program."""
  # The program needs at least one stop id.
  stop_array = np.asarray(stop_ids or [_NO_TOKEN], np.int32)
  return DrawSettings(
    temperature=np.float32(options.temperature),
    top_k=np.int32(options.top_k),
    top_p=np.float32(options.top_p),
    seed=np.int32(options.seed),
    row_numbers=np.arange(batch_size, dtype=np.int32) + options.first_row,
    stop_ids=stop_array,
  )


def _draw_method(options: _StreamOptions) -> str:
  """Returns the cheapest `method` of `_choose_tokens` for these options."""
  if options.temperature == 0:
    return "greedy"
  if options.top_k == 0 and options.top_p == 1:
    # No token is excluded.
    return "plain"
  return "filtered"


def _pages_for(num_tokens: int) -> int:
  """Returns the number of pages that hold a number of tokens, rounded up."""
  return -(-num_tokens // PAGE)


def _check_options(options: _StreamOptions) -> None:
  """Raises UserError if an option of `Sampler.stream` is out of range."""
  for name in ("top_k", "max_new_tokens", "seed", "first_row"):
    number = getattr(options, name)
    # The compiled program takes int32. A larger number would be truncated.
    if not is_integer(number) or not -(2**31) <= number < 2**31:
      raise UserError(
        f"{name} must be an integer from −2³¹ to 2³¹ − 1; got {number!r}"
      )
  if not 0 <= options.temperature < float("inf"):
    raise UserError(
      f"temperature must be at least 0; got {options.temperature}"
    )
  if options.top_k < 0:
    raise UserError(f"top_k must be at least 0; got {options.top_k}")
  if not 0 < options.top_p <= 1:
    raise UserError(f"top_p must be above 0 and at most 1; got {options.top_p}")
  if options.max_new_tokens < 1:
    raise UserError(
      f"max_new_tokens must be at least 1; got {options.max_new_tokens}"
    )


def _check_sizes(
  config: ModelConfig,
  batch_size: int,
  capacity: int,
  cache_tokens: int | None,
) -> None:
  """Raises UserError if a size of a `Sampler` is out of range."""
  if not 1 <= capacity <= config.max_length:
    raise UserError(
      f"{capacity} tokens a row: the model takes 1 to {config.max_length}"
      " (config.model.max_length)"
    )
  if cache_tokens is not None and cache_tokens < 1:
    raise UserError(
      f"cache_tokens = {cache_tokens}: must be at least 1, or None for room"
      f" for {capacity} in each of {batch_size} rows"
    )


def _check_no_cache_options(cache_tokens: int | None, cache_dtype: Any) -> None:
  """Raises UserError if an option of the cache is set. There is no cache."""
  if cache_tokens is not None or cache_dtype is not None:
    raise UserError(
      f"cache_tokens = {cache_tokens}, cache_dtype = {cache_dtype!r}: must be"
      " None, because the model's attention does not support cached decoding"
    )


def _warn_of_recomputation(config: ModelConfig) -> None:
  """Warns that generation has no cache. Prints once per attention variant."""
  if config.attention in _warned_of:
    return
  _warned_of.add(config.attention)
  say(
    f"{config.attention!r} does not declare that it supports {CACHED_DECODING}:"
    " generation is slow, since every new token computes its whole row again"
  )


class _Programs(NamedTuple):
  """The compiled functions of a sampler.

  Attributes:
    make_cache: `make_cache()` returns an empty cache.
    prefill: `prefill(params, cache, tokens, lengths)`, see `_read_prompts`.
    step: `step(params, state, tokens)`, see `_read_token`.
    draw: `draw(params, state, settings, has_ended, count, method=…)`, see
      `_draw_tokens`.
  """

  make_cache: Callable[[], Any]
  prefill: Callable[..., SamplerState]
  step: Callable[..., SamplerState]
  draw: Callable[..., tuple[SamplerState, Array]]


def _make_programs(
  model: Decoder,
  batch_size: int,
  capacity: int,
  *,
  num_pages: int | None,
  cache_dtype: Any,
  head_sharding: NamedSharding | None,
  has_cache: bool,
) -> _Programs:
  """Returns the jitted functions of a sampler, which compile when first called.

  They update the cache in place, because its old arrays are donated.

  Args:
    model: the decoder.
    batch_size: B, the number of rows.
    capacity: the most tokens of a row.
    num_pages: the number of pages that all rows share. None without pages.
    cache_dtype: the dtype of keys and values. None for the compute dtype.
    head_sharding: how a mesh splits the heads of the cache. None on one device.
    has_cache: False if a `TokenHistory` takes the place of the cache.
  """
  if has_cache:
    chunk = min(_CHUNK, capacity)
  else:
    # Every chunk computes the whole row again.
    chunk = capacity

  def make_cache() -> Cache | TokenHistory:
    if not has_cache:
      return empty_history(model, batch_size, capacity)
    return empty_cache(
      model,
      batch_size,
      # The capacity is rounded up to full pages.
      PAGE * _pages_for(capacity),
      num_pages=num_pages,
      dtype=cache_dtype,
    )

  # `jax.jit` takes the shardings of a result as a tree of the same structure,
  # with a sharding in place of each array or tuple of arrays. A mesh splits the
  # heads of keys and values, and each device holds all of the other arrays. On
  # one device, all shardings are None.
  split_heads: Any = head_sharding
  replicated: Any = None
  if head_sharding is not None:
    replicated = NamedSharding(head_sharding.mesh, P())
  cache_shardings: Cache | TokenHistory
  if has_cache:
    cache_shardings = Cache(
      keys=split_heads,
      values=split_heads,
      tables=replicated,
      lengths=replicated,
    )
  else:
    cache_shardings = TokenHistory(tokens=replicated, lengths=replicated)
  state_shardings = SamplerState(cache_shardings, logits=replicated)

  read_prompts = functools.partial(_read_prompts, model, head_sharding, chunk)
  read_token = functools.partial(_read_token, model, head_sharding)
  draw_tokens = functools.partial(_draw_tokens, model, head_sharding)
  return _Programs(
    make_cache=jax.jit(make_cache, out_shardings=cache_shardings),
    prefill=jax.jit(
      read_prompts, donate_argnames="cache", out_shardings=state_shardings
    ),
    step=jax.jit(
      read_token, donate_argnames="state", out_shardings=state_shardings
    ),
    draw=jax.jit(
      draw_tokens,
      donate_argnames="state",
      static_argnames="method",
      out_shardings=(state_shardings, replicated),
    ),
  )


def _extend(
  model: Decoder,
  params: dict[str, Any],
  tokens: Int[Array, "B T"],
  cache: Cache | TokenHistory,
  counts: Int[Array, "B"] | None,
  head_sharding: NamedSharding | None,
) -> tuple[Float[Array, "B T E"], Cache | TokenHistory]:
  """Runs the decoder over new tokens, with either kind of cache.

  Args:
    model: the decoder.
    params: the result of `unstack` for a key/value cache, or the decoder's own
      parameters for a history.
    tokens: the new tokens.
    cache: the tokens before.
    counts: the number of valid tokens of each row. None for T.
    head_sharding: how a mesh splits the heads of the cache. None on one device.

  Returns:
    The hidden states of the new tokens, and the cache with the new tokens.
  """
  if isinstance(cache, TokenHistory):
    return extend_history(model, params, tokens, cache, counts)
  return extend(model, params, tokens, cache, counts, head_sharding)


class _PromptLoop(NamedTuple):
  """The state of the loop in `_read_prompts`.

  Attributes:
    chunk_index: the index of the next chunk.
    cache: the cache of the tokens read so far.
    last_hidden: the hidden state of the last token that each row has read.
  """

  chunk_index: Int[Array, ""] | int
  cache: Cache | TokenHistory
  last_hidden: Float[Array, "B E"]


def _read_prompts(
  model: Decoder,
  head_sharding: NamedSharding | None,
  chunk: int,
  params: dict[str, Any],
  cache: Cache | TokenHistory,
  tokens: Int[Array, "B P"],
  lengths: Int[Array, "B"],
) -> SamplerState:
  """Returns the state after the model has read prompts, in chunks of tokens.

  All rows read the same number of chunks, until the longest prompt ends.

  Args:
    model: the decoder.
    head_sharding: how a mesh splits the heads of the cache. None on one device.
    chunk: the number of tokens of a chunk.
    params: the parameters, as `_extend` takes them.
    cache: the cache of the tokens before.
    tokens: the prompts, padded to P tokens, a multiple of the chunk.
    lengths: the number of tokens of each prompt.
  """

  def has_chunks_left(loop: _PromptLoop) -> Bool[Array, ""]:
    return loop.chunk_index * chunk < jnp.max(lengths)

  def read_chunk(loop: _PromptLoop) -> _PromptLoop:
    start = loop.chunk_index * chunk
    # How many tokens of each prompt are in this chunk.
    counts = jnp.clip(lengths - start, 0, chunk)
    chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
    hidden, extended_cache = _extend(
      model, params, chunk_tokens, loop.cache, counts, head_sharding
    )  # hidden: [B, chunk, E]

    # The hidden state of each prompt's last token in this chunk. Prompts that
    # ended in an earlier chunk keep their old one.
    last_index = jnp.maximum(counts - 1, 0)
    chunk_hidden = jnp.take_along_axis(
      hidden, last_index[:, None, None], axis=1
    )[:, 0]  # [B, E]
    last_hidden = jnp.where(counts[:, None] > 0, chunk_hidden, loop.last_hidden)
    return _PromptLoop(loop.chunk_index + 1, extended_cache, last_hidden)

  batch_size = tokens.shape[0]
  zeros = jnp.zeros((batch_size, model.config.embed_dim), model.dtype)
  first = _PromptLoop(chunk_index=0, cache=cache, last_hidden=zeros)
  last = jax.lax.while_loop(has_chunks_left, read_chunk, first)
  # `logits` takes [B, T, E], with T = 1 here.
  next_logits = logits(params, last.last_hidden[:, None])[:, 0]  # [B, N]
  return SamplerState(last.cache, next_logits)


def _read_token(
  model: Decoder,
  head_sharding: NamedSharding | None,
  params: dict[str, Any],
  state: SamplerState,
  tokens: Int[Array, "B"],
) -> SamplerState:
  """Returns the state after the model has read one more token in every row.

  Args:
    model: the decoder.
    head_sharding: how a mesh splits the heads of the cache. None on one device.
    params: the parameters, as `_extend` takes them.
    state: the state after the tokens before.
    tokens: the next token of each row.
  """
  hidden, cache = _extend(
    model, params, tokens[:, None], state.cache, None, head_sharding
  )  # hidden: [B, 1, E]
  return SamplerState(cache, logits(params, hidden)[:, 0])


class _DrawLoop(NamedTuple):
  """The state of the loop in `_draw_tokens`.

  Attributes:
    num_drawn: the number of tokens that were drawn in each row.
    state: the state after the model has read these tokens.
    drawn: these tokens, then zeros.
    has_ended: whether each row has ended.
  """

  num_drawn: Int[Array, ""] | int
  state: SamplerState
  drawn: Int[Array, "B burst"]
  has_ended: Bool[Array, "B"]


def _draw_tokens(
  model: Decoder,
  head_sharding: NamedSharding | None,
  params: dict[str, Any],
  state: SamplerState,
  settings: DrawSettings,
  has_ended: Bool[Array, "B"],
  count: Int[Array, ""],
  *,
  method: str,
) -> tuple[SamplerState, Int[Array, "B burst"]]:
  """Draws `count` tokens in every row, and reads each of them.

  Stops earlier if all rows have ended. A row that has ended goes on as long as
  another row does. The caller ignores its tokens.

  Args:
    model: the decoder.
    head_sharding: how a mesh splits the heads of the cache. None on one device.
    params: the parameters, as `_extend` takes them.
    state: the state after the tokens before.
    settings: the options of the draws.
    has_ended: whether each row has ended before.
    count: the number of tokens to draw, at most `_BURST`.
    method: see `_choose_tokens`.

  Returns:
    The new state, and the drawn tokens, followed by zeros.
  """
  # The generator is fixed, because users may make "rbg" JAX's default. With
  # that one, the random numbers of a row would depend on the other rows.
  key = jax.random.key(settings.seed, impl="threefry2x32")
  # Each row has its own key. Below, each position in it gets one, too.
  fold_in_each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  row_keys = fold_in_each(key, settings.row_numbers)

  def has_tokens_left(loop: _DrawLoop) -> Bool[Array, ""]:
    return (loop.num_drawn < count) & ~jnp.all(loop.has_ended)

  def draw_token(loop: _DrawLoop) -> _DrawLoop:
    # The length of a row is the position of its next token.
    keys = jax.vmap(jax.random.fold_in)(row_keys, loop.state.cache.lengths)
    tokens = _choose_tokens(loop.state.logits, keys, settings, method)  # [B]
    state = _read_token(model, head_sharding, params, loop.state, tokens)
    drawn = jax.lax.dynamic_update_slice_in_dim(
      loop.drawn, tokens[:, None], loop.num_drawn, axis=1
    )
    has_ended = loop.has_ended | jnp.isin(tokens, settings.stop_ids)
    return _DrawLoop(loop.num_drawn + 1, state, drawn, has_ended)

  first = _DrawLoop(
    num_drawn=0,
    state=state,
    drawn=jnp.zeros((len(has_ended), _BURST), jnp.int32),
    has_ended=has_ended,
  )
  last = jax.lax.while_loop(has_tokens_left, draw_token, first)
  return last.state, last.drawn


def _choose_tokens(
  logits: Float[Array, "B N"],
  keys: Array,
  settings: DrawSettings,
  method: str,
) -> Int[Array, "B"]:
  """Returns the next token of each row, drawn at random or the most likely one.

  Args:
    logits: the logits of the next tokens.
    keys: a random key for each row [B].
    settings: temperature, top_k and top_p.
    method: "greedy" for the most likely token, "plain" to draw among all
      tokens, "filtered" to draw among the tokens that top_k and top_p leave.
  """
  if method == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / settings.temperature
  if method == "filtered":
    return _draw_filtered(logits, keys, settings)
  draw = jax.vmap(jax.random.categorical)
  return draw(keys, logits).astype(jnp.int32)


def _draw_filtered(
  logits: Float[Array, "B N"], keys: Array, settings: DrawSettings
) -> Int[Array, "B"]:
  """Returns a token for each row, drawn among its most likely tokens.

  First, the top_k most likely tokens are kept (all if top_k is 0). Of these,
  the fewest most likely ones are kept whose probabilities add up to top_p.

  Example: probabilities 0.5, 0.3, 0.2 with top_p = 0.6 → the first two.

  Args:
    logits: the logits of the next tokens, divided by the temperature.
    keys: a random key for each row [B].
    settings: top_k and top_p.
  """
  order = jnp.argsort(-logits, axis=-1)  # token ids, the most likely first
  ranked = jnp.take_along_axis(logits, order, axis=-1)  # logits in that order
  rank = jnp.arange(ranked.shape[-1])
  is_in_top_k = (rank < settings.top_k) | (settings.top_k == 0)
  ranked = jnp.where(is_in_top_k, ranked, -jnp.inf)
  # A token stays if the more likely ones together have a probability below
  # top_p. So the most likely token always stays.
  probabilities = jax.nn.softmax(ranked, axis=-1)
  probability_before = jnp.cumsum(probabilities, axis=-1) - probabilities
  ranked = jnp.where(probability_before < settings.top_p, ranked, -jnp.inf)
  draw = jax.vmap(jax.random.categorical)
  choice = draw(keys, ranked)  # an index into the ranked tokens
  tokens = jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32)
