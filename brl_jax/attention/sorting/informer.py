"""ProbSparse attention: the queries that differ most from uniform attention attend (Informer, Zhou et al. 2020)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from brl_jax.attention.core.arguments import (
    check_dtypes,
    check_lengths,
    check_scale,
    check_sizes,
    zero_padding,
)
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.scores import softmax_weights
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.recurrent.arguments import check_state

# Queries that attend at a time: their scores for all keys are the largest array in memory.
_QUERY_BLOCK = 128
# Tokens whose measures are ranked at a time.
_RANKED = 128
_LOWEST = -1e30
# A number n has ceil(ln n) of these below it.
_POWERS_OF_E = [math.floor(math.e**k) for k in range(21)]


class InformerState(NamedTuple):
    """What causal selection keeps of the queries so far, for each query head.

    Attributes:
      measures: the largest measures so far; -1e30 for those that are missing.
      attending: how many queries have attended.
    """

    measures: Float[Array, "B N U"]
    attending: Int[Array, "B N"]


def log_ceiling(n: Any) -> Any:
    """ceil(ln n), at least 1, of an int or of an array of ints at least 1."""
    # Counted, because a logarithm in float32 may be rounded to another integer.
    if isinstance(n, int):
        return max(1, sum(n > power for power in _POWERS_OF_E))
    above = n[..., None] > jnp.asarray(_POWERS_OF_E, jnp.int32).reshape((1,) * n.ndim + (-1,))
    return jnp.maximum(above.sum(-1, dtype=jnp.int32), 1)


def budget(n: Any, factor: int) -> Any:
    """How many of n keys a query samples, and how many of n queries attend: factor ceil(ln n), and n at most."""
    most = factor * log_ceiling(n)
    return min(n, most) if isinstance(n, int) else jnp.minimum(n, most)


def capacity(n: Any, factor: int) -> Any:
    """How many of the first n queries may attend in causal attention."""
    return 2 * budget(n, factor) * log_ceiling(n)


def init_informer_state(batch: int, length: int, num_heads: int, factor: int = 5) -> InformerState:
    """The state of causal selection before the first of up to `length` tokens.

    Raises:
      ValueError: a size below 1.
    """
    check_sizes(batch=batch, length=length, num_heads=num_heads, factor=factor)
    measures = jnp.full((batch, num_heads, budget(length, factor)), _LOWEST, jnp.float32)
    return InformerState(measures, jnp.zeros((batch, num_heads), jnp.int32))


@attention_function
def informer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    rng: PRNGKeyArray,
    factor: int = 5,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention for a few queries, and the mean of the values for the others, in O(T log T) time.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = informer_attention(query, key, value, rng=jax.random.key(0), is_causal=True)

    Informer (Zhou et al. 2020, arXiv:2012.07436), section 3.1 and algorithm 1. Each query samples
    u = factor ceil(ln n) of the n keys; its measure is the largest of its scores with them minus their mean, and the
    u queries with the largest measures attend to all keys. (The authors' code divides the sum of the sampled scores by
    n, not by their number.) Measures choose queries, and have no gradient. `reference.informer_attention` is the
    plain form.

    Causal: the authors' code masks the scores of the chosen queries and gives the others the cumulative sum of the
    values, but it samples keys and ranks queries over the whole sequence, so that later tokens decide which queries
    attend. Here nothing of a later token enters: query i samples among the keys up to its own, and attends if its
    measure is among the u largest of the first n = i + 1 queries, which is what that rule gives the last query of a
    prefix. Some u (1 + ln(n / u)) of the first n queries are expected to attend, where measures have no trend; no more
    than 2 u ceil(ln n) may, the first ones. O(T log^2 T) time, memory linear in T.

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or float16; K
        divides N.
      rng: the random key of the samples. Samples depend on it and on the query's position alone.
      factor: c in the paper.
      scale: the scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding, which may contain anything and is
        neither sampled nor ranked. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the query, computed in float32.

    Raises:
      ValueError: shapes, dtypes, sizes or an implementation that do not fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    check_implementation(implementation, None, "xla")
    check_sizes(factor=factor)
    require(
        query.shape[1] == key.shape[1],
        f"key must have query's length {query.shape[1]}, as both are the same tokens here, got {key.shape[1]}",
    )
    scale = check_scale(scale, query.shape[3])
    batch, length, heads, _ = query.shape
    given = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, length)
    dtype = query.dtype
    query, key, value = (zero_padding(x, given).astype(jnp.float32) for x in (query, key, value))
    lengths = jnp.full((batch,), length, jnp.int32) if given is None else given
    places = jnp.arange(length, dtype=jnp.int32)
    exists = places[None] < lengths[:, None]
    seen = jnp.where(exists, lengths[:, None], 1)
    if is_causal:
        seen = jnp.broadcast_to(places[None] + 1, exists.shape)
    measures = _measures(query, key, rng, places, seen, factor, budget(length, factor))
    measures = jnp.where(exists[:, None], measures, _LOWEST)
    if is_causal:
        state = init_informer_state(batch, length, heads, factor)
        attends, _ = _rank(measures, exists, places, state, factor)
        most = min(length, capacity(length, factor))
        chosen = -lax.top_k(-jnp.where(attends, places[None, None], length), most)[0]
        rest = lax.cumsum(value, axis=1)
    else:
        chosen = lax.top_k(measures, budget(length, factor))[1]
        within = jnp.arange(chosen.shape[2], dtype=jnp.int32)[None] < budget(lengths, factor)[:, None]
        chosen = jnp.where(within[:, None], chosen, length)
        number = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None, None, None]
        rest = jnp.broadcast_to(value.sum(1, keepdims=True) / number, value.shape)
    ends = jnp.minimum(chosen + 1, length)
    if not is_causal:
        ends = jnp.broadcast_to(lengths[:, None, None], chosen.shape)
    attended = _attend(query, key, value, chosen, ends, scale)
    out = _place(jnp.repeat(rest, heads // key.shape[2], axis=2), attended, chosen)
    return zero_padding(out, given).astype(dtype)


@attention_function
def informer_step(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    value_sum: Float[Array, "B K V"],
    state: InformerState,
    *,
    start: Int[Array, ""] | int,
    count: Any = None,
    rng: PRNGKeyArray,
    factor: int = 5,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B K V"], InformerState]:
    """Causal `informer_attention` of T new tokens after `start` earlier ones.

    (B, T, N, H), (B, S, K, H), (B, S, K, V), (B, K, V) -> (B, T, N, V) and the new state::

        state = init_informer_state(batch, length, num_heads)
        out, value_sum, state = informer_step(
            query, key, value, value_sum, state, start=0, rng=jax.random.key(0)
        )

    Args:
      query: of the new tokens.
      key, value: of all tokens, with room for later ones: those at start .. start + T are of the new tokens.
      value_sum: the sum of the values of the earlier tokens, in float32.
      state: from `init_informer_state` for S tokens, or from an earlier call.
      start: the number of earlier tokens.
      count: how many of the new tokens exist, the first ones; None for all. The outputs of the others are undefined.
      rng, factor, scale: as there.

    Returns:
      (B, T, N, V) in the dtype of the query, the new sum of the values, and the new state.

    Raises:
      ValueError: a state for other sizes or another factor.
    """
    length, heads = query.shape[1:3]
    batch, room = key.shape[:2]
    fresh = functools.partial(init_informer_state, batch, room, heads, factor)
    check_state(state, jax.eval_shape(fresh), "init_informer_state")
    scale = check_scale(scale, query.shape[3])
    count = length if count is None else count
    dtype = query.dtype
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    numbers = jnp.arange(length, dtype=jnp.int32)
    places = numbers + start
    exists = jnp.broadcast_to((numbers < count)[None], query.shape[:2])
    most = budget(key.shape[1], factor)
    measures = _measures(query, key, rng, places, places[None] + 1, factor, most)
    measures = jnp.where(exists[:, None], measures, _LOWEST)
    attends, state = _rank(measures, exists, places, state, factor)
    size = min(length, capacity(key.shape[1], factor))
    chosen = -lax.top_k(-jnp.where(attends, numbers[None, None], length), size)[0]
    attended = _attend(query, key, value, chosen, chosen + 1 + start, scale)
    new = jnp.take(value, jnp.minimum(places, value.shape[1] - 1), axis=1)
    new = jnp.where(exists[..., None, None], new, 0.0)
    sums = value_sum[:, None] + lax.associative_scan(jnp.add, new, axis=1)
    out = _place(jnp.repeat(sums, heads // key.shape[2], axis=2), attended, chosen)
    return out.astype(dtype), sums[:, -1], state


def sampled_fractions(
    rng: PRNGKeyArray, positions: Int[Array, " T"], number: Int[Array, ""] | int
) -> Float[Array, " T"]:
    """Where in the keys that it sees the query at each position takes its sample `number`: fractions in [0, 1)."""

    def draw(position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(rng, position), number))

    return jax.vmap(draw)(positions)


def _measures(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    rng: PRNGKeyArray,
    positions: Int[Array, " T"],
    seen: Int[Array, "#B T"],
    factor: int,
    most: int,
) -> Float[Array, "B N T"]:
    """The largest score of each query with the keys that it samples out of the first `seen`, minus their mean."""
    batch, length, heads, head_dim = query.shape
    query, key = lax.stop_gradient((query, key))
    rows = query.reshape(batch, length, key.shape[2], -1, head_dim)
    key = jnp.swapaxes(key, 1, 2)  # heads before tokens, as `KeyValueCache` keeps them
    numbers = budget(seen, factor)

    def sample(sums: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
        fractions = sampled_fractions(rng, positions, number)
        place = jnp.floor(fractions[None] * seen.astype(jnp.float32)).astype(jnp.int32)
        place = jnp.broadcast_to(jnp.minimum(place, seen - 1), (batch, length))
        sampled = jnp.take_along_axis(key, place[:, None, :, None], axis=2)
        scores = jnp.einsum("btkgh,bkth->bkgt", rows, sampled).reshape(batch, heads, length)
        counts = (number < numbers)[:, None]
        largest, total = sums
        return (
            jnp.maximum(largest, jnp.where(counts, scores, _LOWEST)),
            total + jnp.where(counts, scores, 0.0),
        ), None

    shape = (batch, heads, length)
    start = (jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32))
    start = vary_like(start, (query, key))
    (largest, total), _ = lax.scan(sample, start, jnp.arange(most, dtype=jnp.int32))
    return largest - total / numbers[:, None].astype(jnp.float32)


def _rank(
    measures: Float[Array, "B N T"],
    exists: Bool[Array, "B T"],
    positions: Int[Array, " T"],
    state: InformerState,
    factor: int,
) -> tuple[Bool[Array, "B N T"], InformerState]:
    """Whether each query attends, by the measures of the queries up to its own, and the state after them."""
    batch, heads, length = measures.shape
    size = min(length, _RANKED)
    chunks = -(-length // size)
    room = chunks * size - length

    def cut(x: Array, fill: Any) -> Array:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, room)], constant_values=fill)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], chunks, size), -2, 0)

    earlier = jnp.tri(size, k=-1, dtype=bool)[None, None]

    def step(state: InformerState, chunk: Any) -> tuple[InformerState, Array]:
        own, exists, positions = chunk
        above = _count(state.measures[:, :, None] >= own[..., None])
        above = above + _count(earlier & (own[:, :, None] >= own[..., None]))
        ranks = (above < budget(positions + 1, factor)[None, None]) & exists[:, None]
        before = state.attending[..., None] + _count(earlier & ranks[:, :, None])
        attends = ranks & (before < capacity(positions + 1, factor)[None, None])
        largest = lax.top_k(jnp.concatenate([state.measures, own], -1), state.measures.shape[2])[0]
        return InformerState(largest, state.attending + _count(attends)), attends

    pieces = (cut(measures, _LOWEST), cut(exists, False), cut(positions, 0))
    state, attends = lax.scan(step, vary_like(state, measures), pieces)
    return jnp.moveaxis(attends, 0, 2).reshape(batch, heads, -1)[..., :length], state


def _count(x: Bool[Array, "*rows S"]) -> Int[Array, "*rows"]:
    return x.sum(-1, dtype=jnp.int32)


def _attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    chosen: Int[Array, "B N U"],
    ends: Int[Array, "B N U"],
    scale: float,
) -> Float[Array, "B U N V"]:
    """Softmax attention of the chosen queries to the keys before `ends`, some queries at a time."""
    batch, heads, number = chosen.shape
    places = jnp.minimum(chosen, query.shape[1] - 1)
    rows = jnp.take_along_axis(jnp.moveaxis(query, 2, 1), places[..., None], axis=2)
    indices = jnp.arange(key.shape[1], dtype=jnp.int32)
    # Heads before tokens, as `KeyValueCache` keeps them: then no product needs a copy of the past.
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)

    def attend(piece: tuple[Array, Array]) -> Array:
        rows, ends = (x.reshape(batch, key.shape[1], -1, *x.shape[3:]) for x in piece)
        scores = jnp.einsum("bkrh,bksh->bkrs", rows, key) * scale
        weights = softmax_weights(scores, indices[None, None, None] < ends[..., None])
        return jnp.einsum("bkrs,bksv->bkrv", weights, value).reshape(batch, heads, -1, value.shape[3])

    if number <= _QUERY_BLOCK:
        return jnp.moveaxis(attend((rows, ends)), 1, 2)
    blocks = -(-number // _QUERY_BLOCK)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, blocks * _QUERY_BLOCK - number)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(batch, heads, blocks, _QUERY_BLOCK, *x.shape[3:]), 2, 0)

    out = lax.map(jax.checkpoint(attend), (cut(rows), cut(ends)))
    return jnp.moveaxis(out, 0, 2).reshape(batch, heads, -1, value.shape[3])[:, :, :number].swapaxes(1, 2)


def _place(
    rest: Float[Array, "B T N V"], attended: Float[Array, "B U N V"], chosen: Int[Array, "B N U"]
) -> Float[Array, "B T N V"]:
    """The rest with what the chosen queries attended to in their places; a place beyond the end is none."""
    rows = jnp.arange(rest.shape[0])[:, None, None]
    heads = jnp.arange(rest.shape[2])[None, None]
    return rest.at[rows, chosen.swapaxes(1, 2), heads].set(attended, mode="drop")
