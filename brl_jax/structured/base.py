"""The interface of every structured matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from brl_jax.structured.mlbtc import MLBTC


class StructuredMatrix:
    """A matrix with fewer parameters than rows times columns: a frozen dataclass of arrays, registered as a pytree."""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.as_mlbtc().shape

    @property
    def num_parameters(self) -> int:
        """The number of entries of all arrays."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self))

    @property
    def flops(self) -> int:
        """The FLOPs of the product with one vector; a multiplication and an addition count as two."""
        return self.as_mlbtc().flops

    @property
    def rank(self) -> int:
        """The largest rank that parameters of these shapes can give, which almost all parameters give."""
        return self.as_mlbtc().rank

    def check(self) -> None:
        """Raises ValueError for parameters whose shapes do not fit together.

        It is called by the products and not at construction, because a stack of matrices, over which vmap or scan maps,
        is a pytree of the same class.
        """

    def as_mlbtc(self) -> MLBTC:
        """The same matrix as a sum of block tensor contractions (section 3.3)."""
        raise NotImplementedError

    def to_dense(self) -> Float[Array, "rows columns"]:
        """The dense matrix, computed directly from its definition."""
        raise NotImplementedError

    def matmul(self, x: Float[Array, "*batch columns"]) -> Float[Array, "*batch rows"]:
        """M x for each vector of x, without the dense matrix.

        Raises:
          ValueError: the length of x's last axis differs from the number of columns.
        """
        self.check()
        return self.as_mlbtc().matmul(x)

    def bilinear(
        self, x: Float[Array, "*batch rows"], y: Float[Array, "*batch columns"]
    ) -> Float[Array, "*batch"]:
        """x^T M y for each pair of vectors, without the dense matrix.

        Raises:
          ValueError: the lengths of the last axes differ from the numbers of rows and columns.
        """
        self.check()
        return self.as_mlbtc().bilinear(x, y)


def check_vectors(name: str, x: Array, side: str, size: int) -> None:
    if x.ndim < 1 or x.shape[-1] != size:
        raise ValueError(
            f"{name} must be vectors as long as the matrix has {side}, {size}, got shape {x.shape}"
        )


def check_rank(name: str, x: Array, axes: str) -> None:
    if x.ndim != len(axes.split()):
        raise ValueError(f"{name} must have axes ({', '.join(axes.split())}), got shape {x.shape}")


def check_same(what: str, left: object, right: object) -> None:
    if left != right:
        raise ValueError(f"left and right must have the same {what}, got {left} and {right}")
