"""What block-sparse attention does step by step: its listed pairs of blocks, in pieces that scalar memory holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int

from pallas_kernels.tpu.core import sizes as block_sizes
from pallas_kernels.tpu.core.heads import Layout

Mask = Callable[[Any, Any], Any]

WORD = 32


class Granules(NamedTuple):
    """Visibility that changes only from one granule of `size` positions to the next, as bits for each listed pair.

    Attributes:
      size: positions in a granule; granules start at multiples of it.
      bits: for each block of queries and each block of keys that it meets a number; its bit i * columns + j says
        whether the i-th granule of queries that the pair of blocks touches sees the j-th of keys.
    """

    size: int
    bits: tuple[tuple[int, ...], ...]

    @staticmethod
    def touched(rows: int, size: int) -> int:
        """Granules that so many rows touch at most, wherever they start."""
        return 1 + (rows + size - 2) // size


class Steps(NamedTuple):
    """Grid steps of one launch: those of the blocks `first` to `stop` of queries (or of keys).

    Attributes:
      own, other: of each step, the block whose result it adds to and the block that it meets; -1 for none.
      words: the bits of the pairs, 32 at a time.
    """

    first: int
    stop: int
    own: Int[np.ndarray, " steps"]
    other: Int[np.ndarray, " steps"]
    words: Int[np.ndarray, " words*steps"] | None


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """All that is static about one call.

    Attributes:
      queries, keys: lengths of the sequences.
      block_q, block_k: rows of a block; `tile` queries share one product.
      rows: for each block of queries the blocks of keys that it meets.
      mask, granules: of positions, what a query sees inside those blocks; None for all of it.
      query_position, key_position: positions of the first query and the first key.
      shifted: whether a number known only at run time is added to both positions.
    """

    queries: int
    keys: int
    block_q: int
    block_k: int
    tile: int
    rows: tuple[tuple[int, ...], ...]
    mask: Mask | None
    granules: Granules | None
    query_position: int
    key_position: int
    shifted: bool
    segments: bool
    layout: Layout
    scale: float
    vmem_limit: int | None
    interpret: bool | pltpu.InterpretParams

    @property
    def units(self) -> int:
        return self.block_q // self.tile * self.layout.packed

    @property
    def words(self) -> int:
        """Words of bits of one pair."""
        if self.granules is None:
            return 0
        return -(-self.granule_rows * self.granule_columns // WORD)

    @property
    def granule_rows(self) -> int:
        assert self.granules is not None
        return Granules.touched(self.block_q, self.granules.size)

    @property
    def granule_columns(self) -> int:
        assert self.granules is not None
        return Granules.touched(self.block_k, self.granules.size)

    def listed(self, by_key: bool) -> list[list[tuple[int, int]]]:
        """For each block of queries (or of keys) the blocks that it meets, with the bits of each pair."""
        bits = None if self.granules is None else self.granules.bits
        lists: list[list[tuple[int, int]]]
        lists = [[] for _ in range(-(-self.keys // self.block_k) if by_key else len(self.rows))]
        for q, row in enumerate(self.rows):
            for n, k in enumerate(row):
                lists[k if by_key else q].append((q if by_key else k, 0 if bits is None else bits[q][n]))
        return lists

    def pieces(self, by_key: bool) -> Iterator[Steps]:
        """The steps, cut between blocks wherever scalar memory would not hold the list."""
        limit = block_sizes.listed_pairs(self.words)
        held: list[tuple[int, int, int]] = []
        first = 0
        for own, pairs in enumerate(self.listed(by_key)):
            steps = [(own, other, bits) for other, bits in pairs] or [(own, -1, 0)]
            if len(held) + len(steps) > limit:
                yield self._steps(first, own, held)
                held, first = [], own
            held += steps
        yield self._steps(first, held[-1][0] + 1, held)

    def _steps(self, first: int, stop: int, held: list[tuple[int, int, int]]) -> Steps:
        own, other = (np.asarray([step[n] for step in held], np.int32) for n in (0, 1))
        words = None
        if self.granules is not None:
            mask = (1 << WORD) - 1
            split = [[bits >> WORD * n & mask for n in range(self.words)] for _, _, bits in held]
            words = np.asarray(split, np.uint32).view(np.int32).reshape(-1)
        return Steps(first, stop, own, other, words)

    def check_lists(self) -> None:
        """Raises ValueError where scalar memory does not even hold the list of a single block."""
        limit = block_sizes.listed_pairs(self.words)
        for by_key, what in ((False, "queries"), (True, "keys")):
            longest = max(len(pairs) for pairs in self.listed(by_key))
            if longest > limit:
                raise ValueError(
                    f"a block of {what} meets {longest} others, scalar memory holds {limit}: choose larger blocks"
                )
