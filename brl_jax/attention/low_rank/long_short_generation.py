"""Generation with the Long-Short Transformer: new tokens after those in a state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from brl_jax.attention.core.arguments import check_positions_shape, check_scale, check_sizes
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.in_place import write_places
from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.local import xla
from brl_jax.attention.local.call import CallArrays, PatternCall
from brl_jax.attention.low_rank.long_short import (
    PLAIN_NORMS,
    Norms,
    Tokens,
    attend_to_projected,
    check_long_short,
    local_tokens,
    project_chunks,
    window_pattern,
)


class LongShortState(NamedTuple):
    """What generation keeps of the tokens so far. The newest tokens come last, after places that none has filled.

    Attributes:
      window: normalised and rotated keys and values of the last window - 1 tokens.
      chunk: keys and values of the last chunk_size tokens as they are.
      logits: (B, C, K, R), of their projection.
      projected: the normalised projections of all completed chunks, with room for later ones.
      tokens: how many tokens there have been.
    """

    window: Tokens
    chunk: Tokens
    logits: Float[Array, "B C K R"]
    projected: Tokens
    tokens: Int[Array, ""]


def init_long_short_state(
    batch: int,
    length: int,
    num_kv_heads: int,
    head_dim: int,
    rank: int,
    *,
    window: int,
    chunk_size: int,
    dtype: DTypeLike = jnp.float32,
) -> LongShortState:
    """The state before the first of up to `length` tokens; the other arguments as for `long_short_attention`.

    Raises:
      ValueError: a size below 1.
    """
    check_sizes(
        batch=batch, length=length, num_kv_heads=num_kv_heads, head_dim=head_dim, rank=rank, window=window,
        chunk_size=chunk_size,
    )  # fmt: skip

    def empty(tokens: int, features: int = head_dim) -> Array:
        return jnp.zeros((batch, tokens, num_kv_heads, features), dtype)

    def both(tokens: int) -> Tokens:
        return Tokens(empty(tokens), empty(tokens))

    chunks = both(length // chunk_size * rank)
    return LongShortState(
        both(min(window, length + 1) - 1), both(chunk_size), empty(chunk_size, rank), chunks,
        jnp.zeros((), jnp.int32),
    )  # fmt: skip


@attention_function
def long_short_step(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    projection: Float[Array, "B T K R"],
    state: LongShortState,
    *,
    count: Any = None,
    norms: Norms = PLAIN_NORMS,
    epsilon: float = 1e-5,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: float = 10000.0,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N H"], LongShortState]:
    """Causal `long_short_attention` of T new tokens after those in the state, and the state after them.

    (B, T, N, H), (B, T, K, H) x 2, (B, T, K, R) -> (B, T, N, H) and the new state::

        state = init_long_short_state(
            batch, length, num_kv_heads, head_dim, rank, window=128, chunk_size=16
        )
        out, state = long_short_step(query, key, value, projection, state)

    Args:
      query, key, value, projection, norms, epsilon, positions, rope_theta, scale: as there, of the new tokens.
      state: from `init_long_short_state` or an earlier call.
      count: how many of the new tokens exist, the first ones; None for all. The outputs of the others are undefined.

    Returns:
      (B, T, N, H) in the dtype of the query, and the new state. Tokens beyond the state's length are lost.

    Raises:
      ValueError: as `long_short_attention`, and a state of other sizes or of another function.
    """
    require(
        isinstance(state, LongShortState),
        f"state must be a LongShortState, made by init_long_short_state, got {type(state).__name__}",
    )
    check_long_short(query, key, value, projection, norms)
    rank = state.logits.shape[3]
    for name, old, new in (("chunk.key", state.chunk.key, key), ("logits", state.logits, projection)):
        expected = (new.shape[0], old.shape[1], *new.shape[2:])
        require(
            old.shape == expected and old.dtype == new.dtype,
            f"state.{name} must be {new.dtype} of shape {expected}, got {old.dtype} of shape {old.shape}",
        )
    batch, length = query.shape[:2]
    if positions is not None:
        check_positions_shape(positions, query, key)
    start = state.tokens
    count = length if count is None else count
    scale = check_scale(scale, query.shape[3])
    size = state.logits.shape[1]

    def slide(recent: Array, new: Array) -> tuple[Array, Array]:
        """[recent | new], and the last of its existing tokens."""
        both = jnp.concatenate([recent, new], axis=1)
        return both, jax.lax.dynamic_slice_in_dim(both, count, recent.shape[1], axis=1)

    raw, recent = zip(*map(slide, (*state.chunk, state.logits), (key, value, projection)))
    # The chunks that these tokens may complete: chunk c has the tokens from c C on, which are C - start places later.
    number = start // size + jnp.arange((length + size - 1) // size, dtype=jnp.int32)
    places = number[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None] - start + size
    places = jnp.clip(places, 0, size + length - 1).reshape(-1)
    key_chunks, value_chunks, logits = (jnp.take(x, places, axis=1) for x in raw)
    done = project_chunks(Tokens(key_chunks, value_chunks), logits, places.shape[0], size, norms, epsilon)
    room = state.projected.key.shape[1]
    slots = number[:, None] * rank + jnp.arange(rank, dtype=jnp.int32)[None]
    slots = jnp.where((number[:, None] + 1) * size <= start + count, slots, room).reshape(-1)
    projected = Tokens(*(write_places(x, new, slots) for x, new in zip(state.projected, done)))
    far = attend_to_projected(query, projected, scale, chunk=(rank, size), query_offset=start)

    near = local_tokens(Tokens(key, value), norms, epsilon, positions, rope_theta)
    (near_key, last_key), (near_value, last_value) = map(slide, state.window, near)
    query = query if positions is None else rotate(query, positions, rope_theta)
    reach = last_key.shape[1]
    call = PatternCall(
        pattern=window_pattern(reach + 1, True),
        is_causal=True,
        scale=scale,
        num_queries=length,
        num_keys=reach + length,
        query_offset=reach,
    )
    # Places of the window that no token has filled are a segment of their own.
    filled = jnp.arange(reach + length, dtype=jnp.int32) >= reach - start
    segments = jnp.broadcast_to(filled.astype(jnp.int32)[None], (batch, reach + length))
    arrays = CallArrays(
        query,
        near_key,
        near_value,
        query_segments=jnp.ones((batch, length), jnp.int32),
        key_segments=segments,
    )
    out = xla.attend_with(call, arrays, *far).astype(query.dtype)
    return out, LongShortState(
        Tokens(last_key, last_value),
        Tokens(*recent[:2]),
        recent[2],
        projected,
        jnp.asarray(start + count, jnp.int32),
    )
