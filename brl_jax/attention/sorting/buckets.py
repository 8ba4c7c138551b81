"""Attention within the chunks of sorted hash buckets, for `reformer_attention`."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.by_platform import recomputed
from brl_jax.attention.core.segments import first_tokens
from brl_jax.attention.core.softmax import MASKED, SoftmaxSums, block_sums, empty_sums, merge_sums, normalise
from brl_jax.attention.core.varying import vary_like


def hash_buckets(query: Float[Array, "B T N H"], rotations: Float[Array, "R H F"]) -> Int[Array, "R B N T"]:
    """Each token's bucket in each round: the nearest to its query among F directions and their opposites."""
    query = lax.stop_gradient(query).astype(jnp.float32)

    def of_round(rotation: Float[Array, "H F"]) -> Int[Array, "B N T"]:
        # Full precision, so that a bucket does not depend on the chip's rounding.
        sides = jnp.einsum("btnh,hf->bntf", query, rotation, precision=lax.Precision.HIGHEST)
        return jnp.concatenate([sides, -sides], -1).argmax(-1).astype(jnp.int32)

    return lax.map(of_round, rotations.astype(jnp.float32))


def attend_in_buckets(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T K V"],
    buckets: Int[Array, "R B N T"],
    num_buckets: int,
    chunk_size: int,
    scale: float,
    is_causal: bool,
) -> Float[Array, "B T N V"]:
    """Attention of all tokens, given their buckets; invalid tokens are in bucket `num_buckets`."""
    length = query.shape[1]
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    query, value = (jnp.moveaxis(x, 2, 1) for x in (query, value))
    key = unit_keys(query)
    chunks = -(-length // chunk_size)
    if is_causal:
        # At most one chunk per bucket is not full.
        chunks = min(length, (length + (num_buckets + 1) * (chunk_size - 1)) // chunk_size)
    slots = lax.map(lambda own: _slots(own, chunk_size, is_causal), buckets)
    codes = bucket_codes(buckets, slots // chunk_size, chunks)
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, None], slots.shape[1:])

    def with_previous(x: Array) -> Array:
        # The chunk before the first has empty slots only.
        before = jnp.concatenate([jnp.full_like(x[:, :, :1], length), x[:, :, :-1]], axis=2)
        return jnp.concatenate([before, x], axis=3)

    def of_round(sums: SoftmaxSums, piece: tuple[Array, Array]) -> tuple[SoftmaxSums, None]:
        slots, own_codes = piece
        order = jnp.full((*slots.shape[:2], chunks * chunk_size), length, jnp.int32)
        order = jnp.put_along_axis(order, slots, tokens, axis=2, inplace=False)

        def cut(x: Array) -> Array:
            """x (B, N, T, ...) as chunks (B, N, C, M, ...); empty slots repeat some token."""
            index = jnp.minimum(order, length - 1)
            x = jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 3)), axis=2)
            return x.reshape(*x.shape[:2], chunks, chunk_size, *x.shape[3:])

        def back(x: Array) -> Array:
            x = x.reshape(*x.shape[:2], chunks * chunk_size, *x.shape[4:])
            return jnp.take_along_axis(x, slots.reshape(*slots.shape, *[1] * (x.ndim - 3)), axis=2)

        def near(codes: Array) -> Array:
            cells = cut(codes)
            return share_chunks(cells[..., None], with_previous(cells)[..., None, :])

        places = order.reshape(*order.shape[:2], chunks, chunk_size)
        rows, columns = places[..., None], with_previous(places)[..., None, :]
        seen = near(own_codes) & (columns < length)
        seen = seen & ((columns < rows) if is_causal else (columns != rows))
        times = functools.reduce(jnp.add, (near(other).astype(jnp.float32) for other in codes))
        scores = jnp.einsum("bncqh,bnckh->bncqk", cut(query), with_previous(cut(key))) * scale
        scores = jnp.where(seen, scores - jnp.log(jnp.maximum(times, 1.0)), MASKED)
        values = with_previous(cut(value))
        part = block_sums(scores, lambda weights: jnp.einsum("bncqk,bnckv->bncqv", weights, values))
        return merge_sums(sums, SoftmaxSums(*map(back, part))), None

    start = vary_like(empty_sums(query.shape[:3], value.shape[3]), (query, value))
    sums, _ = lax.scan(functools.partial(recomputed, of_round), start, (slots, codes))
    return jnp.moveaxis(alone_sees_itself(sums, value), 1, 2)


def unit_keys(query: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    return query * inverse_lengths(query)[..., None]


def inverse_lengths(query: Float[Array, "*rows H"]) -> Float[Array, "*rows"]:
    return lax.rsqrt(jnp.square(query).sum(-1) + 1e-12)


def bucket_codes(buckets: Int[Array, "..."], chunks: Int[Array, "..."], most: int) -> Int[Array, "..."]:
    """Encodes a token's bucket and its chunk, which is below `most`, as one number for `share_chunks`."""
    return buckets * (most + 2) + chunks


def share_chunks(rows: Int[Array, "..."], columns: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Whether the column's token is in the row's bucket, and in the same chunk or the one before it."""
    apart = rows - columns
    return (apart == 0) | (apart == 1)


def alone_sees_itself(sums: SoftmaxSums, value: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """The outputs; a token that sees no other token gets its own value."""
    return jnp.where((sums.normaliser > 0)[..., None], normalise(sums)[0], value)


def ranks(buckets: Int[Array, "B N T"]) -> tuple[Array, Array, Array]:
    """The tokens sorted by bucket and position, their buckets, and each one's rank within its bucket."""
    length = buckets.shape[2]
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, None], buckets.shape)
    homes, order = lax.sort((buckets, tokens), dimension=2, is_stable=True, num_keys=1)
    return order, homes, tokens - first_tokens(homes)


def unsort(order: Int[Array, "B N T"], x: Int[Array, "B N T"]) -> Int[Array, "B N T"]:
    """Puts x, given for sorted tokens, back in the order of positions."""
    return lax.sort((order, x), dimension=2, is_stable=False, num_keys=1)[1]


def _slots(buckets: Int[Array, "B N T"], chunk_size: int, is_causal: bool) -> Int[Array, "B N T"]:
    """Each token's slot in the chunks of one round."""
    order, _, rank = ranks(buckets)
    if not is_causal:
        numbers = jnp.arange(rank.shape[2], dtype=jnp.int32)
        return unsort(order, jnp.broadcast_to(numbers[None, None], rank.shape))
    begun = lax.associative_scan(jnp.add, (rank % chunk_size == 0).astype(jnp.int32), axis=2)
    return unsort(order, (begun - 1) * chunk_size + rank % chunk_size)
