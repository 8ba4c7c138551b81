"""The arguments of a stack's call, and the caches that it passes on to the next call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from brl_jax.attention.core.checks import concrete_values
from brl_jax.models.cross_attention import Encoded


class Recall(NamedTuple):
    """The new tokens and how to embed them, for a stack whose decoding cache returns to earlier tokens.

    Attributes:
      tokens: (B, T) ints, the tokens whose embedding is x.
      embed: (B, T) ints -> (B, T, D).
    """

    tokens: Any
    embed: Callable[[Array], Array]


class StackCall(NamedTuple):
    """The arguments of one call of a stack, apart from its input; see `Stack.__call__`.

    Attributes:
      count: how many of the new tokens, from the first, are valid (traced); None for all.
      kept: how many of them, from the first, the decoding cache keeps, though all are valid (traced); None for all.
    """

    positions: Any = None
    lengths: Any = None
    segment_ids: Any = None
    encoded: Encoded | None = None
    recall: Recall | None = None
    count: Any = None
    kept: Any = None

    @property
    def of_layers(self) -> dict[str, Any]:
        """The keyword arguments of each block."""
        return {
            "positions": self.positions,
            "lengths": self.lengths,
            "segment_ids": self.segment_ids,
            "count": self.count,
            "kept": self.kept,
        }


class StackCache(NamedTuple):
    """A decoding cache.

    Attributes:
      length: () int32, the tokens so far.
      room: () int32, the capacity in tokens.
      carriers: the carriers' caches, by name.
      layers: for each group of equal periods (`group_layers`) and each of its repeats, the caches of the period's
        layers. Each layer has separate arrays, so that a step of one token updates them in place.
    """

    length: Any
    room: Any
    carriers: dict[str, Any]
    layers: tuple[tuple[tuple[Any, ...], ...], ...]

    def stacked(self) -> ScannedCache:
        """Returns a copy for a scan over the repeats. Every array is copied."""
        layers = tuple(jax.tree.map(lambda *arrays: jnp.stack(arrays), *group) for group in self.layers)
        return ScannedCache(self.length, self.room, self.carriers, layers)


class ScannedCache(NamedTuple):
    """A decoding cache inside a call of several tokens, which scans over the layers.

    Attributes:
      length, room, carriers: as in `StackCache`.
      layers: for each group of equal periods, the caches of the period's layers, stacked over the repeats.
    """

    length: Any
    room: Any
    carriers: dict[str, Any]
    layers: tuple[tuple[Any, ...], ...]

    def separate(self, repeats: Sequence[int]) -> StackCache:
        """Returns the cache with separate arrays for each layer, given how often each group repeats."""
        layers = tuple(
            tuple(jax.tree.map(lambda array, i=i: array[i], group) for i in range(number))
            for group, number in zip(self.layers, repeats)
        )
        return StackCache(self.length, self.room, self.carriers, layers)


DecodingCache = (StackCache, ScannedCache)


class StackMemory(NamedTuple):
    """What training on streams carries between batches: the parts of a `ScannedCache`, None where a part is empty."""

    carriers: dict[str, Any]
    layers: tuple[tuple[Any, ...], ...]


def check_batch(name: str, given: Any, model: Any, batch: int) -> None:
    """Raises ValueError if `given`, the cache or memory of a model, is of another kind of layers or number of rows."""
    alone = model.clone(parent=None, name=None)
    one, two = (_made(alone, name, rows) for rows in (1, 2))
    leaves, (own, expected, _) = zip(*map(jax.tree.flatten, (given, one, two)))
    if own != expected:
        if model.config.cross_attention is not None:  # the cache has the encoder's keys and values, too
            return
        raise ValueError(f"{name} must be made by init_{name} of this model, got one of another model")
    for x, of_one, of_two in zip(*leaves):
        for size, first, second in zip(x.shape, of_one.shape, of_two.shape):
            if first != second and size != batch * first:
                raise ValueError(f"{name} must have as many rows as the tokens, {batch}, got {size // first}")


@functools.lru_cache(maxsize=64)  # generation checks at every trace of a step
def _made(model: Any, name: str, rows: int) -> Any:
    """The shapes of a model's cache (for one token) or memory."""
    return jax.eval_shape(lambda: model.init_cache(rows, 1) if name == "cache" else model.init_memory(rows))


def check_room(new: int, num_tokens: Any, room: Any) -> None:
    """Raises ValueError if the new tokens exceed the cache's capacity `room`; traced numbers are not checked."""
    known, most = concrete_values(num_tokens), concrete_values(room)
    if most is None:
        return
    there = 0 if known is None else int(known)
    if there + new > most:
        raise ValueError(
            f"cache: has room for {most} tokens, got {new} after {there}; "
            "init_cache(batch, length) with a larger length makes more"
        )
