"""Patterns for `local_attention` whose keys may lie anywhere: columns, global tokens, random blocks, masks of blocks.

Sources: strided and fixed patterns, Child et al. 2019 (arXiv:1904.10509); global tokens, Beltagy et al. 2020
(Longformer, arXiv:2004.05150) and Ainslie et al. 2020 (ETC, arXiv:2004.08483); random blocks, Zaheer et al. 2020
(BigBird, arXiv:2007.14062).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.core.checks import require
from brl_jax.attention.local.parts import (
    Extent,
    Part,
    QueryBlock,
    Rule,
    aligned_bands,
    band,
    columns,
    dense,
    separate_blocks,
    tables,
)
from brl_jax.attention.local.patterns import Pattern
from brl_jax.fields import Count, Natural, Seed
from pallas_kernels.positions import floor_divide, remainder


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Position i sees `stride` positions on each side and all positions a multiple of `stride` away.

    The union of the two heads of Child et al. 2019, section 4.2. Cost O(n (stride + n / stride)).
    """

    stride: Count

    def _near(self, query_positions, key_positions):
        return abs(key_positions - query_positions) <= self.stride

    def _far(self, query_positions, key_positions):
        return ~self._near(query_positions, key_positions) & self._in_step(query_positions, key_positions)

    def _in_step(self, query_positions, key_positions):
        return remainder(key_positions, self.stride) == remainder(query_positions, self.stride)

    def visible(self, query_positions, key_positions, num_positions=None):
        return self._near(query_positions, key_positions) | self._in_step(query_positions, key_positions)

    def parts(self, call, query_block):
        near = band(call, query_block, self.stride, self.stride, self._near)
        return [near, columns(call, query_block, self.stride, self._far)]


@dataclasses.dataclass(frozen=True)
class Fixed(Pattern):
    """Position i sees its block i // stride and the last `summary` positions of every block.

    The union of the two heads of Child et al. 2019, section 4.2 (their c is `summary`).
    """

    stride: Count
    summary: Count = 1

    def __post_init__(self):
        require(
            self.summary <= self.stride,
            f"summary must be at most the stride {self.stride}, got {self.summary}",
        )

    def _near(self, query_positions, key_positions):
        return floor_divide(query_positions, self.stride) == floor_divide(key_positions, self.stride)

    def _is_summary(self, positions):
        return remainder(positions, self.stride) >= self.stride - self.summary

    def _far(self, query_positions, key_positions):
        return ~self._near(query_positions, key_positions) & self._is_summary(key_positions)

    def visible(self, query_positions, key_positions, num_positions=None):
        return self._near(query_positions, key_positions) | self._is_summary(key_positions)

    def _static_parts(self, call, query_block):
        parts = [separate_blocks(call, query_block, self.stride, self._near)]
        summaries = np.flatnonzero(self._is_summary(np.arange(call.num_keys) + call.key_offset))
        if summaries.size:
            parts.append(dense(query_block, (0, call.num_queries), summaries, self._far))
        return parts


@dataclasses.dataclass(frozen=True)
class Axial(Pattern):
    """Position i of a grid sees its row and its column, in one softmax. The grid is stored row by row.

    Axial Transformers (Ho et al. 2019, arXiv:1912.12180) have layers for rows, `BlockDiagonal(width)`, and layers for
    columns; this is the union. Cost O(n (width + n / width)): O(n^1.5) for a square.

    width = 3::

        key      0 1 2 3 4 5
        query 0  x x x x . .
        query 1  x x x . x .
        query 2  x x x . . x
        query 3  x . . x x x
        query 4  . x . x x x
        query 5  . . x x x x
    """

    width: Count

    def _row(self, query_positions, key_positions):
        return floor_divide(query_positions, self.width) == floor_divide(key_positions, self.width)

    def _in_column(self, query_positions, key_positions):
        return remainder(query_positions, self.width) == remainder(key_positions, self.width)

    def _column(self, query_positions, key_positions):
        return (query_positions != key_positions) & self._in_column(query_positions, key_positions)

    def visible(self, query_positions, key_positions, num_positions=None):
        return self._row(query_positions, key_positions) | self._in_column(query_positions, key_positions)

    def _static_parts(self, call, query_block):
        row = separate_blocks(call, query_block, self.width, self._row)
        return [row, columns(call, query_block, self.width, self._column)]


