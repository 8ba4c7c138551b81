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

#: For each attention, its output (B, M, N, H) and, with softmax, the base-2 log-sum-exp (B, N, M): inf if a row sees no
#: key.
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
# For `tiled_backward`, whose second kernel takes _TILED_TOKENS at a time.
_TILED = HistoryTiles(HistoryTile(32, 8, 2), HistoryTile(32, 8, 2))
_TILED_TOKENS = 32


@adjustable("compress")
def choose_tiles(query: Any) -> HistoryTiles:
    """Returns the kernels' sizes for these tokens on the target GPU."""
    if bridge.interprets():
        return _INTERPRETED
    if takes_tiled_backward(query):
        return _TILED
    if jnp.dtype(query.dtype).itemsize > 2:
        return _FLOAT32
    capability = bridge.tuned_for(_TILES)
    is_small = max(query.shape[1], query.shape[3]) <= 64
    return _SMALL if capability == 90 and is_small else _TILES[capability]


def takes_tiled_backward(query: Any) -> bool:
    """Whether the backward pass uses two kernels, because an Ampere GPU has too few registers for one."""
    return bridge.target_capability() < 90 and max(query.shape[1], query.shape[3]) > 64


class _CompressCall(NamedTuple):
    """Everything static about one call."""

    scale: float
    score: str
    contrast: bool
    every_key: bool


