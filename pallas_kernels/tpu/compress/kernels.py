"""Compression on TPU: the kernels. Compressed tokens read a history through one or two sets of keys at once.

Both attentions of the differential form run over the same block of keys and values while it is in VMEM, so
each of K1, K2 and V is read from HBM once. Scores are held transposed (history in rows, compressed tokens in
lanes). A reader is one run over one stretch of history: a part of the sequence (the parts are merged by their
log-sum-exp), or the history of one block of a long sequence.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.core import heads, scores
from pallas_kernels.tpu.core.heads import EMPTY, LOG2E, MASKED, NN, NONE_YET, NT, Layout
from pallas_kernels.tpu.core.scores import Score


@dataclasses.dataclass(frozen=True)
class CompressCall:
    """All that is static about one call.

    Attributes:
      length: tokens in the sequence.
      queries: compressed tokens, rounded up to whole lanes.
      block: tokens in a grid step.
      readers, steps: runs over the history, and grid steps of each.
      stride: reader r begins at block r * stride.
      own_queries: whether every reader has queries and bounds of its own (else all share one set).
      slots: readers of which no two that are so far apart read the same block.
      keys: sets of keys, one or two.
      above, below: whether a block may hold tokens from the end of a reader's bounds on, or before their start.
      axis_name: the mesh axis over which the sequence is cut, whose devices read the other parts; None if they don't.
    """

    length: int
    queries: int
    block: int
    readers: int
    steps: int
    stride: int
    own_queries: bool
    slots: int
    keys: int
    above: bool
    below: bool
    layout: Layout
    scale: float
    score: Score
    axis_name: str | None
    vmem_limit: int | None
    interpret: bool | pltpu.InterpretParams

    def history_block(self, reader, step):
        return reader * self.stride + step

    def bounds(self, ref) -> tuple[Int[Array, ""] | None, Int[Array, ""] | None]:
        """The first row of this step's block that its reader reads, and the row where it stops; None for no bound."""
        first = self.history_block(pl.program_id(2), pl.program_id(3)) * self.block
        return (
            ref[0, 0, 0, 0] - first if self.below else None,
            ref[0, 0, 0, 1] - first if self.above else None,
        )

    def together(self, x: Float[Array, "B tiles R rows lanes"]) -> Float[Array, "B tiles #R rows lanes"]:
        """The sum over all readers that share a set of queries."""
        x = x if self.own_queries else x.sum(axis=2, keepdims=True)
        return x if self.axis_name is None else jax.lax.psum(x, self.axis_name)

    def pairs(self):
        """(head in the tile, set of keys, lanes of that pair's statistics)."""
        for head in range(self.layout.packed):
            for which in range(self.keys):
                yield head, which, slice(which * self.queries, (which + 1) * self.queries)


def _seen(x: Float[Array, "block lanes"], bounds, otherwise: float = 0.0) -> Float[Array, "block lanes"]:
    """x with `otherwise` in the rows out of bounds."""
    start, stop = bounds
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for outside in (None if start is None else row < start, None if stop is None else row >= stop):
        x = x if outside is None else jnp.where(outside, jnp.asarray(otherwise, x.dtype), x)
    return x


