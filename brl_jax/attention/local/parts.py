"""Parts of a pattern: which blocks of queries meet which keys, without an array of all pairs.

A pattern is a list of *parts* that share no (query, key) pair. A part puts the queries and the keys into some order,
cuts the queries into blocks of equal size, and says which of the ordered keys each block visits:

- band: a range of keys that advances with the block (sliding windows; dilated windows have one band per phase);
- dense: all keys of the block's phase (block-diagonal attention, columns, global rows);
- table: a static list of key blocks (random blocks, masks given block by block).

The part's `rule` then decides, from absolute positions, which query sees which of the visited keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

#: From the number of other keys that a query sees to the number of queries in a block.
QueryBlock = Callable[[int], int]
Rule = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """How many queries and keys a call has, and where they are.

    Attributes:
      is_causal: hides the keys after the query.
      num_queries, num_keys: T and S.
      query_offset: query i is at key index i + query_offset.
      key_offset: the absolute position of key 0; None if it is traced.
    """

    is_causal: bool
    num_queries: int
    num_keys: int
    query_offset: int = 0
    key_offset: int | None = 0

    @property
    def first_position(self) -> int:
        """The absolute position of query 0 (key_offset must be static)."""
        assert self.key_offset is not None
        return self.query_offset + self.key_offset


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """An order of a sequence: entry u of phase r is the token r * phase_step + u * stride + base.

    Tokens outside the sequence are padding. `listed`, if given, lists the tokens of a single phase instead.
    """

    phases: int
    per_phase: int
    phase_step: int = 0
    stride: int = 1
    base: int = 0
    listed: np.ndarray | None = None

    @property
    def size(self) -> int:
        return self.phases * self.per_phase

    def index(self, phase, start, length: int) -> Int[Array, " length"]:
        """The tokens at start .. start+length of a phase. Both start and phase may be traced."""
        if self.listed is not None:
            return lax.dynamic_slice_in_dim(jnp.asarray(self.listed, jnp.int32), start, length)
        u = start + jnp.arange(length, dtype=jnp.int32)
        return u * self.stride + (phase * self.phase_step + self.base)

    def _all_tokens(self) -> np.ndarray:
        if self.listed is not None:
            return self.listed
        phase, u = np.arange(self.phases)[:, None], np.arange(self.per_phase)[None, :]
        return (phase * self.phase_step + u * self.stride + self.base).reshape(-1)

    @property
    def _contiguous(self) -> bool:
        in_order = self.phases == 1 or self.phase_step == self.per_phase
        return self.listed is None and self.stride == 1 and in_order

    def arrange(self, x: Array, axis: int, fill: float | int = 0) -> Array:
        """The tokens of x (along axis) in this order, padded with `fill`."""
        size = x.shape[axis]
        if self._contiguous:
            start, stop = self.base, self.base + self.size
            if start >= 0 and stop <= size:
                return lax.slice_in_dim(x, start, stop, axis=axis)
            pad = [(0, 0, 0)] * x.ndim
            pad[axis] = (-start, stop - size, 0)
            return lax.pad(x, jnp.asarray(fill, x.dtype), pad)
        tokens = self._all_tokens()
        inside = (tokens >= 0) & (tokens < size)
        return jnp.take(x, np.where(inside, tokens, size), axis=axis, mode="fill", fill_value=fill)

    def restore(self, x: Array, axis: int, size: int, fill: float | int = 0) -> Array:
        """Undoes `arrange` for a sequence of `size` tokens; tokens that the order leaves out become `fill`."""
        if self._contiguous:
            pad = [(0, 0, 0)] * x.ndim
            pad[axis] = (self.base, size - self.base - self.size, 0)
            return lax.pad(x, jnp.asarray(fill, x.dtype), pad)
        tokens = self._all_tokens()
        place = np.full(size, self.size)
        inside = (tokens >= 0) & (tokens < size)
        place[tokens[inside]] = np.flatnonzero(inside)
        return jnp.take(x, place, axis=axis, mode="fill", fill_value=fill)


@dataclasses.dataclass(frozen=True)
class Part:
    """Queries in blocks, and the arranged keys that each block visits.

    Blocks are numbered phase by phase. Each visits `length` keys, starting `advance` keys after the start of the
    previous block in the phase: the block size in a band, 0 in a dense part. With a `table` of shape (blocks, m), block
    i visits the key blocks table[i] instead, of `length` / m keys each; an entry equal to their number is a placeholder
    for no block.
    """

    queries: Arrangement
    keys: Arrangement
    block: int
    length: int
    advance: int
    rule: Rule | None
    table: np.ndarray | None = None

    @property
    def num_blocks(self) -> int:
        return self.queries.size // self.block

    @property
    def _per_phase(self) -> int:
        return self.num_blocks // self.queries.phases

    @property
    def _key_block(self) -> int:
        assert self.table is not None
        return self.length // self.table.shape[1]

    def query_index(self, i) -> Int[Array, " t"]:
        phase, j = i // self._per_phase, i % self._per_phase
        return self.queries.index(phase, j * self.block, self.block)

    def key_index(self, i, num_keys: int) -> Int[Array, " s"]:
        """The tokens that block i visits; those outside 0 .. num_keys are padding."""
        if self.table is None:
            phase, j = i // self._per_phase, i % self._per_phase
            return self.keys.index(phase, j * self.advance, self.length)
        row = jnp.asarray(self.table, jnp.int32)[i]
        within = jnp.arange(self._key_block, dtype=jnp.int32) + self.keys.base
        token = row[:, None] * self._key_block + within[None, :]
        absent = row == self.keys.size // self._key_block
        return jnp.where(absent[:, None], num_keys, token).reshape(-1)

    def _start(self, i):
        return (i // self._per_phase) * self.keys.per_phase + (i % self._per_phase) * self.advance

    def rectangles(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (first query, stop, first key, stop) for each block and each range of keys that it visits.

        Queries and keys must be in the order of the sequence.
        """
        for i in range(self.num_blocks):
            query = self.queries.base + i * self.block
            if self.queries.listed is not None:
                query = int(self.queries.listed[i * self.block])
            starts, length = [self._start(i)], self.length
            if self.table is not None:
                length = self._key_block
                starts = [int(k) * length for k in self.table[i] if k * length < self.keys.size]
            for start in starts:
                key = self.keys.base + start
                yield query, query + self.block, key, key + length

    def take(self, x: Array, i, axis: int) -> Array:
        """The entries of x, one for each arranged key, that block i visits."""
        if self.table is None:
            return lax.dynamic_slice_in_dim(x, self._start(i), self.length, axis)
        row = jnp.asarray(self.table, jnp.int32)[i]
        blocks = x.reshape(*x.shape[:axis], -1, self._key_block, *x.shape[axis + 1 :])
        taken = jnp.take(blocks, row, axis=axis, mode="fill", fill_value=0)
        return taken.reshape(*x.shape[:axis], self.length, *x.shape[axis + 1 :])

    def add(self, total: Array, i, part: Array) -> Array:
        """`total` (..., keys) with `part` (..., length) added at the keys that block i visits."""
        if self.table is None:
            axis, start = total.ndim - 1, self._start(i)
            old = lax.dynamic_slice_in_dim(total, start, self.length, axis)
            return lax.dynamic_update_slice_in_dim(total, old + part, start, axis)
        row = jnp.asarray(self.table, jnp.int32)[i]
        blocks = total.reshape(*total.shape[:-1], -1, self._key_block)
        pieces = part.reshape(*part.shape[:-1], -1, self._key_block)
        return blocks.at[..., row, :].add(pieces, mode="drop").reshape(total.shape)

    def take_all(self, x: Array, axis: int) -> Array:
        """`take` for all blocks: the key axis becomes (blocks, length). A band needs only static slices."""
        head, tail = x.shape[:axis], x.shape[axis + 1 :]
        if self.table is not None:
            blocks = x.reshape(*head, -1, self._key_block, *tail)
            taken = jnp.take(blocks, self.table, axis=axis, mode="fill", fill_value=0)
            return taken.reshape(*head, self.num_blocks, self.length, *tail)
        x = x.reshape(*head, self.keys.phases, self.keys.per_phase, *tail)
        if self.advance == 0:
            x = jnp.broadcast_to(
                jnp.expand_dims(x, axis + 1), (*head, self.keys.phases, self._per_phase, *x.shape[axis + 1 :])
            )
            return x.reshape(*head, self.num_blocks, self.length, *tail)
        count = -(-self.length // self.block)
        pad = [(0, 0)] * x.ndim
        pad[axis + 1] = (0, (self._per_phase + count - 1) * self.block - self.keys.per_phase)
        x = jnp.pad(x, pad).reshape(*head, self.keys.phases, -1, self.block, *tail)
        shifted = [lax.slice_in_dim(x, j, j + self._per_phase, axis=axis + 1) for j in range(count)]
        taken = lax.slice_in_dim(jnp.concatenate(shifted, axis + 2), 0, self.length, axis=axis + 2)
        return taken.reshape(*head, self.num_blocks, self.length, *tail)

    def add_all(self, parts: Array) -> Array:
        """`add` for all blocks, the transpose of `take_all`: (..., blocks, length) becomes (..., keys)."""
        head = parts.shape[:-2]
        if self.table is not None:
            pieces = parts.reshape(*head, *self.table.shape, self._key_block)
            total = jnp.zeros((*head, self.keys.size // self._key_block, self._key_block), parts.dtype)
            return total.at[..., self.table, :].add(pieces, mode="drop").reshape(*head, self.keys.size)
        parts = parts.reshape(*head, self.keys.phases, self._per_phase, self.length)
        if self.advance == 0:
            return parts.sum(-2).reshape(*head, self.keys.size)
        count = -(-self.length // self.block)
        parts = jnp.pad(parts, [(0, 0)] * (parts.ndim - 1) + [(0, count * self.block - self.length)])
        total = jnp.zeros((*head, self.keys.phases, self._per_phase + count - 1, self.block), parts.dtype)
        for j in range(count):
            piece = parts[..., j * self.block : (j + 1) * self.block]
            total = total + jnp.pad(piece, [(0, 0)] * (piece.ndim - 2) + [(j, count - 1 - j), (0, 0)])
        total = total.reshape(*head, self.keys.phases, -1)[..., : self.keys.per_phase]
        return total.reshape(*head, self.keys.size)

    def split_queries(self, x: Array, axis: int) -> Array:
        """Splits the axis of the arranged queries into (blocks, block)."""
        return x.reshape(*x.shape[:axis], self.num_blocks, self.block, *x.shape[axis + 1 :])


def _block(query_block: QueryBlock, width: int, longest: int) -> int:
    return max(1, min(query_block(width), longest))


def band(
    call: Extent, query_block: QueryBlock, left: int, right: int, rule: Rule | None, dilation: int = 1
) -> Part:
    """Queries that see `left` keys before and `right` keys after their own position, `dilation` apart."""
    first = call.query_offset // dilation
    count = (call.query_offset + call.num_queries - 1) // dilation - first + 1
    # Cut off what lies beyond the keys.
    before = max(0, min(left, first + count - 1))
    after = 0 if call.is_causal else max(0, min(right, -(-call.num_keys // dilation) - 1 - first))
    block = _block(query_block, before + after, count)
    length = block + before + after
    if length >= 64:  # fill whole vector registers
        before += -length % 16
        length += -length % 16
    blocks = -(-count // block)
    queries = Arrangement(dilation, blocks * block, 1, dilation, first * dilation - call.query_offset)
    keys = Arrangement(dilation, (blocks - 1) * block + length, 1, dilation, (first - before) * dilation)
    return Part(queries, keys, block, length, block, rule)


def aligned_bands(
    call: Extent, query_block: QueryBlock, size: int, before: int, after: int, rule: Rule | None
) -> Part:
    """Buckets of `size`, aligned to absolute positions: a query sees its own bucket and those before and after it."""
    shift = call.first_position % size
    after = 0 if call.is_causal else after
    together = max(1, min(query_block((before + after) * size), call.num_queries + shift) // size)
    block = size * together
    blocks = -(-(call.num_queries + shift) // block)
    length = (before + after) * size + block
    queries = Arrangement(1, blocks * block, base=-shift)
    keys = Arrangement(1, (blocks - 1) * block + length, base=call.query_offset - shift - before * size)
    return Part(queries, keys, block, length, block, rule)


def separate_blocks(call: Extent, query_block: QueryBlock, size: int, rule: Rule | None) -> Part:
    """Blocks of `size`, aligned to absolute positions, that see only themselves."""
    block = max(d for d in range(1, size + 1) if size % d == 0 and d <= query_block(size))
    if block < 32:
        return aligned_bands(call, query_block, size, 0, 0, rule)
    shift = call.first_position % size
    phases = -(-(call.num_queries + shift) // size)
    queries = Arrangement(phases, size, size, base=-shift)
    keys = Arrangement(phases, size, size, base=call.query_offset - shift)
    return Part(queries, keys, block, size, 0, rule)


def dense(
    query_block: QueryBlock,
    queries: tuple[int, int],
    keys: tuple[int, int] | np.ndarray,
    rule: Rule | None,
) -> Part:
    """Queries (start, stop), in blocks, that visit all keys (start, stop), or all listed keys."""
    start, stop = queries
    if isinstance(keys, np.ndarray):
        key_order = Arrangement(1, keys.size, listed=keys)
    else:
        key_order = Arrangement(1, keys[1] - keys[0], base=keys[0])
    block = _block(query_block, key_order.size, stop - start)
    blocks = -(-(stop - start) // block)
    return Part(Arrangement(1, blocks * block, base=start), key_order, block, key_order.size, 0, rule)


def columns(call: Extent, query_block: QueryBlock, stride: int, rule: Rule | None) -> Part:
    """Queries that see all keys a multiple of `stride` away: one dense rectangle per phase."""
    first = call.query_offset // stride
    count = (call.query_offset + call.num_queries - 1) // stride - first + 1
    per_key_phase = -(-call.num_keys // stride)
    block = _block(query_block, per_key_phase, count)
    blocks = -(-count // block)
    queries = Arrangement(stride, blocks * block, 1, stride, first * stride - call.query_offset)
    keys = Arrangement(stride, per_key_phase, 1, stride)
    return Part(queries, keys, block, per_key_phase, 0, rule)


def tables(call: Extent, block: int, lists: list[np.ndarray]) -> list[Part]:
    """Parts for lists of key blocks. Lists of similar length share a part, so that short ones stay cheap.

    lists[i] holds the absolute numbers of the key blocks that the i-th block of queries sees, where block 0 contains
    query 0. Blocks of queries that see no key are left out: their rows remain zero.
    """
    assert call.key_offset is not None
    query_shift, key_shift = call.first_position % block, call.key_offset % block
    first_block = call.key_offset // block
    num_key_blocks = -(-(call.num_keys + key_shift) // block)
    keys = Arrangement(1, num_key_blocks * block, base=-key_shift)
    kept = [row[(row >= first_block) & (row < first_block + num_key_blocks)] - first_block for row in lists]
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(kept):
        if row.size:
            groups.setdefault(1 << int(row.size - 1).bit_length(), []).append(i)
    parts = []
    for members in groups.values():
        longest = max(kept[i].size for i in members)
        table = np.full((len(members), longest), num_key_blocks)
        for n, i in enumerate(members):
            table[n, : kept[i].size] = kept[i]
        tokens = (np.asarray(members)[:, None] * block + np.arange(block) - query_shift).reshape(-1)
        queries = Arrangement(1, tokens.size, listed=tokens)
        parts.append(Part(queries, keys, block, longest * block, 0, None, table))
    return parts
