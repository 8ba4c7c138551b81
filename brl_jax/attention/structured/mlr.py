"""MLR attention: scores of more features between near tokens than between far ones (002, section 3.4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_dtypes, check_lengths, is_int, zero_padding
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.structured.mlr_blocks import rectangles
from brl_jax.attention.structured.mlr_xla import Spec, attend

BlockSizes = Sequence[int | None]


def mlr_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    ranks: Sequence[int],
    block_sizes: BlockSizes | None = None,
    scale: float | Sequence[float] | None = None,
    divide_by_levels: bool = False,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Attention whose score matrix is a multi-level low-rank matrix (002, eq. 9).

    Level l owns r_l = ranks[l] of the head's features, one slice after the other, and cuts the sequence into blocks:

      score(i, j) = sum over the levels whose block holds both i and j of  scale_l q_i^(l) . k_j^(l)
      out_i = sum_j softmax_j(score(i, j)) v_j

    Pairs without a common block (only where the coarsest block is shorter than the sequence) score 0; they see each
    other all the same. One level over everything is softmax attention. Scores cost 2 sum_l r_l b_l FLOPs a query (half
    of it where causal) against 2 H T of full attention; time is quadratic through the coarsest level and the values.
    Memory is linear in T, forward and backward: no more than some rows of scores exist at a time.

    Packed sequences need rows of their own: blocks are counted from the row's first token.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, T, K, H) of the same dtype; K divides N.
      value: (B, T, K, V) of the same dtype.
      ranks: features of each level, from the coarsest to the finest; they sum to H.
      block_sizes: tokens of a block of each level; each a multiple of the next. None in place of a size is one block
        over everything. None for all of them: sizes that grow with the sequence, as `doubling_block_sizes(T, levels)`.
      scale: of the levels' scores, one for each or one for all; 1 / r_l by default.
      divide_by_levels: divides each score by the number of levels that take part in it.
      is_causal: query i sees keys up to i only.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; rows and keys from there on are padding, which may hold
        anything. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in query's dtype; a query that sees no key gives 0.

    Raises:
      ValueError: shapes, dtypes, ranks or block sizes that don't fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    batch, length, _, head_dim = query.shape
    require(
        key.shape[1] == length,
        f"key must have query's length {length}, as blocks hold both, got {key.shape[1]}",
    )
    ranks = check_ranks(ranks, head_dim)
    if block_sizes is None:
        block_sizes = doubling_block_sizes(length, len(ranks))
    block_sizes = check_block_sizes(block_sizes, len(ranks))
    require(implementation in (None, "xla"), f"implementation must be None or 'xla', got {implementation!r}")
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, batch)
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query = zero_padding(query, query_lengths)
    key, value = zero_padding(key, lengths), zero_padding(value, lengths)
    spec = Spec(rectangles(length, ranks, block_sizes, is_causal), is_causal, divide_by_levels)
    query = query * feature_scales(ranks, scale, query.dtype)
    return zero_padding(attend(spec, query, key, value, lengths), query_lengths)


def doubling_block_sizes(length: int, levels: int) -> tuple[int | None, ...]:
    """Blocks for a sequence (or a training context) of `length` tokens: level l has 2^(l-1) of them (002, section 3.4).

    One block over everything, then length / 2, length / 4, ... tokens, where 2^(levels-1) divides the length; elsewhere
    the finest blocks are rounded up and the others are twice as large as the next. Sequences longer than `length` keep
    the sizes, and one block over everything.
    """
    require(is_int(length) and length >= 1, f"length must be an int of at least 1, got {length!r}")
    require(is_int(levels) and levels >= 1, f"levels must be an int of at least 1, got {levels!r}")
    finest = -(-length // 2 ** (levels - 1))
    return (None, *(finest * 2 ** (levels - 1 - level) for level in range(1, levels)))


def check_ranks(ranks: Any, head_dim: int) -> tuple[int, ...]:
    require(
        isinstance(ranks, (tuple, list)) and len(ranks) > 0 and all(is_int(r) and r >= 1 for r in ranks),
        f"ranks must be one or more ints of at least 1, got {ranks!r}",
    )
    require(
        sum(ranks) == head_dim,
        f"ranks must sum to the head_dim {head_dim}, got {'+'.join(map(str, ranks))} = {sum(ranks)}",
    )
    return tuple(int(r) for r in ranks)


def check_block_sizes(block_sizes: Any, levels: int) -> tuple[int | None, ...]:
    require(
        isinstance(block_sizes, (tuple, list))
        and all(size is None or (is_int(size) and size >= 1) for size in block_sizes),
        f"block_sizes must be ints of at least 1 or None, got {block_sizes!r}",
    )
    require(
        len(block_sizes) == levels,
        f"block_sizes must have one size for each of the {levels} ranks, got {len(block_sizes)}: {block_sizes!r}",
    )
    for coarse, fine in itertools.pairwise(block_sizes):
        nested = coarse is None or (fine is not None and coarse % fine == 0)
        require(
            nested,
            "block_sizes must be nested, each a multiple of the next (None, one block over everything, first), "
            f"got {coarse} before {fine} in {tuple(block_sizes)}",
        )
    return tuple(None if size is None else int(size) for size in block_sizes)


def feature_scales(ranks: Sequence[int], scale: Any, dtype: Any) -> Float[Array, "1 1 1 H"]:
    """The scale of each feature's products."""
    if scale is None:
        scale = tuple(1 / rank for rank in ranks)
    scales = scale if isinstance(scale, (tuple, list)) else (scale,) * len(ranks)
    numbers = all(
        isinstance(s, (int, float)) and not isinstance(s, bool) and math.isfinite(s) for s in scales
    )
    require(
        numbers and len(scales) == len(ranks),
        f"scale must be a number, or one for each of the {len(ranks)} ranks, got {scale!r}",
    )
    return jnp.asarray(np.repeat(scales, ranks)[None, None, None], dtype)
