"""The levels of MLR attention: their features, blocks and scales."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import require
from brl_jax.fields import Count, declared


@declared
def doubling_block_sizes(length: Count, levels: Count) -> tuple[int | None, ...]:
    """Returns block sizes for `length` tokens, usually the training context: level l has 2^(l-1) blocks.

        doubling_block_sizes(512, 3)  # (None, 256, 128)

    arXiv:2509.07963, section 3.4. The first level is one block over all tokens (None); the next levels have blocks of
    length / 2, length / 4, ... tokens. If 2^(levels-1) does not divide the length, the finest size is rounded up, and
    each other size is twice the next. A longer sequence has more blocks of the same sizes, but still one block in the
    first level.

    Raises:
      ValueError: a length or a number of levels is below 1.
    """
    finest = -(-length // 2 ** (levels - 1))
    return (None, *(finest * 2 ** (levels - 1 - level) for level in range(1, levels)))


def check_ranks(ranks: Any, head_dim: int) -> tuple[int, ...]:
    """Returns the ranks as ints; raises ValueError unless they are at least 1 and sum to head_dim."""
    require(
        sum(ranks) == head_dim,
        f"ranks must sum to the head_dim {head_dim}, got {'+'.join(map(str, ranks))} = {sum(ranks)}",
    )
    return tuple(int(r) for r in ranks)


def check_block_sizes(block_sizes: Any, levels: int) -> tuple[int | None, ...]:
    """Returns the block sizes as ints or None; raises ValueError unless there is one per level and they nest."""
    require(
        len(block_sizes) == levels,
        f"block_sizes must have one size for each of the {levels} ranks, got {len(block_sizes)}",
    )
    for coarse, fine in itertools.pairwise(block_sizes):
        nested = coarse is None or (fine is not None and coarse % fine == 0)
        require(
            nested,
            "block_sizes must be nested, each a multiple of the next (None, one block over all tokens, first), "
            f"got {coarse} before {fine}",
        )
    return tuple(None if size is None else int(size) for size in block_sizes)


def score_scales(score_scale: float | None, features: Sequence[int]) -> tuple[float, ...]:
    """Returns the scales of scores that a configuration's `score_scale` gives products of so many features: that number
    over the number of features, or for None 1 over its root, as in softmax attention."""
    return tuple(n**-0.5 if score_scale is None else score_scale / n for n in features)


def feature_scales(ranks: Sequence[int], scale: Any, dtype: Any) -> Float[Array, "1 1 1 H"]:
    """Returns a factor for each query feature, which scales the products of each level."""
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
