"""The forward kernel of compress: an online softmax over the history, and the merge of the readers' results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.compress.history import HistoryStep, history_specs, launch, reader_spec, split_refs
from pallas_kernels.tpu.compress.plan import CompressCall
from pallas_kernels.tpu.core import heads
from pallas_kernels.tpu.core.arithmetic import EMPTY, LOG2E, MASKED, NONE_YET
from pallas_kernels.tpu.core.pipeline import pipelined


def _forward_kernel(*refs, call: CompressCall):
    inputs, (sums, statistics) = split_refs(call, refs)
    layout, factor = call.layout, call.scale * LOG2E
    packed = layout.packed

    @pl.when(pl.program_id(3) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        statistics[0, 0, 0, :packed] = jnp.full_like(statistics[0, 0, 0, :packed], NONE_YET)
        statistics[0, 0, 0, packed:] = jnp.zeros_like(statistics[0, 0, 0, packed:])

    step = HistoryStep(call, inputs)
    dtype = step.query.dtype

    def score(unit):
        return (step.products(unit, step.queries(unit)),)

    def weigh(unit, products):
        head, _, lanes = step.split(unit)
        if call.score != "softmax":
            return step.weights(unit, products).astype(dtype), None
        products = step.within(products, MASKED, step.rows(unit).start)
        old = statistics[0, 0, 0, head : head + 1, lanes]
        top = jnp.maximum(old, products.max(axis=0, keepdims=True))
        weights = jnp.exp2((products - top) * factor)
        shrink = jnp.exp2((old - top) * factor)
        total = statistics[0, 0, 0, packed + head : packed + head + 1, lanes]
        statistics[0, 0, 0, packed + head : packed + head + 1, lanes] = total * shrink + weights.sum(
            axis=0, keepdims=True
        )
        statistics[0, 0, 0, head : head + 1, lanes] = top
        return weights.astype(dtype), shrink

    def read_out(unit, weights, shrink):
        head, _, lanes = step.split(unit)
        place = step.lanes_of(unit)
        old = sums[0, 0, 0, place, lanes]
        old = old if shrink is None else old * shrink
        sums[0, 0, 0, place, lanes] = old + heads.transposed_product(
            step.value[step.rows(unit)], weights, head, layout
        )

    pipelined(step.units, score, weigh, read_out)


def compress_forward(
    bounds: Int[Array, "B #R 1 2"],
    query: Float[Array, "B Q L"],
    keys: list[Float[Array, "B S L"]],
    value: Float[Array, "B S L"],
    bias: Float[Array, "..."] | None,
    call: CompressCall,
) -> tuple[Float[Array, "B tiles R width lanes"], Float[Array, "B tiles R statistics lanes"]]:
    """Returns for each reader, transposed, the weighted sums of the values, and (largest score, sum of exponentials
    relative to it).

    Queries are laid out as (batch, readers * queries, tiles * width), the lanes of the results as (set of keys, query).
    A reader's bounds are the first token that it reads and the first one after it stops.
    """
    outer = (query.shape[0], query.shape[2] // call.layout.width, call.readers)
    lanes, rows = call.keys * call.queries, 2 * call.layout.packed
    sums, statistics = launch(
        _forward_kernel,
        "compress_forward",
        call,
        history_specs(call),
        [bounds, query, *keys, value, *([] if bias is None else [bias])],
        [reader_spec(call.layout.width, lanes), reader_spec(rows, lanes)],
        [((*outer, call.layout.width, lanes), jnp.float32), ((*outer, rows, lanes), jnp.float32)],
    )
    return sums, statistics


def merge_readers(
    sums: Float[Array, "B tiles R width lanes"],
    statistics: Float[Array, "B tiles R statistics lanes"],
    call: CompressCall,
) -> tuple[Float[Array, "B tiles #R width lanes"], Float[Array, "B tiles #R statistics lanes"]]:
    """Merges the results of all readers into one (R = 1), unless each reader has its own queries: normalised sums;
    largest score and base-2 log of the total."""
    packed, head_dim = call.layout.packed, call.layout.head_dim
    share, sum_readers = not call.own_queries, call.sum_readers
    if call.score != "softmax":
        return sum_readers(sums), jnp.zeros_like(statistics[:, :, :1] if share else statistics)
    tops, totals = statistics[:, :, :, :packed], statistics[:, :, :, packed:]
    top = tops.max(axis=2, keepdims=True) if share else tops
    top = top if call.axis_name is None else jax.lax.pmax(top, call.axis_name)
    shrink = jnp.exp2((tops - top) * (call.scale * LOG2E))
    total = sum_readers(totals * shrink)
    seen = total > 0
    weight = shrink / jnp.where(seen, total, 1.0)
    out = sum_readers(sums * jnp.repeat(weight, head_dim, axis=3))
    log_total = jnp.where(seen, jnp.log2(jnp.where(seen, total, 1.0)), EMPTY)
    return out, jnp.concatenate([jnp.where(seen, top, 0.0), log_total], axis=3)
