"""Plain forms of this family's functions: dense (T, T) scores, then a softmax.

They are slow, use O(T^2) memory and have no padding. Readers learn from them what the functions of the same names
compute, and the tests compare the two. Everything is computed in float32. Equations are from arXiv:2509.07963.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def mlr_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    ranks: Sequence[int],
    block_sizes: Sequence[int | None],
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """score(i, j) = sum of q_i^(l) . k_j^(l) / r_l over the levels l whose block contains both i and j (eq. 9)."""
    position = jnp.arange(query.shape[1])
    query, key = query.astype(jnp.float32), _repeat_heads(key, query.shape[2])
    length = query.shape[1]
    scores = jnp.zeros((query.shape[0], query.shape[2], length, length), jnp.float32)
    start = 0
    for rank, size in zip(ranks, block_sizes):
        block = position // (length if size is None else size)
        same = block[:, None] == block[None]
        level = slice(start, start + rank)
        products = jnp.einsum("btnh,bsnh->bnts", query[..., level], key[..., level]) / rank
        scores = scores + jnp.where(same[None, None], products, 0.0)
        start += rank
    return _attend(scores, value, _visible(length, is_causal))


def bilinear_mlr_attention(
    x: Float[Array, "B T D"],
    value: Float[Array, "B T J V"],
    *,
    query_weights: Sequence[Float[Array, "_ _ N _"]],
    key_weights: Sequence[Float[Array, "_ _ K _"]],
    normalize: bool = True,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """score(i, j) = sum over the levels of LN(W_q x_i) . LN(W_k x_j) / sqrt(r_l p_l), W block-diagonal (eq. 6)."""
    heads = query_weights[0].shape[2]

    def features(weight: Array) -> Array:
        blocks, size, _, rank = weight.shape
        channels = x.astype(jnp.float32).reshape(*x.shape[:2], blocks, size)
        y = jnp.einsum("btpd,pdnr->btnpr", channels, weight).reshape(*x.shape[:2], -1, blocks * rank)
        return _repeat_heads(_layer_norm(y) if normalize else y, heads)

    scores = jnp.zeros((x.shape[0], heads, x.shape[1], x.shape[1]), jnp.float32)
    for query_weight, key_weight in zip(query_weights, key_weights):
        query, key = features(query_weight), features(key_weight)
        scores = scores + jnp.einsum("btnf,bsnf->bnts", query, key) / math.sqrt(query.shape[-1])
    return _attend(scores, value, _visible(x.shape[1], is_causal))


def bilinear_btt_attention(
    x: Float[Array, "B T D"],
    value: Float[Array, "B T J V"],
    *,
    right: Float[Array, "c e N b t"],
    left: Float[Array, "N b a c t"],
    normalize: bool = True,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """score(i, j) = x_i . LN(M x_j) / sqrt(D) with M[(a, b), (c, e)] = sum_t left right (eqs. 5, 7 and 40)."""
    width, heads = x.shape[2], left.shape[0]
    matrix = jnp.einsum("nbact,cenbt->nabce", left, right).reshape(heads, width, width)
    key = jnp.einsum("nij,bsj->bsni", matrix, x.astype(jnp.float32))
    key = _layer_norm(key) if normalize else key
    scores = jnp.einsum("bti,bsni->bnts", x.astype(jnp.float32), key) / math.sqrt(width)
    return _attend(scores, value, _visible(x.shape[1], is_causal))


def global_window_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    ranks: tuple[int, int],
    window: int,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """Attention by the head's first features to all tokens, plus by the others to a window (section 5.1)."""
    length, (first, second) = query.shape[1], ranks
    query, key = query.astype(jnp.float32), _repeat_heads(key, query.shape[2])
    everything = _visible(length, is_causal)
    distance = jnp.abs(jnp.arange(length)[:, None] - jnp.arange(length)[None])
    near = everything & (distance <= (window - 1 if is_causal else window // 2))
    scores = [
        8 / rank * jnp.einsum("btnh,bsnh->bnts", query[..., part], key[..., part])
        for rank, part in ((first, slice(0, first)), (second, slice(first, None)))
    ]
    return _attend(scores[0], value, everything) + _attend(scores[1], value, near)


def _attend(
    scores: Float[Array, "B N T S"], value: Float[Array, "B S J V"], visible: Bool[Array, "T S"]
) -> Float[Array, "B T N V"]:
    weights = jax.nn.softmax(scores, axis=-1, where=visible[None, None])
    return jnp.einsum("bnts,bsnv->btnv", weights, _repeat_heads(value, scores.shape[1]))


def _visible(length: int, is_causal: bool) -> Bool[Array, "T T"]:
    return jnp.tri(length, dtype=bool) if is_causal else jnp.ones((length, length), bool)


def _repeat_heads(x: Float[Array, "B S K H"], heads: int) -> Float[Array, "B S N H"]:
    """A float32 array with one head per query head."""
    return jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], axis=2)


def _layer_norm(x: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """LayerNorm without scale and bias."""
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
