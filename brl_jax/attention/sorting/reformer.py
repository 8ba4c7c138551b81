"""Attention among tokens that a hash puts into one bucket (Reformer, Kitaev, Kaiser and Levskaya 2020)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from brl_jax.attention.core.arguments import (
    check_dtypes,
    check_lengths,
    check_scale,
    check_sizes,
    is_int,
    zero_padding,
)
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.softmax import (
    MASKED,
    SoftmaxSums,
    block_sums,
    empty_sums,
    merge_sums,
    normalise,
)
from brl_jax.attention.core.varying import vary_like


def check_buckets(num_buckets: Any) -> None:
    require(
        is_int(num_buckets) and num_buckets >= 2 and num_buckets % 2 == 0,
        f"num_buckets must be an even int of at least 2, got {num_buckets!r}",
    )


def reformer_rotations(
    rng: PRNGKeyArray, head_dim: int, *, num_rounds: int = 4, num_buckets: int = 32
) -> Float[Array, "R H F"]:
    """The random matrices of `reformer_attention`, one of F = num_buckets / 2 directions for each round of hashing.

    Raises:
      ValueError: a size below 1, or an odd number of buckets.
    """
    check_sizes(head_dim=head_dim, num_rounds=num_rounds)
    check_buckets(num_buckets)
    return jax.random.normal(rng, (num_rounds, head_dim, num_buckets // 2), jnp.float32)


@attention_function
def reformer_attention(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T K V"],
    rotations: Float[Array, "R H F"],
    *,
    chunk_size: int = 64,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention of each token to those in its bucket, in one of R rounds of hashing at least.

    (B, T, N, H), (B, T, K, V) -> (B, T, N, V)::

        rotations = reformer_rotations(jax.random.key(0), head_dim)
        out = reformer_attention(query, value, rotations, is_causal=True)

      k_j = q_j / |q_j|;  h(q) = argmax [q W; -q W] for each of the R matrices W
      out_i = sum_j softmax_j(scale q_i . k_j) v_j over the tokens j that i sees in any round

    Reformer (arXiv:2001.04451), sections 2 and 3. Queries are keys too, so that a token finds those that it resembles;
    it sees itself only where it sees nothing else. In each round the tokens are sorted by bucket and then by position,
    and cut into chunks of `chunk_size`; a token sees those of its bucket in its own chunk and in the one before it. The
    rounds have a softmax each, merged by their log-sum-exp; the score of a token that is seen in n rounds is lowered by
    log n in each, so that it counts once (appendix A). `reference.reformer_attention` is the plain form.
    The authors tie
    the number of buckets to the length, 2 T / chunk_size; here it is that of the rotations, so that a token's hash
    depends on the token alone. (The Long Range Arena's code does not normalise keys, and multiplies scores by the root
    of the head dimension; here they are divided by it, as in the paper.)

    Causal: a token sees earlier ones alone. In the paper the chunks are cut from the whole sorted sequence, so that
    later tokens, which move the tokens of the buckets behind theirs, decide which earlier tokens share a chunk. Here
    every bucket is cut into chunks by itself, from its first token on: what a token sees depends on no later token, and
    generation continues the very same chunks. It reaches back chunk_size to 2 chunk_size - 1 tokens of its bucket, as
    in the paper; the last chunk of a bucket may be partly empty.

    O(R T log T + R T chunk_size) time and O(R T + T chunk_size) memory, with T + 2 F chunk_size for T where causal.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      value: (B, T, K, V) of the same tokens and dtype; K divides N.
      rotations: from `reformer_rotations`, the same ones for all heads.
      chunk_size: tokens of a chunk.
      scale: the scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding, which may contain anything and is
        sorted behind all others. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the query, computed in float32. Hashes have no gradient.

    Raises:
      ValueError: shapes, dtypes, sizes or an implementation that do not fit, naming the argument.
    """
    check_reformer_arguments(query, value, rotations)
    check_implementation(implementation, None, "xla")
    check_sizes(chunk_size=chunk_size)
    require(
        query.shape[1] == value.shape[1],
        f"value must have query's length {query.shape[1]}, as both are the same tokens here, got {value.shape[1]}",
    )
    scale = check_scale(scale, query.shape[3])
    batch, length = query.shape[:2]
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    dtype = query.dtype
    query, value = (zero_padding(x, lengths).astype(jnp.float32) for x in (query, value))
    buckets = hash_buckets(query, rotations)
    if lengths is not None:
        exists = jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]
        buckets = jnp.where(exists[None, :, None], buckets, 2 * rotations.shape[2])
    out = attend_in_buckets(query, value, buckets, 2 * rotations.shape[2], chunk_size, scale, is_causal)
    return zero_padding(out, lengths).astype(dtype)


def check_reformer_arguments(query: Any, value: Any, rotations: Any) -> None:
    """Raises ValueError unless queries, values and rotations fit together; the lengths may differ."""
    check_qkv(query, query, query)
    check_qkv(value, value, value, ("value",) * 3)
    check_dtypes(query, query, query)
    require(value.dtype == query.dtype, f"value must have query's dtype {query.dtype}, got {value.dtype}")
    require(
        value.shape[0] == query.shape[0],
        f"value must have query's batch size {query.shape[0]}, got {value.shape[0]}",
    )
    require(
        query.shape[2] % value.shape[2] == 0,
        f"the heads of query must be a multiple of those of value, got {query.shape[2]} and {value.shape[2]}",
    )
    shape = getattr(rotations, "shape", None)
    require(
        shape is not None and len(shape) == 3 and shape[1] == query.shape[3] and 0 not in shape,
        f"rotations must have shape (rounds, {query.shape[3]}, directions), got {shape}",
    )


