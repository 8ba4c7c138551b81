"""Performer: softmax attention through positive random features (FAVOR+, Choromanski et al. 2020, arXiv:2009.14794)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from brl_jax.attention.core.checks import given_or_drawn
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.chunk_scan import (
    ChunkVisibility,
    Recurrence,
    scan_both_directions,
    scan_chunks,
)
from brl_jax.attention.recurrent.prefix_states import states_before
from brl_jax.attention.recurrent.rows import group_rows, heads_first, ungroup_rows, zero_unless
from brl_jax.fields import Count, declared

# The logarithm of a missing feature, finite so that the difference of two is 0 and not NaN.
_LOG_ZERO = -1e30
# Added to each feature of a query, whose largest feature is 1, so that the sum of the weights cannot vanish.
_MIN_FEATURE = 1e-6


class PerformerState(NamedTuple):
    """What `performer_attention` keeps of the tokens so far.

    Attributes:
      key_value: the sum of phi(k) v^T over the tokens, divided by exp(maximum).
      key: the sum of phi(k), divided by exp(maximum).
      maximum: the largest logarithm of any key's feature; -1e30 before the first token.
    """

    key_value: Float[Array, "B K F V"]
    key: Float[Array, "B K F"]
    maximum: Float[Array, "B K"]


@declared
def init_performer_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    num_features: Count | None = None,
) -> PerformerState:
    """Returns the state of `performer_attention` before the first token.

    Args:
      num_features: F, the rows of the projection; round(H ln H) by default.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    num_features = default_features(head_dim) if num_features is None else num_features
    return PerformerState(
        jnp.zeros((batch, num_kv_heads, num_features, value_dim), jnp.float32),
        jnp.zeros((batch, num_kv_heads, num_features), jnp.float32),
        jnp.full((batch, num_kv_heads), _LOG_ZERO, jnp.float32),
    )


