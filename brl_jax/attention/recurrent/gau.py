"""The attention of gated attention units: squared ReLU in place of the softmax (Hua et al. 2022, arXiv 2202.10447)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.arguments import zero_padding
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import require
from brl_jax.attention.recurrent.chunks import (
    Sight,
    check_chunked_call,
    check_runs,
    check_state,
    group_rows,
    heads_first,
    scan_chunks,
    token_runs,
    ungroup_rows,
)


class GauState(NamedTuple):
    """What `gau_attention` knows of the tokens so far: all of them.

    Attributes:
      key, value: in the order of the tokens, then room for more.
      length: how many tokens each row has had.
    """

    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K V"]
    length: Int[Array, "B"]


def init_gau_state(
    batch: int, length: int, num_kv_heads: int, head_dim: int, value_dim: int, *, dtype: Any = jnp.float32
) -> GauState:
    """The state of `gau_attention` before the first of up to `length` tokens; dtype is the keys' and values'."""
    return GauState(
        jnp.zeros((batch, length, num_kv_heads, head_dim), dtype),
        jnp.zeros((batch, length, num_kv_heads, value_dim), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


def gau_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: PositionBias | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: GauState | None = None,
    return_state: bool = False,
    chunk_size: int = 128,
    implementation: str | None = None,
) -> Any:
    """out_i = sum_j ReLU(q_i . k_j / n_i + b_ij)^2 v_j, with n_i the number of keys that query i sees.

    2202.10447 section 3.1, whose n is the length of the sequence: counted so, it says nothing of later tokens, of
    padding or of other sequences of the row. O(T S) time, and O(chunk_size S) memory.

    Args:
      query, key, value: as for `linear_attention`.
      bias: a `PositionBias`, b.
      is_causal: query i sees the keys up to its own.
      key_value_seq_lengths, segment_ids, implementation: as for `linear_attention`.
      state: from `init_gau_state` or from the tokens before these (causal only, without segment_ids).
      return_state: return (out, state), with the state after these tokens; needs a state, whose length is the limit.
      chunk_size: queries that are computed at once; it changes time and memory but not the result.

    Returns:
      (B, T, N, V) in query's dtype, computed in float32; with return_state, that and a `GauState`.

    Raises:
      ValueError: arrays, lengths, segments, a bias, a state or sizes that don't fit, naming the argument.
    """
    check_chunked_call(
        query, key, value, is_causal=is_causal, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    check_position_bias(bias, query.shape[2])
    lengths, segments = check_runs(query, key, key_value_seq_lengths, segment_ids)
    key, value = zero_padding(key, lengths), zero_padding(value, lengths)
    query = zero_padding(query, lengths) if is_causal else query
    batch, length = query.shape[:2]
    key_runs = token_runs(batch, key.shape[1], lengths, segments)
    query_runs = None if segments is None else token_runs(batch, length, None, segments)
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if return_state or state is not None:
        require(
            state is not None, "state must be given where return_state is: its length bounds the sequence's"
        )
        require(segments is None, "segment_ids must be None with a state, which holds one sequence")
        state = _append(state, key, value, lengths)
        places = (
            places + (state.length - (length if lengths is None else jnp.minimum(lengths, length)))[:, None]
        )
        key, value = state.key, state.value
        key_runs = token_runs(batch, key.shape[1], state.length, None)

    keys, values = heads_first(key), heads_first(value)
    key_places = jnp.arange(key.shape[1], dtype=jnp.int32)

    def step(_: Any, chunk: Any, sight: Sight) -> tuple[Any, Array]:
        rows = group_rows(chunk["query"], keys.shape[1])
        seen = jnp.ones((1, chunk["query"].shape[1], key.shape[1]), bool)
        if key_runs is not None:
            seen = seen & (key_runs >= 0)[:, None]
        if is_causal:
            seen = seen & (key_places[None, None] <= chunk["places"][..., None])
        if chunk["runs"] is not None and key_runs is not None:
            seen = seen & (key_runs[:, None] == chunk["runs"][..., None])
        scores = jnp.einsum("bkrf,bksf->bkrs", rows, keys)
        count = jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1).astype(scores.dtype)
        places = jnp.broadcast_to(key_places, key.shape[:2])
        own_bias = call_bias(bias, chunk["places"], places, each_row=state is not None)
        weights = squared_relu(scores, seen, 1 / count, own_bias)
        out = jnp.einsum("bkrs,bksv->bkrv", weights, values)
        return None, ungroup_rows(out, chunk["query"].shape[1]).astype(query.dtype)

    inputs = {"query": query, "places": places, "runs": query_runs}
    _, out = scan_chunks(step, None, inputs, chunk_size=chunk_size)
    return (out, state) if return_state else out


def _append(state: Any, key: Array, value: Array, lengths: Array | None) -> GauState:
    """The state with the existing ones of the new tokens written behind the old ones."""
    batch, length, kv_heads, head_dim = key.shape
    require(
        isinstance(state, GauState),
        f"state must be a GauState from gau_attention, got {type(state).__name__}",
    )
    room = state.key.shape[1]
    check_state(
        state,
        init_gau_state(batch, room, kv_heads, head_dim, value.shape[3], dtype=key.dtype),
        "gau_attention",
    )
    require(length <= room, f"state must have room for {length} tokens, got room for {room}")
    # Tokens that don't exist are written nowhere: their slots lie past the end and are dropped.
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    slots = state.length[:, None] + steps
    count = jnp.full((batch,), length, jnp.int32) if lengths is None else jnp.minimum(lengths, length)
    slots = jnp.where(steps < count[:, None], slots, room)
    rows = jnp.arange(batch)[:, None]
    return GauState(
        state.key.at[rows, slots].set(key, mode="drop"),
        state.value.at[rows, slots].set(value, mode="drop"),
        state.length + count,
    )


def check_position_bias(bias: Any, heads: int) -> None:
    """Raises ValueError unless the bias is None or a `PositionBias` of that many heads."""
    if bias is None:
        return
    require(isinstance(bias, PositionBias), f"bias must be None or a PositionBias, got {type(bias).__name__}")
    place = jax.ShapeDtypeStruct((1,), jnp.int32)
    given = jax.eval_shape(bias, place, place).shape[0]
    require(given == heads, f"bias must be of query's {heads} heads, got one of {given}")


def call_bias(
    bias: PositionBias | None, query_places: Int[Array, "B C"], key_places: Int[Array, "B S"], each_row: bool
) -> Float[Array, "#B N C S"] | None:
    """The bias of positions; computed once for all rows unless they stand at different places."""
    if bias is None:
        return None
    if each_row:
        return jax.vmap(bias)(query_places, key_places)
    return bias(query_places[0], key_places[0])[None]


def squared_relu(
    scores: Float[Array, "B K G*C S"],
    seen: Bool[Array, "#B C #S"],
    scale: Float[Array, "#B #C 1"],
    bias: Float[Array, "#B N C S"] | None,
) -> Float[Array, "B K G*C S"]:
    """ReLU(scale scores + bias)^2 where the key is seen, else 0."""
    batch, kv_heads, _, keys = scores.shape
    logits = scores.reshape(batch, kv_heads, -1, seen.shape[1], keys) * scale[:, None, None].astype(
        scores.dtype
    )
    if bias is not None:
        logits = logits + bias.reshape(bias.shape[0], kv_heads, -1, *bias.shape[2:]).astype(scores.dtype)
    weights = jnp.square(jax.nn.relu(logits))
    return jnp.where(seen[:, None, None], weights, jnp.zeros((), scores.dtype)).reshape(scores.shape)
