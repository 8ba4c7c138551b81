"""Decoding caches that several layers share, and the one function that writes new tokens into a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.state import slide, window_segments
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
