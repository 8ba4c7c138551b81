"""`compress` for all blocks of a long sequence at once: BRL-Attention with memory per layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from brl_jax.attention.compressed import gpu, tpu, xla, xla_blocks
from brl_jax.attention.compressed.compress import (
    check_compress_scale,
    check_readers,
    compress,
    compress_weights,
    difference,
    per_head,
)
from brl_jax.attention.compressed.xla_blocks import block_windows
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import Form
from brl_jax.attention.core.checks import check_within, require
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation, dispatch
from brl_jax.attention.core.on_mesh import rows_and_heads
from brl_jax.attention.core.scores import Score
from brl_jax.fields import Count


@divided(rows_and_heads)
def compress_blocks(
    query: Float[Array, "B C M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N V"],
    *,
    gamma: Float[Array, "N"] | float | None,
    block_size: Count,
    history_size: Count,
    history_lengths: Int[Array, "C"] | Int[Array, "B C"] | None = None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#N #M #R"] | PositionBias | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B C M N V"]:
    """`compress` for C consecutive blocks at once, each of which reads the history before it.

    (B, C, M, N, H), (B, S, N, H) x 2, (B, S, N, V) -> (B, C, M, N, V)::

        out = compress_blocks(
            query, key, contrast_key, value, gamma=0.1, block_size=64, history_size=64
        )

    Block c reads the keys [c * block_size, c * block_size + history_size). Put the history of block 0 in front, and
    these are the history_size tokens before block c. The cost is linear in C.

    Args:
      query: (B, C, M, N, H), the compressed tokens of each block.
      key, contrast_key: (B, S, N, H) with S >= history_size + (C - 1) * block_size.
      value: (B, S, N, V).
      gamma, scale, score, implementation: as in `compress`.
      block_size, history_size: in tokens, at least 1.
      history_lengths: (C,) or (B, C), how many of each block's history_size keys exist, counted from the end; all by
        default. A block without history gives 0.
      bias: (N, M, history_size), or a `PositionBias` called with 0..M-1 and 0..history_size-1.

    Returns:
      (B, C, M, N, V) in query's dtype.

    Raises:
      ValueError, NotImplementedError: as `compress`.
    """
    require(query.ndim == 5, f"query must have shape (B, blocks, M, N, H), got {query.shape}")
    batch, blocks = query.shape[:2]
    of_a_block = jax.ShapeDtypeStruct((batch, *query.shape[2:]), query.dtype)
    check_readers(of_a_block, key, contrast_key, value, gamma, score)
    needed = history_size + (blocks - 1) * block_size
    require(
        key.shape[1] >= needed,
        f"key must hold history_size + (blocks - 1) * block_size = {needed} tokens, got {key.shape[1]}",
    )

    if history_lengths is not None:
        history_lengths = jnp.atleast_2d(jnp.asarray(history_lengths))
        require(
            history_lengths.shape in ((1, blocks), (batch, blocks))
            and jnp.issubdtype(history_lengths.dtype, jnp.integer),
            f"history_lengths must be ints of shape ({blocks},) or {(batch, blocks)}, got {history_lengths.dtype} "
            f"of shape {history_lengths.shape}",
        )
        check_within("history_lengths", history_lengths, history_size)
        history_lengths = history_lengths.astype(jnp.int32)  # an int8 could not index the history
    if gamma is not None:
        gamma = per_head(gamma, query)
    scale = check_compress_scale(scale, query)
    if isinstance(bias, PositionBias):
        bias = bias(jnp.arange(query.shape[2]), jnp.arange(history_size))
    if bias is not None:
        full = (query.shape[3], query.shape[2], history_size)
        require(
            getattr(bias, "ndim", None) == 3
            and all(size in (1, most) for size, most in zip(bias.shape, full)),
            f"bias must have shape (N, M, history_size) = {full}, got "
            f"{getattr(bias, 'shape', type(bias).__name__)}",
        )
    operands = (query, key, contrast_key, value, gamma, bias, history_lengths)
    static = {"block_size": block_size, "history_size": history_size, "scale": scale, "score": score}
    return _choose_blocks(*operands, **static, implementation=implementation)


def compress_blocks_weights(
    query: Float[Array, "B C M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    *,
    gamma: Float[Array, "N"] | float | None,
    block_size: int,
    history_size: int,
    history_lengths: Int[Array, "C"] | Int[Array, "B C"] | None = None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "N M R"] | None = None,
) -> Float[Array, "B C N M R"]:
    """The weights S1 - gamma S2 that `compress_blocks` gives to the values, (B, C, N, M, R), for inspection.

    R is history_size, and key r of block c is key c * block_size + r of the S keys. Arguments as for `compress_blocks`.
    All logits exist at once.
    """
    rows = _as_rows(query, key, contrast_key, bias, history_lengths, block_size, history_size)
    weights = compress_weights(**rows, gamma=gamma, scale=scale, score=score)
    return rearrange(weights, "(b c) n m r -> b c n m r", b=query.shape[0])


def _as_rows(
    query, key, contrast_key, bias, lengths, block_size: int, history_size: int, **values: Array
) -> dict[str, Any]:
    """The arguments of `compress` with each block and its history as a separate row of the batch; so is each of the
    values."""
    batch, blocks = query.shape[:2]
    windows = functools.partial(
        block_windows, blocks=blocks, block_size=block_size, history_size=history_size
    )
    return {
        "query": rearrange(query, "b c m n h -> (b c) m n h"),
        "key": windows(key),
        "contrast_key": None if contrast_key is None else windows(contrast_key),
        **{name: windows(x) for name, x in values.items()},
        "bias": None if bias is None else bias[None],
        "mask": _history_mask(lengths, batch, blocks, history_size),
    }


def _history_mask(lengths, batch, blocks, history_size):
    """Which keys of each block's history exist, (B C, 1, 1, history_size), or None for all."""
    if lengths is None:
        return None
    lengths = jnp.broadcast_to(lengths, (batch, blocks))
    mask = jnp.arange(history_size)[None] >= history_size - lengths.reshape(batch * blocks, 1)
    return mask[:, None, None, :]


