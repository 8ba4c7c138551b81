"""MLR attention: scores use more features between near tokens than between far ones (arXiv:2509.07963, 3.4)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_within,
    require,
    zero_padding,
)
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.core.state import check_state, check_state_options
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.structured.mlr_generation import MLRState, extend, init_mlr_state
from brl_jax.attention.structured.mlr_levels import (
    check_block_sizes,
    check_ranks,
    doubling_block_sizes,
    feature_scales,
)
from brl_jax.attention.structured.mlr_rectangles import rectangles
from brl_jax.attention.structured.mlr_sharded import Levels, mlr_on_mesh
from brl_jax.attention.structured.mlr_tiles import MLRPlan, attend
from brl_jax.fields import Count
from brl_jax.sharding import sequence_axis


@attention_function
def mlr_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    ranks: Sequence[Count],
    block_sizes: Sequence[Count | None] | None = None,
    block_ids: Int[Array, "B T L"] | None = None,
    scale: float | Sequence[float] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: MLRState | None = None,
    return_state: bool = False,
    count: int | Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], MLRState]:
    """Softmax attention whose score matrix is multi-level low-rank (arXiv:2509.07963, eq. 9).

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        levels = {"ranks": (32, 16, 16), "block_sizes": (None, 128, 32)}
        out = mlr_attention(query, key, value, **levels, is_causal=True)

    Level l owns a slice of r_l = ranks[l] of the head's features and cuts the sequence into blocks:

      score(i, j) = sum over the levels whose block contains both i and j of  scale_l q_i^(l) . k_j^(l)
      out_i = sum_j softmax_j(score(i, j)) v_j

    Pairs without a common block, which exist only if the coarsest block is shorter than the sequence, have score 0 and
    still see each other. Blocks are counted from the first token of a row, so packed sequences are not supported. One
    level with one block is softmax attention. Scores cost 2 sum_l r_l b_l FLOPs per query (half if causal), compared
    with 2 H T for full attention. Time stays quadratic because of the coarsest level and the values. Memory is linear
    in T, forward and backward: only a few rows of scores exist at a time.

    Generation continues from a state, with any number of tokens at a time. It caches only the current block's keys of
    each level (section 3.4)::

        state = init_mlr_state(batch, num_kv_heads, head_dim, length=4096, **levels)
        out, state = mlr_attention(..., **levels, is_causal=True, state=state, return_state=True)

    Blocks may follow the input instead, such as paragraphs and documents (section 3.4, footnote 1), by `block_ids`.
    Each level then costs its products of all pairs, as full attention does; memory stays linear.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, T, K, H) of the same dtype; K divides N.
      value: (B, T, K, V) of the same dtype.
      ranks: features of each level, from the coarsest to the finest; they sum to H.
      block_sizes: tokens in a block of each level, each a multiple of the next. A level's None means one block over all
        tokens. None for all levels gives `doubling_block_sizes` for T, or for the state's capacity.
      block_ids: (B, T, L) ints for the L levels after the first, which is one block; two tokens share a level's block
        where their ids are equal. Without block_sizes and state, and not for sequences that devices share.
      scale: scale of the scores, one for each level or one for all; 1 / r_l by default.
      is_causal: query i sees only the keys up to i.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; rows and keys at and after the length are padding. Padding
        may contain anything and gives 0. Without a state only.
      state: from `init_mlr_state` or an earlier call; causal only. Tokens beyond its capacity are lost.
      return_state: also return the state after these tokens; needs a state.
      count: with a state, how many tokens are valid, from the first (None: all). Other outputs are undefined.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype; a query that sees no key gives 0. With return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_state_options(
        "init_mlr_state", state=state, return_state=return_state, count=count, is_causal=is_causal,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths, block_ids=block_ids,
    )  # fmt: skip
    check_qkv(query, key, value)
    check_within("count", count, query.shape[1])
    check_dtypes(query, key, value)
    batch, length, _, head_dim = query.shape
    require(
        key.shape[1] == length,
        f"key must have query's length {length}, as blocks hold both, got {key.shape[1]}",
    )
    ranks = check_ranks(ranks, head_dim)
    check_implementation(implementation, None, "xla")
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, batch)
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    if state is not None:
        check_state(
            state, init_mlr_state, batch, key.shape[2], head_dim, value.shape[3], ranks=ranks,
            block_sizes=block_sizes, dtype=key.dtype, length=state.value.shape[2],
        )  # fmt: skip
        query = query * feature_scales(ranks, scale, query.dtype)
        out, state = extend(query, key, value, state, count)
        return (out, state) if return_state else out
    query = zero_padding(query, query_lengths)
    key, value = zero_padding(key, lengths), zero_padding(value, lengths)
    query = query * feature_scales(ranks, scale, query.dtype)
    if block_ids is not None:
        block_ids, expected = jnp.asarray(block_ids), (batch, length, len(ranks) - 1)
        require(
            block_sizes is None and sequence_axis(length) is None and block_ids.shape == expected,
            f"block_ids must have shape {expected}, with neither block_sizes nor sharded rows, got {block_ids.shape}",
        )
        require(
            jnp.issubdtype(block_ids.dtype, jnp.integer), f"block_ids must be ints, got {block_ids.dtype}"
        )
        return zero_padding(_by_ids(ranks, query, key, value, block_ids, lengths, is_causal), query_lengths)
    if block_sizes is None:
        block_sizes = doubling_block_sizes(length, len(ranks))
    block_sizes = check_block_sizes(block_sizes, len(ranks))
    levels = Levels(ranks, block_sizes, implementation)
    axis = levels.axis(length, is_causal)
    if axis is not None:
        out = mlr_on_mesh(levels, axis, query, key, value, lengths, is_causal)
        return zero_padding(out, query_lengths)
    plan = MLRPlan(rectangles(length, ranks, block_sizes, is_causal), is_causal)
    return zero_padding(attend(plan, query, key, value, lengths)[0], query_lengths)


def _by_ids(
    ranks: tuple[int, ...],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    ids: Int[Array, "B T L"],
    lengths: Int[Array, " B"] | None,
    is_causal: bool,
) -> Float[Array, "B T N V"]:
    """Attention for scaled queries, a few at a time: full attention with the first level's features, and the other
    levels' scores as its bias."""

    def attend(query: Array, own: Array, offset: Any) -> Array:
        batch, length, heads, _ = query.shape
        grouped = query.reshape(batch, length, key.shape[2], -1, query.shape[3])
        bias = jnp.zeros((), accumulation_dtype(query.dtype))
        for level, (start, stop) in enumerate(itertools.pairwise(np.cumsum(ranks))):
            pair = grouped[..., start:stop], key[..., start:stop]
            products = jnp.einsum("btkgh,bskh->bkgts", *pair, preferred_element_type=bias.dtype)
            same = own[:, :, None, level] == ids[:, None, :, level]
            bias = bias + jnp.where(same[:, None, None], products, 0.0)
        return full_attention(
            query[..., : ranks[0]], key[..., : ranks[0]], value,
            bias=bias.reshape(batch, heads, length, -1) if len(ranks) > 1 else None,
            scale=1.0, is_causal=is_causal, key_value_seq_lengths=lengths, query_offset=offset, implementation="xla",
        )  # fmt: skip

    return by_query_blocks(attend, QUERY_BLOCK, query, ids)
