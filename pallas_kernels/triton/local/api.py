"""Block-sparse softmax attention on GPUs: the differentiable call."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.absent import existing, mark_absent, zero_absent
from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import PairTile, adjustable, padded
from pallas_kernels.triton.local.lists import BlockLists, Pattern, make_lists
from pallas_kernels.varying import vary_alike


class LocalTiles(NamedTuple):
    """The three kernels' sizes."""

    forward: PairTile
    query_gradient: PairTile
    key_gradient: PairTile


# By minimum compute capability and padded head dimension. Chosen by the compiler's counts of registers and spills
# (`python -m eval.gpu_costs`), and (90, 128) by times on an H200.
_TILES = {
    (100, 64): LocalTiles(PairTile(128, 64, 4, 3), PairTile(128, 64, 8, 2), PairTile(64, 128, 8, 2)),
    (100, 128): LocalTiles(PairTile(128, 64, 8, 3), PairTile(64, 64, 4, 2), PairTile(64, 128, 8, 2)),
    (100, 256): LocalTiles(PairTile(64, 32, 8, 2), PairTile(64, 32, 8, 1), PairTile(32, 32, 8, 1)),
    (90, 64): LocalTiles(*3 * [PairTile(64, 64, 4, 2)]),
    (90, 128): LocalTiles(*3 * [PairTile(64, 64, 4, 2)]),
    (90, 256): LocalTiles(PairTile(64, 32, 8, 2), PairTile(32, 32, 4, 2), PairTile(32, 32, 8, 1)),
    (80, 64): LocalTiles(PairTile(64, 64, 4, 2), PairTile(64, 64, 4, 2), PairTile(64, 32, 4, 2)),
    (80, 128): LocalTiles(PairTile(64, 64, 4, 2), PairTile(64, 64, 8, 1), PairTile(64, 64, 8, 1)),
    (80, 256): LocalTiles(PairTile(64, 32, 8, 1), PairTile(32, 32, 8, 1), PairTile(32, 32, 8, 1)),
}
# With a soft cap, whose derivative needs additional registers.
_CAPPED = {
    (90, 128): _TILES[90, 128]._replace(key_gradient=PairTile(64, 64, 8, 2)),
    (90, 256): _TILES[90, 256]._replace(query_gradient=PairTile(32, 32, 8, 1)),
}
# float32 needs twice the registers and shared memory of a 16-bit type.
_FLOAT32 = LocalTiles(PairTile(32, 32, 4, 1), PairTile(32, 32, 4, 1), PairTile(32, 32, 4, 1))
# Small tiles keep Triton's interpreter fast and exercise every kind of edge.
_INTERPRETED = LocalTiles(PairTile(32, 16, 4, 1), PairTile(32, 16, 4, 1), PairTile(16, 32, 4, 1))


@adjustable("local")
def choose_tiles(head_dim: int, dtype: Any, capped: bool) -> LocalTiles:
    """Returns the sizes for a head dimension and dtype, with or without a soft cap, on the target GPU."""
    table = _TILES | _CAPPED if capped else _TILES
    return bridge.tuned(table, dtype, max(64, padded(head_dim)), _FLOAT32, _INTERPRETED)


class _LocalCall(NamedTuple):
    """Everything static about one call."""

    pattern: Pattern
    scale: float
    soft_cap: float | None
    segments: bool
    sinks: bool
    with_log_sum: bool


def local_unsupported(query: Any, key: Any, value: Any) -> str | None:
    """Returns why the kernels do not support arrays of these shapes and dtypes; None if they do."""
    return bridge.array_unsupported(query, value, most_head_dim=256)


