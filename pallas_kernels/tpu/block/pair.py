"""One pair of blocks inside the block-sparse kernels: where it lies, what it holds, who sees what in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.positions import floor_divide
from pallas_kernels.tpu.block.plan import WORD, BlockCall
from pallas_kernels.tpu.core import heads
from pallas_kernels.tpu.core.heads import MASKED


class Lists:
    """What a step reads from scalar memory: which blocks it works on, their bits, the shift of positions."""

    def __init__(self, call: BlockCall, refs: Sequence[Any]):
        self.own, self.other, *rest = refs
        self.words = rest.pop(0) if call.words else None
        self.shift = rest.pop(0) if call.shifted else None
        self.call, self.step = call, pl.program_id(2)

    def ends(self):
        """Whether this step is the first, and the last, of those of its block."""
        last = pl.num_programs(2) - 1
        own = self.own[self.step]
        first = (self.step == 0) | (self.own[jnp.maximum(self.step - 1, 0)] != own)
        return first, (self.step == last) | (self.own[jnp.minimum(self.step + 1, last)] != own)

    def meet(self, by_key: bool, body) -> None:
        """Runs the body, unless this step stands for a block that meets none."""
        if all(self.call.listed(by_key)):
            body()
        else:
            pl.when(self.other[self.step] >= 0)(body)

    def blocks(self, by_key: bool):
        """(block of queries, block of keys)."""
        own, other = self.own[self.step], jnp.maximum(self.other[self.step], 0)
        return (other, own) if by_key else (own, other)


class Pair:
    """One pair of blocks inside a kernel: its queries and keys, cleaned of what lies past the ends, and its mask."""

    def __init__(self, lists: Lists, by_key: bool, query, key, value, segment_refs):
        self.call, self.lists, self.query = lists.call, lists, query
        call = self.call
        q_block, k_block = lists.blocks(by_key)
        self.first_key, self.first_query = k_block * call.block_k, q_block * call.block_q
        self.key, self.value = (
            self._below(x[0], call.keys - self.first_key, call.keys % call.block_k) for x in (key, value)
        )
        self.segments = None
        if segment_refs:
            query_segments, key_segments = segment_refs
            self.segments = query_segments, heads.column(key_segments[0], call.tile)

    @staticmethod
    def _below(x, limit, ragged):
        return heads.rows_below(x, limit) if ragged else x

    def split(self, unit: int) -> tuple[int, slice]:
        tile, head = divmod(unit, self.call.layout.packed)
        return head, slice(tile * self.call.tile, (tile + 1) * self.call.tile)

    def lanes_of(self, unit: int) -> slice:
        """The lanes of one head, as rows of what is held turned."""
        head, size = unit % self.call.layout.packed, self.call.layout.head_dim
        return slice(head * size, (head + 1) * size)

    def rows(self, ref, unit: int) -> Float[Array, "tile width"]:
        """One head's queries, or their gradients, of one tile."""
        head, rows = self.split(unit)
        x = self._below(
            ref[0, rows, :],
            self.call.queries - self.first_query - rows.start,
            self.call.queries % self.call.block_q,
        )
        return heads.lanes_of_head(x, head, self.call.layout)

    def statistics(self, ref, unit: int, count: int) -> list[Float[Array, "1 tile"]]:
        """One head's rows of `count` statistics of one tile, 0 past the end of the sequence."""
        head, lanes = self.split(unit)
        packed = self.call.layout.packed
        rows = [ref[0, 0, n * packed + head : n * packed + head + 1, lanes] for n in range(count)]
        if self.call.queries % self.call.block_q == 0:
            return rows
        lane = jax.lax.broadcasted_iota(jnp.int32, rows[0].shape, 1)
        there = lane < self.call.queries - self.first_query - lanes.start
        return [jnp.where(there, x, 0.0) for x in rows]

    def _granted(self, queries, keys) -> Bool[Array, "block_k tile"]:
        """What the bits of this pair say of positions."""
        call, words = self.call, self.lists.words
        assert call.granules is not None
        assert words is not None
        size = call.granules.size
        row = floor_divide(queries, size) - floor_divide(self.first_query + call.query_position, size)
        column = floor_divide(keys, size) - floor_divide(self.first_key + call.key_position, size)
        index = row * call.granule_columns + column
        found = jnp.zeros(index.shape, jnp.int32)
        for n in range(call.words):
            word = jnp.full(index.shape, words[self.lists.step * call.words + n], jnp.int32)
            bits = jax.lax.shift_right_logical(word, index & (WORD - 1))
            found = (
                bits
                if call.words == 1
                else jnp.where(jax.lax.shift_right_logical(index, 5) == n, bits, found)
            )
        return (found & 1) == 1

    def masked(self, scores: Float[Array, "block_k tile"], unit: int) -> Float[Array, "block_k tile"]:
        """Scores with MASKED where a query of the tile does not see a key."""
        call = self.call
        _, rows = self.split(unit)
        keys = self.first_key + jax.lax.broadcasted_iota(jnp.int32, (call.block_k, 1), 0)
        queries = self.first_query + rows.start + jax.lax.broadcasted_iota(jnp.int32, (1, call.tile), 1)
        seen = []
        if call.keys % call.block_k:
            seen.append(keys < call.keys)
        if call.queries % call.block_q:
            seen.append(queries < call.queries)
        if self.segments is not None:
            seen.append(self.segments[1] == self.segments[0][0, :, rows])
        if call.mask is not None or call.granules is not None:
            shift = 0 if self.lists.shift is None else self.lists.shift[0]
            queries, keys = queries + (call.query_position + shift), keys + (call.key_position + shift)
            if call.mask is not None:
                seen.append(call.mask(queries, keys))
            if call.granules is not None:
                seen.append(self._granted(queries, keys))
        for mask in seen:
            scores = jnp.where(mask, scores, MASKED)
        return scores
