"""Plain forms of this family's functions, under the same names, for readers and tests."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from brl_jax.attention.sorting.informer import sampled_fractions
from brl_jax.attention.sorting.native_sparse import DEFAULT_SIZES, BlockSizes


def informer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    rng: PRNGKeyArray,
    factor: int = 5,
    scale: float,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """The queries whose sampled scores have the largest maximum minus mean attend (arXiv:2012.07436, algorithm 1).

    A causal query is ranked among the queries up to its own. Does not run inside `jax.jit`.
    """
    length, heads = query.shape[1:3]
    key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))

    def logarithm(n: int) -> int:
        return max(1, math.ceil(math.log(n)))

    sees = [t + 1 if is_causal else length for t in range(length)]
    budgets = [min(n, factor * logarithm(n)) for n in sees]
    draws = jnp.stack([sampled_fractions(rng, jnp.arange(length), s) for s in range(max(budgets))], 1)
    scores = np.asarray(jnp.einsum("btnh,bsnh->bnts", query, key))
    measures = np.zeros(scores.shape[:3])
    for t, (n, u) in enumerate(zip(sees, budgets)):
        sampled = scores[:, :, t, np.floor(np.asarray(draws)[t, :u] * n).astype(int)]
        measures[:, :, t] = sampled.max(-1) - sampled.mean(-1)
    attends = np.zeros(measures.shape, bool)
    for t, (n, u) in enumerate(zip(sees, budgets)):
        others = measures[:, :, :t] if is_causal else measures
        above = (others >= measures[:, :, t, None]).sum(-1) - (0 if is_causal else 1)
        attends[:, :, t] = above < u
        if is_causal:
            attends[:, :, t] &= attends[:, :, :t].sum(-1) < 2 * u * logarithm(n)
    visible = jnp.tril(jnp.ones((length, length), bool)) if is_causal else jnp.ones((length, length), bool)
    weights = jax.nn.softmax(jnp.asarray(scores) * scale, -1, where=visible[None, None])
    uniform = visible.astype(jnp.float32) / (1 if is_causal else length)
    weights = jnp.where(attends[..., None], weights, uniform[None, None])
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    compressed_key: Float[Array, "B C K H"],
    compressed_value: Float[Array, "B C K H"],
    gates: Float[Array, "B T N 3"],
    *,
    sizes: BlockSizes = DEFAULT_SIZES,
    window: int = 512,
) -> Float[Array, "B T N H"]:
    """Three masked softmaxes, the second over the blocks with the largest weights in the first (arXiv:2502.11089).

    Does not run inside `jax.jit`.
    """
    length, group = query.shape[1], query.shape[2] // key.shape[2]
    scale = 1 / math.sqrt(query.shape[3])
    t, s = np.arange(length)[:, None], np.arange(length)[None]
    starts = np.arange(compressed_key.shape[1]) * sizes.stride

    def weights(keys: Array, mask: np.ndarray) -> Array:
        scores = jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(keys, group, axis=2)) * scale
        return jax.nn.softmax(scores, axis=-1, where=mask)

    def read(weights: Array, values: Array) -> Array:
        return jnp.einsum("bnts,bsnv->btnv", weights, jnp.repeat(values, group, axis=2))

    far = weights(compressed_key, starts[None] + sizes.compressed <= t + 1)
    # The number of strides that each compressed block shares with each block of tokens.
    blocks = np.arange(-(-length // sizes.selected)) * sizes.selected
    ends = np.minimum(starts[:, None] + sizes.compressed, blocks[None] + sizes.selected)
    shared = np.maximum(ends - np.maximum(starts[:, None], blocks[None]), 0) // sizes.stride
    rank = np.einsum("bntc,cj->bntj", np.asarray(far), shared)
    rank = rank.reshape(rank.shape[0], -1, group, *rank.shape[2:]).sum(2)
    own, j = t // sizes.selected, np.arange(len(blocks))[None]
    rank = np.where((j > 0) & (j < own - 1), rank, -1.0)
    for place, fixed in enumerate((own == j, own - 1 == j, (j == 0) & (own > 1))):
        if place < sizes.blocks:
            rank = np.where(fixed, np.inf, rank)
    free = max(sizes.blocks - 3, 0)
    limit = np.sort(np.where(np.isinf(rank), -1.0, rank), axis=-1)[..., ::-1][..., : free + 1][..., -1:]
    enough = rank > (limit if free < len(blocks) else -1.0)
    chosen = np.isinf(rank) | (enough & (rank >= 0)) if free else np.isinf(rank)
    mask = np.repeat(np.repeat(chosen, sizes.selected, axis=-1)[..., :length], group, axis=1) & (s <= t)
    near = weights(key, mask)
    last = weights(key, (s <= t) & (t - s < window))
    parts = (read(far, compressed_value), read(near, value), read(last, value))
    return jnp.stack([gates[..., i, None] * part for i, part in enumerate(parts)]).sum(0)


def sliceformer_attention(
    value: Float[Array, "B T N V"], *, order: str = "ascending"
) -> Float[Array, "B T N V"]:
    """Sorts each channel along the sequence (arXiv:2310.17683). Does not run inside `jax.jit`."""
    out = np.array(value)
    for b, n, v in np.ndindex(out.shape[0], *out.shape[2:]):
        channel = out[b, :, n, v]
        descending = order == "descending" or (order == "interleaved" and v % 2 == 1)
        if order == "max_exchange":
            largest = int(channel.argmax())
            channel[[0, largest]] = channel[[largest, 0]]
        else:
            out[b, :, n, v] = np.sort(channel)[:: -1 if descending else 1]
    return jnp.asarray(out)


def sinkhorn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    sort_logits: Float[Array, "B C K C"],
    *,
    block_size: int = 64,
    iterations: int = 8,
    temperature: float = 0.75,
    scale: float,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """One softmax over the keys of the query's block and of a mixture of blocks (arXiv:2002.11296, section 3)."""
    length, group = query.shape[1], query.shape[2] // key.shape[2]
    count = sort_logits.shape[1]
    seen = jnp.asarray(np.tri(count, k=-1) if is_causal else np.ones((count, count)), jnp.float32)[None, None]
    weights = jnp.exp(jnp.moveaxis(sort_logits, 2, 1) / temperature) * seen
    for _ in range(iterations):
        weights = weights / jnp.maximum(weights.sum(3, keepdims=True), 1e-30)
        columns = jnp.cumsum(weights, 2) if is_causal else weights.sum(2, keepdims=True)
        weights = weights / jnp.maximum(columns, 1e-30)
    room = ((0, 0), (0, count * block_size - length), (0, 0), (0, 0))
    blocks = (jnp.pad(x, room).reshape(x.shape[0], count, block_size, *x.shape[2:]) for x in (key, value))
    # The sorted keys and values come before all blocks' own.
    keys, values = (
        jnp.repeat(
            jnp.concatenate(
                [jnp.einsum("bkij,bjwkh->biwkh", weights, y).reshape(x.shape[0], -1, *x.shape[2:]), x], 1
            ),
            group,
            axis=2,
        )
        for x, y in zip((key, value), blocks)
    )
    t, s = np.arange(length)[:, None], np.arange(count * block_size)[None]
    own = (t // block_size == s[:, :length] // block_size) & ((s[:, :length] <= t) | (not is_causal))
    brought = (t // block_size == s // block_size) & (s % block_size < length)
    brought = brought & ((t >= block_size) | (not is_causal))
    scores = jnp.einsum("btnh,bsnh->bnts", query, keys) * scale
    attended = jax.nn.softmax(scores, -1, where=np.concatenate([brought, own], 1)[None, None])
    return jnp.einsum("bnts,bsnv->btnv", attended, values)


def reformer_attention(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T K V"],
    rotations: Float[Array, "R H F"],
    *,
    chunk_size: int = 64,
    scale: float,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """Softmax over tokens in the same bucket and in the same chunk or the one before, in any round (arXiv:2001.04451).

    Does not run inside `jax.jit`.
    """
    length = query.shape[1]
    seen = np.zeros((query.shape[0], query.shape[2], length, length), bool)
    for rotation in rotations:
        sides = np.asarray(jnp.einsum("btnh,hf->bntf", query, rotation))
        buckets = np.concatenate([sides, -sides], -1).argmax(-1)
        same = buckets[..., None] == buckets[..., None, :]
        if is_causal:
            chunks = np.tril(same, -1).sum(-1) // chunk_size
        else:
            chunks = buckets.argsort(-1, kind="stable").argsort(-1) // chunk_size
        apart = chunks[..., None] - chunks[..., None, :]
        seen |= same & ((apart == 0) | (apart == 1))
    seen &= np.tri(length, k=-1, dtype=bool) if is_causal else ~np.eye(length, dtype=bool)
    seen |= np.eye(length, dtype=bool) & ~seen.any(-1, keepdims=True)
    key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores, -1, where=seen), value)
