"""Gated attention units on GPUs: their scores, normaliser and bias as one product, and who sees whom as ranges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from brl_jax.attention.core.biases import PositionBias, RotaryBias
from brl_jax.attention.core.dispatch import Backend

# Triton is imported where it is needed: it costs import time.


def gau_backend(query, key, value, bias: PositionBias | None, *, is_causal: bool, unsuited: bool) -> Backend:
    """The kernel of `gau_attention` for operands (query, key, value, bias, positions, segments, key_segments)."""

    def obstacle() -> str | None:
        from pallas_kernels import gpu

        features = query
        if bias is not None:
            if not isinstance(bias, RotaryBias):
                return f"bias must be None or a RotaryBias, got {type(bias).__name__}"
            if key.shape[2] != query.shape[2]:
                return (
                    f"a bias needs as many key heads as query heads, got {key.shape[2]} and {query.shape[2]}"
                )
            width = query.shape[3] + bias.left.shape[-1]
            features = jax.ShapeDtypeStruct((*query.shape[:3], width), query.dtype)
        return gpu.squared_relu_obstacle(features, key, value)

    def run(query, key, value, bias, positions, segments, key_segments, *, interpret):
        from pallas_kernels import gpu

        gpu.check_interpretation(interpret)
        ranges = _ranges(positions, segments, key_segments, key.shape[:2], is_causal)
        count = jnp.maximum(ranges.stop - ranges.first, 1)[:, :, None, None].astype(jnp.float32)
        # float16 has no room for small scores; the kernel computes it in TF32.
        dtype = jnp.float32 if query.dtype == jnp.float16 else query.dtype
        rows, columns = query.astype(jnp.float32) / count, key.astype(jnp.float32)
        if bias is not None:
            places = jnp.broadcast_to(jnp.arange(key.shape[1], dtype=jnp.int32), key.shape[:2])
            rows = jnp.concatenate([rows, bias.factor(bias.left, positions)], axis=-1)
            columns = jnp.concatenate([columns, bias.factor(bias.right, places)], axis=-1)
        out = gpu.squared_relu_attention(
            rows.astype(dtype), columns.astype(dtype), value.astype(dtype), ranges
        )
        return out.astype(query.dtype)

    return Backend("triton", run, obstacle, unsuited)


def _ranges(
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    keys: tuple[int, int],
    is_causal: bool,
) -> Any:
    """The keys that each query sees, and the queries by which each key may be seen: both are contiguous.

    Segments are numbered in the order of the tokens, and padding (-1 in key_segments) comes last.
    """
    from pallas_kernels import gpu

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
    return gpu.Ranges(first, jnp.maximum(stop, first), begin, end)


def _runs(segments: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Where the run of equal numbers begins and ends in which each token lies."""
    length = segments.shape[1]
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
    changes = segments[:, 1:] != segments[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    first = lax.cummax(jnp.where(begins, places, 0), axis=1)
    return first, lax.cummin(jnp.where(ends, places + 1, length), axis=1, reverse=True)
