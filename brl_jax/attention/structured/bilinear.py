"""Attention whose scores are bilinear forms of structured matrices of high rank: MLR and BTT (002, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.structured.feature_attention import feature_attention

# A BTT is cheap where its two factors of the width are near each other.
_LARGEST_RATIO = 4


def bilinear_mlr_attention(
    x: Float[Array, "B T D"],
    value: Float[Array, "B T J V"],
    *,
    query_weights: Sequence[Float[Array, "p d N r"]],
    key_weights: Sequence[Float[Array, "p d K r"]],
    query_norm_scales: Sequence[Float[Array, " pr"]] | None = None,
    key_norm_scales: Sequence[Float[Array, " pr"]] | None = None,
    normalize: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention with a multi-level low-rank matrix between the tokens of each head (002, eq. 6).

      score(i, j) = sum over the levels l of  q_i^(l) . k_j^(l) * scale / sqrt(r_l p_l)

    with q^(l), k^(l) from `bilinear_mlr_features`: x in p_l blocks of channels, each by its own d/p_l x r_l matrix. The
    order of the products is that of 002, eq. 32: tokens meet their factors first, and then each other.

    Args:
      x: (B, T, D), float32, bfloat16 or float16; the tokens that are queries and keys.
      value: (B, T, J, V) of the same dtype; J divides K.
      query_weights: for each level (p_l, D / p_l, N, r_l).
      key_weights: for each level (p_l, D / p_l, K, r_l); K divides N.
      query_norm_scales, key_norm_scales: of the LayerNorms, for each level (r_l p_l,), shared by the heads; None for 1.
      normalize: LayerNorms of each head's and level's features (002, E.2); without, the scores are the bare form.
      scale: 1 by default; muP's is 8 / sqrt(r_l p_l) for a level of as many features (002, E.2).
      is_causal, query_seq_lengths, key_value_seq_lengths, segment_ids: as in `full_attention`.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in x's dtype. Memory is linear in T.

    Raises:
      ValueError: shapes that don't fit, naming the argument.
    """
    require(
        len(query_weights) == len(key_weights)
        and all(q.shape[::3] == k.shape[::3] for q, k in zip(query_weights, key_weights)),
        f"key_weights must have query_weights' levels, blocks and ranks {[w.shape for w in query_weights]}, got "
        f"{[w.shape for w in key_weights]}",
    )
    query = bilinear_mlr_features(x, query_weights, norm_scales=query_norm_scales, normalize=normalize)
    key = bilinear_mlr_features(x, key_weights, norm_scales=key_norm_scales, normalize=normalize)
    query = query * bilinear_mlr_scales(query_weights, 1.0 if scale is None else scale, x.dtype)
    return feature_attention(
        query, key, value, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, implementation=implementation,
    )  # fmt: skip


