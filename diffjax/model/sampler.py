"""Generation: prompts are read into a cache in chunks; then tokens are drawn one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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

# Tokens of a prompt read at once.
_CHUNK = 128
# Tokens drawn between two transfers to the host: few enough for a live terminal, enough that the device never waits.
_BURST = 8


@flax.struct.dataclass
class SamplerState:
  """The cache of the rows read so far, and the logits of each row's next token."""

  cache: Cache
  logits: Float[Array, "B N"]


class Sampler:
  """Draws continuations. It compiles once for a batch size and a capacity, whatever the lengths of prompts and answers.

  It runs where the parameters are: on one device, or on the mesh that they are split over, each device with its own heads of the cache.
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
    """Prepares the parameters (unstacked, matrices in the compute dtype: a second copy of them).

    Args:
      model: the decoder; or a trained model as `diffjax.load` returns it, which has `model`, `params` and `tokenizer`.
      params: the decoder's parameters; None with a trained model.
      batch_size: B, rows at a time.
      capacity: tokens that a row can have, prompt and continuation together; the model's max_length by default.
      cache_tokens: tokens that all rows can have together, in pages of 128: a row takes the pages that its prompt and continuation need, so
        that rows of unequal length share the memory. By default every row has room for `capacity` tokens, and without pages if cache_dtype
        is None.
      cache_dtype: "int8" keeps keys and values in 8 bits, with a scale a page and head; None in the compute dtype.

    Raises:
      UserError: if the capacity is beyond the model's max_length, or the cache cannot be as asked.
    """
    self._tokenizer = None
    if params is None:
      model, params, self._tokenizer = (
        model.model,
        model.params,
        model.tokenizer,
      )
    self.capacity = model.config.max_length if capacity is None else capacity
    self.batch_size = batch_size
    self._vocab_size = model.config.vocab_size
    if not 1 <= self.capacity <= model.config.max_length:
      raise UserError(
        f"{self.capacity} tokens a row: the model takes 1 to {model.config.max_length} (config.model.max_length)"
      )
    if cache_tokens is not None and cache_tokens < 1:
      raise UserError(
        f"cache_tokens = {cache_tokens}: must be at least 1, or None for room for {self.capacity} in each of {batch_size} rows"
      )
    chunk, per_row = min(_CHUNK, self.capacity), -(-self.capacity // PAGE)
    self._num_pages = None
    if cache_tokens is not None or cache_dtype is not None:
      self._num_pages = (
        batch_size * per_row
        if cache_tokens is None
        else -(-cache_tokens // PAGE)
      )
    self._params = jax.jit(functools.partial(unstack, model))(params)
    heads = heads_sharding(params)
    whole = None if heads is None else NamedSharding(heads.mesh, P())
    at: Any = SamplerState(Cache(heads, heads, whole, whole), whole)  # type: ignore[arg-type]
    make = functools.partial(
      empty_cache,
      model,
      batch_size,
      PAGE * per_row,
      num_pages=self._num_pages,
      dtype=cache_dtype,
    )
    self._make_cache = jax.jit(make, out_shardings=at.cache)
    self._prefill = jax.jit(
      functools.partial(_prefill, model, heads, chunk),
      donate_argnums=1,
      out_shardings=at,
    )
    self._step = jax.jit(
      functools.partial(_step, model, heads), donate_argnums=1, out_shardings=at
    )
    draw = functools.partial(_draw, model, heads)
    self._draw = jax.jit(
      draw,
      donate_argnums=1,
      static_argnames="method",
      out_shardings=(at, whole, whole),
    )

  def prefill(
    self,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]],
    max_new_tokens: int | None = None,
  ) -> SamplerState:
    """Reads up to B prompts, each of 1 to `capacity` tokens. Rows without a prompt hold nothing meaningful.

    Args:
      prompts: token ids.
      max_new_tokens: most tokens that will follow each, for which a cache in pages keeps room; None for what the capacity allows.

    Raises:
      UserError: if a prompt is empty or longer than the capacity, or has an id
        outside the vocabulary; or the cache has too few pages.
    """
    checked = self._validated(prompts)
    cache = self._make_cache()
    if self._num_pages is not None:
      needed = [self._needed(prompt, max_new_tokens) for prompt in checked]
      tables = allocate(
        needed + [0] * (self.batch_size - len(needed)),
        self._num_pages,
        cache.tables.shape[1],
      )
      cache = cache.replace(tables=jnp.asarray(tables))
    return self._read(cache, checked)

  def _needed(
    self, prompt: Int[np.ndarray, "T"], max_new_tokens: int | None
  ) -> int:
    """Tokens that a row must have room for."""
    return (
      self.capacity
      if max_new_tokens is None
      else min(self.capacity, len(prompt) + max_new_tokens)
    )

  def read(
    self, state: SamplerState, more: Sequence[Sequence[int]]
  ) -> SamplerState:
    """Reads further tokens, at least 1, in up to B rows. The old state stays valid, so that many prompts can share a prefix read once.

    Raises:
      UserError: if a row gets no token or one outside the vocabulary, or grows
        longer than the capacity.
    """
    checked = self._validated(more)
    return self._read(jax.tree.map(jnp.copy, state.cache), checked)

  def _validated(
    self, prompts: Sequence[Sequence[int] | Int[np.ndarray, "T"]]
  ) -> list[Int[np.ndarray, "T"]]:
    """Returns prompts as arrays whose ids are in the vocabulary."""
    return [
      validated_token_ids(prompt, self._vocab_size, f"prompt {number}")
      for number, prompt in enumerate(prompts)
    ]

  def _read(
    self, cache: Cache, prompts: Sequence[Int[np.ndarray, "T"]]
  ) -> SamplerState:
    if len(prompts) > self.batch_size:
      raise ValueError(
        f"{len(prompts)} prompts for a batch of {self.batch_size}"
      )
    chunks, before, room = (
      -(-self.capacity // _CHUNK),
      np.asarray(cache.lengths),
      np.full(self.batch_size, self.capacity),
    )
    if cache.tables is not None:
      room = np.minimum(
        room, PAGE * np.sum(np.asarray(cache.tables) < self._num_pages, axis=1)
      )
    tokens, lengths = (
      np.zeros((self.batch_size, chunks * _CHUNK), np.int32),
      np.ones(self.batch_size, np.int32),
    )
    for row, prompt in enumerate(prompts):
      if not 1 <= len(prompt) <= room[row] - before[row]:
        behind = f" behind {before[row]} others" if before[row] else ""
        raise UserError(
          f"a prompt of {len(prompt)} tokens{behind}: it must have 1 to {room[row] - before[row]}"
        )
      tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return self._prefill(self._params, cache, tokens, lengths)

  def step(
    self, state: SamplerState, tokens: Int[np.ndarray, "B"]
  ) -> SamplerState:
    """Reads one more token in every row. The old state is donated. No row may grow longer than the capacity.

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
    """Continues any number of prompts; the options are those of `stream`.

    Args:
      prompts: token ids; or texts, if the sampler was made from a trained model. A text is the beginning of a document, and its
        continuation ends where the model ends the document. One text counts as a list of one.

    Returns:
      The new tokens of each prompt, or the new text.

    Raises:
      UserError: as `stream`, for ids of all prompts before the first is read;
        and if prompts are texts and token ids together.
    """
    prompts = [prompts] if isinstance(prompts, str) else [*prompts]
    are_texts = [isinstance(prompt, str) for prompt in prompts]
    if any(are_texts):
      if not all(are_texts):
        raise UserError(
          f"prompt {are_texts.index(False)} is no text, but others are: pass"
          " texts alone, or token ids alone"
        )
      if (tokenizer := self._tokenizer) is None:
        raise ValueError(
          "prompts are texts: only a sampler made from a trained model has a tokenizer; give it token ids"
        )
      token_prompts = [tokenizer.encode_prompt(text) for text in prompts]
      answers = self.generate(
        token_prompts,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=[*stop_ids, *tokenizer.document_tokens.stop],
        stop=stop,
      )
      texts = []
      for prompt, answer in zip(token_prompts, answers, strict=True):
        texts.append(tokenizer.decode_after(prompt, answer))
      return texts
    checked = self._validated(prompts)  # type: ignore[arg-type]
    out: list[list[int]] = [[] for _ in checked]
    options: Any = dict(
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      stop_ids=stop_ids,
      stop=stop,
    )
    for first, batch in self._batches(checked, max_new_tokens):
      for new in self.stream(
        batch, max_new_tokens, seed=seed, first_row=first, **options
      ):  # type: ignore[arg-type]
        for row, tokens in enumerate(new):
          out[first + row] += tokens
    return out

  def _batches(
    self, prompts: Sequence[Any], max_new_tokens: int
  ) -> Iterator[tuple[int, Sequence[Any]]]:
    """As many prompts at once as there are rows, and pages; and the number of the first one."""
    first = 0
    while first < len(prompts):
      batch = prompts[first : first + self.batch_size]
      if self._num_pages is not None:
        pages = np.cumsum(
          [-(-self._needed(prompt, max_new_tokens) // PAGE) for prompt in batch]
        )
        batch = batch[: max(1, int(np.sum(pages <= self._num_pages)))]
      yield first, batch
      first += len(batch)

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
    """Continues up to B prompts, a few tokens at a time. Row i draws the same tokens whatever stands in the rows beside it.

    Args:
      prompts: token ids.
      max_new_tokens: most tokens to add to each.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: draw among the k likeliest tokens; 0 for all.
      top_p: draw among the likeliest tokens that together have this probability, by the logits after temperature and top_k.
      seed: of the draws.
      first_row: number of the first prompt, for the draws.
      stop_ids: tokens that end a row; not part of the result.
      stop: called after every token with all new tokens of a row; a row ends with the token for which it returns True.

    Yields:
      The next tokens of each row, none for rows that have ended.

    Raises:
      UserError: if a prompt and max_new_tokens do not fit the capacity, or all together the cache's pages; or an option is out of range, or a
        token id.
    """
    _check_options(temperature, top_k, top_p, max_new_tokens, seed, first_row)
    stop_ids = validated_token_ids(
      stop_ids, self._vocab_size, "stop_ids"
    ).tolist()
    prompts = self._validated(prompts)
    longest = max(map(len, prompts))
    if longest + max_new_tokens > self.capacity:
      raise UserError(
        f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the {self.capacity} that a row can have"
      )
    method = (
      "greedy"
      if temperature == 0
      else "plain"
      if top_k == 0 and top_p == 1
      else "filtered"
    )
    settings = (
      np.float32(temperature or 1),
      np.int32(top_k),
      np.float32(top_p),
    )
    rows = np.arange(self.batch_size, dtype=np.int32) + first_row
    stopping = np.asarray(stop_ids if len(stop_ids) else [-1], np.int32)
    state, so_far = (
      self.prefill(prompts, max_new_tokens),
      [list[int]() for _ in prompts],
    )
    ended = np.arange(self.batch_size) >= len(prompts)
    for begun in range(0, max_new_tokens, _BURST):
      count = min(_BURST, max_new_tokens - begun)
      state, drawn, _ = self._draw(
        self._params,
        state,
        np.int32(seed),
        rows,
        settings,
        stopping,
        ended,
        np.int32(count),
        method=method,
      )
      drawn, ended, new = (
        np.asarray(drawn),
        ended.copy(),
        [list[int]() for _ in prompts],
      )
      for row, tokens in enumerate(new):
        for token in drawn[row, :count].tolist():
          if ended[row] or token in stop_ids:
            ended[row] = True
            break
          tokens.append(token)
          so_far[row].append(token)
          ended[row] = stop is not None and stop(so_far[row])
      yield new
      if ended.all():
        return


def _check_options(
  temperature: float,
  top_k: int,
  top_p: float,
  max_new_tokens: int,
  seed: int,
  first_row: int,
) -> None:
  integers = dict(
    top_k=top_k, max_new_tokens=max_new_tokens, seed=seed, first_row=first_row
  )
  for name, number in integers.items():
    # The compiled program takes int32, and would cut off the rest.
    if not is_integer(number) or not -(2**31) <= number < 2**31:
      raise UserError(
        f"{name} must be an integer from −2³¹ to 2³¹ − 1; got {number!r}"
      )
  for name, value, ok, want in (
    ("temperature", temperature, 0 <= temperature < float("inf"), "at least 0"),
    ("top_k", top_k, top_k >= 0, "at least 0"),
    ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
    ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
  ):
    if not ok:
      raise UserError(f"{name} must be {want}; got {value}")


def _prefill(
  model: Decoder,
  heads: NamedSharding | None,
  chunk: int,
  params,
  cache: Cache,
  tokens: Int[Array, "B P"],
  lengths: Int[Array, "B"],
) -> SamplerState:
  """Reads prompts chunk by chunk, as many as the longest prompt has. Each row keeps its last hidden state, from the chunk that holds it."""

  def read(carry):
    index, cache, last = carry
    counts = jnp.clip(lengths - index * chunk, 0, chunk)
    hidden, cache = extend(
      model,
      params,
      jax.lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1),
      cache,
      counts,
      heads,
    )
    own = jnp.take_along_axis(
      hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1
    )[:, 0]
    return index + 1, cache, jnp.where(counts[:, None] > 0, own, last)

  start = (
    0,
    cache,
    jnp.zeros((tokens.shape[0], model.config.embed_dim), model.dtype),
  )
  _, cache, last = jax.lax.while_loop(
    lambda carry: carry[0] * chunk < jnp.max(lengths), read, start
  )
  return SamplerState(cache, logits(params, last[:, None])[:, 0])


def _step(
  model: Decoder,
  heads: NamedSharding | None,
  params,
  state: SamplerState,
  tokens: Int[Array, "B"],
) -> SamplerState:
  hidden, cache = extend(
    model, params, tokens[:, None], state.cache, sharding=heads
  )
  return SamplerState(cache, logits(params, hidden)[:, 0])


def _draw(
  model: Decoder,
  heads: NamedSharding | None,
  params,
  state: SamplerState,
  seed,
  rows,
  settings,
  stop_ids,
  ended: Bool[Array, "B"],
  count,
  *,
  method: str,
) -> tuple[SamplerState, Int[Array, "B burst"], Bool[Array, "B"]]:
  """Draws and reads `count` tokens, at most _BURST, or until all rows have ended."""
  # With the generator "rbg", which users may make JAX's default, the numbers of a
  # row would depend on the rows beside it.
  key = jax.random.key(seed, impl="threefry2x32")
  keys = jax.vmap(functools.partial(jax.random.fold_in, key))(rows)

  def one(carry):
    index, state, drawn, ended = carry
    token = _choose(
      state.logits,
      jax.vmap(jax.random.fold_in)(keys, state.cache.lengths),
      settings,
      method,
    )
    drawn = jax.lax.dynamic_update_slice_in_dim(
      drawn, token[:, None], index, axis=1
    )
    return (
      index + 1,
      _step(model, heads, params, state, token),
      drawn,
      ended | jnp.isin(token, stop_ids),
    )

  start = (0, state, jnp.zeros((len(rows), _BURST), jnp.int32), ended)
  _, state, drawn, ended = jax.lax.while_loop(
    lambda carry: (carry[0] < count) & ~jnp.all(carry[3]), one, start
  )
  return state, drawn, ended


def _choose(
  logits: Float[Array, "B N"],
  keys: Array,
  settings: tuple[Array, Array, Array],
  method: str,
) -> Int[Array, "B"]:
  """One token a row: the likeliest ("greedy"), one drawn among all ("plain") or among those that top_k and top_p leave ("filtered")."""
  if method == "greedy":
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  temperature, top_k, top_p = settings
  logits = logits / temperature
  if method == "filtered":
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    ranked = jnp.where(
      (jnp.arange(ranked.shape[-1]) < top_k) | (top_k == 0), ranked, -jnp.inf
    )
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = (
      jnp.cumsum(probabilities, axis=-1) - probabilities
    )  # 0 for the likeliest, which always stays
    choice = jax.vmap(jax.random.categorical)(
      keys, jnp.where(before < top_p, ranked, -jnp.inf)
    )
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(
      jnp.int32
    )
  return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
