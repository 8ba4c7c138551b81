"""Decoding caches that several layers share, and the one place where new tokens are written into a cache."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.in_place import write_places


class KeyValueCache(NamedTuple):
    """Keys and values of all tokens so far, each at its position, with room for later ones.

    The arrays have the heads before the tokens: that is the order of the products with a new token's query, for which
    the compiler would otherwise transpose the whole cache at every token.

    Attributes:
      keys: (B, K, S, F), for sequences of up to S tokens; F is the head dimension or a number of features.
      values: (B, K, S, V).
      num_tokens: () int32, how many tokens there are so far.
    """

    keys: Float[Array, "B K S F"]
    values: Float[Array, "B K S V"]
    num_tokens: Int[Array, ""]

    @property
    def key(self) -> Float[Array, "B S K F"]:
        """The keys as attention functions take them."""
        return jnp.swapaxes(self.keys, 1, 2)

    @property
    def value(self) -> Float[Array, "B S K V"]:
        """The values as attention functions take them."""
        return jnp.swapaxes(self.values, 1, 2)

    @classmethod
    def empty(cls, key_shape: tuple[int, ...], value_shape: tuple[int, ...], dtype: Any) -> KeyValueCache:
        """A cache without tokens, from the shapes (B, S, K, F) and (B, S, K, V)."""
        keys, values = (
            jnp.zeros((batch, heads, length, size), dtype)
            for batch, length, heads, size in (key_shape, value_shape)
        )
        return cls(keys, values, jnp.zeros((), jnp.int32))

    def append(
        self, key: Float[Array, "B T K F"], value: Float[Array, "B T K V"], count: Any = None
    ) -> KeyValueCache:
        """The cache with T more tokens, of which the first `count` exist (None: all).

        Raises:
          ValueError: more tokens than there is room for, as far as that is known while tracing.
        """
        start, length = self.num_tokens, key.shape[1]
        return KeyValueCache(
            write_tokens(self.keys, jnp.swapaxes(key, 1, 2), start, count, axis=2),
            write_tokens(self.values, jnp.swapaxes(value, 1, 2), start, count, axis=2),
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
    array: Float[Array, "B *S"],
    new: Float[Array, "B *T"],
    start: Any,
    count: Any = None,
    *,
    axis: Literal[1, 2] = 1,
) -> Float[Array, "B *S"]:
    """`array` with `new` at the positions from `start` on, along `axis`. Of the new tokens only the first `count` exist
    (None: all); the others, and those beyond the array's end, are written nowhere.

    Raises:
      ValueError: more tokens than there is room for, as far as that is known while tracing.
    """
    room, length = array.shape[axis], new.shape[axis]
    present = 0 if isinstance(start, jax.core.Tracer) else int(start)
    require(
        count is not None or present + length <= room,
        f"cache: has room for {room} tokens, got {length} after {present}; "
        "init_cache(batch, length) with a larger length makes more",
    )
    numbers = jnp.arange(length, dtype=jnp.int32)
    places = start + numbers if count is None else jnp.where(numbers < count, start + numbers, room)
    return write_places(array, new, places, axis=axis)


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
