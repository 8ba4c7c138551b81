"""Causal local attention of new tokens after those of a ring buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_dtypes
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.local.api import IMPLEMENTATIONS, local_attention
from brl_jax.fields import Count, declared


class LocalState(NamedTuple):
    """The keys and values that the next token's window reaches.

    Attributes:
      key, value: ring buffers of window + 1 tokens; the token at position p is in slot p % (window + 1).
      tokens: the number of tokens so far.
    """

    key: Float[Array, "B slots K H"]
    value: Float[Array, "B slots K H"]
    tokens: Int[Array, ""]


@declared
def init_local_state(
    batch: Count, num_kv_heads: Count, head_dim: Count, *, window: Count, dtype: Any = jnp.float32
) -> LocalState:
    """The state of `local_attention_step` before the first token.

    Args:
      window: the keys that a query sees besides its own, `local_window_size` of `local_attention`.
      dtype: that of the keys and values.

    Raises:
      ValueError: a size below 1.
    """
    shape = (batch, window + 1, num_kv_heads, head_dim)
    return LocalState(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


@attention_function
def local_attention_step(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    state: LocalState,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N H"], LocalState]:
    """Causal `local_attention` of the next T tokens after those in the state; T is any number, 1 in generation.

    (B, T, N, H), (B, T, K, H) x 2 -> (B, T, N, H), and the state after these tokens::

        state = init_local_state(batch, num_kv_heads, head_dim, window=128)
        out, state = local_attention_step(query, key, value, state)

    Args:
      query, key, value, scale: as for `local_attention`.
      implementation: as for `local_attention`; a single token takes a kernel only where it is asked for by name.
      state: from `init_local_state`, which also says the window, or from the step before.

    Raises:
      ValueError: as `local_attention`, and a state of other sizes or of another function.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    check_implementation(implementation, *IMPLEMENTATIONS)
    require(value.shape == key.shape, f"value must have key's shape {key.shape}, got {value.shape}")
    slots = state.key.shape[1]
    expected = (key.shape[0], slots, *key.shape[2:])
    for name, old in (("key", state.key), ("value", state.value)):
        require(
            old.shape == expected and old.dtype == key.dtype,
            f"state.{name} must be {key.dtype} of shape {expected}, got {old.dtype} of shape {old.shape}",
        )
    length = query.shape[1]
    require(key.shape[1] == length, f"key must have {length} tokens, as query has, got {key.shape[1]}")
    if length == 1 and implementation in (None, "xla"):
        place = state.tokens % slots
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new, place, axis=1)
            for old, new in ((state.key, key), (state.value, value))
        )
        # The order of the keys does not matter to one query. Slots fill from the first one on.
        filled = jnp.full((key.shape[0],), jnp.minimum(state.tokens + 1, slots), jnp.int32)
        out = full_attention(
            query, keys, values, scale=scale, key_value_seq_lengths=filled, implementation=implementation
        )
        return out, LocalState(keys, values, state.tokens + 1)
    oldest_first = (state.tokens + jnp.arange(slots)) % slots
    keys, values = (
        jnp.concatenate([old[:, oldest_first], new], axis=1)
        for old, new in ((state.key, key), (state.value, value))
    )
    empty = jnp.arange(slots + length) < slots - state.tokens
    segments = jnp.broadcast_to(empty.astype(jnp.int32), keys.shape[:2])
    out = local_attention(
        query, keys, values, local_window_size=(slots - 1, 0), is_causal=True, scale=scale, query_offset=slots,
        segment_ids=(jnp.zeros(query.shape[:2], jnp.int32), segments), implementation=implementation,
    )  # fmt: skip
    tokens = state.tokens + length
    keys, values = (jnp.roll(x[:, length:], tokens % slots, axis=1) for x in (keys, values))
    return out, LocalState(keys, values, tokens)
