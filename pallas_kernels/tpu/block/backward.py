"""The backward kernels of block-sparse attention.

If the queries' gradient fits in VMEM, one kernel walks over the listed pairs by blocks of keys and computes all
gradients. Otherwise it leaves out the queries, and a second kernel walks by blocks of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
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
        # In float32, the mean comes in two parts.
        count = 4 if q.dtype == jnp.float32 else 3
        top, log_total, *means = self.statistics(self.row_statistics, unit, count)
        scores = self.capped(arithmetic.dot(self.key, q, NT))
        products = self.masked(self.biased(scores, unit), unit)
        weights = jnp.exp2((products - top) * (self.call.scale * LOG2E) - log_total)
        centred = arithmetic.dot(self.value, g, NT)
        for mean in means:
            centred = centred - mean
        capped = changes = weights * centred
        if self.call.cap is not None:
            changes = changes * arithmetic.soft_cap_slope(scores, self.call.cap)
        return weights, capped, changes, q, g

    def add_to_bias(self, grads, unit: int, capped) -> None:
        """Adds a unit's gradients of the capped scores to `grads`, the gradient of the pair's bias."""
        assert self.bias is not None
        tile, head = divmod(unit, self.call.layout.packed)
        grads[head, self.bias.tile(tile)] += capped


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
                pair.add_to_bias(of_bias[1], unit, capped)
            return (changes.astype(pair.query.dtype),)

        def read_out(unit, changes):
            head, lanes = pair.split(unit)
            sums[pair.lanes_of(unit), lanes] += heads.transposed_product(pair.key, changes, head, call.layout)

        pair.each_unit(score, read_out)
        if pair.bias is not None:
            pair.bias.add_gradient(of_bias[0], 0, of_bias[1])

    lists.meet(False, meet)

    @pl.when(last)
    def _():
        output[0] = (sums[...].T * call.scale).astype(output.dtype)


class QuerySums:
    """The gradient of all queries of one key tile, transposed in VMEM.

    Args:
      output: in HBM.
      sums: (query tiles, blocks, width, block_q).
      block: holds a finished block.
      arrived: a semaphore.
    """

    def __init__(self, call: BlockCall, output, sums, block, arrived):
        self.call, self.output, self.sums, self.block, self.arrived = call, output, sums, block, arrived
        # The interpreter knows no program_id inside a condition or a loop.
        self.member, self.row = pl.program_id(3), pl.program_id(0)
        self.tile = pl.program_id(1) * call.layout.group + self.member

    def clear(self) -> None:
        # In a loop, because 16,384 queries fill 2,048 registers.
        def one(block, _):
            self.sums[self.member, block] = jnp.zeros_like(self.sums[self.member, block])

        jax.lax.fori_loop(0, self.sums.shape[1], one, None)

    def write(self) -> None:
        size, width = self.block.shape

        def one(block, _):
            self.block[...] = (self.sums[self.member, block].T * self.call.scale).astype(self.block.dtype)
            rows, lanes = pl.ds(block * size, size), pl.ds(self.tile * width, width)
            copy = pltpu.make_async_copy(self.block, self.output.at[self.row, rows, lanes], self.arrived)
            copy.start()
            copy.wait()

        jax.lax.fori_loop(0, self.sums.shape[1], one, None)


def _key_kernel(*refs, call: BlockCall, scalars: int):
    """The gradients of keys and values and, in a fused call, of queries and bias."""
    lists, operands, visible, results = split_refs(call, refs, scalars, 5)
    biased = call.fused and call.bias is not None
    outputs = 2 + call.fused + biased
    grad_key, grad_value, *more = results[:outputs]
    key_sums, value_sums, *held = results[outputs:]
    of_queries = QuerySums(call, more[0], *held[:3]) if call.fused else None
    of_bias = (more[1], held[3]) if biased else None
    member, steps = pl.program_id(3), pl.num_programs(2)
    first, last = lists.ends()
    query_block = lists.blocks(True)[0]

    if of_queries is not None:
        pl.when(lists.step == 0)(of_queries.clear)

    @pl.when((lists.step == 0) & (member == 0))
    def _():
        for grads in more[1:]:
            grads[...] = jnp.zeros_like(grads)

    @pl.when(first & (member == 0))
    def _():
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    def meet(cut):
        pair = GradientPair(lists, True, cut, operands, visible)
        dtype = pair.query.dtype
        if of_bias is not None:
            of_bias[1][...] = jnp.zeros_like(of_bias[1])

        def score(unit):
            weights, capped, changes, q, g = pair.changes(unit)
            if of_bias is not None:
                pair.add_to_bias(of_bias[1], unit, capped)
            return weights.astype(dtype), changes.astype(dtype), q, g

        def read_out(unit, weights, changes, q, g):
            value_sums[...] += arithmetic.dot(weights, g, NN)
            key_sums[...] += arithmetic.dot(changes, q, NN)
            if of_queries is not None:
                head, lanes = pair.split(unit)
                of_queries.sums[member, query_block, pair.lanes_of(unit), lanes] += heads.transposed_product(
                    pair.key, changes, head, call.layout
                )

        pair.each_unit(score, read_out)
        if of_bias is not None:
            assert pair.bias is not None
            pair.bias.add_gradient(of_bias[0], member, of_bias[1])

    lists.meet(True, meet)

    @pl.when(last & (member == call.layout.group - 1))
    def _():
        grad_key[0] = (key_sums[...] * call.scale).astype(grad_key.dtype)
        grad_value[0] = value_sums[...].astype(grad_value.dtype)

    if of_queries is not None:
        pl.when(lists.step == steps - 1)(of_queries.write)


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

    In float32, the remainder of that rounded sum is computed first. If a softmax is almost one-hot, its derivative is a
    small difference of large numbers, and the rounding would show.
    """
    width = call.layout.width

    def launch(kernel, name: str, rows, results: str, scratch: Sequence[Any] = ()):
        every = jnp.concatenate([statistics, *rows], axis=2)
        operands = [("q", query), ("k", key), ("k", value), ("q", grad), ("s", every)]
        by_key = kernel is _key_kernel
        launch = BlockLaunch(kernel, f"block_attention_backward_{name}", call, results, scratch, by_key)
        return launch.run(operands, hidden, shift, bias)

    rows = [mean]
    if query.dtype == jnp.float32:
        rows += launch(_rest_kernel, "rest", [mean, jnp.zeros_like(mean)], "r")
    if grad_log_sum is not None:
        rows[-1] = rows[-1] - grad_log_sum
    of_keys: list[Any] = [(call.block_k, width)] * 2
    of_pair = [] if call.bias is None else [call.bias_array]
    d = "d" * len(of_pair)
    if call.fused:
        sums = (call.layout.group, len(call.rows), width, call.block_q)
        of_queries = [sums, pltpu.VMEM((call.block_q, width), query.dtype), pltpu.SemaphoreType.DMA(())]
        grad_key, grad_value, grad_query, *of_bias = launch(
            _key_kernel, "all", rows, "kka" + d, [*of_keys, *of_queries, *of_pair]
        )
        grad_query = grad_query[:, : call.queries]
    else:
        grad_query, *of_bias = launch(
            _query_kernel, "query", rows, "q" + d, [*of_pair, (width, call.block_q)]
        )
        grad_key, grad_value = launch(_key_kernel, "key", rows, "kk", of_keys)
    grad_bias = of_bias[0].sum(axis=0) * call.scale if of_bias else None
    return grad_query, grad_key, grad_value, grad_bias
