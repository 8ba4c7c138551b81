"""Continuous batching: requests of any length share a batch of slots, and a new request takes over a finished slot."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from brl_jax.attention.core.checks import is_int, require
from brl_jax.decoding import check_model, check_rows, prepare_sampling, read_prompt, vocabulary_of
from brl_jax.fields import Count, Fraction, NonNegative, declared
from brl_jax.sampling import sample


class Request(NamedTuple):
    """A prompt to continue.

    Attributes:
      prompt: its tokens, at least one.
      max_tokens: the maximum number of tokens to add, at least 1.
      id: anything by which the caller identifies the request.
    """

    prompt: Sequence[int] | Int[np.ndarray, " P"]
    max_tokens: int
    id: Any = None


class Completion(NamedTuple):
    """The result of a request.

    Attributes:
      request: the request.
      tokens: (L,) int32, the new tokens; the last one may be a stop token.
      finish_reason: "stop" if a stop token ended it, "length" if it reached its `max_tokens`.
    """

    request: Request
    tokens: Int[np.ndarray, " L"]
    finish_reason: Literal["stop", "length"]


@declared
def generate_requests(
    model: nn.Module,
    variables: Any,
    requests: Iterable[Request],
    *,
    slots: Count = 8,
    length: Count | None = None,
    rng: PRNGKeyArray | None = None,
    temperature: NonNegative = 1.0,
    top_k: Count | None = None,
    top_p: Fraction | None = None,
    stop_tokens: Sequence[int] = (),
    numbers: Iterable[int] | None = None,
    every: Count = 32,
) -> Iterator[Completion]:
    """Continues requests of any length in a batch of fixed shape (continuous batching), and yields each as it ends::

        requests = [Request([1, 2, 3], max_tokens=20), Request([4], max_tokens=5)]
        for request, tokens, _ in generate_requests(
            model, variables, requests, temperature=0
        ):
            print(request.prompt, tokens)

    Each slot of the batch decodes a request at its own position. When one ends, the next prompt is read into its slot,
    and the other slots keep their state.

    Args:
      model, variables, temperature, top_k, top_p, stop_tokens: as for `generate`; a decoder without an encoder.
      requests: with `length`, they are read as slots become free.
      slots: number of requests that decode at the same time.
      length: capacity of a slot in tokens, for a prompt and its continuation. None reads all requests first and uses
        the longest.
      rng: random key; required unless temperature is 0.
      numbers: one for each request, which determines its random key; 0, 1, ... in their order by default.
      every: maximum number of steps in one call of the compiled program, which returns early when a request ends.

    Yields:
      A `Completion` for each request.

    Raises:
      ValueError: as `generate`, or if `slots`, `length` or `every` is below 1, or a request does not fit. Errors in a
        request are raised when it is read, all others at the call.

    A request gets the same tokens as alone, up to the rounding of a batch: its random key depends on its number, not on
    its slot. If a setting of the mechanism follows the cache's length (MLR's `context` and cosFormer's `max_length`, if
    None), this means alone in a cache of the same length; training a language model fixes both.

    Every row computes both branches of a `lax.cond`. TLinFormer's misses, BSBR's retrieval and BRL's compressed tokens
    therefore cost time at every token here, but only once per window, chunk or block in `generate`, whose rows are all
    at the same position.
    """
    check_model(model, variables)
    require(
        not hasattr(model, "encode"),
        f"model must be a decoder without an encoder, got {type(model).__name__}",
    )
    require(
        isinstance(requests, Iterable) and not isinstance(requests, Request),
        f"requests must be Requests in a list or iterator, got {requests!r}",
    )
    vocabulary = vocabulary_of(model)
    rng, stops, choice = prepare_sampling(rng, temperature, top_k, top_p, stop_tokens, vocabulary)
    numbered: Iterator[tuple[int, Request]] = (
        enumerate(requests) if numbers is None else _paired(numbers, requests)
    )
    if length is None:
        known = [(number, _checked(number, request, vocabulary)) for number, request in numbered]
        length = max((len(request.prompt) + request.max_tokens for _, request in known), default=1)
        numbered = iter(known)
    settings = (jnp.float32(temperature), stops)
    return _Batch(model, variables, int(length), vocabulary, rng, settings, choice).run(
        numbered, int(slots), int(every)
    )


class _Slots(NamedTuple):
    """The state that a step changes; the first axis of every array is the slots.

    Attributes:
      cache: one decoding cache of a single row for each slot.
      logits: (B, V), for the next token.
      keys: (B,), the requests' random keys.
      tokens: (B, L), the new tokens.
      count, most: (B,), how many new tokens there are, and how many are allowed.
      active: (B,), whether the slot has an unfinished request.
      stopped: (B,), whether its last token is a stop token.
    """

    cache: Any
    logits: Any
    keys: Any
    tokens: Any
    count: Any
    most: Any
    active: Any
    stopped: Any


class _Batch(NamedTuple):
    """Arguments that all requests share."""

    model: Any
    variables: Any
    length: int
    vocabulary: int | None
    rng: Any
    settings: tuple[Array, Array]
    choice: dict[str, Any]

    def run(self, numbered: Iterator[tuple[int, Request]], slots: int, every: int) -> Iterator[Completion]:
        """Yields the completions in the order in which they end."""
        state = None
        owners: list[Request | None] = [None] * slots
        while True:
            for slot in (i for i, owner in enumerate(owners) if owner is None):
                following = next(numbered, None)
                if following is None:
                    break
                number, request = following
                request = _checked(number, request, self.vocabulary, self.length)
                prompt = np.asarray(request.prompt, np.int32)[None]
                cache = self.model.init_cache(1, self.length)
                logits, cache = read_prompt(self.model, self.variables, prompt, cache, in_powers=True)
                if state is None:
                    state = self._empty(slots, logits, cache)
                key = jax.random.fold_in(self.rng, number)
                state = _insert(state, jnp.int32(slot), cache, logits, key, jnp.int32(request.max_tokens))
                owners[slot] = request
            if state is None or all(owner is None for owner in owners):
                return
            state = _advance(
                self.model, self.variables, state, self.settings, jnp.int32(every), **self.choice
            )
            active, stopped, count = jax.device_get((state.active, state.stopped, state.count))
            for slot, owner in enumerate(owners):
                if owner is not None and not active[slot]:
                    tokens = np.asarray(state.tokens[slot])[: count[slot]]
                    owners[slot] = None
                    yield Completion(owner, tokens, "stop" if stopped[slot] else "length")

    def _empty(self, slots: int, logits: Array, cache: Any) -> _Slots:
        """Returns empty slots for caches and logits like these of one row."""
        keys = jnp.broadcast_to(self.rng, (slots, *self.rng.shape))
        return _Slots(
            cache=jax.tree.map(lambda a: jnp.zeros((slots, *a.shape), a.dtype), cache),
            logits=jnp.zeros((slots, logits.shape[1]), logits.dtype),
            keys=keys,
            tokens=jnp.zeros((slots, self.length), jnp.int32),
            count=jnp.zeros((slots,), jnp.int32),
            most=jnp.zeros((slots,), jnp.int32),
            active=jnp.zeros((slots,), bool),
            stopped=jnp.zeros((slots,), bool),
        )


def _paired(numbers: Iterable[int], requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
    missing: Any = object()
    for number, request in itertools.zip_longest(numbers, requests, fillvalue=missing):
        require(
            number is not missing and request is not missing,
            "numbers must be one for each request, got more or fewer",
        )
        yield number, request


def _checked(number: int, request: Any, vocabulary: int | None, length: int | None = None) -> Request:
    """Returns the request if its prompt and length are valid; errors name its number."""
    require(
        isinstance(request, Request), f"requests[{number}] must be a Request, got {type(request).__name__}"
    )
    prompt = np.asarray(request.prompt)
    require(
        prompt.ndim == 1 and prompt.size > 0,
        f"requests[{number}].prompt must be integers of shape (length,), not empty, got shape {prompt.shape}",
    )
    check_rows(f"requests[{number}].prompt", prompt[None], None, vocabulary)
    most = request.max_tokens
    require(
        is_int(most) and most >= 1,
        f"requests[{number}].max_tokens must be an integer of at least 1, got {most!r}",
    )
    total = len(prompt) + most
    require(
        length is None or total <= length,
        f"requests[{number}] must fit into length={length} tokens, got a prompt of {len(prompt)} and {most} more",
    )
    return request


@functools.partial(jax.jit, donate_argnums=0)
def _insert(state: _Slots, slot, cache, logits, key, most) -> _Slots:
    """Puts a new request into one of the slots."""

    def put(array, own):
        return jax.lax.dynamic_update_index_in_dim(array, own.astype(array.dtype), slot, 0)

    return state._replace(
        cache=jax.tree.map(put, state.cache, cache),
        logits=put(state.logits, logits[0]),
        keys=state.keys.at[slot].set(key),
        count=state.count.at[slot].set(0),
        most=state.most.at[slot].set(most),
        active=state.active.at[slot].set(True),
        stopped=state.stopped.at[slot].set(False),
    )


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("greedy", "top_k", "top_p"), donate_argnames="state"
)
def _advance(model, variables, state: _Slots, settings, most, *, greedy, top_k, top_p) -> _Slots:
    """Runs `most` steps, or fewer if a request ends."""
    temperature, stop_tokens = settings
    before = state.active

    def goes_on(loop):
        steps, state = loop
        return (steps < most) & (state.active == before).all()

    def one(token, cache):
        logits, cache = model.apply(variables, token[None, None], cache=cache)
        return logits[0, 0], cache

    def draw(key, count, logits):
        key = jax.random.fold_in(key, count)
        return sample(key, logits[None] / temperature, top_k=top_k, top_p=top_p)[0]

    def step(loop):
        steps, state = loop
        if greedy:
            sampled = jnp.argmax(state.logits, axis=-1).astype(jnp.int32)
        else:
            sampled = jax.vmap(draw)(state.keys, state.count, state.logits)
        token = jnp.where(state.active, sampled, 0)
        logits, cache = jax.vmap(one)(token, state.cache)
        places = jnp.where(state.active, state.count, state.tokens.shape[1])
        tokens = state.tokens.at[jnp.arange(len(token)), places].set(token, mode="drop")
        count = state.count + state.active.astype(jnp.int32)
        stops = state.active & (token[:, None] == stop_tokens[None]).any(axis=1)
        active = state.active & ~stops & (count < state.most)
        stopped = jnp.where(state.active, stops, state.stopped)
        state = state._replace(
            cache=cache, logits=logits, tokens=tokens, count=count, active=active, stopped=stopped
        )
        return steps + 1, state

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), state))[1]
