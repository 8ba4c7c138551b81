"""Text generation with any decoder or encoder-decoder: reads the prompts, then generates token by token."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from brl_jax.attention.core.checks import is_int, require
from brl_jax.fields import Count, Fraction, NonNegative, declared
from brl_jax.sampling import sample
from brl_jax.speculation import Draft, check_draft, speculate

# Prompts are read in pieces of this many tokens, so a long prompt needs no more memory than one piece.
PREFILL = 2048


@declared
def generate(
    model: nn.Module,
    variables: Any,
    prompts: Int[Array, "B P"] | np.ndarray | Sequence[Sequence[int]],
    *,
    max_new_tokens: Count,
    lengths: Int[Array, "B"] | np.ndarray | Sequence[int] | None = None,
    rng: PRNGKeyArray | None = None,
    temperature: NonNegative = 1.0,
    top_k: Count | None = None,
    top_p: Fraction | None = None,
    stop_tokens: Sequence[int] = (),
    source: Int[Array, "B S"] | np.ndarray | None = None,
    source_lengths: Int[Array, "B"] | np.ndarray | None = None,
    draft: Draft | None = None,
) -> Int[Array, "B P+L"]:
    """Continues prompts by sampling from a decoder::

        tokens = generate(model, variables, [[1, 2, 3]], max_new_tokens=20, temperature=0)

    Args:
      model: a decoder, such as `DecoderLM`, with `init_cache(batch, length)`, `logits, cache = model(tokens,
        cache=cache)` and `absorbable(length)`.
      variables: its variables, {"params": ...}.
      prompts: (B, P) ints; shorter ones are padded on the right.
      max_new_tokens: how many tokens to add to each prompt, at least 1.
      lengths: (B,) ints from 1 to P, the prompts' lengths; by default P.
      rng: random key; required unless temperature is 0.
      temperature: divides the logits; 0 always takes the most likely token.
      top_k: samples only among the k most likely tokens.
      top_p: samples only among the most likely tokens whose probabilities together reach this value (0 to 1).
      stop_tokens: a row ends with the first of these that it generates; the call ends when all rows have ended.
      source: (B, S) ints, the input of an encoder-decoder (`EncoderDecoder`), whose encoder runs once.
      source_lengths: (B,) ints from 1 to S, the sources' lengths; by default S.
      draft: a small model that drafts several tokens for each call of this one (`Draft`; speculative decoding). The
        tokens of temperature 0 stay the same up to rounding, and so does the distribution of sampled ones.

    Returns:
      (B, P + max_new_tokens) int32: each row's prompt, its continuation including a stop token, then zeros.

    Raises:
      ValueError: a prompt is empty, a token is outside the vocabulary, a setting is out of range, the variables have no
        parameters, the model is not a decoder, or an encoder-decoder has no source. With a draft, its vocabulary
        differs, or a mechanism of one of the models cannot go back.

    Prompts are read in large pieces up to the end of the shortest one. The rest of longer prompts is then read token by
    token, while shorter rows already generate, so that all rows are at the same position, as every mechanism's cache
    requires. `stream` yields the same tokens as they come.
    """
    asked = (prompts, max_new_tokens, lengths, rng, temperature, top_k, top_p, stop_tokens)
    if draft is not None:
        require(
            source is None and source_lengths is None, "source and source_lengths must be None with a draft"
        )
        return generate_drafted(model, variables, draft, *asked)[0]
    prefix, settings, choice = _prepare(model, variables, *asked)
    run = _Run.start(model, variables, prefix, settings, choice, source, source_lengths)
    return jnp.concatenate([prefix, run.advance(run.state, run.steps).tokens], axis=1)


def generate_drafted(
    model: nn.Module, variables: Any, draft: Draft, *asked: Any, **options: Any
) -> tuple[Int[Array, "B P+L"], Int[Array, ""]]:
    """Returns what `generate` with a draft does, and how many calls of the model it took after the prompts."""
    check_model(draft.model, draft.variables)
    check_draft(model, draft)
    prefix, settings, choice = _prepare(model, variables, *asked, **options)
    tokens, calls = speculate(model, draft, variables, prefix, settings, PREFILL, **choice)
    return jnp.concatenate([prefix, tokens], axis=1), calls


@declared
def stream(
    model: nn.Module,
    variables: Any,
    prompts: Int[Array, "B P"] | np.ndarray | Sequence[Sequence[int]],
    *,
    max_new_tokens: Count,
    every: Count = 1,
    lengths: Int[Array, "B"] | np.ndarray | Sequence[int] | None = None,
    rng: PRNGKeyArray | None = None,
    temperature: NonNegative = 1.0,
    top_k: Count | None = None,
    top_p: Fraction | None = None,
    stop_tokens: Sequence[int] = (),
    source: Int[Array, "B S"] | np.ndarray | None = None,
    source_lengths: Int[Array, "B"] | np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Continues prompts as `generate` does, and yields the new columns as they come::

        for columns in stream(model, variables, prompts, max_new_tokens=20, temperature=0):
            print(columns[:, 0])

    Args:
      every: columns in each piece; the last piece may have fewer. Larger pieces wait for the device less often.
      The others are as for `generate`.

    Yields:
      (B, every) int32: the columns of `generate`'s result after the shortest prompt, until every row has ended. They
      include the rest of longer prompts.

    Raises:
      ValueError: as `generate`, or if `every` is below 1; raised at the call.
    """
    prepared = _prepare(
        model, variables, prompts, max_new_tokens, lengths, rng, temperature, top_k, top_p, stop_tokens
    )
    return _Run.start(model, variables, *prepared, source, source_lengths).pieces(every)