def bilinear_mlr_features(
    x: Float[Array, "B T D"],
    weights: Sequence[Float[Array, "p d N r"]],
    *,
    norm_scales: Sequence[Float[Array, " pr"]] | None = None,
    normalize: bool = True,
) -> Float[Array, "B T N F"]:
    """The features of all levels side by side, F = sum_l r_l p_l; arguments as in `bilinear_mlr_attention`."""
    require(x.ndim == 3, f"x must have shape (batch, length, width), got {x.shape}")
    require(len(weights) > 0, "weights must have at least one level, got none")
    batch, length, width = x.shape
    levels = []
    for level, weight in enumerate(weights):
        require(
            weight.ndim == 4 and weight.shape[0] * weight.shape[1] == width,
            f"weights of level {level} must have shape (blocks, width / blocks, heads, rank) with width {width}, got "
            f"{weight.shape}",
        )
        blocks, size, heads, rank = weight.shape
        cut = x.reshape(batch, length, blocks, size)
        y = jnp.einsum("btpd,pdnr->btnpr", cut, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        y = y.reshape(batch, length, heads, blocks * rank)
        if normalize:
            y = _layer_norm(y, None if norm_scales is None else norm_scales[level])
        levels.append(y.astype(x.dtype))
    return jnp.concatenate(levels, -1)


def bilinear_mlr_scales(weights: Sequence[Array], scale: float, dtype: Any) -> Float[Array, "1 1 1 F"]:
    """scale / sqrt(r_l p_l) for each feature."""
    counts = [weight.shape[0] * weight.shape[3] for weight in weights]
    parts = [jnp.full((1, 1, 1, count), scale / math.sqrt(count), dtype) for count in counts]
    return jnp.concatenate(parts, -1)


def bilinear_btt_attention(
    x: Float[Array, "B T D"],
    value: Float[Array, "B T J V"],
    *,
    right: Float[Array, "c e N b t"],
    left: Float[Array, "N b a c t"],
    norm_scale: Float[Array, " D"] | None = None,
    normalize: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention with a block tensor-train matrix between the tokens of each head (002, eq. 7 and 40).

      score(i, j) = scale x_i . LN(BTT(x_j))

    BTT as in `bilinear_btt_keys`. A query is the token itself, so that heads differ in their keys, and each needs its
    own: only the values' heads can be grouped.

    Args:
      x: (B, T, D), float32, bfloat16 or float16; the tokens that are queries and keys.
      value: (B, T, J, V) of the same dtype; J divides N.
      right: (c, e, N, b, t) with c e = D; left: (N, b, a, c, t) with a b = D. t is the rank.
      norm_scale: of the LayerNorm, (D,), shared by the heads; None for 1.
      normalize: the LayerNorm of the keys over D; without it the scores are the bare form.
      scale: 1 / sqrt(D) by default; muP's is a constant over D (002, E.2).
      is_causal, query_seq_lengths, key_value_seq_lengths, segment_ids: as in `full_attention`.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in x's dtype. Memory is linear in T.

    Raises:
      ValueError: shapes that don't fit, naming the argument.
    """
    key = bilinear_btt_keys(x, right, left, norm_scale=norm_scale, normalize=normalize)
    query = bilinear_btt_queries(x, key.shape[2], scale)
    return feature_attention(
        query, key, value, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, implementation=implementation,
    )  # fmt: skip


def bilinear_btt_queries(
    x: Float[Array, "B T D"], heads: int, scale: float | None
) -> Float[Array, "B T N D"]:
    """The tokens themselves, for every head, times the scale of the scores."""
    batch, length, width = x.shape
    query = x * jnp.asarray(1 / math.sqrt(width) if scale is None else scale, x.dtype)
    return jnp.broadcast_to(query[:, :, None], (batch, length, heads, width))


def bilinear_btt_keys(
    x: Float[Array, "B T D"],
    right: Float[Array, "c e N b t"],
    left: Float[Array, "N b a c t"],
    *,
    norm_scale: Float[Array, " D"] | None = None,
    normalize: bool = True,
) -> Float[Array, "B T N D"]:
    """LN(BTT(x)) of each head: y[a, b] = sum_{c, t} left[b, a, c, t] sum_e right[c, e, b, t] x[c, e] (002, eq. 35).

    Two products of small blocks, 2 D b t + 2 D c t FLOPs a head for its D x D matrix of full rank.
    """
    require(x.ndim == 3, f"x must have shape (batch, length, width), got {x.shape}")
    batch, length, width = x.shape
    require(
        right.ndim == 5 and right.shape[0] * right.shape[1] == width,
        f"right must have shape (c, e, heads, b, t) with c * e = {width}, got {right.shape}",
    )
    (c, e, heads, b, t), a = right.shape, left.shape[2] if left.ndim == 5 else 0
    require(
        left.shape == (heads, b, a, c, t) and a * b == width,
        f"left must have shape (heads, b, a, c, t) = ({heads}, {b}, {width}/{b}, {c}, {t}), got {left.shape}",
    )
    inner = jnp.einsum(
        "bsce,cenpt->bsnpct", x.reshape(batch, length, c, e), right.astype(x.dtype),
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)  # fmt: skip
    y = jnp.einsum(
        "bsnpct,npact->bsnap", inner, left.astype(x.dtype), preferred_element_type=jnp.float32
    ).reshape(batch, length, heads, width)
    return (_layer_norm(y, norm_scale) if normalize else y).astype(x.dtype)


def btt_factors(width: int) -> tuple[int, int]:
    """a, b with a b = width for a BTT: b the smallest divisor not below sqrt(width); 48 gives 6, 8.

    Raises:
      ValueError: the width has no two factors above 1 of which the larger is at most 4 times the other, in which case
        a BTT would be all but dense; names the nearest widths that have.
    """
    a, b = _nearest_factors(width)
    if _has_factors(width):
        return a, b
    near = [
        next((n for n in candidates if _has_factors(n)), None)
        for candidates in (range(width - 1, 1, -1), range(width + 1, 2 * width + 8))
    ]
    names = " and ".join(f"{n} = {'*'.join(map(str, _nearest_factors(n)))}" for n in near if n is not None)
    raise ValueError(
        f"width must be a product of two numbers above 1, the larger at most {_LARGEST_RATIO} times the other, "
        f"got {width} = {a}*{b}; the nearest such widths are {names}"
    )


def _nearest_factors(width: int) -> tuple[int, int]:
    b = next(n for n in range(math.isqrt(width - 1) + 1 if width > 1 else 1, width + 1) if width % n == 0)
    return width // b, b


def _has_factors(width: int) -> bool:
    a, b = _nearest_factors(width)
    return a > 1 and b <= _LARGEST_RATIO * a


def _layer_norm(x: Array, scale: Array | None) -> Array:
    """Over the last axis, without bias; statistics in float32."""
    wide = x.astype(accumulation_dtype(x.dtype))
    wide = wide - wide.mean(-1, keepdims=True)
    y = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    return y if scale is None else y * scale.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
