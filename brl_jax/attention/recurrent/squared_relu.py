"""Squared ReLU instead of softmax, over all pairs of queries and keys, in JAX operations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.checks import is_int, require
from brl_jax.attention.recurrent.chunk_scan import ChunkVisibility, scan_chunks
from brl_jax.attention.recurrent.rows import group_rows, heads_first, ungroup_rows

# Scores that a GPU computes at once: 256 MiB in float32.
_GPU_SCORES = 2**26


def attend_pairs(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: PositionBias | None,
    query_positions: Int[Array, "B T"],
    query_segments: Int[Array, "B T"] | None,
    key_segments: Int[Array, "B S"] | None,
    *,
    is_causal: bool,
    each_row: bool,
    chunk_size: int,
    divided: bool = False,
    dtype: DTypeLike | None = None,
) -> Float[Array, "B T N V"]:
    """sum_j ReLU(q_i . k_j / n_i + b_ij)^2 v_j, a block of queries at a time, in JAX operations.

    Args:
      query_positions: positions of the queries; the keys have positions 0 to S - 1.
      query_segments, key_segments: a query sees the keys of its segment; without query_segments, all keys whose
        segment is not negative; without key_segments, all keys.
      is_causal: query i sees only the keys up to its position.
      each_row: whether positions differ between rows.
      chunk_size: queries computed at once; a GPU may take more.
      divided: the caller has already divided by the number of visible keys, so n_i = 1.
      dtype: of the result; the query's by default.
    """
    dtype = query.dtype if dtype is None else dtype
    batch, length = query.shape[:2]
    keys, values = heads_first(key), heads_first(value)
    key_positions = jnp.arange(key.shape[1], dtype=jnp.int32)

    def step(_: Any, chunk: Any, visibility: ChunkVisibility) -> tuple[Any, Array]:
        rows = group_rows(chunk["query"], keys.shape[1])
        seen = jnp.ones((1, chunk["query"].shape[1], key.shape[1]), bool)
        if key_segments is not None:
            seen = seen & (key_segments >= 0)[:, None]
        if is_causal:
            seen = seen & (key_positions[None, None] <= chunk["positions"][..., None])
        if chunk["segments"] is not None and key_segments is not None:
            seen = seen & (key_segments[:, None] == chunk["segments"][..., None])
        scores = jnp.einsum("bkrf,bksf->bkrs", rows, keys)
        count = jnp.ones((1, 1, 1), scores.dtype)
        if not divided:
            count = jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1).astype(scores.dtype)
        scores_bias = position_bias(
            bias, chunk["positions"], jnp.broadcast_to(key_positions, key.shape[:2]), each_row=each_row
        )
        weights = squared_relu(scores, seen, 1 / count, scores_bias)
        out = jnp.einsum("bkrs,bksv->bkrv", weights, values)
        return None, ungroup_rows(out, chunk["query"].shape[1]).astype(dtype)

    def attend(queries: int, inputs: Any) -> Array:
        return scan_chunks(step, None, inputs, chunk_size=queries)[1]

    # Without its kernel a GPU takes all queries at once that fit into a bounded memory; short loops would spend
    # their time on launches.
    rows = batch if is_int(batch) else 1  # exported programs may have a symbolic batch
    most = max(chunk_size, _GPU_SCORES // (rows * query.shape[2] * key.shape[1]))
    # As in `by_query_blocks`, keep the compiler from making masks of all pairs before a scan over layers.
    query_positions, query_segments, _ = lax.optimization_barrier(
        (query_positions, query_segments, query[:1, :1])
    )
    inputs = {"query": query, "positions": query_positions, "segments": query_segments}
    if length <= chunk_size:
        return attend(chunk_size, inputs)
    many = functools.partial(attend, most)
    few = functools.partial(attend, chunk_size)
    return branches(inputs, cuda=many, rocm=many, default=few)


def check_position_bias(bias: Any, heads: int) -> None:
    """Raises ValueError unless the bias is missing or a `PositionBias` for this number of heads."""
    if bias is None:
        return
    require(isinstance(bias, PositionBias), f"bias must be None or a PositionBias, got {type(bias).__name__}")
    position = jax.ShapeDtypeStruct((1,), jnp.int32)
    given = jax.eval_shape(bias, position, position).shape[0]
    require(given == heads, f"bias must have query's {heads} heads, got one with {given}")


def position_bias(
    bias: PositionBias | None,
    query_positions: Int[Array, "#B C"],
    key_positions: Int[Array, "#B S"],
    each_row: bool,
) -> Float[Array, "#B N C S"] | None:
    """The bias at these positions: per row of the batch, or once if all rows agree."""
    if bias is None:
        return None
    if each_row:
        return jax.vmap(bias)(query_positions, key_positions)
    return bias(query_positions[0], key_positions[0])[None]


def squared_relu(
    scores: Float[Array, "B K R S"],
    seen: Bool[Array, "#B C S"],
    scale: Float[Array, "#B #C 1"],
    bias: Float[Array, "#B N C S"] | None,
) -> Float[Array, "B K R S"]:
    """ReLU(scale * scores + bias)^2 for visible keys, and 0 elsewhere."""
    batch, kv_heads, _, keys = scores.shape
    logits = scores.reshape(batch, kv_heads, -1, seen.shape[1], keys) * scale[:, None, None].astype(
        scores.dtype
    )
    if bias is not None:
        logits = logits + bias.reshape(bias.shape[0], kv_heads, -1, *bias.shape[2:]).astype(scores.dtype)
    weights = jnp.square(jax.nn.relu(logits))
    return jnp.where(seen[:, None, None], weights, jnp.zeros((), scores.dtype)).reshape(scores.shape)
