"""Forward and backward of local attention over the parts of a pattern, as one differentiable function.

On a CPU a loop takes one block of queries at a time, so that its scores stay in cache; elsewhere all blocks
go at once. The backward pass is written by hand: it saves the output and the logarithm of each softmax sum,
and computes each block's scores anew (as FlashAttention does, Dao et al. 2022, arXiv 2205.14135, section 3.1
and appendix B).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from brl_jax.attention.core.arguments import starts, zero_padding
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.products import merge_heads, merged_product, product, split_heads
from brl_jax.attention.core.softmax import MASKED, SoftmaxSums, merge_sums, normalise
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.local import xla_cpu as window_tiles
from brl_jax.attention.local.blocks import (
    Arranged,
    Block,
    Inputs,
    Loop,
    Spec,
    arrange,
    block_positions,
    block_scores,
    blocks_at_once,
    call_bias,
    gradient_block,
    softmax_block,
)
from brl_jax.attention.local.parts import Call, Part


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(spec: Spec, query: Array, key: Array, value: Array, bias: Any, inputs: Inputs) -> Array:
    return _forward(spec, query, key, value, bias, inputs)[0]


def _attend_forward(spec, query, key, value, bias, inputs):
    out, lse = _forward(spec, query, key, value, bias, inputs)
    return out, (query, key, value, bias, inputs, out, lse)


def _attend_backward(spec, saved, d_out):
    query, key, value, bias, inputs, out, lse = saved
    d_query, d_key, d_value, d_bias = _backward(spec, query, key, value, bias, inputs, out, lse, d_out)
    return d_query, d_key, d_value, d_bias, Inputs(None, None, None, None, None)


attend.defvjp(_attend_forward, _attend_backward)


def _query_block_loop(width: int) -> int:
    """Queries of a block on a CPU: a tile of scores must be large enough for XLA to share it among cores."""
    return 256 if width >= 128 else 128


def _query_block_batched(width: int) -> int:
    """Queries of a block where all go at once: the multiple of 128 nearest to the window, up to 512."""
    return min(512, max(128, (width + 64) // 128 * 128))


def _parts(spec: Spec, query: Array, key: Array, loop: bool) -> list[Part]:
    call = Call(
        query.shape[1],
        key.shape[1],
        spec.query_offset,
        spec.key_offset,
        spec.is_causal,
        _query_block_loop if loop else _query_block_batched,
    )
    return spec.pattern.parts(call)


def _tiling(spec: Spec, query: Array, key: Array, bias: Any) -> window_tiles.Tiling | None:
    return window_tiles.Tiling.of(spec, query, key) if bias is None else None


def _forward(
    spec: Spec, query: Array, key: Array, value: Array, bias: Any, inputs: Inputs
) -> tuple[Array, Array]:
    """out (B, T, N, H) and log-sum-exp (B, K, G, T), which is -MASKED for rows that see nothing."""
    num_queries, num_keys, kv_heads = query.shape[1], key.shape[1], key.shape[2]

    def on_part(part: Part, loop: bool, q, k, v, bias, inputs, finish) -> Any:
        """finish(sums) of the part's queries (B, K, G, T')."""
        arranged = arrange(part, q, k, v, bias, inputs)
        own_bias = None if arranged.bias is not None else bias
        multiply = merged_product if loop else product

        def one(block: Block) -> Any:
            scores = block_scores(spec, part, num_keys, inputs.key_offset, own_bias, block, multiply)
            return finish(softmax_block(scores, block.value, multiply))

        if loop:
            walk = Loop.of(part, q, all_heads=own_bias is not None)
            results = lax.map(lambda step: one(walk.block(arranged, inputs, num_keys, step)), walk.steps)
            return jax.tree.map(walk.join, results)
        blocks, axes = blocks_at_once(part, arranged, inputs, num_keys)
        results = jax.vmap(one, in_axes=(axes,), out_axes=3)(blocks)
        return jax.tree.map(lambda x: x.reshape(*q.shape[:3], part.queries.size, *x.shape[5:]), results)

    def on_parts(loop: bool, query, key, value, bias, inputs) -> tuple[Array, Array]:
        q = split_heads(query, kv_heads)
        k, v = (x.transpose(0, 2, 1, 3) for x in (key, value))
        parts = _parts(spec, query, key, loop)
        if len(parts) == 1:
            rows = parts[0].queries

            def finish(sums: SoftmaxSums) -> tuple[Array, Array]:
                out, lse = normalise(sums)
                return out.astype(query.dtype), lse

            out, lse = on_part(parts[0], loop, q, k, v, bias, inputs, finish)
            return rows.restore(out, 3, num_queries), rows.restore(lse, 3, num_queries, -MASKED)
        every = []
        for part in parts:
            sums = on_part(part, loop, q, k, v, bias, inputs, lambda sums: sums)
            restored = (
                part.queries.restore(x, 3, num_queries, fill) for x, fill in zip(sums, (MASKED, 0.0, 0.0))
            )
            every.append(SoftmaxSums(*restored))
        return normalise(merge_sums(*every))

    def run(loop: bool, query, key, value, bias, inputs):
        query = zero_padding(query, inputs.query_lengths)
        key, value = (zero_padding(x, inputs.key_lengths) for x in (key, value))
        tiling = _tiling(spec, query, key, bias) if loop else None
        if tiling is not None:
            out, lse = window_tiles.forward(tiling, spec, query, key, value, inputs)
        else:
            out, lse = on_parts(loop, query, key, value, bias, inputs)
            out = merge_heads(out)
        if inputs.query_lengths is not None:
            inside = jnp.arange(num_queries, dtype=jnp.int32)[None, :] < inputs.query_lengths[:, None]
            out = jnp.where(inside[:, :, None, None], out, jnp.zeros((), out.dtype))
            lse = jnp.where(inside[:, None, None], lse, -MASKED)
        return out.astype(query.dtype), lse

    return lax.platform_dependent(
        query,
        key,
        value,
        bias,
        inputs,
        cpu=functools.partial(run, True),
        default=functools.partial(run, False),
    )


def _backward(spec: Spec, query, key, value, bias, inputs: Inputs, out, lse, d_out):
    """Gradients of query, key, value and bias."""
    num_queries, num_keys, kv_heads = query.shape[1], key.shape[1], key.shape[2]

    def on_part(part: Part, loop: bool, q, k, v, do, lse, delta, bias, inputs):
        arranged = arrange(part, q, k, v, bias, inputs)
        own_bias = None if arranged.bias is not None else bias
        multiply = merged_product if loop else product
        rows = part.queries
        do_a = rows.arrange(do, 3)
        lse_a, delta_a = rows.arrange(lse, 3, -MASKED), rows.arrange(delta, 3)
        transposed = lambda x: rows.arrange(x.transpose(0, 1, 4, 2, 3), 4)  # noqa: E731 (B, K, H, G, T')
        q_t, do_t = transposed(q), transposed(do)

        def one(block: Block, q_t, do, do_t, lse, delta):
            """Gradients of one block; d_bias: of the position bias's arrays, or of the block's own bias."""
            scores = block_scores(spec, part, num_keys, inputs.key_offset, own_bias, block, multiply)
            d_scores, dq, dk, dv = gradient_block(
                scores, block, q_t, do, do_t, lse, delta, spec.scale, multiply
            )
            d_bias = None
            if block.bias is not None:
                axes = [a for a in range(5) if block.bias.shape[a] == 1]
                d_bias = d_scores.sum(axes, keepdims=True)
            elif own_bias is not None:
                positions = block_positions(spec, block, inputs.key_offset)
                floats, rebuild = _split_floats(own_bias)
                call = lambda floats: call_bias(rebuild(floats), positions, d_scores.shape)  # noqa: E731
                _, pull = jax.vjp(call, floats)
                d_bias = jax.tree.map(
                    lambda x: x.astype(jnp.float32), pull(d_scores.sum(0, keepdims=True))[0]
                )
            return dq, dk, dv, d_bias

        if loop:
            walk = Loop.of(part, q, all_heads=own_bias is not None)
            dq, dk, dv, d_bias = _loop_gradients(
                walk, one, arranged, inputs, num_keys, (q_t, do_a, do_t, lse_a, delta_a), own_bias
            )
        else:
            dq, dk, dv, d_bias = _gradients_at_once(
                part, one, arranged, inputs, num_keys, (q_t, do_a, do_t, lse_a, delta_a)
            )
        if arranged.bias is not None:
            if arranged.bias.shape[4] > 1:
                d_bias = part.keys.restore(d_bias, 4, num_keys)
            if arranged.bias.shape[3] > 1:
                d_bias = rows.restore(d_bias, 3, num_queries)
            d_bias = d_bias.reshape(bias.shape)
        dk, dv = (part.keys.restore(x, 3, num_keys) for x in (dk, dv))
        return rows.restore(dq, 3, num_queries), dk, dv, d_bias

    def run(loop: bool, query, key, value, bias, inputs, out, lse, d_out):
        query, out, d_out = (zero_padding(x, inputs.query_lengths) for x in (query, out, d_out))
        key, value = (zero_padding(x, inputs.key_lengths) for x in (key, value))
        tiling = _tiling(spec, query, key, bias) if loop else None
        if tiling is not None:
            gradients = window_tiles.backward(tiling, spec, query, key, value, inputs, out, lse, d_out)
            return *(x.astype(query.dtype) for x in gradients), None
        q, o, do = (split_heads(x, kv_heads) for x in (query, out, d_out))
        k, v = (x.transpose(0, 2, 1, 3) for x in (key, value))
        delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
        parts = [
            on_part(part, loop, q, k, v, do, lse, delta, bias, inputs)
            for part in _parts(spec, query, key, loop)
        ]
        dq, dk, dv, d_bias = (
            parts[0]
            if len(parts) == 1
            else jax.tree.map(lambda *x: sum(y.astype(jnp.float32) for y in x), *parts)
        )
        dk, dv = (x.transpose(0, 3, 1, 2).astype(key.dtype) for x in (dk, dv))
        return merge_heads(dq).astype(query.dtype), dk, dv, d_bias

    d_query, d_key, d_value, d_bias = lax.platform_dependent(
        query, key, value, bias, inputs, out, lse, d_out,
        cpu=functools.partial(run, True), default=functools.partial(run, False),
    )  # fmt: skip
    if isinstance(bias, jax.Array):
        d_bias = d_bias.astype(bias.dtype)
    elif bias is not None:
        d_bias = _join_floats(bias, d_bias)
    return d_query, d_key, d_value, d_bias


def _loop_gradients(
    walk: Loop, one, arranged: Arranged, inputs: Inputs, num_keys: int, rows: tuple, own_bias
):
    """Gradients in the arranged order, step after step; keys' and bias's are summed in the loop's carry."""
    part = walk.part
    q_t, do, do_t, lse, delta = rows
    d_keys = jnp.zeros((*q_t.shape[:3], part.keys.size), jnp.float32)
    if arranged.bias is not None:
        d_bias = jnp.zeros(arranged.bias.shape, jnp.float32)
    elif own_bias is not None:
        d_bias = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), _split_floats(own_bias)[0])
    else:
        d_bias = None

    def add_keys(total, step, piece):
        b, k, i = walk.place(step)
        mine = lax.dynamic_slice(total, starts(b, k, 0, 0), (walk.batch, walk.heads, *total.shape[2:]))
        return lax.dynamic_update_slice(total, part.add(mine, i, piece), starts(b, k, 0, 0))

    def add_bias(total, step, piece):
        if arranged.bias is None:
            return jax.tree.map(jnp.add, total, piece)
        b, k, i = walk.place(step)
        mine = walk.rows(total, step, 3)
        mine = mine + piece if mine.shape[4] == 1 else part.add(mine, i, piece)
        places = (b, k, 0, i * part.block, 0)
        start = starts(*(p if size > 1 else 0 for p, size in zip(places, total.shape)))
        return lax.dynamic_update_slice(total, mine, start)

    def body(carry, step):
        dk, dv, d_bias = carry
        dq, dk_piece, dv_piece, d_bias_piece = one(
            walk.block(arranged, inputs, num_keys, step),
            walk.rows(q_t, step, 4), walk.rows(do, step, 3), walk.rows(do_t, step, 4),
            walk.rows(lse, step, 3), walk.rows(delta, step, 3),
        )  # fmt: skip
        d_bias = d_bias if d_bias is None else add_bias(d_bias, step, d_bias_piece)
        return (add_keys(dk, step, dk_piece), add_keys(dv, step, dv_piece), d_bias), dq

    totals = vary_like((d_keys, d_keys, d_bias), (arranged, inputs, rows))
    (dk, dv, d_bias), dq = lax.scan(body, totals, walk.steps)
    return walk.join(dq), dk, dv, d_bias


