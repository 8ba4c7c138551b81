"""Sums of dk and dv in the backward pass of sliding-window attention, over the steps whose queries see a key.

`WindowPlan.late` says in which order the steps come, and so when a block of keys is done. Between steps, sums wait in
VMEM scratch of `held_rows` rows. Each class takes pairs of scratch and output, opens a step, adds to tiles of keys, 0
being the first of the step's own block, and closes the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.tpu.window.plan import WindowPlan


def held_rows(plan: WindowPlan, group: int) -> int:
    """Rows of scratch, of one tile's width in float32, for dk and as many for dv."""
    before, after = plan.before * plan.tile, plan.after * plan.tile
    if plan.late:
        return (2 if group > 1 else 1) * plan.block + after
    return plan.block + before if group > 1 else 2 * max(before, plan.tile)


class _Sums:
    def __init__(self, plan: WindowPlan, group: int, pairs: Sequence[tuple[Any, Any]]):
        self.plan, self.group, self.pairs = plan, group, pairs
        self.step = pl.program_id(2)

    def open(self) -> None:
        """Before anything is added in a step."""

    def add(self, tile: int, sums: Sequence[Float[Array, "tile width"]]) -> None:
        """Adds all that a step's queries give to one tile of keys."""
        raise NotImplementedError

    def close(self) -> None:
        """After everything is added in a step."""


class EarlySums(_Sums):
    """Blocks from the last to the first; scratch holds the tiles before two blocks: the one come from, and this one."""

    def add(self, tile, sums):
        size, before = self.plan.tile, self.plan.before
        mine, other = (jax.lax.rem(self.step + n, np.int32(2)) * (before * size) for n in (0, 1))
        row = (tile + before) * size if tile < 0 else (tile - self.plan.tiles + before) * size
        for (held, out), new in zip(self.pairs, sums):
            if tile < 0:
                held[pl.ds(pl.multiple_of(mine + row, size), size), :] = new
                continue
            if row >= 0:
                kept = held[pl.ds(pl.multiple_of(other + row, size), size), :]
                new += jnp.where(self.step > 0, kept, 0.0)
            out[0, tile * size : (tile + 1) * size] = new.astype(out.dtype)


class LateSums(_Sums):
    """Blocks in order; scratch holds the block before this step's and the tiles that lie after that."""

    def open(self):
        # Nothing is added any more to its first rows. What step 0 reads here was never written, and step 1 writes the
        # same block again.
        whole = self.plan.block - self.plan.before * self.plan.tile
        if whole:
            for held, out in self.pairs:
                out[0, :whole] = held[:whole].astype(out.dtype)

    def add(self, tile, sums):
        size = self.plan.tile
        here = slice(tile * size, (tile + 1) * size)
        place = slice(self.plan.block + here.start, self.plan.block + here.stop)
        for (held, out), new in zip(self.pairs, sums):
            if tile < 0:
                out[0, place] = (held[place] + new).astype(out.dtype)
            elif tile < self.plan.after:
                held[here] = new + jnp.where(self.step > 0, held[place], 0.0)
            else:
                held[here] = new

    def close(self):
        @pl.when(self.step == self.plan.blocks)
        def _():
            for held, out in self.pairs:
                out[0] = held[: self.plan.block].astype(out.dtype)


class GroupedSums(_Sums):
    """Either order, where several heads add to the same keys, one after the other: scratch holds all that they see."""

    def __init__(self, plan, group, pairs):
        super().__init__(plan, group, pairs)
        self.member = pl.program_id(3)
        # Row of this step's first key.
        self.own = plan.block if plan.late else plan.before * plan.tile

    def open(self):
        """Moves what the last step left for the keys of this one to their rows."""
        block, late = self.plan.block, self.plan.late

        @pl.when(self.member == 0)
        def _():
            for held, _ in self.pairs:
                rows = held.shape[0]
                kept = rows - block
                left, now = (slice(block, rows), slice(kept)) if late else (slice(kept), slice(block, rows))
                if kept:
                    held[now] = jnp.where(self.step > 0, held[left], 0.0)
                held[slice(kept, rows) if late else slice(block)] = jnp.zeros(
                    (block, held.shape[1]), held.dtype
                )

    def add(self, tile, sums):
        first = self.own + tile * self.plan.tile
        for (held, _), new in zip(self.pairs, sums):
            held[first : first + self.plan.tile] += new

    def close(self):
        written = 0 if self.plan.late else self.own

        @pl.when(self.member == self.group - 1)
        def _():
            for held, out in self.pairs:
                out[0] = held[written : written + self.plan.block].astype(out.dtype)
