"""Definitions of compression and propagation: all logits at once, without masks and lengths."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.scores import Score, attention_weights


def compress(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"],
    value: Float[Array, "B S N V"],
    *,
    gamma: Float[Array, "#N"],
    score: Score = "softmax",
) -> Float[Array, "B M N V"]:
    """out = (sigma(c Q K1^T) - gamma sigma(c Q K2^T)) V per head, with c = 1 / (M sqrt(H)).

    BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), eq. 12. Arguments as in `brl_jax.compress`.
    """
    scale = 1.0 / (query.shape[1] * math.sqrt(query.shape[3]))
    first, second = (
        attention_weights(scale * jnp.einsum("bmnh,bsnh->bnms", query, keys), None, score)
        for keys in (key, contrast_key)
    )
    return jnp.einsum("bnms,bsnv->bmnv", first - gamma[None, :, None, None] * second, value)


def compress_blocks(
    query: Float[Array, "B C M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"],
    value: Float[Array, "B S N V"],
    *,
    gamma: Float[Array, "#N"],
    block_size: int,
    history_size: int,
    score: Score = "softmax",
) -> Float[Array, "B C M N V"]:
    """`compress` block by block: block c reads the keys [c * block_size, c * block_size + history_size)."""
    outs = []
    for block in range(query.shape[1]):
        history = slice(block * block_size, block * block_size + history_size)
        keys = (x[:, history] for x in (key, contrast_key, value))
        outs.append(compress(query[:, block], *keys, gamma=gamma, score=score))
    return jnp.stack(outs, axis=1)


def propagate(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B M N H"],
    value: Float[Array, "B M N V"],
    *,
    strength: Float[Array, "#N"],
    score: Score = "softmax",
) -> Float[Array, "B T N V"]:
    """out = lambda sigma(z_Q z_K^T / sqrt(H)) z_V per head, with lambda the strength.

    BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), eq. 9. Arguments as in `brl_jax.propagate`.
    """
    logits = jnp.einsum("btnh,bmnh->bntm", query, key) / math.sqrt(query.shape[3])
    weights = strength[None, :, None, None] * attention_weights(logits, None, score)
    return jnp.einsum("bntm,bmnv->btnv", weights, value)
