"""Sums of the gradients of keys and values in the backward pass of sliding-window attention.

Queries of several grid steps see the same key. `WindowPlan.late` determines the order of the steps, and so when the sum
for a block of keys is complete. Between steps, sums wait in VMEM scratch of `scratch_rows` rows. Each class below takes
pairs of scratch and output. A step opens it, adds to tiles of keys (tile 0 is the first of the step's own block), and
closes it.
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


def scratch_rows(plan: WindowPlan, group: int) -> int:
    """Returns the rows of float32 scratch, one tile wide, for the keys' gradient; the values' needs the same."""
    before, after = plan.before * plan.tile, plan.after * plan.tile
    if plan.late:
        return (2 if group > 1 else 1) * plan.block + after
    return plan.block + before if group > 1 else 2 * max(before, plan.tile)


class KeyGradientSums:
    """The interface of the sums, and what they share."""

    def __init__(self, plan: WindowPlan, group: int, pairs: Sequence[tuple[Any, Any]]):
        """`pairs` are references to scratch and to the output for which it collects."""
        self.plan, self.group, self.pairs = plan, group, pairs
        self.step = pl.program_id(2)

    def open(self) -> None:
        """Call before anything is added in a step."""

    def add(self, tile: int, sums: Sequence[Float[Array, "tile width"]]) -> None:
        """Adds the contribution of all of a step's queries to one tile of keys, one array for each pair."""
        raise NotImplementedError

    def close(self) -> None:
        """Call after everything is added in a step."""


class EarlySums(KeyGradientSums):
    """Sums for blocks from the last to the first. Scratch holds the tiles before two blocks, the previous step's and
    this step's."""

    def add(self, tile, sums):
        size, before = self.plan.tile, self.plan.before
        mine, other = (jax.lax.rem(self.step + n, np.int32(2)) * (before * size) for n in (0, 1))
        row = (tile + before) * size if tile < 0 else (tile - self.plan.tiles + before) * size
        for (scratch, out), new in zip(self.pairs, sums):
            if tile < 0:
                scratch[pl.ds(pl.multiple_of(mine + row, size), size), :] = new
                continue
            if row >= 0:
                kept = scratch[pl.ds(pl.multiple_of(other + row, size), size), :]
                new += jnp.where(self.step > 0, kept, 0.0)
            out[0, tile * size : (tile + 1) * size] = new.astype(out.dtype)


class LateSums(KeyGradientSums):
    """Sums for blocks in order. Scratch holds the block before this step's, and the tiles that follow it."""

    def open(self):
        # The first rows of scratch are complete. Step 0 reads rows that were never written, but step 1 writes the same
        # block again.
        whole = self.plan.block - self.plan.before * self.plan.tile
        if whole:
            for scratch, out in self.pairs:
                out[0, :whole] = scratch[:whole].astype(out.dtype)

    def add(self, tile, sums):
        size = self.plan.tile
        here = slice(tile * size, (tile + 1) * size)
        place = slice(self.plan.block + here.start, self.plan.block + here.stop)
        for (scratch, out), new in zip(self.pairs, sums):
            if tile < 0:
                out[0, place] = (scratch[place] + new).astype(out.dtype)
            elif tile < self.plan.after:
                scratch[here] = new + jnp.where(self.step > 0, scratch[place], 0.0)
            else:
                scratch[here] = new

    def close(self):
        @pl.when(self.step == self.plan.blocks)
        def _():
            for scratch, out in self.pairs:
                out[0] = scratch[: self.plan.block].astype(out.dtype)


class GroupedSums(KeyGradientSums):
    """Sums in either order, for several heads that add to the same keys one after another. Scratch holds all keys that
    they see."""

    def __init__(self, plan, group, pairs):
        super().__init__(plan, group, pairs)
        self.member = pl.program_id(3)
        # Row of this step's first key.
        self.own = plan.block if plan.late else plan.before * plan.tile

    def open(self):
        """Moves the previous step's sums for the keys of this step to their rows."""
        block, late = self.plan.block, self.plan.late

        @pl.when(self.member == 0)
        def _():
            for scratch, _ in self.pairs:
                rows = scratch.shape[0]
                kept = rows - block
                left, now = (slice(block, rows), slice(kept)) if late else (slice(kept), slice(block, rows))
                if kept:
                    scratch[now] = jnp.where(self.step > 0, scratch[left], 0.0)
                scratch[slice(kept, rows) if late else slice(block)] = jnp.zeros(
                    (block, scratch.shape[1]), scratch.dtype
                )

    def add(self, tile, sums):
        first = self.own + tile * self.plan.tile
        for (scratch, _), new in zip(self.pairs, sums):
            scratch[first : first + self.plan.tile] += new

    def close(self):
        written = 0 if self.plan.late else self.own

        @pl.when(self.member == self.group - 1)
        def _():
            for scratch, out in self.pairs:
                out[0] = scratch[written : written + self.plan.block].astype(out.dtype)
