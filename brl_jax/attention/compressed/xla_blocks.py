"""`compress_blocks` through XLA, one group of blocks at a time.

The histories of two consecutive blocks share all but block_size tokens. Copying all histories would multiply the keys
by history_size / block_size, and on a CPU these copies took longer than the attention itself. So only one group's
histories are copied at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.compressed import xla
from brl_jax.attention.core.scores import Score
from brl_jax.attention.core.softmax import MASKED
from brl_jax.attention.core.varying import vary_like

#: Logits in a step: enough to pay for starting it, few enough for a core's cache.
_LOGITS = 2**18


class Operands(NamedTuple):
    """The arrays of a call of `compress_blocks`, with a bias of 4 axes and lengths of full shape."""

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


def form(x: Operands, *, all_at_once: bool, **options: Any) -> BlocksForm:
    """How to compute sigma(c Q K^T + b) V of every block: all blocks at once, or a group that fits the cache."""
    batch, blocks, count, heads, _ = x.query.shape
    few = max(1, _LOGITS // (batch * heads * count * options["history_size"]))
    steps = 1 if all_at_once else -(-blocks // few)
    return BlocksForm(steps, blocks, _Options(**options, group=-(-blocks // steps)))


class BlocksForm(NamedTuple):
    """Computes the blocks of a call in `steps` groups. Inside, results are (steps, B group, ...)."""

    steps: int
    blocks: int
    options: _Options

    def forward(self, x: Operands) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
        """For each set of keys, the result (B, C, M, N, V) in the dtype of sums, and the log-sum-exp (B, C, N, M)."""
        x = self._padded(x)
        queries = _split(x.query, self.options.group)

        def step(entry: Any) -> Any:
            query, number = entry
            o = self.options
            return xla.forward(_cut(x, query, number, o), o.history_size, o.scale, o.score)

        every = lax.map(step, (queries, jnp.arange(self.steps, dtype=jnp.int32)))
        return jax.tree.map(lambda a: _join(a, self.options.group)[:, : self.blocks], every)

    def backward(self, x: Operands, outs: Any, log_sums: Any, d_outs: Any) -> Operands:
        """The gradients of the operands, from what `forward` returned and the gradients of its results."""
        o = self.options
        padded = self._padded(x)
        missing = padded.query.shape[1] - self.blocks
        # In a row without keys, weights are exp(score - huge) = 0.
        log_sums = jax.tree.map(lambda a: _pad_blocks(a, missing, -MASKED), log_sums)
        outs, d_outs = jax.tree.map(lambda a: _pad_blocks(a, missing), (outs, d_outs))
        entries = jax.tree.map(lambda a: _split(a, o.group), (padded.query, outs, log_sums, d_outs))

        def step(totals: Any, entry: Any) -> Any:
            number, (query, outs, log_sums, d_outs) = entry
            part = _cut(padded, query, number, o)
            rows = xla.backward(part, outs, log_sums, d_outs, o.history_size, o.scale, o.score)

            def add(total: Array, windows: Array) -> Array:
                span = _span(total, number, o)
                (change,) = jax.linear_transpose(lambda span: _windows(span, o), span)(windows)
                start = number * o.group * o.block_size
                return lax.dynamic_update_slice_in_dim(total, span + change, start, axis=1)

            keys, value = jax.tree.map(add, totals[:2], (rows.keys, rows.value))
            bias = None if padded.bias is None else totals[2] + rows.bias
            return (keys, value, bias), rows.query

        zeros = jax.tree.map(jnp.zeros_like, (padded.keys, padded.value, padded.bias))
        numbers = jnp.arange(self.steps, dtype=jnp.int32)
        totals, d_queries = lax.scan(step, vary_like(zeros, (padded, d_outs)), (numbers, entries))
        d_keys, d_value = jax.tree.map(lambda a: self._unpadded(a, x.value.shape[1]), totals[:2])
        d_query = _join(d_queries, o.group)[:, : self.blocks]
        return Operands(d_query, d_keys, d_value, totals[2], None)

    def _padded(self, x: Operands) -> Operands:
        return _pad(x, self.steps * self.options.group - self.blocks, self.options)

    def _unpadded(self, total: Array, length: int) -> Array:
        """Undoes `_pad` for the gradient of the keys, which then has `length` keys."""
        total = total[:, :length]
        return _pad_blocks(total, length - total.shape[1])


def _pad(x: Operands, missing: int, o: _Options) -> Operands:
    """Adds blocks at the end, so that all groups are full. They read nothing: a NaN in a history would spoil gradients
    even with a weight of 0."""
    if not missing:
        return x

    needed = o.history_size + (x.query.shape[1] - 1) * o.block_size
    keys, value = jax.tree.map(
        lambda a: _pad_blocks(a[:, :needed], missing * o.block_size), (x.keys, x.value)
    )
    lengths = x.lengths
    if lengths is None:
        lengths = jnp.full(x.query.shape[:2], o.history_size, jnp.int32)
    return Operands(_pad_blocks(x.query, missing), keys, value, x.bias, _pad_blocks(lengths, missing))


def _pad_blocks(array: Array, size: int, fill: float = 0) -> Array:
    """Adds `size` entries along the second axis of (B, C, ...)."""
    return jnp.pad(array, ((0, 0), (0, size)) + ((0, 0),) * (array.ndim - 2), constant_values=fill)


def _split(array: Array, group: int) -> Array:
    """Turns (B, C, ...) into groups of blocks, (C / group, B group, ...)."""
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


def block_windows(
    x: Float[Array, "B S N H"], *, blocks: int, block_size: int, history_size: int
) -> Float[Array, "BC history N H"]:
    """The tokens [c * block_size, c * block_size + history_size) of each block c, as a separate row of the batch."""
    if blocks == 1:
        return x[:, :history_size]
    needed = history_size + (blocks - 1) * block_size
    # Concatenate shifted whole blocks: the windows overlap, and the gradient of a strided gather would be a scatter.
    shifts = -(-history_size // block_size)
    lead = shifts * block_size - history_size
    x = jnp.pad(x[:, :needed], ((0, 0), (lead, 0), (0, 0), (0, 0)))
    x = rearrange(x, "b (c t) n h -> b c t n h", t=block_size)
    x = jnp.concatenate([x[:, s : s + blocks] for s in range(shifts)], axis=2)
    return rearrange(x[:, :, lead:], "b c s n h -> (b c) s n h")
