"""Decoding caches that several layers share, and the one function that writes new tokens into a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.local.api import local_attention


class WindowCache(NamedTuple):
    """The last keys and values that a local pattern can reach, newest last.

    Attributes:
      key, value: (B, R, K, H); the first R - length entries are empty.
      length: () int32, the number of tokens so far, including those that have left the window.
    """

    key: Float[Array, "B R K H"]
    value: Float[Array, "B R K H"]
    length: Int[Array, ""]

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> WindowCache:
        """Returns an empty cache of shape (B, R, K, H)."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    def attend(
        self, query: Array, key: Array, value: Array, start: Any, count: Any, **options: Any
    ) -> tuple[Array, WindowCache]:
        """Attends from new tokens, the first `count` of them valid, to themselves and the window, and returns the new
        window; `options` are `local_attention`'s, and `start` is the length."""
        batch, reach = self.key.shape[:2]
        key, last_keys = slide(self.key, key, count)
        value, last_values = slide(self.value, value, count)
        out = local_attention(
            query,
            key,
            value,
            is_causal=True,
            segment_ids=window_segments(batch, query.shape[1], reach, start),
            query_offset=reach,
            key_offset=start - reach,
            **options,
        )
        return out, WindowCache(last_keys, last_values, start + count)


class StateCache(NamedTuple):
    """The state of a recurrent attention function.

    Attributes:
      state: as the attention function defines it.
      length: () int32, how many tokens it has seen.
    """

    state: Any
    length: Int[Array, ""]


def slide(
    recent: Float[Array, "B R ..."], new: Float[Array, "B T ..."], count: Any
) -> tuple[Float[Array, "B R+T ..."], Float[Array, "B R ..."]]:
    """Returns [recent | new], and its last R tokens if only the first `count` new ones are valid."""
    both = jnp.concatenate([recent, new], axis=1)
    return both, jax.lax.dynamic_slice_in_dim(both, count, recent.shape[1], axis=1)


def window_segments(
    batch: int, length: int, reach: int, start: Any
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Returns segment ids of T new tokens and of the keys [recent | new]. The window's empty entries form a separate
    segment, so that no token sees them."""
    filled: Bool[Array, " S"] = jnp.arange(reach + length) >= reach - start
    return (
        jnp.ones((batch, length), jnp.int32),
        jnp.broadcast_to(filled.astype(jnp.int32), (batch, reach + length)),
    )
