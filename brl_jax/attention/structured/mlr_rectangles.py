"""MLR attention's score matrix as rectangles of pairs that share the same blocks, without a (T, T) array.

The levels' blocks are nested. Take all pairs (i, j) whose smallest common block has size S: i and j lie in different
children of that block. These pairs form rectangles off the diagonal, and the same levels are active in all of them.
Levels own consecutive slices of the head, so the scores of a rectangle are one product over the first features of the
head. The remaining pairs form squares along the diagonal.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

# Squares on the diagonal have at least this size; levels with smaller blocks are masked inside them. Squares more than
# twice as large are halved, because a causal square wastes its upper half.
_SQUARE = 64


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """One rectangle of pairs in each of `blocks` consecutive blocks of `period` tokens.

    Attributes:
      period, blocks: size and number of the blocks that contain the rectangle.
      query, key: start and stop of its queries and keys, counted from the block's first token.
      features: scores are a product over this many leading features of the head, possibly 0.
      finer: for a square on the diagonal, (first feature, stop, block size) of each level with smaller blocks.
      diagonal: whether it is a square on the diagonal, whose queries and keys are the same tokens.
    """

    period: int
    blocks: int
    query: tuple[int, int]
    key: tuple[int, int]
    features: int
    finer: tuple[tuple[int, int, int], ...] = ()
    diagonal: bool = False

    @property
    def num_queries(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_keys(self) -> int:
        return self.key[1] - self.key[0]

    @property
    def width(self) -> int:
        """How many leading features of the head are read in total."""
        return self.finer[-1][1] if self.finer else self.features

    def cut(self, x: Array, axis: int, span: tuple[int, int]) -> Array:
        """The tokens `span` of each block of x along an axis, which becomes two axes (blocks, tokens)."""
        head, size, tail = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        whole = self.blocks * self.period if self.blocks > 1 else span[1]
        if whole > size:
            room = [(0, 0)] * x.ndim
            room[axis] = (0, whole - size)
            x = jnp.pad(x, room)
        elif whole < size:
            x = x[(slice(None),) * axis + (slice(0, whole),)]
        x = x.reshape(*head, self.blocks, whole // self.blocks, *tail)
        return x[(slice(None),) * (axis + 1) + (slice(*span),)]

    def restore(self, x: Array, axis: int, span: tuple[int, int], size: int, fill: float | int = 0) -> Array:
        """The inverse of `cut` for `size` tokens; tokens outside the spans become `fill`."""
        head, tail = x.shape[:axis], x.shape[axis + 2 :]
        whole = self.period if self.blocks > 1 else span[1]
        room = [(0, 0)] * x.ndim
        room[axis + 1] = (span[0], whole - span[1])
        x = jnp.pad(x, room, constant_values=fill).reshape(*head, self.blocks * whole, *tail)
        if x.shape[axis] < size:
            room = [(0, 0)] * x.ndim
            room[axis] = (0, size - x.shape[axis])
            x = jnp.pad(x, room, constant_values=fill)
        return x[(slice(None),) * axis + (slice(0, size),)]


def rectangles(
    length: int, ranks: Sequence[int], block_sizes: Sequence[int | None], is_causal: bool
) -> tuple[Rectangle, ...]:
    """Rectangles that contain each pair of `length` tokens once; if causal, at least each pair with j <= i.

    Args:
      ranks, block_sizes: of the levels, from the coarsest to the finest; None is one block over all tokens.
      is_causal: whether pairs with j > i may be left out.
    """
    sizes = [length if size is None or size >= length else size for size in block_sizes]
    stops = [sum(ranks[: i + 1]) for i in range(len(ranks))]

    def active(size: int) -> int:
        """How many features belong to levels whose blocks have at least this size."""
        count = sum(s >= min(size, length) for s in sizes)
        return stops[count - 1] if count else 0

    ladder = _ladder(length, sizes)
    square = next((size for size in ladder if size >= _SQUARE), ladder[-1])
    finer = tuple(
        (stop - rank, stop, size)
        for rank, stop, size in zip(ranks, stops, sizes)
        if size < min(square, length)
    )
    blocks = -(-length // square)
    span = (0, square if blocks > 1 else length)
    found = [Rectangle(square, blocks, span, span, active(square), finer, diagonal=True)]
    for child, parent in itertools.pairwise(ladder):
        if child < square:
            continue
        features = active(parent)
        for i in range(1, parent // child):
            queries, keys = (i * child, (i + 1) * child), (0, i * child)
            found += _placed(length, parent, queries, keys, features)
            if not is_causal:
                found += _placed(length, parent, keys, queries, features)
    return tuple(found)


def _ladder(length: int, sizes: Sequence[int]) -> list[int]:
    """The sizes from the smallest square up to one block over all tokens.

    Each is a prime number times the one before it, and every block size below the length is among them.
    """
    smaller = sorted({size for size in sizes if size < length})
    first = smaller[0] if smaller else 2 * _SQUARE
    while first > 2 * _SQUARE and first % 2 == 0:
        first //= 2
    ladder = [first]
    for size in smaller:
        for factor in _primes(size // ladder[-1]):
            ladder.append(ladder[-1] * factor)
    while ladder[-1] < length:
        ladder.append(ladder[-1] * 2)
    return ladder


def _primes(number: int) -> list[int]:
    """The prime factors in ascending order."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _placed(
    length: int, period: int, query: tuple[int, int], key: tuple[int, int], features: int
) -> list[Rectangle]:
    """The rectangle in every block where it has queries and keys; an empty list if it has none anywhere."""
    blocks = min(-(-(length - span[0]) // period) for span in (query, key))
    if blocks < 1:
        return []
    if blocks == 1:
        query, key = ((span[0], min(span[1], length)) for span in (query, key))
    return [Rectangle(period, blocks, query, key, features)]
