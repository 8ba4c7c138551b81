"""Biases that depend on the distance between a query and a key alone, inside the block-sparse kernels.

The bias of a pair of blocks is a Toeplitz matrix. It is written once for a pair and head, for the keys before and after
a tile of queries, as rows of one array in VMEM; the bias of each tile of queries is a slice of these rows:

    array[m, q] = bias(first query - first key + block_q - TILE + q - m)

Its rows come from a slope and the distances, or from a table of numbers by distance that lies in HBM eight times, each
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

from pallas_kernels.tpu.block.plan import COPIES, TILE, BlockCall, RelativeBias
from pallas_kernels.tpu.core.heads import LANES


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


def lay_out(
    bias: Slopes | DistanceTable, call: BlockCall, shift: Int[Array, "1"] | None
) -> Float[Array, "tiles rows lanes"]:
    """The operand of the kernels, in the unit of scores that are not yet scaled. JAX differentiates this function.

    It is a row of equal slopes for each head, or eight rows of numbers for each head.
    """
    rows = -bias.slopes[:, None] if isinstance(bias, Slopes) else bias.numbers
    rows = rows.astype(jnp.float32) / call.scale
    rows = jnp.pad(rows, ((0, -rows.shape[0] % call.layout.packed), (0, 0)))
    if isinstance(bias, Slopes):
        rows = jnp.broadcast_to(rows, (rows.shape[0], LANES))
        return rows.reshape(-1, call.layout.packed, LANES)
    assert call.bias is not None
    first, lanes = call.bias.extent(call.block_q, call.block_k)
    offset = call.query_position - call.key_position + (0 if shift is None or not call.causal else shift[0])
    distance = jnp.arange(lanes, dtype=jnp.int32)[None] - jnp.arange(COPIES, dtype=jnp.int32)[:, None]
    place = distance + (first - bias.first + offset - _whole_lanes(offset))
    rows = jnp.take(rows, jnp.clip(place, 0, bias.numbers.shape[1] - 1), axis=1)
    return rows.reshape(-1, call.layout.packed * COPIES, lanes)


def _whole_lanes(offset):
    return offset // LANES * LANES if isinstance(offset, int) else (offset >> 7) << 7


class BiasRefs(NamedTuple):
    """References of a kernel to the operand that `lay_out` makes, and to scratch of (heads in a tile, rows, TILE)."""

    numbers: Any
    scratch: Any


class PairBias:
    """The bias of one pair of blocks; see the head of this file.

    Args:
      first_query, first_key: indices of the first query and the first key of the pair.
      shift: what is added to the positions of queries alone; None for 0.
    """

    def __init__(self, call: BlockCall, first_query, first_key, shift, refs: BiasRefs):
        assert call.bias is not None
        self.call, self.refs = call, refs
        self.base = first_query - first_key
        self.offset = call.query_position - call.key_position
        if shift is not None:
            self.offset = self.offset + shift
        for head in range(call.layout.packed):
            self.refs.scratch[head] = self._rows(head)

    def tile(self, unit_tile: int) -> slice:
        """The rows of the array that are the bias of a tile of queries."""
        first = self.call.block_q - TILE * (unit_tile + 1)
        return slice(first, first + self.call.block_k)

    def _distances(self) -> Iterator[Float[Array, "8 tile"]]:
        """The absolute distances in the array, eight rows at a time: two instructions for each."""
        shape = (COPIES, TILE)
        there = jax.lax.broadcasted_iota(jnp.int32, shape, 1) - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        there = there.astype(jnp.float32)
        first = (self.base + self.offset + (self.call.block_q - TILE)).astype(jnp.float32)
        for row in range(0, self.call.bias_array[1], COPIES):
            yield jnp.abs(there + (first - float(row)))

    def _window(self):
        """The lanes of the table that hold the distances of this pair."""
        assert self.call.bias is not None
        first, lanes = self.call.bias.extent(self.call.block_q, self.call.block_k)
        width = self.call.block_q + self.call.block_k
        start = self.base + _whole_lanes(self.offset) - self.call.block_k - first
        return pl.ds(pl.multiple_of(jnp.clip(start, 0, lanes - width), LANES), width)

    def _rows(self, head: int) -> Float[Array, "rows tile"]:
        assert self.call.bias is not None
        if self.call.bias.distances == 0:
            slopes = jnp.broadcast_to(self.refs.numbers[0, head : head + 1], (COPIES, TILE))
            return jnp.concatenate([slopes * rows for rows in self._distances()], axis=0)
        window = self.refs.numbers[0, head * COPIES : (head + 1) * COPIES, self._window()]
        turned = [pltpu.roll(window, COPIES * n, 1) if n else window for n in range(LANES // COPIES)]
        starts = range(window.shape[1] - LANES, 0, -LANES)
        return jnp.concatenate([x[:, start : start + LANES] for start in starts for x in turned], axis=0)

    def add_gradient(self, result, grads) -> None:
        """Adds to `result`, laid out as the operand is, the gradient that `grads` has in the array's form."""
        assert self.call.bias is not None
        for head in range(self.call.layout.packed):
            groups = [grads[head, n * COPIES : (n + 1) * COPIES] for n in range(grads.shape[1] // COPIES)]
            if self.call.bias.distances == 0:
                rows = functools.reduce(jnp.add, map(jnp.multiply, groups, self._distances()))
                result[0, 0, head : head + 1] += rows.sum(axis=0, keepdims=True)
                continue
            steps, window = LANES // COPIES, self._window()
            width, total = self.call.block_q + self.call.block_k, None
            for n in range(steps):
                lanes = [jnp.zeros_like(groups[0]), *reversed(groups[n::steps])]
                part = jnp.concatenate(lanes, axis=1)
                part = pltpu.roll(part, width - COPIES * n, 1) if n else part
                total = part if total is None else total + part
            result[0, 0, head * COPIES : (head + 1) * COPIES, window] += total


def described(bias: Slopes | DistanceTable, heads: int) -> RelativeBias:
    """What a plan needs to know of a bias.

    Raises:
      ValueError: unless it has a slope, or a row of numbers, for each query head.
    """
    array, axes = (bias.slopes, 1) if isinstance(bias, Slopes) else (bias.numbers, 2)
    if array.ndim != axes or array.shape[0] != heads or 0 in array.shape:
        expected = f"({heads},)" if axes == 1 else f"({heads}, distances)"
        raise ValueError(f"{type(bias).__name__} must have shape {expected}, got {array.shape}")
    return RelativeBias(0) if isinstance(bias, Slopes) else RelativeBias(array.shape[1], bias.first)
