"""Local attention: exact softmax attention over a sparse pattern, at linear cost and without a (T, S) array.

The queries are cut into blocks. Each block visits only the keys that its pattern can reach (`parts.py`), and a mask
computed from positions hides those that a query does not see.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import (
    check_bias,
    check_dtypes,
    check_lengths,
    check_mask,
    check_offset,
    check_qkv,
    check_scale,
    check_segments,
    check_sinks,
    require,
)
from brl_jax.attention.core.decorators import batch_optional, divided
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.local import sharded
from brl_jax.attention.local.attend import attend
from brl_jax.attention.local.generation import LocalState, continue_from
from brl_jax.attention.local.patterns import CallArrays, Dilated, Pattern, PatternCall, SlidingWindow
from brl_jax.fields import Natural, Positive
from pallas_kernels.absent import mark_absent


@overload
def local_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    local_window_size: int | tuple[int, int] | None = None, pattern: Pattern | None = None, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None, query_offset: int | Array = 0,
    key_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    state: LocalState | None = None, return_state: Literal[False] = False,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> Array: ...  # fmt: skip


@overload
def local_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    local_window_size: int | tuple[int, int] | None = None, pattern: Pattern | None = None, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None, query_offset: int | Array = 0,
    key_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    state: LocalState | None = None, return_state: Literal[False] = False,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def local_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    local_window_size: int | tuple[int, int] | None = None, pattern: Pattern | None = None, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None, query_offset: int | Array = 0,
    key_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    state: LocalState | None = None, return_state: Literal[True],
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> tuple[Array, LocalState]: ...  # fmt: skip


@batch_optional
@divided(sharded.cut)
def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: PositionBias | Float[Array, " ..."] | None = None,
    mask: Bool[Array, " ..."] | None = None,
    *,
    local_window_size: Natural | tuple[Natural, Natural] | None = None,
    pattern: Pattern | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    key_offset: int | Int[Array, ""] = 0,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: Positive | None = None,
    state: LocalState | None = None,
    return_state: bool = False,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"] | LocalState]:
    """Softmax attention in which each query sees only nearby keys, or another sparse pattern; O(n w) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = local_attention(query, key, value, local_window_size=(255, 0), is_causal=True)

    out_i = sum_j p_ij v_j, where p_i is the softmax of scale q_i . k_j + bias_ij over the visible keys j:
    BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), eq. 1. A window as wide as the sequence is full attention.

    Arguments follow `jax.nn.dot_product_attention`. As there, a window size counts the keys on either side of the
    query's own. local_window_size=(2, 1) lets query 4 see keys 2 to 5::

        key       0 1 2 3 4 5 6 7
        query 4   . . x x x x . .       with is_causal: . . x x x . . .

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16. The batch axis may be absent from all arrays.
      key: (B, S, K, H) in query's dtype; K divides N, and query head n reads key head n // (N / K).
      value: (B, S, K, V) in query's dtype. Where V differs from H, the narrower arrays are padded to the wider ones.
      bias: added to the scaled scores, and differentiable: an array that broadcasts to (B, N, T, S), or a
        `PositionBias`, which computes the bias of one block at a time from absolute positions.
      mask: bools that broadcast to (B, N, T, S); a query sees only keys where it is True. Not with a `PositionBias`.
      local_window_size: an int for both sides, or (left, right). Give either this or `pattern`.
      pattern: which keys a query sees, such as `Dilated`, `BigBird` or the papers' "window", `SlidingWindow.of_width`.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      is_causal: hides the keys after the query, whatever the window or pattern.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later queries and keys are padding, which may be NaN.
      segment_ids: int (B, T) if T = S, or a pair (B, T) and (B, S); a query sees only keys with its own id.
      query_offset: query i is at key index i + query_offset, as when older keys come before the queries' own; an int
        or a traced scalar. Traced, it needs a pattern of bounded reach, and the call takes the keys in reach alone.
      key_offset: absolute position of key 0, int or traced, for position biases and patterns with absolute boundaries.
      sinks: (N,) logits that join the softmax without a value (gpt-oss, arXiv:2508.10925): p_ij = exp(score_ij) /
        (exp(sink) + sum_j exp(score_ij)). They are neither scaled nor capped.
      logits_soft_cap: a positive number c; scores become c tanh(score / c) before bias and mask (Gemma 2,
        arXiv:2408.00118).
      state: the keys and values of earlier tokens, from `init_local_state` or an earlier call; for a causal window
        without other positions, bias, mask, lengths and segments. Any number of tokens may follow, such as one.
      return_state: also return the `LocalState` after these tokens.
      implementation: None picks by platform: "pallas" on a TPU; "cudnn", else "triton", on an NVIDIA GPU; "xla"
        elsewhere, for calls that the kernels do not support (with a warning; docs/gpu.md), and for fewer than 128
        queries on more keys. "pallas_interpret" and "triton_interpret" interpret the kernels.
      return_residual: also return the log-sum-exp of each query's scores. Unlike jax.nn's, it is differentiable.

    Returns:
      (B, T, N, V) in query's dtype, 0 for a query that sees no key; softmax runs in float32. With return_residual, also
      (B, T, N) in query's dtype: -inf, or the sink, for a query that sees no key.

    Raises:
      ValueError: arguments do not fit together.
      NotImplementedError: the named implementation does not support the call or the platform.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    pattern = _check_pattern(local_window_size, pattern, is_causal)
    scale = check_scale(scale, query.shape[3])
    bias = _with_mask(check_bias(bias, query, key), check_mask(mask, query, key))
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    query_segments, key_segments = check_segments(segment_ids, query.shape, key.shape)
    static_key_offset, traced_key_offset = _static_or_traced("key_offset", key_offset)
    static_query_offset, traced_query_offset = _static_or_traced("query_offset", query_offset)
    sinks = check_sinks(sinks, query.shape[2])

    if state is not None or return_state:
        given = (bias, query_lengths, key_lengths, query_segments, traced_key_offset)
        require(
            is_causal and isinstance(pattern, SlidingWindow) and all(x is None for x in given)
            and static_query_offset == static_key_offset == 0 and not return_residual,
            "state and return_state must be given with is_causal=True and a window, without bias, mask, lengths, "
            "segment_ids, offsets and return_residual",
        )  # fmt: skip
        assert isinstance(pattern, SlidingWindow)
        options = {
            "scale": scale,
            "sinks": sinks,
            "logits_soft_cap": logits_soft_cap,
            "implementation": implementation,
        }
        out, state = continue_from(state, pattern.left, local_attention, query, key, value, **options)
        return (out, state) if return_state else out
    call = PatternCall(
        pattern=pattern,
        is_causal=bool(is_causal),
        scale=scale,
        num_queries=query.shape[1],
        num_keys=key.shape[1],
        query_offset=static_query_offset or 0,
        key_offset=static_key_offset,
        logits_soft_cap=logits_soft_cap and float(logits_soft_cap),
        return_residual=bool(return_residual),
    )
    arrays = CallArrays(
        query,
        key,
        value,
        bias,
        query_lengths,
        key_lengths,
        query_segments,
        key_segments,
        traced_key_offset,
        sinks,
    )
    if traced_query_offset is not None:
        call, arrays = _of_keys_in_reach(call, arrays, traced_query_offset)
    result = attend(call, implementation, arrays)
    return (result[0], result[1].astype(query.dtype)) if return_residual else result


