"""The steps of a call of block-sparse attention, worked out in Python from shapes and lists alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int

from pallas_kernels.tpu.core.chips import MIB, resolve_chip, vmem_limit, vmem_mib
from pallas_kernels.tpu.core.distances import COPIES, RelativeBias
from pallas_kernels.tpu.core.heads import LANES, HeadLayout, layout_of
from pallas_kernels.tpu.core.inputs import Shaped, check_attention, check_multiple_of_128

#: Which keys queries see, from positions of queries (1, rows) and of keys (rows, 1).
PositionMask = Callable[[Any, Any], Any]

#: Bits in a word of scalar memory.
WORD = 32
#: Queries that share one product.
TILE = 128
#: Pairs of blocks per launch: two numbers each, 512 KiB, which leaves half of a scalar memory of 1 MiB free.
MAX_PAIRS = 1 << 16


class Granules(NamedTuple):
    """Visibility that changes only from one granule of `size` positions to the next, as bits for each listed pair.

    Attributes:
      size: positions in a granule; granules start at multiples of it.
      bits: one number for each block of queries and each block of keys that it reads. Bit i * columns + j is set iff
        the i-th granule of queries that the pair of blocks touches sees the j-th granule of keys.
    """

    size: int
    bits: tuple[tuple[int, ...], ...]

    @staticmethod
    def touched(rows: int, size: int) -> int:
        """Returns the largest number of granules that `rows` consecutive positions touch."""
        return 1 + (rows + size - 2) // size


class ChosenKeys(NamedTuple):
    """Runs of keys to which each query is limited, in addition to the mask.

    Attributes:
      size: keys in a run.
      runs: runs of a query, some of which may begin past the last key.
      aligned: whether all begin at multiples of the size.
    """

    size: int
    runs: int
    aligned: bool


class BlockSteps(NamedTuple):
    """Grid steps of one launch, for blocks `first` to `stop` of queries (or of keys).

    Attributes:
      own, other: for each step, the block whose result it adds to, and the block that it reads; -1 if it reads no
        block.
      words: the pairs' bits, 32 in each word.
    """

    first: int
    stop: int
    own: Int[np.ndarray, " steps"]
    other: Int[np.ndarray, " steps"]
    words: Int[np.ndarray, " words"] | None


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """Everything static about one call.

    Attributes:
      queries, keys: lengths of the sequences.
      block_q, block_k: rows in a block.
      rows: for each block of queries, the blocks of keys that it reads.
      granules: which keys a query sees inside those blocks, from bits; None for all.
      layout: how heads lie in lanes.
      vmem_limit: in bytes, to request from the compiler; None requests no limit.
      fused: whether one kernel computes the gradients of queries, keys and values.
      mask: which keys a query sees inside those blocks, from positions; None for all.
      query_position, key_position: positions of the first query and the first key.
      shifted: whether a number known only at run time is added to both positions.
      causal: whether a query sees only keys up to its position. That number is then added to the queries' positions
        only.
      segments: whether queries and keys have segment ids.
      chosen: the runs of keys that queries see; None for all keys.
      bias: what is added to the scores by distance; None for nothing.
      scale: multiplies the scores; positive.
      logits_soft_cap: bounds the scaled scores; None leaves them unbounded.
      interpret: passed to `pl.pallas_call`.
    """

    queries: int
    keys: int
    block_q: int
    block_k: int
    rows: tuple[tuple[int, ...], ...]
    granules: Granules | None
    layout: HeadLayout
    vmem_limit: int | None
    fused: bool = False
    mask: PositionMask | None = None
    query_position: int = 0
    key_position: int = 0
    shifted: bool = False
    causal: bool = False
    segments: bool = False
    chosen: ChosenKeys | None = None
    bias: RelativeBias | None = None
    scale: float = 1.0
    logits_soft_cap: float | None = None
    interpret: bool | pltpu.InterpretParams = False

    @property
    def cap(self) -> float | None:
        """The bound on unscaled scores, which the kernels work with."""
        return None if self.logits_soft_cap is None else self.logits_soft_cap / self.scale

    @property
    def units(self) -> int:
        """The number of products in a pair of blocks: one for each tile of queries and head."""
        return self.block_q // TILE * self.layout.packed

    @property
    def granulated(self) -> bool:
        """Whether each run of keys that a query chooses is a whole number of rows of a block of keys."""
        chosen = self.chosen
        return chosen is not None and chosen.aligned and self.block_k % chosen.size == chosen.size % 8 == 0

    @property
    def bias_extent(self) -> tuple[int, int]:
        """The first distance and the number of distances in a table, which repeats its end values for far blocks.

        The table's distances are smaller than those between positions by the remainder of the positions' offset modulo
        the lanes.
        """
        assert self.bias is not None
        around = self.block_q + self.block_k
        first = (self.bias.first - around - LANES) // LANES * LANES
        stop = self.bias.first + self.bias.distances + COPIES + around
        return first, -(-(stop - first) // LANES) * LANES

    @property
    def bias_operand(self) -> tuple[int, int]:
        """Rows and lanes of a tile of the bias; see `core.distances.lay_out`."""
        assert self.bias is not None
        return self.bias.operand(self.layout, self.bias_extent[1])

    @property
    def bias_array(self) -> tuple[int, int, int]:
        """The shape of the bias of one pair of blocks; see `core.distances`."""
        return self.layout.packed, self.block_q + self.block_k - TILE, TILE

    @property
    def bias_bytes(self) -> int:
        """VMEM of the bias in the backward pass: operand and gradient, and both arrays of a pair."""
        if self.bias is None:
            return 0
        operand = self.bias.operand_bytes(self.layout, self.bias_extent[1])
        return 2 * operand + 8 * math.prod(self.bias_array)

    @property
    def words(self) -> int:
        """Words that hold the bits of one pair."""
        if self.granules is None:
            return 0
        return -(-self.granule_rows * self.granule_columns // WORD)

    @property
    def granule_rows(self) -> int:
        """Maximum number of granules of queries that a pair touches."""
        assert self.granules is not None
        return Granules.touched(self.block_q, self.granules.size)

    @property
    def granule_columns(self) -> int:
        """Maximum number of granules of keys that a pair touches."""
        assert self.granules is not None
        return Granules.touched(self.block_k, self.granules.size)

    @property
    def pairs_in_a_launch(self) -> int:
        """Pairs of blocks, with their bits, that one launch lists in scalar memory."""
        return 2 * MAX_PAIRS // (2 + self.words)

    @property
    def can_fuse(self) -> bool:
        """Whether one launch by blocks of keys can compute all gradients: it visits every block of queries and of
        keys."""
        every = all(self.rows) and all(self.listed(True))
        return every and sum(map(len, self.rows)) <= self.pairs_in_a_launch

    def fused_bytes(self, itemsize: int) -> int:
        """What that kernel holds in VMEM beyond what two kernels hold: the gradient of all queries in float32, a block
        of the result, and the gradients of the bias in all query tiles of a key tile."""
        group = self.layout.group
        rows = len(self.rows) * self.block_q * group
        held = self.layout.width * (4 * rows + self.block_q * itemsize)
        if self.bias is not None:
            held += (group - 1) * self.bias.operand_bytes(self.layout, self.bias_extent[1])
        return held

    def listed(self, by_key: bool) -> list[list[tuple[int, int]]]:
        """Returns, for each block of queries (or of keys), the blocks that it reads, with each pair's bits."""
        bits = None if self.granules is None else self.granules.bits
        lists: list[list[tuple[int, int]]]
        lists = [[] for _ in range(-(-self.keys // self.block_k) if by_key else len(self.rows))]
        for q, row in enumerate(self.rows):
            for n, k in enumerate(row):
                lists[k if by_key else q].append((q if by_key else k, 0 if bits is None else bits[q][n]))
        return lists

    def pieces(self, by_key: bool) -> Iterator[BlockSteps]:
        """Yields the steps, divided between blocks into launches whose lists fit in scalar memory."""
        pending: list[tuple[int, int, int]] = []
        first = 0
        for own, pairs in enumerate(self.listed(by_key)):
            steps = [(own, other, bits) for other, bits in pairs] or [(own, -1, 0)]
            if len(pending) + len(steps) > self.pairs_in_a_launch:
                yield self._steps(first, own, pending)
                pending, first = [], own
            pending += steps
        yield self._steps(first, pending[-1][0] + 1, pending)

    def _steps(self, first: int, stop: int, listed: list[tuple[int, int, int]]) -> BlockSteps:
        own, other = (np.asarray([step[n] for step in listed], np.int32) for n in (0, 1))
        words = None
        if self.granules is not None:
            mask = (1 << WORD) - 1
            split = [[bits >> WORD * n & mask for n in range(self.words)] for _, _, bits in listed]
            words = np.asarray(split, np.uint32).view(np.int32).reshape(-1)
        return BlockSteps(first, stop, own, other, words)

    def check_lists(self) -> None:
        """Raises ValueError if a single block's list does not fit in scalar memory."""
        limit = self.pairs_in_a_launch
        longest_by_query = max(len(row) for row in self.rows)
        longest_by_key = max(
            np.bincount(np.concatenate([np.asarray(row, int) for row in self.rows])), default=0
        )
        for longest, what in ((longest_by_query, "queries"), (longest_by_key, "keys")):
            if longest > limit:
                raise ValueError(
                    f"a block of {what} pairs with {longest} others, but scalar memory holds {limit}: choose larger "
                    "blocks"
                )


def pair_bytes(block_q: int, block_k: int, width: int, itemsize: int) -> int:
    """Returns the VMEM of a step of the backward pass, which needs more than the forward pass: double-buffered blocks,
    sums, and the scores in flight."""
    rows = (2 * block_q + 4 * block_k) * width * itemsize
    return 2 * rows + 2 * max(block_q, block_k) * width * 4 + 2 * 8 * 4 * block_q + 8 * block_k * 128 * 4


def _check_key_blocks(rows, blocks_q: int, blocks_k: int, granules: Granules | None) -> None:
    if len(rows) != blocks_q:
        raise ValueError(
            f"key_blocks must have a list for each of {blocks_q} blocks of queries, got {len(rows)}"
        )
    for number, row in enumerate(rows):
        if any(k < 0 or k >= blocks_k for k in row) or len(set(row)) != len(row):
            raise ValueError(
                f"key_blocks[{number}] must name blocks from 0 to {blocks_k - 1}, each once, got {list(row)[:8]}"
            )
    if granules is not None and [len(bits) for bits in granules.bits] != [len(row) for row in rows]:
        raise ValueError("granules must hold bits for each block that key_blocks lists")


def plan_block(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    *,
    key_blocks: Sequence[Sequence[int]],
    block_q: int,
    block_k: int,
    granules: Granules | None = None,
    chosen_runs: int = 0,
    bias: RelativeBias | None = None,
    chip: str | None = None,
) -> BlockCall:
    """Returns the part of a call that shapes, dtypes and lists determine; arguments as for `block_attention`.

    Raises:
      ValueError, NotImplementedError: as `block_attention`, for all errors in shapes, dtypes and lists.
    """
    check_attention(query, key, value)
    chip = resolve_chip(chip, query)
    check_multiple_of_128(block_q=block_q, block_k=block_k)
    _, queries, heads, head_dim = query.shape
    _, keys, key_heads, _ = key.shape
    rows = tuple(tuple(int(k) for k in row) for row in key_blocks)
    _check_key_blocks(rows, -(-queries // block_q), -(-keys // block_k), granules)
    layout = layout_of(heads, key_heads, head_dim)
    needed = pair_bytes(block_q, block_k, layout.width, query.dtype.itemsize)
    needed += 2 * 4 * layout.packed * chosen_runs * block_q
    call = BlockCall(queries, keys, block_q, block_k, rows, granules, layout, None, bias=bias)
    call.check_lists()
    needed += call.bias_bytes
    held = call.fused_bytes(query.dtype.itemsize)
    fused = needed + held <= vmem_mib(chip) * MIB and call.can_fuse
    needed += held if fused else 0
    limit = vmem_limit("block_attention", needed, chip, "choose smaller blocks")
    return dataclasses.replace(call, vmem_limit=limit, fused=fused)
