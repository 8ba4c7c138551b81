"""Contiguous ranges of keys that each query sees: its sequence's keys, all of them or up to its position."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.biases import RotaryBias
from brl_jax.attention.core.segments import first_tokens


class SeenRanges(NamedTuple):
    """The keys that each query sees, and the queries that may see each key.

    Attributes:
      first, stop: query i sees the keys from first[i] to stop[i] - 1.
      begin, end: the queries from begin[j] to end[j] - 1 may see key j.
    """

    first: Int[Array, "B T"]
    stop: Int[Array, "B T"]
    begin: Int[Array, "B S"]
    end: Int[Array, "B S"]


def seen_ranges(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    keys: tuple[int, ...],
    is_causal: bool,
) -> SeenRanges:
    """The ranges for `keys` of shape (B, S).

    Segments are numbered in the order of the tokens, and padding (-1 in key_segments) comes last.
    """
    length = positions.shape[1]
    at_key = jnp.broadcast_to(jnp.arange(keys[1], dtype=jnp.int32), keys)
    existing = jnp.full((keys[0], 1), keys[1], jnp.int32)
    if key_segments is not None:
        existing = jnp.sum(key_segments >= 0, axis=1, keepdims=True, dtype=jnp.int32)
    if segments is None:
        first, stop = jnp.zeros_like(positions), jnp.broadcast_to(existing, positions.shape)
        begin = jnp.maximum(at_key - positions[:, :1], 0) if is_causal else jnp.zeros_like(at_key)
        end = jnp.full_like(at_key, length)
    else:  # queries and keys are the same tokens
        first, end = _runs(segments)
        stop = jnp.minimum(end, existing)
        begin = at_key if is_causal else first
    if is_causal:
        stop = jnp.minimum(stop, positions + 1)
    return SeenRanges(first, jnp.maximum(stop, first), begin, end)


def score_factors(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: RotaryBias | None,
    positions: Int[Array, "B T"],
    ranges: SeenRanges,
) -> tuple[Float[Array, "B T N F"], Float[Array, "B S K F"]]:
    """float32 rows and columns whose products are q_i . k_j / n_i + b_ij, where query i sees n_i keys.

    A rotary bias is itself a product of vectors, which become further features; it needs K = N.
    """
    count = jnp.maximum(ranges.stop - ranges.first, 1)[:, :, None, None].astype(jnp.float32)
    rows, columns = query.astype(jnp.float32) / count, key.astype(jnp.float32)
    if bias is None:
        return rows, columns
    places = jnp.broadcast_to(jnp.arange(key.shape[1], dtype=jnp.int32), key.shape[:2])
    factors = bias.factor(bias.left, positions), bias.factor(bias.right, places)
    return tuple(jnp.concatenate(pair, axis=-1) for pair in zip((rows, columns), factors))  # type: ignore[return-value]


def _runs(segments: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Where each token's run of equal numbers begins and ends."""
    return first_tokens(segments), segments.shape[1] - first_tokens(segments[:, ::-1])[:, ::-1]
