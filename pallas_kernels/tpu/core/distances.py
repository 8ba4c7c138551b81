"""Biases that depend on the distance between a query and a key alone, inside the kernels.

The bias of queries and keys that lie side by side is a Toeplitz matrix. It is written for a tile of as many queries as
a register has lanes, and for the keys before and after it, as rows of one array; the bias of each other tile of queries
is a slice of these rows:

    array[m, q] = bias(first + q - m)

The rows come from a slope and the distances, or from a table of numbers by distance that lies in HBM eight times, each
time moved by one lane: eight rows of the array are then a slice of lanes of it. Gradients go the same way back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core.heads import LANES, HeadLayout

#: Rows of a register, for each of which a table has a copy.
COPIES = 8


class Slopes(NamedTuple):
    """A bias of -slope * |distance| (ALiBi, arXiv:2108.12409).

    Attributes:
      slopes: one for each query head.
    """

    slopes: Float[Array, " N"]


class DistanceTable(NamedTuple):
    """A number for each query head and distance, the position of the query minus that of the key.

    Attributes:
      numbers: those of the distances `first`, `first` + 1, ...; smaller distances have the first number and larger
        distances the last one.
      first: a distance.
    """

    numbers: Float[Array, "N distances"]
    first: int


class RelativeBias(NamedTuple):
    """What a plan knows of a bias by distance.

    Attributes:
      distances: how many have numbers of their own, 0 where the bias is a slope times the distance.
      first: the first of them.
    """

    distances: int
    first: int = 0

    def operand(self, layout: HeadLayout, lanes: int) -> tuple[int, int]:
        """Rows and lanes of the operand of a tile of heads, whose table has `lanes` distances; see `lay_out`."""
        return (layout.packed * COPIES, lanes) if self.distances else (layout.packed, LANES)

    def operand_bytes(self, layout: HeadLayout, lanes: int) -> int:
        """VMEM of that operand, which is double-buffered."""
        rows, lanes = self.operand(layout, lanes)
        return 2 * 4 * max(rows, COPIES) * lanes


def described(bias: Slopes | DistanceTable | None, heads: int) -> RelativeBias | None:
    """What a plan needs to know of a bias; None without one.

    Raises:
      ValueError: unless it has a slope, or a row of numbers, for each query head.
    """
    if bias is None:
        return None
    array, axes = (bias.slopes, 1) if isinstance(bias, Slopes) else (bias.numbers, 2)
    if array.ndim != axes or array.shape[0] != heads or 0 in array.shape:
        expected = f"({heads},)" if axes == 1 else f"({heads}, distances)"
        raise ValueError(f"{type(bias).__name__} must have shape {expected}, got {array.shape}")
    return RelativeBias(0) if isinstance(bias, Slopes) else RelativeBias(array.shape[1], bias.first)


def lay_out(
    bias: Slopes | DistanceTable,
    layout: HeadLayout,
    scale: float,
    first: int,
    lanes: int,
    more: int | Int[Array, ""] = 0,
) -> Float[Array, "tiles rows lanes"]:
    """The operand of the kernels, in the unit of scores that are not yet scaled. JAX differentiates this function.

    It is a row of equal slopes for each head, or for each head eight rows of numbers, of which row c has that of the
    distance `first` + `more` + lane - c in each lane. `more` is from 0 to LANES - 1, and may be known only at run time.
    """
    rows = -bias.slopes[:, None] if isinstance(bias, Slopes) else bias.numbers
    rows = rows.astype(jnp.float32) / scale
    rows = jnp.pad(rows, ((0, -rows.shape[0] % layout.packed), (0, 0)))
    if isinstance(bias, Slopes):
        rows = jnp.broadcast_to(rows, (rows.shape[0], LANES))
        return rows.reshape(-1, layout.packed, LANES)
    # Slices of a row, and no look-up in it, whose derivative would add one number after the other.
    last = COPIES - 1
    rows = _between(
        rows, bias.first, first - last, first + lanes + (LANES if not isinstance(more, int) else more)
    )
    rows = jax.lax.dynamic_slice_in_dim(rows, more, last + lanes, axis=1)
    copies = jnp.stack([rows[:, last - c : last - c + lanes] for c in range(COPIES)], axis=1)
    return copies.reshape(-1, layout.packed * COPIES, lanes)


def _between(
    numbers: Float[Array, "N distances"], first: int, low: int, high: int
) -> Float[Array, "N between"]:
    """The numbers of the distances from `low` to `high` - 1, from those of `first` and the distances that follow."""
    size, count = numbers.shape[1], high - low
    start, stop = (min(max(at - first, 0), size - 1) for at in (low, high - 1))
    inner = numbers[:, start : stop + 1]
    before = min(max(first + start - low, 0), count - inner.shape[1])
    return jnp.pad(inner, ((0, 0), (before, count - inner.shape[1] - before)), mode="edge")


class DistanceRows:
    """The array of a tile of heads, inside a kernel; see the head of this file."""

    def __init__(self, bias: RelativeBias, rows: int, first, start=0):
        """Places the array.

        Args:
          bias: what the plan knows of it.
          rows: of the array, a multiple of LANES.
          first: the distance of its first element, which may be known only at run time.
          start: the lane of a table's operand whose first copy has the number of the distance `first` - rows, a
            multiple of LANES.
        """
        self.bias, self.rows, self.first = bias, rows, first
        self.lanes = pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), rows + LANES)

    def place(self, head: int) -> tuple[Any, Any]:
        """The rows and lanes of the operand from which the array of a packed head comes."""
        if self.bias.distances == 0:
            return slice(head, head + 1), slice(None)
        return slice(head * COPIES, (head + 1) * COPIES), self.lanes

    def expand(self, numbers: Float[Array, "copies lanes"]) -> Float[Array, "rows 128"]:
        """The array, from the part of the operand at `place`."""
        if self.bias.distances == 0:
            slopes = jnp.broadcast_to(numbers, (COPIES, LANES))
            return jnp.concatenate([slopes * rows for rows in self._distances()], axis=0)
        turned = [pltpu.roll(numbers, COPIES * n, 1) if n else numbers for n in range(LANES // COPIES)]
        starts = range(numbers.shape[1] - LANES, 0, -LANES)
        return jnp.concatenate([x[:, start : start + LANES] for start in starts for x in turned], axis=0)

    def reduce(self, grads: Float[Array, "rows 128"]) -> Float[Array, "copies lanes"]:
        """The gradient of the part of the operand at `place`, from that of the array."""
        groups = [grads[n * COPIES : (n + 1) * COPIES] for n in range(self.rows // COPIES)]
        if self.bias.distances == 0:
            total = functools.reduce(jnp.add, map(jnp.multiply, groups, self._distances()))
            return total.sum(axis=0, keepdims=True)
        steps, width = LANES // COPIES, self.rows + LANES
        parts = []
        for n in range(steps):
            part = jnp.concatenate([jnp.zeros_like(groups[0]), *reversed(groups[n::steps])], axis=1)
            parts.append(pltpu.roll(part, width - COPIES * n, 1) if n else part)
        return functools.reduce(jnp.add, parts)

    def _distances(self) -> Iterator[Float[Array, "8 128"]]:
        """The absolute distances in the array, eight rows at a time: two instructions for each."""
        shape = (COPIES, LANES)
        there = jax.lax.broadcasted_iota(jnp.int32, shape, 1) - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        there = there.astype(jnp.float32)
        first = jnp.asarray(self.first).astype(jnp.float32)
        for row in range(0, self.rows, COPIES):
            yield jnp.abs(there + (first - float(row)))
