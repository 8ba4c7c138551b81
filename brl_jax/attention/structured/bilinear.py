"""Attention whose scores are bilinear forms of high-rank structured matrices, MLR and BTT (arXiv:2509.07963, 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_lengths, check_scale, require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.attention.structured.mlr_levels import feature_scales
from brl_jax.fields import Count, declared

# A BTT is cheap only if the two factors of the width are similar.
_LARGEST_RATIO = 4


@attention_function
def bilinear_mlr_attention(
    x: Float[Array, "B T D"],
    value: Float[Array, "B T J V"],
    *,
    query_weights: Sequence[Float[Array, "_ _ N _"]],
    key_weights: Sequence[Float[Array, "_ _ K _"]],
    query_norm_scales: Sequence[Float[Array, " _"]] | None = None,
    key_norm_scales: Sequence[Float[Array, " _"]] | None = None,
    normalize: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention whose scores are a multi-level low-rank bilinear form of the tokens (arXiv:2509.07963, eq. 6).

    (B, T, D), (B, T, J, V) -> (B, T, N, V)::

        weights = {"query_weights": query_weights, "key_weights": key_weights}
        out = bilinear_mlr_attention(x, value, **weights, is_causal=True)

      score(i, j) = sum over the levels l of  q_i^(l) . k_j^(l) * scale / sqrt(r_l p_l)

    `bilinear_mlr_features` computes q^(l) and k^(l): it cuts x into p_l blocks of channels and multiplies each by
    its (D / p_l) x r_l matrix. As in eq. 32, tokens are multiplied by their factors first, and then queries by keys.

    Args:
      x: (B, T, D), float32, bfloat16 or float16; the tokens that queries and keys are made from.
      value: (B, T, J, V) of the same dtype; J divides K.
      query_weights: an array (p_l, D / p_l, N, r_l) for each level.
      key_weights: an array (p_l, D / p_l, K, r_l) for each level; K divides N.
      query_norm_scales, key_norm_scales: scales of the LayerNorms, an array (r_l p_l,) for each level, shared by
        the heads; 1 by default.
      normalize: applies a LayerNorm to the features of each head and level (appendix E.2); without it, scores are
        the plain bilinear form.
      scale: 1 by default; muP uses 8 / sqrt(r_l p_l) (appendix E.2).
      is_causal, query_seq_lengths, key_value_seq_lengths, segment_ids: as for `full_attention`.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of x. Memory is linear in T.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    require(
        len(query_weights) == len(key_weights)
        and all(q.shape[::3] == k.shape[::3] for q, k in zip(query_weights, key_weights)),
        f"key_weights must have query_weights' levels, blocks and ranks {[w.shape for w in query_weights]}, got "
        f"{[w.shape for w in key_weights]}",
    )
    asking, seen = _without_padding(x, query_seq_lengths, key_value_seq_lengths)
    query = bilinear_mlr_features(asking, query_weights, norm_scales=query_norm_scales, normalize=normalize)
    key = bilinear_mlr_features(seen, key_weights, norm_scales=key_norm_scales, normalize=normalize)
    scale = check_scale(1.0 if scale is None else scale, x.shape[2])
    counts = bilinear_mlr_counts(query_weights)
    query = query * feature_scales(counts, [scale / math.sqrt(count) for count in counts], x.dtype)
    return feature_attention(
        query, key, value, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, implementation=implementation,
    )  # fmt: skip


def bilinear_mlr_features(
    x: Float[Array, "B T D"],
    weights: Sequence[Float[Array, "_ _ N _"]],
    *,
    norm_scales: Sequence[Float[Array, " _"]] | None = None,
    normalize: bool = True,
    epsilon: float = 1e-5,
) -> Float[Array, "B T N F"]:
    """The F = sum_l r_l p_l features of all levels, concatenated; `epsilon` is added to the LayerNorms' variance."""
    require(x.ndim == 3, f"x must have shape (batch, length, width), got {x.shape}")
    require(len(weights) > 0, "weights must have at least one level, got none")
    require(
        norm_scales is None or len(norm_scales) == len(weights),
        f"norm_scales must be one for each of the {len(weights)} levels, got {len(norm_scales or ())}",
    )
    batch, length, width = x.shape
    levels = []
    for level, weight in enumerate(weights):
        require(
            weight.ndim == 4 and weight.shape[0] * weight.shape[1] == width,
            f"weights of level {level} must have shape (blocks, width / blocks, heads, rank) with width {width}, got "
            f"{weight.shape}",
        )
        blocks, size, heads, rank = weight.shape
        channels = x.reshape(batch, length, blocks, size)
        y = jnp.einsum(
            "btpd,pdnr->btnpr", channels, weight.astype(x.dtype), preferred_element_type=jnp.float32
        )
        y = y.reshape(batch, length, heads, blocks * rank)
        if normalize:
            scale = None if norm_scales is None else norm_scales[level]
            y = _layer_norm(y, scale, epsilon, f"norm_scales of level {level}")
        levels.append(y.astype(x.dtype))
    return jnp.concatenate(levels, -1)


