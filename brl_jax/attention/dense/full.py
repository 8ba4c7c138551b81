"""Full softmax attention."""

from __future__ import annotations

import functools
from typing import Literal, overload

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
)
from brl_jax.attention.core.decorators import batch_optional, divided
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.attend import attend
from brl_jax.attention.dense.full_xla import FullArrays
from brl_jax.fields import Positive


@overload
def full_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    query_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> Array: ...  # fmt: skip


@overload
def full_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    query_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


@batch_optional
@divided(functools.partial(sharded.cut, sharded.full_attention))
def full_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: PositionBias | Float[Array, " ..."] | None = None,
    mask: Bool[Array, " ..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: Positive | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Softmax attention over all keys (Vaswani et al. 2017, eq. 1), in O(T S) time.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = full_attention(query, key, value, is_causal=True)

    Memory is O(T + S), except through XLA on a GPU or with an array of all pairs as bias or mask.

    Arguments follow `jax.nn.dot_product_attention`. Unlike it, a query that sees no key gives 0 and zero gradients,
    padding may be NaN, the residual is differentiable, and queries may be at an offset, as when decoding with a cache.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16. The batch axis may be absent from all arrays.
      key: (B, S, K, H) in query's dtype; K divides N.
      value: (B, S, K, V) in query's dtype.
      bias: added to the scaled scores, and differentiable: an array that broadcasts to (B, N, T, S), or a
        `PositionBias`, called with all positions. A bias of -inf, or below -1.2e38, hides its key.
      mask: bools that broadcast to (B, N, T, S); a query sees only keys where it is True.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      is_causal: query i sees only keys up to index i + query_offset.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later queries and keys are padding. Padded rows give 0.
      segment_ids: int (B, T) if T = S, or a pair (B, T) and (B, S); a query sees only keys with its own id.
      query_offset: query i is at key index i + query_offset; an int or a traced scalar.
      sinks: (N,) logits that join the softmax without a value (gpt-oss, arXiv:2508.10925): p_ij = exp(score_ij) /
        (exp(sink) + sum_j exp(score_ij)). They are neither scaled nor capped.
      logits_soft_cap: a positive number c; scores become c tanh(score / c) before bias and mask (Gemma 2,
        arXiv:2408.00118).
      implementation: None picks by platform: "pallas" on a TPU if T and S are at least 1,024; "cudnn" on an NVIDIA
        GPU if it supports the call; else "xla". "pallas_interpret" interprets the TPU kernel, which takes float32 and
        bfloat16, heads of up to 256, biases by distance (`ALiBi`, `T5Bias`, `RotaryBias`, any `DistanceBias`), and
        masks of keys, (B or 1, 1, 1, S).
      return_residual: also return the log-sum-exp of each query's scores; not with "cudnn".

    Returns:
      (B, T, N, V) in query's dtype; softmax runs in float32. With return_residual, also (B, T, N) in query's dtype:
      -inf, or the sink, for a query that sees no key.

    Raises:
      ValueError: arguments do not fit together.
      NotImplementedError: the named implementation does not support the call or the platform.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    scale = check_scale(scale, query.shape[3])
    bias = check_bias(bias, query, key)
    mask = check_mask(mask, query, key)
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    segments = check_segments(segment_ids, query.shape, key.shape)
    check_offset("query_offset", query_offset)
    check_implementation(implementation, None, "xla", "cudnn", "pallas", "pallas_interpret")
    sinks = check_sinks(sinks, query.shape[2])
    cap = logits_soft_cap and float(logits_soft_cap)
    arrays = FullArrays(
        query, key, value, bias, mask, query_lengths, key_lengths, segments, query_offset, sinks
    )
    result = attend(
        arrays,
        implementation=implementation,
        scale=scale,
        is_causal=is_causal,
        cap=cap,
        return_residual=return_residual,
    )
    return (result[0], result[1].astype(query.dtype)) if return_residual else result