@dataclasses.dataclass(frozen=True)
class GlobalWindow(Pattern):
    """A sliding window whose first `num_global` positions also see all and are seen by all (Longformer).

    With `segment`, a global token does not see all others, but its own piece of them: global token g sees the
    `segment` tokens from num_global + g * segment on (ETC, section 3.3, for a sentence or a block each).
    """

    left: Natural
    right: Natural
    num_global: Count
    segment: Count | None = None

    causal_ok: ClassVar[bool] = False

    def _near(self, query_positions, key_positions):
        ahead = key_positions - query_positions
        local = (query_positions >= self.num_global) & (key_positions >= self.num_global)
        return local & (ahead >= -self.left) & (ahead <= self.right)

    def _from_global(self, query_positions, key_positions):
        is_global = query_positions < self.num_global
        if self.segment is None:
            return is_global
        own = floor_divide(key_positions - self.num_global, self.segment) == query_positions
        return is_global & ((key_positions < self.num_global) | own)

    def visible(self, query_positions, key_positions, num_positions=None):
        seen = self._near(query_positions, key_positions) | (key_positions < self.num_global)
        return seen | self._from_global(query_positions, key_positions)

    def _static_parts(self, call, query_block):
        near = band(call, query_block, self.left, self.right, self._near)
        rule = None if self.segment is None else self._from_global
        return [near, *_global_parts(call, query_block, self.num_global, rule)]


