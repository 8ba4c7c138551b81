"""One grid step over a block of the history, and the launch of a kernel over the steps of all readers.

Both attentions of the differential form use a block of keys and values while it is in VMEM, so each of K1, K2 and V is
read from HBM once. Scores are stored transposed (history in rows, compressed tokens in lanes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.scores import elementwise_weights
from pallas_kernels.tpu.compress.plan import CompressCall
from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import NT
from pallas_kernels.tpu.core.heads import LANES
from pallas_kernels.tpu.core.score_bias import ScoreBias
from pallas_kernels.varying import result_like


def split_refs(call: CompressCall, refs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Splits references into those that every kernel starts with (bounds, queries, sets of keys, values, bias) and the
    rest."""
    first = call.keys + 3 + (call.bias is not None)
    return refs[:first], refs[first:]


class HistoryStep:
    """A block of keys and values inside a kernel, zero outside the bounds of its reader.

    A unit is one head of a tile with one set of keys, in a strip of the block's rows. More units make the start and end
    of the pipeline a smaller part of a step. If heads share a tile there are enough units, and the strip is the whole
    block.
    """

    #: Rows in a strip. In blocks of 1,024, the forward kernel takes 15% (v5e) and 8% (v6e) fewer bundles than without.
    strip = 256

    def __init__(self, call: CompressCall, refs: Sequence[Any]):
        limits, self.query, *keys = refs
        self._bias = keys.pop() if call.bias is not None else None
        value = keys.pop()
        self.call = call
        self._start, self._stop = call.bounds(limits)
        self.keys = [self.within(key[0]) for key in keys]
        self.value = self.within(value[0])

    @property
    def units(self) -> int:
        """The number of units in a step."""
        return self.call.block // self._strip * self.call.layout.packed * self.call.keys

    @property
    def _strip(self) -> int:
        whole = self.call.layout.packed > 1 or self.call.block % self.strip
        return self.call.block if whole else self.strip

    def rows(self, unit: int) -> slice:
        """Returns a unit's rows of the block."""
        first = unit // (self.call.layout.packed * self.call.keys) * self._strip
        return slice(first, first + self._strip)

    def split(self, unit: int) -> tuple[int, int, slice]:
        """Returns the head in the tile, the set of keys, and the lanes of this pair's statistics."""
        head, which = divmod(unit % (self.call.layout.packed * self.call.keys), self.call.keys)
        return head, which, slice(which * self.call.queries, (which + 1) * self.call.queries)

    def lanes_of(self, unit: int) -> slice:
        """Returns the lanes of a unit's head, which are rows of arrays that are stored transposed."""
        head, size = self.split(unit)[0], self.call.layout.head_dim
        return slice(head * size, (head + 1) * size)

    def within(
        self, x: Float[Array, "rows lanes"], otherwise: float = 0.0, first: int = 0
    ) -> Float[Array, "rows lanes"]:
        """Returns x with `otherwise` in the rows out of bounds; `first` is its first row in the block."""
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) + first
        outsides = (
            None if self._start is None else row < self._start,
            None if self._stop is None else row >= self._stop,
        )
        for outside in outsides:
            x = x if outside is None else jnp.where(outside, jnp.asarray(otherwise, x.dtype), x)
        return x

    def queries(self, unit: int) -> Float[Array, "queries width"]:
        """Returns a unit's queries, zero in the lanes of other heads."""
        return heads.lanes_of_head(self.query[0], self.split(unit)[0], self.call.layout)

    def products(self, unit: int, queries: Float[Array, "queries width"]) -> Float[Array, "rows queries"]:
        """Returns a unit's unscaled scores, with their bias."""
        (head, which, _), rows = self.split(unit), self.rows(unit)
        scores = arithmetic.dot(self.keys[which][rows], queries, NT)
        if self._bias is None:
            return scores
        assert self.call.bias is not None
        head = head if self.call.bias.heads else 0
        if self.call.bias.queries:
            return scores + self._bias[0, 0, head, rows]
        column = arithmetic.column(self._bias[0, 0, head : head + 1, rows], LANES)
        return scores + jnp.concatenate([column] * (self.call.queries // LANES), axis=1)

    def weights(self, unit: int, products: Float[Array, "rows queries"]) -> Float[Array, "rows queries"]:
        """Returns the weights of a score that is not normalised, 0 out of bounds."""
        weights = elementwise_weights(self.call.score, products * self.call.scale)
        return self.within(weights, first=self.rows(unit).start)


def history_specs(call: CompressCall) -> list[pl.BlockSpec]:
    """Returns block specs of bounds, queries, each set of keys, values, and the bias."""
    width, own = call.layout.width, call.own_queries
    of_history = pl.BlockSpec((1, call.block, width), lambda b, t, r, s: (b, call.history_block(r, s), t))
    return [
        pl.BlockSpec((1, 1, 1, 2), lambda b, t, r, s: (b, r if own else 0, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec((1, call.queries, width), lambda b, t, r, s: (b, r if own else 0, t)),
        *[of_history] * (call.keys + 1),
        *([] if call.bias is None else [bias_spec(call, call.bias)]),
    ]


def bias_spec(call: CompressCall, bias: ScoreBias) -> pl.BlockSpec:
    """Returns the block spec of a bias; see `score_bias.lay_out`."""

    def index(b, t, r, s):
        place = (b if bias.batches else 0, t if bias.heads else 0, 0, call.bias_block(r, s))
        return (*place, 0) if bias.queries else place

    heads = call.layout.packed if bias.heads else 1
    return pl.BlockSpec((1, 1, heads, call.block, *((call.queries,) if bias.queries else ())), index)


def slot_spec(call: CompressCall) -> pl.BlockSpec:
    """Returns the block spec of a gradient over the history, with one entry for each slot of readers."""
    return pl.BlockSpec(
        (1, 1, call.block, call.layout.width),
        lambda b, t, r, s: (jax.lax.rem(r, np.int32(call.slots)), b, call.history_block(r, s), t),
    )


def reader_spec(rows: int, lanes: int, shared: bool = False) -> pl.BlockSpec:
    """Returns the block spec of an array (batch, tiles, readers, rows, lanes); `shared` if all readers share an
    entry."""
    return pl.BlockSpec((1, 1, 1, rows, lanes), lambda b, t, r, s: (b, t, 0 if shared else r, 0, 0))


def launch(
    kernel: Callable[..., None],
    name: str,
    call: CompressCall,
    specs: Sequence[pl.BlockSpec],
    operands: Sequence[Array],
    out_specs: Sequence[pl.BlockSpec],
    results: Sequence[tuple[tuple[int, ...], Any]],
    in_order: bool = False,
) -> Sequence[Array]:
    """Runs a kernel over the steps of every reader; `results` are shapes and dtypes. `in_order` is for results to which
    the readers add one after another."""
    query = operands[1]
    return pl.pallas_call(
        functools.partial(kernel, call=call),
        grid=(query.shape[0], query.shape[2] // call.layout.width, call.readers, call.steps),
        in_specs=list(specs),
        out_specs=list(out_specs),
        out_shape=[result_like(query, shape, dtype) for shape, dtype in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(
                "parallel",
                "parallel",
                "arbitrary" if in_order else "parallel",
                "arbitrary",
            ),
            vmem_limit_bytes=call.vmem_limit,
        ),
        interpret=call.interpret,
        name=name,
    )(*operands)
