"""Low-rank matrices: a whole one, blocks on the diagonal, and sums of these over several block sizes (section 3.1)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from brl_jax.structured.mlbtc import MLBTC, BlockContraction, StructuredMatrix, check_rank, check_same
from brl_jax.structured.scale import draw


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LowRank(StructuredMatrix):
    """left right^T: left (rows, r), right (columns, r)."""

    left: Float[Array, "rows r"]
    right: Float[Array, "columns r"]

    def check(self) -> None:
        check_rank("left", self.left, "rows r")
        check_rank("right", self.right, "columns r")
        check_same("rank", self.left.shape[1], self.right.shape[1])

    @classmethod
    def init(cls, key: Array, rows: int, columns: int, rank: int) -> LowRank:
        left, right = jax.random.split(key)
        return cls(draw(left, (rows, rank), rank, rows), draw(right, (columns, rank), columns, rank))

    def as_mlbtc(self) -> MLBTC:
        return BlockLowRank(self.left[None], self.right[None]).as_mlbtc()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class BlockLowRank(StructuredMatrix):
    """The direct sum of p matrices left_i right_i^T: left (p, rows / p, r), right (p, columns / p, r)."""

    left: Float[Array, "p a r"]
    right: Float[Array, "p e r"]

    def check(self) -> None:
        check_rank("left", self.left, "p a r")
        check_rank("right", self.right, "p e r")
        check_same("blocks and rank", self.left.shape[::2], self.right.shape[::2])

    @classmethod
    def init(cls, key: Array, rows: int, columns: int, blocks: int, rank: int) -> BlockLowRank:
        if rows % blocks or columns % blocks:
            raise ValueError(f"blocks must divide rows and columns, {rows} and {columns}, got {blocks}")
        left, right = jax.random.split(key)
        a, e = rows // blocks, columns // blocks
        return cls(draw(left, (blocks, a, rank), rank, a), draw(right, (blocks, e, rank), e, rank))

    def as_mlbtc(self) -> MLBTC:
        return MLBTC((BlockContraction(self.left[:, None, :, None], self.right[:, None, :, None]),))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["levels"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class MLR(StructuredMatrix):
    """A multi-level low-rank matrix: a sum of block low-rank matrices of the same shape (eqs. 4 and 10)."""

    levels: tuple[BlockLowRank, ...]

    def check(self) -> None:
        for level in self.levels:
            level.check()

    @classmethod
    def init(cls, key: Array, rows: int, columns: int, ranks: Sequence[int]) -> MLR:
        """Level l = 0, 1, ... has 2^l blocks of rank ranks[l]."""
        keys = jax.random.split(key, len(ranks))
        return cls(
            tuple(
                BlockLowRank.init(own, rows, columns, 2**level, rank)
                for level, (own, rank) in enumerate(zip(keys, ranks))
            )
        )

    def as_mlbtc(self) -> MLBTC:
        return MLBTC(tuple(part for level in self.levels for part in level.as_mlbtc().levels))
