"""Sliding-window attention, backward: one sweep over the sequence gives dq, dk and dv.

A step recomputes the weights of its queries over their whole window, so that the sum over keys that the
softmax's derivative needs is at hand, and nothing of the forward pass is read again but its statistics. Keys
near a block's end are also seen by the next block's queries: their gradients wait in VMEM and are written
one step late.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu import heads
from pallas_kernels.tpu.heads import EMPTY, LOG2E, MASKED, NN, NT, Layout
from pallas_kernels.tpu.window_forward import (
    WindowTiles,
    key_specs,
    segment_specs,
)
from pallas_kernels.tpu.window_plan import WindowPlan


def _backward_kernel(*refs, plan: WindowPlan, layout: Layout, scale: float, segments: bool, shifted: bool):
    named = iter(refs)
    query = next(named)
    keys, values = ({side: next(named) for side in plan.sides} for _ in range(2))
    grad, statistics = next(named), next(named)
    shift = next(named) if shifted else None
    if segments:
        query_segments = next(named)
        key_segments = {side: next(named) for side in plan.sides}
    grad_query, grad_key, grad_value, late_key, late_value = named
    size, last = plan.tile, plan.blocks
    step, member = pl.program_id(2), pl.program_id(3)
    grouped = layout.group > 1
    lates = ((late_value, grad_value), (late_key, grad_key))

    if grouped:
        # The scratch rows are block step - 1, block step and what lies after it; every member of a group
        # adds to them.
        kept = plan.block + plan.after * size

        @pl.when(member == 0)
        def _():
            for held, _ in lates:
                held[:kept] = jnp.where(step > 0, held[plan.block :], 0.0)
                held[kept:] = jnp.zeros_like(held[kept:])

    @pl.when(step < last)
    def _():
        shared = WindowTiles(plan, layout, step)
        columns: dict[int, Array] = {}
        parts: dict[int, list[Array]] = {}
        meets: dict[int, list[tuple[Array, Array, Array, Array]]] = {}

        def key_segment(tile):
            if tile not in columns:
                side, row = shared.place(tile)
                columns[tile] = heads.column(key_segments[side][0, :, row : row + size], size)
            return columns[tile]

        def load(ref, tile):
            x = ref[0, tile * size : (tile + 1) * size, :]
            return heads.rows_below(x, plan.length - shared.first_row(tile)) if plan.ragged else x

        def score(unit):
            tile, head = divmod(unit, layout.packed)
            rows = slice(tile * size, (tile + 1) * size)
            q = heads.lanes_of_head(load(query, tile), head, layout)
            g = heads.lanes_of_head(load(grad, tile), head, layout)
            scores, grads = {}, {}
            for d in plan.distances():
                s = shared.guard(heads.dot(shared.load(keys, tile + d), q, NT), tile + d)
                if segments:
                    s = jnp.where(key_segment(tile + d) == query_segments[0, :, rows], s, MASKED)
                scores[d] = s
                grads[d] = heads.dot(shared.load(values, tile + d), g, NT)
            return shared.fold(scores, MASKED), shared.fold(grads, 0.0), q, g

        def differentiate(unit, scores, grads, q, g):
            tile, head = divmod(unit, layout.packed)
            rows = slice(tile * size, (tile + 1) * size)
            top = statistics[0, 0, head : head + 1, rows]
            log_total = statistics[0, 0, layout.packed + head : layout.packed + head + 1, rows]
            offset = None if shift is None else shift[0, 0, head : head + 1, rows]
            if plan.ragged:
                there = jax.lax.broadcasted_iota(
                    jnp.int32, log_total.shape, 1
                ) < plan.length - shared.first_row(tile)
                top, log_total = jnp.where(there, top, 0.0), jnp.where(there, log_total, EMPTY)
                offset = None if offset is None else jnp.where(there, offset, 0.0)
            weights = [jnp.exp2((s - top) * (scale * LOG2E) - log_total) for s in scores]
            changes = heads.softmax_changes(weights, grads, offset, query.dtype == jnp.float32)
            return shared.unfold(weights, query.dtype), shared.unfold(changes, query.dtype), q, g

        def read_out(unit, weights, changes, q, g):
            tile, head = divmod(unit, layout.packed)
            rows = slice(tile * size, (tile + 1) * size)
            k = jnp.concatenate([shared.load(keys, tile + d) for d in plan.distances()], axis=0)
            change = jnp.concatenate([changes[d] for d in plan.distances()], axis=0)
            out = heads.turned_product(k, change, head, layout)
            parts.setdefault(tile, []).append(out * scale)
            if head + 1 == layout.packed:
                grad_query[0, rows, :] = jnp.concatenate(parts.pop(tile), axis=0).T.astype(grad_query.dtype)
            for d in plan.distances():
                meets.setdefault(tile + d, []).append((weights[d], g, changes[d], q))
            done = tile - plan.before if tile + 1 < plan.tiles else None
            if head + 1 == layout.packed:
                for ready in [t for t in sorted(meets) if done is None or t <= done]:
                    keep(ready, meets.pop(ready))

        def keep(tile, met):
            """Adds what this step's queries give to one tile of keys: one product over all those that see
            it."""
            weights, grads, changes, queries = (
                jnp.concatenate(x, axis=a) for x, a in zip(zip(*met), (1, 0, 1, 0))
            )
            sums = heads.dot(weights, grads, NN), heads.dot(changes, queries, NN) * scale
            place = slice(plan.block + tile * size, plan.block + (tile + 1) * size)
            for (held, out), new in zip(lates, sums):
                if grouped:
                    held[place] += new
                elif tile < 0:
                    out[0, place] = (held[place] + new).astype(out.dtype)
                elif tile < plan.after:
                    held[tile * size : (tile + 1) * size] = new + jnp.where(step > 0, held[place], 0.0)
                else:
                    held[tile * size : (tile + 1) * size] = new

        if not grouped:
            # The scratch rows are block step - 1 and what lies after it. Nothing is added any more to its
            # first rows; what step 0 reads here was never written, and step 1 writes the same block again.
            whole = plan.block - plan.before * size
            if whole:
                for held, out in lates:
                    out[0, :whole] = held[:whole].astype(out.dtype)
        heads.pipelined(plan.tiles * layout.packed, score, differentiate, read_out)

    @pl.when((step == last) if not grouped else (member == layout.group - 1))
    def _():
        for held, out in lates:
            out[0] = held[: plan.block].astype(out.dtype)


def backward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B T M"],
    value: Float[Array, "B T M"],
    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 T"]] | None,
    statistics: Float[Array, "B tiles 2*packed T"],
    shift: Float[Array, "B tiles packed T"] | None,
    grad: Float[Array, "B T L"],
    *,
    plan: WindowPlan,
    layout: Layout,
    scale: float,
    vmem_limit: int | None,
    interpret,
) -> tuple[Float[Array, "B T L"], Float[Array, "B T M"], Float[Array, "B T M"]]:
    """Gradients of packed arrays from the output's gradient and, as `shift`, that of the natural
    log-sum-exp."""
    batch, _length, lanes = query.shape
    tiles = lanes // layout.width
    last = plan.blocks - 1

    def rows_of(b, t, i, r):
        # The last step only flushes dk and dv: it stays on the block of dq that the step before it left.
        member = jnp.where(i > last, layout.group - 1, r)
        return b, jnp.minimum(i, last), t * layout.group + member

    def stats_of(b, t, i, r):
        return b, t * layout.group + r, 0, jnp.minimum(i, last)

    by_query = pl.BlockSpec((1, plan.block, layout.width), rows_of)
    by_statistic = pl.BlockSpec((1, 1, 2 * layout.packed, plan.block), stats_of)
    by_shift = pl.BlockSpec((1, 1, layout.packed, plan.block), stats_of)
    by_key = pl.BlockSpec((1, plan.block, layout.width), lambda b, t, i, r: (b, jnp.maximum(i - 1, 0), t))
    specs = [by_query, *key_specs(plan, layout.width), *key_specs(plan, layout.width), by_query, by_statistic]
    sides = len(plan.sides)
    operands = [query, *[key] * sides, *[value] * sides, grad, statistics]
    if shift is not None:
        specs.append(by_shift)
        operands.append(shift)
    if segments is not None:
        query_segments, key_segments = segments
        specs += [
            pl.BlockSpec((1, 1, plan.block), lambda b, t, i, r: (b, 0, jnp.minimum(i, last))),
            *segment_specs(plan),
        ]
        operands += [query_segments, *[key_segments] * sides]
    held = pltpu.VMEM(
        ((2 if layout.group > 1 else 1) * plan.block + plan.after * plan.tile, layout.width), jnp.float32
    )
    pairs = plan.blocks * plan.tiles * len(plan.distances()) * plan.tile**2 * batch * tiles * layout.packed
    return pl.pallas_call(
        functools.partial(
            _backward_kernel,
            plan=plan,
            layout=layout,
            scale=scale,
            segments=segments is not None,
            shifted=shift is not None,
        ),
        grid=(batch, tiles // layout.group, plan.blocks + 1, layout.group),
        in_specs=specs,
        out_specs=[by_query, by_key, by_key],
        out_shape=[heads.result(x.shape, x.dtype, query) for x in (query, key, value)],
        scratch_shapes=[held, held],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * pairs * layout.head_dim,
            transcendentals=pairs,
            bytes_accessed=sum(
                math.prod(x.shape) * x.dtype.itemsize for x in (query, key, value, grad, query, key, value)
            ),
        ),
        interpret=interpret,
        name="window_attention_backward",
    )(*operands)
