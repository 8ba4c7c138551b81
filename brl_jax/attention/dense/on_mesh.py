"""Dense attention on the mesh of `brl_jax.sharding`. The compiler cannot divide a kernel among devices, so we do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.attention.core.arguments import is_int
from brl_jax.attention.dense import sharded
from brl_jax.attention.dense.full import MANY_TOKENS, full_attention
from brl_jax.sharding import sequence_axis, shard_call


def dense_on_mesh(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    function: Any = full_attention,
    around: Any = None,
    implementation: Any = None,
    is_causal: bool = False,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    query_offset: Any = 0,
    sinks: Any = None,
    **static: Any,
) -> Float[Array, "B T N V"]:
    """function(...), each device of a mesh computing its own rows, heads and queries if there are many tokens.

    If rows are sharded, the keys travel around the devices (`sharded`), with causal work balanced. With a bias, a mask
    or an offset, each device gathers all keys of its rows instead. The compiler divides calls with few tokens and calls
    to cuDNN. Without a mesh it is a plain call.

    Args:
      function: `full_attention`, or a function with the same arguments.
      around: the version of `function` in `sharded`; known for `full_attention`. If None, each device gathers all keys
        of its rows.
      query, key, value, ...: as for `full_attention`; `static` has no arrays.
    """
    shared = implementation in ("pallas", "pallas_interpret") or (
        implementation in (None, "xla") and min(query.shape[1], key.shape[1]) >= MANY_TOKENS
    )
    static["implementation"] = implementation
    if function is full_attention:
        around = sharded.full_attention
    if not isinstance(segment_ids, (tuple, list)):
        segment_ids = (segment_ids, segment_ids)
    axis = sequence_axis(query.shape[1]) if shared else None
    traced = not is_int(query_offset)
    can_go = axis is not None and around is not None
    ring = can_go and _goes_around(query, key, is_causal, query_offset, static)

    def attend(query, key, value, lengths, query_segments, key_segments, offset, sinks):
        options = {} if sinks is None else {"sinks": sinks}
        options |= {
            "is_causal": is_causal,
            "key_value_seq_lengths": lengths,
            "segment_ids": None if query_segments is None else (query_segments, key_segments),
        }
        if ring:
            return around(query, key, value, axis_name=axis, **options, **static)
        offset = offset if traced else query_offset
        if axis is not None:
            offset = offset + jnp.int32(query.shape[1]) * lax.axis_index(axis)
        return function(query, key, value, query_offset=offset, **options, **static)

    offset = query_offset if traced else None
    operands = (query, key, value, key_value_seq_lengths, *segment_ids, offset, sinks)
    if not shared:
        return attend(*operands)
    tokens = None if axis is None else "length"
    key_tokens = "length" if ring else None
    queries, keys = ("batch", tokens, "heads", None), ("batch", key_tokens, "kv_heads", None)
    ids = [("batch", tokens), ("batch", key_tokens)]
    return shard_call(attend, operands, [queries, keys, keys, ("batch",), *ids, (), ("heads",)], queries)


def _goes_around(query: Array, key: Array, is_causal: bool, offset: Any, static: dict[str, Any]) -> bool:
    """Whether the keys can travel around the devices along the sequence axis."""
    if not set(static) <= {"implementation", "scale", "logits_soft_cap"}:
        return False
    if not is_causal:
        return sequence_axis(key.shape[1]) is not None
    same = query.shape[1] == key.shape[1] and is_int(offset) and offset == 0
    return same and sequence_axis(query.shape[1], block=2) is not None
