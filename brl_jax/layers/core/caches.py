"""Decoding caches that several layers share, and the one place where new tokens are written into a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.checks import require


class KeyValueCache(NamedTuple):
    """Keys and values of all tokens so far, each at its position, with room for later ones.

    Attributes:
      key: (B, S, K, F), for sequences of up to S tokens; F is the head dimension or a number of features.
      value: (B, S, K, V).
      num_tokens: () int32, how many tokens there are so far.
    """

    key: Float[Array, "B S K F"]
    value: Float[Array, "B S K V"]
    num_tokens: Int[Array, ""]

    @classmethod
    def empty(cls, key_shape: tuple[int, ...], value_shape: tuple[int, ...], dtype: Any) -> KeyValueCache:
        """A cache without tokens, from the shapes (B, S, K, F) and (B, S, K, V)."""
        return cls(jnp.zeros(key_shape, dtype), jnp.zeros(value_shape, dtype), jnp.zeros((), jnp.int32))

    def append(
        self, key: Float[Array, "B T K F"], value: Float[Array, "B T K V"], count: Any = None
    ) -> KeyValueCache:
        """The cache with T more tokens, of which the first `count` exist (None: all).

        Raises:
          ValueError: more tokens than there is room for, as far as that is known while tracing.
        """
        start, length = self.num_tokens, key.shape[1]
        return KeyValueCache(
            write_tokens(self.key, key, start, count),
            write_tokens(self.value, value, start, count),
            start + (length if count is None else count),
        )


class WindowCache(NamedTuple):
    """The last keys and values that a local pattern can reach, newest last.

    Attributes:
      key, value: (B, R, K, H), where the first R - num_tokens are of no token.
      num_tokens: () int32, how many tokens there have been, also those that have left the window.
    """

    key: Float[Array, "B R K H"]
    value: Float[Array, "B R K H"]
    num_tokens: Int[Array, ""]

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> WindowCache:
        """A cache without tokens, from the shape (B, R, K, H)."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))


class StateCache(NamedTuple):
    """The state of a recurrent attention function.

    Attributes:
      state: as the attention function defines it.
      num_tokens: () int32, how many tokens are in it.
    """

    state: Any
    num_tokens: Int[Array, ""]


def write_tokens(
    array: Float[Array, "B S ..."], new: Float[Array, "B T ..."], start: Any, count: Any = None
) -> Float[Array, "B S ..."]:
    """`array` with `new` at the positions from `start` on. Of the new tokens only the first `count` exist (None: all);
    the others, and those beyond the array's end, are written nowhere.

    Raises:
      ValueError: more tokens than there is room for, as far as that is known while tracing.
    """
    room, length = array.shape[1], new.shape[1]
    present = 0 if isinstance(start, jax.core.Tracer) else int(start)
    require(
        count is not None or present + length <= room,
        f"cache: has room for {room} tokens, got {length} after {present}; "
        "init_cache(batch, length) with a larger length makes more",
    )
    numbers = jnp.arange(length, dtype=jnp.int32)
    places = start + numbers if count is None else jnp.where(numbers < count, start + numbers, room)
    return array.at[:, places].set(new, mode="drop")


def slide(
    recent: Float[Array, "B R ..."], new: Float[Array, "B T ..."], count: Any
) -> tuple[Float[Array, "B R+T ..."], Float[Array, "B R ..."]]:
    """[recent | new], and the last R of its tokens when only the first `count` of the new ones exist."""
    both = jnp.concatenate([recent, new], axis=1)
    return both, jax.lax.dynamic_slice_in_dim(both, count, recent.shape[1], axis=1)


def window_segments(
    batch: int, length: int, reach: int, start: Any
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Segment ids of T new tokens and of the keys [recent | new]: places of the window that no token has filled yet
    are a segment of their own."""
    filled: Bool[Array, " S"] = jnp.arange(reach + length) >= reach - start
    return (
        jnp.ones((batch, length), jnp.int32),
        jnp.broadcast_to(filled.astype(jnp.int32), (batch, reach + length)),
    )
