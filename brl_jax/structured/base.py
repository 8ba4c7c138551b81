"""What every structured matrix offers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from brl_jax.structured.mlbtc import MLBTC


class StructuredMatrix:
    """A matrix given by fewer numbers than rows times columns; a frozen dataclass of arrays, registered as a pytree."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.as_mlbtc().shape

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self))

    @property
    def flops(self) -> int:
        """Of the product with one vector; a multiplication and an addition are two."""
        return self.as_mlbtc().flops

    @property
    def rank(self) -> int:
        """The largest rank that parameters of these shapes can give, and almost all parameters do."""
        return self.as_mlbtc().rank

    def check(self) -> None:
        """Raises ValueError for parameters whose shapes don't fit together. Not when made: a stack of matrices, which
        vmap and scan take apart, is a pytree of the same kind."""

    def as_mlbtc(self) -> MLBTC:
        """The same matrix as a sum of block tensor contractions (002, section 3.3)."""
        raise NotImplementedError

    def to_dense(self) -> Float[Array, "rows columns"]:
        """The matrix itself, straight from its definition."""
        raise NotImplementedError

    def matmul(self, x: Float[Array, "*batch columns"]) -> Float[Array, "*batch rows"]:
        """M x for each vector of x, without the dense matrix.

        Raises:
          ValueError: x's last axis is not as long as the matrix has columns.
        """
        self.check()
        return self.as_mlbtc().matmul(x)

    def bilinear(
        self, x: Float[Array, "*batch rows"], y: Float[Array, "*batch columns"]
    ) -> Float[Array, "*batch"]:
        """x^T M y for each pair of vectors, without the dense matrix.

        Raises:
          ValueError: last axes of other lengths than the matrix has rows and columns.
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
