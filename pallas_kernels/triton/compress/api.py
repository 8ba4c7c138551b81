"""Differential cross-attention from a history into a few tokens on GPUs: the differentiable call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import SCORES, adjustable, padded, split
from pallas_kernels.varying import vary_alike

#: For each attention, its output, with query's shape, and with softmax the base-2 log-sum-exp (B, N, M), for blocks
#: (B, C, N, M): inf if a row sees no key.
Parts = tuple[tuple[Array, ...], tuple[Array | None, ...]]

#: Maximum number of compressed tokens in one program.
MOST_TOKENS = 128


class HistoryTile(NamedTuple):
    """Keys in a block, Triton's warps and stages, and the programs that a multiprocessor runs at the same time."""

    block_k: int
    num_warps: int
    num_stages: int
    resident: int = 1


class HistoryTiles(NamedTuple):
    """The sizes of the forward kernel and of the one or two backward kernels."""

    forward: HistoryTile
    backward: HistoryTile


# By minimum compute capability. Chosen by the compiler's counts of registers and spills (`python -m eval.gpu_costs`),
# and for 90 by times on an H200. There, `_SMALL` is for at most 64 tokens of at most 64 features.
_TILES = {
    100: HistoryTiles(HistoryTile(64, 8, 2), HistoryTile(32, 8, 1)),
    90: HistoryTiles(HistoryTile(64, 8, 3), HistoryTile(64, 8, 2)),
    80: HistoryTiles(HistoryTile(64, 4, 2), HistoryTile(32, 4, 1)),
}
_SMALL = _TILES[90]._replace(forward=HistoryTile(64, 4, 3, resident=2))
_FLOAT32 = HistoryTiles(HistoryTile(32, 8, 1), HistoryTile(16, 8, 1))
_INTERPRETED = HistoryTiles(HistoryTile(16, 4, 1), HistoryTile(16, 4, 1))
# For Ampere. The second kernel of `tiled_backward` takes _TILED_TOKENS at a time.
_TILED = HistoryTiles(HistoryTile(32, 8, 2), HistoryTile(32, 8, 2))
_TILED_TOKENS = 32


class _CompressCall(NamedTuple):
    """Everything static about one call. A block's history has `history` keys, and the next block's starts `step` keys
    later; with a step of 0 there is one block."""

    scale: float
    score: str
    contrast: bool
    every_key: bool
    history: int
    step: int = 0


@adjustable("compress")
def choose_tiles(query: Any) -> HistoryTiles:
    """Returns the kernels' sizes for queries (..., M, N, H) on the target GPU."""
    if bridge.interprets():
        return _INTERPRETED
    if jnp.dtype(query.dtype).itemsize > 2:
        return _FLOAT32
    if is_large_for_ampere(query):
        return _TILED
    capability = bridge.tuned_for(_TILES)
    is_small = max(query.shape[-3], query.shape[-1]) <= 64
    return _SMALL if capability == 90 and is_small else _TILES[capability]


def is_large_for_ampere(query: Any) -> bool:
    """Whether an Ampere GPU has too few registers for the backward pass in one kernel."""
    return bridge.target_capability() < 90 and max(query.shape[-3], query.shape[-1]) > 64


def compress_unsupported(query: Any, value: Any) -> str | None:
    """Returns why the kernels do not support queries (..., M, N, H) and values of these shapes and dtypes; None if they
    do."""
    if query.shape[-3] > MOST_TOKENS:
        return f"there must be at most {MOST_TOKENS} compressed tokens, got {query.shape[-3]}"
    if is_large_for_ampere(query) and jnp.dtype(query.dtype).itemsize > 2 and not bridge.interprets():
        # The kernels would spill and be slower than XLA's.
        return (
            "below compute capability 9.0, float32 supports at most 64 compressed tokens and a head_dim of at most 64, "
            f"got {query.shape[-3]} and {query.shape[-1]}"
        )
    return bridge.array_unsupported(query, value, most_head_dim=128)