class _State(NamedTuple):
    """What a step changes: columns so far, cache, next logits (B, V), tokens (B, steps), and which rows have ended."""

    index: Any
    cache: Any
    logits: Any
    tokens: Any
    ended: Any


class _Settings(NamedTuple):
    """Settings that stay the same over the steps, as arrays.

    Attributes:
      forced: (B, steps); the first `num_forced` (B,) of each row are the rest of its prompt.
      keys: one random key for each step.
    """

    forced: Any
    num_forced: Any
    max_new_tokens: Any
    keys: Any
    temperature: Any
    stop_tokens: Any


class _Run(NamedTuple):
    """Prompts that have been read up to the end of the shortest, and how to continue them."""

    model: Any
    variables: Any
    steps: int
    state: _State
    settings: _Settings
    choice: dict[str, Any]

    @classmethod
    def start(
        cls,
        model: Any,
        variables: Any,
        prefix: Int[Array, "B P"],
        settings: _Settings,
        choice: dict[str, Any],
        source: Any,
        source_lengths: Any,
    ) -> _Run:
        """Reads the source and the prompts. `prefix`, `settings` and `choice` come from `_prepare`."""
        batch, common = prefix.shape
        steps = settings.forced.shape[1]
        encoded = _read_source(model, variables, source, source_lengths, batch)
        room = {} if encoded is None else {"source_length": encoded.outputs.shape[1]}
        cache = model.init_cache(batch, common + steps, **room)
        logits, cache = read_prompt(model, variables, prefix, cache, encoded)
        state = _State(
            index=jnp.zeros((), jnp.int32),
            cache=cache,
            logits=logits,
            tokens=jnp.zeros((batch, steps), jnp.int32),
            ended=jnp.zeros((batch,), bool),
        )
        return cls(model, variables, steps, state, settings, choice)

    def advance(self, state: _State, until: int) -> _State:
        """Runs until `until` columns are done or all rows have ended; donates the given state."""
        return _advance(self.model, self.variables, state, self.settings, jnp.int32(until), **self.choice)

    def pieces(self, every: int) -> Iterator[np.ndarray]:
        state = self.state
        for start in range(0, self.steps, every):
            state = self.advance(state, min(start + every, self.steps))
            end = int(state.index)
            if end > start:
                yield np.asarray(state.tokens[:, start:end])
            if bool(state.ended.all()):
                return


