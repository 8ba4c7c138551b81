"""Which blocks of keys each block of queries reads, and masks for those that it does not see entirely.

NumPy makes the lists while a call is traced, and they become constants of the program. Most masks repeat (a sliding
window has only a handful, however long the sequence is), so each distinct mask is stored once and stays in the GPU's
cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

#: First query, stop, first key, stop of a rectangle in which pairs may see each other.
Rectangle = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The static part of who sees whom; hashable, so that equal calls share their lists.

    Attributes:
      rectangles: cover every pair that is seen; they may reach beyond the sequences.
      visible: maps positions of queries and keys, which broadcast against each other, and `num_positions` to which
        pairs are seen; None if every pair of the rectangles is.
      is_causal: whether later keys are also hidden from each query.
      num_queries, num_keys: T and S.
      query_position, key_position: positions of query 0 and key 0, for `visible`.
    """

    rectangles: tuple[Rectangle, ...]
    visible: Callable[[np.ndarray, np.ndarray, int], np.ndarray] | None
    is_causal: bool
    num_queries: int
    num_keys: int
    query_position: int = 0
    key_position: int = 0

    @property
    def num_positions(self) -> int:
        return max(self.query_position + self.num_queries, self.key_position + self.num_keys)


@dataclasses.dataclass(frozen=True, eq=False)
class BlockLists:
    """Block pairs by rows (blocks of queries) or, transposed, by columns (blocks of keys).

    Row i's pairs are starts[i] .. starts[i + 1]. Pairs before middles[i] have a mask; the others see each other
    entirely.

    Attributes:
      starts: (rows + 1,) int32.
      middles: (rows,) int32.
      others: (pairs,) int32, the block on the other side.
      mask_numbers: (pairs,) int32, each pair's mask; 0 if it has no mask.
      masks: (distinct, queries in a block, keys in a block) int8; or, where every query of every mask sees consecutive
        keys, the first of them and the one after the last: (distinct, 2, queries in a block) int32.
    """

    starts: np.ndarray
    middles: np.ndarray
    others: np.ndarray
    mask_numbers: np.ndarray
    masks: np.ndarray

    @property
    def consecutive(self) -> bool:
        """Whether `masks` has the bounds of consecutive keys."""
        return self.masks.dtype == np.int32

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.starts, self.middles, self.others, self.mask_numbers, self.masks


@functools.lru_cache(maxsize=64)
def make_lists(pattern: Pattern, block_q: int, block_k: int, by_keys: bool) -> BlockLists:
    """Returns the lists of a pattern for these block sizes, by blocks of queries or (`by_keys`) by blocks of keys."""
    rows, columns = -(-pattern.num_queries // block_q), -(-pattern.num_keys // block_k)
    masks: dict[bytes, int] = {}
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(columns if by_keys else rows)]
    for row, touched in enumerate(_touched(pattern, rows, block_q, block_k)):
        if not touched.size:
            continue
        seen = _seen(pattern, row, touched, block_q, block_k)
        count = seen.sum(axis=(1, 2), dtype=np.int64)
        whole, some = count == block_q * block_k, count > 0
        for number, column in enumerate(touched):
            if some[number]:
                mask = -1 if whole[number] else masks.setdefault(seen[number].tobytes(), len(masks))
                pairs[column if by_keys else row].append((row if by_keys else int(column), mask))
    ordered = [sorted(line, key=lambda pair: pair[1] < 0) for line in pairs]
    flat = np.asarray([pair for line in ordered for pair in line], np.int32).reshape(-1, 2)
    counts = np.asarray([len(line) for line in ordered])
    masked = np.asarray([sum(mask >= 0 for _, mask in line) for line in ordered])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    if not len(flat):
        flat = np.zeros((1, 2), np.int32)  # kernels do not accept arrays without elements
    tiles = [np.frombuffer(mask, np.int8).reshape(block_q, block_k) for mask in masks]
    masks_or_bounds = np.stack(tiles) if tiles else np.ones((1, block_q, block_k), np.int8)
    first, count = masks_or_bounds.argmax(2), masks_or_bounds.sum(2, dtype=np.int32)
    last = block_k - 1 - masks_or_bounds[:, :, ::-1].argmax(2)
    if np.all((last - first + 1 == count) | (count == 0)):
        masks_or_bounds = np.stack([first, first + count], 1).astype(np.int32)
    return BlockLists(
        starts,
        (starts[:-1] + masked).astype(np.int32),
        np.ascontiguousarray(flat[:, 0]),
        np.maximum(flat[:, 1], 0),
        masks_or_bounds,
    )


def _touched(pattern: Pattern, rows: int, block_q: int, block_k: int) -> list[np.ndarray]:
    """Returns, for each block of queries, the blocks of keys that a rectangle touches, in order."""
    touched: list[set[int]] = [set() for _ in range(rows)]
    shift = pattern.query_position - pattern.key_position
    for first_query, stop_query, first_key, stop_key in pattern.rectangles:
        first_query, stop_query = max(first_query, 0), min(stop_query, pattern.num_queries)
        first_key, stop_key = max(first_key, 0), min(stop_key, pattern.num_keys)
        if first_query >= stop_query or first_key >= stop_key:
            continue
        for row in range(first_query // block_q, (stop_query - 1) // block_q + 1):
            stop = stop_key
            if pattern.is_causal:
                stop = min(stop, min((row + 1) * block_q, pattern.num_queries) + shift)
            touched[row].update(range(first_key // block_k, -(-stop // block_k)))
    return [np.asarray(sorted(blocks), np.int64) for blocks in touched]


def _seen(pattern: Pattern, row: int, touched: np.ndarray, block_q: int, block_k: int) -> np.ndarray:
    """Returns (pairs, queries, keys) int8 masks of one block of queries with its blocks of keys."""
    query = row * block_q + np.arange(block_q)[None, :, None]
    key = touched[:, None, None] * block_k + np.arange(block_k)[None, None, :]
    # Queries beyond the end are not written, so they should not turn a whole block into a masked one.
    query = np.minimum(query, pattern.num_queries - 1)
    inside = np.broadcast_to(key < pattern.num_keys, (len(touched), block_q, block_k))
    key = np.minimum(key, pattern.num_keys - 1)
    positions = query + pattern.query_position, key + pattern.key_position
    if pattern.visible is not None:
        inside = inside & np.asarray(pattern.visible(*positions, pattern.num_positions))
    if pattern.is_causal:
        inside = inside & (positions[1] <= positions[0])
    return np.ascontiguousarray(inside).astype(np.int8)
