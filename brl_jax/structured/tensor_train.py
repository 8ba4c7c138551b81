"""Block tensor trains, and their special cases Monarch, Kronecker and butterfly (section 3.1)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.structured.mlbtc import (
    MLBTC,
    BlockContraction,
    StructuredMatrix,
    check_rank,
    check_same,
    check_vectors,
)
from brl_jax.structured.scale import draw


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class BTT(StructuredMatrix):
    """A block tensor train of rank t with a b rows and c e columns (eqs. 5 and 11):

    M[(a, b), (c, e)] = sum_t left[b, a, c, t] right[c, e, b, t].
    """

    left: Float[Array, "b a c t"]
    right: Float[Array, "c e b t"]

    def check(self) -> None:
        check_rank("left", self.left, "b a c t")
        check_rank("right", self.right, "c e b t")
        b, _, c, t = self.left.shape
        check_same("c, b, t", (c, b, t), (self.right.shape[0], *self.right.shape[2:]))

    @classmethod
    def init(cls, key: Array, rows: tuple[int, int], columns: tuple[int, int], rank: int) -> BTT:
        """rows = (a, b), columns = (c, e)."""
        left, right = jax.random.split(key)
        (a, b), (c, e) = rows, columns
        return cls(draw(left, (b, a, c, rank), c * rank, a), draw(right, (c, e, b, rank), e, b * rank))

    def as_mlbtc(self) -> MLBTC:
        return MLBTC((BlockContraction(self.left[None], self.right[None]),))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Monarch(StructuredMatrix):
    """P^T diag(left_1 .. left_b) P diag(right_1 .. right_c) with P a transposition (Dao et al. 2022, arXiv:2204.00595).

    Attributes:
      left: (b, a, c), b blocks of a x c.
      right: (c, b, e), c blocks of b x e.
    """

    left: Float[Array, "b a c"]
    right: Float[Array, "c b e"]

    def check(self) -> None:
        check_rank("left", self.left, "b a c")
        check_rank("right", self.right, "c b e")
        check_same("c, b", self.left.shape[2:] + self.left.shape[:1], self.right.shape[:2])

    @classmethod
    def init(cls, key: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Monarch:
        """rows = (a, b), columns = (c, e)."""
        left, right = jax.random.split(key)
        (a, b), (c, e) = rows, columns
        return cls(draw(left, (b, a, c), c, a), draw(right, (c, b, e), e, b))

    def as_mlbtc(self) -> MLBTC:
        return BTT(self.left[..., None], self.right.swapaxes(1, 2)[..., None]).as_mlbtc()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Kronecker(StructuredMatrix):
    """The Kronecker product of left (a, c) and right (b, e)."""

    left: Float[Array, "a c"]
    right: Float[Array, "b e"]

    def check(self) -> None:
        check_rank("left", self.left, "a c")
        check_rank("right", self.right, "b e")

    @classmethod
    def init(cls, key: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Kronecker:
        """rows = (a, b), columns = (c, e)."""
        left, right = jax.random.split(key)
        (a, b), (c, e) = rows, columns
        return cls(draw(left, (a, c), c, a), draw(right, (b, e), e, b))

    @property
    def rank(self) -> int:
        return min(self.left.shape) * min(self.right.shape)

    def as_mlbtc(self) -> MLBTC:
        (a, c), (b, e) = self.left.shape, self.right.shape
        left = jnp.broadcast_to(self.left[None, :, :, None], (b, a, c, 1))
        right = jnp.broadcast_to(self.right.T[None, :, :, None], (c, e, b, 1))
        return BTT(left, right).as_mlbtc()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["factors"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Butterfly(StructuredMatrix):
    """A product of log2(n) sparse n x n matrices (Dao et al. 2019, arXiv:1903.05895), where n is a power of two.

    For each j whose bit i is 0, factor i multiplies the pair of entries j and j + 2^i by a separate 2 x 2 matrix.
    Factor 0 is applied first.

    Attributes:
      factors: (log2(n), n / 2, 2, 2), with axes factor, pair in the order of j, output, input.
    """

    factors: Float[Array, "k pairs 2 2"]

    def check(self) -> None:
        check_rank("factors", self.factors, "k pairs out in")
        k = self.factors.shape[0]
        if k < 1 or self.factors.shape != (k, 2 ** (k - 1), 2, 2):
            raise ValueError(
                f"factors must have shape (k, 2^(k-1), 2, 2) for a size of 2^k, got {self.factors.shape}"
            )

    @classmethod
    def init(cls, key: Array, size: int) -> Butterfly:
        k = size.bit_length() - 1
        if size < 2 or size != 2**k:
            raise ValueError(f"size must be a power of two, at least 2, got {size}")
        return cls(draw(key, (k, size // 2, 2, 2), 2, 2))

    @property
    def size(self) -> int:
        return 2 ** self.factors.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    @property
    def flops(self) -> int:
        return 4 * self.size * self.factors.shape[0]

    @property
    def rank(self) -> int:
        return self.size

    def matmul(self, x: Float[Array, "*batch columns"]) -> Float[Array, "*batch rows"]:
        self.check()
        check_vectors("x", x, "columns", self.size)
        return self._apply(x, 0, self.factors.shape[0])

    def bilinear(
        self, x: Float[Array, "*batch rows"], y: Float[Array, "*batch columns"]
    ) -> Float[Array, "*batch"]:
        self.check()
        check_vectors("x", x, "rows", self.size)
        return jnp.sum(x * self.matmul(y), axis=-1)

    def _apply(self, x: Array, start: int, stop: int) -> Array:
        """Applies the factors start to stop - 1 to each vector of x."""
        shape = x.shape
        for i in range(start, stop):
            stride = 2**i
            pairs = self.factors[i].reshape(-1, stride, 2, 2)
            cut = x.reshape(*shape[:-1], -1, 2, stride)
            x = jnp.einsum("nsoi,...nis->...nos", pairs, cut).reshape(shape)
        return x

    def as_mlbtc(self) -> MLBTC:
        """Returns the same matrix as a Monarch matrix.

        Factors with small strides act inside blocks of consecutive entries; the others act on entries at the same
        position in all blocks.
        """
        split, k = self.factors.shape[0] // 2, self.factors.shape[0]
        inside, blocks = 2**split, 2 ** (k - split)
        unit = jnp.eye(inside, dtype=self.factors.dtype)
        low = jnp.broadcast_to(unit[:, None], (inside, blocks, inside)).reshape(inside, self.size)
        right = self._apply(low, 0, split).reshape(inside, blocks, inside)  # (e, c, b)
        unit = jnp.eye(blocks, dtype=self.factors.dtype)
        high = jnp.broadcast_to(unit[:, :, None], (blocks, blocks, inside)).reshape(blocks, self.size)
        left = self._apply(high, split, k).reshape(blocks, blocks, inside)  # (c, a, b)
        return Monarch(left.transpose(2, 1, 0), right.transpose(1, 2, 0)).as_mlbtc()
