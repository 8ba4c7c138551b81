"""NormAttention: linear attention whose denominator is replaced by a norm of the outputs (TransNormer)."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_choice, require
from brl_jax.attention.recurrent.linear import FeatureMap, LinearState, linear_sums

Norm = Literal["rms", "layer"]


def norm_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    is_causal: bool = False,
    feature_map: FeatureMap = "elu+1",
    norm: Norm = "rms",
    norm_scale: Float[Array, "N V"] | None = None,
    epsilon: float = 1e-5,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> Any:
    """Norm(phi(Q) phi(K)^T V) with the norm over all heads merged, in O(T) time and memory.

    001 (TransNormer) eq. 14. There is neither a denominator, whose gradients grow without bound as features shrink,
    nor a scale of the scores.

    Args:
      query, key, value: as for `linear_attention`.
      is_causal: query i sees the keys up to its own.
      feature_map: phi; "elu" (001's T1), "elu+1" (its T2) or "relu".
      norm: "rms" or "layer" (which subtracts the mean first).
      norm_scale: (N, V), multiplies the normalised outputs; 1 by default.
      epsilon: added to the mean square that the norm divides by.
      key_value_seq_lengths, segment_ids, chunk_size, implementation: as for `linear_attention`.
      state: as for `linear_attention` with normalize=False, whose state this is.
      return_state: return (out, state), with the state after these tokens.

    Returns:
      (B, T, N, V) in query's dtype, computed in float32 up to and including the norm; with return_state, that and a
      `LinearState` without `key`.

    Raises:
      ValueError: arrays, lengths, segments, a state or sizes that don't fit, naming the argument.
    """
    check_choice("norm", norm, get_args(Norm))
    (total, _), state = linear_sums(
        query, key, value, feature_map=feature_map, normalize=False, is_causal=is_causal,
        key_value_seq_lengths=key_value_seq_lengths, segment_ids=segment_ids, state=state,
        return_state=return_state, chunk_size=chunk_size, implementation=implementation,
    )  # fmt: skip
    if norm_scale is not None:
        require(
            norm_scale.shape == total.shape[2:],
            f"norm_scale must have shape {total.shape[2:]} (heads, value dim), got {norm_scale.shape}",
        )
    if norm == "layer":
        total = total - jnp.mean(total, axis=(2, 3), keepdims=True)
    out = total * lax.rsqrt(jnp.mean(jnp.square(total), axis=(2, 3), keepdims=True) + epsilon)
    if norm_scale is not None:
        out = out * norm_scale.astype(out.dtype)[None, None]
    out = out.astype(query.dtype)
    return (out, state) if return_state else out
