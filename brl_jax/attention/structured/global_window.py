"""Heads split into a part that sees all tokens and a part that sees a window (arXiv:2509.07963, section 5.1)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_qkv, check_scale, require
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.attention.structured.mlr_levels import check_ranks
from brl_jax.fields import Count


@attention_function
def global_window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    ranks: tuple[Count, Count],
    window: Count,
    scale: tuple[float, float] | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Sums two softmax attentions over the same values: a global one and a windowed one, each on part of the head.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        split = {"ranks": (16, 48), "window": 128}
        out = global_window_attention(query, key, value, **split, is_causal=True)

      out = softmax(scale_1 q^(1) k^(1)T) v + softmax_window(scale_2 q^(2) k^(2)T) v

    q^(1) is the first ranks[0] features of the head, q^(2) the rest. A query's weights sum to 2. The first part
    takes quadratic time; memory is linear. arXiv:2509.07963, section 5.1, compares with it.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) and (B, T, K, V) of the same dtype; K divides N.
      ranks: features of the global part and of the window part; they sum to H.
      window: w. A query sees w keys if causal, its own and the w - 1 before it, else its own and w // 2 keys on each
        side, as in `LocalConfig`.
      scale: scales of the two parts' scores; 8 / rank by default.
      is_causal, key_value_seq_lengths, segment_ids: as for `full_attention`.
      implementation: for the window part, as for `local_attention`; the global part always runs through XLA.

    Returns:
      (B, T, N, V) in the query's dtype.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_qkv(query, key, value)
    first, _ = check_ranks(ranks, query.shape[3])
    if scale is None:
        scale = (8 / ranks[0], 8 / ranks[1])
    require(
        isinstance(scale, (tuple, list)) and len(scale) == 2,
        f"scale must be two numbers, one for each part, got {scale!r}",
    )
    scales = [check_scale(part, query.shape[3]) for part in scale]
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "key_value_seq_lengths": key_value_seq_lengths,
        "segment_ids": segment_ids,
    }
    everywhere = feature_attention(
        query[..., :first] * jnp.asarray(scales[0], query.dtype), key[..., :first], value, **options
    )
    near = local_attention(
        query[..., first:], key[..., first:], value, scale=scales[1],
        pattern=SlidingWindow.of_width(window, is_causal), implementation=implementation, **options,
    )  # fmt: skip
    return everywhere + near
