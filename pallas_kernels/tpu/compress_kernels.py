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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu import heads, scores
from pallas_kernels.tpu.heads import EMPTY, LOG2E, MASKED, NN, NT, Layout
from pallas_kernels.tpu.scores import Score


@dataclasses.dataclass(frozen=True)
class CompressCall:
    """All that is static about one call.

    Attributes:
      length: tokens in the sequence.
      queries: compressed tokens, rounded up to whole lanes.
      block: tokens in a grid step.
      readers, steps: runs over the history, and grid steps of each.
      stride, start: reader r begins at block r * stride + start; a block below 0 holds nothing.
      own_queries: whether every reader has queries of its own (else all share one set).
      slots: how many readers read one token.
      keys: sets of keys, one or two.
    """

    length: int
    queries: int
    block: int
    readers: int
    steps: int
    stride: int
    start: int
    own_queries: bool
    slots: int
    keys: int
    masked: bool
    layout: Layout
    scale: float
    score: Score
    vmem_limit: int | None
    interpret: bool | pltpu.InterpretParams

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)

    def history_block(self, reader, step):
        """The block of a step; a block that does not exist is read as one that this slot of readers leaves
        out."""
        block = reader * self.stride + self.start + step
        return jax.lax.rem(block + self.blocks, self.blocks)

    def first_row(self):
        return (pl.program_id(2) * self.stride + self.start + pl.program_id(3)) * self.block

    def rows_there(self, lengths) -> Int[Array, ""] | None:
        """How many rows of this step's block hold tokens; None if all always do."""
        if not self.masked:
            return None
        first = self.first_row()
        return jnp.where(first < 0, 0, lengths[0, 0, 0] - first)

    def pairs(self):
        """(head in the tile, set of keys, lanes of that pair's statistics)."""
        for head in range(self.layout.packed):
            for which in range(self.keys):
                yield head, which, slice(which * self.queries, (which + 1) * self.queries)


def _load(ref, rows):
    return ref[0] if rows is None else heads.rows_below(ref[0], rows)


def _seen(x: Float[Array, "block queries"], rows, otherwise: float) -> Float[Array, "block queries"]:
    if rows is None:
        return x
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < rows, x, otherwise)


