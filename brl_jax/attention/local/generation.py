"""Local attention that continues from the tokens of earlier calls, in a ring buffer of one window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.state import check_state
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.fields import Count, Natural, declared


class LocalState(NamedTuple):
    """The keys and values in the window of `local_attention`, after the tokens so far.

    Attributes:
      key, value: ring buffers of `window` tokens, the query's own included; position p is in slot p % window.
      length: the number of tokens so far.
    """

    key: Float[Array, "B window K H"]
    value: Float[Array, "B window K V"]
    length: Int[Array, ""]


@declared
def init_local_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    local_window_size: Natural | tuple[Natural, Natural],
    dtype: Any = jnp.float32,
) -> LocalState:
    """The state of `local_attention` before the first token.

    Args:
      value_dim: head_dim of the values; head_dim by default.
      local_window_size: as in the calls that use the state; only the left side counts.
      dtype: of the keys and values.

    Raises:
      ValueError: a size is below 1.
    """
    tokens = (batch, SlidingWindow.of_size(local_window_size).left + 1, num_kv_heads)
    value_dim = head_dim if value_dim is None else value_dim
    key, value = (jnp.zeros((*tokens, size), dtype) for size in (head_dim, value_dim))
    return LocalState(key, value, jnp.zeros((), jnp.int32))


def continue_from(
    state: LocalState | None,
    left: int,
    attend: Callable[..., Array],
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    **options: Any,
) -> tuple[Float[Array, "B T N V"], LocalState]:
    """Causal attention of T new tokens to themselves and `left` tokens before each, and the state after them.

    Args:
      attend: `local_attention`.
    """
    batch, length, kv_heads, head_dim = key.shape
    require(
        query.shape[1] == length, f"key must have {query.shape[1]} tokens, as query has, got {key.shape[1]}"
    )
    size, window = (left, 0), left + 1
    sizes = (batch, kv_heads, head_dim, value.shape[3])
    given = state is not None
    state = check_state(state, init_local_state, *sizes, local_window_size=size, dtype=key.dtype)
    if not given:
        out = attend(query, key, value, local_window_size=size, is_causal=True, **options)
        return out, _push(state, key, value)[2]
    if length == 1 and options["implementation"] in (None, "xla"):
        place = state.length % window
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new, place, axis=1)
            for old, new in ((state.key, key), (state.value, value))
        )
        # The order of the keys does not matter to a single query. Slots fill from the first one on.
        filled = jnp.full((batch,), jnp.minimum(state.length + 1, window), jnp.int32)
        out = full_attention(query, keys, values, key_value_seq_lengths=filled, **options)
        return out, LocalState(keys, values, state.length + 1)
    keys, values, new = _push(state, key, value)
    empty_slots = jnp.arange(window + length) < window - state.length
    segments = jnp.broadcast_to(empty_slots.astype(jnp.int32), keys.shape[:2])
    out = attend(
        query, keys, values, local_window_size=size, is_causal=True, query_offset=window,
        segment_ids=(jnp.zeros(query.shape[:2], jnp.int32), segments), **options,
    )  # fmt: skip
    return out, new


def _push(state: LocalState, key: Array, value: Array) -> tuple[Array, Array, LocalState]:
    """All keys and all values, oldest first, and the state after the new ones."""
    window, length = state.key.shape[1], key.shape[1]
    oldest_first = (state.length + jnp.arange(window)) % window
    keys, values = (
        jnp.concatenate([old[:, oldest_first], new], axis=1)
        for old, new in ((state.key, key), (state.value, value))
    )
    after = state.length + length
    last_keys, last_values = (jnp.roll(x[:, length:], after % window, axis=1) for x in (keys, values))
    return keys, values, LocalState(last_keys, last_values, after)
