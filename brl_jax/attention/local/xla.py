"""Local attention through XLA, over the parts of a pattern: forward and backward.

On a CPU a loop takes one block of queries at a time, whose scores stay in cache. Elsewhere all blocks are computed at
once. The backward pass is written by hand: it keeps the output and the log-sum-exp of each row, and computes each
block's scores again (FlashAttention, Dao et al. 2022, arXiv:2205.14135, section 3.1 and appendix B).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.attention.core.by_platform import Form
from brl_jax.attention.core.checks import starts, zero_padding
from brl_jax.attention.core.products import merge_heads, merged_product, product, split_heads
from brl_jax.attention.core.softmax import (
    MASKED,
    SoftmaxSums,
    add_sinks,
    empty_sums,
    merge_sums,
    normalise,
    residual,
)
from brl_jax.attention.core.varying import of_floats, vary_like
from brl_jax.attention.local import xla_cpu, xla_cpu_grid
from brl_jax.attention.local.blocks import (
    Arranged,
    Block,
    BlockLoop,
    arrange,
    block_positions,
    block_scores,
    blocks_at_once,
    call_bias,
    gradient_block,
    softmax_block,
)
from brl_jax.attention.local.parts import Part
from brl_jax.attention.local.patterns import CallArrays, PatternCall
from brl_jax.attention.local.xla_cpu import WindowTiling
from brl_jax.attention.local.xla_cpu_grid import GridShifts
from pallas_kernels.absent import existing


def forms(call: PatternCall) -> dict[str, Form]:
    """`local_attention` on a CPU and elsewhere, with a float32 residual. Keeps each row's log-sum-exp (B, N, T)."""

    def form(loop: bool) -> Form:
        def run(x: CallArrays) -> tuple[Any, Array]:
            out, lse = _outputs(call, x, loop)
            return _returned(call, x, out, lse), lse.reshape(lse.shape[0], -1, lse.shape[3])

        return Form(run, functools.partial(_gradient, call, loop))

    return {"cpu": form(True), "default": form(False)}


def plain(call: PatternCall, x: CallArrays) -> Array | tuple[Array, Array]:
    """`local_attention` by operations that JAX differentiates in every mode and any number of times."""
    return _returned(call, x, *_outputs(call, x, loop=False))


def _returned(
    call: PatternCall, x: CallArrays, out: Float[Array, "B T N H"], lse: Float[Array, "B K G T"]
) -> Array | tuple[Array, Array]:
    return (out, residual(_by_row(lse)[..., 0], x.sinks)) if call.return_residual else out


def _outputs(call: PatternCall, x: CallArrays, loop: bool) -> tuple[Array, Array]:
    """`_forward`, with the sinks included."""
    out, lse = _forward(call, x, loop)
    if x.sinks is not None:
        share, lse = add_sinks(lse, _by_head(x.sinks, lse))
        out = (out.astype(jnp.float32) * _by_row(share)).astype(out.dtype)
    return out, lse


def _gradient(
    call: PatternCall, loop: bool, operands: Any, results: Any, lse: Float[Array, "B N T"], d_results: Any
) -> tuple[CallArrays]:
    (x,) = operands
    out, _ = results if call.return_residual else (results, None)
    d_out, d_residual = d_results if call.return_residual else (d_results, None)
    lse = _by_kv_head(lse, x.key.shape[2])
    d_lse = None
    if d_residual is not None:
        # The residual of a row that sees no key does not depend on any score.
        by_head = _by_kv_head(d_residual.swapaxes(1, 2), x.key.shape[2])
        sees = jnp.abs(lse) < -MASKED
        d_lse = jnp.where(sees, by_head, 0.0)
    # The formulas for the keys' gradients hold with sinks in out and lse.
    gradients = _backward(call, x, out, lse, d_out, d_lse, loop)
    if x.sinks is not None:
        # A sink is one more key with the value 0.
        d_out = zero_padding(d_out, x.query_lengths).astype(jnp.float32)
        delta = jnp.sum(d_out * out.astype(jnp.float32), -1)
        delta = delta if d_lse is None else delta - _by_row(d_lse)[..., 0]
        weights = jnp.exp(_by_head(x.sinks, lse) - lse)
        d_sinks = -jnp.sum(_by_row(weights)[..., 0] * delta, (0, 1))
        if d_residual is not None:
            unseen = jnp.where(_by_row(sees)[..., 0], 0.0, d_residual)
            d_sinks = d_sinks + unseen.sum((0, 1))
        gradients = gradients._replace(sinks=d_sinks)
    return (gradients,)


def _by_kv_head(x: Float[Array, "B N T"], kv_heads: int) -> Float[Array, "B K G T"]:
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[2])


def _by_head(sinks: Float[Array, " N"], lse: Float[Array, "B K G T"]) -> Float[Array, "1 K G 1"]:
    return sinks.reshape(1, *lse.shape[1:3], 1)


