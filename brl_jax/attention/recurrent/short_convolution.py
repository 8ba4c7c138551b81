"""The short causal convolution over the inputs of recurrent mechanisms, channel by channel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.attention.recurrent.chunk_scan import segment_numbers
from brl_jax.attention.recurrent.rows import zero_unless


def short_convolution(
    x: Float[Array, "B T ..."],
    kernel: Float[Array, "W ..."],
    bias: Float[Array, "..."] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    recent: Float[Array, "B R ..."] | None = None,
    count: Any = None,
) -> tuple[Float[Array, "B T ..."], Float[Array, "B R ..."] | None]:
    """y_t = bias + sum_j kernel_j x_(t - W + 1 + j): a causal convolution of each channel with W taps.

    Tokens before a sequence's first count as zeros. Sums are computed at least in float32, tap by tap, which
    compilers fuse into one pass over the input; a convolution with one group per channel is slow on most platforms.

    Args:
      x: (B, T, ...), floating point.
      kernel: (W, ...) with the trailing dimensions of x. Its last entry applies to the token itself.
      bias: of the same trailing dimensions.
      segment_ids: equal within a sequence. A sequence is a run of equal ids and sees no other.
      recent: (B, W - 1, ...), the last inputs before these, of the first token's sequence; zeros for missing ones.
      count: how many of the T tokens are valid, from the first (traced; None: all). Only `recent` depends on it.

    Returns:
      (B, T, ...) in the dtype of x; and the last inputs after the valid tokens, or None if `recent` was None.
    """
    batch, length = x.shape[:2]
    reach = kernel.shape[0] - 1
    dtype = accumulation_dtype(x.dtype)
    before = jnp.zeros((batch, reach, *x.shape[2:]), x.dtype) if recent is None else recent
    inputs = jnp.concatenate([before, x], axis=1)
    segments = segment_numbers(batch, length, None, segment_ids)
    # Segments are counted from 0, and the recent inputs belong to the first.
    numbers = None if segments is None else jnp.pad(segments, ((0, 0), (reach, 0)))
    kernel = kernel.astype(dtype)
    y = x.astype(dtype) * kernel[None, -1:]
    for tap in range(reach):
        earlier = inputs[:, tap : tap + length].astype(dtype)
        if segments is not None and numbers is not None:
            earlier = zero_unless(jnp.equal(segments, numbers[:, tap : tap + length]), earlier)
        y = y + earlier * kernel[None, tap : tap + 1]
    if bias is not None:
        y = y + bias.astype(dtype)[None, None]
    y = y.astype(x.dtype)
    if recent is None:
        return y, None
    end = length if count is None else count
    kept = lax.dynamic_slice_in_dim(inputs, end, reach, axis=1)
    if numbers is not None:
        of_kept = lax.dynamic_slice_in_dim(numbers, end, reach, axis=1)
        newest = lax.dynamic_slice_in_dim(numbers, end + reach - 1, 1, axis=1)
        kept = zero_unless(jnp.equal(of_kept, newest), kept)
    return y, kept
