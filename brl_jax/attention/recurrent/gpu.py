"""Recurrences and gated attention units on GPUs.

The scores, the normaliser and the bias of gated attention units become one product, and who sees whom ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from brl_jax.attention.core.biases import PositionBias, RotaryBias
from brl_jax.attention.core.dispatch import Backend
from brl_jax.attention.core.triton import triton_backend
from brl_jax.attention.recurrent.seen_ranges import score_factors, seen_ranges
from brl_jax.attention.recurrent.tpu import WALKED_AXES, Walked
from brl_jax.sharding import sequence_axis, shard_call

# Triton is imported where it is needed: it costs import time.

#: Shorter rows are a few chunks for XLA.
_SHORTEST = 128


def recurrence_backend(
    run: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    *,
    features: int,
    chunk_size: int,
    log_decay: Array | None = None,
) -> Backend:
    """The kernels of a call of `linear_attention` or of a delta rule.

    Args:
      run: `run(*operands)`, by `walk`.
      query, key, value, features, chunk_size, log_decay: as for the backend of TPUs.
    """
    length = key.shape[1]
    q, k = (jax.ShapeDtypeStruct((*x.shape[:3], features), x.dtype) for x in (query, key))
    v = jax.ShapeDtypeStruct(value.shape, value.dtype)
    by_feature = log_decay is not None and log_decay.ndim == 4

    def unsupported(*_: Any) -> str | None:
        from pallas_kernels import triton

        if by_feature:
            return "log_decay must be one number for each token and head, got one for each feature"
        return triton.recurrence_unsupported(q, k, v)

    unsuited = length < _SHORTEST or sequence_axis(length, chunk_size) is not None
    return triton_backend(run, unsupported, unsuited)


def walk(arrays: Walked, *, out_dtype: Any = jnp.float32) -> Any:
    """The `Sums` of the kernels, each device for its own rows and heads; their total has the dtype `out_dtype`."""
    from pallas_kernels import triton

    def attend(*arrays: Any) -> Any:
        return tuple(triton.recurrence(triton.Operands(*arrays), out_dtype=out_dtype))

    return triton.Sums(*shard_call(attend, arrays, *WALKED_AXES))


def gau_backend(*, is_causal: bool, unsuited: bool) -> Backend:
    """The kernel of `gau_attention` for operands (query, key, value, bias, positions, segments, key_segments)."""

    def unsupported(query, key, value, bias: PositionBias | None, *_) -> str | None:
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
        return triton.squared_relu_unsupported(features, key, value)

    def run(query, key, value, bias, positions, segments, key_segments):
        from pallas_kernels import triton

        ranges = seen_ranges(positions, segments, key_segments, key.shape[:2], is_causal)
        # float16 has no room for small scores; the kernel computes it in TF32.
        dtype = jnp.float32 if query.dtype == jnp.float16 else query.dtype
        rows, columns = (x.astype(dtype) for x in score_factors(query, key, bias, positions, ranges))
        out = triton.squared_relu_attention(rows, columns, value.astype(dtype), triton.Ranges(*ranges))
        return out.astype(query.dtype)

    return triton_backend(run, unsupported, unsuited)