def _with_mask(bias: Any, mask: Bool[Array, "#B #N #T #S"] | None) -> Any:
    """Adds -inf to the bias where the mask is False."""
    if mask is None:
        return bias
    require(
        bias is None or isinstance(bias, jax.Array),
        f"mask must be None with {type(bias).__name__}; give the bias as an array",
    )
    seen = jnp.zeros((), jnp.float32) if bias is None else bias
    return jnp.where(mask, seen, jnp.array(-jnp.inf, seen.dtype))


def _check_pattern(window: Any, pattern: Any, is_causal: bool) -> Pattern:
    if (window is None) == (pattern is None):
        raise ValueError(
            "exactly one of local_window_size and pattern must be given, got "
            + ("neither" if window is None else "both")
        )
    if window is not None:
        return SlidingWindow.of_size(window)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern such as SlidingWindow(left, right), got {pattern!r}")
    if is_causal and not pattern.causal_ok:
        raise ValueError(
            f"is_causal must be False with {type(pattern).__name__}: its global tokens see the whole sequence "
            "and every token sees them, so they would carry information backwards"
        )
    return pattern


def _static_or_traced(name: str, offset: Any) -> tuple[int | None, Array | None]:
    if isinstance(offset, (int, np.integer)):
        return int(offset), None
    check_offset(name, offset)
    return None, jnp.asarray(offset).astype(jnp.int32)


def _of_keys_in_reach(
    call: PatternCall, x: CallArrays, query_offset: Int[Array, ""]
) -> tuple[PatternCall, CallArrays]:
    """The same call with the keys that its queries reach from a traced offset, at the static offset of the first."""
    before, after = call.pattern.limits
    after = 0 if call.is_causal else after
    if before is None or after is None:
        raise ValueError(
            f"query_offset must be an int if the pattern reaches everywhere, got a traced one with {call.pattern}"
        )
    first = query_offset - before
    places = first + jnp.arange(before + call.num_queries + after, dtype=jnp.int32)
    stop = jnp.full((x.key.shape[0],), call.num_keys, jnp.int32)
    if x.key_lengths is not None:
        stop = jnp.minimum(stop, x.key_lengths)
    exists = (places >= 0)[None] & (places[None] < stop[:, None])
    places = jnp.clip(places, 0, call.num_keys - 1)

    def take(array: Array) -> Array:
        return jnp.where(
            exists[:, :, None, None], jnp.take(array, places, axis=1), jnp.zeros((), array.dtype)
        )

    key_ids = None if x.key_segments is None else jnp.take(x.key_segments, places, axis=1)
    queries = jnp.ones((1, call.num_queries), bool)
    query_ids, key_ids = mark_absent(x.query_segments, key_ids, queries, exists)
    bias = x.bias
    if isinstance(bias, jax.Array) and bias.shape[3] > 1:
        bias = jnp.take(bias, places, axis=3)
    # Windows do not depend on absolute positions.
    moves = isinstance(call.pattern, SlidingWindow | Dilated) and not isinstance(bias, PositionBias)
    position = call.key_offset if x.key_offset is None else x.key_offset
    assert position is not None
    call = dataclasses.replace(
        call, num_keys=len(places), query_offset=before, key_offset=0 if moves else None
    )
    return call, x._replace(
        key=take(x.key),
        value=take(x.value),
        bias=bias,
        key_lengths=None,
        query_segments=query_ids,
        key_segments=key_ids,
        key_offset=None if moves else first + position,
    )