def bilinear_mlr_counts(weights: Sequence[Array]) -> list[int]:
    """r_l p_l, the number of features of each level."""
    return [weight.shape[0] * weight.shape[3] for weight in weights]


@attention_function
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
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention whose scores are a block tensor-train form of the tokens (arXiv:2509.07963, eqs. 7 and 40).

    (B, T, D), (B, T, J, V) -> (B, T, N, V)::

        out = bilinear_btt_attention(x, value, right=right, left=left, is_causal=True)

      score(i, j) = scale x_i . LN(BTT(x_j))

    `bilinear_btt_keys` computes LN(BTT(x)). Each head's query is the token itself, so heads differ only in their
    keys, and only the heads of the values can be grouped.

    Args:
      x: (B, T, D), float32, bfloat16 or float16; the tokens that queries and keys are made from.
      value: (B, T, J, V) of the same dtype; J divides N.
      right: (c, e, N, b, t) with c e = D, where t is the rank.
      left: (N, b, a, c, t) with a b = D.
      norm_scale: scale of the LayerNorm, (D,), shared by the heads; 1 by default.
      normalize: applies a LayerNorm over D to the keys; without it, scores are the plain bilinear form.
      scale: 1 / sqrt(D) by default; muP uses a constant over D (appendix E.2).
      is_causal, query_seq_lengths, key_value_seq_lengths, segment_ids: as for `full_attention`.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of x. Memory is linear in T.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    asking, seen = _without_padding(x, query_seq_lengths, key_value_seq_lengths)
    key = bilinear_btt_keys(seen, right, left, norm_scale=norm_scale, normalize=normalize)
    query = bilinear_btt_queries(asking, key.shape[2], check_scale(scale, x.shape[2]))
    return feature_attention(
        query, key, value, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, implementation=implementation,
    )  # fmt: skip


def _without_padding(
    x: Float[Array, "B T D"], query_lengths: Any, key_lengths: Any
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """x for the queries and x for the keys. A NaN in the padding would reach the gradients of the weights."""
    lengths = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
    asking, seen = (zero_padding(x, check_lengths(name, n, len(x))) for name, n in lengths.items())
    return asking, seen


def bilinear_btt_queries(x: Float[Array, "B T D"], heads: int, scale: float) -> Float[Array, "B T N D"]:
    """The scaled tokens, repeated for each head."""
    batch, length, width = x.shape
    query = x * jnp.asarray(scale, x.dtype)
    return jnp.broadcast_to(query[:, :, None], (batch, length, heads, width))


def bilinear_btt_keys(
    x: Float[Array, "B T D"],
    right: Float[Array, "c e N b t"],
    left: Float[Array, "N b a c t"],
    *,
    norm_scale: Float[Array, " D"] | None = None,
    normalize: bool = True,
    epsilon: float = 1e-5,
) -> Float[Array, "B T N D"]:
    """LN(BTT(x)) for each head: y[a, b] = sum_{c, t} left[b, a, c, t] sum_e right[c, e, b, t] x[c, e] (eq. 35).

    Each head's D x D matrix has full rank but costs only two products of small blocks, 2 D b t + 2 D c t FLOPs per
    token. `epsilon` is added to the LayerNorm's variance.
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
    return (_layer_norm(y, norm_scale, epsilon, "norm_scale") if normalize else y).astype(x.dtype)


@declared
def btt_factors(width: Count) -> tuple[int, int]:
    """Returns factors a, b of the width for a BTT: b is the smallest divisor that is at least sqrt(width).

        btt_factors(48)  # (6, 8)

    Raises:
      ValueError: the width is not an int of at least 1, or no two factors above 1 are within a ratio of 4, so that
        the BTT would be almost dense. The message names the nearest widths that work.
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


def _layer_norm(x: Array, scale: Array | None, epsilon: float, name: str) -> Array:
    """LayerNorm over the last axis without bias, with float32 statistics; `name` is the scale's, for messages."""
    require(
        scale is None or scale.shape == x.shape[-1:],
        f"{name} must have shape {x.shape[-1:]}, got {None if scale is None else scale.shape}",
    )
    wide = x.astype(accumulation_dtype(x.dtype))
    wide = wide - wide.mean(-1, keepdims=True)
    y = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + epsilon)
    return y if scale is None else y * scale.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