def _forward_kernel(*refs, call: CompressCall):
    named = iter(refs)
    limits, query = next(named), next(named)
    keys = [next(named) for _ in range(call.keys)]
    value, sums, statistics = named
    layout, factor = call.layout, call.scale * LOG2E
    packed = layout.packed

    @pl.when(pl.program_id(3) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        statistics[0, 0, 0, :packed] = jnp.full_like(statistics[0, 0, 0, :packed], NONE_YET)
        statistics[0, 0, 0, packed:] = jnp.zeros_like(statistics[0, 0, 0, packed:])

    bounds = call.bounds(limits)
    loaded = [_seen(key[0], bounds) for key in keys]
    v = _seen(value[0], bounds)
    pairs = list(call.pairs())

    def score(unit):
        head, which, _ = pairs[unit]
        return (heads.dot(loaded[which], heads.lanes_of_head(query[0], head, layout), NT),)

    def weigh(unit, products):
        head, _, lanes = pairs[unit]
        if call.score != "softmax":
            weights = _seen(scores.weigh(call.score, products * call.scale), bounds)
            return weights.astype(query.dtype), None
        products = _seen(products, bounds, MASKED)
        old = statistics[0, 0, 0, head : head + 1, lanes]
        top = jnp.maximum(old, products.max(axis=0, keepdims=True))
        weights = jnp.exp2((products - top) * factor)
        shrink = jnp.exp2((old - top) * factor)
        total = statistics[0, 0, 0, packed + head : packed + head + 1, lanes]
        statistics[0, 0, 0, packed + head : packed + head + 1, lanes] = total * shrink + weights.sum(
            axis=0, keepdims=True
        )
        statistics[0, 0, 0, head : head + 1, lanes] = top
        return weights.astype(query.dtype), shrink

    def read_out(unit, weights, shrink):
        head, _, lanes = pairs[unit]
        place = slice(head * layout.head_dim, (head + 1) * layout.head_dim)
        old = sums[0, 0, 0, place, lanes]
        old = old if shrink is None else old * shrink
        sums[0, 0, 0, place, lanes] = old + heads.turned_product(v, weights, head, layout)

    heads.pipelined(len(pairs), score, weigh, read_out)


def _changes(call: CompressCall, statistics, head: int, lanes: slice, products, back):
    """A softmax's weights and its scores' gradients; `statistics` as `backward` takes them."""
    packed = call.layout.packed
    top, log_total, mean, *rest = (
        statistics[0, 0, 0, row : row + 1, lanes] for row in range(head, statistics.shape[3], packed)
    )
    weights = jnp.exp2((products - top) * (call.scale * LOG2E) - log_total)
    change = back - mean
    return weights, weights * (change - rest[0] if rest else change)


def _rest_kernel(*refs, call: CompressCall):
    named = iter(refs)
    limits, query = next(named), next(named)
    keys = [next(named) for _ in range(call.keys)]
    value, grads, statistics, output = named

    @pl.when(pl.program_id(3) == 0)
    def _():
        output[...] = jnp.zeros_like(output)

    bounds = call.bounds(limits)
    loaded = [_seen(key[0], bounds) for key in keys]
    v = _seen(value[0], bounds)
    pairs = list(call.pairs())

    def score(unit):
        head, which, _ = pairs[unit]
        q = heads.lanes_of_head(query[0], head, call.layout)
        g = heads.lanes_of_head(grads[0, which], head, call.layout)
        return heads.dot(loaded[which], q, NT), heads.dot(v, g, NT)

    def add(unit, products, back):
        head, _, lanes = pairs[unit]
        products = _seen(products, bounds, MASKED)
        changes = _changes(call, statistics, head, lanes, products, back)[1]
        output[0, 0, 0, head : head + 1, lanes] += changes.sum(axis=0, keepdims=True)

    heads.pipelined(len(pairs), score, add)


def _backward_kernel(*refs, call: CompressCall):
    named = iter(refs)
    limits, query = next(named), next(named)
    keys = [next(named) for _ in range(call.keys)]
    value, grads, statistics, grad_query = (next(named) for _ in range(4))
    *grad_keys, grad_value = named
    layout = call.layout

    @pl.when(pl.program_id(3) == 0)
    def _():
        grad_query[...] = jnp.zeros_like(grad_query)

    bounds = call.bounds(limits)
    loaded = [_seen(key[0], bounds) for key in keys]
    v = _seen(value[0], bounds)
    pairs = list(call.pairs())
    to_value: list[Array] = []
    to_keys: list[list[Array]] = [[] for _ in keys]

    def score(unit):
        head, which, _ = pairs[unit]
        q = heads.lanes_of_head(query[0], head, layout)
        g = heads.lanes_of_head(grads[0, which], head, layout)
        return heads.dot(loaded[which], q, NT), heads.dot(v, g, NT), q, g

    def differentiate(unit, products, back, q, g):
        head, _, lanes = pairs[unit]
        if call.score == "softmax":
            weights, changes = _changes(call, statistics, head, lanes, _seen(products, bounds, MASKED), back)
        else:
            weights = _seen(scores.weigh(call.score, products * call.scale), bounds)
            changes = _seen(scores.slope(call.score, products * call.scale), bounds) * back
        return weights.astype(query.dtype), changes.astype(query.dtype), q, g

    def read_out(unit, weights, changes, q, g):
        head, which, _ = pairs[unit]
        place = slice(head * layout.head_dim, (head + 1) * layout.head_dim)
        grad_query[0, 0, 0, place] += heads.turned_product(loaded[which], changes, head, layout) * call.scale
        to_value.append(heads.dot(weights, g, NN))
        to_keys[which].append(heads.dot(changes, q, NN))

    heads.pipelined(len(pairs), score, differentiate, read_out)
    grad_value[0, 0] = functools.reduce(jnp.add, to_value).astype(grad_value.dtype)
    for out, parts in zip(grad_keys, to_keys):
        out[0, 0] = (functools.reduce(jnp.add, parts) * call.scale).astype(out.dtype)


def _specs(call: CompressCall):
    """Block specs of bounds, queries and one array over the history."""
    width, own = call.layout.width, call.own_queries
    return (
        pl.BlockSpec((1, 1, 1, 2), lambda b, t, r, s: (b, r if own else 0, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec((1, call.queries, width), lambda b, t, r, s: (b, r if own else 0, t)),
        pl.BlockSpec((1, call.block, width), lambda b, t, r, s: (b, call.history_block(r, s), t)),
    )


def _per_reader(rows: int, lanes: int, shared: bool = False) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, 1, rows, lanes), lambda b, t, r, s: (b, t, 0 if shared else r, 0, 0))


def _launch(kernel, name: str, call: CompressCall, specs, operands, out_specs, results) -> list[Array]:
    """Runs a kernel over every reader's steps."""
    query = operands[1]
    return pl.pallas_call(
        functools.partial(kernel, call=call),
        grid=(query.shape[0], query.shape[2] // call.layout.width, call.readers, call.steps),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=[heads.result(shape, dtype, query) for shape, dtype in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=call.vmem_limit,
        ),
        interpret=call.interpret,
        name=name,
    )(*operands)


def forward(
    bounds: Int[Array, "B R 1 2"],
    query: Float[Array, "B Q L"],
    keys: list[Float[Array, "B S L"]],
    value: Float[Array, "B S L"],
    call: CompressCall,
) -> tuple[Float[Array, "B tiles R width lanes"], Float[Array, "B tiles R 2*packed lanes"]]:
    """Of each reader, transposed: weighted sums of the values, and (largest score, sum of exponentials over
    it).

    Queries are laid out (batch, readers * queries, tiles * width); the lanes of the results are (set of
    keys, query). The bounds are the first token that a reader reads and the one before which it stops.
    """
    of_bounds, of_query, of_history = _specs(call)
    outer = (query.shape[0], query.shape[2] // call.layout.width, call.readers)
    lanes, rows = call.keys * call.queries, 2 * call.layout.packed
    sums, statistics = _launch(
        _forward_kernel,
        "compress_forward",
        call,
        [of_bounds, of_query, *[of_history] * (call.keys + 1)],
        [bounds, query, *keys, value],
        [_per_reader(call.layout.width, lanes), _per_reader(rows, lanes)],
        [((*outer, call.layout.width, lanes), jnp.float32), ((*outer, rows, lanes), jnp.float32)],
    )
    return sums, statistics


def backward(
    bounds: Int[Array, "B R 1 2"],
    query: Float[Array, "B Q L"],
    keys: list[Float[Array, "B S L"]],
    value: Float[Array, "B S L"],
    grads: Float[Array, "B keys Q L"],
    statistics: Float[Array, "B tiles R 3*packed lanes"],
    call: CompressCall,
):
    """Gradients: queries of each reader, transposed (B, tiles, R, width, queries) in float32; each set of
    keys and the values, for each slot of readers (slots, B, S, L), where no reader of a slot reads undefined.

    The statistics end with each row's sum of weight times change. In float32 what that sum leaves over is measured
    first: where a softmax is all but one-hot, its derivative is a small difference of large numbers, and the
    rounding of the sum would show in it.
    """
    of_bounds, of_query, of_history = _specs(call)
    width, shared, packed = call.layout.width, not call.own_queries, call.layout.packed
    lanes = call.keys * call.queries
    outer = (query.shape[0], query.shape[2] // width, call.readers)
    of_grads = pl.BlockSpec(
        (1, call.keys, call.queries, width), lambda b, t, r, s: (b, 0, 0 if shared else r, t)
    )
    of_slot = pl.BlockSpec(
        (1, 1, call.block, width),
        lambda b, t, r, s: (jax.lax.rem(r, np.int32(call.slots)), b, call.history_block(r, s), t),
    )
    specs = [of_bounds, of_query, *[of_history] * (call.keys + 1), of_grads]
    operands = [bounds, query, *keys, value, grads]
    if call.score == "softmax" and query.dtype == jnp.float32:
        (rest,) = _launch(
            _rest_kernel,
            "compress_backward_rest",
            call,
            [*specs, _per_reader(3 * packed, lanes, shared)],
            [*operands, statistics],
            [_per_reader(packed, lanes)],
            [((*outer, packed, lanes), jnp.float32)],
        )
        statistics = jnp.concatenate(heads.alike(statistics, call.together(rest)), axis=3)
    history = ((call.slots, *value.shape), value.dtype)
    grad_query, *others = _launch(
        _backward_kernel,
        "compress_backward",
        call,
        [*specs, _per_reader(statistics.shape[3], lanes, shared)],
        [*operands, statistics],
        [_per_reader(width, call.queries), *[of_slot] * (call.keys + 1)],
        [((*outer, width, call.queries), jnp.float32), *[history] * (call.keys + 1)],
    )
    return grad_query, others[:-1], others[-1]


def merge(
    sums: Float[Array, "B tiles R width lanes"],
    statistics: Float[Array, "B tiles R 2*packed lanes"],
    call: CompressCall,
) -> tuple[Float[Array, "B tiles R width lanes"], Float[Array, "B tiles R 2*packed lanes"]]:
    """One result out of the readers' (R = 1), unless each has its own queries: normalised sums; largest
    score and base-2 log of the total."""
    packed, head_dim = call.layout.packed, call.layout.head_dim
    share, together = not call.own_queries, call.together
    if call.score != "softmax":
        return together(sums), jnp.zeros_like(statistics[:, :, :1] if share else statistics)
    tops, totals = statistics[:, :, :, :packed], statistics[:, :, :, packed:]
    top = tops.max(axis=2, keepdims=True) if share else tops
    top = top if call.axis_name is None else jax.lax.pmax(top, call.axis_name)
    shrink = jnp.exp2((tops - top) * (call.scale * LOG2E))
    total = together(totals * shrink)
    seen = total > 0
    weight = shrink / jnp.where(seen, total, 1.0)
    out = together(sums * jnp.repeat(weight, head_dim, axis=3))
    log_total = jnp.where(seen, jnp.log2(jnp.where(seen, total, 1.0)), EMPTY)
    return out, jnp.concatenate([jnp.where(seen, top, 0.0), log_total], axis=3)
