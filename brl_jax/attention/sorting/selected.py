"""Attention of each query to listed blocks of keys of its own: native sparse attention's second branch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.dispatch import Backend, Implementation, dispatch
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.sharding import shard_call

# Queries at a time: each has M * size keys of its own, which are the largest array in memory.
_QUERY_BLOCK = 64


def selected_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    starts: Int[Array, "B T K M"],
    offset: Any = 0,
    *,
    size: int,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention of each query to the keys of M blocks, up to its own place, in float32.

    Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089), equation 5 with the keys of equation 12. O(T M size)
    time; O(T M) memory and the keys of 64 queries, on a GPU without the latter.

    Args:
      query: (B, T, N, H), one after the other at the places from `offset` on among the keys.
      key, value: (B, S, K, H) and (B, S, K, V); K divides N.
      starts: (B, T, K, M) int32, the first keys of the blocks of each query, which must not overlap; S where there is
        no block. They have no gradient.
      offset: the place of the first query.
      size: keys of a block. scale: that of the scores.
      implementation: as for `dispatch`; "triton" on a GPU.

    Returns:
      (B, T, N, V), 0 where a query sees nothing.
    """

    def attend(query, key, value, starts, offset):
        xla = functools.partial(_through_xla, size=size, scale=scale)
        backends = {"cuda": (_triton(query, key, value, size=size, scale=scale),)}
        return dispatch(
            "native_sparse_attention", implementation, backends, xla, query, key, value, starts, offset
        )

    queries, keys = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    offset = jnp.asarray(offset, jnp.int32)
    return shard_call(attend, (query, key, value, starts, offset), [queries, keys, keys, keys, ()], queries)


def _through_xla(
    query: Array, key: Array, value: Array, starts: Array, offset: Array, *, size: int, scale: float
) -> Array:
    kv_heads, keys = key.shape[2], key.shape[1]
    by_head = [jnp.moveaxis(x, 2, 1) for x in (key, value)]

    def attend(query: Array, starts: Any, offset: Any) -> Array:
        batch, length, heads, head_dim = query.shape
        positions = offset + jnp.arange(length, dtype=jnp.int32)
        places = starts[..., None] + jnp.arange(size, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
        seen = (places <= positions.reshape(1, -1, 1, 1, 1)).reshape(batch, length, kv_heads, -1)
        places = jnp.clip(places.reshape(seen.shape), 0, keys - 1)
        # (B, K, S, F) at the places: (B, T, K, P, F).
        chosen_key, chosen_value = (
            jax.vmap(jax.vmap(lambda x, at: x[at], (0, 1), 1))(x, places) for x in by_head
        )
        rows = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("btkgh,btkph->btkgp", rows, chosen_key, preferred_element_type=jnp.float32)
        weights = softmax_weights(scores * scale, seen[:, :, :, None]).astype(value.dtype)
        out = jnp.einsum("btkgp,btkpv->btkgv", weights, chosen_value, preferred_element_type=jnp.float32)
        return out.reshape(batch, length, heads, -1)

    return by_query_blocks(attend, _QUERY_BLOCK, query, starts, offset)


def _triton(query: Array, key: Array, value: Array, *, size: int, scale: float) -> Backend:
    """The GPU kernel for operands (query, key, value, starts, offset)."""

    # Triton is imported where it is needed: it costs import time.
    def obstacle() -> str | None:
        from pallas_kernels import gpu

        if value.shape[3] != key.shape[3]:
            return f"value must have the head_dim of key, {key.shape[3]}, got {value.shape[3]}"
        return gpu.selected_obstacle(query, key)

    def run(query, key, value, starts, offset, *, interpret):
        from pallas_kernels import gpu

        gpu.check_interpretation(interpret)
        positions = offset + jnp.arange(query.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, query.shape[:2])
        return gpu.selected_attention(query, key, value, starts, positions, size=size, scale=scale)

    return Backend("triton", run, obstacle)
