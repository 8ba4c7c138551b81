"""Block-sparse attention on TPU: the kernels. A list of key blocks for each block of queries, masks from positions.

Grid steps run over the listed pairs of blocks, read from scalar memory: forward and dq by queries, dk and dv by keys.
Scores are held transposed, keys in rows, as in the sliding-window kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu import heads
from pallas_kernels.tpu.heads import EMPTY, LOG2E, MASKED, NN, NT, Layout

Mask = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """All that is static about one call.

    Attributes:
      queries, keys: lengths of the sequences.
      block_q, block_k: rows of a block; `tile` queries share one product.
      rows: for each block of queries the blocks of keys that it meets.
      mask: of positions, what a query sees inside those blocks; None for all of it.
    """

    queries: int
    keys: int
    block_q: int
    block_k: int
    tile: int
    rows: tuple[tuple[int, ...], ...]
    mask: Mask | None
    segments: bool
    layout: Layout
    scale: float
    vmem_limit: int | None
    interpret: bool | pltpu.InterpretParams

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(block of queries, block of keys) of each step, by queries; -1 stands for no block of keys."""
        listed = [(q, k) for q, row in enumerate(self.rows) for k in (row or (-1,))]
        return tuple(np.asarray(listed, np.int32).T)

    def turned_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(block of keys, block of queries) of each step, by keys; -1 stands for no block of queries."""
        columns: list[list[int]] = [[] for _ in range(-(-self.keys // self.block_k))]
        for q, row in enumerate(self.rows):
            for k in row:
                columns[k].append(q)
        listed = [(k, q) for k, column in enumerate(columns) for q in (column or (-1,))]
        return tuple(np.asarray(listed, np.int32).T)

    @property
    def units(self) -> int:
        return self.block_q // self.tile * self.layout.packed


class _Pair:
    """One pair of blocks inside a kernel: its queries and keys, cleaned of what lies past the ends, and its mask."""

    def __init__(self, call: BlockCall, q_block, k_block, query, key, value, segment_refs):
        self.call, self.q_block, self.k_block, self.query = call, q_block, k_block, query
        self.present = (q_block >= 0) & (k_block >= 0)
        self.first_key = jnp.maximum(k_block, 0) * call.block_k
        self.first_query = jnp.maximum(q_block, 0) * call.block_q
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

    def rows(self, ref, unit: int) -> Float[Array, "tile width"]:
        """One head's queries, or their gradients, of one tile."""
        head, rows = self.split(unit)
        x = self._below(
            ref[0, rows, :],
            self.call.queries - self.first_query - rows.start,
            self.call.queries % self.call.block_q,
        )
        return heads.lanes_of_head(x, head, self.call.layout)

    def seen(self, unit: int):
        """What each query of a tile sees of the keys, keys in rows."""
        _, rows = self.split(unit)
        shape = (self.call.block_k, self.call.tile)
        keys = self.first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        queries = self.first_query + rows.start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        seen = (keys < self.call.keys) & (queries < self.call.queries) & self.present
        if self.call.mask is not None:
            seen &= self.call.mask(queries, keys)
        if self.segments is not None:
            seen &= self.segments[1] == self.segments[0][0, :, rows]
        return seen


def _ends(index_ref, step):
    """Whether a step is the first, and the last, of those of its block."""
    last = pl.num_programs(2) - 1
    own = index_ref[step]
    first = (step == 0) | (index_ref[jnp.maximum(step - 1, 0)] != own)
    return first, (step == last) | (index_ref[jnp.minimum(step + 1, last)] != own)


