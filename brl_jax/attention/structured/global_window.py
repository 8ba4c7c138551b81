"""Heads split in a part that sees everything and a part that sees a window (a comparison of 002, section 5.1)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import is_int
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.structured.feature_attention import feature_attention


def global_window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    ranks: tuple[int, int],
    window: int,
    scale: tuple[float, float] | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """The sum of two softmax attentions of the same values, each by its own slice of the head.

      out = softmax(scale_1 q^(1) k^(1)T) v + softmax_window(scale_2 q^(2) k^(2)T) v

    q^(1) the first ranks[0] features of the head, q^(2) the others. The rows of weights sum to 2. Quadratic time
    through the first part; memory is linear.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) of the same dtype; K divides N.
      ranks: features of the global and of the window part; they sum to H.
      window: w; the window holds w + 1 keys: a causal query's own and the w before it, else w // 2 on both sides.
      scale: of the two parts' scores; 8 / rank each by default.
      is_causal, key_value_seq_lengths, segment_ids: as in `full_attention`.
      implementation: of the window part, as in `local_attention`; the global part takes "xla" only.

    Returns:
      (B, T, N, H) in query's dtype.

    Raises:
      ValueError: shapes, ranks or windows that don't fit, naming the argument.
    """
    check_qkv(query, key, value)
    first = check_split(ranks, query.shape[3])
    if scale is None:
        scale = (8 / ranks[0], 8 / ranks[1])
    require(
        isinstance(scale, (tuple, list)) and len(scale) == 2,
        f"scale must be two numbers, one for each part, got {scale!r}",
    )
    pattern = split_window(window, is_causal)
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "key_value_seq_lengths": key_value_seq_lengths,
        "segment_ids": segment_ids,
    }
    everywhere = feature_attention(
        query[..., :first] * jnp.asarray(scale[0], query.dtype), key[..., :first], value, **options
    )
    near = window_part(
        query[..., first:], key[..., first:], value, scale=scale[1], pattern=pattern,
        implementation=implementation, **options,
    )  # fmt: skip
    return everywhere + near


def window_part(query: Array, key: Array, value: Array, **options: Any) -> Array:
    """`local_attention` whose queries and keys have fewer features than the values: the missing ones are 0."""
    room = [(0, 0)] * 3 + [(0, value.shape[3] - query.shape[3])]
    return local_attention(jnp.pad(query, room), jnp.pad(key, room), value, **options)


def check_split(ranks: Any, head_dim: int) -> int:
    """The features of the global part; ValueError unless both parts have some and together the head's."""
    require(
        isinstance(ranks, (tuple, list)) and len(ranks) == 2 and all(is_int(r) and r >= 1 for r in ranks),
        f"ranks must be two ints of at least 1, got {ranks!r}",
    )
    require(sum(ranks) == head_dim, f"ranks must sum to the head_dim {head_dim}, got {ranks[0]}+{ranks[1]}")
    return int(ranks[0])


def split_window(window: Any, is_causal: bool) -> SlidingWindow:
    require(is_int(window) and window >= 1, f"window must be an int of at least 1, got {window!r}")
    return SlidingWindow(window, 0) if is_causal else SlidingWindow(window // 2, window // 2)
