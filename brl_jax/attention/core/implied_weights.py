"""The attention matrix of any mechanism, explicit or implied, for inspection."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float


def implied_weights(
    attend: Callable[[Float[Array, "B S K H"]], Float[Array, "B T N H"]], value: Float[Array, "B S K H"]
) -> Float[Array, "B N T S"]:
    """The matrix P by which an attention function maps values to outputs: out_i = sum_j p_ij v_j for each head.

    Exact for every function that is linear in the values, whatever it computes from queries and keys: the weights of a
    softmax, phi(q_i) . phi(k_j) / sum_k phi(q_i) . phi(k_k) of linear attention (TransNormer, arXiv:2210.10340, eqs. 4
    and 6), the products of a delta rule. The matrix is read off the outputs for values that are columns of the
    identity, H at a time, so that masks, patterns and padding are those of the function itself. This takes S / H calls
    and O(T S) memory.

    Args:
      attend: values -> outputs, at fixed queries and keys.
      value: (B, S, K, H), for its shape and dtype only; K divides N.

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
