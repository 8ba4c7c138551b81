"""Biases by distance in the sliding-window kernels.

The distance between query and key at an entry of a tile of scores is the same in every tile of queries. The kernels
therefore write the bias of one tile of queries to VMEM once for each head, in the plan's columns, and add it to the
scores of all tiles. Gradients are summed entry by entry over the tiles of queries, and then by distance once for each
head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import distances
from pallas_kernels.tpu.core.arithmetic import NONE_YET
from pallas_kernels.tpu.core.distances import DistanceRows, DistanceTable, RelativeBias, Slopes
from pallas_kernels.tpu.core.heads import LANES, HeadLayout
from pallas_kernels.tpu.window.plan import WindowCall, WindowPlan
from pallas_kernels.tpu.window.tiles import WindowTiles


def rows_of(plan: WindowPlan) -> int:
    """Returns the rows of the array (see `core.distances`) with the bias of a tile of queries and all keys it reads."""
    return (len(plan.distances()) + 1) * plan.tile - LANES


def _first(plan: WindowPlan) -> int:
    """Returns the distance of that array's first element."""
    return (plan.before + 1) * plan.tile - LANES


def lay_out(
    numbers: Float[Array, "..."], call: WindowCall, plan: WindowPlan
) -> Float[Array, "tiles rows lanes"]:
    """Returns a kernel's operand from the numbers of a bias; JAX differentiates this function.

    -inf, which hides keys, becomes a number that can be added to MASKED, and that no score raises above half of MASKED.
    """
    assert call.bias is not None
    bias = DistanceTable(numbers, call.bias.first) if call.bias.distances else Slopes(numbers)
    rows = rows_of(plan)
    operand = distances.lay_out(bias, call.layout, call.scale, _first(plan) - rows, rows + LANES)
    return jnp.maximum(operand, NONE_YET)


def scratch_shape(plan: WindowPlan, layout: HeadLayout) -> tuple[int, int, int, int]:
    """Returns the shape of the scratch for the bias; its gradient needs the same."""
    return layout.group, layout.packed * len(plan.columns()), plan.tile, plan.tile


def bias_bytes(plan: WindowPlan, layout: HeadLayout, bias: RelativeBias | None, *, backward: bool) -> int:
    """Returns the VMEM of a bias: its operand and tiles, its gradient's, and the array while it is written."""
    if bias is None:
        return 0
    rows = rows_of(plan)
    kept = layout.group * bias.operand_bytes(layout, rows + LANES) + 4 * math.prod(
        scratch_shape(plan, layout)
    )
    return (2 if backward else 1) * kept + 2 * 4 * rows * LANES


def operand_spec(operand: Float[Array, "tiles rows lanes"], layout: HeadLayout) -> pl.BlockSpec:
    """Returns the spec of `lay_out`'s operand: the heads of a group together."""
    return pl.BlockSpec((layout.group, *operand.shape[1:]), lambda b, t, i, r: (t, 0, 0))


def gradient_spec(operand: Float[Array, "tiles rows lanes"], layout: HeadLayout) -> pl.BlockSpec:
    """Returns the spec of its gradient, (batch, tiles, rows, lanes)."""
    return pl.BlockSpec((1, layout.group, *operand.shape[1:]), lambda b, t, i, r: (b, t, 0, 0))


class GradientRefs(NamedTuple):
    """References to the gradient of the operand, and to the scratch that sums it."""

    result: Any
    sums: Any


class WindowBias:
    """The bias of a step's head or packed heads."""

    def __init__(
        self,
        bias: RelativeBias,
        layout: HeadLayout,
        tiles: WindowTiles,
        step: Int[Array, ""],
        refs: tuple[Any, Any],
        gradient: GradientRefs | None = None,
    ):
        """`step` counts the blocks of queries from 0; `refs` are references to the operand and to scratch."""
        self.layout, self.tiles, self.plan, self.step = layout, tiles, tiles.plan, step
        self.operand, self.scratch = refs
        self.gradient = gradient
        self.member = pl.program_id(3) if layout.group > 1 else 0
        self.rows = DistanceRows(bias, rows_of(tiles.plan), _first(tiles.plan))

    def open(self) -> None:
        """Call first in a step; in a head's first step it writes the tiles."""

        @pl.when(self.step == 0)
        def _():
            for head in range(self.layout.packed):
                array = self.rows.expand(self.operand[self.member, *self.rows.place(head)])
                by_distance = {d: self._tile(array, d) for d in self.plan.distances()}
                for n, x in enumerate(self.tiles.fold(by_distance, 0.0)):
                    self.scratch[self.member, self._at(head, n)] = x
            if self.gradient is not None:
                self.gradient.sums[self.member] = jnp.zeros_like(self.gradient.sums[self.member])

    def add(self, scores: Sequence[Float[Array, "tile tile"]], head: int) -> list[Float[Array, "tile tile"]]:
        """Returns the columns of a tile of queries' scores with their bias."""
        return [x + self.scratch[self.member, self._at(head, n)] for n, x in enumerate(scores)]

    def add_gradient(self, changes: Sequence[Float[Array, "tile tile"]], head: int) -> None:
        """Adds the gradients of a tile of queries' biased scores."""
        assert self.gradient is not None
        for n, change in enumerate(changes):
            self.gradient.sums[self.member, self._at(head, n)] += change

    def close(self) -> None:
        """Call after all gradients of a step; in a head's last step it sums them by distance."""
        gradient = self.gradient
        assert gradient is not None

        @pl.when(self.step == self.plan.blocks - 1)
        def _():
            for head in range(self.layout.packed):
                columns = [
                    gradient.sums[self.member, self._at(head, n)] for n in range(len(self.plan.columns()))
                ]
                place = self.rows.place(head)
                result = self.rows.reduce(self._array(self.tiles.unfolded(columns)))
                gradient.result[0, self.member, *place] = result

    def _at(self, head: int, column: int) -> int:
        return head * len(self.plan.columns()) + column

    def _row(self, distance: int, part: int) -> int:
        """Returns the first row of the array for the keys at a distance and one part, of LANES queries, of a tile."""
        return (distance + self.plan.before + 1) * self.plan.tile - (part + 1) * LANES

    def _tile(self, array: Float[Array, "rows 128"], distance: int) -> Float[Array, "tile tile"]:
        """Returns the bias of a tile of queries and the tile of keys at a distance."""
        rows = [self._row(distance, part) for part in range(self.plan.tile // LANES)]
        return jnp.concatenate([array[row : row + self.plan.tile] for row in rows], axis=1)

    def _array(self, tiles: dict[int, Float[Array, "tile tile"]]) -> Float[Array, "rows 128"]:
        """The transpose of `_tile`, over all distances."""
        met: dict[int, list[Array]] = {}
        for distance, x in tiles.items():
            for part in range(self.plan.tile // LANES):
                for first in range(0, self.plan.tile, LANES):
                    piece = x[first : first + LANES, part * LANES : (part + 1) * LANES]
                    met.setdefault(self._row(distance, part) + first, []).append(piece)
        return jnp.concatenate([functools.reduce(jnp.add, met[row]) for row in sorted(met)], axis=0)
