"""Kernelized attention: a Gaussian kernel of queries and keys without a denominator (Chen et al. 2021)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_scale,
    require,
    zero_padding,
)
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.core.varying import vary_like


@attention_function
def kernelized_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    scale: float | None = None,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """out_i = sum_j exp(-scale |q_i - k_j|^2 / 2) v_j, in O(T S) time and O(T + S) memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = kernelized_attention(query, key, value)

    Skyformer (Chen et al. 2021, arXiv:2111.00035), section 4.1: with its queries and keys, multiplied by H^(-1/4), the
    weight is exp(q . k - |q|^2 / 2 - |k|^2 / 2). Weights are not normalised, so outputs grow with the number of nearby
    keys. There is no causal form.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, S, K, H) and (B, S, K, V) of the same dtype; K divides N.
      scale: multiplies the squared distances, at least 0; 1 / sqrt(H) by default.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later queries and keys are padding. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in query's dtype, computed in float32.

    Raises:
      ValueError: arguments do not fit together.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    check_implementation(implementation, None, "xla")
    scale = check_scale(scale, query.shape[3])
    require(scale >= 0, f"scale must be at least 0, got {scale}")
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    # Padding needs no mask: its weights are finite and its values 0.
    key, value = (zero_padding(x, key_lengths).astype(jnp.float32) for x in (key, value))

    def attend(query: Array, *_: Any) -> Float[Array, "B T N V"]:
        batch, length, heads = query.shape[:3]
        weights = gaussian_kernel(query.astype(jnp.float32), key, scale)
        grouped = weights.reshape(batch, key.shape[2], -1, length, key.shape[1])
        return jnp.einsum("bkgts,bskv->btkgv", grouped, value).reshape(batch, length, heads, -1)

    out = by_query_blocks(attend, QUERY_BLOCK, zero_padding(query, query_lengths))
    return zero_padding(out, query_lengths).astype(query.dtype)


def gaussian_kernel(
    query: Float[Array, "B T N H"], key: Float[Array, "B S K H"], scale: float
) -> Float[Array, "B N T S"]:
    """exp(-scale |q_i - k_j|^2 / 2) of float32 queries and keys."""
    batch, length, heads, head_dim = query.shape
    rows = query.reshape(batch, length, key.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
    distances = half_square_distances(rows, jnp.swapaxes(key, 1, 2))
    return jnp.exp(-scale * distances).reshape(batch, heads, length, -1)


@jax.custom_jvp
def half_square_distances(
    query: Float[Array, "B K G T H"], key: Float[Array, "B K S H"]
) -> Float[Array, "B K G T S"]:
    """|q_i - k_j|^2 / 2, computed from the differences. For two large vectors that are close, |q|^2 / 2 + |k|^2 / 2 -
    q . k would lose all digits and could be negative."""

    def one_feature(total: Array, features: tuple[Array, Array]) -> tuple[Array, None]:
        query, key = features
        return total + jnp.square(query[..., None] - key[:, :, None, None]), None

    def by_features(query: Array, key: Array) -> Array:
        # A CPU is faster at adding whole rows of keys than at adding the few features of each pair.
        total = vary_like(jnp.zeros((*query.shape[:-1], key.shape[2]), query.dtype), (query, key))
        return lax.scan(one_feature, total, (jnp.moveaxis(query, -1, 0), jnp.moveaxis(key, -1, 0)))[0]

    def by_pairs(query: Array, key: Array) -> Array:
        return jnp.square(query[..., None, :] - key[:, :, None, None]).sum(-1)

    return branches(query, key, cpu=by_features, default=by_pairs) / 2


@half_square_distances.defjvp
def _distances_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (query, key), (d_query, d_key) = primals, tangents
    product = functools.partial(jnp.einsum, "bkgth,bksh->bkgts")
    rows, columns = (query * d_query).sum(-1), (key * d_key).sum(-1)
    change = rows[..., None] + columns[:, :, None, None] - product(d_query, key) - product(query, d_key)
    return half_square_distances(query, key), change
