"""Which keys a query sees: sparse patterns for `local_attention`, as hashable descriptions of positions.

A pattern is defined on absolute positions (key 0 stands at `key_offset`, query 0 at query_offset + key_offset). With
`is_causal`, the keys after the query are hidden from any pattern. Sources: BRL-Attention (Liu et al., OpenReview
Vpyg3fqXbl), eq. 1 (F_gen over a pattern); sliding and dilated windows and global tokens, Beltagy et al. 2020
(Longformer, arXiv:2004.05150); strided and fixed patterns, Child et al. 2019 (arXiv:1904.10509); window, global and
random blocks, Zaheer et al. 2020 (BigBird, arXiv:2007.14062).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.core.checks import require
from brl_jax.attention.local.call import PatternCall, QueryBlock
from brl_jax.attention.local.parts import (
    Part,
    aligned_bands,
    band,
    columns,
    dense,
    separate_blocks,
    tables,
)
from brl_jax.fields import Checked, Count, Natural, declared
from pallas_kernels.positions import floor_divide, remainder


class Pattern(Checked):
    """What `local_attention` accepts as `pattern`. Subclasses are frozen dataclasses, hence hashable.

    Attributes:
      causal_ok: whether is_causal=True makes sense with it.
      lookback: the distance from a query to the farthest key before it that it can see; None if unbounded.
      lookahead: the same for keys after it.
      granule: None if `visible` computes visibility from positions. Otherwise visibility has to be looked up, and this
        is the number of positions in a block whose members all see, and are seen by, the same positions.
    """

    causal_ok: ClassVar[bool] = True

    @property
    def granule(self) -> int | None:
        return None

    @property
    def lookback(self) -> int | None:
        return None

    @property
    def lookahead(self) -> int | None:
        return None

    def visible(self, query_positions: Any, key_positions: Any, num_positions: int | None = None) -> Any:
        """Whether each query position sees each key position (before any causal cut), by broadcasting.

        Args:
          query_positions, key_positions: ints, NumPy or (traced) JAX arrays that broadcast together.
          num_positions: one more than the last absolute key position; only BigBird's random blocks need it.

        Returns:
          bool array of the broadcast shape.
        """
        raise NotImplementedError

    def parts(self, call: PatternCall, query_block: QueryBlock) -> list[Part]:
        """The pattern, divided into parts that share no (query, key) pair.

        Args:
          query_block: chooses the number of queries in a block.
        """
        if call.key_offset is not None:
            return self._static_parts(call, query_block)
        # Boundaries are known only at run time: visit every key that the pattern could reach, and mask by position.
        if self.lookback is None or self.lookahead is None:
            return [dense(call, query_block, (0, call.num_queries), (0, call.num_keys), self.visible)]
        return [band(call, query_block, self.lookback, self.lookahead, self.visible)]

    def _static_parts(self, call: PatternCall, query_block: QueryBlock) -> list[Part]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Position i sees i - left .. i + right; neither side counts i itself, as in `jax.nn.dot_product_attention`.

    left = 2, right = 1::

        key      0 1 2 3 4 5
        query 0  x x . . . .
        query 1  x x x . . .
        query 2  x x x x . .
        query 3  . x x x x .
        query 4  . . x x x x
        query 5  . . . x x x
    """

    left: Natural
    right: Natural

    @classmethod
    @declared
    def of_width(cls, width: Count, is_causal: bool) -> SlidingWindow:
        """The window w of the papers: w keys up to the query's own, included, if causal; else w // 2 on each side."""
        return cls(int(width) - 1, 0) if is_causal else cls(int(width) // 2, int(width) // 2)

    @property
    def lookback(self) -> int:
        return self.left

    @property
    def lookahead(self) -> int:
        return self.right

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - query_positions
        return (ahead >= -self.left) & (ahead <= self.right)

    def parts(self, call, query_block):
        return [band(call, query_block, self.left, self.right, self.visible)]


@dataclasses.dataclass(frozen=True)
class Dilated(Pattern):
    """Position i sees i + dilation * d for d in -left .. right (Longformer, section 3.1)."""

    left: Natural
    right: Natural
    dilation: Count

    @property
    def lookback(self) -> int:
        return self.left * self.dilation

    @property
    def lookahead(self) -> int:
        return self.right * self.dilation

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - query_positions
        inside = (ahead >= -self.lookback) & (ahead <= self.lookahead)
        return inside & (remainder(key_positions, self.dilation) == remainder(query_positions, self.dilation))

    def parts(self, call, query_block):
        return [band(call, query_block, self.left, self.right, self.visible, self.dilation)]


@dataclasses.dataclass(frozen=True)
class BlockDiagonal(Pattern):
    """Position i sees the positions of its own block, i // block (DiagAttention, arXiv:2210.10340)."""

    block: Count

    @property
    def lookback(self) -> int:
        return self.block - 1

    @property
    def lookahead(self) -> int:
        return self.block - 1

    def visible(self, query_positions, key_positions, num_positions=None):
        return floor_divide(query_positions, self.block) == floor_divide(key_positions, self.block)

    def _static_parts(self, call, query_block):
        return [separate_blocks(call, query_block, self.block, self.visible)]


@dataclasses.dataclass(frozen=True)
class Bucketed(Pattern):
    """Position i sees its bucket i // size, and `before` buckets before and `after` buckets after it.

    This is the pattern of the local-attention package, which the experiments of BRL-Attention (Liu et al., OpenReview
    Vpyg3fqXbl) used. With is_causal the buckets before and the query's own up to the query remain.
    """

    size: Count
    before: Natural = 1
    after: Natural = 1

    @property
    def lookback(self) -> int:
        return (self.before + 1) * self.size - 1

    @property
    def lookahead(self) -> int:
        return (self.after + 1) * self.size - 1

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = floor_divide(key_positions, self.size) - floor_divide(query_positions, self.size)
        return (ahead >= -self.before) & (ahead <= self.after)

    def _static_parts(self, call, query_block):
        return [aligned_bands(call, query_block, self.size, self.before, self.after, self.visible)]


@dataclasses.dataclass(frozen=True)
class SurroundedBlocks(Pattern):
    """Position i sees its block i // size, and `reach` positions before and after that block.

    The windows of the Long-Short Transformer (Zhu et al. 2021, arXiv:2107.02192, section 3.1), whose reach is size / 2.
    """

    size: Count
    reach: Natural

    @property
    def lookback(self) -> int:
        return self.size - 1 + self.reach

    @property
    def lookahead(self) -> int:
        return self.size - 1 + self.reach

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - floor_divide(query_positions, self.size) * self.size
        return (ahead >= -self.reach) & (ahead < self.size + self.reach)

    def _static_parts(self, call, query_block):
        beside = -(-self.reach // self.size)
        return [aligned_bands(call, query_block, self.size, beside, beside, self.visible)]


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """Position i sees `stride` positions on each side and all positions a multiple of `stride` away.

    This is the union of the two heads of Child et al. 2019, section 4.2; cost O(n (stride + n / stride)).
    """

    stride: Count

    def _near(self, query_positions, key_positions, num_positions=None):
        return abs(key_positions - query_positions) <= self.stride

    def _far(self, query_positions, key_positions, num_positions=None):
        return (abs(key_positions - query_positions) > self.stride) & self._in_step(
            query_positions, key_positions
        )

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

    This is the union of the two heads of Child et al. 2019, section 4.2 (their c is `summary`).
    """

    stride: Count
    summary: Count = 1

    def __post_init__(self):
        require(
            self.summary <= self.stride,
            f"summary of Fixed must be at most its stride {self.stride}, got {self.summary}",
        )

    def _near(self, query_positions, key_positions, num_positions=None):
        return floor_divide(query_positions, self.stride) == floor_divide(key_positions, self.stride)

    def _is_summary(self, positions):
        return remainder(positions, self.stride) >= self.stride - self.summary

    def _far(self, query_positions, key_positions, num_positions=None):
        return ~self._near(query_positions, key_positions) & self._is_summary(key_positions)

    def visible(self, query_positions, key_positions, num_positions=None):
        return self._near(query_positions, key_positions) | self._is_summary(key_positions)

    def _static_parts(self, call, query_block):
        parts = [separate_blocks(call, query_block, self.stride, self._near)]
        summaries = np.flatnonzero(self._is_summary(np.arange(call.num_keys) + call.key_offset))
        if summaries.size:
            parts.append(dense(call, query_block, (0, call.num_queries), summaries, self._far))
        return parts


@dataclasses.dataclass(frozen=True)
class GlobalWindow(Pattern):
    """A sliding window; in addition, the first `num_global` positions see and are seen by all (Longformer)."""

    left: Natural
    right: Natural
    num_global: Count

    causal_ok: ClassVar[bool] = False

    def _near(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - query_positions
        local = (query_positions >= self.num_global) & (key_positions >= self.num_global)
        return local & (ahead >= -self.left) & (ahead <= self.right)

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - query_positions
        near = (ahead >= -self.left) & (ahead <= self.right)
        return near | (query_positions < self.num_global) | (key_positions < self.num_global)

    def _static_parts(self, call, query_block):
        near = band(call, query_block, self.left, self.right, self._near)
        return [near, *_global_parts(call, query_block, self.num_global)]


def _global_parts(call: PatternCall, query_block: QueryBlock, num_global: int) -> list[Part]:
    """The first positions on all keys, and all other queries on the first positions."""
    assert call.key_offset is not None
    rows = min(max(num_global - call.first_position, 0), call.num_queries)
    cols = min(max(num_global - call.key_offset, 0), call.num_keys)
    parts = []
    if rows:
        parts.append(dense(call, query_block, (0, rows), (0, call.num_keys), None))
    if cols and rows < call.num_queries:
        parts.append(dense(call, query_block, (rows, call.num_queries), (0, cols), None))
    return parts


@dataclasses.dataclass(frozen=True)
class BigBird(Pattern):
    """Blocks of positions: a window of blocks, global blocks and random blocks (Zaheer et al. 2020, section 2).

    Block b sees the `window_blocks` blocks centred on itself (an odd number), the first `global_blocks` blocks see and
    are seen by all, and every other block sees `random_blocks` more blocks. These are drawn from `seed`, and depend on
    the number of blocks in the sequence.
    """

    block: Count
    window_blocks: Count = 3
    global_blocks: Natural = 1
    random_blocks: Natural = 1
    seed: Natural = 0

    causal_ok: ClassVar[bool] = False

    def __post_init__(self):
        require(
            self.window_blocks % 2 == 1, f"window_blocks of BigBird must be odd, got {self.window_blocks}"
        )

    @property
    def granule(self) -> int:
        return self.block

    def random_lists(self, num_blocks: int) -> list[np.ndarray]:
        """The random key blocks of each block, drawn from those that it does not see otherwise."""
        side, lists = self.window_blocks // 2, []
        for b in range(num_blocks):
            others = np.arange(self.global_blocks, num_blocks)
            others = others[abs(others - b) > side]
            generator = np.random.default_rng((self.seed, num_blocks, b))
            count = min(self.random_blocks, others.size) if b >= self.global_blocks else 0
            lists.append(np.sort(generator.choice(others, count, replace=False)))
        return lists

    def _near(self, query_positions, key_positions, num_positions=None):
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
            "key_offset must be a static int with BigBird, whose random blocks depend on it; got it traced",
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
        return parts + tables(call, self.block, lists[first:stop], None)


@dataclasses.dataclass(frozen=True)
class BlockMask(Pattern):
    """Any mask over blocks of positions: block a sees block b iff `mask[a][b]`.

    Attributes:
      block: positions in a block.
      mask: one row of bools for each query block, all of one length; `BlockMask.of` takes an array.
    """

    block: Count
    mask: tuple[tuple[bool, ...], ...]

    def __post_init__(self):
        rows = self.mask
        require(
            isinstance(rows, tuple) and len(rows) > 0 and all(isinstance(r, tuple) and r for r in rows),
            "mask of BlockMask must be a tuple of tuples of bool (see BlockMask.of), "
            f"got {type(rows).__name__}",
        )
        require(len({len(r) for r in rows}) == 1, "mask of BlockMask must have rows of one length")

    @property
    def granule(self) -> int:
        return self.block

    @classmethod
    def of(cls, block: int, mask: Any) -> BlockMask:
        """From a bool array (query blocks, key blocks)."""
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
        return tables(call, self.block, lists, None)