def compress_unsupported(query: Any, value: Any) -> str | None:
    """Returns why the kernels do not support arrays of these shapes and dtypes; None if they do."""
    if query.shape[1] > MOST_TOKENS:
        return f"there must be at most {MOST_TOKENS} compressed tokens, got {query.shape[1]}"
    if takes_tiled_backward(query) and jnp.dtype(query.dtype).itemsize > 2 and not bridge.interprets():
        # The kernels would spill and be slower than XLA's.
        return (
            "below compute capability 9.0, float32 supports at most 64 compressed tokens and a head_dim of at most 64, "
            f"got {query.shape[1]} and {query.shape[3]}"
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
    reason = compress_unsupported(query, value)
    if reason is not None:
        raise NotImplementedError(reason)
    batch, heads = query.shape[0], query.shape[2]
    lengths = (
        jnp.full((batch,), key.shape[1], jnp.int32) if key_lengths is None else key_lengths.astype(jnp.int32)
    )
    call = _CompressCall(float(scale), score, contrast_key is not None, key_lengths is None)
    if contrast_key is None or gamma is None:
        contrast_key, gamma = jax.lax.stop_gradient(key), jnp.zeros((heads,), jnp.float32)
    arrays = vary_alike(query, key, contrast_key, value, gamma.astype(jnp.float32), lengths)
    found = _compress(*arrays, known, call)
    return found if return_parts else found[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _compress(query, key, contrast_key, value, gamma, lengths, known, call: _CompressCall):
    return _compress_forward(query, key, contrast_key, value, gamma, lengths, known, call)[0]


def _compress_forward(query, key, contrast_key, value, gamma, lengths, known, call: _CompressCall):
    parts = _forward_parts(query, key, contrast_key, value, lengths, call) if known is None else known
    out = parts[0][0]
    if call.contrast:
        out = out - gamma[None, None, :, None] * parts[0][1]
    return (out.astype(query.dtype), parts), (query, key, contrast_key, value, gamma, lengths, parts)


def _forward_parts(query, key, contrast_key, value, lengths, call: _CompressCall) -> Parts:
    totals, tops, sums = _run_forward(call)(query, key, contrast_key, value, lengths)
    attentions = range(1 + call.contrast)
    # (B, A, SPLITS, N, M, ...)
    if call.score == "softmax":
        highest = tops.max(2)
        weight = jnp.exp2(tops - highest[:, :, None])
        normaliser = (weight * sums).sum(2)
        blind = normaliser == 0.0
        outs = (
            jnp.einsum("bzsnm,bzsnmh->bznmh", weight, totals) / jnp.where(blind, 1.0, normaliser)[..., None]
        )
        every = jnp.where(blind, jnp.inf, highest + jnp.log2(jnp.where(blind, 1.0, normaliser)))
        log_sums: tuple[Array | None, ...] = tuple(every[:, i] for i in attentions)
    else:
        outs, log_sums = totals.sum(2), (None,) * len(attentions)
    outs = outs.transpose(0, 1, 3, 2, 4)
    return tuple(outs[:, i] for i in attentions), log_sums


def _compress_backward(call: _CompressCall, saved, gradients):
    query, key, contrast_key, value, gamma, lengths, (outs, log_sums) = saved
    d_out, _ = gradients
    wide = d_out.astype(jnp.float32)
    deltas = jnp.stack([jnp.einsum("bmnh,bmnh->bnm", wide, out) for out in outs], 1)
    log_sums = jnp.zeros_like(deltas) if log_sums[0] is None else jnp.stack(log_sums, 1)
    d_query, d_key, d_contrast, d_value = _run_backward(call)(
        query, key, contrast_key, value, lengths, d_out.astype(query.dtype), log_sums, deltas,
        jnp.broadcast_to(gamma, (query.shape[0], *gamma.shape)),
    )  # fmt: skip
    d_query = d_query.sum(1).transpose(0, 2, 1, 3).astype(query.dtype)
    d_gamma = -deltas[:, 1].sum((0, 2)) if call.contrast else jnp.zeros_like(gamma)
    return d_query, d_key, d_contrast, d_value, d_gamma, None, None


_compress.defvjp(_compress_forward, _compress_backward)


def _constants(call: _CompressCall, query: Array, key: Array, tile: HistoryTile) -> dict[str, Any]:
    batch, tokens, heads, head_dim = query.shape
    splits, segment = split(key.shape[1], batch * heads, tile.block_k, tile.resident)
    return {
        "M": tokens,
        "S": key.shape[1],
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


@functools.lru_cache(maxsize=64)
def _run_forward(call: _CompressCall):
    from pallas_kernels.triton.compress import forward

    attentions = 2 if call.contrast else 1

    def run(query, key, contrast_key, value, lengths):
        batch, tokens, heads, head_dim = query.shape
        tile = choose_tiles(query).forward
        constants = _constants(call, query, key, tile)
        rows = jax.ShapeDtypeStruct((attentions, constants["SPLITS"], batch, heads, tokens), jnp.float32)
        totals, tops, sums = bridge.launch(
            forward.compress_forward,
            (query, key, contrast_key, value, lengths),
            (jax.ShapeDtypeStruct((*rows.shape, head_dim), jnp.float32), rows, rows),
            (constants["SPLITS"], heads, batch),
            constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return tuple(jnp.moveaxis(x, 2, 0) for x in (totals, tops, sums))

    return bridge.fold_vmap(run)


@functools.lru_cache(maxsize=64)
def _run_backward(call: _CompressCall):
    from pallas_kernels.triton.compress import backward, tiled_backward

    def run(query, key, contrast_key, value, lengths, d_out, log_sums, deltas, gamma):
        batch, tokens, heads, head_dim = query.shape
        tile = choose_tiles(query).backward
        constants = _constants(call, query, key, tile)
        statistics = (jnp.moveaxis(x, 1, 0) for x in (log_sums, deltas))
        arrays = (query, key, contrast_key, value, lengths, d_out, *statistics, gamma)
        parts = jax.ShapeDtypeStruct((constants["SPLITS"], batch, heads, tokens, head_dim), jnp.float32)
        history = jax.ShapeDtypeStruct(key.shape, key.dtype)
        unused = jax.ShapeDtypeStruct((batch, 1), key.dtype)
        gradients = (history, history if call.contrast else unused, history)
        launch = functools.partial(bridge.launch, num_warps=tile.num_warps, num_stages=tile.num_stages)
        if takes_tiled_backward(query):
            (d_query,) = launch(
                tiled_backward.compress_token_gradient,
                arrays, (parts,), (constants["SPLITS"], heads, batch), constants,
            )  # fmt: skip
            by_block = {name: x for name, x in constants.items() if name not in ("SPLITS", "SEGMENT")}
            by_block["BM"] = min(_TILED_TOKENS, constants["BM"])
            blocks = -(-key.shape[1] // tile.block_k)
            d_key, d_contrast, d_value = launch(
                tiled_backward.compress_history_gradient, arrays, gradients, (blocks, heads, batch), by_block
            )
        else:
            if head_dim > 64 and not bridge.interprets():
                constants["BM"] = MOST_TOKENS  # the kernel spills with 64 rows, but not with 128
            full = key.shape[1] % constants["SEGMENT"] == 0 and constants["HP"] == head_dim
            constants["EVEN"] = call.every_key and full
            d_query, d_key, d_contrast, d_value = launch(
                backward.compress_gradient,
                arrays, (parts, *gradients), (constants["SPLITS"], heads, batch), constants,
            )  # fmt: skip
        if not call.contrast:
            d_contrast = jnp.zeros_like(contrast_key)
        return jnp.moveaxis(d_query, 1, 0), d_key, d_contrast, d_value

    return bridge.fold_vmap(run)
