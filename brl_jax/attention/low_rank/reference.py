"""The plain meaning of this family's functions; the tests compare them with the functions of the same names."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
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


def nystrom_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    num_landmarks: int = 128,
    iterations: int = 6,
    value_kernel: Float[Array, "N W"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T N V"]:
    """softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V (arXiv:2102.03902, eq. 14)."""
    length, heads, head_dim = query.shape[1:]
    key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    count = min(num_landmarks, length)
    segments = [np.flatnonzero(np.arange(length) * count // length == r) for r in range(count)]
    query_landmarks, key_landmarks = (
        jnp.stack([x[:, segment].mean(1) for segment in segments], 1) for x in (query, key)
    )

    def weights(query: Array, key: Array) -> Float[Array, "B N q k"]:
        return jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", query, key) * scale, -1)

    between = weights(query_landmarks, key_landmarks)
    inverse = jnp.swapaxes(between, 2, 3) / (between.sum(2).max(-1) * between.sum(3).max(-1))[..., None, None]
    identity = jnp.eye(count)[None, None]
    for _ in range(iterations):
        product = between @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ inner) / 4
    mixed = weights(query, key_landmarks) @ inverse @ weights(query_landmarks, key)
    out = jnp.einsum("bnts,bsnv->btnv", mixed, value)
    if value_kernel is not None:
        reach = value_kernel.shape[1] // 2
        room = jnp.pad(value, ((0, 0), (reach, reach), (0, 0), (0, 0)))
        for offset in range(value_kernel.shape[1]):
            out = out + room[:, offset : offset + length] * value_kernel[None, None, :, offset, None]
    return out


def skyformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    samples: Float[Array, " R"],
    ridge: float = 0.1,
    scale: float | None = None,
) -> Float[Array, "B T N V"]:
    """C(Q, X_S) (C(X_S, X_S) + ridge I)^-1 C(X_S, K) V with the exact inverse (arXiv:2111.00035, section 4)."""
    length, heads, head_dim = query.shape[1:]
    key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    places, half = jnp.floor(samples * length).astype(int), samples.shape[0] // 2
    chosen = jnp.concatenate([query[:, places[:half]], key[:, places[half:]]], axis=1)

    def kernel(x: Array, y: Array) -> Float[Array, "B N x y"]:
        return jnp.exp(-scale * jnp.square(x[:, :, None] - y[:, None]).sum(-1) / 2).transpose(0, 3, 1, 2)

    between = kernel(chosen, chosen) + ridge * jnp.eye(samples.shape[0])[None, None]
    mixed = kernel(query, chosen) @ jnp.linalg.inv(between) @ kernel(chosen, key)
    return jnp.einsum("bnts,bsnv->btnv", mixed, value)
