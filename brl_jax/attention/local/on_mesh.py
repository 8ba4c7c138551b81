"""Local attention on the mesh of `brl_jax.sharding`. The compiler cannot divide a kernel among devices, so we do."""

from __future__ import annotations

from typing import Any

import jax

from brl_jax.attention.local import patterns, sharded
from brl_jax.attention.local.api import local_attention
from brl_jax.sharding import sequence_axis, shard_call


def local_attention_on_mesh(
    query: Any,
    key: Any,
    value: Any,
    *,
    pattern: patterns.Pattern,
    is_causal: bool,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    key_offset: Any = None,
    sinks: Any = None,
    **static: Any,
) -> jax.Array:
    """`local_attention`, each device of a mesh computing its own rows and heads.

    If the pattern's reach is bounded, each device also computes only its own tokens. Without a mesh it is the plain
    function. Arguments as for `local_attention`.
    """
    if not isinstance(segment_ids, (tuple, list)):
        segment_ids = (segment_ids, segment_ids)
    static |= {"pattern": pattern, "is_causal": is_causal}
    bounded = pattern.lookback is not None and (is_causal or pattern.lookahead is not None)
    # Without an offset, queries and keys are the same tokens and can be cut alike.
    axis = sequence_axis(query.shape[1]) if bounded and key_offset is None else None

    def attend(query, key, value, lengths, query_segments, key_segments, key_offset, sinks):
        if axis is not None:
            return sharded.local_attention(
                query,
                key,
                value,
                axis_name=axis,
                key_value_seq_lengths=lengths,
                segment_ids=query_segments,
                sinks=sinks,
                **static,
            )
        segments = None if query_segments is None else (query_segments, key_segments)
        offset = {} if key_offset is None else {"key_offset": key_offset}
        return local_attention(
            query,
            key,
            value,
            key_value_seq_lengths=lengths,
            segment_ids=segments,
            sinks=sinks,
            **offset,
            **static,
        )

    tokens = None if axis is None else "length"
    queries, keys, ids = (
        ("batch", tokens, "heads", None),
        ("batch", tokens, "kv_heads", None),
        ("batch", tokens),
    )
    names = [queries, keys, keys, ("batch",), ids, ids, (), ("heads",)]
    return shard_call(
        attend, (query, key, value, key_value_seq_lengths, *segment_ids, key_offset, sinks), names, queries
    )
