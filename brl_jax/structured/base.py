"""The interface of every structured matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from brl_jax.structured.mlbtc import MLBTC


class StructuredMatrix:
    """A matrix with fewer parameters than a dense one: a frozen dataclass of arrays, registered as a pytree."""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.as_mlbtc().shape

    @property
    def num_parameters(self) -> int:
        """The total number of entries of all arrays."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self))

    @property
    def flops(self) -> int:
        """FLOPs of the product with one vector, counting a multiplication and an addition as two."""
        return self.as_mlbtc().flops

    @property
    def rank(self) -> int:
        """The largest rank that parameters of these shapes can give. Almost all parameters give it."""
        return self.as_mlbtc().rank

    def check(self) -> None:
        """Raises ValueError if the shapes of the parameters do not fit together.

        The products call it, not the constructor: a stack of matrices, for vmap or scan, is a pytree of the same class.
        """

    def as_mlbtc(self) -> MLBTC:
        """Returns the same matrix as a sum of block tensor contractions (section 3.3)."""
        raise NotImplementedError

    def to_dense(self) -> Float[Array, "rows columns"]:
        """Returns the dense matrix, computed directly from its definition."""
        raise NotImplementedError

    def matmul(self, x: Float[Array, "*batch columns"]) -> Float[Array, "*batch rows"]:
        """Returns M x for each vector of x, without building the dense matrix.

        Raises:
          ValueError: the length of x's last axis differs from the number of columns.
        """
        self.check()
        return self.as_mlbtc().matmul(x)

    def bilinear(
        self, x: Float[Array, "*batch rows"], y: Float[Array, "*batch columns"]
    ) -> Float[Array, "*batch"]:
        """Returns x^T M y for each pair of vectors, without building the dense matrix.

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