@declared
def performer_projection(rng: PRNGKeyArray, num_features: Count, head_dim: Count) -> Float[Array, "F H"]:
    """Random directions for `performer_attention` (arXiv:2009.14794, section 2.4).

    Within each block of head_dim rows they are orthogonal. They have the lengths of Gaussian vectors.

    Args:
      rng: random key.
      num_features: F, the number of directions.
      head_dim: H.

    Raises:
      ValueError: a size is below 1.
    """
    blocks = -(-num_features // head_dim)
    direction_key, length_key = jax.random.split(rng)
    gaussian = jax.random.normal(direction_key, (blocks, head_dim, head_dim), jnp.float32)
    directions = jnp.linalg.qr(gaussian)[0].reshape(blocks * head_dim, head_dim)[:num_features]
    lengths = jnp.linalg.norm(
        jax.random.normal(length_key, (num_features, head_dim), jnp.float32), axis=1, keepdims=True
    )
    return directions * lengths


@attention_function
def performer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    rng: PRNGKeyArray | None = None,
    projection: Float[Array, "F H"] | None = None,
    num_features: Count | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: PerformerState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], PerformerState]:
    """Estimates softmax attention of scale 1 / sqrt(H) with F random features, in O(T F) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        rng = jax.random.key(0)
        out = performer_attention(query, key, value, rng=rng, num_features=256, is_causal=True)

    FAVOR+ (arXiv:2009.14794, lemma 1): phi(x) = exp(W x - |x|^2 / 2) / sqrt(F) with x scaled by H^(-1/4). Features
    are divided by their maximum so that they do not overflow. The maximum covers only the keys that a query sees,
    so causal attention learns nothing about later tokens, not even through rounding. A millionth of a query's
    largest feature is added to each of its features.

    Args:
      query, key, value: as for `linear_attention`.
      rng: random key from which the projection is drawn; all pieces of a sequence need the same key. Give rng or
        projection.
      projection: W, (F, H), from `performer_projection`.
      num_features: F, the number of features to draw; round(H ln H) by default.
      is_causal, key_value_seq_lengths, segment_ids, chunk_size: as for `linear_attention`.
      state, return_state: as for `linear_attention`, with a `PerformerState`.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, or rng and projection are both given or both missing.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids, state=state, return_state=return_state,
        implementation=implementation,
    )  # fmt: skip
    query, key, value, segments = prepared.query, prepared.key, prepared.value, prepared.segments
    batch, _, kv_heads, value_dim = value.shape
    head_dim = query.shape[3]
    number = default_features(head_dim) if num_features is None else num_features
    draw = functools.partial(performer_projection, num_features=number, head_dim=head_dim)
    directions = given_or_drawn("projection", projection, (head_dim,), rng, draw, num_features=num_features)
    sizes = (batch, kv_heads, head_dim, value_dim)
    state = check_state(state, init_performer_state, *sizes, num_features=directions.shape[0])
    fresh = init_performer_state(*sizes, num_features=directions.shape[0])
    inputs = {"query": query, "key": key, "value": value}

    def step(state: PerformerState, chunk: Any, visibility: ChunkVisibility) -> tuple[PerformerState, Any]:
        return _step(chunk["directions"], chunk, state, visibility)

    def summarize(chunk: Any, visibility: ChunkVisibility) -> PerformerState:
        return step(fresh, chunk, visibility)[0]

    scan: dict[str, Any] = {
        "whole": {"directions": directions},
        "chunk_size": chunk_size,
        "recurrence": Recurrence(summarize, functools.partial(states_before, _join, _join), _join),
    }
    if is_causal:
        state, (total, weight, _) = scan_chunks(step, state, inputs, segments, **scan)
    elif prepared.packed and segments is not None:
        total, weight = _add_sums(*scan_both_directions(step, fresh, inputs, segments, **scan))
    else:
        logs = _log_features(directions, heads_first(key))
        top, features = _key_features(logs, None if segments is None else segments >= 0)
        state = _add_to_state(top, features, heads_first(value), fresh, None)
        rows = _query_features(directions, query, kv_heads)
        total, weight = (ungroup_rows(x, query.shape[1]) for x in _read_state(rows, state))
    out = (total / jnp.where(weight == 0, jnp.ones((), jnp.float32), weight)).astype(query.dtype)
    return (out, state) if return_state else out


def default_features(head_dim: int) -> int:
    """H ln H, rounded (arXiv:2009.14794, section 4.2)."""
    return max(1, round(head_dim * math.log(head_dim)))


def _log_features(directions: Float[Array, "F H"], x: Float[Array, "B K R H"]) -> Float[Array, "B K R F"]:
    """The logarithms of the features, without the constant 1 / sqrt(F), which cancels."""
    x = x * x.shape[-1] ** -0.25
    return jnp.matmul(x, directions.T) - 0.5 * jnp.sum(jnp.square(x), axis=-1, keepdims=True)


def _query_features(
    directions: Float[Array, "F H"], query: Float[Array, "B C N H"], kv_heads: int
) -> Float[Array, "B K R F"]:
    """Each query's features divided by the largest one, which cancels between sums and weights."""
    logs = _log_features(directions, group_rows(query, kv_heads))
    return jnp.exp(logs - logs.max(axis=-1, keepdims=True)) + _MIN_FEATURE


def _key_features(
    logs: Float[Array, "B K C F"], exists: Bool[Array, "B C"] | None
) -> tuple[Float[Array, "B K C"], Float[Array, "B K C F"]]:
    """The logarithm of each key's largest feature, and the key's features divided by it."""
    top = lax.stop_gradient(logs.max(axis=-1))
    features = jnp.exp(logs - top[..., None])
    if exists is None:
        return top, features
    top = jnp.where(exists[:, None], top, jnp.asarray(_LOG_ZERO, top.dtype))
    return top, zero_unless(exists[:, None], features)


def _read_state(
    rows: Float[Array, "B K R F"], state: PerformerState
) -> tuple[Float[Array, "B K R V"], Float[Array, "B K R 1"]]:
    """The weighted sums of values and the sums of weights that feature rows read from a state."""
    total = jnp.einsum("bkrf,bkfh->bkrh", rows, state.key_value)
    return total, jnp.einsum("bkrf,bkf->bkr", rows, state.key)[..., None]