def compress(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, "N"] | None,
    scale: float,
    score: str = "softmax",
    key_lengths: Int[Array, " B"] | None = None,
    return_parts: bool = False,
    known: Parts | None = None,
) -> Float[Array, "B M N H"] | tuple[Float[Array, "B M N H"], Parts]:
    """(sigma(c Q K1^T) - gamma sigma(c Q K2^T)) V, BRL-Attention (OpenReview Vpyg3fqXbl), equation 12.

    Both attentions read the history together, once. It is cut into enough segments to fill the GPU, whose sums are
    merged by their maxima. The backward pass reads the history once more, or twice on an A100 with more than 64 tokens
    or features. Differentiable in query, keys, value and gamma.

    Args:
      query: (B, M, N, H), M up to 128 and H up to 128; float32, bfloat16 or float16.
      key, contrast_key, value: (B, S, N, H) of the same dtype; contrast_key and gamma are given together or not at all.
      gamma: (N,) float32.
      scale: c.
      score: "softmax", "relu2" or "laplace".
      key_lengths: (B,) ints, how many keys exist.
      return_parts: also return what `known` takes.
      known: the parts of an earlier call. The forward kernel is then skipped, and the gradient is the earlier call's.

    Returns:
      (B, M, N, H) in query's dtype; rows that see no key give 0. With return_parts also the parts, in float32 and
      without gradients.

    Raises:
      NotImplementedError: `compress_unsupported` gives a reason.
    """
    lengths = None if key_lengths is None else key_lengths[:, None]
    known = jax.tree.map(lambda x: x[:, None], known)
    call = _CompressCall(float(scale), score, contrast_key is not None, lengths is None, key.shape[1])
    found = _in_blocks(query[:, None], key, contrast_key, value, gamma, lengths, known, call)
    out, parts = jax.tree.map(lambda x: x[:, 0], found)
    return (out, parts) if return_parts else out