def hash_buckets(query: Float[Array, "B T N H"], rotations: Float[Array, "R H F"]) -> Int[Array, "R B N T"]:
    """The bucket of each token in each round: the direction, out of F and their opposites, nearest to its query."""
    query = lax.stop_gradient(query).astype(jnp.float32)

    def of_round(rotation: Float[Array, "H F"]) -> Int[Array, "B N T"]:
        # A bucket must not depend on the rounding of a chip's products.
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
    """The attention of all tokens, given their buckets; the bucket `num_buckets` is of tokens that do not exist."""
    length = query.shape[1]
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    query, value = (jnp.moveaxis(x, 2, 1) for x in (query, value))
    key = unit_keys(query)
    chunks = -(-length // chunk_size)
    if is_causal:
        # Each bucket has at most one chunk that is not full.
        chunks = min(length, (length + (num_buckets + 1) * (chunk_size - 1)) // chunk_size)
    slots = lax.map(lambda own: _slots(own, chunk_size, is_causal), buckets)
    codes = bucket_codes(buckets, slots // chunk_size, chunks)
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, None], slots.shape[1:])

    def with_previous(x: Array, fill: int = 0) -> Array:
        before = jnp.concatenate([jnp.full_like(x[:, :, :1], fill), x[:, :, :-1]], axis=2)
        return jnp.concatenate([before, x], axis=3)

    def of_round(sums: SoftmaxSums, piece: tuple[Array, Array]) -> tuple[SoftmaxSums, None]:
        slots, own_codes = piece
        order = jnp.full((*slots.shape[:2], chunks * chunk_size), length, jnp.int32)
        order = jnp.put_along_axis(order, slots, tokens, axis=2, inplace=False)

        def cut(x: Array) -> Array:
            """x (B, N, T, ...) in chunks (B, N, C, M, ...); slots without a token hold some other token's."""
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
        rows, columns = places[..., None], with_previous(places, length)[..., None, :]
        seen = near(own_codes) & (columns < length)
        seen = seen & ((columns < rows) if is_causal else (columns != rows))
        times = functools.reduce(jnp.add, (near(other).astype(jnp.float32) for other in codes))
        scores = jnp.einsum("bncqh,bnckh->bncqk", cut(query), with_previous(cut(key))) * scale
        scores = jnp.where(seen, scores - jnp.log(jnp.maximum(times, 1.0)), MASKED)
        values = with_previous(cut(value))
        part = block_sums(scores, lambda weights: jnp.einsum("bncqk,bnckv->bncqv", weights, values))
        return merge_sums(sums, SoftmaxSums(*map(back, part))), None

    start = vary_like(empty_sums(query.shape[:3], value.shape[3]), (query, value))
    sums, _ = lax.scan(jax.checkpoint(of_round), start, (slots, codes))
    return jnp.moveaxis(alone_sees_itself(sums, value), 1, 2)


def unit_keys(query: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """The queries at length 1."""
    return query * inverse_lengths(query)[..., None]


def inverse_lengths(query: Float[Array, "*rows H"]) -> Float[Array, "*rows"]:
    """What turns the queries into those of `unit_keys`."""
    return lax.rsqrt(jnp.square(query).sum(-1) + 1e-12)


def bucket_codes(buckets: Int[Array, "..."], chunks: Int[Array, "..."], most: int) -> Int[Array, "..."]:
    """One number for a token's bucket and its chunk, one of the first `most`, for `share_chunks`."""
    return buckets * (most + 2) + chunks


def share_chunks(rows: Int[Array, "..."], columns: Int[Array, "..."]) -> Bool[Array, "..."]:
    """Whether a token is in the bucket of another, and in its chunk or in the one before it."""
    apart = rows - columns
    return (apart == 0) | (apart == 1)


def alone_sees_itself(sums: SoftmaxSums, value: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """The outputs, and its own value for a token that sees no other."""
    return jnp.where((sums.normaliser > 0)[..., None], normalise(sums)[0], value)


def ranks(buckets: Int[Array, "B N T"]) -> tuple[Array, Array, Array]:
    """The tokens sorted by bucket and then by position, their buckets, and how many of its bucket are before each."""
    length = buckets.shape[2]
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, None], buckets.shape)
    homes, order = lax.sort((buckets, tokens), dimension=2, is_stable=True, num_keys=1)
    begins = jnp.concatenate([jnp.ones_like(homes[:, :, :1], bool), homes[:, :, 1:] != homes[:, :, :-1]], 2)
    first = lax.associative_scan(jnp.maximum, jnp.where(begins, tokens, 0), axis=2)
    return order, homes, tokens - first


def unsort(order: Int[Array, "B N T"], x: Int[Array, "B N T"]) -> Int[Array, "B N T"]:
    """What belongs to sorted tokens, in the order of their positions."""
    return lax.sort((order, x), dimension=2, is_stable=False, num_keys=1)[1]


def _slots(buckets: Int[Array, "B N T"], chunk_size: int, is_causal: bool) -> Int[Array, "B N T"]:
    """The place of each token in the chunks of one round."""
    order, _, rank = ranks(buckets)
    if not is_causal:
        numbers = jnp.arange(rank.shape[2], dtype=jnp.int32)
        return unsort(order, jnp.broadcast_to(numbers[None, None], rank.shape))
    begun = lax.associative_scan(jnp.add, (rank % chunk_size == 0).astype(jnp.int32), axis=2)
    return unsort(order, (begun - 1) * chunk_size + rank % chunk_size)
