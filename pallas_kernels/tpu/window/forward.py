"""The forward kernel of sliding-window attention: one softmax pass over the window of each tile of queries.

Scores are stored transposed (keys in rows, queries in lanes). The softmax then reduces over rows, which needs no
shuffle between lanes, and its statistics are rows that can be stored directly.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import EMPTY, LOG2E, MASKED
from pallas_kernels.tpu.core.pipeline import pipelined
from pallas_kernels.tpu.window.bias import WindowBias, operand_spec, scratch_shape
from pallas_kernels.tpu.window.plan import WindowCall
from pallas_kernels.tpu.window.tiles import WindowTiles, key_specs, pairs_computed, segment_specs
from pallas_kernels.varying import result_like


def _forward_kernel(*refs, call: WindowCall, segments: bool):
    plan, layout, factor = call.forward, call.layout, call.scale * LOG2E
    named = iter(refs)
    query = next(named)
    keys, values = ({side: next(named) for side in plan.sides} for _ in range(2))
    segment_refs = (next(named), {side: next(named) for side in plan.sides}) if segments else None
    operand = next(named) if call.bias is not None else None
    output, statistics, *scratch = named
    size = plan.tile
    tiles = WindowTiles(plan, pl.program_id(2), segment_refs, call.cap)
    bias = None
    if call.bias is not None:
        bias = WindowBias(call.bias, layout, tiles, pl.program_id(2), (operand, *scratch))
        bias.open()
    # A query may see no key at all if segment ids or -inf in a table hide them.
    may_see_nothing = segments or (call.bias is not None and call.bias.distances > 0)
    parts: dict[int, list[Array]] = {}

    def score(unit):
        tile, head = divmod(unit, layout.packed)
        rows = slice(tile * size, (tile + 1) * size)
        q = heads.lanes_of_head(query[0, rows, :], head, layout)
        scores = tiles.fold({d: tiles.scores(keys, q, tile, d) for d in plan.distances()}, MASKED)
        return (scores if bias is None else bias.add(scores, head),)

    def normalise(unit, scores):
        top = functools.reduce(jnp.maximum, scores).max(axis=0, keepdims=True)
        weights = [jnp.exp2((s - top) * factor) for s in scores]
        total = functools.reduce(jnp.add, weights).sum(axis=0, keepdims=True)
        return tiles.unfold(weights, query.dtype), top, total

    def read_out(unit, weights, top, total):
        tile, head = divmod(unit, layout.packed)
        rows = slice(tile * size, (tile + 1) * size)
        v = jnp.concatenate([tiles.load(values, tile + d) for d in plan.distances()], axis=0)
        out = heads.transposed_product(v, weights, head, layout)
        out *= arithmetic.reciprocal(total)
        log_total = jnp.log2(total)
        if may_see_nothing:
            seen = top > 0.5 * MASKED
            out = jnp.where(seen, out, 0.0)
            top, log_total = jnp.where(seen, top, 0.0), jnp.where(seen, log_total, EMPTY)
        statistics[0, 0, head : head + 1, rows] = top
        statistics[0, 0, layout.packed + head : layout.packed + head + 1, rows] = log_total
        parts.setdefault(tile, []).append(out)
        if head + 1 == layout.packed:
            whole = jnp.concatenate(parts.pop(tile), axis=0)
            output[0, rows, :] = whole.T.astype(output.dtype)

    pipelined(plan.tiles * layout.packed, score, normalise, read_out)


def _in_order(step):
    """The forward pass visits the blocks in order."""
    return step


def window_forward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B T M"],
    value: Float[Array, "B T M"],
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 T"]] | None,
    bias: Float[Array, "tiles rows lanes"] | None,
    call: WindowCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B tiles statistics T"]]:
    """Returns output and statistics of packed arrays; see `heads.pack` and `arithmetic.log_sum_exp`. `bias` comes from
    `bias.lay_out`.

    The statistics are, for each packed head, the largest unscaled score, then the base-2 log of the sum of exponentials
    relative to it. A single number for both would round away what the backward pass needs when scores are large.
    """
    plan, layout = call.forward, call.layout
    batch, length, lanes = query.shape
    tiles = lanes // layout.width
    by_query = pl.BlockSpec((1, plan.block, layout.width), lambda b, t, i, r: (b, i, t * layout.group + r))
    by_keys = key_specs(plan, layout.width, _in_order)
    specs = [by_query, *by_keys, *by_keys]
    sides = len(plan.sides)
    operands = [query, *[key] * sides, *[value] * sides]
    if segments is not None:
        query_segments, key_segments = segments
        specs += segment_specs(plan, _in_order)
        operands += [query_segments, *[key_segments] * sides]
    if bias is not None:
        specs.append(operand_spec(bias, layout))
        operands.append(bias)
    # The first step of a head writes what its other steps read.
    order: Literal["parallel", "arbitrary"] = "parallel" if bias is None else "arbitrary"
    pairs = pairs_computed(plan, batch, tiles * layout.packed)
    return pl.pallas_call(
        functools.partial(_forward_kernel, call=call, segments=segments is not None),
        grid=(batch, tiles // layout.group, plan.blocks, layout.group),
        in_specs=specs,
        out_specs=[
            by_query,
            pl.BlockSpec(
                (1, 1, 2 * layout.packed, plan.block), lambda b, t, i, r: (b, t * layout.group + r, 0, i)
            ),
        ],
        out_shape=[
            result_like(query, query.shape, query.dtype),
            result_like(query, (batch, tiles, 2 * layout.packed, length), jnp.float32),
        ],
        scratch_shapes=[] if bias is None else [pltpu.VMEM(scratch_shape(plan, layout), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", order, order), vmem_limit_bytes=call.forward_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * layout.head_dim,
            transcendentals=pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (query, key, value, query)),
        ),
        interpret=call.interpret,
        name="window_attention_forward",
    )(*operands)