def _prepare(
    model: Any,
    variables: Any,
    prompts: Any,
    max_new_tokens: Any,
    lengths: Any = None,
    rng: Any = None,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    stop_tokens: Any = (),
) -> tuple[Int[Array, "B P"], _Settings, dict[str, Any]]:
    """Checks the arguments, and returns the prompts up to the end of the shortest, the settings and the choice."""
    check_model(model, variables)
    vocabulary = vocabulary_of(model)
    prompts, lengths = check_rows("prompts", prompts, lengths, vocabulary)
    rng, stops, choice = prepare_sampling(rng, temperature, top_k, top_p, stop_tokens, vocabulary)
    prompts = jnp.asarray(prompts, jnp.int32)
    common = int(lengths.min())
    forced = jnp.pad(prompts[:, common:], ((0, 0), (0, max_new_tokens)))
    settings = _Settings(
        forced=forced,
        num_forced=jnp.asarray(lengths - common, jnp.int32),
        max_new_tokens=jnp.int32(max_new_tokens),
        keys=jax.random.split(rng, forced.shape[1]),
        temperature=jnp.float32(temperature),
        stop_tokens=stops,
    )
    return prompts[:, :common], settings, choice


def check_model(model: Any, variables: Any) -> None:
    """Raises ValueError unless the model is a decoder and the variables hold parameters."""
    require(
        hasattr(model, "init_cache") and hasattr(model, "absorbable") and not isinstance(model, type),
        "model must be a decoder with init_cache and absorbable, such as DecoderLM(config), got "
        + (f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__),
    )
    is_mapping = isinstance(variables, Mapping)
    require(
        is_mapping and bool(jax.tree.leaves(variables.get("params"))),
        "variables must hold the model's parameters, {'params': ...}, got "
        + (f"a mapping with the keys {list(variables)[:5]}" if is_mapping else type(variables).__name__),
    )


def vocabulary_of(model: Any) -> int | None:
    """Returns the number of a model's tokens, if its configuration says so."""
    return getattr(getattr(model, "config", None), "vocab_size", None)


def _read_source(model: Any, variables: Any, source: Any, lengths: Any, batch: int) -> Any:
    """Returns the encoded source of an encoder-decoder, or None for a decoder.

    Raises:
      ValueError: the source is given to a decoder, missing for an encoder-decoder, or has the wrong number of rows.
    """
    if not hasattr(model, "encode"):
        require(
            source is None and lengths is None,
            f"source and source_lengths must be None with {type(model).__name__}, which has no encoder",
        )
        return None
    require(source is not None, f"source must be given with {type(model).__name__}, got None")
    source, lengths = check_rows("source", source, lengths, vocabulary_of(model))
    require(len(source) == batch, f"source must have the prompts' {batch} rows, got {len(source)}")
    return _encode(model, variables, jnp.asarray(source, jnp.int32), jnp.asarray(lengths, jnp.int32))


def check_rows(
    name: str, rows: Any, lengths: Any, vocabulary: int | None
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, "B"]]:
    """Returns rows of tokens ("prompts" or "source") and their lengths as arrays, after checking them."""
    of = "lengths" if name == "prompts" else f"{name}_lengths"
    require(
        not any(isinstance(x, jax.core.Tracer) for x in (rows, lengths)),
        f"{name} and {of} must be known: generate compiles its own programs, so call it outside jax.jit",
    )
    try:
        rows = np.asarray(rows)
    except ValueError as error:  # rows of different lengths
        raise ValueError(
            f"{name} must have rows of equal length; pad shorter ones on the right and give {of}"
        ) from error
    require(
        rows.ndim == 2 and rows.size > 0 and np.issubdtype(rows.dtype, np.integer),
        f"{name} must be integers of shape (batch, length), not empty, got {rows.dtype} {rows.shape}",
    )
    batch, width = rows.shape
    lengths = np.full((batch,), width) if lengths is None else np.asarray(lengths)
    require(
        lengths.shape == (batch,)
        and np.issubdtype(lengths.dtype, np.integer)
        and bool((lengths >= 1).all() and (lengths <= width).all()),
        f"{of} must be {batch} integers from 1 to {width}, got {lengths.tolist()}",
    )
    if vocabulary is not None:
        inside = np.arange(width)[None] < lengths[:, None]
        wrong = rows[inside & ((rows < 0) | (rows >= vocabulary))]
        require(
            wrong.size == 0, f"{name} must hold tokens from 0 to {vocabulary - 1}, got {wrong[:5].tolist()}"
        )
    return rows, lengths


