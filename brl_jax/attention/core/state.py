"""What functions with a state share: a cache of all keys and values, and checks of a given state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.checks import require

State = TypeVar("State", bound=tuple)


class KeyValueCache(NamedTuple):
    """Keys and values of all tokens so far, each at its position, with capacity for later ones.

    Heads come before tokens, because a product with a new token's query reads them in this order. In the other order,
    the compiler would transpose the whole cache at every token.

    Attributes:
      keys: (B, K, S, F), for sequences of up to S tokens; F is the head dimension or a number of features.
      values: (B, K, S, V).
      length: () int32, the number of tokens so far.
    """

    keys: Float[Array, "B K S F"]
    values: Float[Array, "B K S V"]
    length: Int[Array, ""]

    @property
    def key(self) -> Float[Array, "B S K F"]:
        """The keys in the layout of the attention functions."""
        return jnp.swapaxes(self.keys, 1, 2)

    @property
    def value(self) -> Float[Array, "B S K V"]:
        """The values in the layout of the attention functions."""
        return jnp.swapaxes(self.values, 1, 2)

    @classmethod
    def empty(cls, key_shape: tuple[int, ...], value_shape: tuple[int, ...], dtype: Any) -> KeyValueCache:
        """Returns an empty cache for keys (B, S, K, F) and values (B, S, K, V)."""
        keys, values = (
            jnp.zeros((batch, heads, length, size), dtype)
            for batch, length, heads, size in (key_shape, value_shape)
        )
        return cls(keys, values, jnp.zeros((), jnp.int32))

    def append(
        self, key: Float[Array, "B T K F"], value: Float[Array, "B T K V"], count: Any = None
    ) -> KeyValueCache:
        """Returns the cache with T more tokens; only the first `count` are valid (None: all).

        Raises:
          ValueError: the tokens do not fit. Traced numbers of tokens are not checked.
        """
        start, length = self.length, key.shape[1]
        return KeyValueCache(
            write_tokens(self.keys, jnp.swapaxes(key, 1, 2), start, count),
            write_tokens(self.values, jnp.swapaxes(value, 1, 2), start, count),
            jnp.asarray(start + (length if count is None else count), jnp.int32),
        )


def write_places(
    array: Float[Array, "*S"], new: Float[Array, "*T"], places: Int[Array, "*#B T"], *, axis: int = 1
) -> Float[Array, "*S"]:
    """`array` with `new` written at `places` along `axis`. Places at or beyond the end are ignored.

    XLA turns a write to one place into an update slice. Its CPU compiler computes that twice, for the new array and
    inside the product that reads it, so neither can happen in place and both copy the array. A write to two places
    stays a scatter, which happens in place; so on a CPU a single write gets a second place, beyond the end.

    Args:
      array: floats or integers, with tokens along `axis`.
      new: an array like it, with T tokens along `axis`.
      places: (T,) ints for all rows; or (B, T), one list for each row, with axis=1.
    """
    size = array.shape[axis]

    def write(array: Array, new: Array, places: Array) -> Array:
        if places.ndim == 1:
            return array.at[(slice(None),) * axis + (places,)].set(new, mode="drop")
        rows = jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
        return array.at[rows, places].set(new, mode="drop")

    def write_with_another(array: Array, new: Array, places: Array) -> Array:
        places = jnp.concatenate([places, jnp.full_like(places, size)], axis=-1)
        return write(array, jnp.concatenate([new, new], axis=axis), places)

    new = new.astype(array.dtype)
    if places.shape[-1] > 1:
        return write(array, new, places)
    return branches(array, new, places, cpu=write_with_another, default=write)


def write_tokens(
    array: Float[Array, "B K S H"], new: Float[Array, "B K T H"], start: Any, count: Any = None
) -> Float[Array, "B K S H"]:
    """Returns `array` with `new` written from position `start`. Only the first `count` new tokens are valid (None:
    all); the others, and tokens beyond the array's end, are not written.

    Raises:
      ValueError: the tokens do not fit. Traced numbers of tokens are not checked.
    """
    capacity, length = array.shape[2], new.shape[2]
    present = 0 if isinstance(start, jax.core.Tracer) else int(start)
    require(
        count is not None or present + length <= capacity,
        f"cache: has room for {capacity} tokens, got {length} after {present}; "
        "init_cache(batch, length) with a larger length makes more",
    )
    numbers = jnp.arange(length, dtype=jnp.int32)
    places = start + numbers if count is None else jnp.where(numbers < count, start + numbers, capacity)
    return write_places(array, new, places, axis=2)


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


def check_state_options(
    maker: str, *, state: Any, return_state: bool, count: Any, is_causal: bool, **lengths: Any
) -> None:
    """Raises ValueError unless a call's options fit its state, or the lack of one.

    Args:
      maker: name of the function that makes such states, for messages.
      lengths: the call's lengths by name, which a state's `count` replaces.
    """
    if state is None:
        require(not return_state, f"return_state needs a state, from {maker}")
        require(count is None, "count needs a state; key_value_seq_lengths gives the lengths without one")
        return
    require(is_causal, "state needs is_causal=True: it summarises the earlier tokens only")
    for name, given in lengths.items():
        require(given is None, f"{name} must be None with a state; use count")


def check_state(state: Any, init: Callable[..., State], *sizes: Any, **options: Any) -> State:
    """Returns the state, or `init(*sizes, **options)` if it is None.

    Raises:
      ValueError: the state's shapes or dtypes differ from those of `init(*sizes, **options)`.
    """
    if state is None:
        return init(*sizes, **options)
    expected = jax.eval_shape(functools.partial(init, *sizes, **options))
    right, given = (
        jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda leaf: leaf is None) for x in (expected, state)
    )
    require(
        [path for path, _ in right] == [path for path, _ in given],
        f"state must have {len(right)} arrays, as from {init.__name__} with these sizes, got {len(given)}",
    )
    for (path, leaf), (_, own) in zip(right, given):
        fits = leaf is own or (None not in (leaf, own) and (own.shape, own.dtype) == (leaf.shape, leaf.dtype))
        name = f"state{jax.tree_util.keystr(path)}"
        require(fits, f"{name} must be {_describe(leaf)}, got {_describe(own)}")
    return state


def _describe(leaf: Any) -> str:
    return "None" if leaf is None else f"{leaf.dtype} of shape {leaf.shape}"
