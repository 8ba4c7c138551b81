"""The steps of a call of compress: its readers, its block sizes, and their VMEM.

A reader is one pass over one segment of the history: a part of the sequence (the parts' results are merged by their
log-sum-exp), or the history of one block of a long sequence.
"""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.scores import Score
from pallas_kernels.tpu.core.chips import GRANTED_MIB, MIB, resolve_chip, vmem_limit
from pallas_kernels.tpu.core.heads import LANES, HeadLayout, layout_of
from pallas_kernels.tpu.core.inputs import (
    Shaped,
    check_arrays,
    check_compressed,
    check_multiple_of_128,
)
from pallas_kernels.tpu.core.score_bias import ScoreBias, described

#: Blocks of a sequence start at multiples of this number, the rows of a bfloat16 register.
_ROWS = 16


@dataclasses.dataclass(frozen=True)
class CompressCall:
    """Everything static about one call.

    Attributes:
      length: tokens in the sequence.
      count: compressed tokens. `queries` rounds them up to whole lanes.
      keys: sets of keys, one or two.
      layout: how heads lie in lanes.
      block: tokens in a grid step.
      readers, steps: passes over the history, and grid steps of each.
      stride: reader r begins at block r * stride.
      own_queries: whether every reader has its own queries and bounds; otherwise all share one set.
      slots: two readers whose numbers differ by a multiple of `slots` never read the same block.
      above, below: whether a block may hold tokens at or after the end of a reader's bounds, or before their start.
      vmem_limit: in bytes, to request from the compiler; None requests no limit.
      bias: what is added to the scores of both sets of keys; None for nothing.
      axis_name: the mesh axis that shards the sequence, whose devices read the other parts; None for one device.
      scale: multiplies the scores; positive.
      score: the score function.
      interpret: passed to `pl.pallas_call`.
    """

    length: int
    count: int
    keys: int
    layout: HeadLayout
    block: int
    readers: int
    steps: int
    stride: int
    own_queries: bool
    slots: int
    above: bool
    below: bool
    vmem_limit: int | None
    bias: ScoreBias | None = None
    axis_name: str | None = None
    scale: float = 1.0
    score: Score = "softmax"
    interpret: bool | pltpu.InterpretParams = False

    @property
    def queries(self) -> int:
        """Compressed tokens, rounded up to whole lanes."""
        return _whole_lanes(self.count)

    def history_block(self, reader, step):
        """Returns the block of the history that a reader reads in a step."""
        return reader * self.stride + step

    @property
    def bias_tokens(self) -> int:
        """The bias's number of tokens: the sequence's, or those in each reader's history."""
        return self.steps * self.block if self.own_queries else self.length

    def bias_block(self, reader, step):
        """Returns the block of the bias that a reader uses in a step."""
        return step if self.own_queries else self.history_block(reader, step)

    def bounds(self, ref) -> tuple[Int[Array, ""] | None, Int[Array, ""] | None]:
        """Returns the first row of this step's block that its reader reads, and the first row after it stops; None for
        no bound."""
        first = self.history_block(pl.program_id(2), pl.program_id(3)) * self.block
        return (
            ref[0, 0, 0, 0] - first if self.below else None,
            ref[0, 0, 0, 1] - first if self.above else None,
        )

    def sum_readers(self, x: Float[Array, "B tiles R rows lanes"]) -> Float[Array, "B tiles #R rows lanes"]:
        """Sums over all readers that share a set of queries."""
        x = x if self.own_queries else x.sum(axis=2, keepdims=True)
        return x if self.axis_name is None else jax.lax.psum(x, self.axis_name)


