"""Patterns for tokens that have a layout: grids row by row (images), and summaries in front of a document."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from brl_jax.attention.local.parts import band, columns, dense, separate_blocks
from brl_jax.attention.local.patterns import Pattern
from brl_jax.fields import Count, Natural
from pallas_kernels.positions import floor_divide, remainder


@dataclasses.dataclass(frozen=True)
class Axial(Pattern):
    """Position i of a grid, which is stored row by row, sees its row and its column, in one softmax.

    The union of the two axes of Axial Transformers (Ho et al. 2019, arXiv:1912.12180), whose layers have one axis each:
    the rows alone are `BlockDiagonal(width)`. Cost O(n (width + n / width)): O(n^1.5) for a square.

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

    def _row(self, query_positions, key_positions, num_positions=None):
        return floor_divide(query_positions, self.width) == floor_divide(key_positions, self.width)

    def _in_column(self, query_positions, key_positions):
        return remainder(query_positions, self.width) == remainder(key_positions, self.width)

    def _column(self, query_positions, key_positions, num_positions=None):
        return (query_positions != key_positions) & self._in_column(query_positions, key_positions)

    def visible(self, query_positions, key_positions, num_positions=None):
        return self._row(query_positions, key_positions) | self._in_column(query_positions, key_positions)

    def _static_parts(self, call, query_block):
        row = separate_blocks(call, query_block, self.width, self._row)
        return [row, columns(call, query_block, self.width, self._column)]


@dataclasses.dataclass(frozen=True)
class Neighbourhood(Pattern):
    """Position i of a grid, which is stored row by row, sees the positions at most `rows` rows and `columns` columns
    away: a window in two dimensions, cut at the grid's edges.

    The keys between those of one row and of the next are visited and masked, so that the cost is O(n rows width); on a
    CPU, for heads of up to 32 features and small windows, only the keys of the window are: O(n rows columns).
    """

    width: Count
    rows: Natural
    columns: Natural

    @property
    def _reach(self) -> int:
        return self.rows * self.width + min(self.columns, self.width - 1)

    @property
    def lookback(self) -> int:
        return self._reach

    @property
    def lookahead(self) -> int:
        return self._reach

    def visible(self, query_positions, key_positions, num_positions=None):
        below = floor_divide(key_positions, self.width) - floor_divide(query_positions, self.width)
        beside = remainder(key_positions, self.width) - remainder(query_positions, self.width)
        return (abs(below) <= self.rows) & (abs(beside) <= self.columns)

    def _static_parts(self, call, query_block):
        return [band(call, query_block, self._reach, self._reach, self.visible)]


@dataclasses.dataclass(frozen=True)
class GlobalLocal(Pattern):
    """The global-local attention of ETC (Ainslie et al. 2020, arXiv:2004.08483, section 3): the first `num_global`
    positions are global tokens, the others the long input.

    All see all global tokens, and a token of the long input sees the `left` tokens before and the `right` tokens after
    it. A global token sees the tokens of its own segment, the `segment` tokens from num_global + number * segment on
    (the hard masks of section 3.3, for a sentence or a block each), or all tokens where `segment` is None.
    """

    left: Natural
    right: Natural
    num_global: Count
    segment: Count | None = None

    causal_ok: ClassVar[bool] = False

    def _near(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - query_positions
        local = (query_positions >= self.num_global) & (key_positions >= self.num_global)
        return local & (ahead >= -self.left) & (ahead <= self.right)

    def _from_global(self, query_positions, key_positions, num_positions=None):
        is_global = query_positions < self.num_global
        if self.segment is None:
            return is_global & (key_positions >= 0)
        own = floor_divide(key_positions - self.num_global, self.segment) == query_positions
        return is_global & ((key_positions < self.num_global) | own)

    def visible(self, query_positions, key_positions, num_positions=None):
        of_tokens = (key_positions < self.num_global) & (query_positions >= self.num_global)
        near = self._near(query_positions, key_positions)
        return self._from_global(query_positions, key_positions) | of_tokens | near

    def _static_parts(self, call, query_block):
        parts = [band(call, query_block, self.left, self.right, self._near)]
        rows = min(max(self.num_global - call.first_position, 0), call.num_queries)
        cols = min(max(self.num_global - call.key_offset, 0), call.num_keys)
        if rows:
            parts.append(dense(call, query_block, (0, rows), (0, call.num_keys), self._from_global))
        if cols and rows < call.num_queries:
            parts.append(dense(call, query_block, (rows, call.num_queries), (0, cols), None))
        return parts
