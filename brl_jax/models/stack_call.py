"""What a call of a stack takes besides its input, and what it keeps for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from brl_jax.attention.core.checks import concrete_values
from brl_jax.models.cross_attention import Encoded


class Recall(NamedTuple):
    """The new tokens and how to embed them, for a stack whose decoding cache goes back to earlier tokens.

    Attributes:
      tokens: (B, T) ints, those that x is the embedding of. embed: (B, T) ints -> (B, T, D).
    """

    tokens: Any
    embed: Callable[[Array], Array]


class StackCall(NamedTuple):
    """The arguments of one call of a stack, besides its input; see `Stack.__call__`.

    Attributes:
      count: how many of the new tokens exist, the first ones (traced); None for all of them.
    """

    positions: Any = None
    lengths: Any = None
    segment_ids: Any = None
    encoded: Encoded | None = None
    recall: Recall | None = None
    count: Any = None

    @property
    def of_layers(self) -> dict[str, Any]:
        """The keyword arguments of each layer."""
        return {
            "positions": self.positions,
            "lengths": self.lengths,
            "segment_ids": self.segment_ids,
            "count": self.count,
        }


class StackCache(NamedTuple):
    """A decoding cache.

    Attributes:
      num_tokens: () int32, the tokens so far.
      room: () int32, how many tokens the cache was made for.
      carriers: the caches of the carriers, by name.
      layers: for each group of equal periods (`group_layers`) and each of its repeats, the caches of the period's
        layers. Each layer's arrays are its own, so that a step of one token writes into them in place.
    """

    num_tokens: Any
    room: Any
    carriers: dict[str, Any]
    layers: tuple[tuple[tuple[Any, ...], ...], ...]

    def stacked(self) -> ScannedCache:
        """The cache as a scan over the repeats takes it. Every array is copied."""
        layers = tuple(jax.tree.map(lambda *arrays: jnp.stack(arrays), *group) for group in self.layers)
        return ScannedCache(self.num_tokens, self.room, self.carriers, layers)


class ScannedCache(NamedTuple):
    """A decoding cache within calls of several tokens, whose layers are scanned.

    Attributes:
      num_tokens, room, carriers: those of `StackCache`.
      layers: for each group of equal periods, the caches of the period's layers, stacked over the repeats.
    """

    num_tokens: Any
    room: Any
    carriers: dict[str, Any]
    layers: tuple[tuple[Any, ...], ...]

    def separate(self, repeats: Sequence[int]) -> StackCache:
        """The cache with separate arrays for each layer, from the numbers of repeats of the groups."""
        layers = tuple(
            tuple(jax.tree.map(lambda array, i=i: array[i], group) for i in range(number))
            for group, number in zip(self.layers, repeats)
        )
        return StackCache(self.num_tokens, self.room, self.carriers, layers)


DecodingCache = (StackCache, ScannedCache)


class StackMemory(NamedTuple):
    """What training on streams carries from batch to batch: the parts of a `ScannedCache`, None where there is none."""

    carriers: dict[str, Any]
    layers: tuple[tuple[Any, ...], ...]


def check_room(new: int, num_tokens: Any, room: Any) -> None:
    """Raises ValueError if new tokens do not fit into a cache of `room` tokens, so far as the numbers are known."""
    known, most = concrete_values(num_tokens), concrete_values(room)
    if most is None:
        return
    there = 0 if known is None else int(known)
    if there + new > most:
        raise ValueError(
            f"cache: has room for {most} tokens, got {new} after {there}; "
            "init_cache(batch, length) with a larger length makes more"
        )