def _forward_kernel(rows_ref, columns_ref, query, key, value, *refs, call: BlockCall):
    *segment_refs, output, statistics, sums = refs
    step = pl.program_id(2)
    first, last = _ends(rows_ref, step)
    layout, packed, factor = call.layout, call.layout.packed, call.scale * LOG2E

    @pl.when(first)
    def _():
        sums[...] = jnp.zeros_like(sums)
        statistics[0, 0, :packed] = jnp.full_like(statistics[0, 0, :packed], MASKED)
        statistics[0, 0, packed:] = jnp.zeros_like(statistics[0, 0, packed:])

    pair = _Pair(call, rows_ref[step], columns_ref[step], query, key, value, segment_refs)

    def score(unit):
        return (heads.dot(pair.key, pair.rows(query, unit), NT),)

    def weigh(unit, products):
        head, lanes = pair.split(unit)
        seen = pair.seen(unit)
        products = jnp.where(seen, products, MASKED)
        old = statistics[0, 0, head : head + 1, lanes]
        top = jnp.maximum(old, products.max(axis=0, keepdims=True))
        # A row that has seen nothing yet has its maximum at MASKED: masked entries must not weigh 1.
        weights = jnp.where(seen, jnp.exp2((products - top) * factor), 0.0)
        shrink = jnp.exp2((old - top) * factor)
        total = statistics[0, 0, packed + head : packed + head + 1, lanes]
        total = total * shrink + weights.sum(axis=0, keepdims=True)
        statistics[0, 0, packed + head : packed + head + 1, lanes] = total
        statistics[0, 0, head : head + 1, lanes] = top
        return weights.astype(query.dtype), shrink

    def read_out(unit, weights, shrink):
        head, lanes = pair.split(unit)
        place = slice(head * layout.head_dim, (head + 1) * layout.head_dim)
        sums[place, lanes] = sums[place, lanes] * shrink + heads.turned_product(
            pair.value, weights, head, layout
        )

    heads.pipelined(call.units, score, weigh, read_out)

    @pl.when(last)
    def _():
        parts = []
        for head in range(packed):
            total = statistics[0, 0, packed + head : packed + head + 1]
            seen = total > 0.0
            total = jnp.where(seen, total, 1.0)
            parts.append(sums[head * layout.head_dim : (head + 1) * layout.head_dim] / total)
            top = statistics[0, 0, head : head + 1]
            statistics[0, 0, head : head + 1] = jnp.where(seen, top, 0.0)
            statistics[0, 0, packed + head : packed + head + 1] = jnp.where(seen, jnp.log2(total), EMPTY)
        output[0] = jnp.concatenate(parts, axis=0).T.astype(output.dtype)


def _changes(pair: _Pair, call: BlockCall, query, grad, statistics, unit: int):
    """Weights and their scores' gradients of one unit, both transposed, with its queries and output gradients."""
    head, lanes = pair.split(unit)
    packed = call.layout.packed
    q, g = pair.rows(query, unit), pair.rows(grad, unit)
    seen = pair.seen(unit)
    top, log_total, mean = (
        statistics[0, 0, row : row + 1, lanes] for row in (head, packed + head, 2 * packed + head)
    )
    products = heads.dot(pair.key, q, NT)
    weights = jnp.where(seen, jnp.exp2((products - top) * (call.scale * LOG2E) - log_total), 0.0)
    changes = jnp.where(seen, weights * (heads.dot(pair.value, g, NT) - mean), 0.0)
    return weights.astype(query.dtype), changes.astype(query.dtype), q, g


def _query_kernel(rows_ref, columns_ref, query, key, value, grad, statistics, *refs, call: BlockCall):
    *segment_refs, output, sums = refs
    step = pl.program_id(2)
    first, last = _ends(rows_ref, step)

    @pl.when(first)
    def _():
        sums[...] = jnp.zeros_like(sums)

    pair = _Pair(call, rows_ref[step], columns_ref[step], query, key, value, segment_refs)

    def score(unit):
        return (_changes(pair, call, query, grad, statistics, unit)[1],)

    def read_out(unit, changes):
        head, lanes = pair.split(unit)
        place = slice(head * call.layout.head_dim, (head + 1) * call.layout.head_dim)
        sums[place, lanes] += heads.turned_product(pair.key, changes, head, call.layout)

    heads.pipelined(call.units, score, read_out)

    @pl.when(last)
    def _():
        output[0] = (sums[...].T * call.scale).astype(output.dtype)


def _key_kernel(rows_ref, columns_ref, query, key, value, grad, statistics, *refs, call: BlockCall):
    *segment_refs, grad_key, grad_value, key_sums, value_sums = refs
    step, member = pl.program_id(2), pl.program_id(3)
    first, last = _ends(rows_ref, step)

    @pl.when(first & (member == 0))
    def _():
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    pair = _Pair(call, columns_ref[step], rows_ref[step], query, key, value, segment_refs)

    def score(unit):
        return _changes(pair, call, query, grad, statistics, unit)

    def read_out(unit, weights, changes, q, g):
        value_sums[...] += heads.dot(weights, g, NN)
        key_sums[...] += heads.dot(changes, q, NN)

    heads.pipelined(call.units, score, read_out)

    @pl.when(last & (member == call.layout.group - 1))
    def _():
        grad_key[0] = (key_sums[...] * call.scale).astype(grad_key.dtype)
        grad_value[0] = value_sums[...].astype(grad_value.dtype)


