"""Multi-level block tensor contractions, the family that contains all the others (section 3.3)."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.structured.base import StructuredMatrix, check_rank, check_same, check_vectors
from brl_jax.structured.scale import draw


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
            raise ValueError(f"levels must be one or more of one shape, got shapes {sorted(shapes)}")

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