def _forward_kernel(*refs, call: CompressCall):
    named = iter(refs)
    lengths, query = next(named), next(named)
    keys = [next(named) for _ in range(call.keys)]
    value, sums, statistics = named
    layout, factor = call.layout, call.scale * LOG2E
    packed = layout.packed

    @pl.when(pl.program_id(3) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        statistics[0, 0, 0, :packed] = jnp.full_like(statistics[0, 0, 0, :packed], MASKED)
        statistics[0, 0, 0, packed:] = jnp.zeros_like(statistics[0, 0, 0, packed:])

    rows = call.rows_there(lengths)
    loaded = [_load(key, rows) for key in keys]
    v = _load(value, rows)
    pairs = list(call.pairs())

    def score(unit):
        head, which, _ = pairs[unit]
        return (heads.dot(loaded[which], heads.lanes_of_head(query[0], head, layout), NT),)

    def weigh(unit, products):
        head, _, lanes = pairs[unit]
        if call.score != "softmax":
            weights = _seen(scores.weigh(call.score, products * call.scale), rows, 0.0)
            return weights.astype(query.dtype), None
        products = _seen(products, rows, MASKED)
        old = statistics[0, 0, 0, head : head + 1, lanes]
        top = jnp.maximum(old, products.max(axis=0, keepdims=True))
        # A block of which nothing is seen leaves the maximum at MASKED: it must not count as weights of 1.
        weights = _seen(jnp.exp2((products - top) * factor), rows, 0.0)
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


def _backward_kernel(*refs, call: CompressCall):
    named = iter(refs)
    lengths, query = next(named), next(named)
    keys = [next(named) for _ in range(call.keys)]
    value, grads, statistics, grad_query = (next(named) for _ in range(4))
    *grad_keys, grad_value = named
    layout, packed = call.layout, call.layout.packed

    @pl.when(pl.program_id(3) == 0)
    def _():
        grad_query[...] = jnp.zeros_like(grad_query)

    rows = call.rows_there(lengths)
    loaded = [_load(key, rows) for key in keys]
    v = _load(value, rows)
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
            top, log_total, mean = (
                statistics[0, 0, 0, part * packed + head : part * packed + head + 1, lanes]
                for part in range(3)
            )
            weights = jnp.exp2((products - top) * (call.scale * LOG2E) - log_total)
            weights = _seen(weights, rows, 0.0)
            changes = weights * (back - mean)
        else:
            weights = _seen(scores.weigh(call.score, products * call.scale), rows, 0.0)
            changes = _seen(scores.slope(call.score, products * call.scale), rows, 0.0) * back
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
    """Block specs of lengths, queries and one array over the history."""
    width = call.layout.width
    return (
        pl.BlockSpec((1, 1, 1), lambda b, t, r, s: (b, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec((1, call.queries, width), lambda b, t, r, s: (b, r if call.own_queries else 0, t)),
        pl.BlockSpec((1, call.block, width), lambda b, t, r, s: (b, call.history_block(r, s), t)),
    )


def _per_reader(rows: int, lanes: int, shared: bool = False) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, 1, rows, lanes), lambda b, t, r, s: (b, t, 0 if shared else r, 0, 0))


def forward(
    lengths: Int[Array, "B 1 1"],
    query: Float[Array, "B Q L"],
    keys: list[Float[Array, "B S L"]],
    value: Float[Array, "B S L"],
    call: CompressCall,
) -> tuple[Float[Array, "B tiles R width lanes"], Float[Array, "B tiles R 2*packed lanes"]]:
    """Of each reader, transposed: weighted sums of the values, and (largest score, sum of exponentials over
    it).

    Queries are laid out (batch, readers * queries, tiles * width); the lanes of the results are (set of
    keys, query).
    """
    batch, tiles = query.shape[0], query.shape[2] // call.layout.width
    of_length, of_query, of_history = _specs(call)
    lanes, rows = call.keys * call.queries, 2 * call.layout.packed
    return pl.pallas_call(
        functools.partial(_forward_kernel, call=call),
        grid=(batch, tiles, call.readers, call.steps),
        in_specs=[of_length, of_query, *[of_history] * (call.keys + 1)],
        out_specs=[_per_reader(call.layout.width, lanes), _per_reader(rows, lanes)],
        out_shape=[
            heads.result((batch, tiles, call.readers, call.layout.width, lanes), jnp.float32, query),
            heads.result((batch, tiles, call.readers, rows, lanes), jnp.float32, query),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=call.vmem_limit,
        ),
        interpret=call.interpret,
        name="compress_forward",
    )(lengths, query, *keys, value)


def backward(
    lengths: Int[Array, "B 1 1"],
    query: Float[Array, "B Q L"],
    keys: list[Float[Array, "B S L"]],
    value: Float[Array, "B S L"],
    grads: Float[Array, "B keys Q L"],
    statistics: Float[Array, "B tiles R 3*packed lanes"],
    call: CompressCall,
):
    """Gradients: queries of each reader, transposed (B, tiles, R, width, queries) in float32; each set of
    keys and the values, for each slot of readers (slots, B, S, L).
    """
    batch, tiles = query.shape[0], query.shape[2] // call.layout.width
    of_length, of_query, of_history = _specs(call)
    width, shared = call.layout.width, not call.own_queries
    of_grads = pl.BlockSpec(
        (1, call.keys, call.queries, width), lambda b, t, r, s: (b, 0, 0 if shared else r, t)
    )
    of_slot = pl.BlockSpec(
        (1, 1, call.block, width),
        lambda b, t, r, s: (jax.lax.div(s * call.slots, call.steps), b, call.history_block(r, s), t),
    )
    slotted = heads.result((call.slots, *value.shape), value.dtype, query)
    grad_query, *rest = pl.pallas_call(
        functools.partial(_backward_kernel, call=call),
        grid=(batch, tiles, call.readers, call.steps),
        in_specs=[
            of_length,
            of_query,
            *[of_history] * (call.keys + 1),
            of_grads,
            _per_reader(3 * call.layout.packed, call.keys * call.queries, shared),
        ],
        out_specs=[_per_reader(width, call.queries), *[of_slot] * (call.keys + 1)],
        out_shape=[
            heads.result((batch, tiles, call.readers, width, call.queries), jnp.float32, query),
            *[slotted] * (call.keys + 1),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=call.vmem_limit,
        ),
        interpret=call.interpret,
        name="compress_backward",
    )(lengths, query, *keys, value, grads, statistics)
    return grad_query, rest[:-1], rest[-1]


def merge(
    sums: Float[Array, "B tiles R width lanes"],
    statistics: Float[Array, "B tiles R 2*packed lanes"],
    call: CompressCall,
) -> tuple[Float[Array, "B tiles R width lanes"], Float[Array, "B tiles R 2*packed lanes"]]:
    """One result out of the readers' (R = 1), unless each has its own queries: normalised sums; largest
    score and base-2 log of the total."""
    packed, head_dim = call.layout.packed, call.layout.head_dim
    share = not call.own_queries

    def together(x):
        return x.sum(axis=2, keepdims=True) if share else x

    if call.score != "softmax":
        return together(sums), jnp.zeros_like(statistics[:, :, :1] if share else statistics)
    tops, totals = statistics[:, :, :, :packed], statistics[:, :, :, packed:]
    top = tops.max(axis=2, keepdims=True) if share else tops
    shrink = jnp.exp2((tops - top) * (call.scale * LOG2E))
    total = together(totals * shrink)
    seen = total > 0
    weight = shrink / jnp.where(seen, total, 1.0)
    out = together(sums * jnp.repeat(weight, head_dim, axis=3))
    log_total = jnp.where(seen, jnp.log2(jnp.where(seen, total, 1.0)), EMPTY)
    return out, jnp.concatenate([jnp.where(seen, top, 0.0), log_total], axis=3)
