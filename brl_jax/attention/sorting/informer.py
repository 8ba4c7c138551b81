"""Informer: the queries that differ most from uniform attention attend (ProbSparse, Zhou et al. 2020)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from brl_jax.attention.core.by_platform import recomputed
from brl_jax.attention.core.checks import require, zero_padding
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.on_mesh import whole_rows
from brl_jax.attention.core.query_blocks import in_blocks
from brl_jax.attention.core.same_tokens import prepare_same_tokens
from brl_jax.attention.core.scores import softmax_weights
from brl_jax.attention.core.state import KeyValueCache, check_state
from brl_jax.attention.core.varying import vary_like
from brl_jax.fields import Count, declared

# Queries that attend at a time: their scores against all keys are the largest array in memory.
_QUERY_BLOCK = 128
# Tokens whose measures are ranked at a time.
_RANKED = 128
_LOWEST = -1e30
# ceil(ln n) of these are below n.
_POWERS_OF_E = [math.floor(math.e**k) for k in range(21)]


class InformerState(NamedTuple):
    """What causal `informer_attention` keeps of the tokens so far.

    Attributes:
      past: the keys and values.
      value_sum: the sum of the values, in float32.
      measures: the U largest measures of each query head; -1e30 for missing ones.
      attending: how many queries of each head have attended.
    """

    past: KeyValueCache
    value_sum: Float[Array, "B K V"]
    measures: Float[Array, "B N U"]
    attending: Int[Array, "B N"]

    @property
    def length(self) -> Int[Array, ""]:
        """The number of tokens so far."""
        return self.past.length


def log_ceiling(n: Any) -> Any:
    """ceil(ln n), at least 1, of an int or of an array of ints at least 1."""
    # Counted, because float32 may round a logarithm to another integer.
    if isinstance(n, int):
        return max(1, sum(n > power for power in _POWERS_OF_E))
    above = n[..., None] > jnp.asarray(_POWERS_OF_E, jnp.int32).reshape((1,) * n.ndim + (-1,))
    return jnp.maximum(above.sum(-1, dtype=jnp.int32), 1)


def budget(n: Any, factor: int) -> Any:
    """min(n, factor ceil(ln n)): how many of n keys a query samples, and how many of n queries attend."""
    most = factor * log_ceiling(n)
    return min(n, most) if isinstance(n, int) else jnp.minimum(n, most)


def capacity(n: Any, factor: int) -> Any:
    """How many of the first n queries may attend in causal attention."""
    return 2 * budget(n, factor) * log_ceiling(n)


@declared
def init_informer_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    length: Count,
    num_heads: Count | None = None,
    factor: Count = 5,
    dtype: DTypeLike = jnp.float32,
) -> InformerState:
    """Returns the state of `informer_attention` before the first of up to `length` tokens.

    Args:
      value_dim: head_dim of the values; head_dim by default.
      num_heads: heads of the queries; num_kv_heads by default.
      factor: as for `informer_attention`.

    Raises:
      ValueError: a size is below 1.
    """
    num_heads = num_kv_heads if num_heads is None else num_heads
    value_dim = head_dim if value_dim is None else value_dim
    past = (batch, length, num_kv_heads)
    return InformerState(
        KeyValueCache.empty((*past, head_dim), (*past, value_dim), dtype),
        jnp.zeros((batch, num_kv_heads, value_dim), jnp.float32),
        *_empty_ranking(batch, num_heads, length, factor),
    )


@divided(whole_rows("query", "key", "value"))
def informer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    rng: PRNGKeyArray,
    factor: Count = 5,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: InformerState | None = None,
    return_state: bool = False,
    count: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], InformerState]:
    """Softmax attention for a few queries and the mean of the values for the others, in O(T log T) time.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = informer_attention(query, key, value, rng=jax.random.key(0), is_causal=True)

    ProbSparse attention of the Informer (Zhou et al. 2020, arXiv:2012.07436), section 3.1 and algorithm 1. Each query
    samples u = factor ceil(ln n) of the n keys. Its measure is its largest score with them minus their mean, and the u
    queries with the largest measures attend to all keys. (The authors' code divides the sum of the sampled scores by n
    instead of u.) Measures only choose queries and have no gradient.

    Causal: query i samples among the keys up to its own. It attends if its measure is among the u largest of the first
    n = i + 1 queries, so it follows the rule for the last query of a prefix and no later token matters. The authors'
    code masks scores and gives the other queries the cumulative sum of the values, but it samples and ranks over the
    whole sequence, so later tokens decide which queries attend. If measures have no trend, about u (1 + ln(n / u)) of
    the first n queries attend; at most the first 2 u ceil(ln n) do. Time is O(T log^2 T), memory linear in T.

    Generation continues from a state, with any number of tokens at a time::

        state = init_informer_state(batch, num_kv_heads, head_dim, length=4096)
        out, state = informer_attention(..., is_causal=True, state=state, return_state=True)

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or float16; K
        divides N.
      rng: random key of the samples, which depend only on it and on the query's position.
      factor: c in the paper.
      scale: scale of the scores, at least 0; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything, is
        neither sampled nor ranked, and gives 0. Without a state only.
      state: from `init_informer_state` or an earlier call; causal only.
      return_state: also return the state after these tokens; needs a state.
      count: with a state, how many of the T tokens are valid, from the first (None: all). The outputs of the others are
        undefined.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    given_key, given_value = key, value
    query, key, value, given, scale, dtype = prepare_same_tokens(
        query, key, value, scale=scale, key_value_seq_lengths=key_value_seq_lengths, implementation=implementation,
        maker="init_informer_state", is_causal=is_causal, state=state, return_state=return_state, count=count,
    )  # fmt: skip
    require(scale >= 0, f"scale must be at least 0, got {scale}")
    batch, length, heads, head_dim = query.shape
    if state is not None:
        check_state(
            state, init_informer_state, batch, key.shape[2], head_dim, value.shape[3],
            length=state.past.keys.shape[2], num_heads=heads, factor=factor, dtype=dtype,
        )  # fmt: skip
        out, state = _extend(query, given_key, given_value, state, count, rng, factor, scale)
        return (out.astype(dtype), state) if return_state else out.astype(dtype)
    lengths = jnp.full((batch,), length, jnp.int32) if given is None else given
    places = jnp.arange(length, dtype=jnp.int32)
    exists = places[None] < lengths[:, None]
    seen = jnp.where(exists, lengths[:, None], 1)
    if is_causal:
        seen = jnp.broadcast_to(places[None] + 1, exists.shape)
    measures = _measures(query, key, rng, places, seen, factor, budget(length, factor))
    measures = jnp.where(exists[:, None], measures, _LOWEST)
    if is_causal:
        ranking = _empty_ranking(batch, heads, length, factor)
        attends, _ = _rank(measures, exists, places, ranking, factor)
        most = min(length, capacity(length, factor))
        chosen = -lax.top_k(-jnp.where(attends, places[None, None], length), most)[0]
        rest = lax.cumsum(value, axis=1)
        ends = jnp.minimum(chosen + 1, length)
    else:
        chosen = lax.top_k(measures, budget(length, factor))[1]
        within = jnp.arange(chosen.shape[2], dtype=jnp.int32)[None] < budget(lengths, factor)[:, None]
        chosen = jnp.where(within[:, None], chosen, length)
        number = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None, None, None]
        rest = jnp.broadcast_to(value.sum(1, keepdims=True) / number, value.shape)
        ends = jnp.broadcast_to(lengths[:, None, None], chosen.shape)
    heads_first = [jnp.swapaxes(x, 1, 2) for x in (key, value)]
    attended = _attend(query, heads_first[0], heads_first[1], chosen, ends, scale)
    out = _place(jnp.repeat(rest, heads // key.shape[2], axis=2), attended, chosen)
    return zero_padding(out, given).astype(dtype)


def _extend(
    query: Array,
    key: Array,
    value: Array,
    state: InformerState,
    count: Any,
    rng: Any,
    factor: int,
    scale: float,
) -> tuple[Float[Array, "B T N V"], InformerState]:
    """Causal attention of new tokens, which also see the state's, and the state after them."""
    past, start = state.past.append(key, value, count), state.length
    length, heads = query.shape[1:3]
    room = past.keys.shape[2]
    keys, values = past.keys.astype(jnp.float32), past.values.astype(jnp.float32)
    numbers = jnp.arange(length, dtype=jnp.int32)
    places = numbers + start
    exists = jnp.broadcast_to((numbers < (length if count is None else count))[None], query.shape[:2])
    tokens_first = jnp.swapaxes(keys, 1, 2)
    measures = _measures(query, tokens_first, rng, places, places[None] + 1, factor, budget(room, factor))
    measures = jnp.where(exists[:, None], measures, _LOWEST)
    attends, ranking = _rank(measures, exists, places, (state.measures, state.attending), factor)
    size = min(length, capacity(room, factor))
    chosen = -lax.top_k(-jnp.where(attends, numbers[None, None], length), size)[0]
    attended = _attend(query, keys, values, chosen, chosen + 1 + start, scale)
    new = jnp.swapaxes(jnp.take(values, jnp.minimum(places, room - 1), axis=2), 1, 2)
    new = jnp.where(exists[..., None, None], new, 0.0)
    sums = state.value_sum[:, None] + lax.associative_scan(jnp.add, new, axis=1)
    out = _place(jnp.repeat(sums, heads // keys.shape[1], axis=2), attended, chosen)
    return out, InformerState(past, sums[:, -1], *ranking)


def _empty_ranking(batch: int, num_heads: int, length: int, factor: int) -> tuple[Array, Array]:
    """`measures` and `attending` of an empty state."""
    measures = jnp.full((batch, num_heads, budget(length, factor)), _LOWEST, jnp.float32)
    return measures, jnp.zeros((batch, num_heads), jnp.int32)


def sampled_fractions(
    rng: PRNGKeyArray, positions: Int[Array, " T"], number: Int[Array, ""] | int
) -> Float[Array, " T"]:
    """Sample `number` of the query at each position, as a fraction in [0, 1) of the keys that it sees."""

    def draw(position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(rng, position), number)
        return jax.random.uniform(key, dtype=jnp.float32)

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
    """Each query's largest score with the keys it samples from the first `seen` ones, minus their mean."""
    batch, length, heads, head_dim = query.shape
    query, key = lax.stop_gradient((query, key))
    rows = query.reshape(batch, length, key.shape[2], -1, head_dim)
    key = jnp.swapaxes(key, 1, 2)
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
    ranking: tuple[Array, Array],
    factor: int,
) -> tuple[Bool[Array, "B N T"], tuple[Array, Array]]:
    """Whether each query attends, by the measures of the queries up to its own, and the ranking after them.

    A ranking is (measures, attending) of `InformerState`.
    """
    batch, heads, length = measures.shape
    size = min(length, _RANKED)

    def cut(x: Array, fill: Any) -> Array:
        return jnp.moveaxis(in_blocks(x, size, axis=x.ndim - 1, fill=fill), -2, 0)

    earlier = jnp.tri(size, k=-1, dtype=bool)[None, None]

    def step(ranking: tuple[Array, Array], chunk: Any) -> tuple[tuple[Array, Array], Array]:
        (best, attending), (own, exists, positions) = ranking, chunk
        above = _count(best[:, :, None] >= own[..., None])
        above = above + _count(earlier & (own[:, :, None] >= own[..., None]))
        ranks = (above < budget(positions + 1, factor)[None, None]) & exists[:, None]
        before = attending[..., None] + _count(earlier & ranks[:, :, None])
        attends = ranks & (before < capacity(positions + 1, factor)[None, None])
        largest = lax.top_k(jnp.concatenate([best, own], -1), best.shape[2])[0]
        return (largest, attending + _count(attends)), attends

    pieces = (cut(measures, _LOWEST), cut(exists, False), cut(positions, 0))
    ranking, attends = lax.scan(step, vary_like(ranking, measures), pieces)
    return jnp.moveaxis(attends, 0, 2).reshape(batch, heads, -1)[..., :length], ranking


def _count(x: Bool[Array, "*rows S"]) -> Int[Array, "*rows"]:
    return x.sum(-1, dtype=jnp.int32)


def _attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S V"],
    chosen: Int[Array, "B N U"],
    ends: Int[Array, "B N U"],
    scale: float,
) -> Float[Array, "B U N V"]:
    """Softmax attention of the chosen queries to the keys before `ends`, a block of queries at a time."""
    batch, heads, number = chosen.shape
    places = jnp.minimum(chosen, query.shape[1] - 1)
    rows = jnp.take_along_axis(jnp.moveaxis(query, 2, 1), places[..., None], axis=2)
    indices = jnp.arange(key.shape[2], dtype=jnp.int32)

    def attend(piece: tuple[Array, Array]) -> Array:
        rows, ends = (x.reshape(batch, key.shape[1], -1, *x.shape[3:]) for x in piece)
        scores = jnp.einsum("bkrh,bksh->bkrs", rows, key) * scale
        weights = softmax_weights(scores, indices[None, None, None] < ends[..., None])
        return jnp.einsum("bkrs,bksv->bkrv", weights, value).reshape(batch, heads, -1, value.shape[3])

    if number <= _QUERY_BLOCK:
        return jnp.moveaxis(attend((rows, ends)), 1, 2)
    pieces = tuple(jnp.moveaxis(in_blocks(x, _QUERY_BLOCK, axis=2), 2, 0) for x in (rows, ends))
    out = lax.map(functools.partial(recomputed, attend), pieces)
    return jnp.moveaxis(out, 0, 2).reshape(batch, heads, -1, value.shape[3])[:, :, :number].swapaxes(1, 2)


def _place(
    rest: Float[Array, "B T N V"], attended: Float[Array, "B U N V"], chosen: Int[Array, "B N U"]
) -> Float[Array, "B T N V"]:
    """The rest, with the chosen queries' outputs in their places; out-of-range places are ignored."""
    rows = jnp.arange(rest.shape[0])[:, None, None]
    heads = jnp.arange(rest.shape[2])[None, None]
    return rest.at[rows, chosen.swapaxes(1, 2), heads].set(attended, mode="drop")
