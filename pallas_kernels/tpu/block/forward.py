"""The forward kernel of block-sparse attention: an online softmax over the listed blocks of keys.

Scores are stored transposed, keys in rows, as in the sliding-window kernels.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.block.block_pair import BlockPair, split_refs
from pallas_kernels.tpu.block.launch import BlockLaunch, Hidden
from pallas_kernels.tpu.block.plan import BlockCall
from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import EMPTY, LOG2E, NONE_YET, NT


def _forward_kernel(*refs, call: BlockCall, scalars: int):
    lists, (query, key, value), visible, (output, statistics, sums) = split_refs(call, refs, scalars, 3)
    first, last = lists.ends()
    layout, packed, factor = call.layout, call.layout.packed, call.scale * LOG2E

    @pl.when(first)
    def _():
        sums[...] = jnp.zeros_like(sums)
        statistics[0, 0, :packed] = jnp.full_like(statistics[0, 0, :packed], NONE_YET)
        statistics[0, 0, packed:] = jnp.zeros_like(statistics[0, 0, packed:])

    def meet(cut):
        pair = BlockPair(lists, False, cut, key, value, visible)

        def score(unit):
            products = arithmetic.dot(pair.key, pair.rows(query, unit), NT)
            return (pair.biased(pair.capped(products), unit),)

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
            sums[place, lanes] = sums[place, lanes] * shrink + heads.transposed_product(
                pair.value, weights, head, layout
            )

        pair.each_unit(score, weigh, read_out)

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


def block_forward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B S M"],
    value: Float[Array, "B S M"],
    bias: Float[Array, "tiles rows lanes"] | None,
    hidden: Hidden,
    shift: Int[Array, "1"] | None,
    call: BlockCall,
) -> tuple[Float[Array, "B T L"], Float[Array, "B tiles statistics T"]]:
    """Returns output and statistics of packed arrays; see `heads.pack` and `arithmetic.log_sum_exp`."""
    scratch = [(call.layout.width, call.block_q)]
    launch = BlockLaunch(_forward_kernel, "block_attention_forward", call, "qs", scratch)
    out, statistics = launch.run([("q", query), ("k", key), ("k", value)], hidden, shift, bias)
    return out, statistics
