"""Generation.

Prompts are read into a cache in chunks. Then tokens are drawn one at a time.
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

from diffjax.config import UserError
from diffjax.model.cache import Cache, empty_cache, extend, unstack
from diffjax.model.decoder import Decoder, logits
from diffjax.model.pages import PAGE, allocate
from diffjax.model.token_ids import is_integer, validated_token_ids
from diffjax.parallel.rules import heads_sharding

# Tokens of a prompt that are read at once.
_CHUNK = 128
# Tokens that are drawn between two transfers to the host. Few tokens keep a
# terminal live, many keep the device from waiting.
_BURST = 8
# Fills the stop ids of a program that has none. It is no token.
_NO_TOKEN = -1


@flax.struct.dataclass
class SamplerState:
  """The cache of the tokens read so far, and the logits of the next ones."""

  cache: Cache
  logits: Float[Array, "B N"]


class DrawSettings(NamedTuple):
  """The options of a draw, as the compiled program takes them."""

  temperature: Any  # float32
  top_k: Any  # int32; 0 for all tokens
  top_p: Any  # float32


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

    Args:
      model: the decoder, or a trained model from `diffjax.load`, which has
        `model`, `params` and `tokenizer`.
      params: the decoder's parameters. None with a trained model.
      batch_size: B, the number of rows that are decoded together.
      capacity: the most tokens of a row, prompt and continuation together. None
        for the model's max_length.
      cache_tokens: the most tokens of all rows together, in pages of 128. A row
        takes the pages that its prompt and continuation need, so rows of
        unequal length share the memory. None for `capacity` tokens in each row,
        without pages unless cache_dtype is given.
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
    max_length = model.config.max_length
    if capacity is None:
      capacity = max_length
    if not 1 <= capacity <= max_length:
      raise UserError(
        f"{capacity} tokens a row: the model takes 1 to {max_length}"
        " (config.model.max_length)"
      )
    if cache_tokens is not None and cache_tokens < 1:
      raise UserError(
        f"cache_tokens = {cache_tokens}: must be at least 1, or None for room"
        f" for {capacity} in each of {batch_size} rows"
      )
    self.capacity = capacity
    self.batch_size = batch_size
    self._vocab_size = model.config.vocab_size

    pages_per_row = _num_pages(capacity)
    self._num_pages: int | None = None
    if cache_tokens is not None:
      self._num_pages = _num_pages(cache_tokens)
    elif cache_dtype is not None:
      self._num_pages = batch_size * pages_per_row

    self._params = jax.jit(functools.partial(unstack, model))(params)
    self._compile(model, heads_sharding(params), pages_per_row, cache_dtype)

  def _compile(
    self,
    model: Decoder,
    heads: NamedSharding | None,
    pages_per_row: int,
    cache_dtype: Any,
  ) -> None:
    """Makes the compiled functions.

    Args:
      model: the decoder.
      heads: how a mesh splits the heads of the cache. None on one device.
      pages_per_row: the most pages of a row.
      cache_dtype: as in the constructor.
    """
    replicated = None
    if heads is not None:
      replicated = NamedSharding(heads.mesh, P())
    cache_shardings = Cache(heads, heads, replicated, replicated)  # type: ignore[arg-type]
    state_shardings: Any = SamplerState(cache_shardings, replicated)  # type: ignore[arg-type]
    make_cache = functools.partial(
      empty_cache,
      model,
      self.batch_size,
      PAGE * pages_per_row,
      num_pages=self._num_pages,
      dtype=cache_dtype,
    )
    chunk = min(_CHUNK, self.capacity)
    self._make_cache = jax.jit(make_cache, out_shardings=cache_shardings)
    self._prefill = jax.jit(
      functools.partial(_prefill, model, heads, chunk),
      donate_argnums=1,
      out_shardings=state_shardings,
    )
    self._step = jax.jit(
      functools.partial(_step, model, heads),
      donate_argnums=1,
      out_shardings=state_shardings,
    )
    self._draw = jax.jit(
      functools.partial(_draw, model, heads),
      donate_argnums=1,
      static_argnames="method",
      out_shardings=(state_shardings, replicated, replicated),
    )

  def prefill(
    self,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]],
    max_new_tokens: int | None = None,
  ) -> SamplerState:
    """Reads up to B prompts. Rows without a prompt hold nothing meaningful.

    Args:
      prompts: token ids, 1 to `capacity` of each prompt.
      max_new_tokens: the most tokens that will follow each prompt. A cache in
        pages keeps room for them. None for all that the capacity allows.

    Raises:
      UserError: if a prompt is empty or longer than the capacity, or has an id
        outside the vocabulary; or the cache has too few pages.
    """
    token_prompts = self._validated(prompts)
    cache = self._make_cache()
    if self._num_pages is not None:
      needed = [0] * self.batch_size
      for row, prompt in enumerate(token_prompts):
        needed[row] = self._needed_tokens(prompt, max_new_tokens)
      pages_per_row = cache.tables.shape[1]
      tables = allocate(needed, self._num_pages, pages_per_row)
      cache = cache.replace(tables=jnp.asarray(tables))
    return self._read(cache, token_prompts)

  def _needed_tokens(
    self, prompt: Int[np.ndarray, "T"], max_new_tokens: int | None
  ) -> int:
    """Returns the number of tokens that a row must have room for."""
    if max_new_tokens is None:
      return self.capacity
    return min(self.capacity, len(prompt) + max_new_tokens)

  def read(
    self, state: SamplerState, more: Sequence[Sequence[int]]
  ) -> SamplerState:
    """Reads more tokens, at least 1, in up to B rows.

    The old state stays valid. So several prompts can share a prefix that is
    read once.

    Raises:
      UserError: if a row gets no token or one outside the vocabulary, or grows
        longer than the capacity.
    """
    token_rows = self._validated(more)
    return self._read(jax.tree.map(jnp.copy, state.cache), token_rows)

  def _validated(
    self, prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]]
  ) -> list[Int[np.ndarray, "T"]]:
    """Returns prompts as arrays whose ids are in the vocabulary."""
    validated = []
    for number, prompt in enumerate(prompts):
      name = f"prompt {number}"
      validated.append(validated_token_ids(prompt, self._vocab_size, name))
    return validated

  def _read(
    self, cache: Cache, prompts: Sequence[Int[np.ndarray, "T"]]
  ) -> SamplerState:
    """Reads tokens after the ones in the cache."""
    if len(prompts) > self.batch_size:
      raise ValueError(
        f"{len(prompts)} prompts for a batch of {self.batch_size}"
      )
    old_lengths = np.asarray(cache.lengths)
    room = np.full(self.batch_size, self.capacity)
    if cache.tables is not None:
      is_page = np.asarray(cache.tables) < self._num_pages
      room = np.minimum(room, PAGE * np.sum(is_page, axis=1))

    # The longest prompt, in chunks, has a fixed length, so that the program is
    # compiled once.
    num_chunks = -(-self.capacity // _CHUNK)
    tokens = np.zeros((self.batch_size, num_chunks * _CHUNK), np.int32)
    lengths = np.ones(self.batch_size, np.int32)
    for row, prompt in enumerate(prompts):
      max_tokens = room[row] - old_lengths[row]
      if not 1 <= len(prompt) <= max_tokens:
        prefix = ""
        if old_lengths[row] > 0:
          prefix = f" behind {old_lengths[row]} others"
        raise UserError(
          f"a prompt of {len(prompt)} tokens{prefix}: it must have 1 to"
          f" {max_tokens}"
        )
      tokens[row, : len(prompt)] = prompt
      lengths[row] = len(prompt)
    return self._prefill(self._params, cache, tokens, lengths)

  def step(
    self, state: SamplerState, tokens: Int[np.ndarray, "B"]
  ) -> SamplerState:
    """Reads one more token in every row.

    The old state is donated. No row may grow longer than the capacity.

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
    are_texts = [isinstance(prompt, str) for prompt in prompt_list]
    options = _StreamOptions(
      max_new_tokens, temperature, top_k, top_p, seed, stop_ids, stop
    )
    if not any(are_texts):
      return self._generate_tokens(prompt_list, options)
    if not all(are_texts):
      raise UserError(
        f"prompt {are_texts.index(False)} is no text, but others are: pass"
        " texts alone, or token ids alone"
      )
    return self._generate_texts(prompt_list, options)

  def _generate_texts(
    self, prompts: Sequence[str], options: _StreamOptions
  ) -> list[str]:
    tokenizer = self._tokenizer
    if tokenizer is None:
      raise ValueError(
        "prompts are texts: only a sampler made from a trained model has a"
        " tokenizer; give it token ids"
      )
    token_prompts = [tokenizer.encode_prompt(text) for text in prompts]
    document_ends = tokenizer.document_tokens.stop
    options = options._replace(stop_ids=[*options.stop_ids, *document_ends])
    answers = self._generate_tokens(token_prompts, options)
    texts = []
    for prompt, answer in zip(token_prompts, answers, strict=True):
      texts.append(tokenizer.decode_after(prompt, answer))
    return texts

  def _generate_tokens(
    self, prompts: Sequence[Sequence[int]], options: _StreamOptions
  ) -> list[list[int]]:
    token_prompts = self._validated(prompts)
    answers: list[list[int]] = [[] for _ in token_prompts]
    for first, batch in self._batches(token_prompts, options.max_new_tokens):
      for new_tokens in self.stream(
        batch, first_row=first, **options._asdict()
      ):
        for row, tokens in enumerate(new_tokens):
          answers[first + row] += tokens
    return answers

  def _batches(
    self, prompts: Sequence[Any], max_new_tokens: int
  ) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yields the prompts in batches, as many as fit the rows and the pages.

    Yields:
      The number of a batch's first prompt, and its prompts.
    """
    first = 0
    while first < len(prompts):
      batch = prompts[first : first + self.batch_size]
      if self._num_pages is not None:
        batch = self._fit_to_pages(batch, max_new_tokens, self._num_pages)
      yield first, batch
      first += len(batch)

  def _fit_to_pages(
    self, prompts: Sequence[Any], max_new_tokens: int, num_pages: int
  ) -> Sequence[Any]:
    """Returns the first prompts whose rows fit the pages, at least one."""
    used = 0
    for count, prompt in enumerate(prompts):
      used += _num_pages(self._needed_tokens(prompt, max_new_tokens))
      if used > num_pages:
        return prompts[: max(1, count)]
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
      first_row: the number of the first prompt. The draws depend on it.
      stop_ids: tokens that end a row. They are not part of the result.
      stop: is called after every token with all new tokens of a row. The row
        ends with the token for which it returns True.

    Yields:
      The next tokens of each row. None for rows that have ended.

    Raises:
      UserError: if a prompt and max_new_tokens do not fit the capacity, if all
        rows do not fit the cache's pages, or if an option or a token id is out
        of range.
    """
    _check_options(temperature, top_k, top_p, max_new_tokens, seed, first_row)
    stop_ids = validated_token_ids(
      stop_ids, self._vocab_size, "stop_ids"
    ).tolist()
    prompts = self._validated(prompts)
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > self.capacity:
      raise UserError(
        f"a prompt of {longest} tokens and {max_new_tokens} new ones are more"
        f" than the {self.capacity} that a row can have"
      )
    if temperature == 0:
      method = "greedy"
      temperature = 1
    elif top_k == 0 and top_p == 1:
      method = "plain"
    else:
      method = "filtered"
    settings = DrawSettings(
      np.float32(temperature), np.int32(top_k), np.float32(top_p)
    )
    row_numbers = np.arange(self.batch_size, dtype=np.int32) + first_row
    stop_array = np.asarray(stop_ids or [_NO_TOKEN], np.int32)

    state = self.prefill(prompts, max_new_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    has_ended = np.arange(self.batch_size) >= len(prompts)
    for start in range(0, max_new_tokens, _BURST):
      count = min(_BURST, max_new_tokens - start)
      state, drawn, _ = self._draw(
        self._params,
        state,
        np.int32(seed),
        row_numbers,
        settings,
        stop_array,
        has_ended,
        np.int32(count),
        method=method,
      )
      drawn = np.asarray(drawn)  # [B, burst]
      has_ended = has_ended.copy()
      new_tokens: list[list[int]] = [[] for _ in prompts]
      for row, answer in enumerate(answers):
        for token in drawn[row, :count].tolist():
          if has_ended[row] or token in stop_ids:
            has_ended[row] = True
            break
          new_tokens[row].append(token)
          answer.append(token)
          has_ended[row] = stop is not None and stop(answer)
      yield new_tokens
      if has_ended.all():
        return


class _StreamOptions(NamedTuple):
  """The options that `generate` passes on to `stream`."""

  max_new_tokens: int
  temperature: float
  top_k: int
  top_p: float
  seed: int
  stop_ids: Sequence[int]
  stop: Callable[[list[int]], bool] | None


def _num_pages(num_tokens: int) -> int:
  """Returns the number of pages that hold a number of tokens."""
  return -(-num_tokens // PAGE)


def _check_options(
  temperature: float,
  top_k: int,
  top_p: float,
  max_new_tokens: int,
  seed: int,
  first_row: int,
) -> None:
  """Raises UserError if an option of `Sampler.stream` is out of range."""
  integers = {
    "top_k": top_k,
    "max_new_tokens": max_new_tokens,
    "seed": seed,
    "first_row": first_row,
  }
  for name, number in integers.items():
    # The compiled program takes int32, and would cut off the rest.
    if not is_integer(number) or not -(2**31) <= number < 2**31:
      raise UserError(
        f"{name} must be an integer from −2³¹ to 2³¹ − 1; got {number!r}"
      )
  if not 0 <= temperature < float("inf"):
    raise UserError(f"temperature must be at least 0; got {temperature}")
  if top_k < 0:
    raise UserError(f"top_k must be at least 0; got {top_k}")
  if not 0 < top_p <= 1:
    raise UserError(f"top_p must be above 0 and at most 1; got {top_p}")
  if max_new_tokens < 1:
    raise UserError(f"max_new_tokens must be at least 1; got {max_new_tokens}")


def _prefill(
  model: Decoder,
  heads: NamedSharding | None,
  chunk: int,
  params,
  cache: Cache,
  tokens: Int[Array, "B P"],
  lengths: Int[Array, "B"],
) -> SamplerState:
  """Reads prompts chunk by chunk, until the longest prompt ends.

  Args:
    model: the decoder.
    heads: how a mesh splits the heads of the cache. None on one device.
    chunk: the number of tokens of a chunk.
    params: the parameters from `unstack`.
    cache: the cache of the tokens before.
    tokens: the prompts, padded to P, a multiple of the chunk.
    lengths: the number of tokens of each prompt.
  """
  batch = tokens.shape[0]

  def has_chunks_left(carry):
    index, _, _ = carry
    return index * chunk < jnp.max(lengths)

  def read_chunk(carry):
    index, cache, last_hidden = carry
    start = index * chunk
    counts = jnp.clip(lengths - start, 0, chunk)
    chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, start, chunk, axis=1)
    hidden, cache = extend(model, params, chunk_tokens, cache, counts, heads)
    # Each row keeps the hidden state of its last token, from the chunk that
    # holds it.
    last_index = jnp.maximum(counts - 1, 0)
    chunk_hidden = jnp.take_along_axis(
      hidden, last_index[:, None, None], axis=1
    )[:, 0]  # [B, E]
    last_hidden = jnp.where(counts[:, None] > 0, chunk_hidden, last_hidden)
    return index + 1, cache, last_hidden

  zeros = jnp.zeros((batch, model.config.embed_dim), model.dtype)
  _, cache, last_hidden = jax.lax.while_loop(
    has_chunks_left, read_chunk, (0, cache, zeros)
  )
  return SamplerState(cache, logits(params, last_hidden[:, None])[:, 0])


def _step(
  model: Decoder,
  heads: NamedSharding | None,
  params,
  state: SamplerState,
  tokens: Int[Array, "B"],
) -> SamplerState:
  """Reads one token in every row."""
  hidden, cache = extend(
    model, params, tokens[:, None], state.cache, sharding=heads
  )
  return SamplerState(cache, logits(params, hidden)[:, 0])


class _DrawLoop(NamedTuple):
  """The state of the loop in `_draw`."""

  num_drawn: Int[Array, ""] | int
  state: SamplerState
  drawn: Int[Array, "B burst"]
  has_ended: Bool[Array, "B"]


def _draw(
  model: Decoder,
  heads: NamedSharding | None,
  params,
  state: SamplerState,
  seed: Int[Array, ""],
  row_numbers: Int[Array, "B"],
  settings: DrawSettings,
  stop_ids: Int[Array, "num_stop_ids"],
  has_ended: Bool[Array, "B"],
  count: Int[Array, ""],
  *,
  method: str,
) -> tuple[SamplerState, Int[Array, "B burst"], Bool[Array, "B"]]:
  """Draws and reads `count` tokens in every row, or until all rows have ended.

  Args:
    model: the decoder.
    heads: how a mesh splits the heads of the cache. None on one device.
    params: the parameters from `unstack`.
    state: the tokens read so far.
    seed: the seed of the draws.
    row_numbers: the number of each row. Its draws depend on it.
    settings: temperature, top_k and top_p.
    stop_ids: tokens that end a row.
    has_ended: whether each row has ended before.
    count: the number of tokens to draw, at most `_BURST`.
    method: see `_choose_tokens`.

  Returns:
    The new state, the drawn tokens, and whether each row has ended.
  """
  # With the generator "rbg", which users may make JAX's default, the numbers of
  # a row would depend on the other rows.
  key = jax.random.key(seed, impl="threefry2x32")
  row_keys = jax.vmap(functools.partial(jax.random.fold_in, key))(row_numbers)

  def has_tokens_left(loop):
    return (loop.num_drawn < count) & ~jnp.all(loop.has_ended)

  def draw_token(loop):
    # The cache's length is the position of the token that is drawn.
    keys = jax.vmap(jax.random.fold_in)(row_keys, loop.state.cache.lengths)
    tokens = _choose_tokens(loop.state.logits, keys, settings, method)
    drawn = jax.lax.dynamic_update_slice_in_dim(
      loop.drawn, tokens[:, None], loop.num_drawn, axis=1
    )
    next_state = _step(model, heads, params, loop.state, tokens)
    has_ended = loop.has_ended | jnp.isin(tokens, stop_ids)
    return _DrawLoop(loop.num_drawn + 1, next_state, drawn, has_ended)

  drawn = jnp.zeros((len(row_numbers), _BURST), jnp.int32)
  loop = jax.lax.while_loop(
    has_tokens_left, draw_token, _DrawLoop(0, state, drawn, has_ended)
  )
  return loop.state, loop.drawn, loop.has_ended


def _choose_tokens(
  logits: Float[Array, "B N"],
  keys: Array,
  settings: DrawSettings,
  method: str,
) -> Int[Array, "B"]:
  """Returns the next token of each row.

  Args:
    logits: the logits of the next tokens.
    keys: a key for each row [B].
    settings: temperature, top_k and top_p.
    method: "greedy" for the most likely token, "plain" to draw among all tokens,
      "filtered" to draw among the tokens that top_k
      and top_p leave.
  """
  if method == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / settings.temperature
  draw = jax.vmap(jax.random.categorical)
  if method == "plain":
    return draw(keys, logits).astype(jnp.int32)

  order = jnp.argsort(-logits, axis=-1)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  rank = jnp.arange(ranked.shape[-1])
  is_in_top_k = (rank < settings.top_k) | (settings.top_k == 0)
  ranked = jnp.where(is_in_top_k, ranked, -jnp.inf)
  # A token stays if the more likely ones have a probability below top_p. The
  # most likely token always stays.
  probabilities = jax.nn.softmax(ranked, axis=-1)
  probability_before = jnp.cumsum(probabilities, axis=-1) - probabilities
  ranked = jnp.where(probability_before < settings.top_p, ranked, -jnp.inf)
  choice = draw(keys, ranked)  # an index into the ranked tokens
  tokens = jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32)
