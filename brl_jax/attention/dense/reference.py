"""Definitions of this family's functions, with dense (T, S) weights in float32. The tests compare the two.

They are slow, use O(T S) memory and do not support padding.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def full_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: float | None = None,
) -> Float[Array, "B T N V"]:
    """softmax(scale q k^T + bias) v over the visible keys (arXiv:1706.03762, eq. 1); 0 for a query that sees none."""
    query, key, value = float32_heads(query, key, value)
    scores = scaled_scores(query, key, scale)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    visible = jnp.ones(scores.shape, bool)
    if is_causal:
        visible = jnp.tril(visible)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        scores = scores + bias
        visible = visible & ~jnp.isneginf(scores)
    top = scores.max(-1, keepdims=True, where=visible, initial=-1e30)
    top = top if sinks is None else jnp.maximum(top, sinks[None, :, None, None])
    exponentials = jnp.where(visible, jnp.exp(scores - top), 0)
    total = exponentials.sum(-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks[None, :, None, None] - top)
    weights = exponentials / jnp.maximum(total, 1e-30)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def kernelized_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    scale: float | None = None,
) -> Float[Array, "B T N V"]:
    """sum_j exp(-scale |q_i - k_j|^2 / 2) v_j (arXiv:2111.00035, section 4.1)."""
    query, key, value = float32_heads(query, key, value)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    distances = jnp.square(query[:, :, None] - key[:, None]).sum(-1)
    return jnp.einsum("btsn,bsnv->btnv", jnp.exp(-scale * distances / 2), value)


def synthesizer_attention(
    value: Float[Array, "B S K V"],
    rows: Float[Array, "B T N R"] | Float[Array, "T N R"],
    columns: Float[Array, "L N R"],
    column_bias: Float[Array, "L N"] | None = None,
    *,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """softmax(rows columns^T + column_bias) v (arXiv:2005.00743, section 3.1)."""
    length = value.shape[1]
    scores = jnp.einsum("...tnr,snr->...nts", rows, columns[:length]).astype(jnp.float32)
    if column_bias is not None:
        scores = scores + jnp.broadcast_to(column_bias[:length].T[:, None], scores.shape)
    visible = jnp.tril(jnp.ones(scores.shape, bool)) if is_causal else True
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    value = jnp.repeat(value.astype(jnp.float32), rows.shape[-2] // value.shape[2], axis=2)
    return jnp.einsum("nts,bsnv->btnv" if rows.ndim == 3 else "bnts,bsnv->btnv", weights, value)


def hopfield_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    steps: int = 1,
    scale: float | None = None,
    is_causal: bool = False,
) -> Float[Array, "B T N H"]:
    """steps - 1 updates xi <- softmax(scale xi K^T) K, then softmax(scale xi K^T) V (arXiv:2008.02217, eqs. 3, 10)."""
    for _ in range(steps - 1):
        query = full_attention(query, key, key, scale=scale, is_causal=is_causal)
    return full_attention(query, key, value, scale=scale, is_causal=is_causal)


def float32_heads(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """float32 arrays with one key head and one value head for each query head."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    return query.astype(jnp.float32), key, value


def scaled_scores(
    query: Float[Array, "B T N H"], key: Float[Array, "B S N H"], scale: float | None
) -> Float[Array, "B N T S"]:
    """scale q k^T, with the scale 1 / sqrt(H) by default."""
    return jnp.einsum("btnh,bsnh->bnts", query, key) * (
        1 / math.sqrt(query.shape[3]) if scale is None else scale
    )
