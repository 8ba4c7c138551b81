"""Softmax attention between queries and keys of many features, with memory linear in the length."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_lengths, check_segments, is_int, require, zero_padding
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.sharding import sequence_axis


def feature_attention(
    query: Float[Array, "B T N F"],
    key: Float[Array, "B S K F"],
    value: Float[Array, "B S J V"],
    *,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """softmax(query key^T) value with unscaled scores; value heads and key heads may be grouped differently.

    On a mesh that shards sequences, keys go around the devices.

    Args:
      query, key, value: (B, T, N, F), (B, S, K, F) and (B, S, J, V) of one dtype. J divides K, and K divides N.
      is_causal, query_seq_lengths, key_value_seq_lengths, segment_ids, query_offset: as for `full_attention`.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype; a query that sees no key gives 0.
    """
    check_implementation(implementation, None, "xla")
    require(
        key.shape[2] % value.shape[2] == 0,
        f"the heads of value must divide the {key.shape[2]} of the keys, got {value.shape[2]}",
    )
    value = jnp.repeat(value, key.shape[2] // value.shape[2], axis=2)
    same_tokens = query.shape[1] == key.shape[1] and is_int(query_offset) and query_offset == 0
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    if same_tokens and sequence_axis(query.shape[1]) is not None:
        out = full_attention(
            zero_padding(query, query_lengths), key, value, scale=1.0, is_causal=is_causal, segment_ids=segment_ids,
            key_value_seq_lengths=key_value_seq_lengths, implementation=implementation,
        )  # fmt: skip
        return zero_padding(out, query_lengths)
    if segment_ids is None and same_tokens:
        # One level of MLR attention is softmax attention in tiles, and computes only the causal half of them.
        tiled: Any = mlr_attention(
            query, key, value, ranks=(query.shape[3],), scale=1.0, is_causal=is_causal,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        )  # fmt: skip
        return tiled
    segments = check_segments(segment_ids, query.shape, key.shape)

    def attend(query: Array, segment: Array | None, offset: Any) -> Array:
        return full_attention(
            query, key, value, scale=1.0, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths,
            segment_ids=None if segment is None else (segment, segments[1]), query_offset=offset,
            implementation="xla",
        )  # fmt: skip

    query = zero_padding(query, query_lengths)
    return zero_padding(by_query_blocks(attend, QUERY_BLOCK, query, segments[0], query_offset), query_lengths)
