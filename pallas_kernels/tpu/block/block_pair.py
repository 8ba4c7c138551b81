"""One pair of a block of queries and a block of keys, inside the block-sparse kernels.

`StepLists` reads from scalar memory which pair a grid step works on. `BlockPair` loads that pair's queries and keys by
tile and head, and masks its scores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from pallas_kernels.positions import floor_divide
from pallas_kernels.tpu.block.distances import BiasRefs, PairBias
from pallas_kernels.tpu.block.plan import TILE, WORD, BlockCall
from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import MASKED
from pallas_kernels.tpu.core.pipeline import pipelined


class StepLists:
    """What a step reads from scalar memory: its pair of blocks, their bits, and the shift of positions."""

    def __init__(self, call: BlockCall, refs: Sequence[Any]):
        self.own, self.other, *rest = refs
        self.words = rest.pop(0) if call.words else None
        self.shift = rest.pop(0) if call.shifted else None
        self.call, self.step = call, pl.program_id(2)

    def ends(self):
        """Whether this step is the first, and the last, for its block."""
        last = pl.num_programs(2) - 1
        own = self.own[self.step]
        first = (self.step == 0) | (self.own[jnp.maximum(self.step - 1, 0)] != own)
        return first, (self.step == last) | (self.own[jnp.minimum(self.step + 1, last)] != own)

    def meet(self, by_key: bool, body) -> None:
        """Runs body(cut), unless the block has no partner or, in a causal call, only keys after all its queries. `cut`
        is whether some keys come after some queries; if not, the body needs no causal mask.
        """
        call = self.call
        meets = None if all(call.listed(by_key)) else self.other[self.step] >= 0
        if not call.causal:
            run = functools.partial(body, False)
            if meets is None:
                run()
            else:
                pl.when(meets)(run)
            return
        query, key = self.blocks(by_key)
        first_query = query * call.block_q + call.query_position
        if self.shift is not None:
            first_query = first_query + self.shift[0]
        first_key = key * call.block_k + call.key_position
        whole = first_key + call.block_k - 1 <= first_query
        cut = jnp.logical_not(whole) & (first_key <= first_query + call.block_q - 1)
        for masked, runs in ((False, whole), (True, cut)):
            pl.when(runs if meets is None else runs & meets)(functools.partial(body, masked))

    def blocks(self, by_key: bool):
        """Returns (block of queries, block of keys)."""
        own, other = self.own[self.step], jnp.maximum(self.other[self.step], 0)
        return (other, own) if by_key else (own, other)


class VisibleRefs(NamedTuple):
    """References that decide which keys a query sees, and how well: segment ids (two or none), the runs that queries
    choose, and the bias."""

    segments: Sequence[Any]
    chosen: Any
    bias: BiasRefs | None


class BlockPair:
    """The queries, keys and mask of one pair of blocks; rows past the ends of the sequences are zero.

    `cut` is whether keys after their queries must be masked.
    """

    def __init__(self, lists: StepLists, by_key: bool, cut: bool, key, value, visible: VisibleRefs):
        self.call, self.lists, self.cut = lists.call, lists, cut
        call = self.call
        q_block, k_block = lists.blocks(by_key)
        self.first_key, self.first_query = k_block * call.block_k, q_block * call.block_q
        self.key, self.value = (
            self._below(x[0], call.keys - self.first_key, call.keys % call.block_k) for x in (key, value)
        )
        self.segments = None
        if visible.segments:
            query_segments, key_segments = visible.segments
            self.segments = query_segments, arithmetic.column(key_segments[0], TILE)
        self.chosen = visible.chosen
        self.bias = None
        if visible.bias is not None:
            shift = lists.shift[0] if call.causal and lists.shift is not None else None
            self.bias = PairBias(call, self.first_query, self.first_key, shift, visible.bias)
        self.granules = None
        if call.granulated:
            queries = slice(0, call.block_q)
            self.granules = [self._chosen_rows(head, queries) for head in range(call.layout.packed)]

    def each_unit(self, *stages) -> None:
        """Runs `pipelined` over the units of this pair, unless no query chooses a key of it."""
        run = functools.partial(pipelined, self.call.units, *stages)
        if self.granules is None:
            run()
        else:
            pl.when(functools.reduce(jnp.maximum, self.granules).max() > 0)(run)

    def _chosen_rows(self, head: int, queries: slice) -> Float[Array, "rows queries"]:
        """Returns 1 where a query of one head chooses a row's keys, else 0. A row is a granule of keys if all runs
        consist of whole granules, and a single key otherwise.
        """
        chosen = self.call.chosen
        assert chosen is not None
        starts = self.chosen[0, 0, head * chosen.runs : (head + 1) * chosen.runs, queries]
        step = chosen.size if self.call.granulated else 1
        row = jax.lax.broadcasted_iota(jnp.int32, (self.call.block_k // step, 1), 0)
        first = self.first_key + self.call.key_position + row * step
        found = jnp.zeros((row.shape[0], starts.shape[1]), jnp.float32)
        for n in range(chosen.runs):
            start = starts[n : n + 1]
            hit = first == start if step > 1 else (first >= start) & (first < start + chosen.size)
            found = jnp.where(hit, 1.0, found)
        return found

    def _chosen_keys(self, unit: int) -> Bool[Array, "block_k tile"]:
        """Whether a unit's queries choose the keys of this pair."""
        head, queries = self.split(unit)
        if self.granules is None:
            return self._chosen_rows(head, queries) > 0
        rows = self.granules[head][:, queries]
        assert self.call.chosen is not None
        shape = (self.call.chosen.size, rows.shape[1])
        return (
            jnp.concatenate([jnp.broadcast_to(rows[n : n + 1], shape) for n in range(rows.shape[0])], axis=0)
            > 0
        )

    @staticmethod
    def _below(x, limit, ragged):
        return arithmetic.rows_below(x, limit) if ragged else x

    def split(self, unit: int) -> tuple[int, slice]:
        """Returns a unit's head, and the rows of its tile of queries in their block."""
        tile, head = divmod(unit, self.call.layout.packed)
        return head, slice(tile * TILE, (tile + 1) * TILE)

    def lanes_of(self, unit: int) -> slice:
        """Returns the lanes of one head, which are rows of arrays that are stored transposed."""
        head, size = unit % self.call.layout.packed, self.call.layout.head_dim
        return slice(head * size, (head + 1) * size)

    def rows(self, ref, unit: int) -> Float[Array, "tile width"]:
        """Loads the queries, or their output gradients, of one head and tile."""
        head, rows = self.split(unit)
        x = self._below(
            ref[0, rows, :],
            self.call.queries - self.first_query - rows.start,
            self.call.queries % self.call.block_q,
        )
        return heads.lanes_of_head(x, head, self.call.layout)

    def statistics(self, ref, unit: int, count: int) -> list[Float[Array, "1 tile"]]:
        """Loads `count` statistics of one head and tile, with 0 past the end of the sequence."""
        head, lanes = self.split(unit)
        packed = self.call.layout.packed
        rows = [ref[0, 0, n * packed + head : n * packed + head + 1, lanes] for n in range(count)]
        if self.call.queries % self.call.block_q == 0:
            return rows
        lane = jax.lax.broadcasted_iota(jnp.int32, rows[0].shape, 1)
        exists = lane < self.call.queries - self.first_query - lanes.start
        return [jnp.where(exists, x, 0.0) for x in rows]

    def _bits_at(self, queries, keys) -> Bool[Array, "block_k tile"]:
        """Whether this pair's bits are set for positions of queries and keys."""
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

    def capped(self, scores: Float[Array, "block_k tile"]) -> Float[Array, "block_k tile"]:
        """Returns the scores after the call's cap, if any."""
        return scores if self.call.cap is None else arithmetic.soft_cap(scores, self.call.cap)

    def biased(self, scores: Float[Array, "block_k tile"], unit: int) -> Float[Array, "block_k tile"]:
        """Returns the capped scores with the call's bias, if any."""
        if self.bias is None:
            return scores
        tile, head = divmod(unit, self.call.layout.packed)
        return scores + self.bias.refs.scratch[head, self.bias.tile(tile)]

    def masked(self, scores: Float[Array, "block_k tile"], unit: int) -> Float[Array, "block_k tile"]:
        """Returns the scores, with MASKED where a query of the tile does not see a key."""
        call = self.call
        _, rows = self.split(unit)
        keys = self.first_key + jax.lax.broadcasted_iota(jnp.int32, (call.block_k, 1), 0)
        queries = self.first_query + rows.start + jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
        seen = []
        if call.keys % call.block_k:
            seen.append(keys < call.keys)
        if call.queries % call.block_q:
            seen.append(queries < call.queries)
        if self.segments is not None:
            seen.append(self.segments[1] == self.segments[0][0, :, rows])
        if self.chosen is not None:
            seen.append(self._chosen_keys(unit))
        if call.mask is not None or call.granules is not None or self.cut:
            shift = 0 if self.lists.shift is None else self.lists.shift[0]
            key_shift = 0 if call.causal else shift
            queries, keys = queries + (call.query_position + shift), keys + (call.key_position + key_shift)
            if self.cut:
                seen.append(keys <= queries)
            if call.mask is not None:
                seen.append(call.mask(queries, keys))
            if call.granules is not None:
                seen.append(self._bits_at(queries, keys))
        for mask in seen:
            scores = jnp.where(mask, scores, MASKED)
        return scores


def split_refs(
    call: BlockCall, refs: Sequence[Any], scalars: int, operands: int
) -> tuple[StepLists, Sequence[Any], VisibleRefs, Sequence[Any]]:
    """Splits a kernel's references into lists, operands, what hides keys, and results with scratch."""
    stop = scalars + operands
    after = stop + (2 if call.segments else 0)
    last = after + (0 if call.chosen is None else 1)
    chosen, bias, results = refs[after] if last > after else None, None, refs[last:]
    if call.bias is not None:
        numbers, *results, scratch = results
        bias = BiasRefs(numbers, scratch)
    visible = VisibleRefs(refs[stop:after], chosen, bias)
    return StepLists(call, refs[:scalars]), refs[scalars:stop], visible, results