def prepare_sampling(
    rng: Any, temperature: float, top_k: Any, top_p: Any, stop_tokens: Any, vocabulary: int | None
) -> tuple[Any, Int[Array, " S"], dict[str, Any]]:
    """Returns the random key, the stop tokens and the choice of a token (greedy, top_k and top_p).

    Raises:
      ValueError: tokens are sampled without a random key, or a stop token is outside the vocabulary.
    """
    require(temperature == 0 or rng is not None, "rng is needed to sample; give a key or temperature=0")
    stops = list(stop_tokens)
    require(
        all(is_int(t) and t >= 0 and (vocabulary is None or t < vocabulary) for t in stops),
        f"stop_tokens must be tokens of the vocabulary ({vocabulary}), got {stop_tokens!r}",
    )
    # The logits over a temperature near 0 would overflow float32.
    choice = {"greedy": temperature < 1e-6, "top_k": top_k, "top_p": top_p}
    return jax.random.key(0) if rng is None else rng, jnp.asarray([int(t) for t in stops], jnp.int32), choice


def read_prompt(
    model: Any,
    variables: Any,
    prompt: Int[Array, "B P"] | np.ndarray,
    cache: Any,
    encoded: Any = None,
    *,
    in_powers: bool = False,
) -> tuple[Array, Any]:
    """Returns the logits (B, V) of the token after a prompt, and the cache that has read it; donates the given one.

    Args:
      encoded: an encoder's outputs, if the decoder reads them.
      in_powers: read pieces whose lengths are powers of two. Prompts of all lengths then share a few programs, and
        mechanisms need not handle padding.
    """
    length, start = prompt.shape[1], model.absorbable(prompt.shape[1])
    for first in range(0, start, PREFILL):
        cache = _absorb(model, variables, prompt[:, first : min(first + PREFILL, start)], cache)
    while start < length:
        size = min(PREFILL, length - start)
        size = 1 << size.bit_length() - 1 if in_powers else size
        logits, cache = _prefill(model, variables, prompt[:, start : start + size], cache, encoded)
        encoded = None  # the cache keeps what the decoder needs
        start += size
    return logits, cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _absorb(model, variables, tokens, cache):
    """Returns the cache after tokens (B, T) whose outputs are not needed; donates the given one. See `absorb` there."""
    return model.apply(variables, tokens, cache, method="absorb")


@functools.partial(jax.jit, static_argnums=0)
def _encode(model, variables, source, lengths):
    return model.apply(variables, source, lengths, method="encode")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill(model, variables, tokens, cache, encoded):
    """Returns the logits (B, V) after tokens (B, T), and the cache that has read them; donates the given one."""
    reads = {} if encoded is None else {"encoded": encoded}
    hidden, cache = model.apply(variables, tokens, cache=cache, method="hidden", **reads)
    return model.apply(variables, hidden[:, -1:], method="logits")[:, 0], cache


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("greedy", "top_k", "top_p"), donate_argnames="state"
)
def _advance(model, variables, state, settings, until, *, greedy, top_k, top_p):
    """Runs until `until` columns are done (traced, so that one program works for pieces of any size)."""

    def goes_on(state):
        return (state.index < until) & ~state.ended.all()

    def step(state):
        index = state.index
        if greedy:
            sampled = jnp.argmax(state.logits, axis=-1).astype(jnp.int32)
        else:
            key = jax.lax.dynamic_index_in_dim(settings.keys, index, keepdims=False)
            sampled = sample(key, state.logits / settings.temperature, top_k=top_k, top_p=top_p)
        given = jax.lax.dynamic_index_in_dim(settings.forced, index, axis=1, keepdims=False)
        is_given = index < settings.num_forced
        token = jnp.where(state.ended, 0, jnp.where(is_given, given, sampled))
        logits, cache = model.apply(variables, token[:, None], cache=state.cache)
        stops = ~is_given & (token[:, None] == settings.stop_tokens[None]).any(axis=1)
        full = index + 1 >= settings.num_forced + settings.max_new_tokens
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], index, axis=1)
        return _State(index + 1, cache, logits[:, 0], tokens, state.ended | stops | full)

    return jax.lax.while_loop(goes_on, step, state)
