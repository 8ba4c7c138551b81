"""Biases by distance in the block-sparse kernels: each pair of blocks writes the array of `core.distances`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.block.plan import TILE, BlockCall
from pallas_kernels.tpu.core import distances
from pallas_kernels.tpu.core.distances import DistanceTable, Slopes
from pallas_kernels.tpu.core.heads import LANES


def lay_out(
    bias: Slopes | DistanceTable, call: BlockCall, shift: Int[Array, "1"] | None
) -> Float[Array, "tiles rows lanes"]:
    """Returns the kernels' operand; see `core.distances.lay_out`."""
    offset = call.query_position - call.key_position + (0 if shift is None or not call.causal else shift[0])
    more = offset - _whole_lanes(offset)
    return distances.lay_out(bias, call.layout, call.scale, *call.bias_extent, more)


def _whole_lanes(offset):
    return offset // LANES * LANES if isinstance(offset, int) else (offset >> 7) << 7


class BiasRefs(NamedTuple):
    """References to the operand from `lay_out`, and to scratch of shape (heads in a tile, rows, TILE)."""

    numbers: Any
    scratch: Any


class PairBias:
    """The bias of one pair of blocks.

    Args:
      first_query, first_key: indices of the pair's first query and first key.
      shift: added to the queries' positions only; None for 0.
    """

    def __init__(self, call: BlockCall, first_query, first_key, shift, refs: BiasRefs):
        assert call.bias is not None
        self.call, self.refs = call, refs
        base = first_query - first_key
        offset = call.query_position - call.key_position
        if shift is not None:
            offset = offset + shift
        first, lanes = call.bias_extent
        rows = call.bias_array[1]
        start = jnp.clip(base + _whole_lanes(offset) - call.block_k - first, 0, lanes - rows - LANES)
        self.rows = distances.DistanceRows(call.bias, rows, base + offset + (call.block_q - TILE), start)
        for head in range(call.layout.packed):
            place = self.rows.place(head)
            self.refs.scratch[head] = self.rows.expand(self.refs.numbers[0, *place])

    def tile(self, unit_tile: int) -> slice:
        """Returns the rows of the array that hold the bias of a tile of queries."""
        first = self.call.block_q - TILE * (unit_tile + 1)
        return slice(first, first + self.call.block_k)

    def add_gradient(self, result, member, grads) -> None:
        """Adds `grads`, laid out like the array, to query tile `member` of `result`, laid out like the operand."""
        for head in range(self.call.layout.packed):
            place = self.rows.place(head)
            result[0, member, *place] += self.rows.reduce(grads[head])