def _launch(
    kernel,
    name: str,
    call: BlockCall,
    pairs,
    operands,
    segments,
    out_kinds: Sequence[str],
    scratch,
    by_key: bool,
):
    """One pallas_call over listed pairs. Operand and result kinds: "q" rows of queries, "k" of keys, "s" statistics."""
    layout, group = call.layout, call.layout.group
    query = operands[0][1]
    tiles = query.shape[2] // layout.width
    grid = (
        (query.shape[0], tiles // group, len(pairs[0]), group)
        if by_key
        else (query.shape[0], tiles, len(pairs[0]))
    )

    def place(*ids):
        """(batch, tile of queries, tile of keys, block of queries, block of keys) of a grid step."""
        if by_key:
            b, t, step, r, own, other = ids
            return b, t * group + r, t, jnp.maximum(other[step], 0), own[step]
        b, t, step, own, other = ids
        return b, t, jax.lax.div(t, group), own[step], jnp.maximum(other[step], 0)

    def spec(kind, shape):
        def index(*ids):
            b, tile_q, tile_k, block_q, block_k = place(*ids)
            return {
                "q": (b, block_q, tile_q),
                "k": (b, block_k, tile_k),
                "s": (b, tile_q, 0, block_q),
                "i": (b, 0, block_q),
                "j": (b, 0, block_k),
            }[kind]

        sizes = {
            "q": (1, call.block_q, layout.width),
            "k": (1, call.block_k, layout.width),
            "s": (1, 1, shape[2], call.block_q),
            "i": (1, 1, call.block_q),
            "j": (1, 1, call.block_k),
        }
        return pl.BlockSpec(sizes[kind], index)

    given = [*operands, *zip("ij", segments or ())]
    results = {
        "q": heads.result(query.shape, query.dtype, query),
        "k": heads.result(operands[1][1].shape, query.dtype, query),
        "s": heads.result((query.shape[0], tiles, 2 * layout.packed, query.shape[1]), jnp.float32, query),
    }
    order: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "parallel", "arbitrary", "arbitrary")
    return pl.pallas_call(
        functools.partial(kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[spec(kind, x.shape) for kind, x in given],
            out_specs=[spec(kind, results[kind].shape) for kind in out_kinds],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[results[kind] for kind in out_kinds],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order[: len(grid)], vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name=name,
    )(*heads.alike(*(jnp.asarray(x) for x in pairs), *(x for _, x in given)))


def forward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B S M"],
    value: Float[Array, "B S M"],
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]] | None,
    call: BlockCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B tiles 2*packed T"]]:
    """Output and statistics of packed arrays; see `heads.pack` and `heads.log_sum_exp`."""
    operands = [("q", query), ("k", key), ("k", value)]
    scratch = [(call.layout.width, call.block_q)]
    return _launch(
        _forward_kernel,
        "block_attention_forward",
        call,
        call.pairs(),
        operands,
        segments,
        "qs",
        scratch,
        False,
    )


def backward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B S M"],
    value: Float[Array, "B S M"],
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]] | None,
    grad: Float[Array, "B T L"],
    statistics: Float[Array, "B tiles 3*packed T"],
    call: BlockCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B S M"], Float[Array, "B S M"]]:
    """Gradients of packed arrays; the statistics end with each row's sum of weight times change."""
    operands = [("q", query), ("k", key), ("k", value), ("q", grad), ("s", statistics)]
    width = call.layout.width
    (grad_query,) = _launch(
        _query_kernel,
        "block_attention_backward_query",
        call,
        call.pairs(),
        operands,
        segments,
        "q",
        [(width, call.block_q)],
        False,
    )
    grad_key, grad_value = _launch(
        _key_kernel,
        "block_attention_backward_key",
        call,
        call.turned_pairs(),
        operands,
        segments,
        "kk",
        [(call.block_k, width)] * 2,
        True,
    )
    return grad_query, grad_key, grad_value
