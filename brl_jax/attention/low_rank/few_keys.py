"""Attention of many queries to few keys, where low-rank mechanisms spend their time."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.dense.full import full_attention

# Queries at a time on a CPU; with few keys their scores are small.
_BLOCK = 2 * QUERY_BLOCK


def attend_to_few(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B R K H"],
    value: Float[Array, "B R K V"],
    *,
    scale: float | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """`full_attention` for a fixed number of keys, with memory linear in the queries."""
    attend = functools.partial(full_attention, scale=scale, implementation=implementation)

    def at_once(query: Array, key: Array, value: Array, lengths: Array | None) -> Array:
        return attend(query, key, value, key_value_seq_lengths=lengths)

    def in_blocks(query: Array, key: Array, value: Array, lengths: Array | None) -> Array:
        return by_query_blocks(lambda query, *_: at_once(query, key, value, lengths), _BLOCK, query)

    # On a CPU the scores of a block stay in cache; elsewhere one large product is faster.
    return branches(query, key, value, key_value_seq_lengths, cpu=in_blocks, default=at_once)
