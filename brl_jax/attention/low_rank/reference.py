"""Plain forms of this family's functions, under the same names, for readers and tests."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.dense import reference as dense


def linformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    key_projection: Float[Array, "R L"],
    value_projection: Float[Array, "R P"],
    scale: float | None = None,
) -> Float[Array, "B T N V"]:
    """softmax(scale q (E K)^T) F V, where E and F mix the tokens (arXiv:2006.04768, eq. 7)."""
    length = key.shape[1]
    key = jnp.einsum("rs,bskh->brkh", key_projection[:, :length], key)
    value = jnp.einsum("rs,bskh->brkh", value_projection[:, :length], value)
    return dense.full_attention(query, key, value, scale=scale)


def nystromformer_attention(
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
    identity = jnp.eye(count, dtype=between.dtype)[None, None]
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

    between = kernel(chosen, chosen)
    between += ridge * jnp.eye(samples.shape[0], dtype=between.dtype)[None, None]
    mixed = kernel(query, chosen) @ jnp.linalg.inv(between) @ kernel(chosen, key)
    return jnp.einsum("bnts,bsnv->btnv", mixed, value)


def long_short_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    projection: Float[Array, "B T K R"],
    *,
    window: int = 128,
    chunk_size: int = 16,
    norms: tuple[Float[Array, "K H"] | None, Float[Array, "K H"] | None] = (None, None),
    positions: Int[Array, "#B T"] | None = None,
    is_causal: bool = False,
) -> Float[Array, "B T N H"]:
    """One softmax over the window's keys and the projected keys (arXiv:2107.02192, eqs. 4 to 7).

    The projected keys come first in each row of scores.
    """
    length, group = query.shape[1], query.shape[2] // key.shape[2]
    places = jnp.arange(length)
    if is_causal:
        spans = [(s, s + chunk_size) for s in range(0, length - chunk_size + 1, chunk_size)]
        seen = (places[:, None] - places[None] >= 0) & (places[:, None] - places[None] < window)
    else:
        spans = [(0, length)]
        ahead = places[None] - places[:, None] // window * window
        seen = (ahead >= -(window // 2)) & (ahead < window + window // 2)
    ends = jnp.repeat(jnp.asarray([e for _, e in spans], int), projection.shape[3])
    seen_far = (
        ends[None] <= places[:, None] // chunk_size * chunk_size
        if is_causal
        else ends[None] >= places[:, None]
    )

    def normalise(x: Array, scale: Array | None) -> Array:
        x = x - x.mean((2, 3), keepdims=True)
        x = x / jnp.sqrt(jnp.square(x).mean((2, 3), keepdims=True) + 1e-5)
        return jnp.repeat(x if scale is None else x * scale[None, None], group, axis=2)

    def project(x: Array) -> Array:
        pieces = [
            jnp.einsum("bskr,bskh->brkh", jax.nn.softmax(projection[:, s:e], 1), x[:, s:e]) for s, e in spans
        ]
        return normalise(jnp.concatenate([x[:, :0], *pieces], 1), norms[1])

    near, turned = normalise(key, norms[0]), query
    if positions is not None:
        near, turned = rotate(near, positions), rotate(query, positions)
    parts = [jnp.einsum("btnh,bsnh->bnts", q, k) for q, k in ((query, project(key)), (turned, near))]
    scores = jnp.concatenate(parts, -1) / math.sqrt(query.shape[3])
    visible = jnp.concatenate([jnp.broadcast_to(seen_far, (length, ends.shape[0])), seen], 1)[None, None]
    values = jnp.concatenate([project(value), normalise(value, norms[0])], 1)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1, where=visible), values)
