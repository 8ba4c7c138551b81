"""The backward kernels of block-sparse attention: the queries' gradient loops over the listed pairs by blocks of
queries, the keys' and values' by blocks of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.block.block_pair import BlockPair, StepLists, VisibleRefs, split_refs
from pallas_kernels.tpu.block.launch import BlockLaunch, Hidden
from pallas_kernels.tpu.block.plan import BlockCall
from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import LOG2E, NN, NT


class GradientPair(BlockPair):
    """A pair of blocks with the output gradients of its queries and their statistics."""

    def __init__(
        self, lists: StepLists, by_key: bool, cut: bool, operands: Sequence[Any], visible: VisibleRefs
    ):
        self.query, key, value, self.grad, self.row_statistics = operands
        super().__init__(lists, by_key, cut, key, value, visible)

    def changes(self, unit: int):
        """Returns weights, the gradients of the capped scores (which sum to 0 in each row) and of the raw products, all
        transposed, then the queries and their output gradients.
        """
        q, g = self.rows(self.query, unit), self.rows(self.grad, unit)
        top, log_total, mean, rest = self.statistics(self.row_statistics, unit, 4)
        scores = self.capped(arithmetic.dot(self.key, q, NT))
        products = self.masked(self.biased(scores, unit), unit)
        weights = jnp.exp2((products - top) * (self.call.scale * LOG2E) - log_total)
        capped = changes = weights * ((arithmetic.dot(self.value, g, NT) - mean) - rest)
        if self.call.cap is not None:
            changes = changes * arithmetic.soft_cap_slope(scores, self.call.cap)
        return weights, capped, changes, q, g


def _rest_kernel(*refs, call: BlockCall, scalars: int):
    lists, operands, visible, (output,) = split_refs(call, refs, scalars, 5)
    first = lists.ends()[0]

    @pl.when(first)
    def _():
        output[...] = jnp.zeros_like(output)

    def meet(cut):
        pair = GradientPair(lists, False, cut, operands, visible)

        def score(unit):
            return (pair.changes(unit)[1],)

        def add(unit, changes):
            head, lanes = pair.split(unit)
            output[0, 0, head : head + 1, lanes] += changes.sum(axis=0, keepdims=True)

        pair.each_unit(score, add)

    lists.meet(False, meet)


def _query_kernel(*refs, call: BlockCall, scalars: int):
    lists, operands, visible, (output, *of_bias, sums) = split_refs(call, refs, scalars, 5)
    first, last = lists.ends()

    @pl.when(lists.step == 0)
    def _():
        for grad_bias in of_bias[:1]:
            grad_bias[...] = jnp.zeros_like(grad_bias)

    @pl.when(first)
    def _():
        sums[...] = jnp.zeros_like(sums)

    def meet(cut):
        pair = GradientPair(lists, False, cut, operands, visible)
        if pair.bias is not None:
            of_bias[1][...] = jnp.zeros_like(of_bias[1])

        def score(unit):
            _, capped, changes, *_ = pair.changes(unit)
            if pair.bias is not None:
                of_bias[1][unit % call.layout.packed, pair.bias.tile(unit // call.layout.packed)] += capped
            return (changes.astype(pair.query.dtype),)

        def read_out(unit, changes):
            head, lanes = pair.split(unit)
            sums[pair.lanes_of(unit), lanes] += heads.transposed_product(pair.key, changes, head, call.layout)

        pair.each_unit(score, read_out)
        if pair.bias is not None:
            pair.bias.add_gradient(*of_bias)

    lists.meet(False, meet)

    @pl.when(last)
    def _():
        output[0] = (sums[...].T * call.scale).astype(output.dtype)


def _key_kernel(*refs, call: BlockCall, scalars: int):
    lists, operands, visible, results = split_refs(call, refs, scalars, 5)
    grad_key, grad_value, key_sums, value_sums = results
    member = pl.program_id(3)
    first, last = lists.ends()

    @pl.when(first & (member == 0))
    def _():
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    def meet(cut):
        pair = GradientPair(lists, True, cut, operands, visible)
        dtype = pair.query.dtype

        def score(unit):
            weights, _, changes, q, g = pair.changes(unit)
            return weights.astype(dtype), changes.astype(dtype), q, g

        def read_out(unit, weights, changes, q, g):
            value_sums[...] += arithmetic.dot(weights, g, NN)
            key_sums[...] += arithmetic.dot(changes, q, NN)

        pair.each_unit(score, read_out)

    lists.meet(True, meet)

    @pl.when(last & (member == call.layout.group - 1))
    def _():
        grad_key[0] = (key_sums[...] * call.scale).astype(grad_key.dtype)
        grad_value[0] = value_sums[...].astype(grad_value.dtype)


def block_backward(
    query: Float[Array, "B T L"],
    key: Float[Array, "B S M"],
    value: Float[Array, "B S M"],
    bias: Float[Array, "tiles rows lanes"] | None,
    hidden: Hidden,
    shift: Int[Array, "1"] | None,
    grad: Float[Array, "B T L"],
    statistics: Float[Array, "B tiles statistics T"],
    mean: Float[Array, "B tiles packed T"],
    grad_log_sum: Float[Array, "B tiles packed T"] | None,
    call: BlockCall,
) -> tuple[
    Float[Array, "B T L"],
    Float[Array, "B S M"],
    Float[Array, "B S M"],
    Float[Array, "tiles rows lanes"] | None,
]:
    """Returns the gradients of packed arrays and of the bias; `mean` is each row's sum of weight times change, from the
    rounded output.

    The remainder of that rounded sum is computed first. If a softmax is almost one-hot, its derivative is a small
    difference of large numbers, in which the rounding would show.
    """
    width = call.layout.width

    def operands(rest):
        every = jnp.concatenate([statistics, mean, rest], axis=2)
        return [("q", query), ("k", key), ("k", value), ("q", grad), ("s", every)]

    biased = call.bias is not None

    (rest,) = BlockLaunch(_rest_kernel, "block_attention_backward_rest", call, "r").run(
        operands(jnp.zeros_like(mean)), hidden, shift, bias
    )
    given = operands(rest if grad_log_sum is None else rest - grad_log_sum)
    scratch: list[tuple[int, ...]] = [call.bias_array] if biased else []
    scratch.append((width, call.block_q))
    grad_query, *of_bias = BlockLaunch(
        _query_kernel, "block_attention_backward_query", call, "qd" if biased else "q", scratch
    ).run(given, hidden, shift, bias)
    grad_key, grad_value = BlockLaunch(
        _key_kernel, "block_attention_backward_key", call, "kk", [(call.block_k, width)] * 2, by_key=True
    ).run(given, hidden, shift, bias)
    grad_bias = of_bias[0].sum(axis=0) * call.scale if biased else None
    return grad_query, grad_key, grad_value, grad_bias
