"""One block of queries and the keys that it visits: scores, softmax, gradients, and how blocks are cut and joined.

Heads are split into (K, G): query (B, K, G, T, H), key and value (B, K, S, H). Each step of the loop on a CPU takes a
slice of B and K and one block of T.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.products import CACHE_BYTES, Product
from brl_jax.attention.core.scores import soft_cap, soft_cap_slope
from brl_jax.attention.core.softmax import MASKED, SoftmaxSums, block_sums, softmax_gradient
from brl_jax.attention.local.parts import Part
from brl_jax.attention.local.patterns import CallArrays, PatternCall


class Block(NamedTuple):
    """One block of queries and the keys that it visits; b and k may be slices of B and K."""

    query_index: Array  # (t,)
    key_index: Array  # (s,)
    query: Array  # (b, k, G, t, H)
    key: Array  # (b, k, s, H)
    value: Array  # (b, k, s, H)
    bias: Array | None  # (b or 1, k or 1, G or 1, t or 1, s or 1)
    key_lengths: Array | None  # (b,)
    query_segments: Array | None  # (b, t)
    key_segments: Array | None  # (b, s)


def block_positions(call: PatternCall, block: Block, key_offset: Array | None) -> tuple[Array, Array]:
    offset: Any = call.key_offset if key_offset is None else key_offset
    return block.query_index + (call.query_offset + offset), block.key_index + offset


def block_scores(
    call: PatternCall,
    part: Part,
    key_offset: Array | None,
    bias: Any,
    block: Block,
    product: Product,
) -> tuple[Array, Array | None]:
    """Scaled, capped, biased and masked scores (b, k, G, t, s) in float32, and the slope of the cap, if any."""
    scores = product("bkgtd,bksd->bkgts", block.query, block.key) * call.scale
    slope = None
    if call.logits_soft_cap is not None:
        scores = soft_cap(scores, call.logits_soft_cap)
        slope = soft_cap_slope(scores, call.logits_soft_cap)
    positions = block_positions(call, block, key_offset)
    if block.bias is not None:
        scores = scores + block.bias.astype(jnp.float32)
    elif bias is not None:
        scores = scores + call_bias(bias, positions, scores.shape)
    mask = ((block.key_index >= 0) & (block.key_index < call.num_keys))[None, :]
    if call.is_causal:
        mask = mask & (block.query_index[:, None] + call.query_offset >= block.key_index[None, :])
    if part.rule is not None:
        mask = mask & part.rule(positions[0][:, None], positions[1][None, :])
    mask = mask[None, None, None]
    if block.key_lengths is not None:
        inside = block.key_index[None, :] < block.key_lengths[:, None]
        mask = mask & inside[:, None, None, None, :]
    if block.query_segments is not None and block.key_segments is not None:
        same = block.query_segments[:, :, None] == block.key_segments[:, None, :]
        mask = mask & same[:, None, None]
    return jnp.where(mask, scores, MASKED), slope


def call_bias(bias: PositionBias, positions: tuple[Array, Array], shape: tuple[int, ...]) -> Array:
    _, k, g, t, s = shape
    values = bias(*positions)
    require(
        values.shape == (k * g, t, s),
        f"bias called on {t} query and {s} key positions must give shape {(k * g, t, s)}, got {values.shape}",
    )
    return values.astype(jnp.float32).reshape(1, k, g, t, s)


def softmax_block(scores: Array, value: Array, product: Product) -> SoftmaxSums:
    """The softmax sums of queries (b, k, G, t) over the block's keys."""
    return block_sums(
        scores, lambda weights: product("bkgts,bksd->bkgtd", weights.astype(value.dtype), value)
    )


def gradient_block(
    scores, slope, block: Block, query_t, d_out, d_out_t, lse, delta, scale: float, product: Product
):
    """Gradients of one block: of its biased scores, its query (b, k, G, t, H), and its key and value (b, k, H, s).

    query_t and d_out_t are (b, k, H, G, t), because a transposed left factor doubles the time of a product on a CPU.
    """
    dtype = block.key.dtype
    d_weights = product("bkgtd,bksd->bkgts", d_out, block.value)
    weights, d_scores = softmax_gradient(scores, lse, d_weights, delta)
    d_logits = d_scores if slope is None else d_scores * slope
    scaled = (d_logits * scale).astype(dtype)
    d_query = product("bkgts,bksd->bkgtd", scaled, block.key)
    d_key = product("bkdgt,bkgts->bkds", query_t, scaled)
    d_value = product("bkdgt,bkgts->bkds", d_out_t, weights.astype(dtype))
    return d_scores, d_query.astype(dtype), d_key, d_value


class Arranged(NamedTuple):
    """The arrays of a call, in the order of one part."""

    query: Array  # (B, K, G, T', H)
    key: Array  # (B, K, S', H)
    value: Array  # (B, K, S', H)
    bias: Array | None  # (B or 1, K or 1, G or 1, T' or 1, S' or 1)
    key_lengths: Array | None  # (B,)
    query_segments: Array | None  # (B, T')
    key_segments: Array | None  # (B, S')


def arrange(part: Part, x: CallArrays, query: Array, key: Array, value: Array) -> Arranged:
    """Puts query (B, K, G, T, H), key and value (B, K, S, H), and the bias and segments of x, into the part's order."""
    bias = x.bias if isinstance(x.bias, jax.Array) else None
    if bias is not None:
        heads = (key.shape[1], query.shape[2]) if bias.shape[1] > 1 else (1, 1)
        bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
        if bias.shape[3] > 1:
            bias = part.queries.arrange(bias, 3)
        if bias.shape[4] > 1:
            bias = part.keys.arrange(bias, 4)
    return Arranged(
        part.queries.arrange(query, 3),
        part.keys.arrange(key, 2),
        part.keys.arrange(value, 2),
        bias,
        x.key_lengths,
        None if x.query_segments is None else part.queries.arrange(x.query_segments, 1),
        None if x.key_segments is None else part.keys.arrange(x.key_segments, 1),
    )


