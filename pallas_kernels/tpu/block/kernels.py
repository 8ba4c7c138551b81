"""Block-sparse attention on TPU: the kernels. A list of key blocks for each block of queries, masks from positions.

Grid steps run over the listed pairs of blocks, read from scalar memory: forward and dq by queries, dk and dv by keys.
Scores are held transposed, keys in rows, as in the sliding-window kernels.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.block.pair import Lists, Pair
from pallas_kernels.tpu.block.plan import BlockCall, Steps
from pallas_kernels.tpu.core import heads
from pallas_kernels.tpu.core.heads import EMPTY, LOG2E, NN, NONE_YET, NT

Segments = tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]] | None


def _forward_kernel(*refs, call: BlockCall, scalars: int):
    lists = Lists(call, refs[:scalars])
    query, key, value, *segment_refs, output, statistics, sums = refs[scalars:]
    first, last = lists.ends()
    layout, packed, factor = call.layout, call.layout.packed, call.scale * LOG2E

    @pl.when(first)
    def _():
        sums[...] = jnp.zeros_like(sums)
        statistics[0, 0, :packed] = jnp.full_like(statistics[0, 0, :packed], NONE_YET)
        statistics[0, 0, packed:] = jnp.zeros_like(statistics[0, 0, packed:])

    def meet():
        pair = Pair(lists, False, query, key, value, segment_refs)

        def score(unit):
            return (heads.dot(pair.key, pair.rows(query, unit), NT),)

        def weigh(unit, products):
            head, lanes = pair.split(unit)
            products = pair.masked(products, unit)
            old = statistics[0, 0, head : head + 1, lanes]
            top = jnp.maximum(old, products.max(axis=0, keepdims=True))
            weights = jnp.exp2((products - top) * factor)
            shrink = jnp.exp2((old - top) * factor)
            total = statistics[0, 0, packed + head : packed + head + 1, lanes]
            total = total * shrink + weights.sum(axis=0, keepdims=True)
            statistics[0, 0, packed + head : packed + head + 1, lanes] = total
            statistics[0, 0, head : head + 1, lanes] = top
            return weights.astype(query.dtype), shrink

        def read_out(unit, weights, shrink):
            head, lanes = pair.split(unit)
            place = pair.lanes_of(unit)
            sums[place, lanes] = sums[place, lanes] * shrink + heads.turned_product(
                pair.value, weights, head, layout
            )

        heads.pipelined(call.units, score, weigh, read_out)

    lists.meet(False, meet)

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


def _changes(pair: Pair, query, grad, statistics, unit: int):
    """Weights and their scores' gradients of one unit, both transposed, with its queries and output gradients."""
    q, g = pair.rows(query, unit), pair.rows(grad, unit)
    top, log_total, mean, rest = pair.statistics(statistics, unit, 4)
    products = pair.masked(heads.dot(pair.key, q, NT), unit)
    weights = jnp.exp2((products - top) * (pair.call.scale * LOG2E) - log_total)
    changes = weights * ((heads.dot(pair.value, g, NT) - mean) - rest)
    return weights, changes, q, g


def _rest_kernel(*refs, call: BlockCall, scalars: int):
    lists = Lists(call, refs[:scalars])
    query, key, value, grad, statistics, *segment_refs, output = refs[scalars:]
    first = lists.ends()[0]

    @pl.when(first)
    def _():
        output[...] = jnp.zeros_like(output)

    def meet():
        pair = Pair(lists, False, query, key, value, segment_refs)

        def score(unit):
            return (_changes(pair, query, grad, statistics, unit)[1],)

        def add(unit, changes):
            head, lanes = pair.split(unit)
            output[0, 0, head : head + 1, lanes] += changes.sum(axis=0, keepdims=True)

        heads.pipelined(call.units, score, add)

    lists.meet(False, meet)


def _query_kernel(*refs, call: BlockCall, scalars: int):
    lists = Lists(call, refs[:scalars])
    query, key, value, grad, statistics, *segment_refs, output, sums = refs[scalars:]
    first, last = lists.ends()

    @pl.when(first)
    def _():
        sums[...] = jnp.zeros_like(sums)

    def meet():
        pair = Pair(lists, False, query, key, value, segment_refs)

        def score(unit):
            return (_changes(pair, query, grad, statistics, unit)[1].astype(query.dtype),)

        def read_out(unit, changes):
            head, lanes = pair.split(unit)
            sums[pair.lanes_of(unit), lanes] += heads.turned_product(pair.key, changes, head, call.layout)

        heads.pipelined(call.units, score, read_out)

    lists.meet(False, meet)

    @pl.when(last)
    def _():
        output[0] = (sums[...].T * call.scale).astype(output.dtype)


def _key_kernel(*refs, call: BlockCall, scalars: int):
    lists = Lists(call, refs[:scalars])
    query, key, value, grad, statistics, *segment_refs, grad_key, grad_value, key_sums, value_sums = refs[
        scalars:
    ]
    member = pl.program_id(3)
    first, last = lists.ends()

    @pl.when(first & (member == 0))
    def _():
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    def meet():
        pair = Pair(lists, True, query, key, value, segment_refs)

        def score(unit):
            weights, changes, q, g = _changes(pair, query, grad, statistics, unit)
            return weights.astype(query.dtype), changes.astype(query.dtype), q, g

        def read_out(unit, weights, changes, q, g):
            value_sums[...] += heads.dot(weights, g, NN)
            key_sums[...] += heads.dot(changes, q, NN)

        heads.pipelined(call.units, score, read_out)

    lists.meet(True, meet)

    @pl.when(last & (member == call.layout.group - 1))
    def _():
        grad_key[0] = (key_sums[...] * call.scale).astype(grad_key.dtype)
        grad_value[0] = value_sums[...].astype(grad_value.dtype)


