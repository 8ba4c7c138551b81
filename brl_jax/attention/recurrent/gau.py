"""The attention of gated attention units: squared ReLU instead of softmax (Hua et al. 2022, arXiv:2202.10447)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

import pallas_kernels as kernels
from brl_jax.attention.core.biases import PositionBias, RotaryBias
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Backend, Implementation, dispatch, triton_backend
from brl_jax.attention.core.state import check_state, write_places
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.chunk_scan import segment_numbers
from brl_jax.attention.recurrent.gau_sharded import gau_on_mesh, ring_axis
from brl_jax.attention.recurrent.seen_ranges import score_factors, seen_ranges
from brl_jax.attention.recurrent.squared_relu import attend_pairs, check_position_bias
from brl_jax.fields import Count, declared


class GAUState(NamedTuple):
    """What `gau_attention` keeps of the tokens so far: all keys and values.

    Attributes:
      key, value: keys and values in the order of the tokens, with capacity for L tokens.
      length: the number of tokens so far in each row.
    """

    key: Float[Array, "B L K H"]
    value: Float[Array, "B L K V"]
    length: Int[Array, "B"]


@declared
def init_gau_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    length: Count,
    dtype: DTypeLike = jnp.float32,
) -> GAUState:
    """Returns the state of `gau_attention` before the first of up to `length` tokens.

    Args:
      dtype: of keys and values.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    return GAUState(
        jnp.zeros((batch, length, num_kv_heads, head_dim), dtype),
        jnp.zeros((batch, length, num_kv_heads, value_dim), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


@attention_function
def gau_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    bias: PositionBias | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: GAUState | None = None,
    return_state: bool = False,
    chunk_size: Count = 128,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], GAUState]:
    """Attention with squared ReLU instead of softmax, in O(T S) time and O(chunk_size S) memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = gau_attention(query, key, value, is_causal=True)

      out_i = sum_j ReLU(q_i . k_j / n_i + b_ij)^2 v_j, where n_i is the number of keys that query i sees

    Hua et al. 2022, arXiv:2202.10447, section 3.1, where n is the length of the sequence. Counting only visible
    keys makes the result independent of later tokens, of padding and of other sequences in the row.

    Args:
      query, key, value: as for `linear_attention`.
      bias: b, a `PositionBias`.
      is_causal: query i sees only the keys up to i.
      key_value_seq_lengths, segment_ids: as for `linear_attention`.
      state: from `init_gau_state` or an earlier call; causal only, without segment_ids.
      return_state: also return the state after these tokens; needs a state, which limits the number of tokens.
      chunk_size: queries computed at once (a GPU may take more); changes time and memory, not the result.
      implementation: None uses the Triton kernel on a GPU if it supports the call (bias None or a `RotaryBias`,
        more than chunk_size queries), else XLA. "xla", "triton" and "triton_interpret" as for `local_attention`.

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
      NotImplementedError: implementation="triton", but the kernel does not support the call.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids, state=state, return_state=return_state,
        implementation=implementation, dispatched=True,
    )  # fmt: skip
    check_position_bias(bias, query.shape[2])
    query, key, value, key_segments = prepared.query, prepared.key, prepared.value, prepared.segments
    batch, length = query.shape[:2]
    query_segments = (
        segment_numbers(batch, length, None, jnp.asarray(segment_ids)) if prepared.packed else None
    )
    query_positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if return_state or state is not None:
        require(not prepared.packed, "segment_ids must be None with a state, which holds one sequence")
        state_before = _check_gau_state(state, key, value, prepared.lengths)
        query_positions = query_positions + state_before.length[:, None]
        state = _append(state_before, key, value, prepared.lengths)
        key, value = state.key, state.value
        key_segments = segment_numbers(batch, key.shape[1], state.length, None)
    elif (axis := ring_axis(query, key, bias, is_causal, implementation)) is not None:
        return gau_on_mesh(
            axis, query, key, value, bias, query_positions, query_segments, key_segments,
            is_causal=is_causal, chunk_size=chunk_size,
        )  # fmt: skip

    static: dict[str, Any] = {"is_causal": is_causal, "each_row": state is not None, "chunk_size": chunk_size}
    # A few queries, as in a decoding step, take few kernels anyway.
    kernel = _gau_backend(is_causal=is_causal, unsuited=length <= chunk_size)
    out = dispatch(
        "gau_attention", implementation, {"cuda": [kernel]}, functools.partial(attend_pairs, **static),
        query, key, value, bias, query_positions, query_segments, key_segments, cost="quadratic",
        results=jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
    )  # fmt: skip
    return out if state is None or not return_state else (out, state)


def _check_gau_state(state: Any, key: Array, value: Array, lengths: Array | None) -> GAUState:
    """Returns the state; raises ValueError unless it fits the new keys and values. Only `lengths` of them are valid."""
    if state is None:
        raise ValueError("return_state needs a state, which determines the largest number of tokens")
    batch, length, kv_heads, head_dim = key.shape
    room = state.key.shape[1]
    sizes = (batch, kv_heads, head_dim, value.shape[3])
    check_state(state, init_gau_state, *sizes, length=room, dtype=key.dtype)
    fits = lengths is not None or length <= room
    require(fits, f"state must have room for {length} tokens, got room for {room}")
    return state


def _append(state: GAUState, key: Array, value: Array, lengths: Array | None) -> GAUState:
    """The state with the valid new tokens appended."""
    batch, length = key.shape[:2]
    room = state.key.shape[1]
    # Padding goes to a slot past the end, where nothing is written.
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    count = jnp.full((batch,), length, jnp.int32) if lengths is None else jnp.minimum(lengths, length)
    slots = jnp.where(steps < count[:, None], state.length[:, None] + steps, room)
    return GAUState(
        write_places(state.key, key, slots),
        write_places(state.value, value, slots),
        state.length + count,
    )


def _gau_backend(*, is_causal: bool, unsuited: bool) -> Backend:
    """The Triton kernel for operands (query, key, value, bias, positions, segments, key_segments)."""

    def unsupported(query, key, value, bias: PositionBias | None, *_) -> str | None:
        width = query.shape[3]
        if bias is not None:
            if not isinstance(bias, RotaryBias):
                return f"bias must be None or a RotaryBias, got {type(bias).__name__}"
            if key.shape[2] != query.shape[2]:
                return (
                    f"a bias needs as many key heads as query heads, got {key.shape[2]} and {query.shape[2]}"
                )
            width += bias.left.shape[-1]
        rows, columns = (jax.ShapeDtypeStruct((*x.shape[:3], width), x.dtype) for x in (query, key))
        return kernels.triton.squared_relu_unsupported(rows, columns, value)

    def run(query, key, value, bias, positions, segments, key_segments):
        ranges = seen_ranges(positions, segments, key_segments, key.shape[:2], is_causal)
        # float16 would lose small scores.
        dtype = jnp.float32 if query.dtype == jnp.float16 else query.dtype
        rows, columns = (x.astype(dtype) for x in score_factors(query, key, bias, positions, ranges))
        out = kernels.triton.squared_relu_attention(
            rows, columns, value.astype(dtype), kernels.triton.Ranges(*ranges)
        )
        return out.astype(query.dtype)

    return triton_backend(run, unsupported, unsuited)
