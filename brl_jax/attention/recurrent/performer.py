"""Performer: softmax attention by positive random features (FAVOR+, Choromanski et al. 2020, arXiv 2009.14794)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import is_int, zero_padding
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.recurrent.chunks import (
    Sight,
    check_chunked_call,
    check_runs,
    check_state,
    group_rows,
    heads_first,
    keep,
    scan_chunks,
    token_runs,
    ungroup_rows,
)

# Stands for the logarithm of 0: finite, so that differences of two of them are 0 and not NaN.
_NOTHING = -1e30
# Added to each of a query's features beside its largest, which is 1: the sum of weights cannot vanish.
_LEAST = 1e-6


class PerformerState(NamedTuple):
    """What `performer_attention` knows of the tokens so far.

    Attributes:
      key_value: sum of phi(k) v^T; key: sum of phi(k); both divided by exp(maximum).
      maximum: the largest logarithm of a feature of any key.
    """

    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"]
    maximum: Float[Array, "B K"]


def init_performer_state(
    batch: int, num_kv_heads: int, num_features: int, value_dim: int, *, dtype: Any = jnp.float32
) -> PerformerState:
    """The state of `performer_attention` before the first token; dtype is float32 for all inputs but float64's."""
    return PerformerState(
        jnp.zeros((batch, num_kv_heads, num_features, value_dim), dtype),
        jnp.zeros((batch, num_kv_heads, num_features), dtype),
        jnp.full((batch, num_kv_heads), _NOTHING, dtype),
    )


