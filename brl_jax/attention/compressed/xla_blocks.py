"""`compress_blocks` through XLA: a group of blocks at a time, of whose histories alone there are copies.

Histories overlap: block_size tokens further on, all but block_size of their tokens are the same. To copy all of them
would multiply the keys by history_size / block_size, and on a CPU these copies took longer than the attention itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.compressed import xla
from brl_jax.attention.compressed.windows import block_windows
from brl_jax.attention.core.scores import Score
from brl_jax.attention.core.varying import vary_like

#: Logits of a step: fewer cost more to start than to compute, more do not stay in a core's cache.
_LOGITS = 2**18


class Operands(NamedTuple):
    """The arrays of a call: see `compress_blocks`. The bias has 4 axes, the lengths are of their full shape."""

    query: Float[Array, "B C M N H"]
    keys: tuple[Float[Array, "B S N H"], ...]
    value: Float[Array, "B S N V"]
    bias: Float[Array, "1 N M R"] | None
    lengths: Int[Array, "B C"] | None


class _Options(NamedTuple):
    block_size: int
    history_size: int
    scale: float
    score: Score
    group: int


def read(
    operands: Operands, *, block_size: int, history_size: int, scale: float, score: Score
) -> tuple[Float[Array, "B C M N V"], ...]:
    """sigma(c Q K^T + b) V of every block for each set of keys, in the dtype of sums."""
    operands = vary_like(operands, operands)
    batch, blocks, count, heads, _ = operands.query.shape

    def by_groups(operands: Operands, group: int) -> tuple[Array, ...]:
        steps = -(-blocks // group)
        group = -(-blocks // steps)
        options = _Options(block_size, history_size, scale, score, group)
        outs = _read(_pad(operands, steps * group - blocks, options), options)
        return tuple(out[:, :blocks] for out in outs)

    few = max(1, _LOGITS // (batch * heads * count * history_size))
    # A GPU would wait for the launch of each step's kernels.
    at_once = functools.partial(by_groups, group=blocks)
    return lax.platform_dependent(
        operands, cuda=at_once, rocm=at_once, default=functools.partial(by_groups, group=few)
    )


def _pad(x: Operands, missing: int, o: _Options) -> Operands:
    """The operands with blocks at the end that read nothing, so that all groups are full. Had they a history, what it
    contains could spoil the gradients, even with a weight of 0."""
    if not missing:
        return x

    def pad(array: Array, size: int) -> Array:
        return jnp.pad(array, ((0, 0), (0, size)) + ((0, 0),) * (array.ndim - 2))

    needed = o.history_size + (x.query.shape[1] - 1) * o.block_size
    keys, value = jax.tree.map(lambda a: pad(a[:, :needed], missing * o.block_size), (x.keys, x.value))
    lengths = x.lengths
    if lengths is None:
        lengths = jnp.full(x.query.shape[:2], o.history_size, jnp.int32)
    return Operands(pad(x.query, missing), keys, value, x.bias, pad(lengths, missing))


def _split(array: Array, group: int) -> Array:
    """(B, C, ...) by groups of blocks: (C / group, B group, ...)."""
    return rearrange(array, "b (s g) ... -> s (b g) ...", g=group)


def _join(array: Array, group: int) -> Array:
    return rearrange(array, "s (b g) ... -> b (s g) ...", g=group)


def _cut(x: Operands, query: Array, step: Any, o: _Options) -> xla.Operands:
    """What the blocks of one step read, each block as a row of a batch."""
    lengths = None if x.lengths is None else lax.dynamic_slice_in_dim(x.lengths, step * o.group, o.group, 1)
    mask = None
    if lengths is not None:
        places = jnp.arange(o.history_size, dtype=lengths.dtype)
        mask = (places[None] >= o.history_size - lengths.reshape(-1, 1))[:, None, None]
    keys = tuple(_windows(_span(key, step, o), o) for key in x.keys)
    return xla.Operands(query, keys, _windows(_span(x.value, step, o), o), x.bias, mask, None)


def _span(array: Array, step: Any, o: _Options) -> Array:
    """The tokens that the blocks of one step read."""
    size = o.history_size + (o.group - 1) * o.block_size
    return lax.dynamic_slice_in_dim(array, step * o.group * o.block_size, size, axis=1)


def _windows(span: Array, o: _Options) -> Array:
    return block_windows(span, blocks=o.group, block_size=o.block_size, history_size=o.history_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _read(operands: Operands, o: _Options) -> tuple[Array, ...]:
    return _forward(operands, o)[0]


def _forward(x: Operands, o: _Options) -> Any:
    queries = _split(x.query, o.group)

    def step(entry: Any) -> Any:
        query, number = entry
        return xla.forward(_cut(x, query, number, o), o.history_size, o.scale, o.score)

    outs, log_sums = lax.map(step, (queries, jnp.arange(queries.shape[0], dtype=jnp.int32)))
    return tuple(_join(out, o.group) for out in outs), log_sums


def _read_fwd(operands: Operands, o: _Options) -> Any:
    outs, log_sums = _forward(operands, o)
    return outs, (operands, outs, log_sums)


def _read_bwd(o: _Options, kept: Any, grads: tuple[Array, ...]) -> tuple[Operands]:
    x, outs, log_sums = kept
    queries, outs, d_outs = jax.tree.map(lambda a: _split(a, o.group), (x.query, outs, grads))

    def step(totals: Any, entry: Any) -> Any:
        number, query, outs, log_sums, d_outs = entry
        part = _cut(x, query, number, o)
        rows = xla.backward(part, outs, log_sums, d_outs, o.history_size, o.scale, o.score)

        def add(total: Array, windows: Array) -> Array:
            span = _span(total, number, o)
            (change,) = jax.linear_transpose(lambda span: _windows(span, o), span)(windows)
            start = number * o.group * o.block_size
            return lax.dynamic_update_slice_in_dim(total, span + change, start, axis=1)

        keys, value = jax.tree.map(add, totals[:2], (rows.keys, rows.value))
        bias = None if x.bias is None else totals[2] + rows.bias
        return (keys, value, bias), rows.query

    zeros = jax.tree.map(jnp.zeros_like, (x.keys, x.value, x.bias))
    entries = (jnp.arange(queries.shape[0], dtype=jnp.int32), queries, outs, log_sums, d_outs)
    (keys, value, bias), d_queries = lax.scan(step, vary_like(zeros, (x, grads)), entries)
    return (Operands(_join(d_queries, o.group), keys, value, bias, None),)


_read.defvjp(_read_fwd, _read_bwd)