def compress_blocks(
    query: Float[Array, "B C M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, "N"] | None,
    scale: float,
    block_size: int,
    history_size: int,
    score: str = "softmax",
    history_lengths: Int[Array, "B C"] | None = None,
    known: Parts | None = None,
) -> tuple[Float[Array, "B C M N H"], Parts]:
    """`compress` for C blocks; block c reads the keys [c * block_size, c * block_size + history_size).

    Histories may overlap. The backward pass reads each history once for its block's gradient, and all keys once more
    for their own.

    Args:
      query: (B, C, M, N, H).
      key, contrast_key, value: (B, S, N, H), S at least history_size + (C - 1) * block_size.
      history_lengths: (B, C) ints, how many of a block's keys exist, counted from the end; more than history_size
        means all.
      gamma, scale, score, known: as in `compress`.

    Returns:
      (B, C, M, N, H), and the parts that `known` takes.

    Raises:
      NotImplementedError: `compress_unsupported` gives a reason.
    """
    every = history_lengths is None
    if history_lengths is not None:
        history_lengths = jnp.minimum(history_lengths.astype(jnp.int32), history_size)
    call = _CompressCall(float(scale), score, contrast_key is not None, every, history_size, block_size)
    return _in_blocks(query, key, contrast_key, value, gamma, history_lengths, known, call)


def _in_blocks(query, key, contrast_key, value, gamma, lengths, known, call: _CompressCall):
    bridge.refuse(compress_unsupported(query, value))
    if lengths is None:
        lengths = jnp.full(query.shape[:2], call.history)
    if contrast_key is None or gamma is None:
        contrast_key, gamma = jax.lax.stop_gradient(key), jnp.zeros(query.shape[3:4])
    arrays = vary_alike(query, key, contrast_key, value, gamma.astype(jnp.float32), lengths.astype(jnp.int32))
    return _compress(*arrays, known, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _compress(query, key, contrast_key, value, gamma, lengths, known, call: _CompressCall):
    return _compress_forward(query, key, contrast_key, value, gamma, lengths, known, call)[0]


def _compress_forward(query, key, contrast_key, value, gamma, lengths, known, call: _CompressCall):
    parts = _forward_parts(query, key, contrast_key, value, lengths, call) if known is None else known
    out = parts[0][0]
    if call.contrast:
        out = out - gamma[None, None, None, :, None] * parts[0][1]
    return (out.astype(query.dtype), parts), (query, key, contrast_key, value, gamma, lengths, parts)


def _forward_parts(query, key, contrast_key, value, lengths, call: _CompressCall) -> Parts:
    totals, tops, sums = _run_forward(call, query, key, contrast_key, value, lengths)
    if totals.shape[2] == 1:
        outs, log_sums = totals[:, :, 0], tops[:, :, 0]
    elif call.score == "softmax":
        highest = tops.max(2)
        weight = jnp.exp2(tops - highest[:, :, None])
        normaliser = (weight * sums).sum(2)
        blind = normaliser == 0.0
        normaliser = jnp.where(blind, 1.0, normaliser)
        outs = jnp.einsum("bzscnm,bzscmnh->bzcmnh", weight, totals) / normaliser.swapaxes(3, 4)[..., None]
        log_sums = jnp.where(blind, jnp.inf, highest + jnp.log2(normaliser))
    else:
        outs, log_sums = totals.sum(2), tops
    attentions = range(1 + call.contrast)
    kept = tuple(log_sums[:, i] if call.score == "softmax" else None for i in attentions)
    return tuple(outs[:, i] for i in attentions), kept


def _compress_backward(call: _CompressCall, saved, gradients):
    query, key, contrast_key, value, gamma, lengths, (outs, log_sums) = saved
    d_out, _ = gradients
    wide = d_out.astype(jnp.float32)
    deltas = jnp.stack([jnp.einsum("bcmnh,bcmnh->bcnm", wide, out) for out in outs], 1)
    log_sums = jnp.zeros_like(deltas) if log_sums[0] is None else jnp.stack(log_sums, 1)
    d_query, d_key, d_contrast, d_value = _run_backward(
        call,
        query, key, contrast_key, value, lengths, d_out.astype(query.dtype), log_sums, deltas,
        jnp.broadcast_to(gamma, (query.shape[0], *gamma.shape)),
    )  # fmt: skip
    d_query = d_query.sum(1).swapaxes(2, 3).astype(query.dtype)
    d_gamma = -deltas[:, 1].sum((0, 1, 3)) if call.contrast else jnp.zeros_like(gamma)
    return d_query, d_key, d_contrast, d_value, d_gamma, None, None


_compress.defvjp(_compress_forward, _compress_backward)


def _constants(call: _CompressCall, query: Array, key: Array, tile: HistoryTile) -> dict[str, Any]:
    batch, blocks, tokens, heads, head_dim = query.shape
    splits, segment = split(call.history, batch * blocks * heads, tile.block_k, tile.resident)
    return {
        "M": tokens,
        "S": key.shape[1],
        "C": blocks,
        "STEP": call.step,
        "R": call.history,
        "N": heads,
        "H": head_dim,
        "HP": padded(head_dim),
        "SPLITS": splits,
        "SEGMENT": segment,
        "SCALE": call.scale,
        "SCORE": SCORES[call.score],
        "CONTRAST": call.contrast,
        "PRECISION": "ieee" if query.dtype == jnp.float32 else "tf32",
        "BM": padded(tokens),
        "BN": tile.block_k,
    }


@bridge.fold_vmap
def _run_forward(call: _CompressCall, query, key, contrast_key, value, lengths):
    from pallas_kernels.triton.compress import forward

    attentions = 2 if call.contrast else 1
    batch, blocks, tokens, heads, _ = query.shape
    tile = choose_tiles(query).forward
    constants = _constants(call, query, key, tile)
    splits = constants["SPLITS"]
    rows = jax.ShapeDtypeStruct((attentions, splits, batch, blocks, heads, tokens), jnp.float32)
    results = jax.ShapeDtypeStruct((attentions, splits, *query.shape), jnp.float32)
    totals, tops, sums = bridge.launch(
        forward.compress_forward,
        (query, key, contrast_key, value, lengths),
        (results, rows, rows),
        (splits * blocks, heads, batch),
        constants,
        tile,
    )
    return tuple(jnp.moveaxis(x, 2, 0) for x in (totals, tops, sums))


@bridge.fold_vmap
def _run_backward(
    call: _CompressCall, query, key, contrast_key, value, lengths, d_out, log_sums, deltas, gamma
):
    from pallas_kernels.triton.compress import backward, tiled_backward

    batch, blocks, tokens, heads, head_dim = query.shape
    tile = choose_tiles(query).backward
    constants = _constants(call, query, key, tile)
    splits = constants["SPLITS"]
    statistics = (jnp.moveaxis(x, 1, 0) for x in (log_sums, deltas))
    arrays = (query, key, contrast_key, value, lengths, d_out, *statistics, gamma)
    parts = jax.ShapeDtypeStruct((splits, batch, blocks, heads, tokens, head_dim), jnp.float32)
    history = jax.ShapeDtypeStruct(key.shape, key.dtype)
    unused = jax.ShapeDtypeStruct((batch, 1), key.dtype)
    gradients = (history, history if call.contrast else unused, history)
    if call.step or is_large_for_ampere(query):
        (d_query,) = bridge.launch(
            tiled_backward.compress_token_gradient,
            arrays, (parts,), (splits * blocks, heads, batch), constants, tile,
        )  # fmt: skip
        constants["BM"] = min(_TILED_TOKENS, constants["BM"])
        tiles = -(-key.shape[1] // tile.block_k)
        d_key, d_contrast, d_value = bridge.launch(
            tiled_backward.compress_history_gradient,
            arrays,
            gradients,
            (tiles, heads, batch),
            constants,
            tile,
        )
    else:
        if head_dim > 64 and not bridge.interprets():
            constants["BM"] = MOST_TOKENS  # the kernel spills with 64 rows, but not with 128
        full = key.shape[1] % constants["SEGMENT"] == 0 and constants["HP"] == head_dim
        constants["EVEN"] = call.every_key and full
        d_query, d_key, d_contrast, d_value = bridge.launch(
            backward.compress_gradient, arrays, (parts, *gradients), (splits, heads, batch), constants, tile
        )
    if not call.contrast:
        d_contrast = jnp.zeros_like(contrast_key)
    return jnp.moveaxis(d_query, 1, 0), d_key, d_contrast, d_value
