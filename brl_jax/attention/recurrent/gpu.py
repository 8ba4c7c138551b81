"""Gated attention units on GPUs: their scores, normaliser and bias as one product, and who sees whom as ranges."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from brl_jax.attention.core.biases import PositionBias, RotaryBias
from brl_jax.attention.core.dispatch import Backend
from brl_jax.attention.core.triton import triton_backend
from brl_jax.attention.recurrent.seen_ranges import score_factors, seen_ranges

# Triton is imported where it is needed: it costs import time.


def gau_backend(*, is_causal: bool, unsuited: bool) -> Backend:
    """The kernel of `gau_attention` for operands (query, key, value, bias, positions, segments, key_segments)."""

    def obstacle(query, key, value, bias: PositionBias | None, *_) -> str | None:
        from pallas_kernels import triton

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
        return triton.squared_relu_obstacle(features, key, value)

    def run(query, key, value, bias, positions, segments, key_segments):
        from pallas_kernels import triton

        ranges = seen_ranges(positions, segments, key_segments, key.shape[:2], is_causal)
        # float16 has no room for small scores; the kernel computes it in TF32.
        dtype = jnp.float32 if query.dtype == jnp.float16 else query.dtype
        rows, columns = (x.astype(dtype) for x in score_factors(query, key, bias, positions, ranges))
        out = triton.squared_relu_attention(rows, columns, value.astype(dtype), triton.Ranges(*ranges))
        return out.astype(query.dtype)

    return triton_backend(run, obstacle, unsuited)
