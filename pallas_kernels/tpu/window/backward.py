"""The backward kernel of sliding-window attention: one sweep over the sequence computes all three gradients.

A step recomputes its queries' weights over their whole window. The sum over keys that the softmax's derivative needs is
then available, and the statistics are the only result of the forward pass that the step reads. Queries of a
neighbouring block also see the keys near the ends of a block; `key_gradient_sums` adds their contributions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import EMPTY, LOG2E, MASKED, NN, NT
from pallas_kernels.tpu.core.pipeline import pipelined
from pallas_kernels.tpu.window.bias import (
    GradientRefs,
    WindowBias,
    gradient_spec,
    operand_spec,
    scratch_shape,
)
from pallas_kernels.tpu.window.key_gradient_sums import EarlySums, GroupedSums, LateSums, scratch_rows
from pallas_kernels.tpu.window.plan import WindowCall
from pallas_kernels.tpu.window.tiles import WindowTiles, key_specs, pairs_computed, segment_specs
from pallas_kernels.varying import result_like


def _backward_kernel(*refs, call: WindowCall, segments: bool, with_grad_log_sum: bool):
    plan, layout, scale = call.backward, call.layout, call.scale
    named = iter(refs)
    query = next(named)
    keys, values = ({side: next(named) for side in plan.sides} for _ in range(2))
    grad, statistics = next(named), next(named)
    grad_log_sum = next(named) if with_grad_log_sum else None
    segment_refs = (next(named), {side: next(named) for side in plan.sides}) if segments else None
    operand = next(named) if call.bias is not None else None
    grad_query, grad_key, grad_value = (next(named) for _ in range(3))
    grad_operand = next(named) if call.bias is not None else None
    key_scratch, value_scratch, *bias_scratch = named
    size = plan.tile
    kind = GroupedSums if layout.group > 1 else LateSums if plan.late else EarlySums
    key_sums = kind(plan, layout.group, ((value_scratch, grad_value), (key_scratch, grad_key)))
    key_sums.open()

    def meet():
        tiles = WindowTiles(plan, plan.backward_block(key_sums.step), segment_refs, call.cap)
        bias = None
        if call.bias is not None:
            bias_tiles, bias_sums = bias_scratch
            gradient = GradientRefs(grad_operand, bias_sums)
            bias = WindowBias(call.bias, layout, tiles, key_sums.step, (operand, bias_tiles), gradient)
            bias.open()
        parts: dict[int, list[Array]] = {}
        arrays: dict[int, tuple[Array, ...]] = {}
        meets: dict[int, list[list[tuple[int, Array, Array]]]] = {}

        def load(ref, tile):
            x = ref[0, tile * size : (tile + 1) * size, :]
            return arithmetic.rows_below(x, plan.length - tiles.first_row(tile)) if plan.ragged else x

        def score(unit):
            tile, head = divmod(unit, layout.packed)
            q = heads.lanes_of_head(load(query, tile), head, layout)
            g = heads.lanes_of_head(load(grad, tile), head, layout)
            scores, grads = {}, {}
            for d in plan.distances():
                scores[d] = tiles.scores(keys, q, tile, d)
                grads[d] = arithmetic.dot(tiles.load(values, tile + d), g, NT)
            capped = tiles.fold(scores, MASKED)
            # Add the bias here, not in the stage of another unit's softmax, where it would take five times the bundles.
            return capped, capped if bias is None else bias.add(capped, head), tiles.fold(grads, 0.0)

        def differentiate(unit, capped, scores, grads):
            tile, head = divmod(unit, layout.packed)
            rows = slice(tile * size, (tile + 1) * size)
            top = statistics[0, 0, head : head + 1, rows]
            log_total = statistics[0, 0, layout.packed + head : layout.packed + head + 1, rows]
            offset = None if grad_log_sum is None else grad_log_sum[0, 0, head : head + 1, rows]
            if plan.ragged:
                exists = jax.lax.broadcasted_iota(
                    jnp.int32, log_total.shape, 1
                ) < plan.length - tiles.first_row(tile)
                top, log_total = jnp.where(exists, top, 0.0), jnp.where(exists, log_total, EMPTY)
                offset = None if offset is None else jnp.where(exists, offset, 0.0)
            weights = [jnp.exp2((s - top) * (scale * LOG2E) - log_total) for s in scores]
            changes = arithmetic.softmax_changes(weights, grads, offset, query.dtype == jnp.float32)
            if bias is not None:
                bias.add_gradient(changes, head)
            if call.cap is not None:
                changes = [c * arithmetic.soft_cap_slope(s, call.cap) for c, s in zip(changes, capped)]
            return tiles.unfold(weights, query.dtype), tiles.unfold(changes, query.dtype)

        def read_out(unit, weights, changes):
            tile, head = divmod(unit, layout.packed)
            rows = slice(tile * size, (tile + 1) * size)
            k = jnp.concatenate([tiles.load(keys, tile + d) for d in plan.distances()], axis=0)
            out = heads.transposed_product(k, changes, head, layout)
            parts.setdefault(tile, []).append(out * scale)
            if head + 1 == layout.packed:
                grad_query[0, rows, :] = jnp.concatenate(parts.pop(tile), axis=0).T.astype(grad_query.dtype)
            if head == 0:
                arrays[tile] = tuple(
                    x if layout.packed == 1 else x.T for x in (load(grad, tile), load(query, tile))
                )
            for index, d in enumerate(plan.distances()):
                met = meets.setdefault(tile + d, [[] for _ in range(layout.packed)])
                keys_of = slice(index * size, (index + 1) * size)
                met[head].append((tile, weights[keys_of], changes[keys_of]))
            done = tile - plan.before if tile + 1 < plan.tiles else None
            if head + 1 == layout.packed:
                for ready in [t for t in sorted(meets) if done is None or t <= done]:
                    add_to_keys(ready, meets.pop(ready))

        def add_to_keys(tile, met):
            """Adds the contribution of this step's queries to one tile of keys, with one product for each head over all
            queries that see the tile.

            If heads share lanes, the product is transposed, so that its columns are keys, which fill the matrix unit,
            instead of one head's lanes.
            """
            sums = []
            for kind in range(2):
                parts = []
                for head, pairs in enumerate(met):
                    factor = jnp.concatenate([pair[1 + kind] for pair in pairs], axis=1)
                    xs = [arrays[pair[0]][kind] for pair in pairs]
                    if layout.packed == 1:
                        parts.append(arithmetic.dot(factor, jnp.concatenate(xs, axis=0), NN))
                        continue
                    lanes = slice(head * layout.head_dim, (head + 1) * layout.head_dim)
                    x = jnp.concatenate([x[lanes] for x in xs], axis=1)
                    parts.append(arithmetic.dot(x, factor, NT))
                sums.append(parts[0] if layout.packed == 1 else jnp.concatenate(parts, axis=0).T)
            key_sums.add(tile, (sums[0], sums[1] * scale))

        pipelined(plan.tiles * layout.packed, score, differentiate, read_out)
        if bias is not None:
            bias.close()

    if plan.late:
        pl.when(key_sums.step < plan.blocks)(meet)
    else:
        meet()
    key_sums.close()


def window_backward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B T M"],
    value: Float[Array, "B T M"],
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 T"]] | None,
    bias: Float[Array, "tiles rows lanes"] | None,
    statistics: Float[Array, "B tiles statistics T"],
    grad_log_sum: Float[Array, "B tiles packed T"] | None,
    grad: Float[Array, "B T L"],
    call: WindowCall,
) -> tuple[
    Float[Array, "B T L"],
    Float[Array, "B T M"],
    Float[Array, "B T M"],
    Float[Array, "tiles rows lanes"] | None,
]:
    """Returns the gradients of packed arrays and of the bias from `bias.lay_out`, given the gradients of the output and
    of the natural log-sum-exp."""
    plan, layout = call.backward, call.layout
    batch, _length, lanes = query.shape
    tiles = lanes // layout.width

    def head_of(t, i, r):
        # The extra last step only writes the gradients of keys and values, and stays on the previous block of queries.
        return t * layout.group + (jnp.where(i == plan.blocks, layout.group - 1, r) if plan.late else r)

    def by_statistic(rows):
        return pl.BlockSpec(
            (1, 1, rows, plan.block),
            lambda b, t, i, r: (b, head_of(t, i, r), 0, plan.backward_block(i)),
        )

    by_query = pl.BlockSpec(
        (1, plan.block, layout.width), lambda b, t, i, r: (b, plan.backward_block(i), head_of(t, i, r))
    )
    by_key = pl.BlockSpec((1, plan.block, layout.width), lambda b, t, i, r: (b, plan.written_block(i), t))
    by_keys = key_specs(plan, layout.width, plan.backward_block)
    specs = [by_query, *by_keys, *by_keys, by_query, by_statistic(2 * layout.packed)]
    sides = len(plan.sides)
    operands = [query, *[key] * sides, *[value] * sides, grad, statistics]
    if grad_log_sum is not None:
        specs.append(by_statistic(layout.packed))
        operands.append(grad_log_sum)
    if segments is not None:
        query_segments, key_segments = segments
        specs += segment_specs(plan, plan.backward_block)
        operands += [query_segments, *[key_segments] * sides]
    results = [result_like(query, x.shape, x.dtype) for x in (query, key, value)]
    result_specs = [by_query, by_key, by_key]
    scratch = [pltpu.VMEM((scratch_rows(plan, layout.group), layout.width), jnp.float32)] * 2
    if bias is not None:
        specs.append(operand_spec(bias, layout))
        operands.append(bias)
        results.append(result_like(query, (batch, *bias.shape), jnp.float32))
        result_specs.append(gradient_spec(bias, layout))
        scratch += [pltpu.VMEM(scratch_shape(plan, layout), jnp.float32)] * 2
    pairs = pairs_computed(plan, batch, tiles * layout.packed)
    touched = (query, key, value, grad, query, key, value)
    grad_query, grad_key, grad_value, *grad_bias = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            call=call,
            segments=segments is not None,
            with_grad_log_sum=grad_log_sum is not None,
        ),
        grid=(batch, tiles // layout.group, plan.backward_steps, layout.group),
        in_specs=specs,
        out_specs=result_specs,
        out_shape=results,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=call.backward_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * pairs * layout.head_dim,
            transcendentals=pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in touched),
        ),
        interpret=call.interpret,
        name="window_attention_backward",
    )(*operands)
    return grad_query, grad_key, grad_value, grad_bias[0].sum(axis=0) * call.scale if grad_bias else None