@dataclasses.dataclass(frozen=True)
class BigBird(Pattern):
    """Blocks of positions: a window of blocks, global blocks and random blocks (Zaheer et al. 2020, section 2).

    Block b sees the `window_blocks` blocks centred on itself (an odd number). The first `global_blocks` blocks see all
    and are seen by all. Every other block sees `random_blocks` more blocks, which depend on `seed` and on the number of
    blocks in the sequence.
    """

    block: Count
    window_blocks: Count = 3
    global_blocks: Natural = 1
    random_blocks: Natural = 1
    seed: Seed = 0

    causal_ok: ClassVar[bool] = False

    def __post_init__(self):
        require(self.window_blocks % 2 == 1, f"window_blocks must be odd, got {self.window_blocks}")

    @property
    def granule(self) -> int:
        return self.block

    def random_lists(self, num_blocks: int) -> list[np.ndarray]:
        """Draws each block's random key blocks from those that it does not see anyway."""
        side, lists = self.window_blocks // 2, []
        for b in range(num_blocks):
            others = np.arange(self.global_blocks, num_blocks)
            others = others[abs(others - b) > side]
            generator = np.random.default_rng((self.seed, num_blocks, b))
            count = min(self.random_blocks, others.size) if b >= self.global_blocks else 0
            lists.append(np.sort(generator.choice(others, count, replace=False)))
        return lists

    def _near(self, query_positions, key_positions):
        query_block, key_block = (floor_divide(x, self.block) for x in (query_positions, key_positions))
        local = (query_block >= self.global_blocks) & (key_block >= self.global_blocks)
        return local & (abs(query_block - key_block) <= self.window_blocks // 2)

    def visible(self, query_positions, key_positions, num_positions=None):
        require(num_positions is not None, "BigBird's random blocks need num_positions, got None")
        query_block, key_block = (floor_divide(x, self.block) for x in (query_positions, key_positions))
        lists = self.random_lists(-(-num_positions // self.block))
        table = np.zeros((len(lists), len(lists)), bool)
        for b, row in enumerate(lists):
            table[b, row] = True
        seen = abs(query_block - key_block) <= self.window_blocks // 2
        seen |= (query_block < self.global_blocks) | (key_block < self.global_blocks)
        return seen | table[query_block, key_block]

    def parts(self, call, query_block):
        require(
            call.key_offset is not None,
            "key_offset must be a static int with BigBird, whose random blocks depend on it, got a traced one",
        )
        side = self.window_blocks // 2
        parts = [aligned_bands(call, query_block, self.block, side, side, self._near)]
        parts += _global_parts(call, query_block, self.global_blocks * self.block)
        last = max(call.key_offset + call.num_keys, call.first_position + call.num_queries)
        lists = self.random_lists(-(-last // self.block))
        first, stop = (
            call.first_position // self.block,
            -(-(call.first_position + call.num_queries) // self.block),
        )
        return parts + tables(call, self.block, lists[first:stop])


@dataclasses.dataclass(frozen=True)
class BlockMask(Pattern):
    """Any mask over blocks of positions: block a sees block b iff `mask[a][b]`.

    Attributes:
      block: positions in a block.
      mask: a tuple of bools for each query block, all of one length; `BlockMask.of` takes an array.
    """

    block: Count
    mask: tuple

    def __post_init__(self):
        rows = self.mask
        require(
            isinstance(rows, tuple) and len(rows) > 0 and all(isinstance(r, tuple) and r for r in rows),
            f"mask must be a tuple of tuples of bool (see BlockMask.of), got {type(rows).__name__}",
        )
        require(len({len(r) for r in rows}) == 1, "mask must have rows of one length")

    @property
    def granule(self) -> int:
        return self.block

    @classmethod
    def of(cls, block: int, mask: Any) -> BlockMask:
        """The pattern of a bool array (query blocks, key blocks)."""
        array = np.asarray(mask)
        require(
            array.ndim == 2 and array.dtype == bool and array.size > 0,
            f"mask must be a bool array (query blocks, key blocks), got {array.dtype} of shape {array.shape}",
        )
        return cls(block, tuple(tuple(row) for row in array.tolist()))

    def visible(self, query_positions, key_positions, num_positions=None):
        query_block, key_block = (floor_divide(x, self.block) for x in (query_positions, key_positions))
        table = np.asarray(self.mask)
        rows, cols = table.shape
        inside = (query_block >= 0) & (query_block < rows) & (key_block >= 0) & (key_block < cols)
        query_block, key_block = query_block.clip(0, rows - 1), key_block.clip(0, cols - 1)
        return (
            inside & (jnp.asarray(table) if isinstance(inside, jax.Array) else table)[query_block, key_block]
        )

    def _static_parts(self, call, query_block):
        first, last = (
            call.first_position // self.block,
            (call.first_position + call.num_queries - 1) // self.block,
        )
        require(
            first >= 0 and last < len(self.mask),
            f"mask of BlockMask covers query positions 0 to {len(self.mask) * self.block - 1}, "
            f"got queries at {call.first_position} to {call.first_position + call.num_queries - 1}",
        )
        lists = [np.flatnonzero(row) for row in self.mask[first : last + 1]]
        return tables(call, self.block, lists)


def _global_parts(
    call: Extent, query_block: QueryBlock, num_global: int, rule: Rule | None = None
) -> list[Part]:
    """The global positions as queries on all keys that `rule` lets them see, and all other queries on the global
    keys."""
    assert call.key_offset is not None
    rows = min(max(num_global - call.first_position, 0), call.num_queries)
    cols = min(max(num_global - call.key_offset, 0), call.num_keys)
    parts = []
    if rows:
        parts.append(dense(query_block, (0, rows), (0, call.num_keys), rule))
    if cols and rows < call.num_queries:
        parts.append(dense(query_block, (rows, call.num_queries), (0, cols), None))
    return parts
