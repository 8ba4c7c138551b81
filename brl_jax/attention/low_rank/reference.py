"""The plain meaning of this family's functions; the tests compare them with the functions of the same names."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.dense import reference as dense


def linformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    key_projection: Float[Array, "R L"],
    value_projection: Float[Array, "R P"],
    scale: float | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(scale q (E K)^T) F V, where E and F mix the tokens (arXiv:2006.04768, eq. 7)."""
    length = key.shape[1]
    key = jnp.einsum("rs,bskh->brkh", key_projection[:, :length], key)
    value = jnp.einsum("rs,bskh->brkh", value_projection[:, :length], value)
    return dense.full_attention(query, key, value, scale=scale)
