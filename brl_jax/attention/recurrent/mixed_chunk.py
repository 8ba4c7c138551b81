"""Mixed-chunk attention: squared ReLU inside a chunk, linear attention between chunks (FLASH, Hua et al. 2022).

FLASH is the model of arXiv:2202.10447; it is unrelated to the FlashAttention kernels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import check_qkv, require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.state import check_state
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.chunk_pieces import ChunkToken, align_prompt, read_new
from brl_jax.attention.recurrent.chunk_scan import ChunkVisibility, Recurrence, scan_chunks
from brl_jax.attention.recurrent.prefix_states import states_before
from brl_jax.attention.recurrent.rows import group_rows, heads_first, ungroup_rows, zero_unless
from brl_jax.attention.recurrent.squared_relu import check_position_bias, position_bias, squared_relu
from brl_jax.fields import Count, declared


class MixedChunkState(NamedTuple):
    """What `mixed_chunk_attention` keeps of the tokens so far.

    Attributes:
      linear: the sum of linear_key value^T / chunk_size over the completed chunks.
      key, linear_key, value: the current chunk's tokens, at their positions in the chunk.
      length: the number of tokens so far in each row.
    """

    linear: Float[Array, "B K H V"]
    key: Float[Array, "B C K H"]
    linear_key: Float[Array, "B C K H"]
    value: Float[Array, "B C K V"]
    length: Int[Array, "B"]


@declared
def init_mixed_chunk_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    chunk_size: Count = 256,
    dtype: DTypeLike = jnp.float32,
) -> MixedChunkState:
    """Returns the state of `mixed_chunk_attention` before the first token.

    Args:
      chunk_size: C, as in the calls.
      dtype: of keys and values; sums are float32.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    keys = (batch, chunk_size, num_kv_heads, head_dim)
    return MixedChunkState(
        jnp.zeros((batch, num_kv_heads, head_dim, value_dim), jnp.float32),
        jnp.zeros(keys, dtype),
        jnp.zeros(keys, dtype),
        jnp.zeros((batch, chunk_size, num_kv_heads, value_dim), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


@attention_function
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
    chunk_size: Count = 256,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], MixedChunkState]:
    """Squared-ReLU attention inside chunks of C tokens and linear attention between them, in O(T C) time.

    (B, T, N, H), (B, T, K, H), (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        arrays = (query, key, linear_query, linear_key, value)
        out = mixed_chunk_attention(*arrays, chunk_size=256, is_causal=True)

    out_i is the sum of ReLU(q_i . k_j / C + b_ij)^2 v_j over the keys of i's chunk (up to i if causal), and of
    (lq_i . lk_j / C) v_j over the keys of earlier chunks if causal, else over all keys: Hua et al. 2022,
    arXiv:2202.10447, section 3.2, eqs. 6-8.

    Args:
      query, key: (B, T, N, H) and (B, T, K, H), for the part inside chunks; K divides N.
      linear_query, linear_key: lq and lk of the same shapes, for the part between chunks.
      value: (B, T, K, V), for both parts.
      bias: b, a `PositionBias` that depends on relative positions.
      is_causal: as above.
      key_value_seq_lengths: as for `linear_attention`.
      state, return_state: as for `linear_attention`, with a `MixedChunkState` for the same chunk_size.
      chunk_size: C, which changes the result; chunks are counted from the first token of the sequence.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths, state=state,
        return_state=return_state, implementation=implementation, same_tokens=True,
    )  # fmt: skip
    check_qkv(linear_query, linear_key, value, ("linear_query", "linear_key", "value"))
    for name, array, like in (("linear_query", linear_query, query), ("linear_key", linear_key, key)):
        require(
            array.shape == like.shape and array.dtype == like.dtype,
            f"{name} must be {like.dtype} of shape {like.shape}, got {array.dtype} of shape {array.shape}",
        )
    check_position_bias(bias, query.shape[2])
    inputs = {
        "query": prepared.query,
        "key": prepared.key,
        "linear_query": zero_padding(linear_query, prepared.lengths),
        "linear_key": zero_padding(linear_key, prepared.lengths),
        "value": prepared.value,
    }
    if state is None and not return_state:
        return _whole_sequence(inputs, prepared.segments, bias, is_causal, chunk_size)[1]
    sizes = (query.shape[0], *key.shape[2:], value.shape[3])
    state = check_state(state, init_mixed_chunk_state, *sizes, chunk_size=chunk_size, dtype=key.dtype)

    prompt = functools.partial(_prompt, bias, chunk_size)
    state, out = read_new(functools.partial(_token, bias), prompt, state, inputs, prepared.segments)
    return (out, state) if return_state else out


def _prompt(
    bias: PositionBias | None,
    chunk_size: int,
    state: MixedChunkState,
    inputs: dict[str, Array],
    segments: Int[Array, "B T"] | None,
) -> tuple[MixedChunkState, Float[Array, "B T N V"]]:
    """Many new tokens, moved behind the current chunk, so that their chunks are the chunks of the sequence."""
    prompt = align_prompt(state.length, inputs["key"].shape[1], segments, chunk_size)
    aligned = {name: prompt.move(x, getattr(state, name, None)) for name, x in inputs.items()}
    key, linear_key, value = (
        prompt.unfinished_chunk(aligned[name]) for name in ("key", "linear_key", "value")
    )
    # Only completed chunks enter the sum, so that no query reads its chunk's keys from it.
    aligned["linear_key"] = zero_unless(prompt.places < prompt.complete, aligned["linear_key"])
    exists = jnp.where(prompt.places < prompt.total, 0, -1)
    linear, out = _whole_sequence(aligned, exists, bias, True, chunk_size, state.linear)
    state = MixedChunkState(linear, key, linear_key, value, state.length + prompt.new[:, 0])
    return state, prompt.restore(out)


def _whole_sequence(
    inputs: dict[str, Array],
    segments: Int[Array, "B T"] | None,
    bias: PositionBias | None,
    is_causal: bool,
    chunk_size: int,
    linear: Float[Array, "B K H V"] | None = None,
) -> tuple[Float[Array, "B K H V"], Float[Array, "B T N V"]]:
    """A sequence that starts with a chunk's first token, so that the scan's chunks are the sequence's.

    `linear` is the sum over earlier chunks; the first result is that sum after the sequence.
    """
    query, value = inputs["query"], inputs["value"]
    length = min(chunk_size, query.shape[1])
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    chunk_bias = position_bias(bias, positions, positions, each_row=False)

    def add_to_state(linear: Array, chunk: Any, exists: Array | None) -> Array:
        key, value = heads_first(zero_unless(exists, chunk["linear_key"])), heads_first(chunk["value"])
        return linear + jnp.einsum("bkcf,bkcv->bkfv", key, value) / chunk_size

    def step(linear: Array, chunk: Any, visibility: ChunkVisibility) -> tuple[Array, Array]:
        kv_heads = chunk["key"].shape[2]
        rows = group_rows(chunk["query"], kv_heads)
        scores = jnp.einsum("bkrf,bkcf->bkrc", rows, heads_first(chunk["key"]))
        seen = visibility.pairs
        if not is_causal:
            seen = jnp.ones_like(seen)
            if visibility.enters_state is not None:
                seen = seen & visibility.enters_state[:, None]
        scale = jnp.full((1, 1, 1), 1 / chunk_size)
        weights = squared_relu(scores, seen, scale, chunk["bias"])
        out = jnp.einsum("bkrc,bkcv->bkrv", weights, heads_first(chunk["value"]))
        out = out + jnp.einsum("bkrf,bkfv->bkrv", group_rows(chunk["linear_query"], kv_heads), linear)
        if is_causal:
            linear = add_to_state(linear, chunk, visibility.enters_state)
        return linear, ungroup_rows(out, length).astype(query.dtype)

    def summarize(chunk: Any, visibility: ChunkVisibility) -> Array:
        fresh = jnp.zeros(zeros.shape, zeros.dtype)
        return add_to_state(fresh, chunk, visibility.enters_state) if is_causal else fresh

    def join(earlier: Array, later: Array, keeps: Any) -> Array:
        return earlier + later  # each row is one sequence, so its past is always kept

    kv_heads, head_dim = inputs["key"].shape[2:]
    zeros = jnp.zeros((query.shape[0], kv_heads, head_dim, value.shape[3]), jnp.float32)
    linear = zeros if linear is None else linear
    if not is_causal:
        linear = add_to_state(linear, inputs, None if segments is None else segments >= 0)
    recurrence = Recurrence(summarize, functools.partial(states_before, join, join), join)
    whole = {"bias": chunk_bias}
    return scan_chunks(
        step, linear, inputs, segments, whole=whole, chunk_size=chunk_size, recurrence=recurrence
    )


def _token(
    bias: PositionBias | None, state: MixedChunkState, new: dict[str, Array], visibility: ChunkVisibility
) -> tuple[MixedChunkState, Float[Array, "B 1 N V"]]:
    """One new token, anywhere in a chunk."""
    chunk_size, kv_heads = state.key.shape[1:3]
    place = ChunkToken.of(state.length, visibility.enters_state, chunk_size)
    slots = [place.put(getattr(state, name), new[name]) for name in ("key", "linear_key", "value")]
    key, linear_key, value = map(heads_first, slots)
    places = jnp.broadcast_to(jnp.arange(chunk_size, dtype=jnp.int32), (len(place.place), chunk_size))
    own_bias = position_bias(bias, place.place[:, None], places, each_row=True)
    scores = jnp.einsum("bkrf,bksf->bkrs", group_rows(new["query"], kv_heads), key)
    weights = squared_relu(scores, place.sees(chunk_size), jnp.full((1, 1, 1), 1 / chunk_size), own_bias)
    out = jnp.einsum("bkrs,bksv->bkrv", weights, value)
    out = out + jnp.einsum("bkrf,bkfv->bkrv", group_rows(new["linear_query"], kv_heads), state.linear)

    added = jnp.einsum("bksf,bksv->bkfv", linear_key, value) / chunk_size
    linear = state.linear + zero_unless(place.completes, added)
    length = state.length + place.exists.astype(jnp.int32)
    kept_key, kept_linear_key, kept_value = map(place.kept, slots)
    state = MixedChunkState(linear, kept_key, kept_linear_key, kept_value, length)
    return state, ungroup_rows(out, 1).astype(new["query"].dtype)