def _launch(
    kernel,
    name: str,
    call: BlockCall,
    operands,
    segments: Segments,
    shift,
    out_kinds: str,
    scratch,
    by_key: bool,
) -> list[Array]:
    """Runs a kernel over the listed pairs, piece by piece.

    Kinds of operands and results: "q" rows of queries, "k" of keys, "s" statistics, "r" one statistic.
    """
    pieces = [
        _launch_piece(kernel, name, call, steps, operands, segments, shift, out_kinds, scratch, by_key)
        for steps in call.pieces(by_key)
    ]
    if len(pieces) == 1:
        return pieces[0]
    return [
        jnp.concatenate(parts, axis=1 if kind in "qk" else 3) for kind, parts in zip(out_kinds, zip(*pieces))
    ]


def _launch_piece(
    kernel, name, call: BlockCall, steps: Steps, operands, segments, shift, out_kinds, scratch, by_key
):
    layout, group = call.layout, call.layout.group
    query, key = operands[0][1], operands[1][1]
    batch, tiles = query.shape[0], query.shape[2] // layout.width
    grid: tuple[int, ...] = (batch, tiles, len(steps.own))
    if by_key:
        grid = (batch, tiles // group, len(steps.own), group)
    lists = [x for x in (steps.own, steps.other, steps.words) if x is not None]
    scalars = [*(jnp.asarray(x) for x in lists), *([] if shift is None else [shift])]

    def spec(kind, rows, result=False):
        def index(b, t, step, *refs):
            tile_q, tile_k = t, jax.lax.div(t, np.int32(group))
            if by_key:
                tile_q, tile_k, refs = t * group + refs[0], t, refs[1:]
            own, other = refs[0][step] - (steps.first if result else 0), jnp.maximum(refs[1][step], 0)
            block_q, block_k = (other, own) if by_key else (own, other)
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
            "s": (1, 1, rows, call.block_q),
            "i": (1, 1, call.block_q),
            "j": (1, 1, call.block_k),
        }
        return pl.BlockSpec(sizes[kind], index)

    given = [*operands, *zip("ij", segments or ())]
    own_block, own_length = (call.block_k, call.keys) if by_key else (call.block_q, call.queries)
    length = min(steps.stop * own_block, own_length) - steps.first * own_block
    rows = {"s": 2 * layout.packed, "r": layout.packed}
    results = {
        "q": ((batch, length, query.shape[2]), query.dtype),
        "k": ((batch, length, key.shape[2]), query.dtype),
        "s": ((batch, tiles, rows["s"], length), jnp.float32),
        "r": ((batch, tiles, rows["r"], length), jnp.float32),
    }
    order: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "parallel", "arbitrary", "arbitrary")
    return pl.pallas_call(
        functools.partial(kernel, call=call, scalars=len(scalars)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec(kind, x.shape[2]) for kind, x in given],
            out_specs=[spec("s" if kind == "r" else kind, rows.get(kind), True) for kind in out_kinds],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[heads.result(*results[kind], query) for kind in out_kinds],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order[: len(grid)], vmem_limit_bytes=call.vmem_limit
        ),
        interpret=call.interpret,
        name=name,
    )(*heads.alike(*scalars, *(x for _, x in given)))


def forward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B S M"],
    value: Float[Array, "B S M"],
    segments: Segments,
    shift: Int[Array, "1"] | None,
    call: BlockCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B tiles 2*packed T"]]:
    """Output and statistics of packed arrays; see `heads.pack` and `heads.log_sum_exp`."""
    operands = [("q", query), ("k", key), ("k", value)]
    scratch = [(call.layout.width, call.block_q)]
    out, statistics = _launch(
        _forward_kernel, "block_attention_forward", call, operands, segments, shift, "qs", scratch, False
    )
    return out, statistics


def backward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B S M"],
    value: Float[Array, "B S M"],
    segments: Segments,
    shift: Int[Array, "1"] | None,
    grad: Float[Array, "B T L"],
    statistics: Float[Array, "B tiles 2*packed T"],
    mean: Float[Array, "B tiles packed T"],
    grad_log_sum: Float[Array, "B tiles packed T"] | None,
    call: BlockCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B S M"], Float[Array, "B S M"]]:
    """Gradients of packed arrays; `mean` is each row's sum of weight times change, from the rounded output.

    What those sums leave over is measured first: where a softmax is all but one-hot, its derivative is a small
    difference of large numbers, and the rounding of the sums would show in it.
    """
    operands = [("q", query), ("k", key), ("k", value), ("q", grad)]
    width = call.layout.width

    def with_statistics(rest):
        return [*operands, ("s", jnp.concatenate([statistics, mean, rest], axis=2))]

    (rest,) = _launch(
        _rest_kernel,
        "block_attention_backward_rest",
        call,
        with_statistics(jnp.zeros_like(mean)),
        segments,
        shift,
        "r",
        [],
        False,
    )
    operands = with_statistics(rest if grad_log_sum is None else rest - grad_log_sum)
    (grad_query,) = _launch(
        _query_kernel,
        "block_attention_backward_query",
        call,
        operands,
        segments,
        shift,
        "q",
        [(width, call.block_q)],
        False,
    )
    grad_key, grad_value = _launch(
        _key_kernel,
        "block_attention_backward_key",
        call,
        operands,
        segments,
        shift,
        "kk",
        [(call.block_k, width)] * 2,
        True,
    )
    return grad_query, grad_key, grad_value
