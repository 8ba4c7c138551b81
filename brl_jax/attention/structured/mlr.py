"""MLR attention: scores with more features between near tokens than between distant ones.

The paper is arXiv:2509.07963; see its section 3.4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_dtypes, check_lengths, check_sizes, is_int, zero_padding
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.structured.mlr_rectangles import rectangles
from brl_jax.attention.structured.mlr_sharded import Levels, mlr_on_mesh
from brl_jax.attention.structured.mlr_tiles import MLRPlan, attend

BlockSizes = Sequence[int | None]


@attention_function
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
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Attention whose score matrix is a multi-level low-rank matrix (arXiv:2509.07963, eq. 9).

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = mlr_attention(
            query, key, value, ranks=(32, 16, 16), block_sizes=(None, 128, 32), is_causal=True
        )

    Level l owns a slice of r_l = ranks[l] of the head's features and cuts the sequence into blocks:

      score(i, j) = sum over the levels whose block holds both i and j of  scale_l q_i^(l) . k_j^(l)
      out_i = sum_j softmax_j(score(i, j)) v_j

    Pairs without a common block (which exist only if the coarsest block is shorter than the sequence) have the score 0
    and still see each other. One level with one block is softmax attention. Scores cost 2 sum_l r_l b_l FLOPs per query
    (half of that where causal), where full attention needs 2 H T; time is quadratic because of the coarsest level and
    of the values. Memory is linear in T, forward and backward: only a few rows of scores exist at a time.
    `reference.mlr_attention` is the plain form.

    Packed sequences are not supported: blocks are counted from the first token of a row.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, T, K, H) of the same dtype; K divides N.
      value: (B, T, K, V) of the same dtype.
      ranks: the number of features of each level, from the coarsest to the finest; they sum to H.
      block_sizes: the tokens of a block of each level; each is a multiple of the next. None in place of a size is one
        block over all tokens. None for all of them gives `doubling_block_sizes(T, levels)`, which grow with T.
      scale: the scale of the scores, one for each level or one for all; 1 / r_l by default.
      divide_by_levels: divides each score by the number of levels that contribute to it.
      is_causal: query i sees keys up to i only.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; rows and keys at and after the length are padding, which may
        contain anything. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the query; a query that sees no key gives 0.

    Raises:
      ValueError: shapes, dtypes, ranks or block sizes that do not fit, naming the argument.
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
    check_implementation(implementation, None, "xla")
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, batch)
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query = zero_padding(query, query_lengths)
    key, value = zero_padding(key, lengths), zero_padding(value, lengths)
    query = query * feature_scales(ranks, scale, query.dtype)
    levels = Levels(ranks, block_sizes, divide_by_levels, implementation)
    axis = levels.axis(length, is_causal)
    if axis is not None:
        out = mlr_on_mesh(levels, axis, query, key, value, lengths, is_causal)
        return zero_padding(out, query_lengths)
    plan = MLRPlan(rectangles(length, ranks, block_sizes, is_causal), is_causal, divide_by_levels)
    return zero_padding(attend(plan, query, key, value, lengths)[0], query_lengths)


def doubling_block_sizes(length: int, levels: int) -> tuple[int | None, ...]:
    """Block sizes for a sequence (or a training context) of `length` tokens, of which level l has 2^(l-1) blocks.

    arXiv:2509.07963, section 3.4. The first level is one block over all tokens (None), and the next ones have blocks of
    length / 2, length / 4, ... tokens where 2^(levels-1) divides the length. Elsewhere the finest blocks are rounded up
    and all others are twice as large as those of the next level. A sequence longer than `length` has more blocks of the
    same sizes, but still one block of the first level.

    Raises:
      ValueError: a length or a number of levels below 1.
    """
    check_sizes(length=length, levels=levels)
    finest = -(-length // 2 ** (levels - 1))
    return (None, *(finest * 2 ** (levels - 1 - level) for level in range(1, levels)))


def check_ranks(ranks: Any, head_dim: int) -> tuple[int, ...]:
    """The ranks as ints; raises ValueError unless they are at least 1 and sum to head_dim."""
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
    """The block sizes as ints or None; raises ValueError unless there is one per level and they are nested."""
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
            "block_sizes must be nested, each a multiple of the next (None, one block over all tokens, first), "
            f"got {coarse} before {fine} in {tuple(block_sizes)}",
        )
    return tuple(None if size is None else int(size) for size in block_sizes)


def feature_scales(ranks: Sequence[int], scale: Any, dtype: Any) -> Float[Array, "1 1 1 H"]:
    """The factor of each feature of the query, so that products of query and key are scaled by level."""
    if scale is None:
        scale = tuple(1 / rank for rank in ranks)
    scales = scale if isinstance(scale, (tuple, list)) else (scale,) * len(ranks)
    numbers = all(
        isinstance(s, (int, float, np.integer, np.floating)) and not isinstance(s, bool) and math.isfinite(s)
        for s in scales
    )
    require(
        numbers and len(scales) == len(ranks),
        f"scale must be a number, or one for each of the {len(ranks)} ranks, got {scale!r}",
    )
    return jnp.asarray(np.repeat(scales, ranks)[None, None, None], dtype)
