"""Decoding caches that several layers share, and the one function that writes new tokens into a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.state import slide, window_segments
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.protocol import LayerCall


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

    def attend(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, WindowCache]:
        """Attends from new tokens to themselves and the window, by `local_attention`; also returns the new window."""
        batch, reach = self.key.shape[:2]
        length = attention.query.shape[1]
        start, count = call.start, call.num_new(length)
        key, last_keys = slide(self.key, attention.key, count)
        value, last_values = slide(self.value, attention.value, count)
        out = attention.function(
            attention.query,
            key,
            value,
            segment_ids=window_segments(batch, length, reach, start),
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
