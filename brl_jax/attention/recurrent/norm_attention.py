"""NormAttention: linear attention that normalises its outputs instead of dividing them (Qin et al. 2022)."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.recurrent.linear import FeatureMap, LinearState, linear_sums
from brl_jax.fields import Count, NonNegative, Positive

Norm = Literal["rms", "layer"]


@attention_function
def norm_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    feature_map: FeatureMap = "elu+1",
    norm: Norm = "rms",
    norm_scale: Float[Array, "N V"] | None = None,
    epsilon: NonNegative = 1e-5,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: Positive = 10000.0,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], LinearState]:
    """Norm(phi(Q) (phi(K)^T V)) with one norm over all heads, in O(T) time and memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = norm_attention(query, key, value, is_causal=True)

    TransNormer (Qin et al. 2022, arXiv:2210.10340), eq. 14. It has no denominator, whose gradients grow without
    bound as features shrink, and no scale for the scores.

    Args:
      query, key, value: as for `linear_attention`.
      feature_map: phi, one of "elu" (TransNormer T1), "elu+1" (T2), "relu" or "identity".
      norm: "rms" or "layer" (which subtracts the mean first).
      norm_scale: (N, V), multiplies the normalised outputs; 1 by default.
      epsilon: added to the mean square.
      is_causal: query i sees only the keys up to i.
      key_value_seq_lengths, segment_ids, positions, rope_theta, chunk_size, implementation: as for `linear_attention`.
      state: from `init_linear_state(..., normalize=False)` or an earlier call; causal only.
      return_state: also return the state after these tokens.

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32 up to and including the norm; with return_state, also
      the new `LinearState`, without `key`.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    (total, _), new_state = linear_sums(
        query, key, value, name="norm_attention", feature_map=feature_map, normalize=False, is_causal=is_causal,
        positions=positions, rope_theta=rope_theta, key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    if norm_scale is not None:
        require(
            norm_scale.shape == total.shape[2:],
            f"norm_scale must have shape {total.shape[2:]} (heads, value head_dim), got {norm_scale.shape}",
        )
    if norm == "layer":
        total = total - jnp.mean(total, axis=(2, 3), keepdims=True)
    out = total * lax.rsqrt(jnp.mean(jnp.square(total), axis=(2, 3), keepdims=True) + epsilon)
    if norm_scale is not None:
        out = out * norm_scale.astype(out.dtype)[None, None]
    out = out.astype(query.dtype)
    return (out, new_state) if return_state else out
