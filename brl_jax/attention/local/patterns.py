"""Which keys a query sees: patterns for `local_attention`. Here are those with a bounded reach.

A pattern is defined on absolute positions: key 0 is at `key_offset`, query 0 at query_offset + key_offset. `is_causal`
hides the keys after the query, whatever the pattern. Sources: BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), eq. 1
(F_gen over a pattern); sliding and dilated windows, Beltagy et al. 2020 (Longformer, arXiv:2004.05150).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import is_int, zero_padding
from brl_jax.attention.local.parts import (
    Extent,
    Part,
    QueryBlock,
    aligned_bands,
    band,
    dense,
    separate_blocks,
)
from brl_jax.fields import Checked, Count, Natural, declared
from pallas_kernels.positions import floor_divide, remainder


class Pattern(Checked):
    """What `local_attention` accepts as `pattern`. Subclasses are frozen dataclasses, hence hashable.

    Attributes:
      causal_ok: whether is_causal=True makes sense.
      limits: how far before and after itself a position can see; None where it can see everything.
      granule: None if `visible` computes visibility from positions. Otherwise visibility comes from a table of blocks,
        and this is the number of positions in a block.
    """

    causal_ok: ClassVar[bool] = True

    @property
    def granule(self) -> int | None:
        return None

    @property
    def limits(self) -> tuple[int | None, int | None]:
        return None, None

    def visible(self, query_positions: Any, key_positions: Any, num_positions: int | None = None) -> Any:
        """Whether each query position sees each key position, apart from is_causal: bools of the broadcast shape.

        Args:
          query_positions, key_positions: ints, NumPy arrays or (traced) JAX arrays that broadcast together.
          num_positions: the length of the whole sequence; only BigBird needs it.
        """
        raise NotImplementedError

    def parts(self, call: Extent, query_block: QueryBlock) -> list[Part]:
        """Divides the pattern into parts that share no (query, key) pair."""
        if call.key_offset is not None:
            return self._static_parts(call, query_block)
        # Positions are known only at run time: visit every key that the pattern could reach, and mask by position.
        before, after = self.limits
        if before is None or after is None:
            return [dense(query_block, (0, call.num_queries), (0, call.num_keys), self.visible)]
        return [band(call, query_block, before, after, self.visible)]

    def _static_parts(self, call: Extent, query_block: QueryBlock) -> list[Part]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternCall(Extent):
    """The static side of one call.

    Attributes:
      pattern: which keys a query sees.
      scale: multiplies the scores.
      logits_soft_cap: bounds the scaled scores; None for no bound.
      return_residual: whether the call returns (output, log-sum-exp) instead of the output alone.
    """

    pattern: Pattern
    scale: float
    logits_soft_cap: float | None = None
    return_residual: bool = False


class CallArrays(NamedTuple):
    """The arrays of one call; None for an absent one.

    Attributes:
      bias: a `PositionBias`, or an array (B or 1, N or 1, T or 1, S or 1).
      query_segments, key_segments: both or neither.
      key_offset: given if the `PatternCall` has no static one.
      sinks: in float32.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    bias: Any = None
    query_lengths: Int[Array, " B"] | None = None
    key_lengths: Int[Array, " B"] | None = None
    query_segments: Int[Array, "B T"] | None = None
    key_segments: Int[Array, "B S"] | None = None
    key_offset: Int[Array, ""] | None = None
    sinks: Float[Array, " N"] | None = None

    def without_padding(self) -> CallArrays:
        """Zeros instead of padding, which may be NaN: 0 times NaN is NaN."""
        return self._replace(
            query=zero_padding(self.query, self.query_lengths),
            key=zero_padding(self.key, self.key_lengths),
            value=zero_padding(self.value, self.key_lengths),
        )


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Position i sees i - left .. i + right. Neither side counts i itself, as in `jax.nn.dot_product_attention`.

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
    def of_size(cls, local_window_size: Natural | tuple[Natural, Natural]) -> SlidingWindow:
        """The window of `local_window_size`: an int for both sides, or (left, right)."""
        sides: Any = (local_window_size,) * 2 if is_int(local_window_size) else local_window_size
        return cls(int(sides[0]), int(sides[1]))

    @classmethod
    @declared
    def of_width(cls, width: Count, is_causal: bool) -> SlidingWindow:
        """The "window w" of the papers: if causal, w keys that end with the query's own; else w // 2 on each side."""
        return cls(int(width) - 1, 0) if is_causal else cls(int(width) // 2, int(width) // 2)

    @property
    def limits(self) -> tuple[int, int]:
        return self.left, self.right

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
    def limits(self) -> tuple[int, int]:
        return self.left * self.dilation, self.right * self.dilation

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead, (before, after) = key_positions - query_positions, self.limits
        inside = (ahead >= -before) & (ahead <= after)
        return inside & (remainder(key_positions, self.dilation) == remainder(query_positions, self.dilation))

    def parts(self, call, query_block):
        return [band(call, query_block, self.left, self.right, self.visible, self.dilation)]


@dataclasses.dataclass(frozen=True)
class BlockDiagonal(Pattern):
    """Position i sees its own block, i // block (DiagAttention, arXiv:2210.10340)."""

    block: Count

    @property
    def limits(self) -> tuple[int, int]:
        return self.block - 1, self.block - 1

    def visible(self, query_positions, key_positions, num_positions=None):
        return floor_divide(query_positions, self.block) == floor_divide(key_positions, self.block)

    def _static_parts(self, call, query_block):
        return [separate_blocks(call, query_block, self.block, self.visible)]


@dataclasses.dataclass(frozen=True)
class Bucketed(Pattern):
    """Position i sees its bucket i // size, the `before` buckets before it and the `after` buckets after it.

    The local-attention package has this pattern, and BRL-Attention's experiments used it (Liu et al., OpenReview
    Vpyg3fqXbl).
    """

    size: Count
    before: Natural = 1
    after: Natural = 1

    @property
    def limits(self) -> tuple[int, int]:
        return (self.before + 1) * self.size - 1, (self.after + 1) * self.size - 1

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = floor_divide(key_positions, self.size) - floor_divide(query_positions, self.size)
        return (ahead >= -self.before) & (ahead <= self.after)

    def _static_parts(self, call, query_block):
        return [aligned_bands(call, query_block, self.size, self.before, self.after, self.visible)]


@dataclasses.dataclass(frozen=True)
class SurroundedBlocks(Pattern):
    """Position i sees its block i // size and `reach` positions before and after that block.

    The Long-Short Transformer (Zhu et al. 2021, arXiv:2107.02192, section 3.1) uses reach = size / 2.
    """

    size: Count
    reach: Natural

    @property
    def limits(self) -> tuple[int, int]:
        return self.size - 1 + self.reach, self.size - 1 + self.reach

    def visible(self, query_positions, key_positions, num_positions=None):
        ahead = key_positions - floor_divide(query_positions, self.size) * self.size
        return (ahead >= -self.reach) & (ahead < self.size + self.reach)

    def _static_parts(self, call, query_block):
        side = -(-self.reach // self.size)
        return [aligned_bands(call, query_block, self.size, side, side, self.visible)]


@dataclasses.dataclass(frozen=True)
class Neighbourhood(Pattern):
    """A window in two dimensions: position i sees up to `rows` rows and `columns` columns away, within the grid.

    The grid (an image) is stored row by row, `width` positions in each. The cost is O(n rows width), because the keys
    between two rows of the window are visited and masked. On a CPU, small windows with heads of up to 32 features cost
    O(n rows columns).
    """

    width: Count
    rows: Natural
    columns: Natural

    @property
    def limits(self) -> tuple[int, int]:
        reach = self.rows * self.width + min(self.columns, self.width - 1)
        return reach, reach

    def visible(self, query_positions, key_positions, num_positions=None):
        below = floor_divide(key_positions, self.width) - floor_divide(query_positions, self.width)
        right = remainder(key_positions, self.width) - remainder(query_positions, self.width)
        return (abs(below) <= self.rows) & (abs(right) <= self.columns)

    def _static_parts(self, call, query_block):
        return [band(call, query_block, *self.limits, self.visible)]