def performer_projection(
    rng: Array, num_features: int, head_dim: int, *, dtype: Any = jnp.float32
) -> Float[Array, "F H"]:
    """Random directions, orthogonal within each block of head_dim, with the lengths of Gaussian vectors (2009.14794).

    Args:
      rng: random key; another key draws anew.
    """
    blocks = -(-num_features // head_dim)
    direction_key, length_key = jax.random.split(rng)
    gaussian = jax.random.normal(direction_key, (blocks, head_dim, head_dim), dtype)
    directions = jnp.linalg.qr(gaussian)[0].reshape(blocks * head_dim, head_dim)[:num_features]
    lengths = jnp.linalg.norm(
        jax.random.normal(length_key, (num_features, head_dim), dtype), axis=1, keepdims=True
    )
    return directions * lengths


def performer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    rng: Array | None = None,
    projection: Float[Array, "F H"] | None = None,
    num_features: int | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: PerformerState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> Any:
    """Softmax attention of scale 1 / sqrt(H) in expectation over random features, in O(T F) time and memory.

    FAVOR+ (2009.14794, lemma 1): phi(x) = exp(W x - |x|^2 / 2) / sqrt(F) of x H^(-1/4). Features are kept from
    overflowing by maxima over the keys that a query sees, and over those only: where it is causal, nothing of later
    tokens enters, not even through rounding. To each feature of a query a millionth of its largest is added.

    Args:
      query, key, value: as for `linear_attention`.
      rng: random key from which the projection is drawn (pieces of one sequence need the same).
      projection: W, (F, H), in place of rng: from `performer_projection`.
      num_features: F to draw; by default round(H ln H).
      is_causal, key_value_seq_lengths, segment_ids, chunk_size, implementation: as for `linear_attention`.
      state, return_state: likewise, with a `PerformerState`.

    Returns:
      (B, T, N, V) in query's dtype, computed in float32; with return_state, that and a `PerformerState`.

    Raises:
      ValueError: neither rng nor projection, or both; arrays, lengths, segments, a state or sizes that don't fit.
    """
    check_chunked_call(
        query, key, value, is_causal=is_causal, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    dtype = accumulation_dtype(query.dtype)
    directions = _check_projection(rng, projection, num_features, query.shape[3], dtype)
    lengths, segments = check_runs(query, key, key_value_seq_lengths, segment_ids)
    key, value = zero_padding(key, lengths), zero_padding(value, lengths)
    query = zero_padding(query, lengths) if is_causal else query
    runs = token_runs(key.shape[0], key.shape[1], lengths, segments)
    fresh = init_performer_state(key.shape[0], key.shape[2], directions.shape[0], value.shape[3], dtype=dtype)
    state = check_state(state, fresh, "performer_attention")
    inputs = {"query": query, "key": key, "value": value}

    def walk(state: PerformerState, inputs: Any, runs: Any, strict: bool) -> tuple[PerformerState, Any]:
        def step(state: PerformerState, chunk: Any, sight: Sight) -> tuple[PerformerState, Any]:
            return _step(directions, chunk, state, sight)

        return scan_chunks(step, state, inputs, runs, chunk_size=chunk_size, strict=strict)

    if is_causal:
        state, (total, weight, _) = walk(state, inputs, runs, strict=False)
    elif segments is not None and runs is not None:
        # The past with the token itself, and, read from the end, the future.
        _, past = walk(fresh, inputs, runs, strict=False)
        backwards = jnp.where(runs < 0, -1, runs.max(axis=1)[:, None] - runs)[:, ::-1]
        _, future = walk(fresh, jax.tree.map(lambda x: x[:, ::-1], inputs), backwards, strict=True)
        total, weight = _add(past, jax.tree.map(lambda x: x[:, ::-1], future))
    else:
        logs = _key_logs(directions, key)
        top, features = _key_features(logs, None if runs is None else runs >= 0)
        state = _enter(top, features, heads_first(value), fresh, None)
        rows = _query_features(directions, query, key.shape[2])
        total, weight = (ungroup_rows(x, query.shape[1]) for x in _read(rows, state))
    out = (total / jnp.where(weight == 0, jnp.ones((), dtype), weight)).astype(query.dtype)
    return (out, state) if return_state else out


def _check_projection(rng: Any, projection: Any, num_features: Any, head_dim: int, dtype: Any) -> Array:
    require(
        (rng is None) != (projection is None),
        "rng (a random key to draw the features from) or projection must be given, and not both, got "
        + ("neither" if rng is None else "both"),
    )
    if projection is None:
        if num_features is None:
            num_features = max(1, round(head_dim * math.log(head_dim)))
        require(
            is_int(num_features) and num_features >= 1,
            f"num_features must be an int of at least 1, got {num_features!r}",
        )
        projection = performer_projection(rng, num_features, head_dim, dtype=dtype)
    require(num_features in (None, projection.shape[0]), "num_features is the projection's, which was given")
    require(
        projection.ndim == 2 and projection.shape[1] == head_dim,
        f"projection must have shape (features, {head_dim}), got {projection.shape}",
    )
    return projection.astype(dtype)


def _logs(directions: Array, x: Array) -> Array:
    """Logarithms (..., F) of the features of x (..., H)."""
    x = x * x.shape[-1] ** -0.25
    return jnp.matmul(x, directions.T) - 0.5 * jnp.sum(jnp.square(x), axis=-1, keepdims=True)


def _query_features(directions: Array, query: Array, kv_heads: int) -> Array:
    """(B, K, G * C, F), each row divided by its largest feature, which divides sums and weights alike."""
    logs = _logs(directions, group_rows(query, kv_heads))
    return jnp.exp(logs - logs.max(axis=-1, keepdims=True)) + _LEAST


def _key_logs(directions: Array, key: Array) -> Array:
    return _logs(directions, heads_first(key))


def _key_features(logs: Array, exists: Array | None) -> tuple[Array, Array]:
    """The logarithm of each key's largest feature (B, K, C), and its features (B, K, C, F) divided by that."""
    top = lax.stop_gradient(logs.max(axis=-1))
    features = jnp.exp(logs - top[..., None])
    if exists is None:
        return top, features
    return jnp.where(exists[:, None], top, jnp.asarray(_NOTHING, top.dtype)), keep(exists[:, None], features)


def _read(rows: Array, state: PerformerState) -> tuple[Array, Array]:
    total = jnp.einsum("bkrf,bkfh->bkrh", rows, state.key_value)
    return total, jnp.einsum("bkrf,bkf->bkr", rows, state.key)[..., None]


def _enter(
    top: Array, features: Array, v: Array, state: PerformerState, stays: Array | None
) -> PerformerState:
    """The state with keys added, brought to the new maximum."""
    nothing = jnp.asarray(_NOTHING, top.dtype)
    before = state.maximum if stays is None else jnp.where(stays[:, None], state.maximum, nothing)
    maximum = jnp.maximum(before, top.max(axis=-1))
    fade = keep(stays, jnp.exp(before - maximum))
    features = features * jnp.exp(top - maximum[..., None])[..., None]
    key_value = state.key_value * fade[..., None, None] + jnp.einsum("bkcf,bkch->bkfh", features, v)
    return PerformerState(key_value, state.key * fade[..., None] + features.sum(axis=2), maximum)


def _step(directions: Array, chunk: Any, state: PerformerState, sight: Sight) -> tuple[PerformerState, Any]:
    length, kv_heads = chunk["key"].shape[1:3]
    rows = _query_features(directions, chunk["query"], kv_heads)
    top, features = _key_features(_key_logs(directions, chunk["key"]), None)
    v = heads_first(chunk["value"])
    nothing = jnp.asarray(_NOTHING, top.dtype)

    # Each query's own maximum over what it sees: (B, K, C).
    pairs = sight.pairs[:, None]
    past = state.maximum[:, :, None]
    if sight.past is not None:
        past = jnp.where(sight.past[:, None], past, nothing)
    maximum = jnp.maximum(jnp.where(pairs, top[:, :, None], nothing).max(axis=-1), past)
    fade = jnp.exp(past - maximum)
    nearness = jnp.where(pairs, jnp.exp(jnp.where(pairs, top[:, :, None] - maximum[..., None], 0)), 0)

    batch, _, count, _ = rows.shape
    grouped = (batch, kv_heads, count // length, length)
    scores = jnp.einsum("bkrf,bkcf->bkrc", rows, features).reshape(*grouped, length) * nearness[:, :, None]
    scores = scores.reshape(batch, kv_heads, count, length)
    fade = jnp.broadcast_to(fade[:, :, None], grouped).reshape(batch, kv_heads, count, 1)
    if sight.past is not None:
        seen = jnp.broadcast_to(sight.past[:, None, None], grouped).reshape(fade.shape)
        fade = jnp.where(seen, fade, jnp.zeros((), fade.dtype))
    total, weight = _read(rows, state)
    total = total * fade + jnp.einsum("bkrc,bkch->bkrh", scores, v)
    weight = weight * fade + scores.sum(axis=-1, keepdims=True)

    if sight.enters is not None:
        enters = sight.enters[:, None]
        top, features = jnp.where(enters, top, nothing), keep(enters, features)
    state = _enter(top, features, v, state, sight.stays)
    maximum = jnp.broadcast_to(maximum[:, :, None], grouped).reshape(batch, kv_heads, count, 1)
    return state, tuple(ungroup_rows(x, length) for x in (total, weight, maximum))


def _add(first: Any, second: Any) -> tuple[Array, Array]:
    """The sums of two directions, each brought to the larger of their maxima."""
    maximum = jnp.maximum(first[2], second[2])
    total, weight = (sum(part[i] * jnp.exp(part[2] - maximum) for part in (first, second)) for i in (0, 1))
    return total, weight