def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    pattern: Pattern,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_segment_ids: Int[Array, "B S"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    key_lengths: Int[Array, " B"] | None = None,
    return_log_sum_exp: bool = False,
    known: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]] | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention over any pattern of pairs, at the cost of the blocks that the pattern touches.

    BRL-Attention (OpenReview Vpyg3fqXbl), equation 1. One launch forward and two backward, which need no memory beyond
    their results and one float32 number per row. Differentiable in query, key and value.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16, H up to 256.
      key, value: (B, S, K, H) of the same dtype; K divides N, and query head g reads key head g // (N / K).
      pattern: which pairs see each other.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      logits_soft_cap: c > 0, replaces the scaled scores s by c tanh(s / c).
      sinks: (N,) logits without values, which join each row's softmax; they get gradients too.
      query_segment_ids, key_segment_ids: ints, both or neither; a query sees the keys of its own segment.
      query_lengths, key_lengths: (B,) ints, how many tokens exist; tokens beyond never influence a result.
      return_log_sum_exp: also return the natural logarithm of each row's sum of exponentials.
      known: the result of an earlier call, with its log-sum-exp. The forward kernel is then skipped, and the gradient
        is the earlier call's.

    Returns:
      (B, T, N, H) in query's dtype, zero where a query sees nothing; with `return_log_sum_exp` also (B, T, N) float32,
      -inf where a query sees nothing.

    Raises:
      NotImplementedError: Triton is missing, the GPU is too old, or the dtype or head dimension is not supported.
    """
    bridge.refuse(local_unsupported(query, key, value))
    batch, length, _, head_dim = query.shape
    num_keys = key.shape[1]
    exists = [
        None if n is None else existing(n, size)
        for n, size in ((query_lengths, length), (key_lengths, num_keys))
    ]
    ids: tuple[Array, Array] | None = None
    if query_segment_ids is not None or any(x is not None for x in exists):
        query_exists, key_exists = (
            jnp.ones((1, size), bool) if x is None else x for x, size in zip(exists, (length, num_keys))
        )
        ids = mark_absent(query_segment_ids, key_segment_ids, query_exists, key_exists, batch=batch)
        query = zero_absent(query, exists[0])
        key, value = zero_absent(key, exists[1]), zero_absent(value, exists[1])
    call = _LocalCall(
        pattern,
        1.0 / math.sqrt(head_dim) if scale is None else float(scale),
        logits_soft_cap,
        ids is not None,
        sinks is not None,
        return_log_sum_exp,
    )
    if ids is None:
        empty = jnp.zeros((batch, 1), jnp.int32)
        ids = (empty, empty)
    sinks = jnp.zeros((1,), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    # Repeat the sinks for each sequence, so that `vmap` can map them.
    sinks = jnp.broadcast_to(sinks, (batch, *sinks.shape))
    if known is not None:
        known_out, known_sums = known
        # In base 2 and inf where a query sees nothing, as the forward kernel writes them.
        known_sums = jnp.where(jnp.isneginf(known_sums), jnp.inf, known_sums * math.log2(math.e))
        known = known_out, jnp.moveaxis(known_sums, 2, 1)
    out, log_sums = _attend(*vary_alike(query, key, value, *ids, sinks), known, call)
    if not return_log_sum_exp:
        return zero_absent(out, exists[0])
    return zero_absent(out, exists[0]), jnp.moveaxis(log_sums, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attend(query, key, value, query_ids, key_ids, sinks, known, call: _LocalCall):
    return _attend_forward(query, key, value, query_ids, key_ids, sinks, known, call)[0]


def _attend_forward(query, key, value, query_ids, key_ids, sinks, known, call: _LocalCall):
    if known is None:
        out, log_sums = _run_forward(call, query, key, value, query_ids, key_ids, sinks)
    else:
        out, log_sums = known
    natural = (
        jnp.where(jnp.isposinf(log_sums), -jnp.inf, log_sums * math.log(2.0))
        if call.with_log_sum
        else log_sums
    )
    return (out, natural), (query, key, value, query_ids, key_ids, sinks, out, log_sums)


def _attend_backward(call: _LocalCall, saved, gradients):
    query, key, value, query_ids, key_ids, sinks, out, log_sums = saved
    d_out, d_log_sums = gradients
    if not call.with_log_sum:
        d_log_sums = jnp.zeros((query.shape[0], 1), jnp.float32)
    else:
        d_log_sums = jnp.where(jnp.isposinf(log_sums), 0.0, d_log_sums)
    *gradients, delta = _run_backward(
        call, query, key, value, query_ids, key_ids, out, d_out.astype(query.dtype), log_sums, d_log_sums
    )
    d_sinks = jnp.zeros_like(sinks)
    if call.sinks:  # a sink acts as one more key, whose value is 0
        weights = jnp.exp2(sinks[:, :, None] * math.log2(math.e) - log_sums)
        d_sinks = -jnp.sum(weights * delta, 2)
    return *gradients, None, None, d_sinks, None


_attend.defvjp(_attend_forward, _attend_backward)


def _constants(
    call: _LocalCall, query: Array, key: Array, tile: PairTile, lists: BlockLists
) -> dict[str, Any]:
    (_, length, heads, head_dim), (num_keys, kv_heads) = query.shape, key.shape[1:3]
    return {
        "T": length,
        "S": num_keys,
        "N": heads,
        "G": heads // kv_heads,
        "H": head_dim,
        "HP": padded(head_dim),
        "SCALE": call.scale,
        "CAP": call.soft_cap or 0.0,
        "SEGMENTS": call.segments,
        "CONSECUTIVE": lists.consecutive,
        "PRECISION": "ieee" if query.dtype == jnp.float32 else "tf32",
        "BM": tile.block_q,
        "BN": tile.block_k,
    }


@bridge.fold_vmap
def _run_forward(call: _LocalCall, query, key, value, query_ids, key_ids, sinks):
    from pallas_kernels.triton.local import forward

    batch, length, heads, _ = query.shape
    tile = choose_tiles(query.shape[3], query.dtype, call.soft_cap is not None).forward
    lists = make_lists(call.pattern, tile.block_q, tile.block_k, False)
    return bridge.launch(
        forward.local_forward,
        (query, key, value, *map(jnp.asarray, lists.arrays()), query_ids, key_ids, sinks),
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        (-(-length // tile.block_q), heads, batch),
        _constants(call, query, key, tile, lists) | {"SINKS": call.sinks},
        tile,
    )


@bridge.fold_vmap
def _run_backward(call: _LocalCall, query, key, value, query_ids, key_ids, out, d_out, log_sums, d_log_sums):
    from pallas_kernels.triton.local import backward

    ids = (query_ids, key_ids)
    batch, length, heads, _ = query.shape
    tiles = choose_tiles(query.shape[3], query.dtype, call.soft_cap is not None)
    tile = tiles.query_gradient
    lists = make_lists(call.pattern, tile.block_q, tile.block_k, False)
    d_query, delta = bridge.launch(
        backward.local_query_gradient,
        (query, key, value, out, d_out, log_sums, d_log_sums, *map(jnp.asarray, lists.arrays()), *ids),
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        (-(-length // tile.block_q), heads, batch),
        _constants(call, query, key, tile, lists) | {"LOG_SUMS": call.with_log_sum},
        tile,
    )  # fmt: skip
    tile = tiles.key_gradient
    lists = make_lists(call.pattern, tile.block_q, tile.block_k, True)
    d_key, d_value = bridge.launch(
        backward.local_key_gradient,
        (
            query,
            key,
            value,
            d_out,
            log_sums,
            delta,
            *map(jnp.asarray, lists.arrays()),
            query_ids,
            key_ids,
        ),
        (jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(value.shape, value.dtype)),
        (-(-key.shape[1] // tile.block_k), key.shape[2], batch),
        _constants(call, query, key, tile, lists),
        tile,
    )
    return d_query, d_key, d_value, delta
