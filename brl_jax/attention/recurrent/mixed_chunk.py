"""Mixed-chunk attention: squared ReLU inside a chunk, linear attention between chunks (FLASH, Hua et al. 2022).

FLASH is the model of arXiv 2202.10447, and has nothing to do with the FlashAttention kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import zero_padding
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.recurrent.chunks import (
    Sight,
    check_chunked_call,
    check_runs,
    check_state,
    group_rows,
    heads_first,
    keep,
    piece_places,
    scan_chunks,
    token_runs,
    ungroup_rows,
)
from brl_jax.attention.recurrent.gau import call_bias, check_position_bias, squared_relu


class MixedChunkState(NamedTuple):
    """What `mixed_chunk_attention` knows of the tokens so far.

    Attributes:
      linear: sum of linear_key value^T / chunk_size over the chunks that are complete.
      key, linear_key, value: of the current chunk's tokens, in their places.
      length: how many tokens each row has had.
    """

    linear: Float[Array, "B K H V"]
    key: Float[Array, "B C K H"]
    linear_key: Float[Array, "B C K H"]
    value: Float[Array, "B C K V"]
    length: Int[Array, "B"]


def init_mixed_chunk_state(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    *,
    chunk_size: int = 256,
    dtype: Any = jnp.float32,
) -> MixedChunkState:
    """The state of `mixed_chunk_attention` before the first token; dtype is the keys' and values'."""
    keys = jnp.zeros((batch, chunk_size, num_kv_heads, head_dim), dtype)
    return MixedChunkState(
        jnp.zeros((batch, num_kv_heads, head_dim, value_dim), accumulation_dtype(dtype)),
        keys,
        keys,
        jnp.zeros((batch, chunk_size, num_kv_heads, value_dim), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


def mixed_chunk_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    linear_query: Float[Array, "B T N H"],
    linear_key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    bias: PositionBias | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: MixedChunkState | None = None,
    return_state: bool = False,
    chunk_size: int = 256,
    implementation: str | None = None,
) -> Any:
    """Chunks of C tokens that attend inside by squared ReLU and to each other linearly; O(T C) time and memory.

    out_i = sum_j ReLU(q_i . k_j / C + b_ij)^2 v_j over the keys of i's chunk (up to i where causal)
    + sum_j (lq_i . lk_j / C) v_j over the keys of strictly earlier chunks where causal, over all where not:
    2202.10447 section 3.2, eqs. 6-8.

    Args:
      query, key: (B, T, N, H) and (B, T, K, H), of the part inside chunks; K divides N.
      linear_query, linear_key: of the same shapes, of the part between chunks.
      value: (B, T, K, V), of both.
      bias: a `PositionBias` of relative positions, b.
      is_causal: as above.
      key_value_seq_lengths, implementation: as for `linear_attention`.
      state, return_state: likewise, with a `MixedChunkState`, made for the same chunk_size.
      chunk_size: C, counted from the first token of the sequence. It changes the result.

    Returns:
      (B, T, N, V) in query's dtype, computed in float32; with return_state, that and a `MixedChunkState`.

    Raises:
      ValueError: arrays, lengths, a bias, a state or sizes that don't fit, naming the argument.
    """
    check_chunked_call(
        query, key, value, is_causal=is_causal, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    check_qkv(linear_query, linear_key, value, ("linear_query", "linear_key", "value"))
    for name, array, like in (("linear_query", linear_query, query), ("linear_key", linear_key, key)):
        require(
            array.shape == like.shape and array.dtype == like.dtype,
            f"{name} must be {like.dtype} of shape {like.shape}, got {array.dtype} of shape {array.shape}",
        )
    require(
        query.shape[1] == key.shape[1], f"key must have query's length {query.shape[1]}, got {key.shape[1]}"
    )
    check_position_bias(bias, query.shape[2])
    lengths, _ = check_runs(query, key, key_value_seq_lengths, None)
    arrays = (query, key, linear_query, linear_key, value)
    names = ("query", "key", "linear_query", "linear_key", "value")
    inputs = {name: zero_padding(x, lengths) for name, x in zip(names, arrays)}
    runs = token_runs(query.shape[0], query.shape[1], lengths, None)
    if state is None and not return_state:
        return _whole(inputs, runs, bias, is_causal, chunk_size)
    kv_heads, head_dim = key.shape[2:]
    fresh = init_mixed_chunk_state(
        query.shape[0], kv_heads, head_dim, value.shape[3], chunk_size=chunk_size, dtype=key.dtype
    )
    state = check_state(state, fresh, "mixed_chunk_attention")

    def step(state: MixedChunkState, chunk: Any, sight: Sight) -> tuple[MixedChunkState, Array]:
        return _piece(chunk, state, sight, bias, chunk_size)

    state, out = scan_chunks(step, state, inputs, runs, chunk_size=chunk_size)
    return (out, state) if return_state else out


def _whole(inputs: Any, runs: Any, bias: PositionBias | None, is_causal: bool, chunk_size: int) -> Array:
    """A sequence from its start on: the loop's chunks are the sequence's."""
    query, value = inputs["query"], inputs["value"]
    length = min(chunk_size, query.shape[1])
    places = jnp.arange(length, dtype=jnp.int32)[None]
    scale = jnp.full((1, 1, 1), 1 / chunk_size)
    own_bias = call_bias(bias, places, places, each_row=False)

    def enter(linear: Array, chunk: Any, exists: Array | None) -> Array:
        key = keep(exists, chunk["linear_key"])
        return (
            linear + jnp.einsum("bkcf,bkcv->bkfv", heads_first(key), heads_first(chunk["value"])) / chunk_size
        )

    def step(linear: Array, chunk: Any, sight: Sight) -> tuple[Array, Array]:
        kv_heads = chunk["key"].shape[2]
        rows = group_rows(chunk["query"], kv_heads)
        scores = jnp.einsum("bkrf,bkcf->bkrc", rows, heads_first(chunk["key"]))
        seen = sight.pairs
        if not is_causal:
            seen = (
                jnp.ones_like(seen) if sight.enters is None else sight.enters[:, None] & jnp.ones_like(seen)
            )
        weights = squared_relu(scores, seen, scale, own_bias)
        out = jnp.einsum("bkrc,bkcv->bkrv", weights, heads_first(chunk["value"]))
        out = out + jnp.einsum("bkrf,bkfv->bkrv", group_rows(chunk["linear_query"], kv_heads), linear)
        if is_causal:
            linear = enter(linear, chunk, sight.enters)
        return linear, ungroup_rows(out, length).astype(query.dtype)

    kv_heads, head_dim = inputs["key"].shape[2:]
    linear = jnp.zeros((query.shape[0], kv_heads, head_dim, value.shape[3]), accumulation_dtype(query.dtype))
    if not is_causal:
        linear = enter(linear, inputs, None if runs is None else runs >= 0)
    return scan_chunks(step, linear, inputs, runs, chunk_size=chunk_size)[1]


def _piece(
    piece: Any, state: MixedChunkState, sight: Sight, bias: PositionBias | None, chunk_size: int
) -> tuple[MixedChunkState, Array]:
    """At most chunk_size tokens from anywhere in a chunk on: they lie in that chunk and perhaps the next one."""
    batch, length, kv_heads = piece["key"].shape[:3]
    places = piece_places(state.length % chunk_size, length, sight.enters, chunk_size)
    key, linear_key, value = (
        jnp.concatenate([getattr(state, name), piece[name]], axis=1)
        for name in ("key", "linear_key", "value")
    )
    earlier = places.key[:, None] // chunk_size < places.query[..., None] // chunk_size
    earlier = places.there[:, None] & earlier

    own_bias = call_bias(bias, places.query, places.key, each_row=True)
    scores = jnp.einsum("bkrf,bksf->bkrs", group_rows(piece["query"], kv_heads), heads_first(key))
    scale = jnp.full((1, 1, 1), 1 / chunk_size)
    weights = squared_relu(scores, places.inside(chunk_size), scale, own_bias)
    linear_rows = group_rows(piece["linear_query"], kv_heads)
    linear_keys, values = heads_first(linear_key), heads_first(value)
    between = jnp.einsum("bkrf,bksf->bkrs", linear_rows, linear_keys) / chunk_size
    between = between.reshape(batch, kv_heads, -1, *earlier.shape[1:])
    between = jnp.where(earlier[:, None, None], between, jnp.zeros((), between.dtype)).reshape(weights.shape)
    out = jnp.einsum("bkrs,bksv->bkrv", weights + between, values)
    out = out + jnp.einsum("bkrf,bkfv->bkrv", linear_rows, state.linear)

    completed = keep(places.completed(chunk_size)[:, None], linear_keys)
    linear = state.linear + jnp.einsum("bksf,bksv->bkfv", completed, values) / chunk_size
    current_key, current_linear_key, current_value = (
        places.current(getattr(state, name), piece[name]) for name in ("key", "linear_key", "value")
    )
    state = MixedChunkState(linear, current_key, current_linear_key, current_value, state.length + places.new)
    return state, ungroup_rows(out, length).astype(piece["query"].dtype)
