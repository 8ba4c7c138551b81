"""The attention matrix of any mechanism, even if it never computes one, for inspection."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float


def implied_weights(
    attend: Callable[[Float[Array, "B S K H"]], Float[Array, "B T N H"]], value: Float[Array, "B S K H"]
) -> Float[Array, "B N T S"]:
    """The matrix P that an attention function multiplies values by: out_i = sum_j p_ij v_j for each head.

    It is exact for every function that is linear in the values: a softmax, linear attention with the weights
    phi(q_i) . phi(k_j) / sum_k phi(q_i) . phi(k_k) (TransNormer, arXiv:2210.10340, eqs. 4 and 6), a delta rule. The
    function runs on columns of the identity as values, H at a time, so its own masks, patterns and padding apply. This
    takes S / H calls and O(T S) memory.

    Args:
      attend: values -> outputs, at fixed queries and keys.
      value: (B, S, K, H), only for its shape and dtype; K divides N.

    Returns:
      (B, N, T, S) in the dtype of the outputs. Entries may be negative, and rows need not sum to 1.
    """
    length, head_dim = value.shape[1], value.shape[3]
    keys = jnp.arange(length, dtype=jnp.int32)[:, None]
    columns = jnp.arange(head_dim, dtype=jnp.int32)[None, :]

    def block(first):
        probe = (keys == first + columns).astype(value.dtype)[None, :, None, :]
        return attend(jnp.broadcast_to(probe, value.shape))

    blocks = jax.lax.map(block, jnp.arange(0, length, head_dim, dtype=jnp.int32))
    return rearrange(blocks, "c b t n h -> b n t (c h)")[..., :length]
