"""Linformer: keys and values projected along the length, so that every query attends to a fixed number of keys."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_dtypes, check_lengths, check_qkv, require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.low_rank.few_keys import attend_to_few


@attention_function
def linformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    key_projection: Float[Array, "R L"] | Float[Array, "K R L"],
    value_projection: Float[Array, "R P"] | Float[Array, "K R P"],
    scale: float | None = None,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Attends to R linear mixtures of the keys instead of S keys, in O((T + S) R) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = linformer_attention(
            query, key, value, key_projection=key_projection, value_projection=value_projection
        )

      out = softmax(scale q (E K)^T) F V

    Wang et al. 2020, arXiv:2006.04768, eq. 7. It has no causal form: each row of E K mixes keys of the whole sequence.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, S, K, H) and (B, S, K, V) of the same dtype; K divides N.
      key_projection, value_projection: E (R, L) and F (R, P) in the query's dtype, or (K, R, L) and (K, R, P) for
        one projection per key head. L and P are maximum lengths, at least S; the first S columns are used.
      scale: scale of the scores; 1 / sqrt(H) by default.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; rows and keys at and after the length are padding.
        Padding may contain anything, is not projected, and gives 0.
      implementation: as for `full_attention`.

    Returns:
      (B, T, N, V) in the query's dtype.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, key.shape[0])
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key = _project("key_projection", key_projection, zero_padding(key, key_lengths))
    value = _project("value_projection", value_projection, zero_padding(value, key_lengths))

    query = zero_padding(query, query_lengths)
    out = attend_to_few(query, key, value, scale=scale, implementation=implementation)
    return zero_padding(out, query_lengths)


def _project(name: str, projection: Array, x: Float[Array, "B S K H"]) -> Float[Array, "B R K H"]:
    length, heads = x.shape[1:3]
    require(
        projection.ndim in (2, 3) and 0 not in projection.shape and projection.shape[:-2] in ((), (heads,)),
        f"{name} must have shape (rows, length) or ({heads}, rows, length), got {projection.shape}",
    )
    require(projection.dtype == x.dtype, f"{name} must have key's dtype {x.dtype}, got {projection.dtype}")
    require(
        projection.shape[-1] >= length,
        f"{name} must have a column for each of {length} keys, got {projection.shape[-1]}",
    )
    projection = projection[..., :length]
    if projection.ndim == 3:
        projected = jnp.einsum("krs,bskh->brkh", projection, x, preferred_element_type=jnp.float32)
    else:
        # Not einsum, whose result has an axis order that XLA's CPU backend cannot multiply by bfloat16 queries.
        projected = jnp.tensordot(projection, x, axes=(1, 1), preferred_element_type=jnp.float32)
        projected = projected.transpose(1, 0, 2, 3)
    return projected.astype(x.dtype)
