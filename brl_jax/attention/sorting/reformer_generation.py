"""Causal `reformer_attention` token by token, from the chunks that earlier tokens are in."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_scale, check_sizes
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.in_place import write_places
from brl_jax.attention.core.softmax import MASKED, block_sums
from brl_jax.attention.recurrent.arguments import check_state
from brl_jax.attention.sorting.reformer import (
    alone_sees_itself,
    attend_in_buckets,
    bucket_codes,
    check_buckets,
    check_reformer_arguments,
    hash_buckets,
    inverse_lengths,
    ranks,
    share_chunks,
    unsort,
)

# The bucket and chunk of a place without a token, which is near no other.
_NOWHERE = -3


class ReformerState(NamedTuple):
    """What generation keeps of the hashes so far.

    Attributes:
      codes: the bucket and the chunk in it of each token in each round (`bucket_codes`), with room for later tokens.
      counts: how many tokens each bucket has.
    """

    codes: Int[Array, "R B N S"]
    counts: Int[Array, "R B N F2"]


def init_reformer_state(
    batch: int, length: int, num_heads: int, *, num_rounds: int = 4, num_buckets: int = 32
) -> ReformerState:
    """The state before the first of up to `length` tokens.

    Raises:
      ValueError: a size below 1, or an odd number of buckets.
    """
    check_sizes(batch=batch, length=length, num_heads=num_heads, num_rounds=num_rounds)
    check_buckets(num_buckets)
    rows = (num_rounds, batch, num_heads)
    return ReformerState(
        jnp.full((*rows, length), _NOWHERE, jnp.int32), jnp.zeros((*rows, num_buckets), jnp.int32)
    )


@attention_function
def reformer_step(
    query: Float[Array, "B T N H"],
    past_query: Float[Array, "B S N H"],
    past_value: Float[Array, "B S K V"],
    rotations: Float[Array, "R H F"],
    state: ReformerState,
    *,
    start: Int[Array, ""] | int,
    count: Any = None,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], ReformerState]:
    """Causal `reformer_attention` of T new tokens after `start` earlier ones.

    (B, T, N, H), (B, S, N, H), (B, S, K, V), (R, H, F) -> (B, T, N, V) and the new state::

        state = init_reformer_state(batch, length, num_heads)
        out, state = reformer_step(query, past_query, past_value, rotations, state, start=0)

    Few new tokens take their scores with all S places, O(T S) time; more than R chunk_size of them take the sorted form
    over all S.

    Args:
      query: of the new tokens.
      past_query, past_value: of all tokens, with room for later ones: those at start .. start + T are of the new
        tokens. Room that no token has filled must be finite.
      rotations: as there.
      state: from `init_reformer_state` for S tokens, or from an earlier call.
      start: the number of earlier tokens.
      count: how many of the new tokens exist, the first ones; None for all. The outputs of the others are undefined.
      chunk_size, scale: as there.

    Returns:
      (B, T, N, V) in the dtype of the query, and the new state.

    Raises:
      ValueError: arrays that do not fit, or a state for other sizes, rounds or buckets.
    """
    check_reformer_arguments(past_query, past_value, rotations)
    sizes = {"num_rounds": rotations.shape[0], "num_buckets": 2 * rotations.shape[2]}
    fresh = functools.partial(init_reformer_state, *past_query.shape[:3], **sizes)
    check_state(state, jax.eval_shape(fresh), "init_reformer_state")
    scale = check_scale(scale, query.shape[3])
    length, room = query.shape[1], past_query.shape[1]
    num_buckets = 2 * rotations.shape[2]
    dtype = query.dtype
    query, past_query, past_value = (x.astype(jnp.float32) for x in (query, past_query, past_value))
    numbers = jnp.arange(length, dtype=jnp.int32)
    new = length if count is None else count
    buckets = hash_buckets(query, rotations)
    buckets = jnp.where((numbers < new)[None, None, None], buckets, num_buckets)
    own, state = _append(buckets, state, start, new, chunk_size)
    if length > rotations.shape[0] * chunk_size:
        homes = jnp.where(state.codes < 0, num_buckets, state.codes // _code_size(room, chunk_size))
        out = attend_in_buckets(past_query, past_value, homes, num_buckets, chunk_size, scale, True)
        return jnp.take(out, jnp.minimum(start + numbers, room - 1), axis=1).astype(dtype), state
    # Heads before tokens, as `KeyValueCache` keeps them: then no product needs a copy of the past.
    past_query, past_value = jnp.swapaxes(past_query, 1, 2), jnp.swapaxes(past_value, 1, 2)
    seen = functools.reduce(
        jnp.logical_or, (share_chunks(a[..., None], b[:, :, None]) for a, b in zip(own, state.codes))
    )
    earlier = jnp.arange(room, dtype=jnp.int32)[None] < (start + numbers)[:, None]
    # The products are divided by the keys' lengths, as there are fewer of them than of the keys' entries.
    scores = jnp.einsum("bnth,bnsh->bnts", jnp.swapaxes(query, 1, 2), past_query) * scale
    scores = scores * inverse_lengths(past_query)[:, :, None]
    scores = jnp.where(seen & earlier[None, None], scores, MASKED)

    def read(weights: Array) -> Array:
        grouped = weights.reshape(weights.shape[0], past_value.shape[1], -1, room)
        return jnp.einsum("bkrs,bksv->bkrv", grouped, past_value).reshape(*weights.shape[:3], -1)

    latest = jnp.take(past_value, jnp.minimum(start + numbers, room - 1), axis=2)
    latest = jnp.repeat(latest, past_query.shape[1] // past_value.shape[1], axis=1)
    out = alone_sees_itself(block_sums(scores, read), latest)
    return jnp.moveaxis(out, 1, 2).astype(dtype), state


def _most_chunks(room: int, chunk_size: int) -> int:
    return -(-room // chunk_size)


def _code_size(room: int, chunk_size: int) -> int:
    """By how much the codes of neighbouring buckets differ."""
    return _most_chunks(room, chunk_size) + 2


def _append(
    buckets: Int[Array, "R B N T"], state: ReformerState, start: Any, new: Any, chunk_size: int
) -> tuple[Array, ReformerState]:
    """The codes of the new tokens, and the state with them."""
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
    return codes, ReformerState(write_places(state.codes, codes, places, axis=3), counts)