@functools.partial(
    jax.jit, static_argnames=("block_size", "history_size", "scale", "score", "implementation")
)
def _choose_blocks(query, key, contrast_key, value, gamma, bias, lengths, *, implementation, **static):
    operands = (query, key, contrast_key, value, gamma, bias, lengths)
    backends = {
        "tpu": [tpu.compress_blocks_backend(**static)],
        "cuda": [gpu.compress_blocks_backend(**static)],
    }
    at_once = _groups(True, **static)
    forms = {"default": _groups(False, **static), "cuda": at_once, "rocm": at_once}
    return dispatch(
        "compress_blocks",
        implementation,
        backends,
        functools.partial(_compress_windows, **static),
        *operands,
        forms=forms,
        results=jax.ShapeDtypeStruct((*query.shape[:4], value.shape[3]), query.dtype),
        kept=xla.kept_shapes(query, value, gamma is not None, static["score"]),
    )


def _groups(all_at_once: bool, **static: Any) -> Form:
    """The form that keeps the outputs and log-sum-exps of both attentions."""

    def prepared(query, key, contrast_key, value, gamma, bias, lengths):
        keys = (key,) if contrast_key is None else (key, contrast_key)
        bias = None if bias is None else bias[None]
        lengths = None if lengths is None else jnp.broadcast_to(lengths, query.shape[:2])
        x = xla_blocks.Operands(query, keys, value, bias, lengths)
        return x, xla_blocks.form(x, all_at_once=all_at_once, **static)

    def run(*operands):
        x, form = prepared(*operands)
        outs, log_sums = form.forward(x)
        return difference(outs, operands[4], x.query.dtype), (outs, log_sums)

    def gradient(operands, result, kept, d_out):
        x, form = prepared(*operands)
        gamma = operands[4]
        outs, log_sums = kept
        _, pull = jax.vjp(lambda outs, gamma: difference(outs, gamma, x.query.dtype), outs, gamma)
        d_outs, d_gamma = pull(d_out)
        d = form.backward(x, outs, log_sums, d_outs)
        d_key, d_contrast_key = (*d.keys, None)[:2]
        return d.query, d_key, d_contrast_key, d.value, d_gamma, None if d.bias is None else d.bias[0], None

    return Form(run, gradient)


def _compress_windows(
    query, key, contrast_key, value, gamma, bias, lengths, *, block_size, history_size, scale, score
):
    """The same, with each block's history as a separate row of the batch: JAX differentiates it in every mode."""
    rows = _as_rows(query, key, contrast_key, bias, lengths, block_size, history_size, value=value)
    out = compress(**rows, gamma=gamma, scale=scale, score=score, implementation="xla")
    return rearrange(out, "(b c) m n h -> b c m n h", b=query.shape[0])
