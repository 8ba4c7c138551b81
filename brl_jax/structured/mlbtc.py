"""Structured matrices: their interface, and multi-level block tensor contractions (MLBTC), the family of all of them.

arXiv:2509.07963, section 3.3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.structured.scale import draw


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
        """Returns the dense matrix."""
        return self.as_mlbtc().to_dense()

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
            f"{name} must be vectors of length {size}, the number of {side}, got shape {x.shape}"
        )


def check_rank(name: str, x: Array, axes: str) -> None:
    if x.ndim != len(axes.split()):
        raise ValueError(f"{name} must have axes ({', '.join(axes.split())}), got shape {x.shape}")


def check_same(what: str, left: object, right: object) -> None:
    if left != right:
        raise ValueError(f"left and right must have the same {what}, got {left} and {right}")


class ContractionSizes(NamedTuple):
    """The sizes of one contraction: p diagonal blocks, each of a b rows and c e columns, of rank t."""

    p: int
    b: int
    a: int
    c: int
    t: int
    e: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class BlockContraction:
    """One level: p diagonal blocks, each of which computes

      y[a, b] = sum_{c, t} left[b, a, c, t]  sum_e right[c, e, b, t] x[c, e]

    where x is reshaped to (c, e) and y to (a, b), in row-major order.

    Attributes:
      left: (p, b, a, c, t).
      right: (p, c, e, b, t).
    """

    left: Float[Array, "p b a c t"]
    right: Float[Array, "p c e b t"]

    def check(self) -> None:
        check_rank("left", self.left, "p b a c t")
        check_rank("right", self.right, "p c e b t")
        p, b, _, c, t = self.left.shape
        check_same("p, c, b, t", (p, c, b, t), (*self.right.shape[:2], *self.right.shape[3:]))

    @property
    def sizes(self) -> ContractionSizes:
        p, b, a, c, t = self.left.shape
        return ContractionSizes(p, b, a, c, t, self.right.shape[2])

    @property
    def shape(self) -> tuple[int, int]:
        s = self.sizes
        return s.p * s.a * s.b, s.p * s.c * s.e

    @property
    def flops(self) -> int:
        s = self.sizes
        return 2 * s.p * s.b * s.c * s.t * (s.e + s.a)

    @property
    def rank(self) -> int:
        s = self.sizes
        return s.p * min(s.c * min(s.e, s.b * s.t), s.b * min(s.a, s.c * s.t))

    def to_inner(self, y: Float[Array, "*batch columns"]) -> Float[Array, "*batch p b c t"]:
        """Multiplies a vector with one entry per column by the right factors."""
        s = self.sizes
        y = y.reshape(*y.shape[:-1], s.p, s.c, s.e)
        return jnp.einsum("...pce,pcebt->...pbct", y, self.right)

    def from_inner(self, inner: Float[Array, "*batch p b c t"]) -> Float[Array, "*batch rows"]:
        y = jnp.einsum("...pbct,pbact->...pab", inner, self.left)
        return y.reshape(*y.shape[:-3], -1)

    def rows_to_inner(self, x: Float[Array, "*batch rows"]) -> Float[Array, "*batch p b c t"]:
        """Multiplies a vector with one entry per row by the transposes of the left factors."""
        s = self.sizes
        x = x.reshape(*x.shape[:-1], s.p, s.a, s.b)
        return jnp.einsum("...pab,pbact->...pbct", x, self.left)

    def to_dense(self) -> Float[Array, "rows columns"]:
        s = self.sizes
        blocks = jnp.einsum("pbact,pcebt->pabce", self.left, self.right)
        return jax.scipy.linalg.block_diag(*blocks.reshape(s.p, s.a * s.b, s.c * s.e))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["levels"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class MLBTC(StructuredMatrix):
    """A sum of block contractions, each with different numbers of blocks (eq. 8)."""

    levels: tuple[BlockContraction, ...]

    def check(self) -> None:
        for level in self.levels:
            level.check()
        shapes = {level.shape for level in self.levels}
        if len(shapes) != 1:
            raise ValueError(
                f"levels must be one or more matrices of the same shape, got shapes {sorted(shapes)}"
            )

    @classmethod
    def init(cls, key: Array, sizes: tuple[ContractionSizes, ...]) -> MLBTC:
        """Draws levels of the given sizes; each factor's entries have RMS_0 (appendix E.1)."""
        levels = []
        for s, own in zip(sizes, jax.random.split(key, len(sizes))):
            left, right = jax.random.split(own)
            levels.append(
                BlockContraction(
                    draw(left, (s.p, s.b, s.a, s.c, s.t), s.c * s.t, s.a),
                    draw(right, (s.p, s.c, s.e, s.b, s.t), s.e, s.b * s.t),
                )
            )
        return cls(tuple(levels))

    @property
    def shape(self) -> tuple[int, int]:
        return self.levels[0].shape

    @property
    def flops(self) -> int:
        return sum(level.flops for level in self.levels)

    @property
    def rank(self) -> int:
        return min(*self.shape, sum(level.rank for level in self.levels))

    def as_mlbtc(self) -> MLBTC:
        return self

    def to_dense(self) -> Float[Array, "rows columns"]:
        return functools.reduce(jnp.add, [level.to_dense() for level in self.levels])

    def matmul(self, x: Float[Array, "*batch columns"]) -> Float[Array, "*batch rows"]:
        self.check()
        check_vectors("x", x, "columns", self.shape[1])
        return functools.reduce(jnp.add, [level.from_inner(level.to_inner(x)) for level in self.levels])

    def bilinear(
        self, x: Float[Array, "*batch rows"], y: Float[Array, "*batch columns"]
    ) -> Float[Array, "*batch"]:
        self.check()
        check_vectors("x", x, "rows", self.shape[0])
        check_vectors("y", y, "columns", self.shape[1])
        sums = [
            jnp.sum(level.rows_to_inner(x) * level.to_inner(y), axis=(-4, -3, -2, -1))
            for level in self.levels
        ]
        return functools.reduce(jnp.add, sums)