def _gradients_at_once(part: Part, one, arranged: Arranged, inputs: Inputs, num_keys: int, rows: tuple):
    """Gradients in the arranged order, all blocks in one go."""
    q_t, do, do_t, lse, delta = rows
    blocks, axes = blocks_at_once(part, arranged, inputs, num_keys)
    cut = part.split_queries
    dq, dk, dv, d_bias = jax.vmap(one, in_axes=(axes, 4, 3, 4, 3, 3), out_axes=(3, 3, 3, 0))(
        blocks, cut(q_t, 4), cut(do, 3), cut(do_t, 4), cut(lse, 3), cut(delta, 3)
    )
    dq = dq.reshape(arranged.query.shape)
    if arranged.bias is not None:
        shape = arranged.bias.shape
        if shape[4] > 1:
            numbers = jnp.arange(part.num_blocks, dtype=jnp.int32)
            empty = jnp.zeros((*d_bias.shape[1:5], shape[4]), jnp.float32)
            d_bias = jax.vmap(lambda i, piece: part.add(empty, i, piece))(numbers, d_bias)
        d_bias = jnp.moveaxis(d_bias, 0, 3).reshape(shape) if shape[3] > 1 else d_bias.sum(0)
    else:
        d_bias = jax.tree.map(lambda x: x.sum(0), d_bias)
    return dq, part.add_all(dk), part.add_all(dv), d_bias


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _split_floats(bias: PositionBias):
    """The floating-point leaves of a bias, and a function that puts such leaves back."""
    leaves, structure = jax.tree.flatten(bias)

    def rebuild(floats: list) -> PositionBias:
        given = iter(floats)
        return jax.tree.unflatten(structure, [next(given) if _is_float(x) else x for x in leaves])

    return [x for x in leaves if _is_float(x)], rebuild


def _join_floats(bias: PositionBias, gradients: list) -> PositionBias:
    """A cotangent for the whole bias: float0 zeros for the leaves that are not floating point."""
    given = iter(gradients)

    def cotangent(x):
        if _is_float(x):
            return next(given).astype(jnp.result_type(x))
        return np.zeros(np.shape(x), jax.dtypes.float0)

    return jax.tree.map(cotangent, bias)
