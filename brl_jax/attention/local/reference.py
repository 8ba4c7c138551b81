"""The definitions of local attention and of DiagAttention, under a dense (T, S) mask. Slow, and O(T S) memory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.dense.reference import float32_heads, full_attention, scaled_scores
from brl_jax.attention.local.patterns import Pattern


def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    pattern: Pattern,
    is_causal: bool = False,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int = 0,
    key_offset: int = 0,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """out_i = sum_j p_ij v_j, where p_i is the softmax of scale q_i . k_j + bias_ij over the visible keys j.

    With a soft cap c the scores are c tanh(scale q_i . k_j / c) + bias_ij. A query that sees no key gives 0. Arguments
    as in `brl_jax.local_attention`.
    """
    _, num_keys, kv_heads, head_dim = key.shape
    num_queries, heads = query.shape[1:3]
    key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    key_positions = jnp.arange(num_keys) + key_offset
    query_positions = jnp.arange(num_queries) + query_offset + key_offset
    last = max(key_offset + num_keys, query_offset + key_offset + num_queries)
    rows, columns = query_positions[:, None], key_positions[None, :]
    if pattern.granule is not None:  # its table is looked up with NumPy positions
        rows, columns = jax.device_get((rows, columns))
    visible = jnp.asarray(pattern.visible(rows, columns, last))[None]
    if is_causal:
        visible = visible & (key_positions[None, :] <= query_positions[:, None])[None]
    if key_value_seq_lengths is not None:
        visible = visible & (jnp.arange(num_keys)[None, :] < key_value_seq_lengths[:, None])[:, None]
    if segment_ids is not None:
        visible = visible & (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    scores = scores * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    scores = scores if bias is None else scores + bias
    visible = jnp.broadcast_to(visible[:, None], scores.shape)
    if sinks is not None:  # one more key, without a value
        extra = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, extra], axis=3)
        visible = jnp.concatenate([visible, jnp.ones_like(extra, bool)], axis=3)
    weights = jax.nn.softmax(scores, axis=-1, where=visible)[..., :num_keys]
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)


def diag_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    block_size: int = 64,
    score: str = "softmax",
    scale: float | None = None,
    is_causal: bool = False,
) -> Float[Array, "B T N H"]:
    """Softmax or ReLU attention among the tokens of the same block i // block_size (arXiv:2210.10340, section 4.3)."""
    block = jnp.arange(query.shape[1]) // block_size
    visible = block[:, None] == block[None]
    if is_causal:
        visible = jnp.tril(visible)
    if score == "softmax":
        return full_attention(query, key, value, mask=visible[None, None], scale=scale)
    query, key, value = float32_heads(query, key, value)
    weights = jnp.where(visible[None, None], jax.nn.relu(scaled_scores(query, key, scale)), 0)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)
