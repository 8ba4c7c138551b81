"""Sliding-window attention, backward: one sweep over the sequence gives dq, dk and dv.

A step recomputes the weights of its queries over their whole window, so that the sum over keys that the
softmax's derivative needs is at hand, and nothing of the forward pass is read again but its statistics. Keys
near a block's ends are also seen by a neighbouring block's queries: `window_sums` adds up what they get.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import heads
from pallas_kernels.tpu.core.heads import EMPTY, LOG2E, MASKED, NN, NT, Layout
from pallas_kernels.tpu.window.forward import (
    WindowTiles,
    key_specs,
    segment_specs,
)
from pallas_kernels.tpu.window.plan import WindowPlan
from pallas_kernels.tpu.window.sums import EarlySums, GroupedSums, LateSums, held_rows


def _backward_kernel(*refs, plan: WindowPlan, layout: Layout, scale: float, segments: bool, shifted: bool):
    named = iter(refs)
    query = next(named)
    keys, values = ({side: next(named) for side in plan.sides} for _ in range(2))
    grad, statistics = next(named), next(named)
    shift = next(named) if shifted else None
    if segments:
        query_segments = next(named)
        key_segments = {side: next(named) for side in plan.sides}
    grad_query, grad_key, grad_value, held_key, held_value = named
    size = plan.tile
    kind = GroupedSums if layout.group > 1 else LateSums if plan.late else EarlySums
    key_sums = kind(plan, layout.group, ((held_value, grad_value), (held_key, grad_key)))
    key_sums.open()

    def meet():
        shared = WindowTiles(plan, layout, plan.backward_block(key_sums.step))
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
            key_sums.add(tile, (heads.dot(weights, grads, NN), heads.dot(changes, queries, NN) * scale))

        heads.pipelined(plan.tiles * layout.packed, score, differentiate, read_out)

    if plan.late:
        pl.when(key_sums.step < plan.blocks)(meet)
    else:
        meet()
    key_sums.close()


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

    def head_of(t, i, r):
        # A step more than there are blocks only writes dk and dv: it stays on the block of dq before it.
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
    if shift is not None:
        specs.append(by_statistic(layout.packed))
        operands.append(shift)
    if segments is not None:
        query_segments, key_segments = segments
        specs += [
            pl.BlockSpec((1, 1, plan.block), lambda b, t, i, r: (b, 0, plan.backward_block(i))),
            *segment_specs(plan, plan.backward_block),
        ]
        operands += [query_segments, *[key_segments] * sides]
    held = pltpu.VMEM((held_rows(plan, layout.group), layout.width), jnp.float32)
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
        grid=(batch, tiles // layout.group, plan.backward_steps, layout.group),
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
