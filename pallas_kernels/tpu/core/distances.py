"""Biases that depend only on the distance between a query and a key, inside the kernels.

For consecutive queries and keys, such a bias is a Toeplitz matrix. The kernels write it for one tile of queries, as
wide as a register, and for the keys before and after the tile, as the rows of one array. The bias of every other tile
of queries is a slice of these rows:

    array[m, q] = bias(first + q - m)

The rows come from a slope and the distances, or from a table of numbers by distance. HBM holds the table eight times,
each copy shifted by one lane, so that eight rows of the array are one slice of its lanes. Gradients take the same way
back.
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

#: Rows of a register; a table has one copy for each.
COPIES = 8


class Slopes(NamedTuple):
    """A bias of -slope * |distance| (ALiBi, arXiv:2108.12409).

    Attributes:
      slopes: one for each query head.
    """

    slopes: Float[Array, " N"]


class DistanceTable(NamedTuple):
    """A number for each query head and distance, which is the query's position minus the key's.

    Attributes:
      numbers: for the distances `first`, `first` + 1, ...; smaller distances use the first number and larger distances
        the last one.
      first: a distance.
    """

    numbers: Float[Array, "N distances"]
    first: int


class RelativeBias(NamedTuple):
    """What a plan knows about a bias by distance.

    Attributes:
      distances: how many have separate numbers, 0 if the bias is a slope times the distance.
      first: the first of them.
    """

    distances: int
    first: int = 0

    def operand(self, layout: HeadLayout, lanes: int) -> tuple[int, int]:
        """Returns rows and lanes of the operand of a tile of heads, whose table has `lanes` distances; see
        `lay_out`."""
        return (layout.packed * COPIES, lanes) if self.distances else (layout.packed, LANES)

    def operand_bytes(self, layout: HeadLayout, lanes: int) -> int:
        """Returns the VMEM of that operand, which is double-buffered."""
        rows, lanes = self.operand(layout, lanes)
        return 2 * 4 * max(rows, COPIES) * lanes


def described(bias: Slopes | DistanceTable | None, heads: int) -> RelativeBias | None:
    """Returns what a plan needs to know about a bias; None without one.

    Raises:
      ValueError: the bias does not have a slope, or a row of numbers, for each query head.
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
    """Returns the kernels' operand, in the unit of unscaled scores. JAX differentiates this function.

    For slopes it is a row of equal numbers for each head. For a table it is eight rows for each head; in lane l, row c
    has the number of the distance `first` + `more` + l - c. `more` is from 0 to LANES - 1, and may be known only at run
    time.
    """
    rows = -bias.slopes[:, None] if isinstance(bias, Slopes) else bias.numbers
    rows = rows.astype(jnp.float32) / scale
    rows = jnp.pad(rows, ((0, -rows.shape[0] % layout.packed), (0, 0)))
    if isinstance(bias, Slopes):
        rows = jnp.broadcast_to(rows, (rows.shape[0], LANES))
        return rows.reshape(-1, layout.packed, LANES)
    # Slices instead of a look-up, whose derivative would add one number after another.
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
    """Returns the numbers of the distances `low` to `high` - 1, given those from the distance `first` on."""
    size, count = numbers.shape[1], high - low
    start, stop = (min(max(at - first, 0), size - 1) for at in (low, high - 1))
    inner = numbers[:, start : stop + 1]
    before = min(max(first + start - low, 0), count - inner.shape[1])
    return jnp.pad(inner, ((0, 0), (before, count - inner.shape[1] - before)), mode="edge")


class DistanceRows:
    """The array of a tile of heads, inside a kernel; see the module's docstring."""

    def __init__(self, bias: RelativeBias, rows: int, first, start=0):
        """Places the array.

        Args:
          bias: the plan's description of it.
          rows: of the array, a multiple of LANES.
          first: the distance of its first element, which may be known only at run time.
          start: the lane of a table's operand whose first copy has the number of the distance `first` - rows, a
            multiple of LANES.
        """
        self.bias, self.rows, self.first = bias, rows, first
        self.lanes = pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), rows + LANES)

    def place(self, head: int) -> tuple[Any, Any]:
        """Returns the rows and lanes of the operand from which a packed head's array comes."""
        if self.bias.distances == 0:
            return slice(head, head + 1), slice(None)
        return slice(head * COPIES, (head + 1) * COPIES), self.lanes

    def expand(self, numbers: Float[Array, "copies lanes"]) -> Float[Array, "rows 128"]:
        """Returns the array, from the part of the operand at `place`."""
        if self.bias.distances == 0:
            slopes = jnp.broadcast_to(numbers, (COPIES, LANES))
            return jnp.concatenate([slopes * rows for rows in self._distances()], axis=0)
        turned = [pltpu.roll(numbers, COPIES * n, 1) if n else numbers for n in range(LANES // COPIES)]
        starts = range(numbers.shape[1] - LANES, 0, -LANES)
        return jnp.concatenate([x[:, start : start + LANES] for start in starts for x in turned], axis=0)

    def reduce(self, grads: Float[Array, "rows 128"]) -> Float[Array, "copies lanes"]:
        """Returns the gradient of the part of the operand at `place`, given the array's gradient."""
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
        """Yields the absolute distances in the array, eight rows at a time, with two instructions each."""
        shape = (COPIES, LANES)
        there = jax.lax.broadcasted_iota(jnp.int32, shape, 1) - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        there = there.astype(jnp.float32)
        first = jnp.asarray(self.first).astype(jnp.float32)
        for row in range(0, self.rows, COPIES):
            yield jnp.abs(there + (first - float(row)))
