"""Hopfield attention: queries move towards the stored keys in several steps before they read the values."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.checks import check_lengths, check_qkv, check_segments, zero_padding
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.attend import MANY_TOKENS
from brl_jax.attention.dense.full import full_attention
from brl_jax.fields import Count


@divided(functools.partial(sharded.cut, sharded.hopfield_attention))
def hopfield_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    steps: Count = 1,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Retrieval from a modern Hopfield network (Ramsauer et al. 2020, arXiv:2008.02217, eqs. 3 and 10).

    (B, T, N, H), (B, S, K, H) x 2 -> (B, T, N, H)::

        out = hopfield_attention(query, key, value, steps=3)

    xi_0 = query, xi_t = softmax(scale xi_{t-1} K^T) K for t < steps, and the last step reads the values:
    out = softmax(scale xi_{steps-1} K^T) V. One step is softmax attention. Takes O(steps T S) time and O(T + S) memory:
    only 256 queries at a time have scores, in the backward pass too.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, S, K, H) of the same dtype; K divides N.
      steps: the number of softmaxes, at least 1.
      scale: the inverse temperature (beta in the paper); 1 / sqrt(H) by default.
      is_causal: query i sees only keys up to index i + query_offset, in each step.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later queries and keys are padding. Padded rows give 0.
      segment_ids: int (B, T) if T = S, or a pair (B, T) and (B, S); a query sees only keys with its own id.
      query_offset: an int or a traced scalar.
      implementation: "xla" computes one block of queries at a time. None does the same, except for many tokens on a
        TPU, which take the kernel. "cudnn", "pallas" and "pallas_interpret" compute all queries at once if they support
        the call (see `full_attention`).

    Returns:
      (B, T, N, H) in the dtype of the query; a query that sees no key gives 0.

    Raises:
      ValueError: arguments do not fit together.
      NotImplementedError: as `full_attention`.
    """
    check_qkv(query, key, value)
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    segments = check_segments(segment_ids, query.shape, key.shape)
    settings: dict[str, Any] = {
        "scale": scale,
        "is_causal": is_causal,
        "key_value_seq_lengths": key_value_seq_lengths,
    }

    def retrieve(state: Array, segment: Array | None, offset: Any, chosen: Any) -> Array:
        pair = None if segment is None else (segment, segments[1])

        def attend(state: Array, read: Array) -> Array:
            return full_attention(
                state, key, read, segment_ids=pair, query_offset=offset, implementation=chosen, **settings
            )

        for _ in range(steps - 1):
            state = attend(state, key)
        return attend(state, value)

    query = zero_padding(query, query_lengths)
    if implementation not in (None, "xla"):
        return zero_padding(retrieve(query, segments[0], query_offset, implementation), query_lengths)

    def in_blocks(query: Array) -> Array:
        attend = functools.partial(retrieve, chosen="xla")
        return by_query_blocks(attend, QUERY_BLOCK, query, segments[0], query_offset)

    def on_kernels(query: Array) -> Array:
        return retrieve(query, segments[0], query_offset, None)

    if implementation is None and min(query.shape[1], key.shape[1]) >= MANY_TOKENS:
        out = branches(query, tpu=on_kernels, default=in_blocks)
    else:
        out = in_blocks(query)
    return zero_padding(out, query_lengths)
