"""Squared ReLU in place of the softmax, over all pairs of queries and keys, in JAX operations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from brl_jax.attention.core.arguments import is_int
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.checks import require
from brl_jax.attention.recurrent.chunk_scan import ChunkVisibility, scan_chunks
from brl_jax.attention.recurrent.rows import group_rows, heads_first, ungroup_rows

# Scores that a GPU computes at once; 256 MiB in float32.
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
    """sum_j ReLU(q_i . k_j / n_i + b_ij)^2 v_j, piece by piece of the queries, in JAX operations.

    Args:
      query_positions, query_segments, key_segments: the keys have the positions 0 to S - 1; a query sees the keys of
        its segment, of any segment that is not negative where query_segments is None, or all.
      is_causal: query i sees the keys up to its position.
      each_row: whether the positions differ from row to row.
      chunk_size: queries that are computed at once, at least that on a GPU.
      divided: n_i is 1, not the number of the keys that the query sees: the caller has divided it.
      dtype: of the result; None for the query's.
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

    # Without its kernel a GPU takes as many queries at once as a bounded memory holds: its time would go into the
    # launches of short loops.
    rows = batch if is_int(batch) else 1  # an exported program may leave the batch open
    most = max(chunk_size, _GPU_SCORES // (rows * query.shape[2] * key.shape[1]))
    # As in `by_query_blocks`: masks of all pairs must not be made before a scan over layers.
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
    """Raises ValueError unless the bias is None or a `PositionBias` for this number of heads."""
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
    """The bias at these positions: for each row of the batch, or once for all rows, which then agree."""
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
    """ReLU(scale * scores + bias)^2 for the visible keys, and 0 for the others."""
    batch, kv_heads, _, keys = scores.shape
    logits = scores.reshape(batch, kv_heads, -1, seen.shape[1], keys) * scale[:, None, None].astype(
        scores.dtype
    )
    if bias is not None:
        logits = logits + bias.reshape(bias.shape[0], kv_heads, -1, *bias.shape[2:]).astype(scores.dtype)
    weights = jnp.square(jax.nn.relu(logits))
    return jnp.where(seen[:, None, None], weights, jnp.zeros((), scores.dtype)).reshape(scores.shape)