def _whole_lanes(count: int) -> int:
    return -(-count // LANES) * LANES


@dataclasses.dataclass(frozen=True)
class _CompressSizes:
    """What both plans derive from the shapes of a call."""

    length: int
    count: int
    keys: int
    layout: HeadLayout
    head_dim: int
    itemsize: int
    chip: str | None
    bias: ScoreBias | None

    @property
    def queries(self) -> int:
        return _whole_lanes(self.count)

    @property
    def bias_blocks(self) -> int:
        """A block of the bias for each packed head, and the same for its gradient."""
        if self.bias is None:
            return 0
        return 2 * self.layout.packed if self.bias.queries else 1

    def step_bytes(self, block: int, packed: int) -> int:
        """Returns the VMEM of a step of the backward pass, which needs more than the forward pass: double-buffered
        blocks, results, the scores in flight, and the bias's arrays, as large as the scores of a head.

        A float32 product consists of several bfloat16 products, whose parts the compiler keeps for all packed heads.
        """
        keys, queries, itemsize, width = self.keys, self.queries, self.itemsize, self.layout.width
        history = (2 * keys + 2) * block * width * itemsize
        resident = queries * width * (itemsize + 4) * (1 + keys) + 8 * 4 * packed * keys * queries
        scores = 28 * keys if itemsize == 4 else 6
        return 2 * (history + resident) + (scores + 2 * self.bias_blocks) * block * queries * 4

    def largest_block(self, length: int) -> int:
        """Returns the tokens in a grid step, halved until they fit in the VMEM that every kernel is granted.

        Heads of fewer than 32 dimensions count as if they filled a tile without padding. With the number that really
        share a tile, the estimate is too low and the compiler rejects some blocks (4 dimensions, 384 compressed
        tokens).
        """
        packed = max(1, LANES // self.head_dim)
        block, most = 2048, GRANTED_MIB * MIB * 7 // 8
        while block > 128 and (block // 2 >= length or self.step_bytes(block, packed) > most):
            block //= 2
        return block

    def limit(self, block: int, resident: int = 0) -> int | None:
        """Returns the VMEM limit to request for a block, plus `resident` bytes that every step needs.

        Raises:
          ValueError: the chip has too little.
        """
        needed = self.step_bytes(block, self.layout.packed) + resident
        return vmem_limit("compress", needed, self.chip, f"choose a block below {block}")


def _sizes(
    query: Shaped,
    key: Shaped,
    contrast_key: Shaped | None,
    value: Shaped,
    chip: str | None,
    bias: ScoreBias | None,
) -> _CompressSizes:
    """Checks a history against a query (B, M, N, H) or (B, R, M, N, H)."""
    batch, *readers, count, heads, head_dim = query.shape
    rows = math.prod(readers) * count
    flat = jax.ShapeDtypeStruct((batch, rows, heads, head_dim), query.dtype)
    check_arrays({"query": flat, "key": key, "value": value})
    expected = (batch, key.shape[1], heads, head_dim)
    for name, x in (("key", key), ("contrast_key", contrast_key), ("value", value)):
        if x is not None and (x.shape != expected or x.dtype != query.dtype):
            raise ValueError(f"{name} must be {query.dtype} of shape {expected}, got {x.dtype} of {x.shape}")
    check_compressed("query", count)
    layout, keys = layout_of(heads, heads, head_dim), 1 if contrast_key is None else 2
    chip = resolve_chip(chip, query)
    return _CompressSizes(key.shape[1], count, keys, layout, head_dim, query.dtype.itemsize, chip, bias)


def plan_compress(
    query: Shaped,
    key: Shaped,
    contrast_key: Shaped | None,
    value: Shaped,
    *,
    bias: Shaped | None = None,
    mask: Shaped | None = None,
    chip: str | None = None,
    block: int | None = None,
    splits: int | None = None,
) -> CompressCall:
    """Returns the part of a call that shapes and dtypes determine; arguments as for `compress`.

    Raises:
      ValueError, NotImplementedError: as `compress`, for all errors in shapes and dtypes.
    """
    if len(query.shape) != 4:
        raise ValueError(f"query must have shape (batch, length, heads, head_dim), got {query.shape}")
    if block is not None:
        check_multiple_of_128(block=block)
    if splits is not None and splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    kind = described(bias, mask, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    sizes = _sizes(query, key, contrast_key, value, chip, kind)
    length = sizes.length
    size = block or sizes.largest_block(length)
    parts = splits or (1 if math.prod(query.shape) // sizes.count >= 2 * sizes.layout.width else 2)
    # Parts are equal, so each block of keys belongs to one part and its gradient is written once.
    while size > LANES and -(-length // size) % parts:
        size //= 2
    blocks = -(-length // size)
    parts = max(n for n in range(1, parts + 1) if blocks % n == 0)
    return CompressCall(
        length=length,
        count=sizes.count,
        keys=sizes.keys,
        layout=sizes.layout,
        block=size,
        readers=parts,
        steps=blocks // parts,
        stride=blocks // parts,
        own_queries=False,
        slots=1,
        above=length % size != 0,
        below=False,
        vmem_limit=sizes.limit(size),
        bias=kind,
    )


def plan_compress_blocks(
    query: Shaped,
    key: Shaped,
    contrast_key: Shaped | None,
    value: Shaped,
    *,
    block_size: int,
    history_size: int,
    bias: Shaped | None = None,
    chip: str | None = None,
) -> CompressCall:
    """Returns the part of a call that shapes and dtypes determine; arguments as for `compress_blocks`.

    Raises:
      ValueError, NotImplementedError: as `compress_blocks`, for all errors in shapes and dtypes.
    """
    if len(query.shape) != 5:
        raise ValueError(f"query must have shape (batch, blocks, length, heads, head_dim), got {query.shape}")
    readers = query.shape[1]
    needed = history_size + (readers - 1) * block_size
    if readers < 1 or block_size < 1 or history_size < 1 or key.shape[1] < needed:
        raise ValueError(
            f"key must hold history_size + (blocks - 1) * block_size = {history_size} + {readers - 1} * "
            f"{block_size} tokens, got {key.shape[1]}"
        )
    if readers > 1 and block_size % _ROWS:
        raise NotImplementedError(f"block_size must be a multiple of {_ROWS}, got {block_size}")
    *_, count, heads, _ = query.shape
    kind = None
    if bias is not None:
        if bias.shape != (heads, count, history_size):
            raise ValueError(f"bias must have shape {(heads, count, history_size)}, got {bias.shape}")
        kind = ScoreBias(batches=False, heads=heads > 1)
    sizes = _sizes(query, key, contrast_key, value, chip, kind)
    size = sizes.largest_block(history_size)
    if readers > 1:
        size = max(n for n in range(_ROWS, size + 1, _ROWS) if block_size % n == 0)
    stride, steps = max(block_size // size, 1), -(-history_size // size)
    return CompressCall(
        length=sizes.length,
        count=sizes.count,
        keys=sizes.keys,
        layout=sizes.layout,
        block=size,
        readers=readers,
        steps=steps,
        stride=stride,
        own_queries=True,
        slots=min(-(-steps // stride), readers),
        above=history_size % size != 0,
        below=False,
        # All readers share the gradient of a bias, which stays in VMEM.
        vmem_limit=sizes.limit(size, 4 * sizes.bias_blocks * steps * size * sizes.queries),
        bias=kind,
    )