@dataclasses.dataclass(frozen=True)
class BlockLoop:
    """The loop on a CPU. Each step takes `batch` sequences, `heads` key heads and one block of queries."""

    part: Part
    batch: int
    heads: int
    batch_steps: int
    head_steps: int

    @classmethod
    def of(cls, part: Part, query: Array, all_heads: bool) -> BlockLoop:
        b, k, g = query.shape[:3]
        one = 4 * g * part.block * part.length
        fits = lambda n, limit: max(d for d in range(1, n + 1) if n % d == 0 and d <= max(1, limit))  # noqa: E731
        heads = k if all_heads else fits(k, CACHE_BYTES // one)
        batch = fits(b, CACHE_BYTES // (one * k)) if heads == k else 1
        return cls(part, batch, heads, b // batch, k // heads)

    @property
    def steps(self) -> Array:
        return jnp.arange(self.batch_steps * self.head_steps * self.part.num_blocks, dtype=jnp.int32)

    def place(self, step) -> tuple[Any, Any, Any]:
        """The step's first sequence, first key head and block of queries."""
        i = step % self.part.num_blocks
        rest = step // self.part.num_blocks
        return rest // self.head_steps * self.batch, rest % self.head_steps * self.heads, i

    def cut(self, x: Array, b, k) -> Array:
        """The step's sequences and heads of x (B or 1, K or 1, ...)."""
        for axis, start, length in ((0, b, self.batch), (1, k, self.heads)):
            if x.shape[axis] > 1:
                x = lax.dynamic_slice_in_dim(x, start, length, axis)
        return x

    def rows(self, x: Array, step, axis: int) -> Array:
        """The step's queries of x (B, K, ..., T', ...)."""
        b, k, i = self.place(step)
        x = self.cut(x, b, k)
        return (
            x
            if x.shape[axis] == 1
            else lax.dynamic_slice_in_dim(x, i * self.part.block, self.part.block, axis)
        )

    def block(self, arranged: Arranged, num_keys: int, step) -> Block:
        b, k, i = self.place(step)
        part = self.part
        bias = None
        if arranged.bias is not None:
            bias = self.rows(arranged.bias, step, 3)
            bias = bias if bias.shape[4] == 1 else part.take(bias, i, 4)
        query_segments = key_segments = None
        if arranged.query_segments is not None and arranged.key_segments is not None:
            rows = lax.dynamic_slice_in_dim(arranged.query_segments, b, self.batch, 0)
            query_segments = lax.dynamic_slice_in_dim(rows, i * part.block, part.block, 1)
            cols = lax.dynamic_slice_in_dim(arranged.key_segments, b, self.batch, 0)
            key_segments = part.take(cols, i, 1)
        lengths = arranged.key_lengths
        return Block(
            part.query_index(i),
            part.key_index(i, num_keys),
            self.rows(arranged.query, step, 3),
            part.take(self.cut(arranged.key, b, k), i, 2),
            part.take(self.cut(arranged.value, b, k), i, 2),
            bias,
            None if lengths is None else lax.dynamic_slice_in_dim(lengths, b, self.batch, 0),
            query_segments,
            key_segments,
        )

    def join(self, x: Array) -> Array:
        """Results of all steps (steps, b, k, G, t, ...) as (B, K, G, T', ...)."""
        tail = x.shape[5:]
        x = x.reshape(self.batch_steps, self.head_steps, self.part.num_blocks, *x.shape[1:])
        x = jnp.moveaxis(x, 2, 5)  # (bs, ks, b, k, G, blocks, t)
        x = jnp.moveaxis(x, 1, 2)  # (bs, b, ks, k, G, blocks, t)
        s = x.shape
        return x.reshape(s[0] * s[1], s[2] * s[3], s[4], s[5] * s[6], *tail)


def blocks_at_once(part: Part, arranged: Arranged, num_keys: int) -> tuple[Block, Block]:
    """All blocks, stacked along a new axis of each array, and the numbers of these axes (for vmap)."""
    numbers = jnp.arange(part.num_blocks, dtype=jnp.int32)
    bias = None
    if arranged.bias is not None:
        bias = arranged.bias
        bias = (
            part.split_queries(bias, 3)
            if bias.shape[3] > 1
            else jnp.repeat(bias[:, :, :, None], part.num_blocks, 3)
        )
        if bias.shape[5] > 1:
            bias = jax.vmap(lambda x, i: part.take(x, i, 4), in_axes=(3, 0), out_axes=3)(bias, numbers)
    segments = arranged.query_segments, arranged.key_segments
    blocks = Block(
        jax.vmap(part.query_index)(numbers),
        jax.vmap(lambda i: part.key_index(i, num_keys))(numbers),
        part.split_queries(arranged.query, 3),
        part.take_all(arranged.key, 2),
        part.take_all(arranged.value, 2),
        bias,
        arranged.key_lengths,
        None if segments[0] is None else part.split_queries(segments[0], 1),
        None if segments[1] is None else part.take_all(segments[1], 1),
    )
    has = lambda x, axis: None if x is None else axis  # noqa: E731
    axes = Block._make([0, 0, 3, 2, 2, has(bias, 3), None, has(segments[0], 1), has(segments[1], 1)])
    return blocks, axes
