"""Reformer: attention among tokens that a hash puts into one bucket (Kitaev, Kaiser and Levskaya 2020)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

from brl_jax.attention.core.checks import require, zero_padding
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.on_mesh import whole_rows
from brl_jax.attention.core.same_tokens import prepare_same_tokens
from brl_jax.attention.core.softmax import MASKED, block_sums
from brl_jax.attention.core.state import KeyValueCache, check_state, write_places
from brl_jax.attention.sorting.buckets import (
    alone_sees_itself,
    attend_in_buckets,
    bucket_codes,
    hash_buckets,
    inverse_lengths,
    ranks,
    share_chunks,
    unsort,
)
from brl_jax.fields import Count, Even, declared
from pallas_kernels.absent import existing

# The code of an empty place, which no token shares.
_NOWHERE = -3


class ReformerState(NamedTuple):
    """What causal `reformer_attention` keeps of the tokens so far.

    Attributes:
      past: the queries, which are also the keys, and the values.
      codes: each token's bucket and chunk in each round (`bucket_codes`), with capacity for later tokens.
      counts: the number of tokens in each bucket.
    """

    past: KeyValueCache
    codes: Int[Array, "R B N S"]
    counts: Int[Array, "R B N F2"]

    @property
    def length(self) -> Int[Array, ""]:
        """The number of tokens so far."""
        return self.past.length


@declared
def reformer_rotations(
    rng: PRNGKeyArray, head_dim: Count, *, num_rounds: Count = 4, num_buckets: Even = 32
) -> Float[Array, "R H F"]:
    """Random matrices for `reformer_attention`: F = num_buckets / 2 directions for each round of hashing.

    Raises:
      ValueError: a size is below 1, or num_buckets is odd.
    """
    return jax.random.normal(rng, (num_rounds, head_dim, num_buckets // 2), jnp.float32)


@declared
def init_reformer_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    length: Count,
    num_heads: Count | None = None,
    num_rounds: Count = 4,
    num_buckets: Even = 32,
    dtype: DTypeLike = jnp.float32,
) -> ReformerState:
    """Returns the state of `reformer_attention` before the first of up to `length` tokens.

    Args:
      num_kv_heads: heads of the values.
      value_dim: head_dim of the values; head_dim by default.
      num_heads: heads of the queries; num_kv_heads by default.
      num_rounds, num_buckets: as for `reformer_rotations`.

    Raises:
      ValueError: a size is below 1, or num_buckets is odd.
    """
    num_heads = num_kv_heads if num_heads is None else num_heads
    value_dim = head_dim if value_dim is None else value_dim
    past = KeyValueCache.empty(
        (batch, length, num_heads, head_dim), (batch, length, num_kv_heads, value_dim), dtype
    )
    rows = (num_rounds, batch, num_heads)
    codes = jnp.full((*rows, length), _NOWHERE, jnp.int32)
    return ReformerState(past, codes, jnp.zeros((*rows, num_buckets), jnp.int32))


@divided(whole_rows("query", "value"))
def reformer_attention(
    query: Float[Array, "B T N H"],
    value: Float[Array, "B T K V"],
    rotations: Float[Array, "R H F"],
    *,
    chunk_size: Count = 64,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: ReformerState | None = None,
    return_state: bool = False,
    count: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], ReformerState]:
    """Softmax attention of each token to the tokens that share its bucket in at least one of R rounds of hashing.

    (B, T, N, H), (B, T, K, V), (R, H, F) -> (B, T, N, V)::

        rotations = reformer_rotations(jax.random.key(0), head_dim)
        out = reformer_attention(query, value, rotations, is_causal=True)

      k_j = q_j / |q_j|;  h(q) = argmax [q W; -q W] for each of the R matrices W
      out_i = sum_j softmax_j(scale q_i . k_j) v_j over the tokens j that i sees in any round

    Reformer (arXiv:2001.04451), sections 2 and 3. Queries are also keys, so a token finds those that resemble it. It
    sees itself only if it sees nothing else. Each round sorts the tokens by bucket and position and cuts them into
    chunks of `chunk_size`. A token sees the tokens of its bucket in its own chunk and in the chunk before it. Each
    round has its own softmax, and the log-sum-exps merge them. A token that is seen in n rounds gets a score lower by
    log n in each, so that it counts once (appendix A).

    The authors tie the number of buckets to the length, 2 T / chunk_size. Here the rotations fix it, so that a token's
    hash depends on the token alone. The Long Range Arena's code does not normalise keys and multiplies scores by
    sqrt(H); here they are divided by it, as in the paper.

    Causal: a token sees only earlier tokens. The paper cuts the whole sorted sequence into chunks, so later tokens
    shift the chunks of earlier ones. Here each bucket is cut separately, from its first token on, so that generation
    continues the same chunks. As in the paper, a token reaches back chunk_size to 2 chunk_size - 1 of its bucket.

    Time is O(R T log T + R T chunk_size) and memory O(R T + T chunk_size), with T + 2 F chunk_size for T if causal.
    Generation scores a few new tokens against all places of the state, and more than R chunk_size of them in the sorted
    form::

        state = init_reformer_state(batch, num_kv_heads, head_dim, length=4096)
        out, state = reformer_attention(..., is_causal=True, state=state, return_state=True)

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      value: (B, T, K, V) of the same tokens and dtype; K divides N.
      rotations: from `reformer_rotations`, the same for all heads. Hashes have no gradient.
      chunk_size: tokens in a chunk; the same in all calls that share a state.
      scale: scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything, is
        sorted behind all other tokens, and gives 0. Without a state only.
      state: from `init_reformer_state` or an earlier call; causal only.
      return_state: also return the state after these tokens; needs a state.
      count: with a state, how many tokens are valid, from the first (None: all). Other outputs are undefined.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    exact_query, _, exact_value, lengths, scale, dtype = prepare_same_tokens(
        query, query, value, tied=True, scale=scale, key_value_seq_lengths=key_value_seq_lengths,
        implementation=implementation, maker="init_reformer_state", is_causal=is_causal, state=state,
        return_state=return_state, count=count,
    )  # fmt: skip
    shape = rotations.shape
    require(
        len(shape) == 3 and shape[1] == query.shape[3] and 0 not in shape,
        f"rotations must have shape (rounds, {query.shape[3]}, directions), got {shape}",
    )
    num_buckets = 2 * shape[2]
    batch, length = query.shape[:2]
    if state is not None:
        check_state(
            state, init_reformer_state, batch, value.shape[2], query.shape[3], value.shape[3],
            length=state.past.keys.shape[2], num_heads=query.shape[2], num_rounds=shape[0], num_buckets=num_buckets,
            dtype=dtype,
        )  # fmt: skip
        out, state = _extend(query, value, rotations, state, count, chunk_size, scale)
        return (out.astype(dtype), state) if return_state else out.astype(dtype)
    buckets = hash_buckets(exact_query, rotations)
    if lengths is not None:
        buckets = jnp.where(existing(lengths, length)[None, :, None], buckets, num_buckets)
    out = attend_in_buckets(exact_query, exact_value, buckets, num_buckets, chunk_size, scale, is_causal)
    return zero_padding(out, lengths).astype(dtype)