def _add_to_state(
    top: Float[Array, "B K C"],
    features: Float[Array, "B K C F"],
    v: Float[Array, "B K C V"],
    state: PerformerState,
    keeps_state: Bool[Array, "B"] | None,
) -> PerformerState:
    """The state with keys and values added, relative to the new maximum."""
    maximum, fade = _fade(state.maximum, top.max(axis=-1), keeps_state)
    features = features * jnp.exp(top - maximum[..., None])[..., None]
    key_value = state.key_value * fade[..., None, None] + jnp.einsum("bkcf,bkch->bkfh", features, v)
    return PerformerState(key_value, state.key * fade[..., None] + features.sum(axis=2), maximum)


def _join(
    earlier: PerformerState, later: PerformerState, keeps: Bool[Array, "*leading"] | None
) -> PerformerState:
    """The state of two adjacent runs of tokens."""
    maximum, fade = _fade(earlier.maximum, later.maximum, keeps)
    shrink = jnp.exp(later.maximum - maximum)
    return PerformerState(
        earlier.key_value * fade[..., None, None] + later.key_value * shrink[..., None, None],
        earlier.key * fade[..., None] + later.key * shrink[..., None],
        maximum,
    )


def _fade(
    before: Float[Array, "*leading K"], new: Float[Array, "*leading K"], keeps: Bool[Array, "*leading"] | None
) -> tuple[Float[Array, "*leading K"], Float[Array, "*leading K"]]:
    """The maximum of old and new logarithms, and the factor for sums relative to the old one."""
    if keeps is not None:
        before = jnp.where(keeps[..., None], before, jnp.asarray(_LOG_ZERO, before.dtype))
    maximum = jnp.maximum(before, new)
    return maximum, zero_unless(keeps, jnp.exp(before - maximum))


def _step(
    directions: Float[Array, "F H"], chunk: Any, state: PerformerState, visibility: ChunkVisibility
) -> tuple[PerformerState, Any]:
    """One chunk: the next state and, for each query, its sums of values and of weights relative to its maximum."""
    length, kv_heads = chunk["key"].shape[1:3]
    rows = _query_features(directions, chunk["query"], kv_heads)
    top, features = _key_features(_log_features(directions, heads_first(chunk["key"])), None)
    v = heads_first(chunk["value"])
    log_zero = jnp.asarray(_LOG_ZERO, top.dtype)

    # Each query's maximum over the keys that it sees: (B, K, C).
    pairs = visibility.pairs[:, None]
    past = state.maximum[:, :, None]
    if visibility.reads_state is not None:
        past = jnp.where(visibility.reads_state[:, None], past, log_zero)
    maximum = jnp.maximum(jnp.where(pairs, top[:, :, None], log_zero).max(axis=-1), past)
    fade = jnp.exp(past - maximum)
    nearness = jnp.where(pairs, jnp.exp(jnp.where(pairs, top[:, :, None] - maximum[..., None], 0)), 0)

    batch, _, count, _ = rows.shape
    grouped = (batch, kv_heads, count // length, length)
    scores = jnp.einsum("bkrf,bkcf->bkrc", rows, features).reshape(*grouped, length) * nearness[:, :, None]
    scores = scores.reshape(batch, kv_heads, count, length)
    fade = jnp.broadcast_to(fade[:, :, None], grouped).reshape(batch, kv_heads, count, 1)
    if visibility.reads_state is not None:
        seen = jnp.broadcast_to(visibility.reads_state[:, None, None], grouped).reshape(fade.shape)
        fade = jnp.where(seen, fade, jnp.zeros((), fade.dtype))
    total, weight = _read_state(rows, state)
    total = total * fade + jnp.einsum("bkrc,bkch->bkrh", scores, v)
    weight = weight * fade + scores.sum(axis=-1, keepdims=True)

    if visibility.enters_state is not None:
        added = visibility.enters_state[:, None]
        top, features = jnp.where(added, top, log_zero), zero_unless(added, features)
    state = _add_to_state(top, features, v, state, visibility.keeps_state)
    maximum = jnp.broadcast_to(maximum[:, :, None], grouped).reshape(batch, kv_heads, count, 1)
    return state, tuple(ungroup_rows(x, length) for x in (total, weight, maximum))


def _add_sums(first: Any, second: Any) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N 1"]]:
    """The sums over two sets of keys, each (values, weights, maximum), relative to the larger maximum."""
    maximum = jnp.maximum(first[2], second[2])
    total, weight = (sum(part[i] * jnp.exp(part[2] - maximum) for part in (first, second)) for i in (0, 1))
    return total, weight