def _by_row(x: Float[Array, "B K G T"]) -> Float[Array, "B T N 1"]:
    return x.reshape(x.shape[0], -1, x.shape[3]).swapaxes(1, 2)[..., None]


def _query_block_loop(width: int) -> int:
    """Queries in a block on a CPU: enough scores for XLA to divide among cores."""
    return 256 if width >= 128 else 128


def _query_block_batched(width: int) -> int:
    """Queries in a block if all blocks are computed at once: the multiple of 128 nearest to the window, up to 512."""
    return min(512, max(128, (width + 64) // 128 * 128))


def _parts(call: PatternCall, loop: bool) -> list[Part]:
    return call.pattern.parts(call, _query_block_loop if loop else _query_block_batched)


def _on_cpu(call: PatternCall, x: CallArrays) -> tuple[Any, Any] | None:
    """The plan and the module of a call's faster form on a CPU, or None."""
    if x.bias is not None:
        return None
    tiling = WindowTiling.of(call, x.query, x.key)
    if tiling is not None:
        return tiling, xla_cpu
    shifts = GridShifts.of(call, x.query, x.key) if x.query_segments is None else None
    return None if shifts is None else (shifts, xla_cpu_grid)


def _forward(call: PatternCall, x: CallArrays, loop: bool) -> tuple[Array, Array]:
    """out (B, T, N, H) and log-sum-exp (B, K, G, T), as `normalise` returns it; `loop` takes one block at a time."""
    num_queries, kv_heads = call.num_queries, x.key.shape[2]

    def on_part(part: Part, x: CallArrays, q, k, v, finish) -> Any:
        """finish(sums), for the part's queries (B, K, G, T')."""
        arranged = arrange(part, x, q, k, v)
        own_bias = None if arranged.bias is not None else x.bias
        multiply = merged_product if loop else product

        def one(block: Block) -> Any:
            scores, _ = block_scores(call, part, x.key_offset, own_bias, block, multiply)
            return finish(softmax_block(scores, block.value, multiply))

        if loop:
            walk = BlockLoop.of(part, q, all_heads=own_bias is not None)
            results = lax.map(lambda step: one(walk.block(arranged, call.num_keys, step)), walk.steps)
            return jax.tree.map(walk.join, results)
        blocks, axes = blocks_at_once(part, arranged, call.num_keys)
        results = jax.vmap(one, in_axes=(axes,), out_axes=3)(blocks)
        return jax.tree.map(lambda x: x.reshape(*q.shape[:3], part.queries.size, *x.shape[5:]), results)

    def on_parts(x: CallArrays) -> tuple[Array, Array]:
        q = split_heads(x.query, kv_heads)
        k, v = (y.transpose(0, 2, 1, 3) for y in (x.key, x.value))
        parts = _parts(call, loop)
        if not parts:
            return normalise(empty_sums(q.shape[:4], v.shape[3]))
        if len(parts) == 1:
            rows = parts[0].queries

            def finish(sums: SoftmaxSums) -> tuple[Array, Array]:
                out, lse = normalise(sums)
                return out.astype(x.query.dtype), lse

            out, lse = on_part(parts[0], x, q, k, v, finish)
            return rows.restore(out, 3, num_queries), rows.restore(lse, 3, num_queries, -MASKED)
        every = []
        for part in parts:
            sums = on_part(part, x, q, k, v, lambda sums: sums)
            restored = (
                part.queries.restore(y, 3, num_queries, fill) for y, fill in zip(sums, (MASKED, 0.0, 0.0))
            )
            every.append(SoftmaxSums(*restored))
        return normalise(merge_sums(*every))

    x = x.without_padding()
    fast = _on_cpu(call, x) if loop else None
    if fast is not None:
        plan, module = fast
        out, lse = module.forward(plan, call, x)
    else:
        out, lse = on_parts(x)
        out = merge_heads(out)
    if x.query_lengths is not None:
        inside = existing(x.query_lengths, num_queries)
        out = jnp.where(inside[:, :, None, None], out, jnp.zeros((), out.dtype))
        lse = jnp.where(inside[:, None, None], lse, -MASKED)
    return out.astype(x.query.dtype), lse


def _backward(
    call: PatternCall, x: CallArrays, out: Array, lse: Array, d_out: Array, d_lse: Array | None, loop: bool
) -> CallArrays:
    """Gradients of query, key, value and bias. A score's gradient is weight * (d_weight - delta + d_lse)."""
    num_queries, num_keys, kv_heads = call.num_queries, call.num_keys, x.key.shape[2]

    def on_part(part: Part, x: CallArrays, q, k, v, do, lse, delta):
        bias = x.bias
        arranged = arrange(part, x, q, k, v)
        own_bias = None if arranged.bias is not None else bias
        multiply = merged_product if loop else product
        rows = part.queries
        do_a = rows.arrange(do, 3)
        lse_a, delta_a = rows.arrange(lse, 3, -MASKED), rows.arrange(delta, 3)
        transposed = lambda y: rows.arrange(y.transpose(0, 1, 4, 2, 3), 4)  # noqa: E731 (B, K, H, G, T')
        q_t, do_t = transposed(q), transposed(do)

        def one(block: Block, q_t, do, do_t, lse, delta):
            """Gradients of one block; d_bias is for a position bias's leaves, or for the block's slice of an array."""
            scores, slope = block_scores(call, part, x.key_offset, own_bias, block, multiply)
            d_scores, dq, dk, dv = gradient_block(
                scores, slope, block, q_t, do, do_t, lse, delta, call.scale, multiply
            )
            d_bias = None
            if block.bias is not None:
                axes = [a for a in range(5) if block.bias.shape[a] == 1]
                d_bias = d_scores.sum(axes, keepdims=True)
            elif own_bias is not None:
                positions = block_positions(call, block, x.key_offset)
                _, pull = jax.vjp(lambda bias: call_bias(bias, positions, d_scores.shape), own_bias)
                d_bias = of_floats(pull(d_scores.sum(0, keepdims=True))[0])
                d_bias = jax.tree.map(lambda x: x.astype(jnp.float32), d_bias)
            return dq, dk, dv, d_bias

        if loop:
            walk = BlockLoop.of(part, q, all_heads=own_bias is not None)
            dq, dk, dv, d_bias = _loop_gradients(
                walk, one, arranged, num_keys, (q_t, do_a, do_t, lse_a, delta_a), own_bias
            )
        else:
            dq, dk, dv, d_bias = _gradients_at_once(
                part, one, arranged, num_keys, (q_t, do_a, do_t, lse_a, delta_a)
            )
        if arranged.bias is not None:
            # The arranged bias has one key or query too if no more of them are in reach.
            if bias.shape[3] > 1:
                d_bias = part.keys.restore(d_bias, 4, num_keys)
            if bias.shape[2] > 1:
                d_bias = rows.restore(d_bias, 3, num_queries)
            d_bias = d_bias.reshape(bias.shape)
        dk, dv = (part.keys.restore(y, 3, num_keys) for y in (dk, dv))
        return rows.restore(dq, 3, num_queries), dk, dv, d_bias

    out, d_out = (zero_padding(y, x.query_lengths) for y in (out, d_out))
    x = x.without_padding()
    fast = _on_cpu(call, x) if loop else None
    if fast is not None:
        plan, module = fast
        gradients = module.backward(plan, call, x, out, lse, d_out, d_lse)
        return CallArrays(*(y.astype(x.query.dtype) for y in gradients))
    q, o, do = (split_heads(y, kv_heads) for y in (x.query, out, d_out))
    k, v = (y.transpose(0, 2, 1, 3) for y in (x.key, x.value))
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)
    delta = delta if d_lse is None else delta - d_lse
    parts = [on_part(part, x, q, k, v, do, lse, delta) for part in _parts(call, loop)]
    if not parts:
        return CallArrays(jnp.zeros_like(x.query), jnp.zeros_like(x.key), jnp.zeros_like(x.value))
    dq, dk, dv, d_bias = (
        parts[0]
        if len(parts) == 1
        else jax.tree.map(lambda *pieces: sum(y.astype(jnp.float32) for y in pieces), *parts)
    )
    dk, dv = (y.transpose(0, 3, 1, 2).astype(x.key.dtype) for y in (dk, dv))
    return CallArrays(merge_heads(dq).astype(x.query.dtype), dk, dv, d_bias)


def _loop_gradients(walk: BlockLoop, one, arranged: Arranged, num_keys: int, rows: tuple, own_bias):
    """Gradients in the arranged order, one block at a time; the loop's carry sums d_key, d_value and d_bias."""
    part = walk.part
    q_t, do, do_t, lse, delta = rows
    d_keys = jnp.zeros((*q_t.shape[:3], part.keys.size), jnp.float32)
    if arranged.bias is not None:
        d_bias = jnp.zeros(arranged.bias.shape, jnp.float32)
    elif own_bias is not None:
        d_bias = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), of_floats(own_bias))
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
            walk.block(arranged, num_keys, step),
            walk.rows(q_t, step, 4), walk.rows(do, step, 3), walk.rows(do_t, step, 4),
            walk.rows(lse, step, 3), walk.rows(delta, step, 3),
        )  # fmt: skip
        d_bias = d_bias if d_bias is None else add_bias(d_bias, step, d_bias_piece)
        return (add_keys(dk, step, dk_piece), add_keys(dv, step, dv_piece), d_bias), dq

    totals = vary_like((d_keys, d_keys, d_bias), (arranged, rows))
    (dk, dv, d_bias), dq = lax.scan(body, totals, walk.steps)
    return walk.join(dq), dk, dv, d_bias


def _gradients_at_once(part: Part, one, arranged: Arranged, num_keys: int, rows: tuple):
    """Gradients in the arranged order, all blocks at once."""
    q_t, do, do_t, lse, delta = rows
    blocks, axes = blocks_at_once(part, arranged, num_keys)
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