def _extend(
    query: Array,
    value: Array,
    rotations: Array,
    state: ReformerState,
    count: Any,
    chunk_size: int,
    scale: float,
) -> tuple[Float[Array, "B T N V"], ReformerState]:
    """Causal attention of new tokens, which also see the state's, and the state after them."""
    past, start, length = state.past.append(query, value, count), state.length, query.shape[1]
    num_buckets, room = 2 * rotations.shape[2], past.keys.shape[2]
    query, past_query, past_value = (x.astype(jnp.float32) for x in (query, past.keys, past.values))
    numbers = jnp.arange(length, dtype=jnp.int32)
    new = length if count is None else count
    buckets = hash_buckets(query, rotations)
    buckets = jnp.where((numbers < new)[None, None, None], buckets, num_buckets)
    own, codes, counts = _append(buckets, state, start, new, chunk_size)
    state = ReformerState(past, codes, counts)
    if length > rotations.shape[0] * chunk_size:
        homes = jnp.where(codes < 0, num_buckets, codes // _code_size(room, chunk_size))
        past_query, past_value = (jnp.swapaxes(x, 1, 2) for x in (past_query, past_value))
        out = attend_in_buckets(past_query, past_value, homes, num_buckets, chunk_size, scale, True)
        return jnp.take(out, jnp.minimum(start + numbers, room - 1), axis=1), state
    seen = functools.reduce(
        jnp.logical_or, (share_chunks(a[..., None], b[:, :, None]) for a, b in zip(own, codes))
    )
    earlier = jnp.arange(room, dtype=jnp.int32)[None] < (start + numbers)[:, None]
    # Normalise the scores instead of the more numerous keys.
    scores = jnp.einsum("bnth,bnsh->bnts", jnp.swapaxes(query, 1, 2), past_query) * scale
    scores = scores * inverse_lengths(past_query)[:, :, None]
    scores = jnp.where(seen & earlier[None, None], scores, MASKED)

    def read(weights: Array) -> Array:
        grouped = weights.reshape(weights.shape[0], past_value.shape[1], -1, room)
        return jnp.einsum("bkrs,bksv->bkrv", grouped, past_value).reshape(*weights.shape[:3], -1)

    latest = jnp.take(past_value, jnp.minimum(start + numbers, room - 1), axis=2)
    latest = jnp.repeat(latest, past_query.shape[1] // past_value.shape[1], axis=1)
    return jnp.moveaxis(alone_sees_itself(block_sums(scores, read), latest), 1, 2), state


def _most_chunks(room: int, chunk_size: int) -> int:
    return -(-room // chunk_size)


def _code_size(room: int, chunk_size: int) -> int:
    """The distance between the codes of neighbouring buckets."""
    return _most_chunks(room, chunk_size) + 2


def _append(
    buckets: Int[Array, "R B N T"], state: ReformerState, start: Any, new: Any, chunk_size: int
) -> tuple[Array, Array, Array]:
    """Returns the codes of the new tokens, and the state's codes and counts with them."""
    rounds, batch, heads, length = buckets.shape
    num_buckets, room = state.counts.shape[3], state.codes.shape[3]
    flat = buckets.reshape(rounds * batch, heads, length)
    order, _, rank = ranks(flat)
    rank = unsort(order, rank).reshape(buckets.shape)
    before = jnp.take_along_axis(state.counts, jnp.minimum(buckets, num_buckets - 1), axis=3)
    codes = bucket_codes(buckets, (before + rank) // chunk_size, _most_chunks(room, chunk_size))
    numbers = jnp.arange(length, dtype=jnp.int32)
    places = jnp.where(numbers < new, start + numbers, room)
    added = buckets[..., None] == jnp.arange(num_buckets, dtype=jnp.int32)[None, None, None, None]
    added = added.sum(3, dtype=jnp.int32)
    counts = state.counts + added
    return codes, write_places(state.codes, codes, places, axis=3), counts
