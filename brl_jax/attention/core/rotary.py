"""Rotary positions: vectors rotated by their position, so that their products depend on distances."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.scores import accumulation_dtype


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], theta: float = 10000.0
) -> Float[Array, "B T N H"]:
    """Rotary position embedding on adjacent pairs (Su et al. 2021, arXiv:2104.09864, eq. 34).

    The angle position * frequency is the sum of the angles of the position's low and high part, and the step of the
    high part is reduced modulo 2 pi beforehand, so that float32 angles are accurate to 1e-3 at positions of millions.

    Args:
      x: (B, T, N, H) with H even; positions: (B, T) or (1, T), not negative.
      theta: base of the frequencies theta^(-2 i / H).

    Raises:
      ValueError: if H is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
    low = 1024
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    step = np.remainder(low * frequency, 2 * math.pi)
    angle = (positions % low).astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)[None, None]
    angle += (positions // low).astype(jnp.float32)[..., None] * jnp.asarray(step, jnp.float32)[None, None]
    cos = jnp.cos(angle)[:, :, None, :]
    sin = jnp.sin(angle)[:, :, None, :]
    accumulate = accumulation_dtype(x.dtype)
    even, odd = x[..., 0::2].astype(accumulate), x[..., 1::2].astype(accumulate)
    cos, sin = cos.astype(accumulate), sin.astype(accumulate)
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)
